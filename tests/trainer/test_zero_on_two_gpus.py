"""DDP, ZeRO-0 and ZeRO-3 over two GPUs through NCCL, against one process on the CPU.

python -m pytest -m gpu tests/trainer/test_zero_on_two_gpus.py
"""

import pytest
import torch

from . import test_streaming_loss_trainer as streaming
from . import test_two_ranks as eagle3
from .ranks import run_two_ranks


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def test_streaming_loss_trainer_equals_stock(tmp_path):
    results = run_two_ranks("streaming_two_ranks", tmp_path, gpus=True)
    streaming.assert_equal_stock_in_one_process(results, tmp_path, 1e-5, 1e-5)


def test_eagle3_trainer_equals_one_process(tmp_path):
    results = run_two_ranks("two_ranks", tmp_path, gpus=True)
    eagle3.assert_equal_one_process(results, tmp_path, 1e-5, 2e-5)


@pytest.mark.parametrize("script", ["streaming_two_ranks", "two_ranks"])
def test_bf16_weights_are_the_same_at_either_stage(tmp_path, script):
    """Within bf16's rounding: DeepSpeed keeps the weights of the model itself in bf16."""
    results = run_two_ranks(script, tmp_path, gpus=True, bf16=True)
    for mode, case in results:
        if mode == "zero0":
            whole, partitioned = results[mode, case], results["zero3", case]
            losses = [[*result["loss"], result["metrics"]["eval_loss"]] for result in (whole, partitioned)]
            assert losses[1] == pytest.approx(losses[0], rel=2e-3)
            for name, value in whole["weights"].items():
                assert value.dtype == torch.bfloat16
                torch.testing.assert_close(partitioned["weights"][name], value, rtol=2**-7, atol=2e-3, msg=name)

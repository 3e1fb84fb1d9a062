"""Two processes, as DDP and with ZeRO, equal one, also where one of them has no supervised row."""

import pytest

from .common import assert_equal_weights, logged, weights_of
from .ranks import MODES, run_two_ranks
from .two_ranks import CASES, make_case_trainer


def assert_equal_one_process(results, output_dir, tolerance, weight_tolerance):
    for case in CASES:
        one = make_case_trainer(output_dir, case, per_device_train_batch_size=2)
        one.train()
        metrics = one.evaluate()
        for mode in MODES:
            two = results[mode, case]
            assert two["loss"] == pytest.approx(logged(one, "loss"), rel=tolerance)
            for name in ("eval_loss", "eval_acceptance_length"):
                assert two["metrics"][name] == pytest.approx(metrics[name], rel=tolerance)
            assert_equal_weights(two["weights"], weights_of(one), weight_tolerance)
            assert (two["head_numel"] == 0) == (mode == "zero3")  # empty outside its forward


def test_two_ranks_equal_one_process(tmp_path):
    assert_equal_one_process(run_two_ranks("two_ranks", tmp_path), tmp_path, 1e-6, 2e-5)

"""`scripts/train.py` under each launcher, with the configs that ship: two processes make the head that one makes."""

import json
import socket
import sys

import pytest
import torch
from safetensors.torch import load_file

from draftsmith import Eagle3DraftModel
from draftsmith.commands import train
from tests.data.common import CHATML, build_tokenizer

from .common import assert_equal_weights, make_rows, make_target
from .ranks import ROOT, TORCHRUN, launch


def free_port() -> str:
    with socket.socket() as server:
        server.bind(("", 0))
        return str(server.getsockname()[1])


def torchrun() -> list[str]:
    return [*TORCHRUN, "-m", "tests.trainer.train_script", "--deepspeed", "configs/deepspeed/zero1.json"]


def torchrun_sharded_target() -> list[str]:
    return [*TORCHRUN, "-m", "tests.trainer.train_script", "--target_tp", "2"]


def deepspeed() -> list[str]:
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus=2", f"--master_port={free_port()}"]
    return [*launcher, "--module", "tests.trainer.train_script", "--deepspeed", "configs/deepspeed/zero2.json"]


def accelerate() -> list[str]:
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file=configs/accelerate/zero3.yaml"]
    return [*launcher, "--num_processes=2", f"--main_process_port={free_port()}", "-m", "tests.trainer.train_script"]


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    """Flags of a run of two batches per step, and the weights of the head that one process makes of them."""
    directory = tmp_path_factory.mktemp("launchers")
    target = make_target()
    target.save_pretrained(directory / "target")
    # A start that is the same in every process, whatever its random numbers were used for before.
    Eagle3DraftModel.from_target(target, d2t=torch.arange(40)).save_pretrained(directory / "start")
    build_tokenizer(CHATML).save_pretrained(directory / "target")
    rows = make_rows([30, 41, 12, 25, 50, 9], supervised=[20, 33, 0, 7, 2, 6])
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "train.yaml").write_text(
        f"target: {directory / 'target'}\ndataset: [{directory / 'rows.jsonl'}]\ncache_dir: {directory / 'cache'}\n"
        f"draft: {directory / 'start'}\nttt_steps: 3\nmax_steps: 2\nlearning_rate: 1e-2\nadam_epsilon: 1e-3\n"
        "warmup_steps: 0\nmax_grad_norm: 0.3\nsave_strategy: 'no'\nreport_to: none\ndisable_tqdm: true\n"
    )
    flags = ["--config", str(directory / "train.yaml"), "--per_device_train_batch_size"]
    train.main([*flags, "2", "--use_cpu", "true", "--output_dir", str(directory / "one")])
    return [*flags, "1"], load_file(directory / "one" / "model.safetensors")


@pytest.mark.parametrize("launcher", [torchrun, torchrun_sharded_target, deepspeed, accelerate])
def test_launchers_train_the_head_of_one_process(tmp_path, setup, launcher):
    flags, truth = setup
    launch([*launcher(), *flags, "--output_dir", str(tmp_path)])
    assert_equal_weights(load_file(tmp_path / "model.safetensors"), truth, 1e-5)
    head = Eagle3DraftModel.from_pretrained(tmp_path, target=make_target())
    assert head.d2t.dtype == torch.int64 and head.t2d.dtype == torch.bool
    assert torch.equal(torch.nonzero(head.t2d)[:, 0], torch.arange(0, 80, 2))


@pytest.mark.parametrize("path", sorted((ROOT / "configs/deepspeed").glob("*.json")), ids=lambda path: path.stem)
def test_deepspeed_configs_leave_to_the_trainer_what_is_its_own(path):
    config = json.loads(path.read_text())
    own = ("gradient_clipping", "gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu")
    assert {config[name] for name in own} | {config["bf16"]["enabled"]} == {"auto"}
    assert path.stem.startswith(f"zero{config['zero_optimization']['stage']}")
    assert ("offload_optimizer" in config["zero_optimization"]) == path.stem.endswith("_offload")

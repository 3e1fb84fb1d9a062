"""Two processes equal one: training with 1 and 60 supervised rows, and evaluation of three uneven rows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .common import assert_equal_weights


ROOT = Path(__file__).parents[2]


def run(output_dir, ranks, batch_size):
    output_dir.mkdir()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*launcher, "-m", "tests.trainer.two_ranks", str(output_dir), str(batch_size)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(output_dir / "result.pt")


def test_two_ranks_equal_one_process(tmp_path):
    one = run(tmp_path / "one", ranks=1, batch_size=2)
    two = run(tmp_path / "two", ranks=2, batch_size=1)
    assert_equal_weights(two["weights"], one["weights"])
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert two["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-6)
    assert two["length"] == pytest.approx(one["length"])

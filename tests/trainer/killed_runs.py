"""Run by tests in a process of its own: runs that are killed while they save, resumed, and compared with a whole one.

It imports once and forks for every run: a fresh interpreter for each would spend its time importing.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import transformers.modeling_utils
from transformers.utils import logging

from draftsmith.trainer.checkpoints import last_whole_checkpoint

from .common import SAVING, make_rows, make_trainer, weights_of


OPTIONS = {"max_steps": 4, "save_total_limit": 2, **SAVING}


def train(directory: Path) -> None:
    """Start, or go on from the last whole checkpoint, and write the final weights beside the output directory."""
    trainer = make_trainer(directory, make_rows([5, 40, 9, 17, 30, 3, 22, 12]), **OPTIONS)
    trainer.train(resume_from_checkpoint=last_whole_checkpoint(directory))
    torch.save(weights_of(trainer), directory.with_suffix(".pt"))


class FileOperations:
    """Counts what a process does to files below `directory`; at number `kill_at` the process kills itself."""

    def __init__(self, directory: Path, kill_at: int | None):
        self.directory, self.kill_at, self.seen = str(directory), kill_at, []
        sys.addaudithook(self._hear)
        torch.save = self._in_halves(torch.save)
        transformers.modeling_utils.safe_save_file = self._in_halves(transformers.modeling_utils.safe_save_file)

    def _hear(self, event: str, arguments: tuple) -> None:
        is_write = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if not is_write and event not in ("os.rename", "os.remove", "os.rmdir", "os.mkdir"):
            return
        path = str(arguments[0])
        if self.directory in path or (event in ("os.remove", "os.rmdir") and arguments[1] != -1):  # within `rmtree`
            self._count(f"{event} {os.path.basename(path)}")

    def _in_halves(self, save):
        """Both are written by compiled code, which raises no audit events."""

        def save_in_halves(content, path, *args, **kwargs):
            if self.directory not in str(path):
                return save(content, path, *args, **kwargs)
            self._count(f"begin {os.path.basename(path)}")
            save(content, path, *args, **kwargs)
            self._count(f"half {os.path.basename(path)}", half=path)

        return save_in_halves

    def _count(self, name: str, half=None) -> None:
        self.seen.append(name)
        if len(self.seen) == self.kill_at:
            if half is not None:
                os.truncate(half, os.path.getsize(half) // 2)
            os.kill(os.getpid(), signal.SIGKILL)


def fork(work, *arguments) -> int:
    if pid := os.fork():
        return pid
    status = 1
    try:
        work(*arguments)
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def count_operations(directory: Path, report: Path) -> None:
    operations = FileOperations(directory, None)
    train(directory)
    report.write_text(json.dumps(operations.seen))


def train_until(directory: Path, kill_at: int) -> None:
    FileOperations(directory, kill_at)
    train(directory)


def has_weights_of(directory: Path, truth: dict) -> bool:
    weights = torch.load(directory.with_suffix(".pt"))
    return weights.keys() == truth.keys() and all(torch.equal(weights[name], truth[name]) for name in truth)


def kill_at_operations(root: Path, points: int | None) -> list[dict]:
    """One entry per point of the save: the operation before which the process died, and how the restart ended."""
    assert wait(fork(count_operations, root / "whole", root / "operations.json")) == 0
    truth, names = torch.load(root / "whole.pt"), json.loads((root / "operations.json").read_text())
    chosen = range(1, len(names) + 1)
    if points is not None:  # spread over the two saves that also rotate
        chosen = chosen[-round(len(chosen) / 2) :: max(1, round(len(chosen) / 2 / points))]
    results = []
    for point in chosen:
        directory = root / f"killed-{point}"
        killed = wait(fork(train_until, directory, point))
        whole = last_whole_checkpoint(directory)
        restarted = wait(fork(train, directory))
        results.append({
            "operation": names[point - 1],
            "killed": killed,
            "checkpoint": whole and Path(whole).name,
            "restarted": restarted,
            "equal": restarted == 0 and has_weights_of(directory, truth),
            "left": sorted(path.name for path in directory.iterdir()),
        })  # fmt: skip
    return results


def kill_at_random(root: Path, kills: int) -> dict:
    """Runs are killed at random moments and restarted until `kills` have died; those that end are compared."""
    began = time.monotonic()
    assert wait(fork(train, root / "whole")) == 0
    duration, truth = time.monotonic() - began, torch.load(root / "whole.pt")
    generator, died, ended, steps = random.Random(0), 0, [], []
    while died < kills or not ended:
        directory = root / f"run-{len(ended)}"
        pid = fork(train, directory)
        if died < kills:
            time.sleep(generator.uniform(0.3, 1.0) * duration)
            os.kill(pid, signal.SIGKILL)
        status = wait(pid)
        died += status == -signal.SIGKILL
        steps.append(last_whole_checkpoint(directory) is not None)
        if status == 0:
            ended.append(has_weights_of(directory, truth))
        else:
            assert status == -signal.SIGKILL
    return {"died": died, "ended": ended, "with a checkpoint": sum(steps)}


def main(root: str, mode: str, number: str) -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    if mode == "random":
        result = kill_at_random(Path(root), int(number))
    else:
        result = kill_at_operations(Path(root), None if number == "all" else int(number))
    (Path(root) / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])

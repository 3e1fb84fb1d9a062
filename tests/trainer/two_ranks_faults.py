"""Run under torchrun by tests: faults of one rank of two, as DDP and under ZeRO."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from transformers import TrainerCallback

from draftsmith.commands import leave_together
from draftsmith.trainer.checkpoints import last_whole_checkpoint

from .common import logged, make_rows, make_trainer, weights_of
from .ranks import launch_options, save_results


OPTIONS = {"max_steps": 5, "per_device_train_batch_size": 1, "save_strategy": "steps", "save_steps": 5}


class SignalTo(TrainerCallback):
    def __init__(self, rank: str, step: int):
        self.rank, self.step = rank, step

    def on_step_begin(self, args, state, control, **kwargs):
        if os.environ["RANK"] == self.rank and state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


class Slow(TrainerCallback):
    """Says when the first step is done, and leaves time for signals after each."""

    def __init__(self, started: Path):
        self.started = started

    def on_step_end(self, args, state, control, **kwargs):
        self.started.touch()
        time.sleep(0.3)


class WeightsOfSteps(TrainerCallback):
    """The whole weights after every step, and NaN states from the target on one rank at one step."""

    def __init__(self, step: int):
        self.step, self.seen = step, []

    def watch(self, trainer):
        self.trainer, states = trainer, trainer._states

        def broken_states(inputs, *, keep):
            aux, teacher = states(inputs, keep=keep)
            if os.environ["RANK"] == "1" and trainer.state.global_step == self.step:
                aux[:] = torch.nan
            return aux, teacher

        trainer._states = broken_states

    def on_step_end(self, args, state, control, **kwargs):
        weights = self.trainer.accelerator.get_state_dict(self.trainer.model_wrapped)
        self.seen.append({name: value.clone() for name, value in (weights or {}).items() if name.endswith("weight")})


def nan_on_one_rank(output_dir: str, options: dict) -> dict:
    watcher = WeightsOfSteps(step=1)
    rows = make_rows([30, 30, 20, 20, 25, 25])
    trainer = make_trainer(output_dir, rows, callbacks=[watcher], **{**OPTIONS, "max_steps": 3}, **options)
    watcher.watch(trainer)
    trainer.train()
    return {"weights": watcher.seen, "nan_steps": logged(trainer, "nan_steps"), "loss": logged(trainer, "loss")}


def signal_to_one_rank(output_dir: str, options: dict) -> dict:
    rows = make_rows([30, 31, 20, 21, 25, 26])
    whole = make_trainer(f"{output_dir}/whole", rows, **OPTIONS, **options)
    whole.train()
    part = make_trainer(f"{output_dir}/part", rows, callbacks=[SignalTo("1", 2)], **OPTIONS, **options)
    part.train()
    resumed = make_trainer(f"{output_dir}/part", rows, **OPTIONS, **options)
    resumed.train(resume_from_checkpoint=True)
    return {
        "stopped": (part.stopped_by.name, part.state.global_step),
        "equal": all(torch.equal(value, weights_of(whole)[name]) for name, value in weights_of(resumed).items()),
    }


def run_until_signal(output_dir: str) -> None:
    """A run long enough to be signalled from outside; the exit status is `draftsmith train`'s."""
    callbacks = [Slow(Path(output_dir, "started"))]
    rows = make_rows([9, 12])
    trainer = make_trainer(f"{output_dir}/run", rows, callbacks=callbacks, use_cpu=True, max_steps=500)
    trainer.train(resume_from_checkpoint=last_whole_checkpoint(trainer.args.output_dir))
    sys.exit(128 + trainer.stopped_by if trainer.stopped_by else 0)


def main(output_dir: str) -> None:
    if Path(output_dir, "until-signal").exists():
        run_until_signal(output_dir)
    results = {}
    for mode in ("ddp", "zero0", "zero3"):  # each skips in its own way; ZeRO 1 and 2 do it as 3 does
        with launch_options(mode) as options:
            results["nan", mode] = nan_on_one_rank(output_dir, options)
    for mode in ("ddp", "zero3"):
        with launch_options(mode) as options:
            results["signal", mode] = signal_to_one_rank(f"{output_dir}/{mode}", options)
    save_results(results, output_dir)


if __name__ == "__main__":
    main(sys.argv[1])
    leave_together()

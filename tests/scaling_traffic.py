"""Run under torchrun by `test_scaling_model`: the elements that DeepSpeed's collectives go over in a training step."""

import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist


sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from benchmarks import scaling_rank


KINDS = {"all_reduce": "AllReduce", "reduce_scatter_tensor": "ReduceScatter", "all_gather_into_tensor": "AllGather"}
counted: Counter = Counter()
training_options = scaling_rank.training_options


def count(name: str) -> None:
    function = getattr(dist, name)

    def counting(*args, **kwargs):
        elements = max(value.numel() for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        if elements > 1:  # no flag or norm
            counted[KINDS[name]] += elements
        return function(*args, **kwargs)

    setattr(dist, name, counting)
    setattr(dist.distributed_c10d, name, counting)


class Counts(scaling_rank.Meter):
    """Of the last of the profiled steps, in which ZeRO-3 knows the order of the modules."""

    def on_step_end(self, args, state, control, **kwargs):
        super().on_step_end(args, state, control, **kwargs)
        if state.global_step < self.steps:
            counted.clear()
        else:
            self.counted = dict(counted)

    def figures(self):
        return {**super().figures(), "counted": self.counted}


@contextmanager
def two_micro_batches(mode: str, dry_run: bool):
    with training_options(mode, dry_run) as options:
        yield {**options, "gradient_accumulation_steps": 2}


if __name__ == "__main__":
    for name in KINDS:
        count(name)
    scaling_rank.Meter, scaling_rank.training_options = Counts, two_micro_batches
    cells = [("llama 8k", mode) for mode in ("zero1", "zero2", "zero3")]
    scaling_rank.main(scaling_rank.Plan(cells, sys.argv[1], dry_run=True, warmup=1, timed=1, profiled=1))

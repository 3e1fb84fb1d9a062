"""Many steps of random lengths and supervision: memory stays flat, nothing is compiled for ever, nothing turns NaN.

    python -m pytest -m gpu -s tests/trainer/test_soak_on_gpu.py

Compilations are those of Triton kernels and of torch.compile's graphs; FlashAttention 4's are not counted. The same
for a few steps on the CPU, where memory is what Python holds of tensors and nothing is compiled.
"""

import gc
import math
import time
from dataclasses import dataclass

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils.data import IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from draftsmith import Eagle3DraftModel, Eagle3Trainer, Eagle3TrainingArguments
from draftsmith.transformers_hooks import ATTENTION_NAME
from tests.ops.test_attention_on_gpu import compilations

from .common import logged


ROWS = 2  # of a batch, so that the shorter one is padded
UNSUPERVISED_SHARE = 0.1  # of the steps
EDGES = (1, 2, 3, 15, 16, 17)  # lengths that a kernel may be compiled for on their own
MAX_LEAK = 64 * 1024  # bytes between probes: less than one tensor a step, which takes 512 of the allocator
MAX_HOST_GROWTH = 256 * 2**20


@dataclass(frozen=True)
class Soak:
    """Every `window` steps hold the longest batch, and end with the same one, at which memory is compared."""

    device: str
    longest: int
    steps: int
    window: int
    late_compilations: int  # allowed after the second window
    sizes: dict[str, int]
    draft_vocabulary: int
    ttt_steps: int


CPU = Soak("cpu", 64, 90, 30, 0, {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48}, 40, 3)
GPU = Soak("cuda", 8192, 500, 100, 8, {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816}, 8000, 4)


class RandomRows(IterableDataset):
    """Rows of documents of random lengths, in the order of the steps."""

    def __init__(self, soak: Soak):
        self.soak = soak

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        probe = [self.row(length, generator) for length in (self.soak.longest // 2 + 1, self.soak.longest // 3)]
        for step in range(1, self.soak.steps + 1):
            place = step % self.soak.window
            yield from probe if place == 0 else self.batch(place, generator)

    def batch(self, place, generator):
        """The longest one first in a window, then the shortest ones, then any."""
        if place == 1:
            ids = [_random(self.soak.sizes["vocab_size"], self.soak.longest, generator) for _ in range(ROWS)]
            return [{"input_ids": row, "loss_mask": torch.ones_like(row)} for row in ids]
        if place < 2 + len(EDGES):
            return [self.row(EDGES[place - 2], generator) for _ in range(ROWS)]
        silent = torch.rand((), generator=generator) < UNSUPERVISED_SHARE
        rows = [self.row(int(_random(self.soak.longest, 1, generator)) + 1, generator) for _ in range(ROWS)]
        return [{**row, "loss_mask": torch.zeros_like(row["input_ids"])} for row in rows] if silent else rows

    def row(self, length, generator):
        """Whole, unsupervised, or supervised in turns; one document, or up to eight."""
        kind, parts = _random(4, 1, generator), int(_random(8, 1, generator))
        ends = [*sorted({*(_random(length, parts, generator) + 1).tolist(), length})]
        turns = (torch.rand(length, generator=generator) < 8 / length).cumsum(0) % 2
        return {
            "input_ids": _random(self.soak.sizes["vocab_size"], length, generator),
            "loss_mask": (torch.zeros_like(turns), torch.ones_like(turns), turns, 1 - turns)[kind],
            "document_lengths": [end - start for start, end in zip([0, *ends], ends, strict=False)],
        }


def _random(size, count, generator):
    return torch.randint(size, (count,), generator=generator)


class Watch(TrainerCallback):
    """Memory and compilations at the end of every window."""

    def __init__(self, soak: Soak, kernels: list[str]):
        self.soak, self.kernels, self.samples = soak, kernels, []
        self.started = time.monotonic()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.soak.window:
            return
        gc.collect()
        sample = {
            "step": state.global_step,
            "seconds": time.monotonic() - self.started,
            "compilations": len(self.kernels) + counters["stats"]["unique_graphs"],
            "host": _resident_bytes(),
            **_device_bytes(self.soak.device),
        }
        self.samples.append(sample)
        print(", ".join(f"{name} {value:,.0f}" for name, value in sample.items()), flush=True)


def _device_bytes(device):
    if device == "cpu":
        # Of these two types alone: what torch.compile keeps of other tests has no size.
        tensors = [item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter)]
        return {"allocated": sum(tensor.nbytes for tensor in tensors), "peak": 0, "reserved": 0, "retries": 0}
    torch.cuda.synchronize()
    sample = {
        "allocated": torch.cuda.memory_allocated(),
        "peak": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
    }
    torch.cuda.reset_peak_memory_stats()
    return sample


def _resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def make_soak_trainer(soak: Soak, output_dir, watch: Watch):
    torch.manual_seed(0)
    heads = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = LlamaConfig(**soak.sizes, **heads, initializer_range=0.1, attn_implementation=ATTENTION_NAME)
    with torch.device(soak.device):
        target = LlamaForCausalLM(config).to(torch.bfloat16 if soak.device == "cuda" else torch.float32)
        draft = Eagle3DraftModel.from_target(target, d2t=torch.zeros(soak.draft_vocabulary, dtype=torch.int64))
    args = Eagle3TrainingArguments(
        str(output_dir),
        ttt_steps=soak.ttt_steps,
        per_device_train_batch_size=ROWS,
        max_steps=soak.steps,
        logging_steps=1,
        bf16=soak.device == "cuda",
        use_cpu=soak.device == "cpu",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return Eagle3Trainer(draft, target, args, train_dataset=RandomRows(soak), callbacks=[watch])


@pytest.mark.parametrize("soak", [CPU, pytest.param(GPU, marks=pytest.mark.gpu)], ids=["short", "long"])
def test_soak(soak, tmp_path):
    with compilations() as kernels:
        watch = Watch(soak, kernels)
        trainer = make_soak_trainer(soak, tmp_path, watch)
        trainer.train()
    assert [sample["step"] for sample in watch.samples] == [*range(soak.window, soak.steps + 1, soak.window)]
    settled, later = watch.samples[1], watch.samples[2:]  # the very first step has no optimizer state yet
    for sample in later:
        assert sample["allocated"] - settled["allocated"] <= MAX_LEAK
        assert sample["peak"] <= 1.01 * settled["peak"]  # every window has the longest batch
        assert sample["reserved"] <= 1.25 * settled["reserved"]  # more fragments, within bounds
        assert sample["retries"] == 0
        assert sample["host"] - settled["host"] <= MAX_HOST_GROWTH
    late = later[-1]["compilations"] - settled["compilations"]
    assert late <= soak.late_compilations, (late, kernels[-late:])
    for name in ("loss", "grad_norm", "acceptance_length"):
        values = logged(trainer, name)
        assert len(values) == soak.steps and all(map(math.isfinite, values)), name
    assert not logged(trainer, "nan_steps")  # a loss that is not finite is logged as 0
    empty = [step for step, loss in enumerate(logged(trainer, "loss")) if loss == 0]
    assert soak.steps * UNSUPERVISED_SHARE / 2 < len(empty) < soak.steps / 2
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())

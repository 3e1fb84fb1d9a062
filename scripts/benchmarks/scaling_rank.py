"""What every rank of `scaling` runs under torchrun: each case and mode in turn; the first rank writes the figures."""

import json
import logging
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import broadcast, gather_object
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from draftsmith import Eagle3DraftModel, Eagle3Trainer, Eagle3TrainingArguments
from draftsmith.target import load_target

from .common import GIB, ROOT, Refused, release_memory
from .scaling_meter import Meter
from .train_cases import Case, K
from .train_whole import Step


CONFIGS = {path.stem: path for path in sorted((ROOT / "configs" / "deepspeed").glob("*.json"))}
MODES = ("ddp", *CONFIGS)
DEFAULT_MODES = ("zero1", "zero2", "zero3")


@dataclass(frozen=True)
class ScalingCase(Case):
    """A whole step, of a target that `target_tp` ranks hold together."""

    whole: bool = True
    target_tp: int = 1


CASES = {
    case.name: case
    for case in (
        ScalingCase("llama 8k", "llama", 8 * K),
        ScalingCase("gpt-oss 8k, K 3, full", "gpt-oss", 8 * K, steps=3, draft_vocabulary=None),
        ScalingCase("llama 32k", "llama", 32 * K),
        ScalingCase("llama 8k, target_tp 2", "llama", 8 * K, target_tp=2),
    )
}
DEFAULT_CASES = tuple(CASES)[:2]
PATIENCE = 120  # seconds until a rank gives up waiting for the others


@dataclass(frozen=True)
class Plan:
    """One launch."""

    cells: list[tuple[str, str]]  # case and mode; those of a case share its target
    folder: str
    dry_run: bool
    warmup: int  # steps
    timed: int
    profiled: int

    @property
    def rows(self) -> Path:
        """Figures of the cells that are done, a line each."""
        return Path(self.folder) / "rows.jsonl"

    @property
    def log(self) -> Path:
        """What the ranks write to stderr."""
        return Path(self.folder) / "stderr.log"


def main(plan: Plan) -> None:
    if plan.dry_run:
        _compile_nothing()
    state = PartialState(cpu=plan.dry_run, timeout=timedelta(seconds=PATIENCE))
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    for name, cells in groupby(plan.cells, key=lambda cell: cell[0]):
        case = CASES[name].tiny() if plan.dry_run else CASES[name]
        started = time.monotonic()
        setup = Setup(case, state, torch.float32 if plan.dry_run else torch.bfloat16, Path(plan.folder) / "target")
        release_memory(state.device)
        _tell(f"{name}: target and draft vocabulary after {time.monotonic() - started:.0f} s{_held(state.device)}")
        for _, mode in cells:
            figures = measure(setup, mode, plan)
            release_memory(state.device)
            _tell(f"{name}, {mode}: done after {time.monotonic() - started:.0f} s{_held(state.device)}")
            if state.is_main_process:
                with plan.rows.open("a") as file:
                    file.write(json.dumps(figures) + "\n")
        del setup
        release_memory(state.device)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class Setup:
    """A case's target, and the draft vocabulary that it predicts; the same on every rank."""

    def __init__(self, case: ScalingCase, state: PartialState, dtype: torch.dtype, folder: Path):
        model = sharded_target(case, state, dtype, folder) if case.target_tp > 1 else None
        torch.manual_seed(0)
        step = Step(case, state.device, dtype, model)
        self.case, self.device, self.target = case, state.device, step.target
        self.tokens = step.batch.input_ids.unique().cpu()
        # Equal weights may still predict differently where two logits are close.
        self.d2t = None if step.draft.d2t is None else broadcast(step.draft.d2t)

    def make_draft(self) -> Eagle3DraftModel:
        torch.manual_seed(1)  # every mode starts from the same head
        with self.device:
            return Eagle3DraftModel.from_target(
                self.target.model, draft_vocab_size=self.case.draft_vocabulary, d2t=self.d2t
            )


def sharded_target(case: ScalingCase, state: PartialState, dtype: torch.dtype, folder: Path) -> PreTrainedModel:
    """This rank's part of random weights, which take the way of real ones: shards are made of a checkpoint."""
    if state.is_main_process:
        torch.manual_seed(0)
        with state.device:
            whole = AutoModelForCausalLM.from_config(case.target_config, dtype=dtype)
        whole.save_pretrained(folder)
        del whole
        release_memory(state.device)
    state.wait_for_everyone()
    return load_target(str(folder), tp_size=case.target_tp)


class Rows(Dataset):
    """Random rows of a case; the trainer deals different ones to the ranks."""

    def __init__(self, case: Case, tokens: Tensor, count: int):
        self.case, self.tokens, self.count = case, tokens, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        picked = torch.randint(len(self.tokens), (self.case.length,), generator=generator)
        return {"input_ids": self.tokens[picked], "loss_mask": self.case.loss_mask()}


def measure(setup: Setup, mode: str, plan: Plan) -> dict[str, Any]:
    """A training run. All ranks return the same figures."""
    case, world = setup.case, PartialState().num_processes
    with tempfile.TemporaryDirectory() as folder, training_options(mode, plan.dry_run) as options:
        meter = Meter(
            setup.device, Path(folder) / "trace.json", warmup=plan.warmup, timed=plan.timed, profiled=plan.profiled
        )
        unroll = {"ttt_steps": case.steps, "target_tp": case.target_tp}
        args = Eagle3TrainingArguments(folder, max_steps=meter.steps, **unroll, **options)
        rows = Rows(case, setup.tokens, world * meter.steps)
        trainer = Eagle3Trainer(setup.make_draft(), setup.target, args, train_dataset=rows, callbacks=[meter])
        loss = trainer.train().training_loss
        if mode in CONFIGS:
            trainer.model_wrapped.destroy()  # its hooks would keep the head alive
        ranks = gather_object([meter.figures()])
    if not math.isfinite(loss) or any("nan_steps" in entry for entry in trainer.state.log_history):
        raise Refused(f"the loss is {loss}, or steps were skipped: what was timed is not training")
    step_ms = max(rank["step_ms"] for rank in ranks)
    per_gpu = 1000 * case.length / step_ms
    return {
        **ranks[0],
        "step_ms": step_ms,
        "tokens_per_second": world * per_gpu,
        "tokens_per_second_per_gpu": per_gpu,
        **{name: [rank[name] for rank in ranks] for name in ("peak_gib", "reserved_gib")},
        "loss": loss,
    }


@contextmanager
def training_options(mode: str, dry_run: bool) -> Iterator[dict[str, Any]]:
    """For one of several runs in a process."""
    try:
        yield {
            "deepspeed": str(CONFIGS[mode]) if mode in CONFIGS else None,
            "per_device_train_batch_size": 1,
            "bf16": not dry_run,
            "use_cpu": dry_run,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "ddp_timeout": PATIENCE,
        }
    finally:
        AcceleratorState._reset_state()
        unset_hf_deepspeed_config()


def _compile_nothing() -> None:
    """Keep DeepSpeed from compiling its collectives for CPUs, which takes more than a minute."""
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False


def _held(device: torch.device) -> str:
    return f", {torch.cuda.memory_allocated(device) / GIB:.1f} GiB held" if device.type == "cuda" else ""


def _tell(text: str) -> None:
    if PartialState().is_main_process:
        print(f"  {text}", flush=True)


if __name__ == "__main__":
    main(Plan(**json.loads(sys.argv[1])))

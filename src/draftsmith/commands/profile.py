"""`draftsmith profile`: the heap of one draft step over program order, ours beside dense attention and dense logits.

    draftsmith profile --target meta-llama/Llama-3.1-8B-Instruct --draft_vocab_size 32000 --output heap.png

The step is the real one, forward and backward of the head that `draftsmith train` would make. Of the target only the
config is read: its states, its embedding and its output head are random, as is the head, so that it need not fit.
"""

import gc
import importlib.util
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor

from ..data import DraftCollator
from ..data.files import write_json
from ..models.eagle3 import Eagle3DraftConfig, Eagle3DraftModel
from ..ops.streaming_loss.reference import reference_draft_loss
from .arguments import DraftArguments, TargetArguments, check_output
from .heap import BACKWARD, Heap, attempt, draw, mark, marked, record, unit_of
from .parsing import parse, usage_errors


MOST_ROWS_ON_CPU = 1024  # the kernel ends a process that takes too much, with nothing to catch
PERIOD = 1024  # tokens that one turn of the user and one of the assistant take together


@dataclass
class ProfileArguments:
    """The step to profile, on this machine's GPU if it has one."""

    row_length: int = field(
        default=8192,
        metadata={
            "help": "Tokens of the row, one document. Of the target only the config is read: its states, embedding "
            "and output head are random, as is the head, so that nothing is downloaded and the target need not fit."
        },
    )
    supervised: float = field(default=1.0, metadata={"help": "Share of the tokens that is supervised, in turns."})
    ttt_steps: int = field(default=7, metadata={"help": "Training-time-test steps K."})
    draft_vocab_size: int | None = field(default=None, metadata={"help": "Default: the target's vocabulary."})
    gradient_checkpointing: bool = field(default=False, metadata={"help": "Recompute the unroll in backward."})
    dtype: Literal["bfloat16", "float16", "float32"] = field(
        default="bfloat16",
        metadata={"help": "Of the computation and of what the target gives; the head's weights are fp32."},
    )
    output: str = field(
        default="heap.png", metadata={"help": "The chart, a PNG; its figures go beside it, to the same name as JSON."}
    )

    def __post_init__(self) -> None:
        for name in ("row_length", "ttt_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}: pass at least 1.")
        if not 0 < self.supervised <= 1:
            raise ValueError(f"`supervised` is {self.supervised}: pass a share above 0, at most 1.")
        if Path(self.output).suffix != ".png":
            raise ValueError(f"`output` is {self.output}: the chart is a PNG, pass a name that ends in .png.")
        if importlib.util.find_spec("matplotlib") is None:
            raise ImportError("`output` is drawn by matplotlib, which is missing: pip install draftsmith[plot]")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Draw the chart, print the peaks, and return what is written beside the chart."""
    target_args, draft_args, args = parse((TargetArguments, DraftArguments, ProfileArguments), argv)
    output, device = Path(args.output), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with usage_errors():
        config = head_config(target_args, draft_args, args)
        if device.type == "cpu" and args.row_length > MOST_ROWS_ON_CPU:
            raise ValueError(
                f"`row_length` is {args.row_length}, and without a GPU dense attention over it would take the memory "
                f"of this machine: pass at most {MOST_ROWS_ON_CPU}."
            )
        make_room(output)
        step = make_step(config, args, device)
    with marked(step.draft, args.ttt_steps) as phases:
        heaps = {name: profile_contender(step, contender) for name, contender in CONTENDERS.items()}
    report = make_report(step, heaps, asdict(args) | {"target": target_args.target})
    machine = report["machine"]["device"]
    title = f"{Path(target_args.target).name}, {args.row_length:,} tokens, K = {args.ttt_steps}, on {machine}"
    draw(heaps, phases, f"One draft step: {title}", output)
    write_json(report, output.with_suffix(".json"))
    print(render(heaps, phases))
    print(f"{output} and {output.with_suffix('.json').name} written.")
    return report


def head_config(target_args: TargetArguments, draft_args: DraftArguments, args: ProfileArguments) -> Eagle3DraftConfig:
    """Of the head that `draftsmith train` would make."""
    for name in ("draft", "init_from_layer"):
        if getattr(draft_args, name) is not None:
            raise ValueError(f"`{name}` asks for weights, but these are random here: leave it out.")
    return draft_args.head_config(target_args.config(), args.draft_vocab_size)


def make_room(chart: Path) -> None:
    """Make the chart's directory, and raise unless it and its figures can be written there."""
    try:
        chart.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"`output`: the directory of {chart} cannot be made ({error.strerror}): name another."
        ) from error
    check_output("output", str(chart), (".json",))


@dataclass
class Step:
    """Forward and backward of a head whose weights are fp32, as the trainer runs them, from ready target states."""

    draft: Eagle3DraftModel
    inputs: dict[str, Any]  # of its forward
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.draft.device

    @property
    def held(self) -> int:
        """Bytes of weights and inputs, there before the step and after it."""
        embedding = self.draft._target_embedding or ()
        inputs = (value for value in self.inputs.values() if isinstance(value, Tensor))
        tensors = [*self.draft.parameters(), *self.draft.buffers(), *embedding, *inputs]
        return sum(tensor.nbytes for tensor in tensors)

    def run(self) -> float:
        """The loss. Gradients are left behind."""
        mark("fuse")
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            loss = self.draft(**self.inputs).loss
        mark(f"{BACKWARD}loss")
        loss.backward()
        return loss.item()

    def release(self) -> None:
        self.draft.zero_grad(set_to_none=True)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def make_step(config: Eagle3DraftConfig, args: ProfileArguments, device: torch.device) -> Step:
    torch.manual_seed(0)
    period = min(PERIOD, args.row_length)
    supervised = torch.arange(args.row_length) % period >= period - round(args.supervised * period)
    tokens = torch.randint(config.vocab_size, (args.row_length,))
    batch: dict[str, Any] = DraftCollator(args.ttt_steps)([{"input_ids": tokens, "loss_mask": supervised}])
    if not len(batch["row_sets"][0]):
        raise ValueError(
            f"`supervised` is {args.supervised}, which leaves a `row_length` of {args.row_length} no row to learn "
            "from: raise one of them."
        )
    dtype = getattr(torch, args.dtype)
    random = partial(torch.randn, device=device, dtype=dtype)
    width: int = config.target_hidden_size  # type: ignore[assignment]
    with device:
        draft = Eagle3DraftModel(config).train()
    if draft.get_input_embeddings() is None:
        draft.set_input_embeddings(random(config.vocab_size, config.hidden_size))
    if args.gradient_checkpointing:
        draft.gradient_checkpointing_enable({"use_reentrant": False})
    inputs = {
        **{name: batch[name].to(device) for name in ("input_ids", "document_ids", "position_ids")},
        "row_sets": batch["row_sets"],
        "aux_hidden_states": random(1, args.row_length, config.num_aux_hidden_states * width),
        "teacher_hidden_states": random(1, args.row_length, width),
        "teacher_head": random(config.vocab_size, width).mul_(width**-0.5),
        "ttt_steps": args.ttt_steps,
    }
    return Step(draft, inputs, dtype)


@contextmanager
def dense_logits(draft: Eagle3DraftModel) -> Iterator[None]:
    """The loss from all logits of the teacher and of every step at once."""

    def use_it(head: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {"loss": partial(reference_draft_loss, **kwargs["loss"].keywords)}

    with draft.lm_head.register_forward_pre_hook(use_it, with_kwargs=True):
        yield


@contextmanager
def dense_attention(draft: Eagle3DraftModel) -> Iterator[None]:
    """Transformers' eager attention, over all keys of all steps and a mask."""
    ours = draft.config._attn_implementation
    draft.set_attn_implementation("eager")
    try:
        yield
    finally:
        draft.set_attn_implementation(ours)


CONTENDERS: dict[str, Callable[[Eagle3DraftModel], AbstractContextManager]] = {
    "ours": nullcontext,
    "dense logits": dense_logits,
    "dense attention": dense_attention,
}


def profile_contender(step: Step, contender: Callable[[Eagle3DraftModel], AbstractContextManager]) -> Heap:
    with contender(step.draft):
        attempt(step.run)  # compiles, and allocates what libraries keep for good
        step.release()
        heap = record(step.run, step.device)
    step.release()
    return heap


def make_report(step: Step, heaps: dict[str, Heap], setup: dict[str, Any]) -> dict[str, Any]:
    config = step.draft.config
    sizes = (
        "vocab_size", "draft_vocab_size", "hidden_size", "target_hidden_size", "intermediate_size",
        "num_attention_heads", "num_key_value_heads", "head_dim",
    )  # fmt: skip
    is_cuda = step.device.type == "cuda"
    return {
        "machine": {
            "device": torch.cuda.get_device_name(step.device) if is_cuda else platform.machine(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "setup": setup,
        "shapes": {name: getattr(config, name) for name in sizes},
        "rows": [len(rows) for rows in step.inputs["row_sets"]],
        "held": step.held,
        "contenders": {
            name: {
                "peak": max(heap.peaks.values()),  # bytes over `held`, as are all below
                "peak_phase": max(heap.peaks, key=heap.peaks.__getitem__),
                "end": heap.end,
                "phases": heap.peaks,
                "failure": heap.failure,
                "failed_in": None if heap.failure is None else list(heap.phases)[-1],
            }
            for name, heap in heaps.items()
        },
    }


def render(heaps: dict[str, Heap], phases: list[str]) -> str:
    """Peaks by phase and contender."""
    unit, scale = unit_of(max(max(heap.peaks.values()) for heap in heaps.values()))
    lines = [f"{f'peak, {unit}':<20}" + "".join(f"{name:>18}" for name in heaps)]
    for phase in [*phases, "step"]:
        cells = []
        for heap in heaps.values():
            peaks = heap.peaks | {"step": max(heap.peaks.values())}
            failed = heap.failure is not None and phase in (list(heap.phases)[-1], "step")
            cells.append(f"{peaks[phase] / scale:.2f}{' failed' if failed else ''}" if phase in peaks else "-")
        lines.append(f"{phase:<20}" + "".join(f"{cell:>18}" for cell in cells))
    lines += [f"{name} ran out of memory: {heap.failure}" for name, heap in heaps.items() if heap.failure is not None]
    return "\n".join(lines)

"""`draftsmith plan`: what a training step needs of a GPU, before anything is loaded."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from .. import planning
from ..data.files import write_json
from ..models.eagle3 import Eagle3DraftConfig, Eagle3DraftModel
from ..ops import OBJECTIVES
from ..ops.streaming_loss.chunking import choose_chunk_size
from ..target import auto_class_of
from ..target_family import config_field
from .arguments import DraftArguments, TargetArguments, check_output
from .parsing import parse, usage_errors


QUANTISED_BYTES = {"mxfp4": 4.25 / 8, "fp8": 1.0, "gptq": 4.5 / 8, "awq": 4.5 / 8}  # per weight of a layer, scales too


@dataclass
class PlanArguments:
    """The step to plan."""

    row_length: int = field(default=8192, metadata={"help": "Tokens of a packed row."})
    per_device_train_batch_size: int = field(default=1, metadata={"help": "Rows of a micro-batch."})
    supervised: float = field(default=1.0, metadata={"help": "Share of the tokens that is supervised."})
    ttt_steps: int = field(default=7, metadata={"help": "Training-time-test steps K."})
    objective: str = field(default="kl", metadata={"help": "`ce` needs no teacher logits."})
    draft_vocab_size: int | None = field(default=None, metadata={"help": "Default: the target's vocabulary."})
    gradient_checkpointing: bool = field(default=False, metadata={"help": "Recompute the unroll in backward."})
    gpus: int = field(default=1, metadata={"help": "GPUs, one process each."})
    zero_stage: int = field(default=0, metadata={"help": "DeepSpeed ZeRO stage; 0: none."})
    offload_optimizer: bool = field(default=False, metadata={"help": "Optimizer states on the host (ZeRO)."})
    gpu_memory: float | None = field(default=None, metadata={"help": "GiB of a GPU; default: that of this machine."})
    output: str | None = field(default=None, metadata={"help": "JSON file for the plan."})

    def __post_init__(self) -> None:
        for name in ("row_length", "per_device_train_batch_size", "ttt_steps", "gpus"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}: pass at least 1.")
        if not 0 < self.supervised <= 1:
            raise ValueError(f"`supervised` is {self.supervised}: pass a share above 0, at most 1.")
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"`zero_stage` is {self.zero_stage}: pass 0, 1, 2 or 3.")
        if self.gpu_memory is not None and not 0 < self.gpu_memory < math.inf:
            raise ValueError(f"`gpu_memory` is {self.gpu_memory}: pass the GiB of a GPU.")
        if self.objective not in OBJECTIVES:
            raise ValueError(f"`objective` is {self.objective!r}: pass one of {', '.join(OBJECTIVES)}.")
        if self.output is not None:
            check_output("output", self.output)
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("`offload_optimizer` needs DeepSpeed: pass `zero_stage` 1, 2 or 3.")

    def memory(self) -> float:
        """Bytes of a GPU."""
        if self.gpu_memory is not None:
            return self.gpu_memory * planning.GIB
        if not torch.cuda.is_available():
            raise ValueError("`gpu_memory` is needed: this machine has no CUDA GPU whose memory could be read.")
        return torch.cuda.get_device_properties(0).total_memory

    def setup(self) -> planning.Setup:
        return planning.Setup(
            tokens=self.row_length * self.per_device_train_batch_size,
            ttt_steps=self.ttt_steps,
            supervised=self.supervised,
            has_teacher=self.objective != "ce",
            recompute=self.gradient_checkpointing,
            zero_stage=self.zero_stage,
            gpus=self.gpus,
            offload=self.offload_optimizer,
        )


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Print the plan, and return what `output` gets."""
    target_args, draft_args, args = parse((TargetArguments, DraftArguments, PlanArguments), argv)
    with usage_errors():
        memory = args.memory()
        if target_args.target_adapter is not None:
            raise ValueError("`target_adapter`: the weights of an adapter are not counted: leave it out.")
        dtype = target_args.target_dtype
        config = target_args.config()
        target, head = shapes(config, draft_args, args.draft_vocab_size, target_dtype=dtype)
    report = make_report(target, head, args.setup(), memory)
    report["positions"] = config_field(config.get_text_config(decoder=True), "max_position_embeddings")
    print(render(report))
    if args.output is not None:
        write_json(report, Path(args.output))
    return report


def shapes(
    config: PreTrainedConfig,
    draft_args: DraftArguments,
    draft_vocab_size: int | None,
    *,
    target_dtype: str = "auto",
) -> tuple[planning.TargetShape, planning.HeadShape]:
    """Sizes of the target and of the head that `draftsmith train` would train for it, without allocating either."""
    draft_config = _draft_config(config, draft_args, draft_vocab_size)
    text = config.get_text_config()
    itemsize = _itemsize(config, target_dtype)
    with torch.device("meta"):
        target = auto_class_of(config).from_config(config, attn_implementation="eager")
        head = Eagle3DraftModel(draft_config)
    trained = sum(weight.numel() for weight in head.parameters() if weight.requires_grad)
    return (
        planning.TargetShape(
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
            aux_states=draft_config.num_aux_hidden_states,
            weight_bytes=_weight_bytes(target, config, itemsize),
            layer_width=_layer_width(text),
            itemsize=itemsize,
        ),
        planning.HeadShape(
            hidden_size=draft_config.hidden_size,
            intermediate_size=draft_config.intermediate_size,
            num_heads=draft_config.num_attention_heads,
            num_kv_heads=draft_config.num_key_value_heads,  # type: ignore[arg-type]
            head_dim=draft_config.head_dim,  # type: ignore[arg-type]
            vocab_size=draft_config.draft_vocab_size,  # type: ignore[arg-type]
            trained_parameters=trained,
        ),
    )


def _draft_config(
    config: PreTrainedConfig, draft_args: DraftArguments, draft_vocab_size: int | None
) -> Eagle3DraftConfig:
    """Of the head that `draft` names, or of a new one."""
    if draft_args.draft is None:
        return draft_args.head_config(config, draft_vocab_size)
    given = draft_args.architecture_given() + ["`draft_vocab_size`"] * (draft_vocab_size is not None)
    if given:
        raise ValueError(f"`draft` keeps its architecture and its vocabulary: leave out {', '.join(given)}.")
    try:
        draft_config = Eagle3DraftConfig.from_pretrained(draft_args.draft)
    except (ValueError, OSError) as error:
        raise ValueError(f"`draft` {draft_args.draft} has no config of a head to read: {error}") from error
    text = config.get_text_config(decoder=True)
    made_for, sizes = (draft_config.vocab_size, draft_config.target_hidden_size), (text.vocab_size, text.hidden_size)
    if made_for != sizes:
        raise ValueError(
            f"`draft` {draft_args.draft} was made for a target whose embedding is {made_for}, this one's is {sizes}: "
            "it belongs to another target."
        )
    return draft_config


def _itemsize(config: PreTrainedConfig, target_dtype: str) -> int:
    """Bytes of a number of the target as it is loaded: `auto` is as stored, 2 where the config does not say."""
    stored = config.dtype or config.get_text_config().dtype or "bfloat16"
    dtype = str(stored).removeprefix("torch.") if target_dtype == "auto" else target_dtype
    return getattr(torch, dtype).itemsize


def _weight_bytes(target: torch.nn.Module, config: PreTrainedConfig, itemsize: int) -> int:
    quantisation = getattr(config, "quantization_config", None) or {}
    method = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation.quant_method
    per_weight = QUANTISED_BYTES.get(str(method), itemsize)
    return sum(
        round(weight.numel() * (per_weight if ".layers." in name and weight.dim() > 1 else itemsize))
        for name, weight in target.named_parameters()
    )


def _layer_width(text: PreTrainedConfig) -> int:
    """Elements per token at the widest moment of a layer: the MLP's gate, up and product beside three states."""
    experts = getattr(text, "num_experts_per_tok", None) or 1
    width = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None)
    width = width or 4 * text.hidden_size  # of GPT-2 and its relatives, which name it otherwise or not at all
    return 3 * experts * width + 3 * text.hidden_size


def chunk_size_for(target: planning.TargetShape, head: planning.HeadShape, setup: planning.Setup) -> int:
    """The one that the loss chooses."""
    logits = setup.ttt_steps * head.vocab_size + (target.vocab_size if setup.has_teacher else 0)
    return choose_chunk_size(
        rows=setup.rows * setup.ttt_steps, hidden_size=head.hidden_size, logits_per_row=logits, itemsize=2,
        stacked=setup.ttt_steps,
    )  # fmt: skip


def make_report(
    target: planning.TargetShape, head: planning.HeadShape, setup: planning.Setup, memory: float
) -> dict[str, Any]:
    def chosen(wanted: planning.Setup) -> int:
        return chunk_size_for(target, head, wanted)

    def describe(wanted: planning.Setup) -> dict[str, Any]:
        made = planning.plan(target, head, replace(wanted, chunk_size=chosen(wanted)))
        return {
            "peak": made.peak,
            "fits": made.peak <= planning.USABLE * memory,
            "longest_context": planning.longest_context(target, head, wanted, memory, chosen),
            "held": made.held,
            "phases": made.phases,
        }

    return {
        "setup": asdict(replace(setup, chunk_size=chosen(setup))),
        "gpu_memory": memory,
        "options": {name: describe(wanted) for name, wanted in planning.levers(setup)},
    }


def render(report: dict[str, Any]) -> str:
    """The plan as text: components of the first option, then what each lever gives."""
    first = next(iter(report["options"].values()))
    lines = [f"{name:<28}{_gib(size)}" for name, size in first["held"].items()]
    for phase, parts in first["phases"].items():
        lines.append(f"during {phase}: {_gib(sum(parts.values())).strip()}")
        lines += [f"  {name:<26}{_gib(size)}" for name, size in parts.items()]
    lines.append(f"chunk_size {report['setup']['chunk_size']}; of a GPU's {_gib(report['gpu_memory']).strip()} "
                 f"{planning.USABLE:.0%} are counted on")  # fmt: skip
    lines.append("")
    lines.append(f"{'':<50}{'peak':>10}{'fits':>6}{'longest row':>13}")
    for name, option in report["options"].items():
        fits = "yes" if option["fits"] else "no"
        lines.append(f"{name:<50}{_gib(option['peak'])}{fits:>6}{option['longest_context']:>13,}")
    positions, longest = report.get("positions"), [option["longest_context"] for option in report["options"].values()]
    if positions and max(report["setup"]["tokens"], *longest) > positions:
        lines += ["", f"The target has {positions:,} positions: rows may be longer, but no document in them."]
    return "\n".join(lines)


def _gib(size: float) -> str:
    return f"{size / planning.GIB:>6.1f} GiB"

"""Forward of whole targets, random weights in the shapes of Llama-3.1-8B and gpt-oss-20b, under each attention.

Decoder stack only, as training runs it. Checks: in a target of a few layers, ours is as near to fp32 as transformers'
own attention is; in the whole target its states and logits differ no more from theirs than theirs differ from each
other; packed documents equal separate ones.
"""

import argparse
import contextlib
import copy
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from transformers import AutoModel, GptOssConfig, LlamaConfig, PreTrainedConfig, PreTrainedModel

from draftsmith import transformers_hooks
from draftsmith.ops import block_sparse_flash_attention
from draftsmith.transformers_hooks import ATTENTION_NAME

from .common import OUTPUT, Results, extra_gib, failure, median_ms, release_memory, show_choices


ALLOWED = 2.0  # times the error, or the difference, of correct attentions
LOGIT_ROWS = 256
OURS = (ATTENTION_NAME, f"{ATTENTION_NAME} by triton")  # the fastest that is installed, and what is always there
DRY_OURS = (ATTENTION_NAME, f"{ATTENTION_NAME} by sdpa")


@dataclass(frozen=True)
class Target:
    config: PreTrainedConfig
    attentions: tuple[str, ...]  # names of transformers; ours also as "name by engine"
    plain: str  # transformers' own, whose distance from fp32 is the yardstick


@dataclass(frozen=True)
class Settings:
    device: torch.device
    dtype: torch.dtype
    length: int
    documents: tuple[int, ...]  # lengths, `length` in all
    short: int  # tokens of the comparison with fp32
    layers: int  # of the target in that comparison
    seconds: float


GPU = Settings(torch.device("cuda"), torch.bfloat16, 8192, (4093, 3, 1500, 2596), 1024, 4, 1.5)
DRY = Settings(torch.device("cpu"), torch.float32, 48, (20, 3, 25), 24, 2, 0)


def llama(**sizes: Any) -> LlamaConfig:
    shape = {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    }  # fmt: skip
    return LlamaConfig(**shape | sizes)


def gpt_oss(**sizes: Any) -> GptOssConfig:
    return GptOssConfig(**{"num_hidden_layers": 24, "num_local_experts": 32} | sizes)  # the defaults are the 120b's


TARGETS = {
    "Llama-3.1-8B": Target(llama(), ("sdpa", "flex_attention", *OURS), "sdpa"),
    "gpt-oss-20b": Target(gpt_oss(), ("eager", "flex_attention", *OURS), "eager"),
}
_TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8,
         "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2}  # fmt: skip
DRY_TARGETS = {  # FlexAttention on CPU would be compiled from C++, and refuses sinks
    "Llama-3.1-8B": Target(llama(**_TINY), ("sdpa", "eager", *DRY_OURS), "sdpa"),
    "gpt-oss-20b": Target(gpt_oss(**_TINY | {"num_local_experts": 4}), ("eager", *DRY_OURS), "eager"),
}


def main(arguments: list[str]) -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="benchmark.py targets", description=__doc__, formatter_class=formatter)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--output", type=Path, default=OUTPUT / "targets.json")
    parser.add_argument("--dry-run", action="store_true", help="tiny targets on CPU: tries the code, measures nothing")
    args = parser.parse_args(arguments)
    show_choices()
    torch.manual_seed(0)
    settings, targets = (DRY, DRY_TARGETS) if args.dry_run else (GPU, TARGETS)
    results = Results(args.output, settings.device, dtype=str(settings.dtype), tokens=settings.length)
    with torch.no_grad():
        for name in args.targets:
            torch._dynamo.reset()  # or FlexAttention would be compiled for the shapes of both targets
            measure_target(name, targets[name], settings, results)
            release_memory(settings.device)
            check_against_fp32(name, targets[name], settings, results)
            release_memory(settings.device)
    print(f"written to {results.path}")


def build(config: PreTrainedConfig, settings: Settings) -> PreTrainedModel:
    with settings.device:
        return AutoModel.from_config(config, dtype=settings.dtype).eval()


def states(model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
    """[B, T, H], after the final norm."""
    return model(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state


@contextlib.contextmanager
def attending(model: PreTrainedModel, attention: str) -> Iterator[None]:
    name, _, engine = attention.partition(" by ")
    model.set_attn_implementation(name)
    if engine:
        forced = functools.partial(block_sparse_flash_attention, implementation=engine)
        transformers_hooks.block_sparse_flash_attention = forced  # type: ignore[assignment]
    try:
        yield
    finally:
        transformers_hooks.block_sparse_flash_attention = block_sparse_flash_attention


def measure_target(name: str, target: Target, settings: Settings, results: Results) -> None:
    device = settings.device
    model = build(target.config, settings)
    input_ids = torch.randint(target.config.vocab_size, (1, settings.length), device=device)
    experts = getattr(model.config, "_experts_implementation", None)
    outputs: dict[str, Tensor] = {}
    for attention in target.attentions:
        row = {"target": name, "attention": attention, "experts": experts}
        try:
            with attending(model, attention):
                outputs[attention] = states(model, input_ids)  # compiles
                row["extra_gib"] = extra_gib(lambda: [states(model, input_ids)], device)
                row["forward_ms"] = median_ms(lambda: states(model, input_ids), device, settings.seconds, most=5)
            row["tokens_per_second"] = 1000 * settings.length / row["forward_ms"]
            row["status"] = "ok"
        except Exception as error:  # the other attentions are still of interest
            row |= failure(error)
        report(results, row, ("extra_gib", "forward_ms"))
        release_memory(device)
    if len(outputs) > 1:
        noise = compare(name, model, outputs, results)
        if ATTENTION_NAME in outputs:
            check_packing(name, model, input_ids, noise, settings, results)


def compare(name: str, model: PreTrainedModel, outputs: dict[str, Tensor], results: Results) -> float:
    """The largest difference between two attentions of transformers; between any two if only one of theirs ran."""
    rows = slice(None, None, max(1, next(iter(outputs.values())).shape[1] // LOGIT_ROWS))
    head = model.get_input_embeddings().weight  # any random head does
    pairs = list(itertools.combinations(outputs, 2))
    differences = {}
    for one, other in pairs:
        logits = [outputs[attention][0, rows] @ head.T for attention in (one, other)]
        differences[one, other] = (difference(outputs[one], outputs[other]), difference(*logits))
    theirs = [pair for pair in pairs if not any(name.startswith(ATTENTION_NAME) for name in pair)]
    noise = max(max(differences[pair]) for pair in theirs or pairs)
    for pair, (of_states, of_logits) in differences.items():
        row = {"target": name, "compared": list(pair), "states": of_states, "logits": of_logits}
        if theirs and pair not in theirs:
            row["status"] = verdict(max(of_states, of_logits), noise)
        report(results, row, ("states", "logits"))
    return noise


def check_packing(
    name: str, model: PreTrainedModel, input_ids: Tensor, noise: float, settings: Settings, results: Results
) -> None:
    """Documents in one row against each by itself. Other shapes take other tiles and kernels: equal up to `noise`."""
    parts = input_ids.split(settings.documents, 1)
    position_ids = torch.cat([torch.arange(part.shape[1], device=settings.device) for part in parts])[None]
    model.set_attn_implementation(ATTENTION_NAME)
    separate = torch.cat([states(model, part) for part in parts], 1)
    error = difference(states(model, input_ids, position_ids), separate)
    row = {"target": name, "packed": list(settings.documents), "states": error, "status": verdict(error, noise)}
    row["as_one_document"] = difference(states(model, input_ids), separate)  # the size of a leak
    row["forward_ms"] = median_ms(lambda: states(model, input_ids, position_ids), settings.device, settings.seconds, 5)
    report(results, row, ("states", "as_one_document", "forward_ms"))


def check_against_fp32(name: str, target: Target, settings: Settings, results: Results) -> None:
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = settings.layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: settings.layers]
    model = build(config, settings)
    input_ids = torch.randint(config.vocab_size, (1, settings.short), device=settings.device)
    precise = copy.deepcopy(model).to(torch.float64 if settings.device.type == "cpu" else torch.float32)
    precise.set_attn_implementation("eager")
    if hasattr(config, "num_local_experts"):
        precise.set_experts_implementation("eager")  # grouped products are for bf16
    truth = states(precise, input_ids)
    del precise
    row: dict[str, Any] = {"target": name, "layers": settings.layers, "tokens": settings.short, "compared": "fp32"}
    for attention in (target.plain, ATTENTION_NAME):
        model.set_attn_implementation(attention)
        row[attention] = difference(states(model, input_ids), truth)
    row["status"] = verdict(row[ATTENTION_NAME], row[target.plain])
    report(results, row, (target.plain, ATTENTION_NAME))


def difference(one: Tensor, other: Tensor) -> float:
    """Relative to `other`."""
    return ((one.double() - other.double()).norm() / other.double().norm()).item()


def verdict(error: float, yardstick: float) -> str:
    return "ok" if error <= ALLOWED * yardstick else f"failed: {error:.2e} is over {ALLOWED} times {yardstick:.2e}"


def report(results: Results, row: dict[str, Any], figures: tuple[str, ...]) -> None:
    results.add(row)
    what = next(f"{name} {row[name]}" for name in ("attention", "compared", "packed") if name in row)
    values = [f"{name} {row[name]:.4g}" for name in figures if row.get(name) is not None]
    print(
        f"{row['target']:13} {what:52} {', '.join(values)}  {row.get('status', '')} {row.get('reason', '')}",
        flush=True,
    )

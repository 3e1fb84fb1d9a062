"""Full fine-tuning of a Llama-shaped language model: the whole logits of transformers' loss against streamed ones.

Random weights; forward, backward and AdamW, weights, gradients and both moments in bf16; gradient checkpointing;
packed rows of documents under our attention in both. Dense is what `Trainer` computes, the others what
`StreamingLossTrainer` does at a chunk size. Before anything is timed, both must give the same loss and gradients on
the same batch. Peak is of all memory of the step: 8 bytes per weight, kept states, logits.

--layers 32 is the shape of Llama-3.1-8B.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Trainer, TrainingArguments

from draftsmith import StreamingLossTrainer
from draftsmith.transformers_hooks import ATTENTION_NAME

from .common import GIB, OUTPUT, Results, attempt, line, make_parser, median_ms, release_memory, show_choices
from .loss_contenders import recorded_choices


HEADER = ("tokens", "loss", "chunk", "ms", "tokens/s", "peak GiB")
CHUNKS = ("dense", "8192", "4096", "2048", "1024", "512", "auto")
QUICK_CHUNKS = ("dense", "4096", "1024", "auto")
DIFFERENCE = 0.02  # between two bf16 gradients, relative; both are about 0.003 from the truth


@dataclass(frozen=True)
class Settings:
    device: torch.device
    dtype: torch.dtype
    row: int  # tokens
    document: int  # tokens
    seconds: float  # of repeats per figure
    deadline: float


GPU = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "row": 8192, "document": 2048, "seconds": 1.0}
DRY = {"device": torch.device("cpu"), "dtype": torch.float32, "row": 16, "document": 8, "seconds": 0}
DRY_SIZES = {"vocabulary": 211, "hidden": 64, "layers": 1, "tokens": [16, 48], "chunks": ["dense", "16", "4", "auto"]}


def main(arguments: list[str]) -> None:
    args = parse(arguments)
    settings = Settings(**(DRY if args.dry_run else GPU), deadline=time.monotonic() + args.time_limit)
    show_choices()
    torch.manual_seed(0)
    model = build(args, settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    results = Results(
        args.output, settings.device, dtype=str(settings.dtype), optimizer="AdamW", row=settings.row,
        document=settings.document, layers=args.layers, hidden=args.hidden, vocabulary=args.vocabulary,
        parameters=sum(weight.numel() for weight in model.parameters()),
    )  # fmt: skip
    print(f"{results.content['settings']['parameters'] / 1e9:.2f}B parameters")
    results.content["settings"] |= check(model, settings)
    optimizer.step()  # allocates its moments
    optimizer.zero_grad()
    print(_line(HEADER))
    for tokens in args.tokens:
        batch = make_batch(tokens, args.vocabulary, settings)
        for chunk in args.chunks:
            figures = attempt(partial(measure, model, optimizer, chunk, batch, settings), settings.deadline)
            optimizer.zero_grad()
            results.add({"tokens": tokens, "loss": chunk, **figures})
            print(_line(_columns(results.rows[-1])), flush=True)
            release_memory(settings.device)
    print(f"written to {results.path}")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("lm", __doc__, OUTPUT / "lm.json", time_limit=110)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=4096, help="the MLP has 3.5 times as much")
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768, 131072], help="per step, whole rows")
    parser.add_argument("--chunks", nargs="+", default=CHUNKS, help="dense, auto or tokens", metavar="CHUNK")
    parser.add_argument("--quick", action="store_true", help="up to 32768 tokens, few chunk sizes")
    parsed = parser.parse_args(arguments)
    if parsed.quick:
        parsed.tokens, parsed.chunks = parsed.tokens[:2], QUICK_CHUNKS
    if parsed.dry_run:
        parser.set_defaults(**DRY_SIZES)
        parsed = parser.parse_args(arguments)
    return parsed


def build(args: argparse.Namespace, settings: Settings) -> PreTrainedModel:
    heads = max(4, args.hidden // 128)
    config = LlamaConfig(
        vocab_size=args.vocabulary, hidden_size=args.hidden, intermediate_size=args.hidden * 7 // 2,
        num_hidden_layers=args.layers, num_attention_heads=heads, num_key_value_heads=heads // 4,
        max_position_embeddings=131072, rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        attn_implementation=ATTENTION_NAME, use_cache=False,
    )  # fmt: skip
    with settings.device:
        model = AutoModelForCausalLM.from_config(config, dtype=settings.dtype)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def make_batch(tokens: int, vocabulary: int, settings: Settings) -> dict[str, Tensor]:
    """Rows of documents of equal length; the first token of each is not predicted."""
    shape = (max(1, tokens // settings.row), min(tokens, settings.row))
    input_ids = torch.randint(vocabulary, shape, device=settings.device)
    position_ids = (torch.arange(shape[1], device=settings.device) % settings.document).expand(shape).contiguous()
    labels = input_ids.masked_fill(position_ids == 0, -100)
    return {"input_ids": input_ids, "position_ids": position_ids, "labels": labels}


@contextmanager
def make_trainer(model: PreTrainedModel, chunk: str, device: torch.device) -> Iterator[Trainer]:
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, report_to=[], use_cpu=device.type == "cpu")
        if chunk == "dense":
            yield Trainer(model, args)
        else:
            yield StreamingLossTrainer(model, args, chunk_size=None if chunk == "auto" else int(chunk))


def check(model: PreTrainedModel, settings: Settings) -> dict[str, float]:
    """Relative differences of the streamed loss and of two of its gradients. Leaves gradients behind."""
    batch = make_batch(settings.row, model.config.vocab_size, settings)
    # Next to the loss: further down, rounding in the layers' own backward would cover up what differs here.
    weights = {"head": model.lm_head.weight, "norm": model.model.norm.weight}
    outcomes = []
    for chunk in ("dense", str(settings.row // 4)):
        model.zero_grad()
        with make_trainer(model, chunk, settings.device) as trainer:
            loss = trainer.compute_loss(model, batch)
            loss.backward()
        outcomes.append({"loss": loss.detach(), **{name: weight.grad.clone() for name, weight in weights.items()}})
    dense, streamed = outcomes
    differences = {
        f"{name}_difference": ((streamed[name].float() - dense[name]).norm() / dense[name].float().norm()).item()
        for name in dense
    }
    print(", ".join(f"{name} {value:.1e}" for name, value in differences.items()))
    if not max(differences.values()) <= DIFFERENCE:
        raise SystemExit(f"the streamed loss differs from the dense one: {differences}")
    return differences


def measure(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, chunk: str, batch: dict[str, Tensor], settings: Settings
) -> dict[str, Any]:
    tokens, device = batch["input_ids"].numel(), settings.device
    with make_trainer(model, chunk, device) as trainer, recorded_choices() as choices:

        def step() -> None:
            trainer.compute_loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        milliseconds = median_ms(step, device, settings.seconds, most=5)
    return {
        "chunk": choices[-1] if choices else None if chunk == "dense" else int(chunk),
        "ms": milliseconds,
        "tokens_per_second": 1000 * tokens / milliseconds,
        "peak_gib": torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None,
    }


def _columns(row: dict[str, Any]) -> list[str]:
    start = [str(row["tokens"]), row["loss"]]
    if row["status"] != "ok":
        return [*start, f" {row['status']}: {row['reason']}".replace("\n", " ")[:90]]
    peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.2f}"
    return [*start, str(row["chunk"] or "-"), f"{row['ms']:.1f}", f"{row['tokens_per_second']:.0f}", peak]


def _line(columns: Sequence[str]) -> str:
    return line(columns, widths=(8, 8, 8, 10, 11, 10), left=2)

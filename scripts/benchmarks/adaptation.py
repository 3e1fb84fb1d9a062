"""A head moved to a domain it never saw: full fine-tuning against LoRA, on a real target, by real decoding.

A base head is trained on the demo's conversations of the other kinds, then adapted to one kind both ways, each at
several learning rates, of which the best counts. Three quarters of that kind's conversations train; the prompts of the
others are decoded (greedy, fp32).
"""

import gzip
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from demo import CONVERSATIONS, fetch_default_target
from draftsmith.commands import evaluate, train
from draftsmith.speculative import Acceptance

from .common import OUTPUT, ROOT, Results, line, make_parser


TRAINING = [
    "--ttt_steps", "4", "--max_length", "512", "--packing", "true", "--per_device_train_batch_size", "1",
    "--keep_target_states", "true", "--warmup_steps", "0.05", "--lr_scheduler_type", "cosine", "--logging_steps", "20",
    "--save_strategy", "no", "--report_to", "none", "--seed", "0",
]  # fmt: skip
BASE = [
    "--draft_vocab_size", "6144", "--norm_output", "true", "--init_from_layer", "-1", "--num_train_epochs", "2",
    "--learning_rate", "1.5e-3",
]  # fmt: skip
DECODING = ["--num_draft_tokens", "4", "--batch_size", "16"]
HEADER = ("head", "rate", "trained", "share", "acceptance length", "95%", "gain", "by position")
WIDTHS = (6, 8, 12, 8, 19, 17, 8, 28)
LORA = {
    "peft_type": "LORA", "r": 24, "lora_alpha": 48,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc"],
}  # fmt: skip


@dataclass(frozen=True)
class Experiment:
    """The conversations, apart, in `directory`: `general`, `domain` and `held_out`, of which only prompts are read."""

    directory: Path
    target: list[str]
    dry_run: bool

    def train(self, name: str, dataset: str, *flags: str) -> int:
        """Train into the folder `name` and return the number of trained parameters."""
        output = self.directory / name
        files = ["--dataset", str(self.directory / f"{dataset}.jsonl"), "--output_dir", str(output)]
        steps = ["--max_steps", "2"] if self.dry_run else []
        trainer = train.main([*self.target, *files, *TRAINING, *flags, *steps])
        trained = sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad)
        trainer.accelerator.free_memory()
        return trained

    def decode(self, name: str) -> Acceptance:
        files = ["--prompts", str(self.directory / "held_out.jsonl"), "--draft", str(self.directory / name)]
        length = ["--max_new_tokens", "4" if self.dry_run else "128"]
        return evaluate.main([*self.target, *files, *DECODING, *length]).results[0].total


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("adaptation", __doc__, OUTPUT / "adaptation.json")
    parser.add_argument("--target", help="Hub id or directory (default: the demo's)")
    parser.add_argument("--domain", default="code", help="kind of conversation that the base head never sees")
    parser.add_argument("--full-rates", nargs="+", default=["1e-3"], help="of full fine-tuning")
    parser.add_argument("--lora-rates", nargs="+", default=["5e-3", "1e-2"], help="of LoRA")
    parser.add_argument("--epochs", default="8", help="over the domain's conversations")
    args = parser.parse_args(arguments)
    experiment = set_up(args.target, args.domain, dry_run=args.dry_run)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = {"domain": args.domain, "epochs": args.epochs, "training": TRAINING, "base": BASE, "lora": LORA}
    output = experiment.directory / args.output.name if args.dry_run else args.output
    results = Results(output, device, **settings, decoding=DECODING)

    print(line(HEADER, WIDTHS, 1))
    whole = experiment.train("base", "general", *BASE)
    base = add(results, "base", "", whole, experiment.decode("base"), None)
    ways = [("full", rate, []) for rate in args.full_rates]
    ways += [("LoRA", rate, ["--peft_config", json.dumps(LORA)]) for rate in args.lora_rates]
    for way, rate, flags in ways:
        name = f"{way}-{rate}"
        start = ["--draft", str(experiment.directory / "base"), "--num_train_epochs", args.epochs]
        trained = experiment.train(name, "domain", *start, "--learning_rate", rate, *flags)
        add(results, way, rate, trained, experiment.decode(name), base)
    gains = {way: max(row["gain"] for row in results.rows if row["head"] == way) for way in ("full", "LoRA")}
    print(f"full fine-tuning gains {gains['full']:.3f}, LoRA {gains['LoRA']:.3f}")


def set_up(target: str | None, domain: str, *, dry_run: bool) -> Experiment:
    directory = ROOT / "runs" / ("adaptation-dry" if dry_run else "adaptation")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    with gzip.open(CONVERSATIONS, "rt") as file:
        rows = [json.loads(text) for text in file]
    inside = [row for row in rows if row["kind"] == domain]
    held_out = [row for row in inside if int(row["id"][:8], 16) % 4 == 0]
    general = [row for row in rows if row["kind"] != domain]
    for name, part in (
        ("general", general),
        ("domain", [row for row in inside if row not in held_out]),
        ("held_out", held_out),
    ):
        shown = part[:4] if dry_run else part
        text = "".join(json.dumps({"messages": row["messages"]}) + "\n" for row in shown)
        (directory / f"{name}.jsonl").write_text(text)
    flags = ["--target", target, "--target_dtype", "float32"] if target else fetch_default_target()
    return Experiment(directory, flags, dry_run)


def add(
    results: Results, head: str, rate: str, trained: int, counts: Acceptance, base: dict[str, Any] | None
) -> dict[str, Any]:
    """Keep and print a head's acceptance length on the held-out prompts, and its gain over the base's."""
    length, whole = counts.acceptance_length, trained if base is None else base["trained"]
    row = {
        "head": head, "learning_rate": rate, "trained": trained, "share": trained / whole, "prompts": counts.prompts,
        "acceptance_length": length, "interval": counts.interval, "rates": counts.rates,
        "gain": 0.0 if base is None else length - base["acceptance_length"],
    }  # fmt: skip
    results.add(row)
    interval = "" if counts.interval is None else "{:.3f} to {:.3f}".format(*counts.interval)
    by_position = " ".join(f"{rate:.3f}" for rate in counts.rates)
    shown = (f"{trained:,}", f"{row['share']:.3f}", f"{length:.3f}", interval, f"{row['gain']:.3f}")
    print(line((head, rate, *shown, by_position), WIDTHS, 1), flush=True)
    return row

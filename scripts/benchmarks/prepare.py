"""Preparation against plain tokenizer calls on the same rendered texts; its memory over the data; how full rows are.

Conversations of the demo, put together at random. Ours renders, tokenises, finds the answers, checks them and
writes an Arrow cache, from a JSON Lines file that it has not seen, in two processes; the peer tokenises ready texts in
batches, in one process, with one thread and with one for each core. All run in turn, so that other work on the machine
meets all. Each begins with a tokenizer that has seen nothing.
"""

import argparse
import copy
import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from draftsmith.data import DataArguments, prepare_datasets
from draftsmith.data.packing import pack_dataset

from .common import OUTPUT, ROOT, describe_machine, markdown_table


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
BATCH = 256


def main(arguments: list[str]) -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="benchmark.py prepare", description=__doc__, formatter_class=formatter)
    parser.add_argument("--tokenizer", help="directory or Hub id. Default: one trained on the demo's conversations")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="about as many are prepared")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--num-proc", type=int, default=2)
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)  # of this file, with that tokenizer
    parser.add_argument(
        "--output", type=Path, default=OUTPUT / "prepare.json", help="and a table beside it, in Markdown"
    )
    args = parser.parse_args(arguments)
    disable_progress_bar()
    if args.memory_of:
        print(json.dumps(peak_memory(*args.memory_of)))
        return
    conversations = read_demo()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer) if args.tokenizer else train_tokenizer(conversations)
    with tempfile.TemporaryDirectory() as scratch:
        result = {
            "machine": describe_machine(torch.device("cpu")),
            "tokenizer": Path(args.tokenizer).name if args.tokenizer else "trained on the demo's conversations",
            "speed": measure_speed(conversations, tokenizer, args, Path(scratch)),
            "memory": measure_memory(conversations, tokenizer, args.tokens, Path(scratch)),
            "packing": [measure_packing(documents) for documents in (2_000, 20_000)],
        }
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    args.output.with_suffix(".md").write_text(to_markdown(result))


def read_demo() -> list[list[dict[str, str]]]:
    with gzip.open(ROOT / "demo" / "conversations.jsonl.gz", "rt") as file:
        return [json.loads(line)["messages"] for line in file]


def train_tokenizer(conversations: list[list[dict[str, str]]]) -> PreTrainedTokenizerBase:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=32_000, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator((message["content"] for chat in conversations for message in chat), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", extra_special_tokens=["<|im_start|>", "<|im_end|>"]
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def write_rows(
    conversations: list[list[dict[str, str]]], tokenizer: PreTrainedTokenizerBase, tokens: int, path: Path
) -> list[str]:
    """About `tokens` tokens of conversations with one to four turns; returns them rendered."""
    generator, texts, total = random.Random(0), [], 0
    with open(path, "w") as file:
        while total < tokens:
            chats = generator.choices(conversations, k=generator.choice([1, 1, 2, 3, 4]))
            messages = [message for chat in chats for message in chat]
            texts.append(str(tokenizer.apply_chat_template(messages, tokenize=False)))
            total += len(tokenizer.encode(texts[-1], add_special_tokens=False))
            file.write(json.dumps({"messages": messages}) + "\n")
    return texts


def measure_speed(
    conversations: list[list[dict[str, str]]], tokenizer: PreTrainedTokenizerBase, args: Any, scratch: Path
) -> dict[str, Any]:
    path = scratch / "rows.jsonl"
    texts = write_rows(conversations, tokenizer, args.tokens, path)
    contenders: dict[str, Callable[[], int]] = {
        "plain": lambda: plain_calls(tokenizer, texts, threads=False),
        "plain_threads": lambda: plain_calls(tokenizer, texts, threads=True),
        "ours": lambda: prepared_tokens(path, tokenizer, args.num_proc),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    processor: dict[str, list[float]] = {name: [] for name in contenders}
    counts: set[int] = set()
    for _ in range(args.repeats):
        for name, run in contenders.items():
            start, busy = time.perf_counter(), processor_seconds()
            counts.add(run())
            seconds[name].append(time.perf_counter() - start)
            processor[name].append(processor_seconds() - busy)
        print(", ".join(f"{name} {times[-1]:.2f} s" for name, times in seconds.items()), flush=True)
    (tokens,) = counts  # all found the same
    found = {
        "tokens": tokens,
        "num_proc": args.num_proc,
        "seconds": seconds,
        "processor_seconds": processor,
        "tokens_per_second": {name: round(tokens / median(times)) for name, times in seconds.items()},
        "ratio": {name: ratio_in_turn(seconds[name], seconds["ours"]) for name in ("plain", "plain_threads")},
        "load": os.getloadavg(),
    }
    print(f"{tokens:,} tokens: {found['tokens_per_second']}, ratios {found['ratio']}")
    return found


def ratio_in_turn(peer: list[float], ours: list[float]) -> float:
    """Of tokens/s: the median over the pairs that ran in turn."""
    return median(one / other for one, other in zip(peer, ours, strict=True))


def processor_seconds() -> float:
    """Of this process and of those that it has waited for: what both sides need, whatever else the machine does."""
    return sum(os.times()[:4])


def plain_calls(tokenizer: PreTrainedTokenizerBase, texts: list[str], threads: bool) -> int:
    """With a copy of the tokenizer: one keeps the words that it has seen, and our processes begin with none."""
    os.environ["TOKENIZERS_PARALLELISM"] = str(threads).lower()  # `datasets` leaves it "false" behind
    fresh = copy.deepcopy(tokenizer)
    batches = (texts[start : start + BATCH] for start in range(0, len(texts), BATCH))
    return sum(len(ids) for batch in batches for ids in fresh(batch, add_special_tokens=False)["input_ids"])


def prepared_tokens(path: Path, tokenizer: PreTrainedTokenizerBase, num_proc: int) -> int:
    with tempfile.TemporaryDirectory() as cache:
        arguments = DataArguments(dataset=[str(path)], max_length=None, num_proc=num_proc, cache_dir=cache)
        return prepare_datasets(arguments, tokenizer).statistics["train"].tokens


def measure_memory(
    conversations: list[list[dict[str, str]]], tokenizer: PreTrainedTokenizerBase, tokens: int, scratch: Path
) -> list[dict[str, Any]]:
    """Each size in a process of its own."""
    rows = []
    tokenizer.save_pretrained(scratch / "tokenizer")
    for times in (2, 8):
        path = scratch / f"{times}.jsonl"
        write_rows(conversations, tokenizer, times * tokens, path)
        command = [sys.executable, sys.argv[0], "prepare", "--memory-of", str(path), str(scratch / "tokenizer")]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        rows.append({"bytes": path.stat().st_size, **found})
        print(rows[-1], flush=True)
    return rows


def peak_memory(path: str, tokenizer_name: str) -> dict[str, Any]:
    """Prepare and pack a file, and watch the memory that is the process's own: mapped files are not."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_name)
    before = private_mib()
    peaks, finished = [before], threading.Event()

    def watch() -> None:
        while not finished.wait(0.01):
            peaks[0] = max(peaks[0], private_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    with tempfile.TemporaryDirectory() as cache:
        arguments = DataArguments(dataset=[path], max_length=4096, packing=True, eval_fraction=0.02, cache_dir=cache)
        data = prepare_datasets(arguments, tokenizer)
    finished.set()
    watcher.join()
    tokens = sum(numbers.tokens for numbers in data.statistics.values())
    return {"tokens": tokens, "before_mib": round(before), "peak_mib": round(peaks[0])}


def private_mib() -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) / 1024


def measure_packing(documents: int) -> dict[str, Any]:
    """Lengths of a log-normal distribution (mean 1,500, sigma 1), cut at the row's length."""
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(np.log(1500) - 0.5, 1, documents).astype(int), 3, 8192)
    columns = {name: [np.zeros(length, dtype) for length in lengths] for name, dtype in
               (("input_ids", np.int32), ("loss_mask", np.uint8), ("turn_ids", np.int32))}  # fmt: skip
    dataset = Dataset.from_dict({**columns, "length": lengths.astype(np.int32)})
    start = time.perf_counter()
    rows = len(pack_dataset(dataset, 8192))
    found = {"documents": documents, "rows": rows, "seconds": time.perf_counter() - start}
    found["filled"] = float(lengths.sum() / (8192 * rows))
    print(f"{documents:,} documents in {rows:,} rows of 8,192: {found['filled']:.2%} filled", flush=True)
    return found


def to_markdown(result: dict[str, Any]) -> str:
    speed = result["speed"]
    busy = {name: f"{median(times):.2f}" for name, times in speed["processor_seconds"].items()}
    labels = {
        "plain": "plain tokenizer calls, one thread",
        "plain_threads": "plain tokenizer calls, one thread for each core",
        "ours": f"`prepare`, num_proc {speed['num_proc']}",
    }
    ratios = {name: f"{ratio:.2f}" for name, ratio in speed["ratio"].items()}
    lines = [
        (label, f"{speed['tokens_per_second'][name]:,}", busy[name], ratios.get(name, ""))
        for name, label in labels.items()
    ]
    memory = [
        (
            f"{row['bytes'] / 1e6:.0f} MB, {row['tokens']:,} tokens",
            f"{row['before_mib']} MiB",
            f"{row['peak_mib']} MiB",
        )
        for row in result["memory"]
    ]
    packing = [(f"{row['documents']:,}", f"{row['rows']:,}", f"{row['filled']:.2%}") for row in result["packing"]]
    tables = [
        markdown_table(
            f"{speed['tokens']:,} tokens, load of the machine {speed['load'][0]:.1f}",
            ("", "tokens/s", "processor seconds", "ours over it, median of pairs in turn"),
            lines,
        ),
        markdown_table("Peak of private memory, prepared and packed", ("file", "before", "peak"), memory),
        markdown_table("Packing, log-normal lengths, rows of 8,192", ("documents", "rows", "filled"), packing),
    ]
    head = f"# Preparation\n\n{result['machine']['device']}. Tokenizer: {result['tokenizer']}.\n\n{__doc__.strip()}"
    return "\n\n".join([head, *tables]) + "\n"

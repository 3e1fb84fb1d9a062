"""What cached hidden states take on disk and how fast they are coded, by one thread of the CPU.

The sample: 8,192 tokens, a prompt and then 30% answer, of a target in the shape of Llama-3.1-8B with three auxiliary
layers. Which states it needs is counted exactly; what a state takes is measured on states of a real target, if one is
named, and on random ones.
"""

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.hidden_states import NeededRows
from draftsmith.data.hidden_states.coding import DECODERS, encode_bfloat16, encode_float8
from draftsmith.target import FrozenTarget, load_target

from .common import OUTPUT, ROOT, describe_machine, make_parser, markdown_table


TOKENS, SUPERVISED, LAYERS, WIDTH = 8192, 0.3, 3, 4096
PLAIN = TOKENS * (LAYERS + 1) * WIDTH * 2  # bytes: bfloat16 states of every row, as a peer documents its cache
ENCODERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "bfloat16": encode_bfloat16,
    "float8": lambda states: encode_float8(states, 1),
}


def main(arguments: list[str]) -> None:
    parser = make_parser("cache", __doc__, OUTPUT / "cache.json")
    parser.add_argument("--target", help="directory or Hub id of a real target to take states from")
    parser.add_argument("--target-gguf-file")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows, width = (64, 64) if args.dry_run else (2048, WIDTH)
    states = {"random, normal": random_states(rows, width), "random, Student t 5": random_states(rows, width, 5.0)}
    if args.target:
        states = real_states(args.target, args.target_gguf_file, rows) | states
    measured = [measure(name, storage, values) for name, values in states.items() for storage in ENCODERS]
    result = {
        "machine": describe_machine(torch.device("cpu")),
        "sample": {"tokens": TOKENS, "supervised": SUPERVISED, "layers": LAYERS, "width": WIDTH, "plain_bytes": PLAIN},
        "states": measured,
        "sizes": sizes(measured),
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    args.output.with_suffix(".md").write_text(tables(result))
    print(tables(result))


def random_states(rows: int, width: int, degrees: float | None = None) -> torch.Tensor:
    """Numbers whose size differs by channel and by row, as a transformer's do; with heavy tails by `degrees`."""
    torch.manual_seed(0)
    scales = torch.randn(width).exp() * (0.3 * torch.randn(rows, 1)).exp()
    shape = torch.Size((rows, width))
    values = torch.randn(shape) if degrees is None else torch.distributions.StudentT(degrees).sample(shape)
    return (values * scales).bfloat16()


def real_states(name: str, gguf_file: str | None, rows: int) -> dict[str, torch.Tensor]:
    """Of the first tokens of the demo's conversations: each auxiliary layer's `[rows, Ht]`, and the last."""
    from transformers import AutoTokenizer

    target = load_target(name, gguf_file=gguf_file, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(name, **({"gguf_file": gguf_file} if gguf_file else {}))
    with gzip.open(ROOT / "demo" / "conversations.jsonl.gz", "rt") as file:
        messages = [json.loads(line)["messages"] for line, _ in zip(file, range(rows // 20), strict=False)]
    texts = tokenizer.apply_chat_template(messages, tokenize=False)
    ids = torch.tensor([token for text in texts for token in tokenizer(text).input_ids][:rows])[None]
    depth = target.config.get_text_config().num_hidden_layers
    layers = [2, depth // 2, depth - 3]
    states = FrozenTarget(target, layers)(ids)
    label = Path(gguf_file or name).name.split(".")[0]
    parts = states.aux_hidden_states[0].bfloat16().chunk(3, dim=-1)
    named = {f"{label}, layer {layer}": part for layer, part in zip(layers, parts, strict=True)}
    return {**named, f"{label}, last": states.last_hidden_state[0].bfloat16()}


def measure(name: str, storage: str, states: torch.Tensor) -> dict[str, Any]:
    """Bits per number, the loss of accuracy, and GB of bfloat16 states coded and read per second, at best of three."""
    decode, _ = DECODERS[storage]
    states = states.contiguous()
    encoding, arrays = best_of_three(lambda: ENCODERS[storage](states))
    decoding, decoded = best_of_three(lambda: decode(arrays, states.shape[1]))
    size = 2 * states.numel()
    if storage == "bfloat16" and not torch.equal(decoded.view(torch.int16), states.view(torch.int16)):
        raise AssertionError(f"{name}: not every bit came back")
    return {
        "states": name,
        "storage": storage,
        "bits": 8 * sum(values.nbytes for values in arrays.values()) / states.numel(),
        "relative_error": ((decoded.float() - states.float()).norm() / states.float().norm()).item(),
        "encoded_gb_per_s": size / encoding / 1e9,
        "decoded_gb_per_s": size / decoding / 1e9,
    }


def best_of_three(call: Callable[[], Any]) -> tuple[float, Any]:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - start)
    return min(times), result


def sizes(measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Bytes of the sample by whose states it is coded like, of a real target each layer like its own."""
    answer = round(SUPERVISED * TOKENS)
    mask = [0] * (TOKENS - answer) + [1] * answer
    needed = NeededRows.of({"input_ids": [0] * TOKENS, "loss_mask": mask})
    counts = (len(needed.context), len(needed.teacher))
    result = []
    for storage in ENCODERS:
        bits = {row["states"]: row["bits"] for row in measured if row["storage"] == storage}
        for label in dict.fromkeys(name.split(", layer")[0] for name in bits if not name.endswith(", last")):
            layers = [value for name, value in bits.items() if name.startswith(f"{label}, layer")] or [bits[label]] * 3
            last = bits.get(f"{label}, last", bits.get(label))
            size = (counts[0] * sum(layers) + counts[1] * last) * WIDTH / 8
            result.append({"like": label, "storage": storage, "bytes": round(size), "of_plain": size / PLAIN})
    return result


def tables(result: dict[str, Any]) -> str:
    machine = ", ".join(f"{name} {version}" for name, version in result["machine"].items())
    by_size = [
        (row["like"], row["storage"], f"{row['bytes'] / 1e6:.1f} MB", f"{row['of_plain']:.3f}")
        for row in result["sizes"]
    ]
    by_states = [
        (row["states"], row["storage"], f"{row['bits']:.2f}", f"{row['relative_error']:.1%}",
         f"{row['encoded_gb_per_s']:.2f}", f"{row['decoded_gb_per_s']:.2f}")
        for row in result["states"]
    ]  # fmt: skip
    heading = f"A sample of {TOKENS:,} tokens, 30% of them an answer at its end, against {PLAIN / 1e6:.0f} MB"
    columns = ("states", "storage", "bits per number", "relative error", "GB/s written", "GB/s read")
    return (
        "\n\n".join(
            [
                "# Cached hidden states",
                f"`scripts/benchmark.py cache`, one thread; GB are of bfloat16 states. {machine}.",
                markdown_table(
                    heading, ("coded like the states", "storage", "size", "of all rows in bfloat16"), by_size
                ),
                markdown_table("Coding", columns, by_states),
            ]
        )
        + "\n"
    )

"""Figure and Markdown tables from the results of `train`; needs no GPU."""

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .common import OUTPUT, introduce, markdown_table, measured, not_run, style_length_axes
from .train_whole import PARTS


Row = dict[str, Any]
Rows = list[Row]
STYLES = {  # label and colour
    "ours": ("ours", "tab:blue"),
    "ours recompute": ("ours, recomputing", "tab:cyan"),
    "specforge compact": ("SpecForge, compact teacher", "tab:red"),
    "specforge": ("SpecForge", "tab:orange"),
    "specforge sdpa": ("SpecForge, sdpa", "tab:brown"),
    "dense": ("everything dense", "tab:gray"),
}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmark.py train-figures", description=__doc__)
    parser.add_argument("--results", type=Path, nargs="+", default=[OUTPUT / "train.json"], help="of one machine")
    parser.add_argument("--output-dir", type=Path, default=OUTPUT)
    args = parser.parse_args(arguments)
    contents = [json.loads(path.read_text()) for path in args.results]
    rows = [row for content in contents for row in content["rows"]]
    sections = [_introduction(contents[0]["machine"]), bars(rows), draft_table(rows), whole_table(rows)]
    sections += [notes(rows), not_run("Not run", "contender", rows, lambda row: row["case"])]
    (args.output_dir / "train.md").write_text("\n\n".join(section for section in sections if section) + "\n")
    draw(contents[0]["machine"]["device"], rows, args.output_dir / "train_lengths.png")
    print(f"train.md and train_lengths.png written to {args.output_dir}")


def _introduction(machine: dict[str, str]) -> str:
    device, versions = introduce(machine)
    return f"""# Training steps on {device}

`scripts/benchmark.py train`; {versions}.
bf16 weights, gradients and AdamW moments, random weights and data, medians. A draft step is forward and backward from
ready target states, metrics and the teacher's full-vocabulary argmax included; a whole step adds the target's forward
and the optimizer. `over` is the peak over weights, optimizer state and inputs, `extra` the same without the gradients,
`peak` all memory in use. `waits` are the host's for the device. SpecForge is 0.2.0 with FlexAttention, `compact` with
its compact teacher; its gradients were compared with ours first."""


def bars(rows: Rows) -> str:
    """What the design asks for, and what was measured."""
    found = {(row["case"], row["contender"]): row for row in measured(rows)}

    def figure(case: str, contender: str, name: str) -> float | None:
        return found.get((case, contender), {}).get(name)

    def ratio(name: str, one: tuple[str, str], other: tuple[str, str]) -> float | None:
        pair = figure(*one, name), figure(*other, name)
        return pair[0] / pair[1] if pair[0] is not None and pair[1] else None

    step, long, peer = ("llama 8k", "ours"), ("llama 32k", "ours"), ("llama 8k", "specforge compact")
    again = ("llama 32k", "ours recompute")
    mixture, whole = ("gpt-oss 8k, K 3, full, whole", "ours"), ("llama 8k, whole", "ours compiled")
    lines: list[tuple[str, str, float, float | None]] = [
        ("draft step, 8192 tokens, ms", "<=", 250, figure(*step, "ms")),
        ("draft step, 8192 tokens, GiB over weights", "<=", 10, figure(*step, "over_gib")),
        ("draft step, 8192 tokens, speed over SpecForge's best", ">=", 1.35, figure(*step, "speedup_over_specforge")),
        ("draft step, 8192 tokens, memory over SpecForge's", "<=", 0.57, ratio("over_gib", step, peer)),
        ("draft step, 32768 tokens, ms", "<=", 1250, figure(*long, "ms")),
        ("draft step, 32768 tokens, speed over SpecForge's best", ">=", 1.65, figure(*long, "speedup_over_specforge")),
        ("draft step, 32768 tokens, recomputing, ms", "<=", 1450, figure(*again, "ms")),
        ("draft step, 32768 tokens, recomputing, GiB over weights", "<=", 12, figure(*again, "over_gib")),
        ("draft step, 25% over all supervised, time", "<=", 0.38, ratio("ms", ("llama 8k, 25%", "ours"), step)),
        ("gpt-oss-20b, K = 3, full vocabulary, whole, tokens/s", ">=", 18000, figure(*mixture, "tokens_per_second")),
        ("gpt-oss-20b, the same, speed over its parts alone", ">=", 0.9, figure(*mixture, "speed_over_parts")),
        ("Llama-3.1-8B, K = 7, whole, target compiled, tokens/s", ">=", 16500, figure(*whole, "tokens_per_second")),
        ("Llama-3.1-8B, whole, 131072 tokens, GiB", "<=", 140, figure("llama 128k, whole", again[1], "peak_gib")),
        ("Llama-3.1-8B, whole, 262144 tokens, GiB", "<=", 140, figure("llama 256k, whole", again[1], "peak_gib")),
    ]
    return markdown_table("Bars of the design", ("", "bar", "measured", "met"), map(_bar, lines))


def _bar(line: tuple[str, str, float, float | None]) -> tuple[str, ...]:
    text, sign, bar, value = line
    if value is None:
        return text, f"{sign} {bar:g}", "", ""
    met = value <= bar if sign == "<=" else value >= bar
    return text, f"{sign} {bar:g}", f"{value:.0f}" if bar >= 100 else f"{value:.2f}", "yes" if met else "no"


def draft_table(rows: Rows) -> str:
    columns = {
        "ms": _cell("ms", ".0f"), "tokens/s": _cell("tokens_per_second", ".0f"), "over, GiB": _cell("over_gib", ".1f"),
        "extra, GiB": _cell("extra_gib", ".1f"), "speed over SpecForge": _cell("speedup_over_specforge", ".2f"),
        "waits": _cell("waits", "d"), "compiled again": _cell("recompilations", "d"),
        "error over dense": _cell("error_over_dense", ".2f"),
    }  # fmt: skip
    return _table("Draft steps", columns, (row for row in measured(rows) if not row["whole"]))


def whole_table(rows: Rows) -> str:
    columns = {
        "ms": _cell("ms", ".0f"), "tokens/s": _cell("tokens_per_second", ".0f"), "peak, GiB": _cell("peak_gib", ".1f"),
        "over, GiB": _cell("over_gib", ".1f"), f"speed over {' + '.join(PARTS)}": _cell("speed_over_parts", ".2f"),
        "TFLOP/s": _cell("tflops", ".0f"), "waits": _cell("waits", "d"),
        "compiled again": _cell("recompilations", "d"),
    }  # fmt: skip
    return _table("Whole steps, and their parts alone", columns, (row for row in measured(rows) if row["whole"]))


def notes(rows: Rows) -> str:
    places: dict[str, list[str]] = {}
    for row in rows:
        if "note" in row:
            places.setdefault(row["note"], []).append(f"{row['case']} ({row['contender']})")
    lines = [(note, "; ".join(of)) for note, of in places.items()]
    return markdown_table("Notes", ("", "rows"), lines) if lines else ""


def _cell(name: str, digits: str) -> Callable[[Row], str]:
    return lambda row: "" if row.get(name) is None else format(row[name], digits)


def _table(heading: str, columns: dict[str, Callable[[Row], str]], rows: Iterable[Row]) -> str:
    lines = [(row["case"], row["contender"], *(cell(row) for cell in columns.values())) for row in rows]
    return markdown_table(heading, ("", "", *columns), lines)


def draw(device: str, rows: Rows, path: Path) -> None:
    """Time and memory over the length, everything else as in the main case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    alike = {"shape": "llama", "steps": 7, "share": 100, "documents": 1, "whole": False}
    shown = [row for row in measured(rows) if all(row[name] == value for name, value in alike.items())]
    shown = [row for row in shown if not row["case"].endswith("full")]
    panels = {"ms": "forward and backward, ms", "over_gib": "memory over weights and inputs, GiB"}
    canvas, all_axes = pyplot.subplots(1, len(panels), figsize=(9.6, 4))
    for axes, (figure, label) in zip(all_axes, panels.items(), strict=True):
        for contender, (name, colour) in STYLES.items():
            own = [row for row in shown if row["contender"] == contender and row.get(figure)]
            points = sorted((row["length"], row[figure]) for row in own)
            if points:
                axes.plot(*zip(*points, strict=True), "o-", label=name, color=colour)
        style_length_axes(axes, (row["length"] for row in shown), "tokens, one document, all supervised", label)
    if all_axes[0].lines:
        all_axes[0].legend(frameon=False, fontsize=8)
    canvas.suptitle(f"draft step, Llama-3.1-8B, K = 7, draft vocabulary 32000, {device}", fontsize=10)
    canvas.tight_layout()
    canvas.savefig(path, dpi=110)
    pyplot.close(canvas)

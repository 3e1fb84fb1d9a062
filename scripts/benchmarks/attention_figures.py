"""Figures and Markdown tables from the results of `attention`, `attention-memory` and `targets`; needs no GPU."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .common import OUTPUT, introduce, markdown_table, measured, not_run, style_length_axes


Row = dict[str, Any]
OURS = ("fa4", "cudnn", "triton", "sdpa")
STYLES = {  # label and colour
    "flex": ("FlexAttention", "tab:red"),
    "dense": ("dense, concatenated keys", "tab:gray"),
    "reference": ("dense, one column per diagonal", "tab:olive"),
    "triton": ("ours, Triton", "tab:cyan"),
    "auto": ("ours", "tab:blue"),
}
WHOLE, COMPACTED = "1x32768", "queries 25% of 1x32768"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmark.py attention-figures", description=__doc__)
    parser.add_argument("--results", type=Path, default=OUTPUT / "attention.json")
    parser.add_argument("--lengths", type=Path, default=OUTPUT / "attention_memory.json")
    parser.add_argument("--targets", type=Path, default=OUTPUT / "targets.json")
    parser.add_argument("--output-dir", type=Path, default=OUTPUT)
    args = parser.parse_args(arguments)
    shapes, lengths, targets = (json.loads(path.read_text()) for path in (args.results, args.lengths, args.targets))
    sections = [_introduction(shapes["machine"]), *shape_tables(shapes["rows"]), *length_tables(lengths["rows"])]
    sections += target_tables(targets["rows"], targets["settings"]["tokens"])
    (args.output_dir / "attention.md").write_text("\n\n".join(sections) + "\n")
    draw(lengths, args.output_dir)
    print(f"attention.md, attention_time.png and attention_memory.png written to {args.output_dir}")


def _introduction(machine: dict[str, str]) -> str:
    device, versions = introduce(machine)
    return f"""# Attention on {device}

`scripts/benchmark.py attention` and `attention-memory`; {versions}.
bf16, random data, medians. TFLOP/s count visible pairs only. A step has as many diagonals as its number. Extra memory
is the peak of forward and backward over inputs, output and gradients. `auto` is what the op picks by itself."""


def shape_tables(rows: list[Row]) -> list[str]:
    done = measured(rows)

    def time(figure: str) -> Callable[[Row], str]:
        return lambda row: f"{row[f'{figure}_ms']:.2f} ({row[f'{figure}_tflops']:.0f})"

    sections = [
        _pivot("Forward and backward, ms (TFLOP/s)", done, time("forward_backward"), speedups=True),
        _pivot("Forward, ms (TFLOP/s)", done, time("forward")),
        _pivot("Extra memory, GiB", [row for row in done if row["extra_gib"] is not None], _gibibytes),
        _pivot("Error, in errors of dense attention of the same dtype (against fp64)", done, _error),
        compaction_table(done),
        markdown_table(
            "FlexAttention's block mask, built once per batch, not part of the times above",
            ("shape", "step", "ms", "GiB"),
            [(*_shape(row), f"{row['mask_ms']:.2f}", f"{row['mask_gib']:.3f}") for row in done if "mask_ms" in row],
        ),
        _not_run("Not run", rows),
    ]
    return [section for section in sections if section]


def compaction_table(done: list[Row]) -> str:
    """Time of a quarter of the queries over that of all, for the same engine and step."""
    all_queries = {(row["step"], row["engine"]): row for row in done if row["case"] == WHOLE}
    lines = []
    for row in done:
        whole = all_queries.get((row["step"], row["engine"]))
        if row["case"] == COMPACTED and whole:
            pair = whole["forward_backward_ms"], row["forward_backward_ms"]
            lines.append((str(row["step"]), row["engine"], *map("{:.2f}".format, (*pair, pair[1] / pair[0]))))
    heading = "25% of the queries of 1x32768, in turns spread evenly: forward and backward, ms"
    return markdown_table(heading, ("step", "engine", "all", "25%", "ratio"), lines)


def length_tables(rows: list[Row]) -> list[str]:
    done = measured(rows)
    sections = [
        _pivot("Over the length: forward and backward, ms", done, lambda row: f"{row['forward_backward_ms']:.2f}"),
        _pivot(
            "Over the length: extra memory, GiB", [row for row in done if row["extra_gib"] is not None], _gibibytes
        ),
        _not_run("Over the length: not run", rows),
    ]
    return [section for section in sections if section]


def target_tables(rows: list[Row], tokens: int) -> list[str]:
    forwards, checks = [], []
    for row in rows:
        if "attention" in row:
            memory = "" if row.get("extra_gib") is None else f"{row['extra_gib']:.2f}"
            time = f"{row['forward_ms']:.1f}" if row["status"] == "ok" else f"{row['status']}: {row['reason']}"
            forwards.append((row["target"], row["attention"], time, memory))
            continue
        what = f"packed {row['packed']}" if "packed" in row else f"compared {row['compared']}"
        figures = (f"{name} {value:.2e}" for name, value in row.items() if isinstance(value, float) and value < 1)
        checks.append((row["target"], what, ", ".join(figures), row.get("status", "")))
    heading = f"Whole targets of random weights, forward of {tokens} tokens"
    return [
        markdown_table(heading, ("target", "attention", "ms", "GiB over the weights"), forwards),
        markdown_table("Relative differences of their last states and logits", ("target", "", "", ""), checks),
    ]


def _not_run(heading: str, rows: list[Row]) -> str:
    return not_run(heading, "engine", rows, lambda row: f"{row['case']} step {row['step']}")


def _pivot(heading: str, rows: list[Row], cell: Callable[[Row], str], speedups: bool = False) -> str:
    """One line per shape and step, one column per engine."""
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    lines = []
    for shape in dict.fromkeys(map(_shape, rows)):
        by_engine = {row["engine"]: row for row in rows if _shape(row) == shape}
        line = [*shape, *(cell(by_engine[engine]) if engine in by_engine else "" for engine in engines)]
        if "auto" in by_engine:
            line[2 + engines.index("auto")] += f" {by_engine['auto']['chosen']}"
        if speedups:
            ratios = {name: by_engine[name].get("speedup_over_flex", 0) for name in OURS if name in by_engine}
            best = max(ratios, key=lambda name: ratios[name], default="")
            line += [f"{ratios[name]:.2f} {name}" if ratios.get(name) else "" for name in (best, "triton")]
        lines.append(line)
    columns = ("shape", "step", *engines, *(("best over flex", "Triton over flex") if speedups else ()))
    return markdown_table(heading, columns, lines)


def _shape(row: Row) -> tuple[str, str]:
    return row["case"], str(row["step"])


def _gibibytes(row: Row) -> str:
    return f"{row['extra_gib']:.3f}"


def _error(row: Row) -> str:
    return f"{row['error_over_dense']:.2f}" if "error_over_dense" in row else ""


def draw(lengths: dict[str, Any], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    rows = [row for row in measured(lengths["rows"]) if row["batch"] == 1]
    device = lengths["machine"]["device"]
    for name, figure, label in (
        ("time", "forward_backward_ms", "forward and backward, ms"),
        ("memory", "extra_gib", "memory over inputs, output and gradients, GiB"),
    ):
        _draw_lines(rows, figure, f"{label} ({device})", folder / f"attention_{name}.png")


def _draw_lines(rows: list[Row], figure: str, label: str, path: Path) -> None:
    from matplotlib import pyplot

    canvas, axes = pyplot.subplots(figsize=(6.4, 4.2))
    for engine in dict.fromkeys(row["engine"] for row in rows):
        points = sorted((row["length"], row[figure]) for row in rows if row["engine"] == engine and row[figure])
        if points:
            name, colour = STYLES.get(engine, (engine, None))
            if chosen := sorted({row["chosen"] for row in rows if row["engine"] == engine and "chosen" in row}):
                name += f" ({', '.join(chosen)})"
            axes.plot(*zip(*points, strict=True), "o-", label=name, color=colour)
    xlabel = "rows, batch 1, 32 query and 8 key heads of 128, 6 diagonals"
    style_length_axes(axes, (row["length"] for row in rows), xlabel, label)
    if axes.lines:
        axes.legend(frameon=False)
    canvas.tight_layout()
    canvas.savefig(path, dpi=110)
    pyplot.close(canvas)

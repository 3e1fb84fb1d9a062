"""Figures and Markdown tables from the results of `loss` and `lm`; needs no GPU."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .common import OUTPUT, introduce, markdown_table, measured, not_run


Row = dict[str, Any]
Rows = list[Row]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmark.py loss-figures", description=__doc__)
    parser.add_argument("--results", type=Path, default=OUTPUT / "loss.json")
    parser.add_argument("--lm", type=Path, default=OUTPUT / "lm.json")
    parser.add_argument("--output-dir", type=Path, default=OUTPUT)
    args = parser.parse_args(arguments)
    losses, lm = (json.loads(path.read_text()) for path in (args.results, args.lm))
    sections = [_introduction(losses["machine"]), *loss_tables(losses["rows"]), *lm_tables(lm)]
    (args.output_dir / "loss.md").write_text("\n\n".join(section for section in sections if section) + "\n")
    draw(losses, lm, args.output_dir)
    print(f"loss.md, loss_chunks.png and lm_chunks.png written to {args.output_dir}")


def _introduction(machine: dict[str, str]) -> str:
    device, versions = introduce(machine)
    return f"""# Streaming loss on {device}

`scripts/benchmark.py loss` and `lm`; {versions}.
bf16, random data, medians; forward and backward with a trained head. TFLOP/s count the matrix products that the
mathematics needs, once each. Extra memory is the peak over inputs, outputs and gradients. `gemms` are the bare
products, of all rows at once or 4096 at a time; ratios are to the faster of the two. A number after `ours` is the
chunk size, `auto` what the op chooses. `xN` after Liger multiplies its chunk, `fp32` is the dtype in which it sums the
head's gradient, always so in ours."""


def loss_tables(rows: Rows) -> list[str]:
    done = measured(rows)
    hard = [row for row in done if not row["steps"] and not row["checked_rows"]]
    soft = [row for row in done if row["steps"]]
    long = [row for row in done if row["checked_rows"]]
    sections = [bars(hard)]
    for name, group in (("Hard labels, 8192 tokens", hard), ("Against a teacher, H 4096, V 128256", soft)):
        sections += [
            _pivot(f"{name}: ms (TFLOP/s)", group, lambda row: f"{row['ms']:.2f} ({row['tflops']:.0f})"),
            _pivot(f"{name}: time over the bare products", group, _figure("over_gemms", ".2f")),
            _pivot(f"{name}: extra memory, GiB", group, _figure("extra_gib", ".2f")),
            _pivot(f"{name}: largest error, in errors of the dense loss", group, _figure("error_over_dense", ".2f")),
            _pivot(f"{name}: 1 - cosine of the head's gradient with fp64's", group, _distance),
        ]
    sections.append(_pivot("Memory over the rows: extra GiB", long, _figure("extra_gib", ".3f")))
    sections.append(not_run("Not run", "contender", rows, lambda row: row["case"]))
    return sections


def bars(hard: Rows) -> str:
    """The ratios that the design asks for."""
    lines = []
    for case, of_case in _by(hard, "case").items():
        times = {row["contender"]: row["ms"] for row in of_case}
        bare = min((times[name] for name in ("gemms", "gemms 4096") if name in times), default=None)
        precise = min((ms for name, ms in times.items() if name.startswith("liger fp32")), default=None)
        whole = times.get("ours 4096")
        pairs = [
            (whole, bare), (times.get("ours 1024"), whole), (times.get("ours 512"), whole),
            (whole, times.get("liger")), (whole, precise),
        ]  # fmt: skip
        lines.append([case, *(f"{one / other:.2f}" if one and other else "" for one, other in pairs)])
    columns = ("", "4096 / bare products", "1024 / 4096", "512 / 4096", "4096 / Liger", "4096 / Liger's best in fp32")
    return markdown_table("Chunk sizes, the bare products and Liger: ratios of times", columns, lines)


def lm_tables(lm: dict[str, Any]) -> list[str]:
    settings, rows = lm["settings"], lm["rows"]
    heading = (
        f"Full fine-tuning: {settings['parameters'] / 1e9:.1f}B parameters, {settings['layers']} layers of "
        f"{settings['hidden']}, vocabulary {settings['vocabulary']}, {settings['optimizer']}"
    )
    lines = []
    for tokens, of_size in _by(measured(rows), "tokens").items():
        dense = next((row for row in of_size if row["loss"] == "dense"), None)
        for row in of_size:
            speed = f"{row['tokens_per_second'] / dense['tokens_per_second']:.3f}" if dense else ""
            peak = "" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
            chunk = f"{row['loss']} = {row['chunk']}" if row["loss"] == "auto" else row["loss"]
            lines.append([str(tokens), chunk, f"{row['tokens_per_second']:.0f}", speed, peak])
    columns = ("tokens per step", "loss, chunk", "tokens/s", "over dense", "peak GiB")
    return [
        markdown_table(heading, columns, lines),
        not_run("Full fine-tuning: not run", "loss", rows, lambda row: f"{row['tokens']} tokens"),
    ]


def _by(rows: Rows, name: str) -> dict[Any, Rows]:
    return {value: [row for row in rows if row[name] == value] for value in dict.fromkeys(row[name] for row in rows)}


def _figure(name: str, digits: str) -> Callable[[Row], str]:
    return lambda row: "" if row.get(name) is None else format(row[name], digits)


def _distance(row: Row) -> str:
    return "" if row.get("weight_cosine") is None else f"{1 - row['weight_cosine']:.1e}"


def _pivot(heading: str, rows: Rows, cell: Callable[[Row], str]) -> str:
    """One line per contender, one column per case; lines without a figure are left out."""
    cases, lines = _by(rows, "case"), []
    for contender, own in _by(rows, "contender").items():
        cells = {row["case"]: cell(row) for row in own}
        if any(cells.values()):
            lines.append([contender, *(cells.get(case, "") for case in cases)])
    return markdown_table(heading, ["", *cases], lines)


def draw(losses: dict[str, Any], lm: dict[str, Any], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    ours = [row | {"series": row["case"], "auto": row["contender"] == "ours auto"} for row in measured(losses["rows"])]
    ours = [row for row in ours if row["contender"].startswith("ours") and not row["checked_rows"]]
    hard = [row for row in ours if not row["steps"]]
    _draw_panels(
        hard, [("over_gemms", "time over the bare products"), ("extra_gib", "extra memory, GiB")],
        f"hard labels, {losses['machine']['device']}", folder / "loss_chunks.png",
    )  # fmt: skip
    steps = [
        row | {"series": f"{row['tokens']} tokens", "auto": row["loss"] == "auto"} for row in measured(lm["rows"])
    ]
    _draw_panels(
        steps, [("tokens_per_second", "tokens/s"), ("peak_gib", "peak memory, GiB")],
        f"full fine-tuning, {lm['settings']['parameters'] / 1e9:.1f}B parameters, {lm['machine']['device']}",
        folder / "lm_chunks.png",
    )  # fmt: skip


def _draw_panels(rows: Rows, panels: list[tuple[str, str]], title: str, path: Path) -> None:
    """Figures over the chunk size, a star where it was chosen; rows without a chunk size are dashed lines."""
    from matplotlib import pyplot

    canvas, all_axes = pyplot.subplots(1, len(panels), figsize=(9.6, 4))
    for axes, (figure, label) in zip(all_axes, panels, strict=True):
        for number, (series, of_series) in enumerate(_by(rows, "series").items()):
            shown = [row for row in of_series if row.get(figure) is not None]
            points = sorted((row["chunk"], row[figure]) for row in shown if row["chunk"] and not row["auto"])
            axes.plot([x for x, _ in points], [y for _, y in points], "o-", color=f"C{number}", label=series)
            for row in shown:
                if row["auto"]:
                    axes.plot(row["chunk"], row[figure], "*", color=f"C{number}", markersize=15)
                elif not row["chunk"]:
                    axes.axhline(row[figure], color=f"C{number}", linestyle="--", alpha=0.6)
        ticks = sorted({row["chunk"] for row in rows if row["chunk"] and not row["auto"]})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_ylim(0, 1.08 * max((row[figure] for row in rows if row.get(figure) is not None), default=1))
        axes.set_xlabel("chunk size, tokens (star: chosen by itself; dashed: whole logits)")
        axes.set_title(label, fontsize=10, loc="left")
        axes.grid(alpha=0.3)
    all_axes[0].legend(frameon=False, fontsize=8)
    canvas.suptitle(title, fontsize=10)
    canvas.tight_layout()
    canvas.savefig(path, dpi=110)
    pyplot.close(canvas)

"""Scaling predicted from measurements on one GPU (`scaling_costs` has the formulas), and checked where it is measured.

One-GPU figures are `scaling`'s own, of the same mode where there is one, else the whole steps of `train`, whose
optimizer they correct; the target's and the optimizer's part are `train`'s. Rows of several GPUs are read for the
check alone: tokens/s within 10% of the prediction, or the exit status is 1.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftsmith.data.files import written_whole

from .common import GIB, OUTPUT, introduce, line, markdown_table, measured
from .scaling_costs import GPU_DEVIATION, Links, OneGpu, Prediction, Run, Shape, predict
from .scaling_rank import CASES, DEFAULT_CASES, ScalingCase


ALLOWED = 0.1  # relative difference of tokens/s
STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}
GPUS = (1, 2, 4, 8, 16, 32)
# Bytes per weight of AdamW: `train` times it in bf16, weight, gradient and two moments, all but the gradient written
# again; DeepSpeed's are in fp32, and it writes a bf16 copy.
MEASURED_BYTES, FP32_BYTES = 7 * 2, 7 * 4 + 2
HEADER = ("case", "mode", "GPUs", "predicted tokens/s", "efficiency", "exposed ms", "waiting ms", "measured", "off by")


def main(arguments: list[str]) -> None:
    args = parse(arguments)
    scaling, train = (json.loads(path.read_text()) for path in (args.measured, args.parts))
    links = Links(nvlink=1e9 * args.nvlink, network=1e9 * args.network)
    rows = list(predictions(measured(scaling["rows"]), measured(train["rows"]), args, links))
    content = {
        "measured on": scaling["machine"],
        "settings": {**asdict(links), "accumulation": args.accumulation, "row_variation": args.row_variation},
        "rows": rows,
    }
    for columns in (HEADER, *map(_columns, rows)):
        print(line(columns, widths=(24, 8, 6, 20, 12, 12, 12, 10, 12), left=2))
    for suffix, text in ((args.output.suffix, json.dumps(content, indent=1) + "\n"), (".md", render(content))):
        with written_whole(args.output.with_suffix(suffix)) as unfinished:
            unfinished.write_text(text)
    print(f"written to {args.output}")
    if missed := [row for row in rows if abs(row.get("difference", 0.0)) > ALLOWED]:
        sys.exit(f"{len(missed)} of the measured rows differ by more than {ALLOWED:.0%}")


def parse(arguments: list[str]) -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("benchmark.py scaling-model", description=__doc__, formatter_class=formatter)
    parser.add_argument("--measured", type=Path, default=OUTPUT / "scaling.json", help="of `scaling`")
    parser.add_argument("--parts", type=Path, default=OUTPUT / "train.json", help="of `train`")
    parser.add_argument("--output", type=Path, default=OUTPUT / "scaling_model.json", help="JSON; a .md beside it")
    parser.add_argument("--nvlink", type=float, default=Links.nvlink / 1e9, help="GB/s of a GPU, each way")
    parser.add_argument("--network", type=float, default=Links.network / 1e9, help="GB/s of a GPU between hosts")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of an optimizer step")
    parser.add_argument("--row-variation", type=float, default=0.0,
                        help="standard deviation of a batch's supervised rows, over their mean")  # fmt: skip
    return parser.parse_args(arguments)


def predictions(
    scaling: Sequence[dict[str, Any]], train: Sequence[dict[str, Any]], args: argparse.Namespace, links: Links
) -> Iterator[dict[str, Any]]:
    """A row for each case, ZeRO stage and number of GPUs of which a GPU alone was measured."""
    for name in (*DEFAULT_CASES, *(name for name, case in CASES.items() if case.target_tp > 1)):
        case = CASES[name]
        shape = Shape.of(case)
        for mode, stage in STAGES.items():
            one, source = measured_alone(case, mode, scaling, train)
            for gpus in (gpus for gpus in GPUS if gpus % case.target_tp == 0):
                run = Run(gpus, stage, args.accumulation, case.target_tp, args.row_variation)
                made = predict(shape, one, run, links)
                row = {"case": name, "mode": mode, "gpus": gpus, "from": source, **figures(made, one, run)}
                same = (row["accumulation"], args.row_variation) == (1, 0.0)  # as `scaling` runs
                yield row | (check(row, scaling) if same else {})


def measured_alone(
    case: ScalingCase, mode: str, scaling: Sequence[dict[str, Any]], train: Sequence[dict[str, Any]]
) -> tuple[OneGpu, str]:
    """Of a case, and where its step is from. A target in shards is computed as fast as a whole one."""
    parts = {row["contender"]: row["ms"] for row in train
             if row["whole"] and (row["shape"], row["length"], row["steps"], row["draft_vocabulary"], row["share"])
             == (case.shape, case.length, case.steps, case.draft_vocabulary, 100)}  # fmt: skip
    optimizer = parts["optimizer"] * FP32_BYTES / MEASURED_BYTES
    alone = [row for row in scaling if row["gpus"] == 1 and same_work(row, case)]
    alone.sort(key=lambda row: row["mode"] != mode)
    if alone:
        step, deviation, source = alone[0]["step_ms"], alone[0].get("deviation_ms", 0.0), f"scaling {alone[0]['mode']}"
    else:
        step, deviation, source = parts["ours"] + optimizer - parts["optimizer"], 0.0, "train"
    return OneGpu(case.length, step, parts["target"], optimizer, deviation), source


def same_work(row: dict[str, Any], case: ScalingCase) -> bool:
    """Whether a row of `scaling` trains the same head on the same tokens, however its target is held."""
    return [row[name] for name in ("shape", "length", "ttt_steps", "draft")] == [
        case.shape, case.length, case.steps, case.draft_vocabulary,
    ]  # fmt: skip


def figures(made: Prediction, one: OneGpu, run: Run) -> dict[str, Any]:
    per_gpu = 1000 * run.accumulation * one.tokens / made.step_ms
    return {
        "accumulation": run.accumulation,
        "step_ms": made.step_ms,
        "tokens_per_second": run.gpus * per_gpu,
        "tokens_per_second_per_gpu": per_gpu,
        "efficiency": per_gpu * one.step_ms / 1000 / one.tokens,
        "collectives_ms": made.collectives_ms,
        "exposed_ms": made.exposed_ms,
        "waiting_ms": made.straggling_ms,
        "collectives_gib": {kind: size / GIB for kind, size in made.bytes.items()},
    }


def check(row: dict[str, Any], scaling: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What was measured in the row's place, if it was, and how far the prediction is from it."""
    if row["gpus"] == 1:
        return {}
    for other in scaling:
        if all(other[name] == row[name] for name in ("case", "mode", "gpus")):
            speed = other["tokens_per_second"]
            kept = ("step_ms", "tokens_per_second", "efficiency", "collectives_ms", "exposed_ms")
            gib = {kind: figures["gib"] for kind, figures in other["collectives"].items()}
            seen = {name: other[name] for name in kept if name in other} | {"collectives_gib": gib}
            return {"measured": seen, "difference": row["tokens_per_second"] / speed - 1}
    return {}


def render(content: dict[str, Any]) -> str:
    device, versions = introduce(content["measured on"])
    settings = content["settings"]
    intro = (
        "# Scaling beyond what was run\n\nPredicted by `scripts/benchmark.py scaling-model` from steps on one "
        f"{device} ({versions}); formulas, and the sources of their constants, are in "
        f"`scripts/benchmarks/scaling_costs.py`. NVLink {settings['nvlink'] / 1e9:.0f} GB/s, between hosts of "
        f"{settings['node']} GPUs {settings['network'] / 1e9:.0f} GB/s for each, micro-batches per step "
        f"{settings['accumulation']}, supervised rows of a batch vary by {settings['row_variation']:.0%}, GPUs are "
        f"assumed to differ by {GPU_DEVIATION:.0%} (standard deviations). In brackets the efficiency: tokens/s per "
        "GPU over those of the measured step."
    )
    groups: dict[tuple[str, str], dict[int, str]] = {}
    for row in content["rows"]:
        cell = f"{row['tokens_per_second']:,.0f} ({row['efficiency']:.3f})"
        groups.setdefault((row["case"], row["mode"]), {})[row["gpus"]] = cell
    lines = [(*group, *(cells.get(gpus, "") for gpus in GPUS)) for group, cells in groups.items()]
    heading = "Predicted tokens/s, by GPUs"
    seen = [_columns(row) for row in content["rows"] if "measured" in row]
    tables = [
        markdown_table(heading, ("case", "mode", *map(str, GPUS)), lines),
        markdown_table("Held against measured rows", HEADER, seen),
    ]
    return "\n\n".join(filter(None, [intro, *tables])) + "\n"


def _columns(row: dict[str, Any]) -> list[str]:
    seen = row.get("measured")
    return [
        row["case"], row["mode"], str(row["gpus"]), f"{row['tokens_per_second']:,.0f}", f"{row['efficiency']:.3f}",
        f"{row['exposed_ms']:.1f}", f"{row['waiting_ms']:.1f}",
        f"{seen['tokens_per_second']:,.0f}" if seen else "-",
        f"{row['difference']:+.1%}" if seen else "",
    ]  # fmt: skip

"""Time and memory of every attention engine, FlexAttention and dense attention, on the GPU.

A row is timed only after its output and gradients have been compared with fp64 mathematics. TFLOP/s count useful work:
4 * head_dim per visible (query, key) pair forward, 3.5 times that with backward. Extra memory is the peak of forward
and backward over inputs, output and gradients. FlexAttention's block mask is built and timed apart.
"""

import argparse
import functools
import gc
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .attention_cases import CASES, MAIN_CASES, Case, Inputs, make_inputs
from .attention_check import Reference
from .attention_contenders import Contender, Dense, Flex, Ours, score_bytes
from .common import (
    ALLOWED,
    GIB,
    OUTPUT,
    Refused,
    Results,
    attempt,
    extra_gib,
    line,
    make_parser,
    median_ms,
    release_memory,
    show_choices,
)


PEERS = {"flex": Flex, "dense": Dense}
ENGINES = ("flex", "dense", "fa4", "cudnn", "triton", "auto")  # auto: the engine that the op itself picks
LARGEST_DENSE = 100 * GIB
HEADER = ("case", "step", "engine", "fwd ms", "f+b ms", "TFLOP/s", "f+b", "extra GiB", "vs flex", "error")


@dataclass(frozen=True)
class Settings:
    device: torch.device
    dtype: torch.dtype
    seconds: float  # of repeats per figure
    whole_rows: int  # length of the shrunk case whose every row is checked
    sampled_rows: int  # checked at full length
    deadline: float  # on `time.monotonic`; what is not begun by then is skipped


GPU = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "seconds": 0.2, "whole_rows": 1024, "sampled_rows": 64}
DRY = {"device": torch.device("cpu"), "dtype": torch.float32, "seconds": 0, "whole_rows": 24, "sampled_rows": 8}
DRY_FACTOR, DRY_ENGINES = 2048, ("dense", "reference", "sdpa", "fa4", "auto")  # CPU has no fa4: how a refusal looks


def main(arguments: list[str]) -> None:
    parser = make_engine_parser("attention", __doc__, OUTPUT / "attention.json", ENGINES)
    names = [case.name for case in CASES]
    parser.add_argument("--shapes", nargs="+", choices=names, help="default: all", metavar="NAME")
    parser.add_argument("--steps", nargs="+", type=int, help="numbers of diagonals; default: those of each shape")
    parser.add_argument("--quick", action="store_true", help="the three main shapes at steps 0 and 6")
    args = parser.parse_args(arguments)
    cases = [case for case in CASES if not args.shapes or case.name in args.shapes]
    steps = args.steps
    if args.quick:
        cases, steps = [case for case in cases if case in MAIN_CASES], steps or [0, 6]
    run(cases, args, steps=steps)


def make_engine_parser(name: str, text: str | None, output: Path, engines: Sequence[str]) -> argparse.ArgumentParser:
    parser = make_parser(name, text, output)
    parser.add_argument("--engines", nargs="+", help=f"default: {' '.join(engines)}", metavar="NAME")
    parser.set_defaults(default_engines=engines)
    return parser


def run(cases: Sequence[Case], args: argparse.Namespace, steps: Sequence[int] | None = None) -> None:
    """Measure `args.engines` on all cases; each at its own steps, or at those of them that are in `steps`."""
    engines = args.engines or (DRY_ENGINES if args.dry_run else args.default_engines)
    settings = Settings(**(DRY if args.dry_run else GPU), deadline=time.monotonic() + args.time_limit)
    if args.dry_run:
        cases = [case.shrunk(DRY_FACTOR) for case in cases]
    show_choices()
    torch.manual_seed(0)
    gc.freeze()  # collecting before each measurement would search all imported modules
    results = Results(args.output, settings.device, dtype=str(settings.dtype), seconds_per_figure=settings.seconds)
    print(_line(HEADER))
    for case in cases:
        for step in case.steps:
            if not steps or step in steps:
                measure_case(case, step, engines, settings, results)
    gc.unfreeze()
    print(f"written to {results.path}")


def measure_case(case: Case, step: int, engines: Sequence[str], settings: Settings, results: Results) -> None:
    shape = {"case": case.name, "step": step, **asdict(case), "visible_pairs": case.visible_pairs(step)}
    for name in ("name", "steps", "flex_steps"):
        del shape[name]
    references: list[Reference] = []
    flex_ms = None
    for engine in engines:
        if engine == "flex" and step not in case.flex_steps:
            continue
        measure = functools.partial(measure_engine, engine, case, step, references, settings)
        figures = attempt(measure, settings.deadline)
        if engine == "flex":
            flex_ms = figures.get("forward_backward_ms")
        if flex_ms and figures["status"] == "ok":
            figures["speedup_over_flex"] = flex_ms / figures["forward_backward_ms"]
        results.add({**shape, "engine": engine, **figures})
        print(_line(_columns(results.rows[-1])), flush=True)
        release_memory(settings.device)


def make_references(case: Case, step: int, settings: Settings) -> list[Reference]:
    """Of the case itself, at a few rows, and of its shrunk like, at all."""
    shrunk = case.shrunk(case.length // settings.whole_rows)
    sizes = {case: settings.sampled_rows, shrunk: shrunk.length}
    return [
        Reference.of(make_inputs(size, step, settings.device, settings.dtype), rows) for size, rows in sizes.items()
    ]


def measure_engine(
    engine: str, case: Case, step: int, references: list[Reference], settings: Settings
) -> dict[str, Any]:
    if not references:  # by the first engine of a case, so that a failure to make them is its failure
        references += make_references(case, step, settings)
    inputs, device = references[0].inputs, settings.device
    if (needed := score_bytes(engine, case, step)) > LARGEST_DENSE:
        raise Refused(f"needs about {needed / GIB:.0f} GiB")
    contender = make_contender(engine, inputs)
    figures: dict[str, Any] = {}
    if engine == "auto":
        figures["chosen"] = contender.engine()
    if isinstance(contender, Flex):
        figures["mask_ms"] = median_ms(contender.build_mask, device, settings.seconds)
        figures["mask_gib"] = contender.mask_bytes() / GIB
    if engine != "dense":  # which the others are compared with
        errors = [check(contender, references[0])]
        if engine != "flex":  # which would be compiled once more for another length
            errors += [check(make_contender(engine, reference.inputs), reference) for reference in references[1:]]
        figures["error_over_dense"] = max(errors)
    flops = case.forward_flops(step)
    figures["forward_ms"] = median_ms(contender.forward, device, settings.seconds)
    figures["extra_gib"] = extra_gib(contender.forward_backward, device)
    figures["forward_backward_ms"] = median_ms(contender.forward_backward, device, settings.seconds)
    figures["forward_tflops"] = flops / figures["forward_ms"] / 1e9
    figures["forward_backward_tflops"] = 3.5 * flops / figures["forward_backward_ms"] / 1e9
    return figures


def make_contender(engine: str, inputs: Inputs) -> Contender:
    if engine in PEERS:
        return PEERS[engine](inputs)
    return Ours(inputs, None if engine == "auto" else engine)


def check(contender: Contender, reference: Reference) -> float:
    error = reference.error(contender.run)
    if not error <= ALLOWED:
        raise Refused(f"wrong: {error:.2f} times the error of dense attention at {reference.inputs.case.length} rows")
    return error


def _columns(row: dict[str, Any]) -> list[str]:
    engine = f"auto={row['chosen']}" if "chosen" in row else row["engine"]
    start = [row["case"], str(row["step"]), engine]
    if row["status"] != "ok":
        return [*start, f"{row['status']}: {row['reason']}".replace("\n", " ")[:90]]
    formats = {
        "forward_ms": ".3f", "forward_backward_ms": ".3f", "forward_tflops": ".0f", "forward_backward_tflops": ".0f",
        "extra_gib": ".3f", "speedup_over_flex": ".2f", "error_over_dense": ".2f",
    }  # fmt: skip
    values = {name: row.get(name) for name in formats}
    return start + ["-" if value is None else format(value, formats[name]) for name, value in values.items()]


def _line(columns: Sequence[str]) -> str:
    return line(columns, widths=(34, 5, 15, 9, 9, 8, 5, 10, 8, 6), left=3)

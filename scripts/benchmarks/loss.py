"""Time and memory of the streaming losses beside bare matrix products, torch, Liger and CCE, on the GPU.

Forward and backward with a trained head. Ours is timed only after loss and gradients are as near to fp64 as those of
the dense loss of the same dtype; peers only if they compute the same loss, their error is reported. TFLOP/s count the
matrix products that the mathematics needs, once each. Extra memory is the peak over inputs, outputs and gradients: an
fp32 sum of the head's gradient is part of it. Ours also counts hits and, with a teacher, alpha. Contenders take turns,
there and back.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from .common import (
    OUTPUT,
    Results,
    Settings,
    attempt,
    extra_gib,
    line,
    make_parser,
    median_ms,
    release_memory,
    show_choices,
)
from .loss_cases import CASES, QUICK_CASES, QUICK_PEERS, Case, make_inputs
from .loss_check import Reference, SampledReference, accept
from .loss_contenders import GEMMS, PEERS, Contender, Gemms, Ours, ours


HEADER = ("case", "contender", "chunk", "ms", "TFLOP/s", "extra GiB", "over GEMMs", "error", "1 - cos dW")
MOST_REPEATS = 8
ROUNDS = 7
DRY_FACTOR = 1024


GPU = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "seconds": 0.1}
DRY = {"device": torch.device("cpu"), "dtype": torch.float32, "seconds": 0}
DRY_LEFT_OUT = ("compiled",)  # on CPU it would be compiled from C++


def main(arguments: list[str]) -> None:
    parser = make_parser("loss", __doc__, OUTPUT / "loss.json", time_limit=180)
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], metavar="NAME")
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help='such as "ours 1024" or liger; default: all')
    parser.add_argument("--quick", action="store_true", help="the main cases, few peers")
    args = parser.parse_args(arguments)
    settings = Settings(**(DRY if args.dry_run else GPU), deadline=time.monotonic() + args.time_limit)
    show_choices()
    torch.manual_seed(0)
    gc.freeze()  # collecting before each measurement would search all imported modules
    results = Results(args.output, settings.device, dtype=str(settings.dtype), seconds_per_figure=settings.seconds)
    print(_line(HEADER))
    for case in QUICK_CASES if args.quick else CASES:
        if args.cases and case.name not in args.cases:
            continue
        case = case.shrunk(DRY_FACTOR) if args.dry_run else case
        contenders = make_contenders(case, quick=args.quick, dry=args.dry_run)
        if args.contenders:
            contenders = {name: build for name, build in contenders.items() if name in args.contenders}
        measure_case(case, contenders, settings, results)
    gc.unfreeze()
    print(f"written to {results.path}")


def make_contenders(case: Case, *, quick: bool, dry: bool) -> dict[str, Callable]:
    """By name. The bare products come first: the others are compared with them."""
    left_out = DRY_LEFT_OUT if dry else ()
    peers = [name for name in case.peers if name not in left_out and (not quick or name in QUICK_PEERS)]
    bare = {} if case.checked_rows else GEMMS
    return {**bare, **ours(case), **{name: PEERS[name] for name in peers}}


def measure_case(case: Case, contenders: dict[str, Callable], settings: Settings, results: Results) -> None:
    shape = {"case": case.name, **asdict(case), "gemm_flops": case.gemm_flops}
    for name in ("name", "chunks", "peers"):
        del shape[name]
    references: list[Reference | SampledReference] = []
    timed: list[tuple[Contender, dict[str, Any]]] = []
    rows = []
    for name, build in contenders.items():
        row = {**shape, "contender": name}
        row |= attempt(partial(measure, build, case, references, settings, timed, row), settings.deadline)
        results.add(row)
        rows.append(row)
        release_memory(settings.device)
    measure_again(timed, settings)
    compare_with_gemms(rows)
    results.write()
    for row in rows:
        print(_line(_columns(row)), flush=True)


def measure(
    build: Callable[..., Contender], case: Case, references: list[Reference | SampledReference], settings: Settings,
    timed: list[tuple[Contender, dict[str, Any]]], row: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """The first figures of a contender, which joins `timed` together with its `row` unless it cannot be kept."""
    if not references:  # by the first contender, so that a failure to make it is its failure
        inputs = make_inputs(case, settings.device, settings.dtype)
        references.append(SampledReference(inputs, case.checked_rows) if case.checked_rows else Reference(inputs))
    contender = build(references[0].inputs)
    figures: dict[str, Any] = {}
    if not isinstance(contender, Gemms):
        agreement = references[0].compare(contender.run())
        accept(agreement, ours=isinstance(contender, Ours))
        figures |= asdict(agreement)
    else:
        contender.run()
    figures["chunk"] = contender.chunk
    figures["extra_gib"] = extra_gib(contender.run, settings.device)
    figures["rounds_ms"] = [median_ms(contender.run, settings.device, settings.seconds, MOST_REPEATS)]
    if contender.is_kept:
        timed.append((contender, row))
    return figures


def measure_again(timed: list[tuple[Contender, dict[str, Any]]], settings: Settings) -> None:
    """In turns, there and back: a GPU near its power limit is slowed by what ran just before."""
    for turn in range(ROUNDS - 1):
        for contender, row in timed[:: 1 if turn % 2 else -1]:
            if row["status"] == "ok" and time.monotonic() < settings.deadline:
                release_memory(settings.device)  # pieces that another left make the allocator stall
                row["rounds_ms"].append(median_ms(contender.run, settings.device, settings.seconds, MOST_REPEATS))


def compare_with_gemms(rows: list[dict[str, Any]]) -> None:
    done = [row for row in rows if row["status"] == "ok"]
    for row in done:
        row["ms"] = statistics.median(row["rounds_ms"])
        row["tflops"] = row["gemm_flops"] / row["ms"] / 1e9
    gemms = [row["ms"] for row in done if row["contender"] in GEMMS]
    for row in done:
        if gemms and row["contender"] not in GEMMS:
            row["over_gemms"] = row["ms"] / min(gemms)


def _columns(row: dict[str, Any]) -> list[str]:
    start = [row["case"], row["contender"]]
    if row["status"] != "ok":
        return [*start, f" {row['status']}: {row['reason']}".replace("\n", " ")[:90]]
    cosine = row.get("weight_cosine")
    figures = {
        "chunk": "d", "ms": ".3f", "tflops": ".0f", "extra_gib": ".3f", "over_gemms": ".3f", "error_over_dense": ".2f",
    }  # fmt: skip
    values = ["-" if row.get(name) is None else format(row[name], digits) for name, digits in figures.items()]
    return [*start, *values, "-" if cosine is None else f"{1 - cosine:.1e}"]


def _line(columns: Sequence[str]) -> str:
    return line(columns, widths=(32, 18, 7, 10, 9, 11, 12, 8, 12), left=2)

"""Draft steps and whole training steps, ours beside SpecForge's and beside everything dense, on one GPU.

A draft step is forward and backward of the head from ready target states, with metrics and the teacher's
full-vocabulary argmax; a whole step adds the target's forward and a fused AdamW. Random weights and data, all bf16.
Ours is timed only after a small version of the case agrees with fp64 of the dense mathematics, SpecForge only if its
gradients are those of the same step. Contenders of a case take turns, three each.

Memory is the peak of a step over what lies ready before it: `over_gib` over all weights, optimizer state and inputs
(states and both heads in a draft step, tokens in a whole one), so that gradients count as the step's; `extra_gib`
leaves the gradients out, too. `peak_gib` is all of it. Tokens per second count supervised tokens and others alike.
"""

import argparse
import gc
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch._dynamo

from .common import (
    OUTPUT,
    Refused,
    Results,
    Settings,
    attempt,
    line,
    make_parser,
    median_ms,
    release_memory,
    show_choices,
)
from .loss_contenders import peer
from .train_cases import CASES, QUICK_CASES, QUICK_CONTENDERS, Case, make_inputs
from .train_check import PeerReference, Reference
from .train_contenders import CONTENDERS, Contender
from .train_meters import compiled_graphs, first_run, watched_run
from .train_profile import print_profile
from .train_whole import PARTS, WHOLE_CONTENDERS, GemmsAlone, Step


HEADER = ("case", "contender", "ms", "tokens/s", "over GiB", "extra GiB", "peak GiB", "waits", "ratio", "error")
ROUNDS, MOST_REPEATS = 3, 5
SLOW_MS = 1_000  # slower: one round less
LONG_MS = 8_000  # slower: the second step's time stands, without rounds
LONGEST_MS = 60_000  # slower: the first one's, with what is compiled in it


GPU = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "seconds": 0.5}
DRY = {"device": torch.device("cpu"), "dtype": torch.float32, "seconds": 0}


def main(arguments: list[str]) -> None:
    args = parse(arguments)
    settings = Settings(**(DRY if args.dry_run else GPU), deadline=time.monotonic() + args.time_limit)
    show_choices()
    logging.getLogger("draftsmith.models").setLevel(logging.WARNING)  # it would name every head that is built
    torch.manual_seed(0)
    gc.freeze()  # collecting before each measurement would search all imported modules
    results = Results(args.output, settings.device, dtype=str(settings.dtype), seconds_per_figure=settings.seconds)
    if not args.profile:
        print(_line(HEADER))
    for case in QUICK_CASES if args.quick else CASES:
        if args.cases and case.name not in args.cases:
            continue
        names = [name for name in case.contenders if not args.quick or name in QUICK_CONTENDERS]
        names = [name for name in names if not args.contenders or name in args.contenders]
        case = case.tiny() if args.dry_run else case
        if args.profile:
            profile_case(case, names, settings)
        else:
            measure_case(case, names, settings, results)
    gc.unfreeze()
    if not args.profile:
        print(f"written to {results.path}")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("train", __doc__, OUTPUT / "train.json")
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=names, metavar="NAME", help="; ".join(names).replace("%", "%%"))
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help='such as ours or "specforge compact"')
    parser.add_argument("--quick", action="store_true", help="the main cases, SpecForge at its best only")
    parser.add_argument("--profile", action="store_true", help="kernels of one step instead of times: no results")
    return parser.parse_args(arguments)


class Contest:
    """The contenders of one case on the same inputs, which are made when the first of them needs them."""

    def __init__(self, case: Case, settings: Settings):
        self.case, self.settings = case, settings
        self.timed: list[tuple[Contender, dict[str, Any]]] = []
        self._made: dict[Callable[..., Any], Any] = {}

    def make(self, kind: Callable[..., Any]) -> Any:
        """`kind` of the case on the device: built once."""
        if kind not in self._made:
            self._made[kind] = kind(self.case, self.settings.device, self.settings.dtype)
        return self._made[kind]

    def check(self, name: str) -> dict[str, Any]:
        """Whether this contender computes the step, on a small version of the case. A whole step's parts pass."""
        if name not in CONTENDERS:
            return {}
        kind: type[Reference] = Reference
        if name.startswith("specforge"):
            peer("specforge")
            kind = PeerReference
        figure = "smallest_cosine" if kind is PeerReference else "error_over_dense"
        return {figure: self.make(kind).check(CONTENDERS[name])}

    def forget_references(self) -> None:
        self._made.clear()

    def build(self, name: str) -> Contender:
        if self.case.whole:
            return WHOLE_CONTENDERS[name](self.make(Step))
        return CONTENDERS[name](self.make(make_inputs))

    def measure(self, name: str, row: dict[str, Any]) -> dict[str, Any]:
        """The first figures of a contender, which joins those that are timed again."""
        device = self.settings.device
        contender, graphs = self.build(name), compiled_graphs()
        figures = first_run(contender, device)
        figures["compilations"] = compiled_graphs() - graphs
        if figures["first_ms"] < LONGEST_MS:
            figures |= watched_run(contender, device)
        contender.release()
        if isinstance(contender, GemmsAlone):
            figures["flops"] = contender.flops
        if figures["step_ms"] >= LONG_MS:
            return {**figures, "rounds_ms": [figures["step_ms"]]}
        self.timed.append((contender, row))
        return {**figures, "rounds_ms": [], "recompilations": 0}

    def take_turns(self, number: int) -> None:
        """A GPU near its power limit slows down within seconds, which would favour whoever comes first."""
        settings = self.settings
        for contender, row in self.timed:
            if row["status"] != "ok" or number and time.monotonic() > settings.deadline:
                continue
            if number == ROUNDS - 1 and row["rounds_ms"][0] > SLOW_MS:
                continue
            graphs = compiled_graphs()
            try:
                row["rounds_ms"].append(median_ms(contender.run, settings.device, settings.seconds, MOST_REPEATS))
            except torch.OutOfMemoryError:  # it fitted while it was alone
                row |= {"status": "failed", "reason": "out of memory beside the other contenders' weights"}
            row["recompilations"] += compiled_graphs() - graphs
            contender.release()
            release_memory(settings.device)


def measure_case(case: Case, names: Sequence[str], settings: Settings, results: Results) -> None:
    shape = {"case": case.name, **asdict(case), "sizes": dict(case.sizes)}
    for unused in ("name", "contenders"):
        del shape[unused]
    contest = Contest(case, settings)
    rows = [{**shape, "contender": name} for name in names]
    for row in rows:
        row |= attempt(partial(contest.check, row["contender"]), settings.deadline)
    contest.forget_references()
    if any(name.startswith("specforge") for name in names):
        torch._dynamo.reset()  # what the small versions compiled is for any length, and may be slower for this one
    release_memory(settings.device)
    for row in rows:
        if row["status"] == "ok":
            row |= attempt(partial(contest.measure, row["contender"], row), settings.deadline)
        results.add(row)
        release_memory(settings.device)
    for number in range(ROUNDS):
        contest.take_turns(number)
        compare(rows)
        results.write()
    for row in rows:
        print(_line(_columns(row)), flush=True)


def compare(rows: list[dict[str, Any]]) -> None:
    """Medians; the factors over SpecForge, and over the sum of a whole step's parts."""
    done = [row for row in rows if row["status"] == "ok"]
    for row in done:
        row["ms"] = statistics.median(row["rounds_ms"])
        row["tokens_per_second"] = 1000 * row["length"] / row["ms"]
        if "flops" in row:
            row["tflops"] = row["flops"] / row["ms"] / 1e9
    times = {row["contender"]: row["ms"] for row in done}
    peers = [ms for name, ms in times.items() if name.startswith("specforge")]
    for row in done:
        if not row["contender"].startswith("ours"):
            continue
        if peers:
            row["speedup_over_specforge"] = min(peers) / row["ms"]
        if all(part in times for part in PARTS):
            row["parts_ms"] = sum(times[part] for part in PARTS)
            row["speed_over_parts"] = row["parts_ms"] / row["ms"]


def profile_case(case: Case, names: Sequence[str], settings: Settings) -> None:
    contest = Contest(case, settings)
    for name in names:
        figures = attempt(partial(_profile, contest, name), settings.deadline)
        if figures["status"] != "ok":
            print(f"{case.name}, {name}: {figures['status']}: {figures['reason']}")
        release_memory(settings.device)


def _profile(contest: Contest, name: str) -> dict[str, Any]:
    if contest.case.whole and name in PARTS[1:]:
        raise Refused("its kernels are those of the whole step")
    contender = contest.build(name)
    print_profile(f"{contest.case.name}, {name}", contender, contest.settings.device)
    contender.release()
    return {}


def _columns(row: dict[str, Any]) -> list[str]:
    start = [row["case"], row["contender"]]
    if row["status"] != "ok":
        return [*start, f" {row['status']}: {row['reason']}".replace("\n", " ")[:100]]
    figures = {
        "ms": ".1f", "tokens_per_second": ".0f", "over_gib": ".2f", "extra_gib": ".2f", "peak_gib": ".1f",
        "waits": "d",
    }  # fmt: skip
    cells = ["-" if row.get(name) is None else format(row[name], digits) for name, digits in figures.items()]
    ratios = [
        f"{row[name]:.2f} {of}"
        for name, of in (("speedup_over_specforge", "SpecForge"), ("speed_over_parts", "parts"))
        if name in row
    ]
    error = f"{row['error_over_dense']:.2f}" if "error_over_dense" in row else "-"
    return [*start, *cells, " ".join(ratios) or "-", error]


def _line(columns: Sequence[str]) -> str:
    return line(columns, widths=(30, 19, 10, 10, 10, 11, 10, 7, 16, 8), left=2)

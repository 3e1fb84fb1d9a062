"""Weak scaling of whole training steps: the same batch per GPU on one GPU and on several of one node.

`Eagle3Trainer` itself with the DeepSpeed configs that ship, a frozen target of random weights on every GPU, one row
per GPU and step, all tokens supervised. torchrun is launched for every number of GPUs; ranks that fail take one case
with them, the others are launched again.

Times are of a window of steps behind a warm-up, read at its ends; the trainer's own logs fall into it. Peaks are each
rank's in that window. `efficiency` is tokens/s per GPU over those of one GPU in the same mode, with the whole target
where several hold one (`target_tp`). Afterwards some steps
are profiled on all ranks: `collectives_ms` is the time per step in NCCL's kernels, waiting for other ranks included,
`exposed_ms` what no other kernel hides of it, and `exposed_share` its part of a profiled step; of the first rank.
"""

import argparse
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from .common import OUTPUT, ROOT, Results, line, make_parser
from .scaling_rank import CASES, DEFAULT_CASES, DEFAULT_MODES, MODES, Plan


HEADER = ("case", "mode", "GPUs", "step ms", "tokens/s", "per GPU", "peak GiB", "NCCL ms", "exposed", "efficiency")
TAIL = 3000  # characters of what failed ranks said
GRACE = 20  # seconds between asking ranks to end and ending them
ERROR = re.compile(r"^(?:\[rank\d+\]: ?)?((?:\w+\.)*\w*(?:Error|Exception|Fault|Failed)\w*: .*)", re.MULTILINE)


def main(arguments: list[str]) -> None:
    args = parse(arguments)
    deadline = time.monotonic() + args.time_limit
    device = torch.device("cpu" if args.dry_run else "cuda")
    results = Results(args.output, device, steps=args.steps, warmup=args.warmup, profiled=args.profiled)
    for package in ("deepspeed", "accelerate"):
        results.content["machine"][package] = importlib.metadata.version(package)
    results.content["machine"]["gpus"] = str(torch.cuda.device_count())
    print(_line(HEADER), flush=True)
    for gpus in args.gpus:
        for row in run_cells(gpus, args, deadline):
            compare(row, results.rows)
            results.add(row)
            print(_line(_columns(row)), flush=True)
    print(f"written to {results.path}")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("scaling", __doc__, OUTPUT / "scaling.json", time_limit=540)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2], metavar="N", help="one launch each")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(DEFAULT_CASES), metavar="NAME",
                        help="; ".join(CASES))  # fmt: skip
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(DEFAULT_MODES), metavar="MODE",
                        help=f"ddp, or a config of configs/deepspeed: {', '.join(MODES)}")  # fmt: skip
    parser.add_argument("--steps", type=int, default=12, help="timed")
    parser.add_argument("--warmup", type=int, default=4, help="steps before; the first ones compile")
    parser.add_argument("--profiled", type=int, default=2, help="steps after")
    parsed = parser.parse_args(arguments)
    if not parsed.dry_run and max(parsed.gpus) > torch.cuda.device_count():
        parser.error(
            f"`--gpus` {max(parsed.gpus)}: this machine shows {torch.cuda.device_count()} GPUs. Ask for fewer, or add "
            "--dry-run."
        )
    return parsed


def run_cells(gpus: int, args: argparse.Namespace, deadline: float) -> Iterator[dict[str, Any]]:
    """A row for every case and mode that so many GPUs can run."""
    cells = [(case, mode) for case in args.cases if gpus % CASES[case].target_tp == 0 for mode in args.modes]
    while cells:
        with tempfile.TemporaryDirectory() as folder:
            plan = Plan(_first_together(cells), folder, args.dry_run, args.warmup, args.steps, args.profiled)
            left = len(cells) - len(plan.cells)
            late = time.monotonic() > deadline
            for figures in [] if late else launch(gpus, plan, deadline):
                yield {**_names(gpus, *cells.pop(0)), "status": "ok", **figures}
            if len(cells) > left:
                yield {**_names(gpus, *cells.pop(0)), **_failure(plan, late or time.monotonic() > deadline)}


def _first_together(cells: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those that one launch may run: DeepSpeed never lets go of a head that it has trained with ZeRO-3."""
    ends = (number for number, (_, mode) in enumerate(cells, start=1) if mode.startswith("zero3"))
    return cells[: next(ends, len(cells))]


def launch(gpus: int, plan: Plan, deadline: float) -> Iterator[dict[str, Any]]:
    """The figures that the ranks write, as they come, until they end or time is over."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}"]
    # Without a GPU in sight accelerate and DeepSpeed fall back to gloo.
    device = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"} if plan.dry_run else {}
    path = os.pathsep.join(filter(None, (str(ROOT / "scripts"), os.environ.get("PYTHONPATH"))))
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **device, "PYTHONPATH": path}
    command = [*torchrun, "-m", "benchmarks.scaling_rank", json.dumps(asdict(plan))]
    with open(plan.log, "w") as log, _ended(subprocess.Popen(command, env=environment, stderr=log)) as process:
        seen = 0
        while time.monotonic() < deadline:
            ended = process.poll() is not None
            written = plan.rows.read_text().splitlines(keepends=True) if plan.rows.exists() else []
            for text in written[seen:]:
                if text.endswith("\n"):  # whole
                    yield json.loads(text)
                    seen += 1
            if ended:
                return
            time.sleep(0.2)


@contextmanager
def _ended(process: subprocess.Popen) -> Iterator[subprocess.Popen]:
    """The launcher, which ends its ranks when it is asked to."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _failure(plan: Plan, late: bool) -> dict[str, str]:
    said = plan.log.read_text() if plan.log.exists() else ""
    print(said[-TAIL:], end="", flush=True)
    if late:
        return {"status": "refused", "reason": "out of time"}
    first = ERROR.search(said)  # the other ranks then fail of waiting for it
    return {"status": "failed", "reason": first[1][:300] if first else "the ranks ended without an error"}


def _names(gpus: int, case_name: str, mode: str) -> dict[str, Any]:
    case = CASES[case_name]
    shape = {"shape": case.shape, "length": case.length, "ttt_steps": case.steps, "draft": case.draft_vocabulary}
    shape["target_tp"] = case.target_tp
    return {"case": case_name, **shape, "mode": mode, "gpus": gpus}


def compare(row: dict[str, Any], earlier: Sequence[dict[str, Any]]) -> None:
    """With one GPU in the same mode, on the same tokens."""
    for one in earlier:
        same = all(one[name] == row[name] for name in ("shape", "length", "ttt_steps", "draft", "mode"))
        if same and one["gpus"] == 1 and one["status"] == row["status"] == "ok":
            row["speedup"] = row["tokens_per_second"] / one["tokens_per_second"]
            row["efficiency"] = row["speedup"] / row["gpus"]


def _columns(row: dict[str, Any]) -> list[str]:
    start = [row["case"], row["mode"], str(row["gpus"])]
    if row["status"] != "ok":
        return [*start, f" {row['status']}: {row['reason']}".replace("\n", " ")[:100]]
    peak = "-" if None in row["peak_gib"] else f"{max(row['peak_gib']):.1f}"
    speeds = [f"{row[name]:.0f}" for name in ("tokens_per_second", "tokens_per_second_per_gpu")]
    communication = [f"{row['collectives_ms']:.1f}", f"{row['exposed_share']:.1%}"]
    efficiency = f"{row['efficiency']:.3f}" if "efficiency" in row else "-"
    return [*start, f"{row['step_ms']:.1f}", *speeds, peak, *communication, efficiency]


def _line(columns: Sequence[str]) -> str:
    return line(columns, widths=(24, 15, 6, 10, 11, 10, 10, 10, 10, 12), left=2)

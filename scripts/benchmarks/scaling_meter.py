"""Clock, memory meter and profiler of a training run: a callback, and what a trace says of communication."""

import json
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule
from transformers import TrainerCallback

from .common import GIB, synchronize


Interval = tuple[float, float]
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace
ELEMENT_BYTES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "BFloat16": 2, "Half": 2, "Byte": 1, "Bool": 1}


class Meter(TrainerCallback):
    """Marks the end of every step in a window, for which no step waits; then profiles some, with a wait after each."""

    def __init__(self, device: torch.device, trace: Path, *, warmup: int, timed: int, profiled: int):
        self.device, self.trace, self.profiled = device, trace, profiled
        self.first, self.last = warmup, warmup + timed  # steps at whose ends the window begins and ends
        self.marks: list[Any] = []
        self.peaks: dict[str, float | None] = {"peak_gib": None, "reserved_gib": None}
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self.profiler = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=profiled, repeat=1),  # starting it slows the first step down
            on_trace_ready=lambda recorded: recorded.export_chrome_trace(str(trace)),
        )

    @property
    def steps(self) -> int:
        """That the run needs."""
        return self.last + 1 + self.profiled

    def on_step_end(self, args, state, control, **kwargs):
        step = state.global_step
        if step == self.first and self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        if self.first <= step <= self.last:
            self.marks.append(self._mark())
        if step < self.last:
            return
        synchronize(self.device)
        if step == self.last:
            self._read_peaks()
            self.profiler.start()
        else:
            self.profiler.step()
        if step == self.steps:
            self.profiler.stop()

    def _mark(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _read_peaks(self) -> None:
        if self.device.type == "cuda":
            allocated, reserved = torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved
            self.peaks = {"peak_gib": allocated(self.device) / GIB, "reserved_gib": reserved(self.device) / GIB}

    def figures(self) -> dict[str, Any]:
        """Of this rank, after the run."""
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        if self.device.type == "cpu":
            times = [1000 * (end - start) for start, end in pairs]
        else:
            times = [start.elapsed_time(end) for start, end in pairs]
        events = json.loads(self.trace.read_text())["traceEvents"]
        means = {
            "step_ms": statistics.mean(times),
            "median_step_ms": statistics.median(times),
            "deviation_ms": statistics.pstdev(times),
        }
        return {**means, **self.peaks, **communication(events, self.profiled)}


def communication(events: Iterable[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Per step of a trace, in ms: NCCL's kernels, and what of them no other work of the device covers."""
    work = [event for event in events if event.get("cat") in DEVICE_WORK]
    collectives = [event for event in work if "nccl" in event["name"].lower()]
    others = [event for event in work if "nccl" not in event["name"].lower()]
    busy, computing = (merged(map(_interval, chosen)) for chosen in (work, others))
    span = busy[-1][1] - busy[0][0] if busy else 0.0
    exposed = _total(busy) - _total(computing)
    per_step = 1000 * steps  # times of a trace are in microseconds
    return {
        "profiled_step_ms": span / per_step,
        "collectives_ms": _total(merged(map(_interval, collectives))) / per_step,
        "exposed_ms": exposed / per_step,
        "exposed_share": exposed / span if span else 0.0,
        "idle_ms": (span - _total(busy)) / per_step,
        "collectives": by_kind(collectives, steps),
    }


def by_kind(collectives: Iterable[dict[str, Any]], steps: int) -> dict[str, dict[str, float]]:
    """Kernels, ms and GiB per step of each collective; its GiB are those of the whole tensor, of what is recorded."""
    kinds: dict[str, dict[str, float]] = defaultdict(lambda: {"kernels": 0.0, "ms": 0.0, "gib": 0.0})
    for event in collectives:
        name = re.search(r"nccl\w*?Kernel_([A-Za-z]+)", event["name"])
        kind, details = kinds[name[1] if name else event["name"]], event.get("args", {})
        elements = max(details.get("In msg nelems", 0), details.get("Out msg nelems", 0))
        kind["kernels"] += 1 / steps
        kind["ms"] += event["dur"] / 1000 / steps
        kind["gib"] += elements * ELEMENT_BYTES.get(details.get("dtype", ""), 0) / GIB / steps
    return dict(kinds)


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Their union: disjoint, ascending."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union


def _interval(event: dict[str, Any]) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _total(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)

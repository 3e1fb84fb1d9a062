"""What the benchmarks share: the clock, the memory meter, the machine, and results that are kept as they come."""

import gc
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "benchmarks"
GIB = 2**30
PACKAGES = ("torch", "triton", "transformers", "flash-attn-4")


def show_choices() -> None:
    """Print what the library logs: which attention engine it picks."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("draftsmith").setLevel(logging.INFO)


def describe_machine(device: torch.device) -> dict[str, str]:
    machine = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            machine[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    machine["torch"] = torch.__version__  # with the suffix that names the build
    if device.type == "cpu":
        return {"device": f"{platform.machine()}, {os.cpu_count()} cores", **machine}
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        machine["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
    return {"device": torch.cuda.get_device_name(device), **machine}


def median_ms(call: Callable[[], Any], device: torch.device, seconds: float, most: int = 20) -> float:
    """Median time of `call` over the repeats that fit in `seconds`, at least two. What it needs is compiled by now."""
    first = _times_ms(call, device, 1)[0]
    return statistics.median(_times_ms(call, device, min(most, max(2, int(1000 * seconds / first)))))


def _times_ms(call: Callable[[], Any], device: torch.device, repeats: int) -> list[float]:
    """Repeats are enqueued without waiting, as a training step does it: launches hide behind the work before them."""
    if device.type == "cpu":
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            times.append(1000 * (time.perf_counter() - start))
        return times
    events = []
    torch.cuda.synchronize(device)
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in events]


def extra_gib(call: Callable[[], list[torch.Tensor]], device: torch.device) -> float | None:
    """Peak memory of `call` over what was allocated before it and over the tensors it returns. None on CPU."""
    if device.type == "cpu":
        call()
        return None
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    results = call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    return (peak - sum(tensor.numel() * tensor.element_size() for tensor in results)) / GIB


def release_memory(device: torch.device) -> None:
    """Also raises here, and not inside the next measurement, when the device is beyond repair."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


class Results:
    """A JSON file that is rewritten whole after every row: an interrupted run keeps what it has measured."""

    def __init__(self, path: Path, device: torch.device, **settings: Any):
        self.path, self.rows = path, []
        self.content = {"machine": describe_machine(device), "settings": settings, "rows": self.rows}
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        temporary = self.path.with_suffix(".json.part")
        temporary.write_text(json.dumps(self.content, indent=1) + "\n")
        os.replace(temporary, self.path)


def failure(error: Exception) -> dict[str, str]:
    """What a row says instead of figures."""
    if isinstance(error, torch.OutOfMemoryError):
        return {"status": "failed", "reason": "out of memory"}
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(place.filename).name}:{place.lineno}"
    return {"status": "failed", "reason": f"{type(error).__name__} at {where}: {str(error).strip()[:300]}"}

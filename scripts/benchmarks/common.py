"""What the benchmarks share: the clock, the memory meter, the machine, and results that are kept as they come."""

import argparse
import gc
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.files import written_whole


ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "benchmarks"
GIB = 2**30
PACKAGES = ("torch", "triton", "transformers", "flash-attn-4", "liger-kernel", "cut-cross-entropy", "specforge")
ALLOWED = 2.0  # times the error of dense mathematics in the same dtype


@dataclass(frozen=True)
class Settings:
    device: torch.device
    dtype: torch.dtype
    seconds: float  # of repeats per figure
    deadline: float  # on `time.monotonic`; what is not begun by then is skipped


class Refused(ValueError):
    """The contender does not serve this case, or not correctly."""


def make_parser(name: str, text: str | None, output: Path, time_limit: float = 480) -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=f"benchmark.py {name}", description=text, formatter_class=formatter)
    parser.add_argument("--output", type=Path, default=output, help="JSON, rewritten after every row")
    parser.add_argument(
        "--time-limit", type=float, default=time_limit, help="seconds after which nothing new is begun"
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on CPU: tries the code, measures nothing")
    return parser


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


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_memory(device: torch.device) -> None:
    """Also raises here, and not inside the next measurement, when the device is beyond repair."""
    gc.collect()
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Results:
    """A JSON file that is rewritten whole after every row: an interrupted run keeps what it has measured."""

    def __init__(self, path: Path, device: torch.device, **settings: Any):
        if device.type == "cpu" and path.parent == OUTPUT:  # a dry run: the kept results are a GPU's
            path = Path(tempfile.gettempdir()) / f"dry_run_{path.name}"
        self.path, self.rows = path, []
        self.content = {"machine": describe_machine(device), "settings": settings, "rows": self.rows}
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        with written_whole(self.path) as unfinished:
            unfinished.write_text(json.dumps(self.content, indent=1) + "\n")


def attempt(measure: Callable[[], dict[str, Any]], deadline: float) -> dict[str, Any]:
    """The figures of `measure`, or why there are none: whatever fails, the rest is still of interest."""
    try:
        if time.monotonic() > deadline:
            raise Refused("out of time")
        return {"status": "ok", **measure()}
    except ValueError as error:  # by which the library, too, refuses
        return {"status": "refused", "reason": str(error)}
    except Exception as error:
        return failure(error)


def failure(error: Exception) -> dict[str, str]:
    """What a row says instead of figures."""
    if isinstance(error, torch.OutOfMemoryError):
        return {"status": "failed", "reason": "out of memory"}
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(place.filename).name}:{place.lineno}"
    return {"status": "failed", "reason": f"{type(error).__name__} at {where}: {str(error).strip()[:300]}"}


def allowed_error(plain: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype) -> float:
    """From what dense mathematics in `dtype` makes of `truth`.

    It may be exact by luck; nothing need be better than the rounded truth, or than fp32 sums.
    """
    error = torch.maximum((plain.double() - truth).norm(), (truth.to(dtype).double() - truth).norm())
    return (ALLOWED * error + 20 * torch.finfo(torch.float32).eps * truth.norm()).item() + 1e-30


def measured(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["status"] == "ok"]


def line(columns: Sequence[str], widths: Sequence[int], left: int) -> str:
    """One line of a printed table, its first `left` columns aligned to the left."""
    cells = zip(columns, widths, strict=False)
    return "".join(f"{text:<{width}}" if i < left else f"{text:>{width}}" for i, (text, width) in enumerate(cells))


def style_length_axes(axes: Any, lengths: Iterable[int], xlabel: str, title: str) -> None:
    """Logarithmic axes over lengths in tokens, for a figure of matplotlib."""
    ticks = sorted(set(lengths))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [f"{tick // 1024}k" if tick >= 1024 else str(tick) for tick in ticks])
    axes.set_xlabel(xlabel)
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(alpha=0.3)


def markdown_table(heading: str, columns: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Empty if there are no lines."""
    lines = list(lines)
    if not lines:
        return ""
    columns = list(columns)
    body = "\n".join(f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *lines))
    return f"## {heading}\n\n{body}"


def not_run(heading: str, name: str, rows: Iterable[dict[str, Any]], where: Callable[[dict[str, Any]], str]) -> str:
    """Table of reasons: which `row[name]` gave each, and at what."""
    places: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["status"] != "ok":
            reason = f"{row['status']}: {row['reason']}".replace("\n", " ")
            places.setdefault((row[name], reason), []).append(where(row))
    lines = [(who, reason, "; ".join(shapes)) for (who, reason), shapes in places.items()]
    return markdown_table(heading, (name, "reason", "shapes"), lines)


def introduce(machine: dict[str, str]) -> tuple[str, str]:
    """The device, and the versions of what ran there."""
    device, *versions = [f"{name} {version}" for name, version in machine.items()]
    return device.removeprefix("device "), ", ".join(versions)

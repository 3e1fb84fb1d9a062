"""What is read off single steps: time, peaks of memory, waits of the host for the device, compilations."""

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

from .common import GIB, release_memory
from .train_contenders import Contender


def first_run(contender: Contender, device: torch.device) -> dict[str, Any]:
    """Figures of the first step, which compiles what it needs."""
    figures = _step(contender, device)
    return {**figures, "first_ms": figures["step_ms"]}


def watched_run(contender: Contender, device: torch.device) -> dict[str, Any]:
    """Figures of a step in which nothing is compiled, and where its host waits for the device."""
    places: Counter[str] = Counter()
    figures = _step(contender, device, watch=lambda: recorded_waits(places))
    return figures if device.type == "cpu" else {**figures, "waits": sum(places.values()), "waits_at": dict(places)}


def _step(
    contender: Contender, device: torch.device, watch: Callable[[], AbstractContextManager] = nullcontext
) -> dict[str, float]:
    contender.release()
    release_memory(device)
    if device.type == "cpu":
        started = time.perf_counter()
        contender.run()
        return {"step_ms": 1000 * (time.perf_counter() - started)}
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    started = time.perf_counter()
    with watch():
        gradients = contender.run()
    torch.cuda.synchronize(device)
    milliseconds = 1000 * (time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated(device)
    own = sum(gradient.numel() * gradient.element_size() for gradient in gradients)
    return {
        "step_ms": milliseconds,
        "peak_gib": peak / GIB,
        "over_gib": (peak - before) / GIB,
        "extra_gib": (peak - before - own) / GIB,
    }


@contextmanager
def recorded_waits(places: Counter[str]) -> Iterator[None]:
    """Count how often the host waits meanwhile, by line of code; a backward pass by the line that called it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places.update(
        f"{Path(warning.filename).name}:{warning.lineno}"
        for warning in caught
        if "synchronizing CUDA operation" in str(warning.message)
    )


def compiled_graphs() -> int:
    """By torch.compile, in this process so far."""
    return counters["stats"]["unique_graphs"]

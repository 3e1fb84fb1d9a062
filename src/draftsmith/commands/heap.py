"""The heap of one training step over program order: every allocation and release, phase by phase."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ..data.files import written_whole
from ..models.eagle3 import Eagle3DraftModel, unroll_eagle3
from ..planning import GIB


MARK = "phase: "  # sets our marks apart from the profiler's other events
BACKWARD = "backward of "
COLOURS = ("tab:blue", "tab:orange", "tab:red", "tab:green")


@dataclass(frozen=True)
class Heap:
    """Bytes over those at the step's beginning."""

    phases: dict[str, list[int]]  # when the phase begins, then after each of its allocations and releases
    failure: str | None = None  # what the allocator said, where memory ran out; the last phase ends there

    @property
    def peaks(self) -> dict[str, int]:
        return {name: max(levels) for name, levels in self.phases.items()}

    @property
    def end(self) -> int:
        return list(self.phases.values())[-1][-1]


def mark(phase: str) -> None:
    """A phase begins here, and ends where the next one begins."""
    with record_function(MARK + phase):
        pass


@contextmanager
def marked(draft: Eagle3DraftModel, ttt_steps: int) -> Iterator[list[str]]:
    """Every forward of `draft` marks its phases but the first one, and its backward those but the loss's.

    `fc` ends the first phase, and the decoder layer with the final norm each step of the unroll: the next phase begins
    behind them. Their outputs' gradients are complete when the backward of what they ended begins. Yields the names of
    all phases.
    """
    forward = ["fuse", *(f"step {step}" for step in range(ttt_steps)), "loss"]
    transitions: list[tuple[str, str]] = []

    def begin(*_: Any) -> None:
        transitions[:] = pairwise(forward)

    def end_phase(output: torch.Tensor) -> None:
        ended, begun = transitions.pop(0)
        output.register_hook(lambda gradient: mark(BACKWARD + ended))
        mark(begun)

    run_layer = unroll_eagle3._layer

    def marked_layer(*args: Any) -> tuple[torch.Tensor, ...]:  # modules inside run again, or by rows, with recompute
        outputs = run_layer(*args)
        end_phase(outputs[1])
        return outputs

    with ExitStack() as hooks:
        hooks.enter_context(draft.register_forward_pre_hook(begin))
        hooks.enter_context(draft.fc.register_forward_hook(lambda module, args, output: end_phase(output)))
        hooks.enter_context(mock.patch.object(unroll_eagle3, "_layer", marked_layer))
        yield [*forward, *(BACKWARD + name for name in reversed(forward))]


def record(step: Callable[[], Any], device: torch.device) -> Heap:
    """The heap of `step`, which marks its first phase before it allocates.

    PyTorch's profiler reports what the allocators of every device do, inside operators too, in the order of its clock.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        failure = attempt(step)
    phases: dict[str, list[int]] = {}
    levels, level = [0], 0  # what comes before the first mark is dropped
    events = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name().startswith(MARK):
            levels = phases[event.name().removeprefix(MARK)] = [level]
        elif event.name() == "[memory]" and event.device_type().name.lower() == device.type and phases:
            level += event.nbytes()
            levels.append(level)
    while failure is not None and len(levels) > 1 and levels[-1] < levels[-2]:
        levels.pop()  # what the error released on its way out
    return Heap(phases, failure)


def attempt(step: Callable[[], Any]) -> str | None:
    """Run `step`; where memory runs out, what the allocator said."""
    try:
        step()
    except RuntimeError as error:  # the CPU's allocator has no type of its own for it
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        return ". ".join(str(error).split(". ")[:2])  # without the statistics that follow
    return None


def draw(heaps: Mapping[str, Heap], phases: list[str], title: str, path: Path) -> None:
    """All heaps, and below them the first one alone; every phase is equally wide, so that heaps can be compared."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    figure.suptitle(title, fontsize=11)
    all_axes = figure.subplots(2, 1, sharex=True)
    first = dict(list(heaps.items())[:1])
    labels = [name.removeprefix(BACKWARD) for name in phases]
    for axes, shown in zip(all_axes, (heaps, first), strict=True):
        unit, scale = unit_of(max(max(heap.peaks.values()) for heap in shown.values()))
        for (name, heap), colour in zip(shown.items(), COLOURS, strict=False):
            places, levels = _curve(heap, phases)
            heights = [level / scale for level in levels]
            failed = "" if heap.failure is None else ", out of memory ×"
            axes.step(places, heights, where="post", color=colour, linewidth=1, label=name + failed)
            axes.fill_between(places, heights, step="post", color=colour, alpha=0.12, linewidth=0)
            if heap.failure is not None:
                axes.plot(places[-1:], heights[-1:], "x", color=colour, markersize=9, markeredgewidth=2)
        for boundary in range(1, len(phases)):
            axes.axvline(boundary, color="black", linewidth=1.2 if boundary == len(phases) // 2 else 0.2)
        axes.set_ylabel(f"{unit} over weights and inputs")
        axes.set_xlim(0, len(phases))
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper left", fontsize=9)
    all_axes[-1].set_xticks([place + 0.5 for place in range(len(phases))], labels, rotation=60)
    all_axes[-1].set_xlabel("every allocation and release in program order; backward begins at the thick line")
    with written_whole(path) as unfinished:
        figure.savefig(unfinished, dpi=120)


def _curve(heap: Heap, phases: list[str]) -> tuple[list[float], list[int]]:
    """Places on the axis of phases, and the bytes there; the last one reaches to where its phase ends."""
    places, levels = [], []
    for name, own in heap.phases.items():
        start = phases.index(name)
        places += [start + number / len(own) for number in range(len(own))]
        levels += own
    if heap.failure is None:
        places.append(float(len(phases)))
        levels.append(levels[-1])
    return places, levels


def unit_of(size: int) -> tuple[str, int]:
    """The unit in which `size` bytes are best read, and its bytes."""
    return ("GiB", GIB) if size >= GIB else ("MiB", 2**20)

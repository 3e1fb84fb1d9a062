"""Figures of `heads-figures`: acceptance by position, and over tokens and seconds of training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .heads_arms import ALL_ARMS, PEER, RECIPE, STEPS


Row = dict[str, Any]
K_ARMS = [arm.name for arm in ALL_ARMS if arm.axis == STEPS]


def draw_positions(rows: Mapping[str, list[Row]], path: Path) -> None:
    """What share of verifications accepts up to each position: the recipe, its other K, and the peer."""
    shown = {name: runs[0] for name, runs in rows.items() if name in (RECIPE.name, *K_ARMS) or runs[0]["axis"] == PEER}
    sets = rows[RECIPE.name][0]["sets"]
    figure = Figure(figsize=(3.4 * len(sets), 3.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(sets), sharey=True, squeeze=False)[0], sets, strict=True):
        for arm, row in shown.items():
            counts = row["sets"][name]
            named = f"{arm}, {counts['acceptance_length']:.2f}"
            axes.plot(range(1, len(counts["rates"]) + 1), counts["rates"], "o-", label=named)
        axes.set(ylim=(0, None))
        label(axes, name, "position")
    figure.supylabel("share of verifications that accept up to it", fontsize=10)
    figure.savefig(path, dpi=110)


def draw_learning(rows: Mapping[str, list[Row]], path: Path) -> None:
    """Acceptance length over tokens seen, and the sets' mean over the seconds of runs with the machine to themselves.

    Sets are of heads kept on the way. For heads of several K also what their trainers logged of the batches trained
    on: of all that a head could draft, up to its K, from every position of a text. A server drafts behind tokens that
    were hard, and accepts less.
    """
    kept = {name: runs[0] for name, runs in rows.items() if runs[0]["curve"]}
    logs = {name: rows[name][0].get("logged", []) for name in (RECIPE.name, *K_ARMS) if name in rows}
    logs = {name: log for name, log in logs.items() if log}
    sets = list(rows[RECIPE.name][0]["sets"]) if kept else []
    timed = {name: row for name, row in kept.items() if row["jobs"] == 1}
    count = len(sets) + bool(timed) + (len(logs) > 1)
    if not count:
        return
    figure = Figure(figsize=(max(3.4 * count, 5), 3.6), layout="constrained")
    places = iter(figure.subplots(1, count, squeeze=False)[0])
    for name in sets:
        axes = next(places)
        for arm, row in kept.items():
            lengths = [point["sets"][name] for point in row["curve"]]
            axes.plot(millions(row["curve"]), lengths, "o-", label=arm)
        label(axes, name, "million tokens seen")
    if timed:
        axes = next(places)
        for arm, row in timed.items():
            axes.plot(*points(row["curve"], "seconds"), "o-", label=arm)
        label(axes, "mean", "seconds of training")
    if len(logs) > 1:
        axes = next(places)
        for arm, log in logs.items():
            axes.plot(millions(log), [point["acceptance_length"] for point in log], label=arm)
        label(axes, "batches in training", "million tokens seen")
    figure.supylabel("acceptance length", fontsize=10)
    figure.savefig(path, dpi=110)


def points(curve: Sequence[Row], axis: str) -> tuple[list[float], list[float]]:
    """The mean of the sets over `axis`, from an untrained head, of which nothing is accepted."""
    means = [float(np.mean(list(point["sets"].values()))) for point in curve]
    return [0.0, *(point[axis] for point in curve)], [1.0, *means]


def millions(curve: Sequence[Row]) -> list[float]:
    return [point["tokens"] / 1e6 for point in curve]


def label(axes: Axes, title: str, along: str) -> None:
    axes.set(title=title, xlabel=along)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(frameon=False, fontsize=8)

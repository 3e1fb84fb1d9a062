"""Figures and Markdown tables from the results of `heads`; needs no GPU.

Differences to the recipe are paired: in each set prompts are drawn again with replacement, the same for both heads;
the interval is that of 95% of the draws. It says how sure a difference is on other prompts, not with other seeds.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .common import OUTPUT, introduce, markdown_table, not_run
from .heads_arms import ALL_ARMS, ARMS, PEER, RECIPE, Arm
from .heads_plots import draw_learning, draw_positions, points


Row = dict[str, Any]
Counts = dict[str, np.ndarray]  # of each set, [prompts, 2] verifications and accepted tokens
DRAWS = 4000
ALIKE = 0.02  # share by which tokens seen may differ


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmark.py heads-figures", description=__doc__)
    parser.add_argument("--results", type=Path, default=OUTPUT / "heads.json")
    parser.add_argument("--output-dir", type=Path, default=OUTPUT)
    args = parser.parse_args(arguments)
    content = json.loads(args.results.read_text())
    rows, others = comparable(content)
    sections = [
        introduction(content, rows[RECIPE.name]),
        *axis_tables(rows, content["settings"]["alike"]),
        *(peer_section(rows[RECIPE.name][0], runs[0]) for runs in rows.values() if runs[0]["axis"] == PEER),
    ]
    sections += [not_run("Not run", "arm", content["rows"], lambda row: f"seed {row['seed']}"), left_out(others)]
    name = args.results.stem
    (args.output_dir / f"{name}.md").write_text("\n\n".join(section for section in sections if section) + "\n")
    draw_positions(rows, args.output_dir / f"{name}_by_position.png")
    draw_learning(rows, args.output_dir / f"{name}_learning.png")
    print(f"{name}.md and its figures written to {args.output_dir}")


def comparable(content: Row) -> tuple[dict[str, list[Row]], list[str]]:
    """By arm, its runs on the data of the recipe's, under the recipe as it is now; and the names of other runs.

    Raises:
        SystemExit: the recipe itself was not run.
    """
    runs = [row for row in content["rows"] if row["status"] == "ok"]
    settings = content["settings"]
    found: dict[str, list[Row]] = {}
    others = []
    for row in sorted(runs, key=lambda row: row["seed"]):
        arm = ARMS.get(row["arm"])
        flags = None if arm is None else {**arm.config(settings["recipe"]), "seed": row["seed"]}
        is_current = flags is None or row["flags"] == flags
        if is_current and all(row[name] == settings[name] for name in ("data", "evaluation")):
            found.setdefault(row["arm"], []).append(row)
        else:
            others.append(f"{row['arm']}, seed {row['seed']}")
    if RECIPE.name not in found:
        raise SystemExit("the results have no run of the recipe as it is, to which the others are compared")
    return found, others


def introduction(content: Row, recipe: Sequence[Row]) -> str:
    device, versions = introduce(content["machine"])
    evaluation = content["settings"]["evaluation"]
    asked = f"{evaluation['num_draft_tokens'][0]} draft tokens, at most {evaluation['max_new_tokens']} new ones"
    return f"""# Draft heads on {device}

`scripts/benchmark.py heads`; {versions}.
Acceptance lengths of prompts held out, with their 95% intervals over prompts; {asked}.
`difference` is that of the mean of the sets to the recipe's, with the 95% interval of {DRAWS} paired draws of prompts.
Several seeds are counted together.{seeds_text(recipe)}"""


def seeds_text(recipe: Sequence[Row]) -> str:
    """How far the recipe's seeds lie apart: what no interval over prompts knows of."""
    if len(recipe) == 1:
        return ""
    means = ", ".join(f"{mean_length(counts_of([run])):.3f}" for run in recipe)
    return f" The recipe's seeds have means of {means}: smaller differences than theirs say little."


def counts_of(rows: Sequence[Row]) -> Counts:
    """Summed over the runs of an arm: their prompts are the same."""
    return {
        name: sum(np.array([row["sets"][name]["rounds"], row["sets"][name]["accepted"]]).T for row in rows)
        for name in rows[0]["sets"]
    }  # type: ignore[misc]


def length(counts: np.ndarray) -> np.ndarray:
    """Tokens per verification of `[.., prompts, 2]`."""
    rounds, accepted = np.moveaxis(counts.sum(axis=-2), -1, 0)
    return 1 + accepted / np.maximum(rounds, 1)


def drawn(counts: np.ndarray, seed: int) -> np.ndarray:
    """`[DRAWS]` acceptance lengths; the same seed draws the same prompts."""
    chosen = np.random.default_rng(seed).integers(len(counts), size=(DRAWS, len(counts)))
    return length(counts[chosen])


def difference(ours: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> tuple[float, float, float]:
    """Of the mean over the sets: its value and its interval."""
    value = np.mean([length(ours[name]) - length(other[name]) for name in ours])
    draws = np.mean([drawn(ours[name], index) - drawn(other[name], index) for index, name in enumerate(ours)], axis=0)
    low, high = np.quantile(draws, (0.025, 0.975))
    return float(value), float(low), float(high)


def verdict(value: float, low: float, high: float) -> str:
    if low <= 0 <= high:
        return "Within the interval."
    return f"{'Better' if value > 0 else 'Worse'} by {abs(value):.3f}, outside the interval."


def axis_tables(rows: Mapping[str, list[Row]], alike: Mapping[str, str]) -> list[str]:
    tables = []
    for axis in dict.fromkeys(arm.axis for arm in ALL_ARMS):
        arms = [arm for arm in ALL_ARMS if arm.axis == axis and alike.get(arm.name, arm.name) in rows]
        if any(alike.get(arm.name, arm.name) != RECIPE.name for arm in arms) or axis == RECIPE.axis:
            tables.append(axis_table(axis, arms, rows, alike))
    return tables


def axis_table(axis: str, arms: Sequence[Arm], rows: Mapping[str, list[Row]], alike: Mapping[str, str]) -> str:
    lines = []
    for arm in arms:
        runs = rows[alike.get(arm.name, arm.name)]
        cells = length_cells(counts_of(runs))
        if runs is rows[RECIPE.name]:
            cells += ["", "The recipe."]
        else:
            cells += difference_cells(runs, rows[RECIPE.name])
        seconds = sum(run["seconds"] for run in runs) / len(runs)
        crowded = "" if all(run["jobs"] == 1 for run in runs) else "*"
        lines.append((arm.name, arm.question, *cells, f"{seconds:.0f}{crowded}"))
    sets = list(rows[RECIPE.name][0]["sets"])
    table = markdown_table(capitalized(axis), ("arm", "", *sets, "mean", "difference", "", "seconds"), lines)
    if any(line[-1].endswith("*") for line in lines):
        table += "\n\n\\* beside other trainings on the machine: no measurement of speed."
    return table


def length_cells(counts: Counts) -> list[str]:
    """Of every set, and the mean of the sets."""
    cells = []
    for part in counts.values():
        low, high = np.quantile(drawn(part, 0), (0.025, 0.975))
        cells.append(f"{length(part):.3f} ({low:.3f} to {high:.3f})")
    return [*cells, f"{mean_length(counts):.3f}"]


def mean_length(counts: Counts) -> float:
    return float(np.mean([length(part) for part in counts.values()]))


def difference_cells(runs: Sequence[Row], recipe: Sequence[Row]) -> list[str]:
    """To the recipe's runs of the same seeds, where there are some."""
    seeds = {run["seed"] for run in runs}
    own, other = counts_of(runs), counts_of([run for run in recipe if run["seed"] in seeds] or recipe)
    found = difference(own, other)
    return [interval_text(*found), f"{verdict(*found)} {verdict_by_set(own, other)}"]


def verdict_by_set(ours: Counts, other: Counts) -> str:
    found = [difference({name: ours[name]}, other) for name in ours]
    better, worse = sum(low > 0 for _, low, _ in found), sum(high < 0 for _, _, high in found)
    return f"By set: {better} better, {worse} worse, {len(found) - better - worse} within."


def interval_text(value: float, low: float, high: float) -> str:
    return f"{value:+.3f} ({low:+.3f} to {high:+.3f})"


def capitalized(text: str) -> str:
    return text[0].upper() + text[1:]


def peer_section(ours: Row, peer: Row) -> str:
    """The recipe's first run against a peer's: acceptance of the last heads, and time to the peer's."""
    own, other = counts_of([ours]), counts_of([peer])
    lines = []
    for name in [*own, "mean"]:
        part = own if name == "mean" else {name: own[name]}
        found = difference(part, other if name == "mean" else {name: other[name]})
        numbers = f"{mean_length(part):.3f}", f"{mean_length(other if name == 'mean' else {name: other[name]}):.3f}"
        lines.append((name, *numbers, interval_text(*found), verdict(*found)))
    table = markdown_table(f"Ours and {peer['arm']}", ("set", "ours", peer["arm"], "difference", ""), lines)
    return f"{table}\n\n{seen_text(ours, peer)} {time_text(ours, peer)}"


def seen_text(ours: Row, peer: Row) -> str:
    """Whether they have seen as much; if not, also ours where it had."""
    seen = "; ".join(
        f"{name} {row['tokens']:,} tokens, {row['supervised_tokens']:,} of them supervised"
        for name, row in (("ours saw", ours), (f"{peer['arm']}:", peer))
    )
    text = f"{capitalized(seen)}."
    if abs(ours["tokens"] / peer["tokens"] - 1) > ALIKE and ours["curve"] and ours["tokens"] > peer["tokens"]:
        at = np.interp(peer["tokens"], *points(ours["curve"], "tokens"))
        text += f" After as many tokens as {peer['arm']} saw, ours has a mean of {at:.3f}, along its curve."
    return text


def time_text(ours: Row, peer: Row) -> str:
    """The seconds in which our curve reaches the peer's last mean."""
    goal = mean_length(counts_of([peer]))
    compiling = f", of which {peer['compile_seconds']:.0f} compiling" if "compile_seconds" in peer else ""
    text = f"{peer['arm']} has its mean of {goal:.3f} after {peer['seconds']:.0f} s of training{compiling}"
    reached = seconds_to(ours["curve"], goal)
    if not ours["curve"] or reached is None:
        return f"{text}; ours does not reach it along its curve." if ours["curve"] else f"{text}."
    crowded = "" if ours["jobs"] == peer["jobs"] == 1 else " (no measurement: other trainings ran beside it)"
    return f"{text}, ours after {reached:.0f} s, {reached / peer['seconds']:.2f} of it{crowded}."


def seconds_to(curve: Sequence[Row], goal: float) -> float | None:
    """When the curve first reaches `goal`, between save points along a line."""
    seconds, means = points(curve, "seconds")
    for index in range(1, len(means)):
        if means[index] >= goal:
            between = slice(index - 1, index + 1)
            return float(np.interp(goal, means[between], seconds[between]))
    return None


def left_out(others: Sequence[str]) -> str:
    return f"Left out, being of another recipe or other data: {'; '.join(others)}." if others else ""

"""The results of an evaluation: counts by category, length and position, as JSON, Markdown and a plot."""

import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

from ..data.files import write_json, written_whole
from ..speculative import Acceptance


@dataclass
class Group:
    """Prompts that are counted together."""

    category: str
    bucket: int | None  # the most tokens of a prompt
    ids: list[list[int]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.category if self.bucket is None else f"{self.category}, up to {self.bucket:,} tokens"


@dataclass
class Result:
    """One number of draft tokens at one temperature."""

    num_draft_tokens: int
    temperature: float
    categories: dict[str, Acceptance]
    lengths: dict[str, Acceptance]
    plain_tokens_per_second: float | None

    @property
    def total(self) -> Acceptance:
        return reduce(add, self.categories.values())

    def rows(self) -> Iterable[tuple[str, Acceptance]]:
        yield from self.categories.items()
        yield from self.lengths.items()
        if len(self.categories) > 1:
            yield "all", self.total

    def table(self) -> str:
        """Markdown: a row per category and length."""
        positions = [f"{position}" for position in range(1, self.num_draft_tokens + 1)]
        header = ["prompts", "count", "acceptance length", "95%", *positions, "tokens/s"]
        lines = [header, ["---"] * len(header)]
        for name, counts in self.rows():
            low, high = counts.interval or (None, None)
            lines.append([
                name, str(counts.prompts), f"{counts.acceptance_length:.3f}" if sum(counts.rounds) else "not counted",
                "" if low is None else f"{low:.3f} to {high:.3f}",
                *(f"{rate:.3f}" if counts.counts_positions else "" for rate in counts.rates),
                f"{counts.tokens_per_second:.1f}",
            ])  # fmt: skip
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)

    def summary(self) -> str:
        total = self.total
        text = (
            f"acceptance length {total.acceptance_length:.3f} in {sum(total.rounds)} verifications, {total.prompts} "
            f"prompts, {self.num_draft_tokens} draft tokens, temperature {self.temperature:g}"
        )
        if plain := self.plain_tokens_per_second:
            text += f"; {total.tokens_per_second:.1f} tokens/s, {plain:.1f} without the head"
        return text

    def as_dict(self) -> dict[str, Any]:
        return {
            "num_draft_tokens": self.num_draft_tokens,
            "temperature": self.temperature,
            "plain_tokens_per_second": self.plain_tokens_per_second,
            "total": _as_dict(self.total),
            "categories": {name: _as_dict(counts) for name, counts in self.categories.items()},
            "lengths": {name: _as_dict(counts) for name, counts in self.lengths.items()},
        }


@dataclass
class Report:
    settings: dict[str, Any]
    results: list[Result] = field(default_factory=list)

    def add(
        self,
        num_draft_tokens: int,
        temperature: float,
        groups: Sequence[Group],
        counts: Sequence[Acceptance],
        plain: float | None,
    ) -> None:
        categories: dict[str, Acceptance] = {}
        lengths: dict[str, Acceptance] = {}
        for group, count in zip(groups, counts, strict=True):
            nothing = Acceptance(num_draft_tokens)
            categories[group.category] = categories.get(group.category, nothing) + count
            if group.bucket is not None:
                name = f"up to {group.bucket:,} tokens"
                lengths[name] = lengths.get(name, nothing) + count
        self.results.append(Result(num_draft_tokens, temperature, categories, lengths, plain))


def _as_dict(counts: Acceptance) -> dict[str, Any]:
    return {
        **asdict(counts),
        "acceptance_length": counts.acceptance_length,
        "interval": counts.interval,
        "rates": counts.rates,
        "tokens_per_second": counts.tokens_per_second,
    }


BESIDE = (".md", ".png")  # the suffixes of what goes beside the JSON


def write_report(report: Report, path: Path) -> None:
    """JSON at `path`, beside it the tables as Markdown and, where matplotlib is installed, the plot as PNG."""
    write_json({"settings": report.settings, "results": [result.as_dict() for result in report.results]}, path)
    text = "\n\n".join(f"{result.summary()}\n\n{result.table()}" for result in report.results)
    with written_whole(path.with_suffix(".md")) as unfinished:
        unfinished.write_text(text + "\n")
    if can_plot():
        with written_whole(path.with_suffix(".png")) as unfinished:
            plot(report, unfinished)


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def plot(report: Report, path: Path) -> None:
    """Acceptance by position, a line for each result."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for result in report.results:
        length = f"{result.total.acceptance_length:.2f} tokens per verification"
        label = f"{result.num_draft_tokens} drafts, temperature {result.temperature:g}: {length}"
        axes.plot(range(1, result.num_draft_tokens + 1), result.total.rates, marker="o", label=label)
    axes.set(xlabel="position", ylabel="share of verifications that accept up to it", ylim=(0, 1))
    axes.set_xticks(range(1, max(result.num_draft_tokens for result in report.results) + 1))
    axes.legend()
    figure.savefig(path, dpi=150, format="png")

"""What `draftsmith evaluate --output` wrote, read again for a card and checked field by field."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..model_card import Source
from ..model_card.rendering import ENGINES
from ..model_card.run_record import HUB, KINDS, LOCAL


TEXT, COUNT, NUMBER, OPTIONAL_COUNT, OPTIONAL_NUMBER = (
    "text",
    "a count",
    "a number",
    "a count or null",
    "a number or null",
)
# Of an evaluation, what a card shows.
SETTINGS = {
    "target": TEXT, "num_prompts": OPTIONAL_COUNT, "max_new_tokens": COUNT, "batch_size": COUNT, "seed": COUNT,
    "engine": TEXT,
}  # fmt: skip
RESULT = {"num_draft_tokens": COUNT, "temperature": NUMBER, "plain_tokens_per_second": OPTIONAL_NUMBER}
COUNTS = {"prompts": COUNT, "acceptance_length": NUMBER, "tokens_per_second": NUMBER}
LISTS = {"rounds": COUNT, "accepted": COUNT, "accepted_per_position": COUNT, "rates": NUMBER}


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read as JSON: {error}. Write it anew, or leave it out.") from error


def read_evaluation(path: Path) -> dict[str, Any]:
    """Raises `ValueError` for what is no evaluation, naming file and field."""
    evaluation = read_json(path)
    try:
        _check_evaluation(evaluation)
    except ValueError as error:
        raise ValueError(f"`evaluation`: {path} {error}: name what `draftsmith evaluate --output` wrote.") from error
    return evaluation


def _check_evaluation(evaluation: Any) -> None:
    if not isinstance(evaluation, dict) or not {"settings", "results"} <= evaluation.keys():
        raise ValueError("lacks `settings` and `results`")
    settings, results = evaluation["settings"], evaluation["results"]
    _check_fields(settings, SETTINGS, "settings")
    if settings["engine"] not in ENGINES:
        raise ValueError(f"has `settings.engine` {settings['engine']!r}, none of {', '.join(ENGINES)}")
    if settings.get("target_kind", LOCAL) not in KINDS or not isinstance(settings.get("draft", ""), str):
        raise ValueError("has a wrong `settings.target_kind` or `settings.draft`")
    _check_list(settings, "prompts", TEXT, "settings")
    if not isinstance(results, list) or not results:
        raise ValueError("lacks any result")
    for index, result in enumerate(results):
        name = f"results[{index}]"
        _check_fields(result, RESULT, name)
        if result["num_draft_tokens"] < 1:
            raise ValueError(f"has `{name}.num_draft_tokens` {result['num_draft_tokens']}")
        for part in ("total", "categories", "lengths"):
            if not isinstance(result.get(part), dict):
                raise ValueError(f"lacks `{name}.{part}`")
        named = [("total", result["total"])]
        named += [(f"{part}.{key}", result[part][key]) for part in ("categories", "lengths") for key in result[part]]
        for part, counts in named:
            _check_counts(counts, result["num_draft_tokens"], f"{name}.{part}")


def _check_counts(counts: Any, num_draft_tokens: int, name: str) -> None:
    _check_fields(counts, COUNTS, name)
    for field, kind in LISTS.items():
        _check_list(counts, field, kind, name)
    if len(counts["rates"]) != num_draft_tokens:
        raise ValueError(f"has {len(counts['rates'])} `{name}.rates`, but {num_draft_tokens} draft tokens")
    if counts.get("interval") is not None:
        _check_list(counts, "interval", NUMBER, name)
        if len(counts["interval"]) != 2:
            raise ValueError(f"has `{name}.interval` {counts['interval']!r}")
    counts.setdefault("interval", None)


def _check_fields(values: Any, kinds: dict[str, str], name: str) -> None:
    for field, kind in kinds.items():
        if not isinstance(values, dict) or field not in values:
            raise ValueError(f"lacks `{name}.{field}`")
        if not _is(values[field], kind):
            raise ValueError(f"has `{name}.{field}` {values[field]!r}, not {kind}")


def _check_list(values: dict[str, Any], field: str, kind: str, name: str) -> None:
    if field not in values:
        raise ValueError(f"lacks `{name}.{field}`")
    if not isinstance(values[field], list) or not all(_is(item, kind) for item in values[field]):
        raise ValueError(f"has `{name}.{field}` {values[field]!r}, no list with {kind} each")


def _is(value: Any, kind: str) -> bool:
    if kind.endswith("or null"):
        return value is None or _is(value, kind.removesuffix(" or null"))
    if kind == TEXT:
        return isinstance(value, str) and bool(value)
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return is_count or kind == NUMBER and isinstance(value, float) and math.isfinite(value) and value >= 0


def refuse_another_head(evaluations: Sequence[dict[str, Any]], draft: Path, repo_id: str | None) -> None:
    """Raise for an evaluation of a head of another name: directories move, but keep theirs."""
    names = {draft.absolute().name, draft.resolve().name, *([repo_id.rpartition("/")[2]] if repo_id else [])}
    for settings in (evaluation["settings"] for evaluation in evaluations):
        if "draft" not in settings:
            continue
        evaluated = Source.of(settings["draft"])
        is_of_hub = settings.get("draft_kind") == HUB
        is_other = is_of_hub and repo_id is not None and evaluated.name.casefold() != repo_id.casefold()
        if is_other or evaluated.name.rpartition("/")[2] not in names:
            raise ValueError(
                f"`evaluation` is of the head {evaluated.name}, but the card is of {repo_id or draft}: name an "
                "evaluation of this head."
            )


def evaluated_target(settings: dict[str, Any]) -> Source:
    """Of the Hub only where the evaluation says so: a relative path looks like an id wherever it does not exist."""
    target, kind = settings["target"], settings.get("target_kind")
    source = Source.of(target)
    if kind == HUB:
        return Source(source.name, HUB, source.revision or settings.get("target_revision"))
    return Source(Path(source.name).name, LOCAL)

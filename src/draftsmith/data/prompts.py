"""Prompts to decode, read from the same kinds of rows that are trained on."""

from collections.abc import Sequence
from typing import Any

from datasets import Dataset

from .encoding import parse_json_row
from .formats import RowError, read_messages
from .loading import load_sources


Prompt = list[dict[str, Any]] | str  # messages, or text for a completions endpoint


def read_prompts(datasets: Sequence[str | Dataset], *, config: str | None = None, split: str = "test") -> list[Prompt]:
    """The prompts of rows with `messages`, `conversations` or `prompt`; of a conversation, all before its last answer.

    Args:
        datasets, config, split: as in [`loading.load_sources`].

    Raises:
        ValueError: a row that holds no prompt, named with its file and row.
    """
    prompts = []
    for source in load_sources(datasets, config=config, split=split):
        for index, row in enumerate(source.rows):
            if source.is_json and not row["text"].strip():
                continue
            try:
                prompts.append(_prompt(parse_json_row(row["text"]) if source.is_json else row))
            except RowError as error:
                raise ValueError(f"{source.locate(index)}: {error}") from error
    if not prompts:
        raise ValueError(f"`prompts`: {', '.join(map(str, datasets))} holds no row.")
    return prompts


def _prompt(row: dict[str, Any]) -> Prompt:
    column = next((name for name in ("messages", "conversations", "prompt") if row.get(name)), None)
    if column is None:
        raise RowError("prompt", f"is missing, `messages` and `conversations` too; the row has {', '.join(row)}")
    if column == "prompt" and isinstance(row["prompt"], str):
        return row["prompt"]
    messages = read_messages(row[column], column)
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise RowError(column, "holds answers only")
    return messages

"""What a row asks of a target: its conversation, whose answers are the target's own to give."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm.auto import tqdm

from .encoding import parse_json_row, without_nulls
from .formats import REASONING_KEYS, RowError, read_messages, read_template_kwargs, read_tools, refuse_media
from .loading import Source
from .text import check_text


QUESTION_COLUMNS = ("messages", "conversations", "turns", "prompt")  # in order of precedence
MESSAGE_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id", *REASONING_KEYS}  # of the chat protocol
ASKING_ROLES = {"user", "tool"}


@dataclass(frozen=True)
class Question:
    """The messages before one answer, since the answer before it.

    `recorded` is the answer of the data if it calls tools, whose results the next question may begin with.
    """

    said: list[dict[str, Any]]
    recorded: dict[str, Any] | None = None

    @property
    def brings_tool_results(self) -> bool:
        return self.said[0]["role"] == "tool"


@dataclass(frozen=True)
class Questions:
    """A conversation without its answers."""

    turns: list[Question]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    def digest(self) -> str:
        """32 hexadecimal digits that stand for the contents."""
        turns = [[turn.said, turn.recorded] for turn in self.turns]
        text = json.dumps([turns, self.tools, self.template_kwargs], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class QuestionSet:
    """The conversations of sources, read anew whenever one is asked for: memory holds their digests alone.

    Args:
        sources: from `loading.load_sources`.
        column: read instead of the first of `QUESTION_COLUMNS` that a row has.

    Attributes:
        keys: `<digest>-<n>` of each conversation, the n-th of the same contents.
        errors: rows that ask nothing, each with its file, row, field and reason.
    """

    def __init__(self, sources: Sequence[Source], column: str | None = None):
        self.sources, self.column = sources, column
        self.keys: list[str] = []
        self.errors: list[str] = []
        self._places: list[tuple[int, int]] = []
        seen: dict[str, int] = {}
        for number, source in enumerate(sources):
            for index in tqdm(range(len(source.rows)), desc=f"Reading {source.name}", unit="row", delay=1):
                try:
                    questions = self._read(number, index)
                except RowError as error:
                    self.errors.append(f"{source.locate(index)}: {error}")
                    continue
                if questions is not None:
                    digest = questions.digest()
                    seen[digest] = seen.get(digest, -1) + 1
                    self.keys.append(f"{digest}-{seen[digest]}")
                    self._places.append((number, index))

    def __len__(self) -> int:
        return len(self.keys)

    def read(self, index: int) -> Questions:
        """The conversation of `keys[index]`."""
        questions = self._read(*self._places[index])
        assert questions is not None  # blank lines have no place
        return questions

    def locate(self, index: int) -> str:
        """Human name of a conversation's row."""
        number, row = self._places[index]
        return self.sources[number].locate(row)

    def _read(self, number: int, index: int) -> Questions | None:
        """None for a blank line."""
        source = self.sources[number]
        row = source.rows[index]
        if not source.is_json:
            return read_questions(without_nulls(row), self.column)
        return read_questions(parse_json_row(row["text"]), self.column) if row["text"].strip() else None


def question_column(row: Mapping[str, Any]) -> str:
    """The column of `QUESTION_COLUMNS` that a row has; raises `RowError` for a row without."""
    column = next((name for name in QUESTION_COLUMNS if row.get(name) is not None), None)
    if column is None:
        others = ", ".join(f"`{name}`" for name in QUESTION_COLUMNS[:-1])
        raise RowError("prompt", f"is missing, {others} too; the row has {', '.join(row) or 'nothing'}")
    return column


def read_questions(row: Mapping[str, Any], column: str | None = None) -> Questions:
    """A row's conversation, or what a string, or each of a list of strings, says as the user.

    Messages keep `MESSAGE_KEYS`. An answer that opens the conversation is kept, since nobody asked for it; all others,
    `completion` among them, are left out.

    Raises:
        RowError: a field is missing, of the wrong type, or asks nothing.
    """
    refuse_media(row)
    column = column or question_column(row)
    value = row.get(column)
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list) and value and all(isinstance(said, str) for said in value):
        turns = [Question([{"role": "user", "content": said}]) for said in value]
    else:
        messages = read_messages(value, column)
        if column == "prompt" and isinstance(row.get("completion"), list):
            messages += read_messages(row["completion"], "completion")
        turns = _without_answers(messages, column)
    questions = Questions(turns, read_tools(row), read_template_kwargs(row))
    said = [[turn.said, turn.recorded] for turn in turns]
    for name, value in (
        (column, said),
        ("tools", questions.tools),
        ("chat_template_kwargs", questions.template_kwargs),
    ):
        check_text(_as_json(value, name), name)
    return questions


def _as_json(value: Any, name: str) -> str:
    """What journals and requests hold; Parquet has dates, bytes and decimals, too."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, RecursionError) as error:
        raise RowError(name, f"can't be written as JSON: {error}") from error


def _without_answers(messages: list[dict[str, Any]], column: str) -> list[Question]:
    turns: list[Question] = []
    said: list[dict[str, Any]] = []
    for message in messages:
        message = {key: value for key, value in message.items() if key in MESSAGE_KEYS}
        if message["role"] != "assistant" or not (turns or _asks(said)):
            said.append(message)
        elif said:
            turns.append(Question(said, message if "tool_calls" in message else None))
            said = []
    if _asks(said):
        turns.append(Question(said))
    if not turns or not all(_asks(turn.said) for turn in turns):
        raise RowError(column, "asks nothing: no message of a user stands before an answer, or at the end")
    return turns


def _asks(said: list[dict[str, Any]]) -> bool:
    return any(message["role"] in ASKING_ROLES for message in said)

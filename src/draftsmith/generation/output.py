"""The finished dataset: Parquet in the order of the source, with its provenance beside it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..data.files import written_whole
from ..data.questions import QuestionSet
from ..data.wording import counted
from .conversations import whole_messages
from .journal import Journal


DATA_FILE, PROVENANCE_FILE, JOURNAL_FILE = "train.parquet", "provenance.json", ".journal.jsonl"
ROWS_PER_GROUP = 1000


@dataclass
class Counts:
    """What became of the conversations.

    Attributes:
        rows: conversations that the data asks for.
        written: of them, those in the dataset.
        answers: in all of these.
        cut: conversations with an answer that `max_new_tokens` ended, kept or not.
        unanswered: conversations that are left out since an answer failed, or no one could train on it.
        shortened: of those written, how many lost questions: after a cut, or before results of tool calls that the
            target did not make.
    """

    rows: int = 0
    written: int = 0
    answers: int = 0
    cut: int = 0
    unanswered: int = 0
    shortened: int = 0


def write_dataset(
    directory: Path, questions: QuestionSet, journal: Journal, *, keep_cut: bool, template_kwargs: dict[str, Any]
) -> Counts:
    """Write `train.parquet`: `messages`, `finished`, and `tools` and `chat_template_kwargs` where there are any.

    Tool calls, tools and template arguments are JSON text: Arrow's columns have one type, and these have many.
    Arguments are those of the run, and of the row, which win: with them training renders the prompts that were
    answered. Conversations without an answer in the journal are left out.

    Raises:
        ValueError: no conversation is left.
    """
    counts = Counts()
    columns = _columns(questions, journal, template_kwargs)
    with written_whole(directory / DATA_FILE) as unfinished, pq.ParquetWriter(unfinished, columns) as writer:
        rows: list[dict[str, Any]] = []
        for row in _rows(questions, journal, counts, keep_cut=keep_cut, template_kwargs=template_kwargs):
            rows.append(row)
            if len(rows) == ROWS_PER_GROUP:
                writer.write_table(pa.Table.from_pylist(rows, columns))
                rows = []
        writer.write_table(pa.Table.from_pylist(rows, columns))
        if not counts.written:
            asked = counted(counts.rows, "conversation")
            raise ValueError(
                f"`dataset`: of {asked} none is left to train on: {counts.unanswered:,} got no answer, {counts.cut:,} "
                "were cut at `max_new_tokens`. Keep cut ones, by the same command with `cut_answers=keep`, which asks "
                "nothing again, or allow longer answers in another `output_dir`."
            )
    return counts


def _rows(
    questions: QuestionSet, journal: Journal, counts: Counts, *, keep_cut: bool, template_kwargs: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    for index, key in enumerate(questions.keys):
        counts.rows += 1
        if key not in journal.places:
            counts.unanswered += 1
            continue
        asked, answered = questions.read(index), journal.read(key)
        messages = whole_messages(asked, answered, keep_cut=keep_cut)
        counts.cut += not answered.finished
        if not messages:
            continue
        number = sum(message["role"] == "assistant" for message in messages)
        counts.written += 1
        counts.answers += number
        counts.shortened += len(answered.messages) < len(asked.turns)
        is_cut = not answered.finished and messages[-1] == answered.messages[-1]
        yield {
            "messages": [_as_columns(message) for message in messages],
            "finished": not is_cut,
            "tools": _text(asked.tools),
            "chat_template_kwargs": _text(template_kwargs | asked.template_kwargs),
        }


def _columns(questions: QuestionSet, journal: Journal, template_kwargs: dict[str, Any]) -> pa.Schema:
    """Only keys and columns that some row has."""
    keys: dict[str, None] = {"role": None, "content": None}
    others: dict[str, None] = {}
    for index, key in enumerate(questions.keys):
        if key in journal.places:
            asked = questions.read(index)
            for message in whole_messages(asked, journal.read(key), keep_cut=True):
                keys |= dict.fromkeys(message)
            others |= {"tools": None} if asked.tools else {}
            others |= {"chat_template_kwargs": None} if template_kwargs | asked.template_kwargs else {}
    message_type = pa.struct([(key, pa.string()) for key in keys])
    return pa.schema(
        [("messages", pa.list_(message_type)), ("finished", pa.bool_())] + [(name, pa.string()) for name in others]
    )


def _as_columns(message: dict[str, Any]) -> dict[str, str]:
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in message.items()}


def _text(value: Any) -> str | None:
    return json.dumps(value) if value else None

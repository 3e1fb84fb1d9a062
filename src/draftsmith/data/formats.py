"""What a row means: each supported layout becomes a `Conversation`, a `Completion`, a `MarkedText` or `Tokens`."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from .messages import REASONING_KEYS as REASONING_KEYS  # read by others of what is said in a row
from .messages import (
    Row,
    RowError,
    integers,
    read_messages,
    read_template_kwargs,
    read_tools,
    string,
)


MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")


@dataclass(frozen=True)
class Conversation:
    """Messages to render with the chat template; answers before message `first_supervised` are context only.

    Where `finished` is false, the last answer was cut off: the model did not end it there.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    first_supervised: int = 0
    finished: bool = True


@dataclass(frozen=True)
class Completion:
    """Text as a completions endpoint serves it, without chat template."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class MarkedText:
    """A rendered conversation in which markers tell the speakers apart."""

    text: str


@dataclass(frozen=True)
class Tokens:
    """Token ids with their mask; without turn ids, a contiguous run of the mask is one turn.

    `conversation`, `key` and `piece` say which conversation and row they are of, where preparation has kept that (see
    `identity.Identity`).
    """

    input_ids: list[int]
    loss_mask: list[int]
    turn_ids: list[int] | None = None
    conversation: int | None = None
    key: int | None = None
    piece: int | None = None


Content = Conversation | Completion | MarkedText | Tokens


def detect_format(columns: Collection[str]) -> str | None:
    """The first format of `FORMATS` whose columns are all there, else None."""
    return next((name for name, (needed, _) in FORMATS.items() if needed <= set(columns)), None)


def read_row(row: Row, format_name: str, column: str | None = None) -> Content:
    """Check a row and say what it holds.

    Args:
        row: column names and values, as Python objects.
        format_name: a key of `FORMATS`.
        column: read instead of the format's own, for formats of one column.

    Raises:
        RowError: a field is missing, of the wrong type or of no use.
    """
    needed, reader = FORMATS[format_name]
    refuse_media(row)
    columns = [column] if column else sorted(needed)
    for name in columns:
        if row.get(name) is None:
            raise RowError(name, f"is missing; the row has {', '.join(sorted(row)) or 'nothing'}")
    return reader(row, columns)


def refuse_media(row: Row) -> None:
    """Raise `RowError` for a row with images, video or sound."""
    for media in MEDIA_COLUMNS:
        if row.get(media):
            raise RowError(media, "holds media, but only text can be trained on; remove the row or the column")


def _read_messages(row: Row, columns: list[str]) -> Conversation:
    (column,) = columns
    return Conversation(
        read_messages(row[column], column),
        read_tools(row),
        read_template_kwargs(row),
        finished=_is_finished(row),
    )


def _read_prompt_completion(row: Row, _: list[str]) -> Conversation | Completion:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str):
        return Completion(prompt, string(completion, "completion"))
    messages = read_messages(prompt, "prompt")
    return Conversation(
        messages + read_messages(completion, "completion"),
        read_tools(row),
        read_template_kwargs(row),
        first_supervised=len(messages),
        finished=_is_finished(row),
    )


def _is_finished(row: Row) -> bool:
    finished = row.get("finished", True)
    if finished is None or isinstance(finished, bool):
        return finished is not False
    raise RowError("finished", f"is {finished!r}, not true or false")


def _read_text(row: Row, columns: list[str]) -> MarkedText:
    (column,) = columns
    return MarkedText(string(row[column], column))


def _read_tokens(row: Row, _: list[str]) -> Tokens:
    columns = {name: row[name] for name in ("input_ids", "loss_mask", "turn_ids") if row.get(name) is not None}
    length = len(integers(columns["input_ids"], "input_ids"))
    for name, values in columns.items():
        if len(integers(values, name)) != length:
            raise RowError(name, f"has {len(values)} entries for {length} `input_ids`")
    if min(columns["input_ids"], default=0) < 0:
        raise RowError("input_ids", "holds a negative id")
    if not set(columns["loss_mask"]) <= {0, 1}:
        raise RowError("loss_mask", "holds something other than 0 and 1")
    if any(
        mask and not 0 <= turn < length
        for mask, turn in zip(columns["loss_mask"], columns.get("turn_ids", ()), strict=False)
    ):
        raise RowError("turn_ids", f"is not in 0..{length - 1} at a supervised token")
    kept = {name: row[name] for name in ("conversation", "key", "piece") if _is_fingerprint(row.get(name))}
    return Tokens(**columns, **kept)


def _is_fingerprint(value: Any) -> bool:
    """Columns of other origin have other values under such names."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


# In order of precedence: the columns that must be there, and the function that reads the row given their names.
FORMATS: dict[str, tuple[frozenset[str], Callable[[Row, list[str]], Content]]] = {
    "tokens": (frozenset({"input_ids", "loss_mask"}), _read_tokens),
    "messages": (frozenset({"messages"}), _read_messages),
    "conversations": (frozenset({"conversations"}), _read_messages),
    "prompt_completion": (frozenset({"prompt", "completion"}), _read_prompt_completion),
    "text": (frozenset({"text"}), _read_text),
}
COLUMNS = frozenset().union(*(needed for needed, _ in FORMATS.values())) | {
    "turn_ids", "conversation", "key", "piece", "tools", "chat_template_kwargs", "finished", *MEDIA_COLUMNS
}  # fmt: skip

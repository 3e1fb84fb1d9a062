"""What a row means: each supported layout becomes a `Conversation`, a `Completion`, a `MarkedText` or `Tokens`."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any


Row = Mapping[str, Any]

# ShareGPT speakers
ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}
# where datasets and templates keep what a model thinks before it answers
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")


class RowError(ValueError):
    """A row that can't be used: which field, and why.

    Both may quote the row: what a terminal would obey is written as an escape.
    """

    def __init__(self, field_name: str, reason: str):
        super().__init__("".join(map(_printable, f"`{field_name}` {reason}")))


def _printable(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape", "surrogatepass").decode()


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

    `conversation` is the fingerprint of the conversation they are of, where the row has kept it.
    """

    input_ids: list[int]
    loss_mask: list[int]
    turn_ids: list[int] | None = None
    conversation: int | None = None


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
        finished=row.get("finished") is not False,
    )


def _read_prompt_completion(row: Row, _: list[str]) -> Conversation | Completion:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str):
        return Completion(prompt, _string(completion, "completion"))
    messages = read_messages(prompt, "prompt")
    return Conversation(
        messages + read_messages(completion, "completion"),
        read_tools(row),
        read_template_kwargs(row),
        first_supervised=len(messages),
        finished=row.get("finished") is not False,
    )


def _read_text(row: Row, columns: list[str]) -> MarkedText:
    (column,) = columns
    return MarkedText(_string(row[column], column))


def _read_tokens(row: Row, _: list[str]) -> Tokens:
    columns = {name: row[name] for name in ("input_ids", "loss_mask", "turn_ids") if row.get(name) is not None}
    length = len(_integers(columns["input_ids"], "input_ids"))
    for name, values in columns.items():
        if len(_integers(values, name)) != length:
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
    conversation = row.get("conversation")
    if conversation is not None and not (isinstance(conversation, int) and 0 <= conversation < 2**63):
        raise RowError("conversation", "is not a fingerprint of 63 bits")
    return Tokens(**columns, conversation=conversation)


def read_messages(value: Any, name: str) -> list[dict[str, Any]]:
    """Messages with `role` and string `content`, from those or from ShareGPT's `from` and `value`.

    Raises:
        RowError: `name`, or an entry of it, is not what it should be.
    """
    if not isinstance(value, list):
        raise RowError(name, f"is {_kind(value)}, not a list of messages")
    if not value:
        raise RowError(name, "is empty")
    return [_message(message, f"{name}[{index}]") for index, message in enumerate(value)]


def _message(value: Any, name: str) -> dict[str, Any]:
    """A message with `role` and string `content`; other keys (tool calls, reasoning) go to the template untouched."""
    if not isinstance(value, Mapping):
        raise RowError(name, f"is {_kind(value)}, not an object")
    message = {key: entry for key, entry in value.items() if entry is not None}
    if "from" in message:
        speaker = message.pop("from")
        if not isinstance(speaker, str) or speaker not in ROLES:
            raise RowError(f"{name}.from", f"is {speaker!r}, not one of {', '.join(ROLES)}")
        message["role"] = ROLES[speaker]
        if "value" in message:
            message["content"] = message.pop("value")
    if not isinstance(message.get("role"), str):
        raise RowError(f"{name}.role", f"is {_kind(message.get('role'))}, not a string")
    if "content" in message:
        message["content"] = _text_content(message["content"], f"{name}.content")
    elif "tool_calls" not in message:
        raise RowError(f"{name}.content", "is missing")
    for key in REASONING_KEYS:
        _string(message.get(key, ""), f"{name}.{key}")
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], f"{name}.tool_calls")
    return message


def _tool_calls(value: Any, name: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects: servers decode the JSON text of requests before rendering, too.

    The list itself may be JSON text, since columns have one type.
    """
    if isinstance(value, str):
        value = _json(value, name)
    if not isinstance(value, list) or not all(isinstance(call, Mapping) for call in value):
        raise RowError(name, "is not a list of objects")
    calls = []
    for index, call in enumerate(value):
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RowError(f"{name}[{index}]", "names no function")
        if isinstance(function.get("arguments"), str):
            arguments = _json(function["arguments"] or "{}", f"{name}[{index}].arguments")
            function = {**function, "arguments": arguments}
        calls.append({**call, "function": function} if "function" in call else dict(function))
    return calls


def _text_content(value: Any, name: str) -> str:
    """Content as one string: the plain form, or a list of text parts."""
    if not isinstance(value, list):
        return _string(value, name)
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, Mapping) else _kind(part)
        if kind != "text":
            raise RowError(f"{name}[{index}]", f"is {kind}, but only text can be trained on")
    return "".join(_string(part.get("text"), f"{name}[{index}].text") for index, part in enumerate(value))


def read_tools(row: Row) -> list[dict[str, Any]] | None:
    """The column `tools`: JSON schemas, or those as text, since columns have one type."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        tools = _json(tools, "tools")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError("tools", "is not a list of JSON schemas")
    return tools


def read_template_kwargs(row: Row) -> dict[str, Any]:
    """The column `chat_template_kwargs`: an object, or one as text."""
    kwargs = row.get("chat_template_kwargs") or {}
    if isinstance(kwargs, str):
        kwargs = _json(kwargs, "chat_template_kwargs")
    if not isinstance(kwargs, dict):
        raise RowError("chat_template_kwargs", f"is {_kind(kwargs)}, not an object")
    return kwargs


def _json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(name, f"is not JSON: {error}") from error


def _string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise RowError(name, f"is {_kind(value)}, not a string")
    return value


def _integers(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or not all(isinstance(entry, int) for entry in value):
        raise RowError(name, "is not a list of integers")
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


# In order of precedence: the columns that must be there, and the function that reads the row given their names.
FORMATS: dict[str, tuple[frozenset[str], Callable[[Row, list[str]], Content]]] = {
    "tokens": (frozenset({"input_ids", "loss_mask"}), _read_tokens),
    "messages": (frozenset({"messages"}), _read_messages),
    "conversations": (frozenset({"conversations"}), _read_messages),
    "prompt_completion": (frozenset({"prompt", "completion"}), _read_prompt_completion),
    "text": (frozenset({"text"}), _read_text),
}
COLUMNS = frozenset().union(*(needed for needed, _ in FORMATS.values())) | {
    "turn_ids", "conversation", "tools", "chat_template_kwargs", "finished", *MEDIA_COLUMNS
}  # fmt: skip

"""Messages, tools and template arguments of a row, checked."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase


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
# of the chat protocol, which templates render whether they name them or not
PROTOCOL_ROLES = ("system", "developer", "user", "assistant", "tool")
# what others call these
MEANT_ROLES = ROLES | {
    **{role: role for role in PROTOCOL_ROLES},
    **dict.fromkeys(("ai", "bot", "chatbot", "chatgpt", "model"), "assistant"),
    **dict.fromkeys(("function", "ipython"), "tool"),
}
# where datasets and templates keep what a model thinks before it answers
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
# what rendering sets itself, or what would keep it from giving text; `documents` alone is data
RESERVED_KWARGS = {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {
    "documents"
}


class RowError(ValueError):
    """A row that can't be used: which field, and why.

    Both may quote the row: what a terminal would obey is written as an escape.
    """

    def __init__(self, field_name: str, reason: str):
        super().__init__("".join(map(_printable, f"`{field_name}` {reason}")))


def _printable(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape", "surrogatepass").decode()


def read_messages(value: Any, name: str) -> list[dict[str, Any]]:
    """Messages with `role` and string `content`, from those or from ShareGPT's `from` and `value`.

    Raises:
        RowError: `name`, or an entry of it, is not what it should be.
    """
    if not isinstance(value, list):
        raise RowError(name, f"is {kind_of(value)}, not a list of messages")
    if not value:
        raise RowError(name, "is empty")
    return [_message(message, f"{name}[{index}]") for index, message in enumerate(value)]


def _message(value: Any, name: str) -> dict[str, Any]:
    """A message with `role` and string `content`; other keys (tool calls, reasoning) go to the template untouched."""
    if not isinstance(value, Mapping):
        raise RowError(name, f"is {kind_of(value)}, not an object")
    message = {key: entry for key, entry in value.items() if entry is not None}
    if "from" in message:
        speaker = message.pop("from")
        if not isinstance(speaker, str) or speaker not in ROLES:
            raise RowError(f"{name}.from", f"is {speaker!r}, not one of {', '.join(ROLES)}")
        message["role"] = ROLES[speaker]
        if "value" in message:
            message["content"] = message.pop("value")
    if not isinstance(message.get("role"), str):
        raise RowError(f"{name}.role", f"is {kind_of(message.get('role'))}, not a string")
    if "content" in message:
        message["content"] = _text_content(message["content"], f"{name}.content")
    elif "tool_calls" not in message:
        raise RowError(f"{name}.content", "is missing")
    for key in REASONING_KEYS:
        string(message.get(key, ""), f"{name}.{key}")
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], f"{name}.tool_calls")
    return message


def check_roles(messages: Sequence[Mapping[str, Any]], template: Callable[[], str], owner: str) -> None:
    """Refuse roles that neither the chat protocol has nor a template, `owner`'s, names in quotes.

    It would render them as they are, and a model would learn from turns that it is never served.

    Raises:
        RowError: the first such role.
    """
    for index, message in enumerate(messages):
        role = message["role"]
        if role in PROTOCOL_ROLES or any(f"{quote}{role}{quote}" in template() for quote in "'\""):
            continue
        meant = MEANT_ROLES.get(role.strip().lower())
        known = f"not one of {', '.join(PROTOCOL_ROLES)}, and {owner} doesn't name it"
        reason = f": did you mean `{meant}`?" if meant else f", {known}"
        raise RowError(f"messages[{index}].role", f"is {role!r}{reason}")


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
        return string(value, name)
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, Mapping) else kind_of(part)
        if kind != "text":
            raise RowError(f"{name}[{index}]", f"is {kind}, but only text can be trained on")
    return "".join(string(part.get("text"), f"{name}[{index}].text") for index, part in enumerate(value))


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
    """The column `chat_template_kwargs`: an object, or one as text, of what templates may take from a row."""
    kwargs = row.get("chat_template_kwargs") or {}
    if isinstance(kwargs, str):
        kwargs = _json(kwargs, "chat_template_kwargs")
    if not isinstance(kwargs, dict):
        raise RowError("chat_template_kwargs", f"is {kind_of(kwargs)}, not an object")
    if reserved := sorted(RESERVED_KWARGS & set(kwargs)):
        raise RowError("chat_template_kwargs", f"holds `{reserved[0]}`, which preparation itself sets")
    return kwargs


def _json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(name, f"is not JSON: {error}") from error


def string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise RowError(name, f"is {kind_of(value)}, not a string")
    return value


def integers(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or not all(isinstance(entry, int) for entry in value):
        raise RowError(name, "is not a list of integers")
    return value


def kind_of(value: Any) -> str:
    return "null" if value is None else type(value).__name__

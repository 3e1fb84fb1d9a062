"""What a rendered answer must hold: all that the assistant wrote, nothing of it dropped or rewritten."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from .messages import REASONING_KEYS, RowError


REASONING_TAG = re.compile(r"\s*</?think>\s*")
REASONING_END = "</think>"
SENTINEL = "\ue000\ue001"  # for private use, so that no template knows it


def check_answer(message: Mapping[str, Any], name: str, text: str, start: int, end: int, template: str) -> None:
    """Refuse an answer that the template changed; only white space around it, or around reasoning tags, may differ.

    Args:
        message: what the assistant wrote.
        name: what errors call it.
        text: the rendering, with the answer in characters `start:end`.
        template: what errors call the template.

    Raises:
        RowError: content, reasoning or a tool call is not there in full.
    """
    for key in ("content", *REASONING_KEYS):
        value = message.get(key, "")
        begin = max(start - len(value), 0)  # the generation prompt may hold the beginning, e.g. `<think>`
        if not _holds(text[begin:end], value):
            raise RowError(
                f"{name}.{key}", f"is not rendered in full by {template}, so its tokens can't be supervised"
            )
    for number, call in enumerate(message.get("tool_calls", ())):
        if missing := next((part for part in _call_texts(call) if not _holds_json(text[start:end], part)), None):
            raise RowError(
                f"{name}.tool_calls[{number}]",
                f"is not rendered in full by {template} ({missing[:40]!r} is missing), so it can't be supervised",
            )


def with_sentinel(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The message with the end of its content marked: how it is rendered tells `text_after` where that is.

    Raises:
        RowError: it has no content, as only an answer that was cut off before any.
    """
    content = message.get("content", "").rstrip()
    if not content:
        raise RowError(f"{name}.content", "was cut off (`finished` is false) and is empty: leave the row out")
    return {**message, "content": content + SENTINEL}


def text_after(text: str, marked: str, name: str) -> str:
    """What the template puts after a content, white space at its end included; the content may hold the same.

    Args:
        text: the rendering up to and with the message.
        marked: the same of `with_sentinel(message)`.
        name: what errors call the message.

    Raises:
        RowError: the template doesn't render the content once and as it is.
    """
    end = len(os.path.commonprefix([text, marked]))
    rest = marked[end:].removeprefix(SENTINEL)
    if rest == marked[end:] or rest.lstrip() != text[end:].lstrip():
        raise RowError(f"{name}.content", "is not rendered once and as it is, so its end can't be located")
    return text[end:]


def as_generated(message: Mapping[str, Any], prompt: str) -> str | None:
    """The prompt and the whole answer to it, where the template opens the reasoning and then drops it from messages.

    Such templates (DeepSeek-R1's) never render what the model generates, but its parts are known: the reasoning, which
    follows the `<think>` of the generation prompt, and the content.

    Args:
        message: the answer, its reasoning in the content before `</think>`, or under a key of its own.
        prompt: the rendering of the messages before it, with the generation prompt.

    Returns:
        None where the message has no reasoning or the template is not such a one.
    """
    content = message.get("content", "")
    written, _, visible = content.rpartition(REASONING_END)
    generated = content.strip().removeprefix("<think>").lstrip("\n")
    if not written:
        reasoning = next((message[key] for key in REASONING_KEYS if message.get(key)), "")
        written, visible = reasoning, content
        generated = f"{reasoning.strip()}\n{REASONING_END}\n\n{content.strip()}"
    if not (written.strip() and visible.strip() and prompt.rstrip().endswith("<think>")):
        return None
    return prompt + generated


def _holds(text: str, value: str) -> bool:
    value = value.strip()
    if value in text:
        return True
    if REASONING_END not in value:
        return False
    place = 0
    for part in REASONING_TAG.split(value):
        place = text.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True


def _holds_json(text: str, value: str) -> bool:
    """Templates write arguments as JSON, of either kind, or as plain text."""
    return any(form in text for form in (value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]))


def _call_texts(call: Any) -> Iterator[str]:
    """The function's name and all texts in its arguments."""
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    if isinstance(function, Mapping):
        yield from _strings([function.get("name"), function.get("arguments")])


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(entry)

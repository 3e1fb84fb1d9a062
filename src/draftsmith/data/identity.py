"""When two rows are the same conversation: the fingerprint by which they are counted, dropped and held out."""

import hashlib
import json
import unicodedata
from typing import Any

from .formats import Completion, Content, Conversation, MarkedText


def fingerprint(content: Content) -> int:
    """63 bits of what a row says, whatever its format.

    Accidents of storage don't count: the speakers' names of ShareGPT, text as parts, Windows line ends, the form of
    Unicode (NFC), white space around a text, the order of keys. Everything else does, upper case and inner white space
    included: in code they mean something.
    """
    if isinstance(content, Conversation):
        value: list[Any] = [content.messages, content.tools, content.template_kwargs]
    elif isinstance(content, Completion):
        value = [content.prompt, content.completion]
    else:
        value = [content.text] if isinstance(content, MarkedText) else content.input_ids
    text = json.dumps(_normalized(value), sort_keys=True, ensure_ascii=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1  # for a signed integer


def _normalized(value: Any) -> Any:
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value.replace("\r\n", "\n")).strip()
    if isinstance(value, dict):
        return {key: _normalized(entry) for key, entry in value.items()}
    return [_normalized(entry) for entry in value] if isinstance(value, list) else value

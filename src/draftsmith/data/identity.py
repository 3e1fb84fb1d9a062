"""When two rows are the same: fingerprints by which they are counted, dropped and held out."""

import hashlib
import json
import unicodedata
from dataclasses import dataclass
from typing import Any

from .formats import Completion, Content, Conversation, MarkedText, Tokens


@dataclass(frozen=True)
class Identity:
    """What a row is, as integers of 63 bits.

    Attributes:
        conversation: the fingerprint of what it says, by which it is held out for evaluation.
        key: that, and what of it is supervised, by which duplicates are known.
        piece: which of the documents of such a row it is, where each has become a row of its own.
    """

    conversation: int = 0
    key: int = 0
    piece: int = 0


def identify(content: Content) -> Identity:
    """The identity of a row; prepared documents keep that of the row that they were made of."""
    conversation = fingerprint(content)
    supervised: list[Any] = []
    if isinstance(content, Tokens):
        if content.conversation is not None:
            conversation = content.conversation
        if content.conversation is not None and content.key is not None and content.piece is not None:
            return Identity(conversation, content.key, content.piece)
        supervised = [content.input_ids, content.loss_mask, content.turn_ids]
    elif isinstance(content, Conversation):
        messages = content.messages[1 : content.first_supervised]  # an answer that opens it is context anyway
        context = sum(message["role"] == "assistant" for message in messages)
        supervised = [context, content.finished] if context or not content.finished else []
    return Identity(conversation, _hash([conversation, supervised]) if supervised else conversation)


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
    return _hash(_normalized(value))


def _hash(value: Any) -> int:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1  # for a signed integer


def _normalized(value: Any) -> Any:
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value.replace("\r\n", "\n")).strip()
    if isinstance(value, dict):
        return {key: _normalized(entry) for key, entry in value.items()}
    return [_normalized(entry) for entry in value] if isinstance(value, list) else value

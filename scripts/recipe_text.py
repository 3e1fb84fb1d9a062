"""Prompts of the recipe, and what decides between them: hashes of their texts, never a generator's state."""

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar


Item = TypeVar("Item")

SHARED_CHARACTERS = 60  # normalised, from its beginning: a text that has so many of another's is taken for it
INDEXED_CHARACTERS = 12


class Prompt(NamedTuple):
    """What a user says, turn after turn."""

    category: str
    turns: list[str]

    @property
    def text(self) -> str:
        return "\n".join(self.turns)

    @property
    def id(self) -> str:
        return f"{digest(self.text):016x}"

    def row(self) -> dict[str, Any]:
        return {"id": self.id, "category": self.category, "turns": self.turns}


def digest(text: str) -> int:
    """64 bits."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "replace")).digest()[:8], "big")


def shuffled(items: Iterable[Item], text: Callable[[Item], str]) -> list[Item]:
    return sorted(items, key=lambda item: digest(text(item)))


def pick(options: Sequence[Item], text: str) -> Item:
    return options[digest(text) % len(options)]


def normalised(text: str) -> str:
    """Letters and digits in lower case, one space between words."""
    return " ".join(re.findall(r"\w+", text.lower()))


class HeldOut:
    """Texts that no other text may contain: neither whole nor their first `SHARED_CHARACTERS`."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.beginnings: dict[str, list[str]] = {}
        for text in texts:
            beginning = normalised(text)[:SHARED_CHARACTERS]
            self.beginnings.setdefault(beginning[:INDEXED_CHARACTERS], []).append(beginning)

    def is_in(self, text: str) -> bool:
        text = normalised(text)
        starts = [0, *(match.end() for match in re.finditer(" ", text))]
        return any(
            text.startswith(beginning, start)
            for start in starts
            for beginning in self.beginnings.get(text[start : start + INDEXED_CHARACTERS], ())
        )

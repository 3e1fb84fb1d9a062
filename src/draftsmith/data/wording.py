"""How messages put counts, and how two sets of settings differ."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def counted(number: int, noun: str) -> str:
    """`1 row`, `2,000 rows`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """The settings that differ, with both values; of a mapping only its fields that do, as `mapping.field`."""
    for name in dict.fromkeys([*before, *now]):
        first, second = before.get(name), now.get(name)
        if first and second and isinstance(first, Mapping) and isinstance(second, Mapping):
            yield from ((f"{name}.{field}", *values) for field, *values in differences(first, second))
        elif first != second:
            yield name, first, second


def changes(differing: Iterable[tuple[str, Any, Any]]) -> str:
    """`` `name` was 1 and is 2, .. `` of settings with both values."""
    return ", ".join(f"`{name}` was {before!r} and is {now!r}" for name, before, now in differing)

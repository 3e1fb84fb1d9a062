"""What was answered so far, one line per conversation, so that a run can be killed at any moment and go on."""

import fcntl
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from .conversations import Answered


class Journal:
    """An append-only file of JSON lines: the run's settings, then each `Answered`.

    A line counts once its line break is written: what follows the last one is of a run that was killed, and dropped.

    Args:
        path: the file, which is made if it is missing.
        settings: what decides the answers.

    Attributes:
        places: key of each conversation -> where its line begins, in bytes.
        new_tokens, prompt_tokens, seconds: summed over the lines.

    Raises:
        ValueError: the file is of other settings, of another run that still goes on, or is none of ours.
    """

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.path = path
        self.places: dict[str, int] = {}
        self.new_tokens, self.prompt_tokens, self.seconds = 0, 0, 0.0
        self._file: IO[bytes] = open(path, "a+b")
        try:
            self._lock()
            if not self._read(settings):
                self._append({"settings": settings})
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, answered: Answered) -> None:
        """Keep it, whatever happens to the process from now on."""
        place = self._append(asdict(answered))
        self._count(answered, place)

    def read(self, key: str) -> Answered:
        self._file.seek(self.places[key])
        return Answered(**json.loads(self._file.readline()))

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(
                f"`output_dir`: another run writes to {self.path.parent}: let it end, or name another."
            ) from error

    def _append(self, value: dict[str, Any]) -> int:
        place = self._file.seek(0, 2)
        self._file.write(json.dumps(value).encode() + b"\n")
        self._file.flush()
        return place

    def _read(self, settings: dict[str, Any]) -> bool:
        """Whether there is anything to go on from."""
        whole = 0
        for place, line in self._lines():
            try:
                value = json.loads(line)
                if place == 0:
                    refuse_other_settings(value["settings"], settings, self.path.parent)
                else:
                    self._count(Answered(**value), place)
            except (LookupError, TypeError, json.JSONDecodeError) as error:
                reason = f"{self.path} is damaged at byte {place} ({error!r}): remove it to begin anew."
                raise ValueError(reason) from error
            whole = place + len(line)
        self._file.truncate(whole)
        return whole > 0

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Whole lines, with the places where they begin."""
        self._file.seek(0)
        place = 0
        for line in self._file:
            if line.endswith(b"\n"):
                yield place, line
            place += len(line)

    def _count(self, answered: Answered, place: int) -> None:
        self.places[answered.key] = place
        self.new_tokens += answered.new_tokens
        self.prompt_tokens += answered.prompt_tokens
        self.seconds += answered.seconds


def refuse_other_settings(before: dict[str, Any], now: dict[str, Any], directory: Path) -> None:
    """Raise `ValueError`, naming what differs, for an output of other settings."""
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if names:
        differences = ", ".join(f"`{name}` was {before.get(name)!r} and is {now.get(name)!r}" for name in names)
        raise ValueError(
            f"`output_dir`: {directory} holds answers of other settings: {differences}. Go on with the "
            "former, or name another directory."
        )

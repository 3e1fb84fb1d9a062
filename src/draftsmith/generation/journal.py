"""What was answered so far, one line per conversation, so that a run can be killed at any moment and go on."""

import hashlib
import json
import logging
from collections.abc import Collection, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from ..data.files import lock_for_one_run, naming_full_disks
from ..data.wording import changes, counted, differences
from .conversations import Answered


logger = logging.getLogger(__name__)

DECIDED_LAST = {"cut_answers"}  # settings of what is written of the answers, which are the same with any


class Journal:
    """An append-only file of JSON lines: the run's settings, then each `Answered`.

    A line counts once its line break is written: what follows the last one is of a run that was killed, and dropped.
    Each has a checksum: one that was damaged since costs its own conversation, which is asked again.

    Args:
        path: the file, which is made if it is missing.
        settings: what decides the answers, and may hold `DECIDED_LAST`, too.

    Attributes:
        places: key of each conversation -> where its line begins, in bytes.
        new_tokens, prompt_tokens, seconds: summed over the lines.

    Raises:
        ValueError: the file is of other settings, which may be damaged, or of another run that still goes on.
    """

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.path = path
        self.places: dict[str, int] = {}
        self.new_tokens, self.prompt_tokens, self.seconds = 0, 0, 0.0
        self._file: IO[bytes] = open(path, "a+b")
        try:
            lock_for_one_run(self._file, path.parent)
            if not self._read(settings):
                self._append({"settings": settings})
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        with naming_full_disks(self.path):  # what could not be written is tried once more
            self._file.close()

    def add(self, answered: Answered) -> None:
        """Keep it, whatever happens to the process from now on."""
        place = self._append(asdict(answered))
        self._count(answered, place)

    def read(self, key: str) -> Answered:
        self._file.seek(self.places[key])
        answered = _value(self._file.readline(), "key")
        assert answered is not None  # it was read before
        return Answered(**answered)

    def _append(self, value: dict[str, Any]) -> int:
        with naming_full_disks(self.path):
            place = self._file.seek(0, 2)
            self._file.write(_line(value))
            self._file.flush()
        return place

    def _read(self, settings: dict[str, Any]) -> bool:
        """Whether there is anything to go on from."""
        whole, damaged = 0, []
        for place, line in self._lines():
            value = _value(line, "key" if place else "settings")
            if value is None and place == 0:
                raise ValueError(f"`output_dir`: the first line of {self.path} is damaged: remove it to begin anew.")
            if value is None:
                damaged.append(place)
            elif place == 0:
                refuse_other_settings(value["settings"], settings, self.path.parent, but_for=DECIDED_LAST)
            else:
                self._count(Answered(**value), place)
            whole = place + len(line)
        if damaged:
            reason = "Damaged: %s of %s, the first at byte %d. What they answered is asked again."
            logger.warning(reason, counted(len(damaged), "line"), self.path, damaged[0])
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


def _line(value: dict[str, Any]) -> bytes:
    digest = hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()
    return json.dumps({**value, "checksum": digest}).encode() + b"\n"


def _value(line: bytes, field: str) -> dict[str, Any] | None:
    """What `_line` wrote, with `field`; None if it is something else by now."""
    try:
        value = json.loads(line)
        del value["checksum"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return value if field in value and _line(value) == line else None


def refuse_other_settings(
    before: dict[str, Any], now: dict[str, Any], directory: Path, *, but_for: Collection[str] = ()
) -> None:
    """Raise `ValueError`, naming what differs, for an output of other settings."""
    differing = [found for found in differences(before, now) if found[0] not in but_for]
    if differing:
        raise ValueError(
            f"`output_dir`: {directory} holds answers of other settings: {changes(differing)}. Go on with the "
            "former, or name another directory."
        )

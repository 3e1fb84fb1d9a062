"""Pushes beside training: files set aside for them, one thread, and a wait that a signal ends."""

import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any


POLL_SECONDS = 0.2


class BackgroundPush:
    """One push at a time, beside what its owner does."""

    def __init__(self) -> None:
        self._future: Future | None = None

    @property
    def is_busy(self) -> bool:
        return self._future is not None and not self._future.done()

    def start(self, push: Callable[[], Any], *, outlives: bool) -> Future:
        """Run `push` on a thread. The interpreter waits for it at its end if it `outlives` what started it.

        Not an executor, whose threads the interpreter waits for in any case, though a signal asked it to end.
        """
        future: Future = Future()
        self._future = future
        threading.Thread(target=_fill, args=(future, push), daemon=not outlives).start()
        return future

    def wait(self, until: Callable[[], Any] = lambda: False) -> bool:
        """Whether the push has ended, and not the waiting because of `until`; what it raised is its future's."""
        while self.is_busy and not until():
            wait([self._future], timeout=POLL_SECONDS)  # type: ignore[list-item]
        return not self.is_busy


def _fill(future: Future, push: Callable[[], Any]) -> None:
    try:
        future.set_result(push())
    except BaseException as error:
        future.set_exception(error)


def set_aside(checkpoint: Path, directory: Path) -> None:
    """The files of a checkpoint, which rotation may delete, once more: as hard links where the disk has them."""
    shutil.copytree(checkpoint, directory, copy_function=_link_or_copy)


def _link_or_copy(source: str, copy: str) -> None:
    try:
        os.link(source, copy)
    except OSError:
        shutil.copy2(source, copy)

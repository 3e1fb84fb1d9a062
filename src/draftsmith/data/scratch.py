"""Directories for what is unfinished: a killed run leaves one, and a later run removes it."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import datasets


UNFINISHED = ".unfinished-"  # what their names begin with
ABANDONED = 24 * 3600  # seconds after which one that nobody holds is removed


def data_directory(cache_dir: str | None) -> Path:
    """Where prepared data and what is not prepared yet lies: in `cache_dir`, by default that of Hugging Face."""
    return Path(cache_dir or datasets.config.HF_CACHE_HOME).expanduser() / "draftsmith"


def make_scratch(parent: Path) -> tuple[Path, Callable[[], None]]:
    """A new directory in `parent`, which this process holds, and what deletes it."""
    parent.mkdir(parents=True, exist_ok=True)
    for path in parent.glob(f"{UNFINISHED}*"):
        _remove_abandoned(path)
    directory = Path(tempfile.mkdtemp(dir=parent, prefix=UNFINISHED))
    lock = os.open(directory, os.O_RDONLY)  # the kernel gives it back however the process ends
    with suppress(OSError):  # a file system without locks: then nobody else gets one, and removes nothing
        fcntl.flock(lock, fcntl.LOCK_SH)

    def discard() -> None:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)

    return directory, discard


def _remove_abandoned(path: Path) -> None:
    with suppress(OSError):  # another process was faster, or holds it
        if time.time() - path.stat().st_mtime < ABANDONED:
            return
        lock = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)

"""Files that appear once they are whole, or not at all."""

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


PART = ".part-"  # what a name begins with while its file is written
NO_ROOM = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EFBIG: "it is larger than a file may be (`ulimit -f`)",
}


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Another name to write to: `path` appears once all is on the disk, or not at all."""
    unfinished = path.with_name(f"{PART}{path.name}")
    try:
        with naming_full_disks(path):
            yield unfinished
            synchronize(unfinished)
            unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


class FullDiskError(OSError):
    """There is no room; says what can't be written there."""


@contextmanager
def naming_full_disks(path: Path) -> Iterator[None]:
    """Raise `FullDiskError` where no room is left for `path`."""
    try:
        yield
    except FullDiskError:
        raise
    except Exception as error:  # `datasets` wraps what a disk raises
        numbers = [fault.errno for fault in (error, error.__cause__) if isinstance(fault, OSError)]
        if (reason := next((NO_ROOM[number] for number in numbers if number in NO_ROOM), None)) is None:
            raise
        raise FullDiskError(f"{path} can't be written, {reason}: make room there, or name another one.") from error


def write_json(value: object, path: Path) -> None:
    with written_whole(path) as unfinished:
        unfinished.write_text(json.dumps(value, indent=2) + "\n")


def lock_for_one_run(file: IO[bytes], directory: Path) -> None:
    """Hold `file` until it is closed; raise `ValueError` where the run of another process, into `directory`, does."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ValueError(f"`output_dir`: another run writes to {directory}: let it end, or name another.") from error


def file_digest(path: Path, digest: Any) -> str:
    """Hexadecimal digest of a file's content, by an object such as those of `hashlib`."""
    with open(path, "rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()


def synchronize(path: Path) -> None:
    """Wait until the file is on the disk: a name may survive a power failure that its content does not."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())

"""Datasets kept on disk by name: whole, checked whenever they are read, and made anew where they are damaged."""

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import xxhash
from datasets import Dataset, load_from_disk

from .files import file_digest, naming_full_disks, write_json
from .scratch import make_scratch


logger = logging.getLogger(__name__)

CHECKSUMS = "checksums.json"


def cached_dataset(path: Path, build: Callable[[Path], Dataset]) -> Dataset:
    """The dataset saved at `path`, or what `build(scratch directory)` returns, saved there.

    It appears under its name only when complete: a killed run leaves a scratch directory, never half an entry, and of
    several processes that build the same one the first wins. One without rows is not kept.

    Raises:
        OSError: it can't be written.
    """
    if path.is_dir():
        if is_whole(path):
            logger.info("Reading prepared data from %s", path)
            return load_from_disk(str(path))
        logger.warning("%s is damaged, so its data is prepared anew.", path)
    scratch, discard = make_scratch(path.parent)
    try:
        with naming_full_disks(path.parent):
            built = build(scratch)
            if len(built) == 0:  # `datasets` can't read such a one back
                return Dataset.from_dict({name: [] for name in built.column_names}, features=built.features)
            built.save_to_disk(str(scratch / "entry"))
            files = (scratch / "entry").iterdir()
            write_json({file.name: _checksum(file) for file in files}, scratch / "entry" / CHECKSUMS)
        if path.is_dir() and not is_whole(path):
            with suppress(OSError):  # another process was faster
                path.rename(scratch / "damaged")
        try:
            (scratch / "entry").rename(path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        discard()
    return load_from_disk(str(path))


def is_whole(path: Path) -> bool:
    """Whether every file of an entry holds what was written to it."""
    try:
        checksums = json.loads((path / CHECKSUMS).read_text())
        return all(_checksum(path / name) == checksum for name, checksum in checksums.items())
    except (OSError, ValueError, AttributeError):
        return False


def _checksum(path: Path) -> str:
    return file_digest(path, xxhash.xxh3_128())

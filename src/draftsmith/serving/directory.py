"""Directories that are there whole or not at all, and that others may read as the umask says."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_new(name: str, path: Path) -> None:
    """Raise `ValueError` unless the directory can be made; `name` is the argument to blame."""
    if path.exists() or path.is_symlink():
        raise ValueError(f"`{name}`: {path} exists already, and nothing is overwritten: name a new directory.")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"`{name}`: the directory of {path} does not exist: make it, or name another.")


def open_as_umask_says(directory: Path, sibling: str) -> None:
    """Give weights the permissions of `sibling`, a file beside them.

    safetensors writes them for their owner alone, and a server may run as another user. The umask itself cannot be
    read without setting it, for all threads.
    """
    mode = (directory / sibling).stat().st_mode
    for weights in directory.glob("*.safetensors"):
        weights.chmod(mode)


@contextmanager
def whole_directory(path: Path) -> Iterator[Path]:
    """A hidden directory beside `path` that gets this name at the end; after an error or a kill there is no `path`."""
    unfinished = path.absolute().with_name(f".unfinished-{path.absolute().name}-{os.getpid()}")
    unfinished.mkdir()
    try:
        yield unfinished
        check_new("output", path)  # someone may have been faster
        unfinished.rename(path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)

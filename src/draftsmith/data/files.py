"""Files that appear once they are whole, or not at all."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Another name to write to: `path` appears once all is written, or not at all."""
    unfinished = path.with_name(f".{path.name}")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_json(value: object, path: Path) -> None:
    with written_whole(path) as unfinished:
        unfinished.write_text(json.dumps(value, indent=2) + "\n")

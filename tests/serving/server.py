"""vLLM's OpenAI-compatible server as a child process: start it, wait until it is healthy, stop it."""

import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Server:
    url: str
    log: Path

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)

    def counters(self, prefix: str = "vllm:spec_decode_") -> dict[str, int]:
        """Counters of `/metrics` by name without prefix and `_total`; those per position by `name[position]`."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=30) as response:
            text = response.read().decode()
        lines = re.findall(rf"^{prefix}(\w+)_total{{(.*)}} (\S+)$", text, re.MULTILINE)
        positions = [re.search(r'position="(\d+)"', labels) for _, labels, _ in lines]
        return {
            name if position is None else f"{name}[{position[1]}]": int(float(value))
            for (name, _, value), position in zip(lines, positions, strict=True)
        }


@contextmanager
def running_server(
    target: Path, *, log: Path, speculative_config: dict[str, Any] | None = None, seconds: float = 240, **options: Any
) -> Iterator[Server]:
    """Serve `target` on a free port of this machine.

    Args:
        target: a model's directory.
        log: the file that the server's output goes to.
        speculative_config: `--speculative-config`.
        seconds: how long the server may take until it is healthy.
        options: further flags, as `max_model_len=128` for `--max-model-len 128`; True stands for a bare flag.

    Raises:
        RuntimeError: the server ended, or was not healthy in time; with the end of its log.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options |= {"model": target, "host": "127.0.0.1", "port": port}
    if speculative_config is not None:
        options["speculative_config"] = json.dumps(speculative_config)
    flags = [
        part
        for name, value in options.items()
        for part in (f"--{name.replace('_', '-')}", *([] if value is True else [str(value)]))
    ]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags]
    with open(log, "w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        server = Server(f"http://127.0.0.1:{port}", log)
        _wait_until_healthy(server, process, time.monotonic() + seconds)
        yield server
    finally:
        process.terminate()  # the server ends its engine itself
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_healthy(server: Server, process: subprocess.Popen, deadline: float) -> None:
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(server.url + "/health", timeout=5):
                return
        except OSError:  # refused as long as nobody listens
            time.sleep(0.5)
    state = "is not healthy in time" if process.poll() is None else f"ended with {process.returncode}"
    raise RuntimeError(f"The server {state}:\n{server.log.read_text()[-4000:]}")

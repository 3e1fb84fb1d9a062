"""vLLM's OpenAI-compatible server as a child process, started as `draftsmith evaluate --launch` does it."""

import json
import re
import socket
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.serving.launching import launched
from draftsmith.serving.servers import launch_command


@dataclass(frozen=True)
class Server:
    url: str

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


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def running_server(target: Path, head: Path | None, num_draft_tokens: int, **options: Any) -> Iterator[Server]:
    """Serve `target` with `head`, or alone, on a free port of this machine.

    Args:
        target, head: directories, or a Hub id.
        num_draft_tokens: tokens drafted per verification.
        options: further flags, as `max_model_len=128` for `--max-model-len 128`; True stands for a bare flag.

    Raises:
        ServerError: the server ended before it was healthy; with the end of its log.
    """
    port = free_port()
    flags = [
        part
        for name, value in {**options, "host": "127.0.0.1"}.items()
        for part in (f"--{name.replace('_', '-')}", *([] if value is True else [str(value)]))
    ]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target), "--port", str(port)]
    command += flags
    if head is not None:
        options = {"flags": flags, "port": port, "python": sys.executable}
        command = launch_command("vllm", str(target), str(head), num_draft_tokens, **options)
    url = f"http://127.0.0.1:{port}"
    with launched(command, url):
        yield Server(url)

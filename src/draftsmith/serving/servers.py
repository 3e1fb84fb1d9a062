"""Running vLLM and SGLang servers: how they are started with a head, asked for text, and what they counted."""

import functools
import json
import os
import re
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


ENGINES = ("vllm", "sglang", "openai")
STARTUP_SECONDS = 1800  # loading and compiling a large target takes many minutes
ANSWER_SECONDS = 3600
DEFAULT_PORT = 8000
TAIL = 3000  # characters of a failed server's log


class ServerError(RuntimeError):
    """A server that cannot be reached, that refused a request, or that counts nothing."""


def launch_command(
    engine: str,
    target: str,
    draft: str,
    num_draft_tokens: int,
    *,
    flags: Sequence[str] = (),
    port: int = DEFAULT_PORT,
    python: str = "python",
) -> list[str]:
    """The command that serves `target` with the head `draft`, a chain of `num_draft_tokens` per verification.

    `flags` are those that the head needs: `compatibility.launch_flags`.
    """
    if engine == "vllm":
        speculation = {"method": "eagle3", "model": draft, "num_speculative_tokens": num_draft_tokens}
        return [
            *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", target, "--port", str(port)),
            *("--speculative-config", json.dumps(speculation), *flags),
        ]
    if engine == "sglang":
        return [
            *(python, "-m", "sglang.launch_server", "--model-path", target, "--port", str(port)),
            *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", draft),
            *("--speculative-num-steps", str(num_draft_tokens), "--speculative-eagle-topk", "1"),
            *("--speculative-num-draft-tokens", str(num_draft_tokens + 1), "--enable-metrics", *flags),
        ]
    raise ValueError(f"`engine` is {engine!r}: vllm and sglang can be launched; start any other server yourself.")


@contextmanager
def launched(command: Sequence[str], base_url: str, *, environment: dict[str, str] | None = None) -> Iterator[None]:
    """Start a server, wait until it answers, and end it and its children."""
    with tempfile.NamedTemporaryFile(mode="w+", suffix=".log") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            _wait_until_healthy(process, base_url, Path(log.name))
            yield
        finally:
            _end(process)


def _wait_until_healthy(process: subprocess.Popen, base_url: str, log: Path) -> None:
    deadline = time.monotonic() + STARTUP_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerError(
                f"The server ended with status {process.returncode} before it answered. Its log ends with:\n"
                f"{log.read_text(errors='replace')[-TAIL:]}"
            )
        try:
            with urllib.request.urlopen(f"{base_url}/health", timeout=5):
                return
        except OSError:  # not yet: refused, or answered with an error
            time.sleep(1)
    raise ServerError(f"The server did not answer within {STARTUP_SECONDS} s.")


def _end(process: subprocess.Popen) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=30)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


@dataclass(frozen=True)
class Counters:
    """What a server has verified since it started."""

    rounds: int
    accepted_per_position: list[int]

    def since(self, earlier: "Counters") -> "Counters":
        """The difference; a server that has not drafted yet shows no positions."""
        before = earlier.accepted_per_position or [0] * len(self.accepted_per_position)
        positions = [late - early for late, early in zip(self.accepted_per_position, before, strict=True)]
        return Counters(self.rounds - earlier.rounds, positions)


@dataclass(frozen=True)
class Answer:
    text: str
    new_tokens: int
    rounds: int | None = None  # of SGLang, which says so with each answer


class Server:
    """A server by its address, such as `http://localhost:8000`.

    Args:
        engine: `vllm` counts in `/metrics`, `sglang` in each answer, `openai` speaks the protocol and counts nothing.
        api_key: sent as a bearer token, never shown.
    """

    def __init__(self, engine: str, base_url: str, api_key: str | None = None):
        if engine not in ENGINES:
            raise ValueError(f"`engine` is {engine!r}: pass one of {', '.join(ENGINES)}.")
        self.engine, self.base_url = engine, base_url.rstrip("/").removesuffix("/v1")
        self.port = urllib.parse.urlsplit(self.base_url).port or DEFAULT_PORT
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    @functools.cached_property
    def model(self) -> str:
        """The name under which the target is served."""
        return self._json("/v1/models")["data"][0]["id"]

    def complete(self, prompts: Sequence[list[int]], *, max_new_tokens: int, temperature: float) -> list[Answer]:
        """Answers to prompts of token ids, asked for all at once."""
        ask = self._ask_sglang if self.engine == "sglang" else self._ask
        with ThreadPoolExecutor(max_workers=max(len(prompts), 1)) as pool:
            return list(pool.map(lambda ids: ask(ids, max_new_tokens, temperature), prompts))

    def _ask(self, ids: list[int], max_new_tokens: int, temperature: float) -> Answer:
        request = {"model": self.model, "prompt": ids, "max_tokens": max_new_tokens, "temperature": temperature}
        answer = self._json("/v1/completions", request)
        return Answer(answer["choices"][0]["text"], answer["usage"]["completion_tokens"])

    def _ask_sglang(self, ids: list[int], max_new_tokens: int, temperature: float) -> Answer:
        sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature}
        answer = self._json("/generate", {"input_ids": ids, "sampling_params": sampling})
        counts = answer["meta_info"]
        return Answer(answer["text"], counts["completion_tokens"], counts.get("spec_verify_ct"))

    def counters(self) -> Counters:
        """vLLM's counters, summed over engines; raises `ServerError` for a server without a head."""
        if self.engine != "vllm":
            raise ServerError(f"`{self.engine}` has no counters of speculative decoding in `/metrics`.")
        samples = list(_samples(self._request("/metrics")))
        rounds = [value for name, _, value in samples if name == "vllm:spec_decode_num_drafts_total"]
        if not rounds:
            raise ServerError(f"{self.base_url} counts no drafts: start it with a head (`--speculative-config`).")
        positions: dict[int, int] = {}
        for name, labels, value in samples:
            if name == "vllm:spec_decode_num_accepted_tokens_per_pos_total":
                position = int(labels["position"])
                positions[position] = positions.get(position, 0) + int(value)
        return Counters(int(sum(rounds)), [positions[position] for position in sorted(positions)])

    def _json(self, path: str, body: Any = None) -> Any:
        return json.loads(self._request(path, body))

    def _request(self, path: str, body: Any = None) -> str:
        """GET, or POST of JSON."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **self._headers}
        request = urllib.request.Request(self.base_url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
                return response.read().decode()
        except urllib.error.HTTPError as error:
            reason = error.read().decode(errors="replace")[:300]
            raise ServerError(f"{self.base_url}{path} answered {error.code}: {reason}") from error
        except OSError as error:
            raise ServerError(f"`base_url` {self.base_url} cannot be reached ({error}): is the server up?") from error


_SAMPLE = re.compile(r"^(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Name, labels and value of each line in Prometheus' text format."""
    for match in _SAMPLE.finditer(text):
        yield match["name"], dict(_LABEL.findall(match["labels"] or "")), float(match["value"])

"""Running vLLM and SGLang servers: how they are started with a head, asked for text, and what they counted."""

import functools
import html
import http.client
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar


ENGINES = ("vllm", "sglang", "openai")
ANSWER_SECONDS = 3600
DEFAULT_PORT = 8000
T = TypeVar("T")
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1", "0.0.0.0")


class ServerError(RuntimeError):
    """A server that cannot be reached, that refused a request, or that counts nothing.

    Attributes:
        status: of an HTTP answer that is no success.
        retry_after: the header of that name in it, as it was sent.
    """

    def __init__(self, message: str, status: int | None = None, retry_after: str | None = None):
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


class ConnectionFailedError(ServerError):
    """A server that cannot be reached, or broke its answer off: the same request may succeed later."""


class NonsenseError(ServerError):
    """An answer of success that is not what the protocol says, such as the page of a proxy."""


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


@dataclass(frozen=True)
class Counters:
    """What a server has verified since it started."""

    rounds: int
    accepted_per_position: list[int]

    def since(self, earlier: "Counters") -> "Counters":
        """The difference; a server that has not drafted yet shows no positions."""
        before = earlier.accepted_per_position or [0] * len(self.accepted_per_position)
        positions = [late - early for late, early in zip(self.accepted_per_position, before, strict=False)]
        if len(before) != len(self.accepted_per_position) or min(self.rounds - earlier.rounds, *positions, 0) < 0:
            raise ServerError("The server's counters went back: it was started anew meanwhile. Evaluate once more.")
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
        model: the name under which the target is served; None = the first one that the server lists.
    """

    def __init__(self, engine: str, base_url: str, api_key: str | None = None, model: str | None = None):
        if engine not in ENGINES:
            raise ValueError(f"`engine` is {engine!r}: pass one of {', '.join(ENGINES)}.")
        _check_address(base_url)
        self.engine, self.base_url = engine, base_url.rstrip("/").removesuffix("/v1")
        if model is not None:
            self.model = model
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("`api_key` holds a line break, or a character that no header can carry: export it anew.")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._key_forms = _forms(api_key) if api_key else []

    @classmethod
    def to_launch(cls, engine: str, base_url: str) -> "Server":
        """One that is started on this machine, at DEFAULT_PORT where the address names none."""
        server = cls(engine, base_url)
        parts = urllib.parse.urlsplit(server.base_url)
        if parts.hostname not in LOCAL_HOSTS or parts.scheme != "http" or parts.path:
            raise ValueError(
                f"`base_url` is {base_url!r}, but `launch` starts the server on this machine: pass "
                f"http://localhost:{DEFAULT_PORT} or another port of one of {', '.join(LOCAL_HOSTS)}."
            )
        if parts.port is None:
            server.base_url = f"{server.base_url.rstrip(':')}:{DEFAULT_PORT}"
        return server

    @property
    def port(self) -> int:
        parts = urllib.parse.urlsplit(self.base_url)
        return parts.port or (443 if parts.scheme == "https" else 80)

    @functools.cached_property
    def model(self) -> str:
        """The name under which the target is served."""
        return self._json("/v1/models")("data", 0, "id", kind=str)

    def complete(self, prompts: Sequence[list[int]], *, max_new_tokens: int, temperature: float) -> list[Answer]:
        """Answers to prompts of token ids, asked for all at once."""
        ask = self._ask_sglang if self.engine == "sglang" else self._ask
        return all_at_once(lambda ids: ask(ids, max_new_tokens, temperature), prompts)

    def _ask(self, ids: list[int], max_new_tokens: int, temperature: float) -> Answer:
        request = {"model": self.model, "prompt": ids, "max_tokens": max_new_tokens, "temperature": temperature}
        answer = self._json("/v1/completions", request)
        return Answer(answer("choices", 0, "text", kind=str), answer("usage", "completion_tokens", kind=int))

    def _ask_sglang(self, ids: list[int], max_new_tokens: int, temperature: float) -> Answer:
        sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature}
        answer = self._json("/generate", {"input_ids": ids, "sampling_params": sampling})
        rounds = answer("meta_info", kind=dict).get("spec_verify_ct")
        return Answer(answer("text", kind=str), answer("meta_info", "completion_tokens", kind=int), rounds)

    def chat(self, body: dict[str, Any], *, timeout: float) -> Callable[..., Any]:
        """One request for chat completions, by what reads a field of its answer: by its keys, and of a kind.

        Args:
            body: the request without `model`.
            timeout: seconds without a byte from the server.
        """
        return self._json("/v1/chat/completions", {"model": self.model, **body}, timeout)

    def counters(self) -> Counters:
        """vLLM's counters, summed over engines; raises `ServerError` for a server without a head."""
        if self.engine != "vllm":
            raise ServerError(f"`{self.engine}` has no counters of speculative decoding in `/metrics`.")
        text = self._request("/metrics")
        try:
            rounds = [value for _, value in _samples(text, "vllm:spec_decode_num_drafts_total")]
            positions: dict[int, int] = {}
            for labels, value in _samples(text, "vllm:spec_decode_num_accepted_tokens_per_pos_total"):
                position = int(labels["position"])
                positions[position] = positions.get(position, 0) + value
        except (KeyError, ValueError, OverflowError) as error:  # no number, not a finite one, no position
            raise ServerError(
                f"{self.base_url}/metrics has a counter that cannot be read ({error}): is it a vLLM server?"
            ) from error
        if not rounds:
            raise ServerError(f"{self.base_url} counts no drafts: start it with a head (`--speculative-config`).")
        return Counters(sum(rounds), [positions[position] for position in sorted(positions)])

    def _json(self, path: str, body: Any = None, timeout: float = ANSWER_SECONDS) -> Callable[..., Any]:
        """What reads a field of the answer: by its keys, and of a kind, or else `ServerError`."""
        text = self._request(path, body, timeout)
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            answer = None

        def field(*keys: str | int, kind: type) -> Any:
            try:
                value = functools.reduce(lambda value, key: value[key], keys, answer)
            except (LookupError, TypeError):
                value = None
            if not isinstance(value, kind):
                raise NonsenseError(
                    f"{self.base_url}{path} answered without `{'.'.join(map(str, keys))}`: {self._quoted(text)!r}. Is "
                    f"`base_url` the address of a server of the engine {self.engine}, and of no proxy?"
                )
            return value

        return field

    def _request(self, path: str, body: Any = None, timeout: float = ANSWER_SECONDS) -> str:
        """GET, or POST of JSON."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **self._headers}
        request = urllib.request.Request(self.base_url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return response.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            reason = error.reason
            with suppress(OSError, http.client.HTTPException):  # it may break off here too
                reason = error.read().decode(errors="replace")
            answered = f"{self.base_url}{path} answered {error.code}: {self._quoted(reason)}"
            raise ServerError(answered, error.code, error.headers.get("Retry-After")) from None  # it may hold the key
        except http.client.HTTPException as error:
            raise ConnectionFailedError(
                f"{self.base_url}{path} broke its answer off, or answered no HTTP ({self._quoted(repr(error))}): look "
                "into its log."
            ) from None
        except OSError as error:
            raise ConnectionFailedError(
                f"`base_url` {self.base_url} cannot be reached ({error}): is the server up?"
            ) from error

    def _quoted(self, text: str) -> str:
        """The beginning of what the server said, without the key, which some send back."""
        for key in self._key_forms:
            text = text.replace(key, "<api key>")
        return text[:300]


def _forms(key: str) -> list[str]:
    """The key as it is, and as JSON, Python, addresses and HTML write it; the longest first, which hold others."""
    as_json = json.dumps(key)[1:-1]
    forms = {key, as_json, as_json.replace("/", "\\/"), repr(key)[1:-1], html.escape(key)}
    forms |= {urllib.parse.quote(key), urllib.parse.quote_plus(key, safe="")}
    return sorted(forms, key=len, reverse=True)


_ADDRESS = re.compile(r"https?://[^\s/?#@]+(/[^\s?#@]*)?", re.IGNORECASE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def _check_address(base_url: str) -> None:
    """Raise `ValueError` for an address to which nothing can be sent."""
    remedy = f"pass one such as http://localhost:{DEFAULT_PORT}"
    if "://" not in base_url and base_url:
        raise ValueError(f"`base_url` is {base_url!r}: add http:// before it, or {remedy}.")
    try:
        parts = urllib.parse.urlsplit(base_url)
        valid = _ADDRESS.fullmatch(base_url) and base_url.isascii() and parts.hostname and parts.port != 0
        (parts.hostname or "").encode("idna")
    except ValueError as error:  # a port that is none, a bracket that stays open
        raise ValueError(f"`base_url` is {base_url!r} ({error}): {remedy}.") from error
    if not valid:
        raise ValueError(f"`base_url` is {base_url!r}, not the address of a server: {remedy}.")


def all_at_once(ask: Callable[[list[int]], T], prompts: Sequence[list[int]]) -> list[T]:
    """`ask` of each prompt, in their order. The first failure, or Ctrl-C, leaves the others behind.

    A pool would wait for them, and so would the interpreter's end: daemon threads are not waited for.
    """
    results: SimpleQueue[tuple[int, T | BaseException]] = SimpleQueue()

    def answer(index: int, ids: list[int]) -> None:
        try:
            results.put((index, ask(ids)))
        except BaseException as error:  # raised in the caller's thread
            results.put((index, error))

    for index, ids in enumerate(prompts):
        Thread(target=answer, args=(index, ids), daemon=True).start()
    answers: dict[int, T] = {}
    for _ in prompts:
        index, result = results.get()
        if isinstance(result, BaseException):
            raise result
        answers[index] = result
    return [answers[index] for index in range(len(prompts))]


def _samples(text: str, name: str) -> Iterator[tuple[dict[str, str], int]]:
    """Labels and value of each line of a counter in Prometheus' text format."""
    for labels, value in re.findall(rf"^{name}(?:\{{(.*)\}})? (\S+)", text, re.MULTILINE):
        yield dict(_LABEL.findall(labels)), int(float(value))

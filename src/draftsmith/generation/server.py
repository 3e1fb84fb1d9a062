"""Answers of an OpenAI-compatible server: many requests at once, asked again when it is busy or away."""

import hashlib
import json
import random
import time
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any

from ..data.formats import RowError
from ..serving.servers import Server, ServerError
from .reasoning import template_arguments
from .requests import Answer, Request, Sampling


BUSY = {408, 409, 425, 429, 500, 502, 503, 504}  # asked again, as is a server that cannot be reached
REFUSED = {400, 413, 422}  # of this request alone, which is too long for one
ENDED = {"stop", "tool_calls", "function_call"}  # by the target: not by a limit, a filter, or the server's own end
FIRST_DELAY, LONGEST_DELAY = 0.5, 60.0  # seconds


class Pace:
    """Spreads requests evenly over a minute, and lets all of them wait when the server asks for it."""

    def __init__(self, requests_per_minute: float | None):
        self._interval = 0.0 if requests_per_minute is None else 60 / requests_per_minute
        self._free_at = time.monotonic()
        self._lock = Lock()

    def seconds_to_wait(self) -> float:
        """Until the caller's turn, which is taken."""
        with self._lock:
            now = time.monotonic()
            turn = max(now, self._free_at)
            self._free_at = turn + self._interval
            return turn - now

    def hold(self, seconds: float) -> None:
        """No request within the next `seconds`."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic() + seconds)


class ServerEngine:
    """Asks the chat completions of a server, `capacity` requests at once.

    Args:
        server: its address.
        sampling: how tokens are chosen. Each answer has a seed of its own, made of `sampling.seed` and its place.
        template_kwargs: arguments of the chat template; those of a row win.
        reasoning_key: where the target's chat template reads reasoning from; None = nowhere.
        concurrency: how many requests at once.
        timeout: seconds without a byte from the server.
        max_retries: how often one request is sent again, after growing delays.
        requests_per_minute: the most that are sent; None = as many as are answered.
    """

    def __init__(
        self,
        server: Server,
        sampling: Sampling,
        *,
        template_kwargs: dict[str, Any],
        reasoning_key: str | None,
        concurrency: int,
        timeout: float,
        max_retries: int,
        requests_per_minute: float | None,
    ):
        self.server, self.sampling, self.template_kwargs = server, sampling, template_kwargs
        self.reasoning_key, self.capacity = reasoning_key, concurrency
        self.timeout, self.max_retries, self.pace = timeout, max_retries, Pace(requests_per_minute)
        self._answered = 0
        self._closed = Event()
        self._requests: SimpleQueue[Request | None] = SimpleQueue()
        self._results: SimpleQueue[tuple[str, Answer | BaseException]] = SimpleQueue()
        for _ in range(concurrency):  # daemons: an end of the program does not wait for a server
            Thread(target=self._work, daemon=True).start()

    def submit(self, request: Request) -> None:
        self._requests.put(request)

    def next(self) -> tuple[str, Answer | RowError]:
        key, result = self._results.get()
        if isinstance(result, Answer | RowError):
            return key, result
        raise result

    def close(self) -> None:
        self._closed.set()
        for _ in range(self.capacity):
            self._requests.put(None)

    def _work(self) -> None:
        while (request := self._requests.get()) is not None and not self._closed.is_set():
            try:
                self._results.put((request.key, self._ask(request)))
            except BaseException as error:  # raised in the caller's thread
                self._results.put((request.key, error))

    def _ask(self, request: Request) -> Answer:
        body, answered_before = self._body(request), 0
        for attempt in range(self.max_retries + 1):
            self._closed.wait(self.pace.seconds_to_wait())
            if self._closed.is_set():
                break
            try:
                choice, usage = self._send(body)
            except ServerError as error:
                if error.status in REFUSED:
                    raise RowError("messages", f"is refused by the server: {error}") from error
                if error.status is not None and error.status not in BUSY:
                    raise
                last_error = error
                if attempt == 0:
                    answered_before = self._answered
                self._wait_after(error, attempt)
            else:
                self._answered += 1
                return self._answer(request, choice, usage)
        else:
            if self._answered > answered_before:  # since it failed first, others were answered
                raise RowError("messages", f"got no answer in {attempt + 1} attempts: {last_error}") from last_error
            raise ServerError(
                f"Given up after {attempt + 1} attempts: {last_error} What was answered is kept: run the same command "
                "again to go on."
            ) from last_error
        raise ServerError("The engine is closed.")

    def _wait_after(self, error: ServerError, attempt: int) -> None:
        """Longer after each attempt, by chance up to twice, so that many do not come back at once."""
        delay = min(FIRST_DELAY * 2**attempt, LONGEST_DELAY) * random.uniform(1, 2)
        if (asked := seconds_of(error.retry_after)) is not None:
            self.pace.hold(asked)
            delay = max(delay, asked)
        self._closed.wait(delay)

    def _send(self, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        answer = self.server.chat(body, timeout=self.timeout)
        answer("choices", 0, "message", kind=dict)
        return answer("choices", 0, kind=dict), answer("usage", kind=dict)

    def _answer(self, request: Request, choice: dict[str, Any], usage: dict[str, Any]) -> Answer:
        finished = choice.get("finish_reason") in ENDED
        message = self._message(request, choice["message"])
        was_cut_in_reasoning = not finished and not message["content"]
        tokens = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
        return Answer(None if was_cut_in_reasoning else message, finished, *tokens)

    def _message(self, request: Request, said: dict[str, Any]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": _whole_characters(said.get("content") or "")}
        if thought := said.get("reasoning") or said.get("reasoning_content"):
            if self.reasoning_key is None:
                raise ServerError(
                    "The server splits reasoning off the answers, but the chat template of `target` reads it from no "
                    "key of a message: start the server without `--reasoning-parser`, so that it stays in the answers."
                )
            message[self.reasoning_key] = _whole_characters(thought)
        if calls := said.get("tool_calls"):
            if request.recorded is not None and _calls(calls) == _calls(request.recorded["tool_calls"]):
                calls = request.recorded["tool_calls"]  # with the ids that the recorded results name
            message["tool_calls"] = [_with_arguments(call, _parsed) for call in calls]
        return message

    def _body(self, request: Request) -> dict[str, Any]:
        sampling = self.sampling
        seed = hashlib.blake2b(f"{sampling.seed}/{request.key}/{request.turn}".encode(), digest_size=4).digest()
        body: dict[str, Any] = {
            "messages": [self._as_sent(message) for message in request.messages],
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "seed": int.from_bytes(seed, "big") >> 1,
        }
        if sampling.temperature:
            body["top_p"] = sampling.top_p
            if sampling.top_k is not None:  # no field of OpenAI's
                body["top_k"] = sampling.top_k or -1
        kwargs = template_arguments(request, self.template_kwargs)
        if tools := kwargs.pop("tools"):
            body["tools"] = tools
        return body | ({"chat_template_kwargs": kwargs} if kwargs else {})

    def _as_sent(self, message: dict[str, Any]) -> dict[str, Any]:
        """As the protocol has it and templates do not: one key of reasoning, the arguments of tool calls as text."""
        sent = dict(message)
        if self.reasoning_key in sent:
            sent["reasoning_content"] = sent.pop(self.reasoning_key)
        if "tool_calls" in sent:
            sent["tool_calls"] = [_with_arguments(call, _as_text) for call in sent["tool_calls"]]
        return sent


def seconds_of(retry_after: str | None) -> float | None:
    """The header's seconds from now, which it names as a number or as a date; None if it says neither."""
    if retry_after is None:
        return None
    if retry_after.strip().isdigit():
        return float(retry_after)
    try:
        date = parsedate_to_datetime(retry_after)
    except ValueError:
        return None
    return max((date - datetime.now(timezone.utc)).total_seconds(), 0.0) if date.tzinfo else None


def _whole_characters(text: str) -> str:
    """JSON can write half a character, which no file of text can hold."""
    return text.encode(errors="replace").decode()


def _calls(calls: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
    functions = [call.get("function", call) for call in calls]
    return [(function.get("name"), _parsed(function.get("arguments"))) for function in functions]


def _with_arguments(call: dict[str, Any], change: Any) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    return call | {"function": function | {"arguments": change(function["arguments"])}}


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _as_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)

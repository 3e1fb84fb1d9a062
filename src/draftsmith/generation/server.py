"""Answers of an OpenAI-compatible server: many requests at once, asked again when it is busy or away."""

import hashlib
import json
import logging
import math
import random
import re
import time
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any

from ..data.chat import attempt
from ..data.formats import RowError, read_messages
from ..serving.servers import NonsenseError, Server, ServerError
from .reasoning import CLOSE, OPEN, AnswerReader, reasoning_key, template_arguments
from .requests import Answer, Request, Sampling


BUSY = {408, 409, 425, 429, 500, 502, 503, 504}  # asked again, as is a server that cannot be reached
REFUSED = {400, 413, 422}  # of this request alone, which is too long for one
ENDED = {"stop", "tool_calls", "function_call"}  # by the target: not by a limit, a filter, or the server's own end
FILTERED = "content_filter"
FIRST_DELAY, LONGEST_DELAY = 0.5, 60.0  # seconds
LONGEST_HOLD = 600.0  # seconds that a server may ask for
NONSENSE_RETRIES = 2  # of an answer that is none: a proxy says the same again
PROBE = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}  # what any server answers


logger = logging.getLogger(__name__)
Reply = tuple[dict[str, Any], Any]  # the first choice, whose message is an object, and what is said of tokens


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

    def hold(self, seconds: float) -> bool:
        """No request within the next `seconds`; whether that is longer than others have asked for, by a second."""
        with self._lock:
            before, until = self._free_at, time.monotonic() + seconds
            self._free_at = max(before, until)
            return until > before + 1


class ServerEngine:
    """Asks the chat completions of a server, `capacity` requests at once.

    Args:
        server: its address.
        sampling: how tokens are chosen. Each answer has a seed of its own, made of `sampling.seed` and its place.
        reader: of the target's answers.
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
        reader: AnswerReader,
        concurrency: int,
        timeout: float,
        max_retries: int,
        requests_per_minute: float | None,
    ):
        self.server, self.sampling, self.reader, self.capacity = server, sampling, reader, concurrency
        self.reasoning_key = reasoning_key(reader.tokenizer.get_chat_template())  # type: ignore[arg-type]
        self.timeout, self.max_retries, self.pace = timeout, max_retries, Pace(requests_per_minute)
        self._closed = Event()
        self._requests: SimpleQueue[Request | None] = SimpleQueue()
        self._results: SimpleQueue[tuple[Request, Reply | BaseException]] = SimpleQueue()
        for _ in range(concurrency):  # daemons: an end of the program does not wait for a server
            Thread(target=self._work, daemon=True).start()

    def submit(self, request: Request) -> None:
        self._requests.put(request)

    def next(self) -> tuple[str, Answer | RowError]:
        request, result = self._results.get()
        if isinstance(result, RowError):
            return request.key, result
        if isinstance(result, BaseException):
            raise result
        return request.key, attempt(self._answer, request, *result)  # here, since tokenizers are of one thread

    def close(self) -> None:
        self._closed.set()
        for _ in range(self.capacity):
            self._requests.put(None)

    def _work(self) -> None:
        while (request := self._requests.get()) is not None and not self._closed.is_set():
            try:
                self._results.put((request, self._ask(request)))
            except BaseException as error:  # raised in the caller's thread
                self._results.put((request, error))

    def _ask(self, request: Request) -> Reply:
        body, failures = self._body(request), 0
        while True:
            self._closed.wait(self.pace.seconds_to_wait())
            if self._closed.is_set():
                raise ServerError("The engine is closed.")
            try:
                return self._send(body)
            except ServerError as error:
                if error.status in REFUSED:
                    raise RowError("messages", f"is refused by the server: {error}") from error
                if error.status is not None and error.status not in BUSY:
                    raise
                failures += 1
                self._wait_after(error, failures)
                retries = min(self.max_retries, NONSENSE_RETRIES if isinstance(error, NonsenseError) else math.inf)
                if failures > retries:
                    raise self._no_answer(error, failures) from error

    def _no_answer(self, error: ServerError, attempts: int) -> RowError | ServerError:
        """The row's fault if the server answers another request now, else the server's."""
        try:
            self._send(PROBE)
        except ServerError:
            return ServerError(
                f"Given up after {attempts} attempts: {error} What was answered is kept: run the same command again "
                "to go on."
            )
        return RowError("messages", f"got no answer in {attempts} attempts: {error}")

    def _wait_after(self, error: ServerError, failures: int) -> None:
        """Longer after each failure, by chance up to twice, so that many do not come back at once."""
        delay = min(FIRST_DELAY * 2 ** min(failures - 1, 20), LONGEST_DELAY) * random.uniform(1, 2)
        if (asked := seconds_of(error.retry_after)) is not None:
            held = min(asked, LONGEST_HOLD)
            if self.pace.hold(held) and asked > LONGEST_DELAY:
                logger.warning("The server asks for %.0f seconds without requests: waiting for %.0f.", asked, held)
            delay = max(delay, held)
        self._closed.wait(delay)

    def _send(self, body: dict[str, Any]) -> Reply:
        answer = self.server.chat(body, timeout=self.timeout)
        answer("choices", 0, "message", kind=dict)
        return answer("choices", 0, kind=dict), answer("usage", kind=object)

    def _answer(self, request: Request, choice: dict[str, Any], usage: Any) -> Answer:
        """What the choice says; raises `RowError` if it is no answer, or none of the target's."""
        name = f"messages[{len(request.messages)}]"
        reason = choice.get("finish_reason")
        if not isinstance(reason, str | None):
            raise RowError(name, f"was answered with a `finish_reason` that is a {type(reason).__name__}")
        if reason == FILTERED or choice["message"].get("refusal"):
            raise RowError(name, f"was refused by {'a filter of the server' if reason == FILTERED else 'the server'}")
        message = self._message(request, choice["message"])
        said: str | dict[str, Any] = message
        if message.keys() == {"role", "content"} and any(tag in message["content"] for tag in (OPEN, CLOSE)):
            said = message["content"]  # of a server that does not split reasoning off
        prompt_tokens, new_tokens = (_count(usage, key) for key in ("prompt_tokens", "completion_tokens"))
        return self.reader.answer(
            request, said, finished=reason in ENDED, prompt_tokens=prompt_tokens, new_tokens=new_tokens
        )

    def _message(self, request: Request, said: dict[str, Any]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": said.get("content") or ""}
        if thought := said.get("reasoning") or said.get("reasoning_content"):
            if self.reasoning_key is None and isinstance(thought, str):
                raise ServerError(
                    "The server splits reasoning off the answers, but the chat template of `target` reads it from no "
                    "key of a message: start the server without `--reasoning-parser`, so that it stays in the answers."
                )
            message[self.reasoning_key or "reasoning"] = thought
        if calls := said.get("tool_calls"):
            message["tool_calls"] = calls
        message = read_messages([*request.messages, message], "messages")[-1]
        if (calls := message.get("tool_calls")) and request.recorded is not None:
            if _calls(calls) == _calls(request.recorded["tool_calls"]):
                message["tool_calls"] = request.recorded["tool_calls"]  # with the ids that the recorded results name
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
        kwargs = template_arguments(request, self.reader.template_kwargs)
        if tools := kwargs.pop("tools"):
            body["tools"] = tools
        return body | ({"chat_template_kwargs": kwargs} if kwargs else {})

    def _as_sent(self, message: dict[str, Any]) -> dict[str, Any]:
        """As the protocol has it and templates do not: one key of reasoning, the arguments of tool calls as text."""
        sent = dict(message)
        if self.reasoning_key in sent:
            sent["reasoning_content"] = sent.pop(self.reasoning_key)
        if "tool_calls" in sent:
            sent["tool_calls"] = [_with_arguments_as_text(call) for call in sent["tool_calls"]]
        return sent


def seconds_of(retry_after: str | None) -> float | None:
    """The header's seconds from now, which it names as a number or as a date; None if it says neither."""
    if retry_after is None:
        return None
    if re.fullmatch(r"\s*[0-9]+\s*", retry_after):
        return float(retry_after)
    try:
        date = parsedate_to_datetime(retry_after)
    except (ValueError, OverflowError):
        return None
    return max((date - datetime.now(timezone.utc)).total_seconds(), 0.0) if date.tzinfo else None


def _count(usage: Any, key: str) -> int:
    """How many tokens a server counted; 0 if it does not say."""
    count = usage.get(key) if isinstance(usage, dict) else None
    return count if isinstance(count, int) and count > 0 else 0


def _calls(calls: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
    functions = [call.get("function", call) for call in calls]
    return [(function["name"], function.get("arguments") or {}) for function in functions]


def _with_arguments_as_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or isinstance(function.get("arguments", ""), str):
        return call
    return call | {"function": function | {"arguments": json.dumps(function["arguments"])}}

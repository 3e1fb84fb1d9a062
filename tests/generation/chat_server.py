"""An OpenAI-compatible server of chat completions whose faults a test may write down."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.fake_server import Answers, serving


@dataclass
class Log:
    """What a server was asked, and what it is to do.

    Attributes:
        faults: by what the last message says, what its next requests get instead of an answer: a status, a status
            with headers, "drop" for a connection that breaks off, a text, or fields of the answer that are others.
        lives: how many requests it still answers, faults included; then each connection breaks off. None = all.
        refusal: what is said beside a status; `{Authorization}` and other headers of the request are put in.
        message: further fields of each answer's message; finish_reason: of each answer.
        seconds: how long an answer takes.
    """

    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    faults: dict[str, list[Any]] = field(default_factory=dict)
    lives: int | None = None
    refusal: str = "not now"
    message: dict[str, Any] = field(default_factory=dict)
    finish_reason: Any = "stop"
    seconds: float = 0.0
    at_once: int = 0
    most_at_once: int = 0

    def asked(self) -> Counter:
        """How often each conversation so far was sent."""
        return Counter(json.dumps(request["messages"]) for request in self.requests)


def answer_to(messages: list[dict[str, Any]]) -> str:
    return f"It is {len(messages)}, {messages[-1]['content'][::-1]}"


@contextmanager
def chat_server() -> Iterator[tuple[str, Log]]:
    log, lock = Log(), threading.Lock()

    class Chat(Answers):
        def do_GET(self):
            self.answer(json.dumps({"data": [{"id": "served"}]}))

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                log.requests.append(body)
                log.headers.append(dict(self.headers))
                log.times.append(time.monotonic())
                log.at_once += 1
                log.most_at_once = max(log.most_at_once, log.at_once)
                faults = log.faults.get(body["messages"][-1]["content"])
                fault = faults.pop(0) if faults else None
                if log.lives is not None:
                    log.lives -= 1
                    fault = "drop" if log.lives < 0 else fault
            try:
                time.sleep(log.seconds)
                self.respond(body, fault)
            except BrokenPipeError:  # the client was killed
                pass
            finally:
                with lock:
                    log.at_once -= 1

        def respond(self, body, fault):
            if fault == "drop":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
                self.close_connection = True
            elif isinstance(fault, str):
                self.answer(fault)
            elif isinstance(fault, (int, tuple)):
                status, headers = fault if isinstance(fault, tuple) else (fault, {})
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(log.refusal.format(**self.headers).encode())
            else:
                said = {"role": "assistant", "content": answer_to(body["messages"])} | log.message
                choice = {"message": said, "finish_reason": log.finish_reason}
                usage = {"prompt_tokens": 7, "completion_tokens": 5}
                self.answer(json.dumps({"choices": [choice], "usage": usage} | (fault or {})))

    with serving(Chat) as address:
        yield address, log

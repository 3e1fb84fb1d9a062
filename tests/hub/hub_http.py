"""One connection to the test Hub: reads a request, hands it to its route, writes the answer and the log."""

import json
import traceback
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from .hub_store import HubFailure, Repository


if TYPE_CHECKING:
    from .hub_server import HubServer


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection; routes read from it and answer through it."""

    protocol_version = "HTTP/1.1"
    body: bytes
    breaks_off: str | None

    @property
    def hub(self) -> "HubServer":
        return self.server.hub  # type: ignore[attr-defined]

    def log_message(self, *_: Any) -> None:
        """The hub's own log is instead of stderr."""

    def serve(self) -> None:
        fault = self.hub.take_fault(self.command, self.path)
        self.breaks_off = fault.breaks_off if fault is not None else None
        if self.breaks_off == "request":
            return self._drop()
        self.body = self._read_body()
        if fault is not None and fault.status is not None:
            message = f"Ordered by the test{' of ' + self.token if self.hub.echoes_token else ''}"
            return self.answer_json({"error": message}, fault.status, headers=fault.headers)
        self._route()

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = serve

    def _route(self) -> None:
        try:
            with self.hub.lock:
                self.hub.route(self)
        except HubFailure as failure:
            self.answer_json({"error": str(failure)}, failure.status, headers=failure.headers)
        except Exception:
            self.answer_json({"error": traceback.format_exc()}, 500)

    def _drop(self) -> None:
        self._log(None)
        self.close_connection = True
        self.rfile.read(int(self.headers.get("Content-Length", 0)) // 2)

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _log(self, status: int | None) -> None:
        self.hub.add_to_log(self.command, self.path, status)

    @property
    def url_path(self) -> str:
        return urlsplit(self.path).path

    def page(self, kind: str, name: str) -> str:
        """The address of a repository."""
        return f"{self.hub.endpoint}/{'datasets/' if kind == 'dataset' else ''}{name}"

    def query_value(self, name: str) -> str | None:
        return parse_qs(urlsplit(self.path).query).get(name, [None])[0]

    def json(self) -> dict[str, Any]:
        return json.loads(self.body or b"{}")

    def answer(self, content: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._log(None if self.breaks_off else status)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.breaks_off:
            content, self.close_connection = content[: len(content) // 2], True
        if self.command != "HEAD":
            self.wfile.write(content)

    def answer_json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.answer(json.dumps(value).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    @property
    def token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def account(self) -> str | None:
        """Whose token came with the request."""
        if not self.token:
            return None
        if self.token not in self.hub.accounts:
            raise HubFailure(401, "Invalid credentials in Authorization header")
        return self.hub.accounts[self.token]

    def required_account(self) -> str:
        account = self.account()
        if account is None:
            raise HubFailure(401, "Invalid username or password.")
        return account

    def readable(self, kind: str, name: str) -> Repository:
        """The repository, unless it is private and of someone else; what exists is not told then."""
        account = self.account()
        repository = self.hub.store.repository(kind, name)
        if repository.private and account != repository.owner:
            raise HubFailure(404 if account else 401, "Repository not found", "RepoNotFound")
        return repository

    def writable(self, kind: str, name: str) -> Repository:
        account = self.required_account()
        repository = self.readable(kind, name)
        if account != repository.owner:
            raise HubFailure(403, f"You have no write permission for {name}")
        return repository

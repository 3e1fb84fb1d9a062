"""A small Hugging Face Hub on loopback, for the real `huggingface_hub` client; its endpoints are in `hub_routes.py`.

with HubServer() as hub:
    hub.fail(500, method="POST", path="/commit/")
    ...
    assert hub.count("PUT", "/lfs/") == 2
"""

import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from typing import Any

from .hub_http import Handler
from .hub_routes import route
from .hub_store import Store


OWNER_TOKEN = "hf_" + "OwnerTokenOfTheTestHub" + "0" * 12
STRANGER_TOKEN = "hf_" + "StrangerTokenOfTheTestHub" + "0" * 9


@dataclass(frozen=True)
class LoggedRequest:
    method: str
    path: str  # with the query
    status: int | None  # None: the connection was dropped


@dataclass
class Fault:
    """What happens to the next `times` requests of a method whose path matches."""

    method: str
    path: str
    times: int
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    breaks_off: str | None = None  # midway through the body of the `request` or of the `answer`

    def takes(self, method: str, path: str) -> bool:
        return self.times > 0 and method == self.method and re.search(self.path, path) is not None


class HubServer:
    """The server, its store, the faults that were ordered, and the log.

    Args:
        lfs_threshold: files of at least so many bytes go to the large file storage, besides binary ones.
        lfs_part_size: parts of an upload to the large file storage; None = whole files (`basic` transfer).
    """

    route = staticmethod(route)

    def __init__(self, *, lfs_threshold: int = 10 * 2**20, lfs_part_size: int | None = None):
        self.store = Store()
        self.accounts = {OWNER_TOKEN: "user", STRANGER_TOKEN: "stranger"}
        self.lfs_threshold, self.lfs_part_size = lfs_threshold, lfs_part_size
        self.parts: dict[tuple[str, int], bytes] = {}  # of unfinished uploads, by SHA-256 and number
        self.echoes_token = False  # in the messages of faults
        self.log: list[LoggedRequest] = []
        self.lock = threading.RLock()
        self._faults: list[Fault] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.hub = self  # type: ignore[attr-defined]
        self.endpoint = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._http.shutdown()
        self._http.server_close()

    def fail(self, status: int, *, method: str, path: str, times: int = 1, retry_after: int | None = None) -> None:
        """Answer the next `times` requests with `status`; `path` is a pattern to find in it."""
        headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        self._faults.append(Fault(method, path, times, status, headers))

    def drop(self, *, method: str, path: str, times: int = 1) -> None:
        """Break off the next `times` connections midway through the body of the request, which has no effect then."""
        self._faults.append(Fault(method, path, times, breaks_off="request"))

    def drop_answer(self, *, method: str, path: str, times: int = 1) -> None:
        """Carry out the next `times` requests, but break off midway through the body of the answer."""
        self._faults.append(Fault(method, path, times, breaks_off="answer"))

    def repair(self) -> None:
        """No more faults."""
        self._faults.clear()

    def take_fault(self, method: str, path: str) -> Fault | None:
        with self.lock:
            fault = next((fault for fault in self._faults if fault.takes(method, path)), None)
            if fault is not None:
                fault.times -= 1
            return fault

    def add_to_log(self, method: str, path: str, status: int | None) -> None:
        with self.lock:
            self.log.append(LoggedRequest(method, path, status))

    def count(self, method: str, path: str, status: int | None = 200) -> int:
        """Logged requests with this answer; `path` is a pattern to find."""
        answers = Counter((e.method, e.status) for e in self.log if re.search(path, e.path))
        return answers[method, status]

    def files(self, name: str, revision: str = "main", *, kind: str = "model") -> dict[str, bytes]:
        """The content of a repository."""
        commit = self.store.repository(kind, name).at(revision)
        return {path: self.store.read(commit, path) for path in commit.files}

"""What the test Hub keeps: repositories as chains of commits over content-addressed blobs, all in memory."""

import hashlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml


KINDS = {"models": "model", "datasets": "dataset"}  # as in API paths and as in request bodies
FRONT_MATTER = re.compile(r"---\s*\n(.*?)\n---", re.DOTALL)


class HubFailure(Exception):
    """An answer other than 200; `code` tells clients which thing is missing."""

    def __init__(self, status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None):
        super().__init__(message)
        codes = {} if code is None else {"X-Error-Code": code}
        self.status, self.headers = status, {"X-Error-Message": message, **codes, **(headers or {})}


@dataclass(frozen=True)
class File:
    sha256: str
    size: int
    is_lfs: bool
    git_id: str

    @property
    def etag(self) -> str:
        return self.sha256 if self.is_lfs else self.git_id

    def entry(self, path: str) -> dict[str, Any]:
        """As trees and path lists show it."""
        lfs = {"lfs": {"oid": self.sha256, "size": self.size, "pointerSize": 130}} if self.is_lfs else {}
        return {"type": "file", "path": path, "size": self.size, "oid": self.git_id, **lfs}


@dataclass(frozen=True)
class Commit:
    id: str
    title: str
    parent: "Commit | None"
    files: dict[str, File]

    def history(self) -> Iterator["Commit"]:
        commit: Commit | None = self
        while commit is not None:
            yield commit
            commit = commit.parent

    def tree(self, folder: str, recursive: bool) -> list[dict[str, Any]]:
        prefix = f"{folder}/" if folder else ""
        entries = {}
        for path, file in sorted(self.files.items()):
            if not path.startswith(prefix):
                continue
            names = path.removeprefix(prefix).split("/")
            for depth in range(1, len(names) if recursive else min(len(names), 2)):
                parent = prefix + "/".join(names[:depth])
                entries[parent] = {"type": "directory", "path": parent, "size": 0, "oid": digest(parent)}
            if recursive or len(names) == 1:
                entries[path] = file.entry(path)
        return list(entries.values())


@dataclass
class Repository:
    kind: str
    name: str  # with its namespace
    private: bool
    refs: dict[str, Commit] = field(default_factory=dict)  # by full name, such as `refs/heads/main`
    _ids: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.refs["refs/heads/main"] = self._new_commit("initial commit", None, {})

    @property
    def owner(self) -> str:
        return self.name.split("/")[0]

    def full_name(self, revision: str) -> str | None:
        """Of a branch, tag or pull request that exists."""
        return next(
            (f"{p}{revision}" for p in ("", "refs/heads/", "refs/tags/") if f"{p}{revision}" in self.refs), None
        )

    def at(self, revision: str) -> Commit:
        name = self.full_name(revision)
        if name is not None:
            return self.refs[name]
        for commit in itertools.chain.from_iterable(ref.history() for ref in self.refs.values()):
            if commit.id == revision:
                return commit
        raise HubFailure(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def add_commit(self, ref: str, base: Commit, title: str, files: dict[str, File]) -> Commit:
        self.refs[ref] = self._new_commit(title, base, files)
        return self.refs[ref]

    def new_pull_request(self) -> int:
        return 1 + sum(name.startswith("refs/pr/") for name in self.refs)

    def _new_commit(self, title: str, parent: Commit | None, files: dict[str, File]) -> Commit:
        return Commit(digest(f"{self.kind} {self.name} {next(self._ids)}"), title, parent, files)


class Store:
    """All repositories and blobs."""

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.blobs: dict[str, bytes] = {}  # by SHA-256

    def repository(self, kind: str, name: str) -> Repository:
        if (kind, name) not in self.repositories:
            raise HubFailure(404, "Repository not found", "RepoNotFound")
        return self.repositories[kind, name]

    def add_blob(self, content: bytes) -> str:
        sha256 = hashlib.sha256(content).hexdigest()
        self.blobs[sha256] = content
        return sha256

    def regular_file(self, content: bytes) -> File:
        return File(self.add_blob(content), len(content), False, git_id(content))

    def lfs_file(self, sha256: str) -> File:
        size = len(self.blobs[sha256])
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n"
        return File(sha256, size, True, git_id(pointer.encode()))

    def read(self, commit: Commit, path: str) -> bytes:
        return self.blobs[commit.files[path].sha256]

    def card_data(self, commit: Commit) -> dict[str, Any]:
        """The YAML at the head of README.md."""
        text = self.read(commit, "README.md").decode() if "README.md" in commit.files else ""
        match = FRONT_MATTER.match(text)
        return yaml.safe_load(match[1]) if match else {}


def digest(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()


def git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

"""The endpoints of the test Hub, in the order in which a push calls them; then those of a download."""

import base64
import hashlib
import json
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, unquote

from .hub_http import Handler
from .hub_store import KINDS, Commit, File, HubFailure, Repository


LFS_JSON = {"Content-Type": "application/vnd.git-lfs+json"}
BINARY_SUFFIXES = (".safetensors", ".parquet", ".bin", ".pt", ".arrow")
REPOSITORY_PATH = r"/api/(models|datasets)/([^/]+/[^/]+)"
Route = Callable[..., None]
ROUTES: list[tuple[str, re.Pattern[str], Route]] = []


def endpoint(method: str, pattern: str) -> Callable[[Route], Route]:
    """Serve a method and path; the pattern's groups are handed over, unquoted."""

    def register(function: Route) -> Route:
        ROUTES.append((method, re.compile(pattern), function))
        return function

    return register


def route(request: Handler) -> None:
    method = "GET" if request.command == "HEAD" else request.command
    for served, pattern, function in ROUTES:
        match = pattern.fullmatch(request.url_path)
        if match is not None and served == method:
            return function(request, *(unquote(group or "") for group in match.groups()))
    raise HubFailure(404, f"No route for {method} {request.url_path}")


@endpoint("GET", "/api/whoami-v2")
def whoami(request: Handler) -> None:
    name = request.required_account()
    token = {"accessToken": {"displayName": "test", "role": "write"}, "type": "access_token"}
    request.answer_json({"type": "user", "id": name, "name": name, "fullname": name, "orgs": [], "auth": token})


def _named(request: Handler) -> tuple[str, str]:
    account, body = request.required_account(), request.json()
    owner = body.get("organization") or account
    if owner != account:
        raise HubFailure(403, f"You have no rights in the namespace {owner}")
    return body.get("type") or "model", f"{owner}/{body['name']}"


@endpoint("POST", "/api/repos/create")
def create_repository(request: Handler) -> None:
    kind, name = _named(request)
    url = {"url": request.page(kind, name)}
    if (kind, name) in request.hub.store.repositories:
        return request.answer_json({"error": "You already created this repository", **url}, 409)
    private = request.json().get("visibility") == "private"
    request.hub.store.repositories[kind, name] = Repository(kind, name, private)
    request.answer_json({**url, "name": name, "id": name})


@endpoint("GET", f"{REPOSITORY_PATH}/auth-check/write")
def check_rights(request: Handler, kinds: str, name: str) -> None:
    request.writable(KINDS[kinds], name)
    request.answer_json({})


@endpoint("DELETE", "/api/repos/delete")
def delete_repository(request: Handler) -> None:
    kind, name = _named(request)
    request.writable(kind, name)
    del request.hub.store.repositories[kind, name]
    request.answer_json({})


@endpoint("POST", f"{REPOSITORY_PATH}/branch/([^/]+)")
def create_branch(request: Handler, kinds: str, name: str, branch: str) -> None:
    repository = request.writable(KINDS[kinds], name)
    if f"refs/heads/{branch}" in repository.refs:
        raise HubFailure(409, f"Reference {branch} already exists")
    repository.refs[f"refs/heads/{branch}"] = repository.at(request.json().get("startingPoint", "main"))
    request.answer_json({})


@endpoint("POST", f"{REPOSITORY_PATH}/tag/([^/]+)")
def create_tag(request: Handler, kinds: str, name: str, revision: str) -> None:
    repository = request.writable(KINDS[kinds], name)
    repository.refs[f"refs/tags/{request.json()['tag']}"] = repository.at(revision)
    request.answer_json({})


@endpoint("DELETE", f"{REPOSITORY_PATH}/(branch|tag)/([^/]+)")
def delete_reference(request: Handler, kinds: str, name: str, reference: str, revision: str) -> None:
    repository = request.writable(KINDS[kinds], name)
    full_name = f"refs/{'heads' if reference == 'branch' else 'tags'}/{revision}"
    if repository.refs.pop(full_name, None) is None:
        raise HubFailure(404, f"Reference {revision} does not exist", "RevisionNotFound")
    request.answer_json({})


@endpoint("POST", "/api/validate-yaml")
def validate_card(request: Handler) -> None:
    request.answer_json({"errors": [], "warnings": []})


def _commit_base(request: Handler, kind: str, name: str, revision: str) -> tuple[Repository, Commit]:
    """Who may read a repository may open pull requests; other commits are its owner's."""
    if request.query_value("create_pr"):
        request.required_account()
        repository = request.readable(kind, name)
    else:
        repository = request.writable(kind, name)
    return repository, repository.at(revision)


@endpoint("POST", f"{REPOSITORY_PATH}/preupload/([^/]+)")
def preupload(request: Handler, kinds: str, name: str, revision: str) -> None:
    _, commit = _commit_base(request, KINDS[kinds], name, revision)
    answers = [_upload_mode(request, commit, file) for file in request.json()["files"]]
    request.answer_json({"files": answers})


def _upload_mode(request: Handler, commit: Commit, file: dict[str, Any]) -> dict[str, Any]:
    path, there = file["path"], commit.files.get(file["path"])
    is_binary = path.endswith(BINARY_SUFFIXES) or b"\0" in base64.b64decode(file["sample"])
    mode = "lfs" if is_binary or file["size"] >= request.hub.lfs_threshold else "regular"
    return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": there.etag if there else None}


@endpoint("POST", r"/(datasets/)?([^/]+/[^/]+)\.git/info/lfs/objects/batch")
def lfs_batch(request: Handler, prefix: str, name: str) -> None:
    request.required_account()
    request.readable("dataset" if prefix else "model", name)
    objects = [_upload_actions(request, item["oid"], item["size"]) for item in request.json()["objects"]]
    is_multipart = any("header" in item.get("actions", {}).get("upload", {}) for item in objects)
    answer = {"transfer": "multipart" if is_multipart else "basic", "objects": objects}
    request.answer_json(answer, headers=LFS_JSON)


def _upload_actions(request: Handler, sha256: str, size: int) -> dict[str, Any]:
    """Where to send an object; nothing for one that is here already."""
    item: dict[str, Any] = {"oid": sha256, "size": size}
    if sha256 in request.hub.store.blobs:
        return item
    url, part_size = f"{request.hub.endpoint}/lfs/{sha256}", request.hub.lfs_part_size
    upload: dict[str, Any] = {"href": url}
    if part_size is not None and size > part_size and "multipart" in request.json()["transfers"]:
        parts = {str(1 + start // part_size): f"{url}/{1 + start // part_size}" for start in range(0, size, part_size)}
        upload = {"href": f"{url}/complete", "header": {"chunk_size": str(part_size), **parts}}
    return {**item, "actions": {"upload": upload, "verify": {"href": f"{request.hub.endpoint}/lfs/verify"}}}


@endpoint("PUT", "/lfs/([0-9a-f]{64})")
def lfs_upload(request: Handler, sha256: str) -> None:
    _add_lfs_object(request, sha256, request.body)


@endpoint("PUT", "/lfs/([0-9a-f]{64})/([0-9]+)")
def lfs_upload_part(request: Handler, sha256: str, number: str) -> None:
    request.hub.parts[sha256, int(number)] = request.body
    request.answer(b"", headers={"ETag": hashlib.sha256(request.body).hexdigest()})


@endpoint("POST", "/lfs/([0-9a-f]{64})/complete")
def lfs_complete(request: Handler, sha256: str) -> None:
    numbers = [part["partNumber"] for part in request.json()["parts"]]
    _add_lfs_object(request, sha256, b"".join(request.hub.parts.pop((sha256, number)) for number in numbers))


def _add_lfs_object(request: Handler, sha256: str, content: bytes) -> None:
    if hashlib.sha256(content).hexdigest() != sha256:
        raise HubFailure(400, "The content does not have this SHA-256")
    request.hub.store.add_blob(content)
    request.answer(b"")


@endpoint("POST", "/lfs/verify")
def lfs_verify(request: Handler) -> None:
    request.required_account()
    item = request.json()
    if len(request.hub.store.blobs.get(item["oid"], b"")) != item["size"]:
        raise HubFailure(422, "The object is not here, or not whole")
    request.answer_json({})


@endpoint("POST", f"{REPOSITORY_PATH}/commit/([^/]+)")
def commit(request: Handler, kinds: str, name: str, revision: str) -> None:
    repository, base = _commit_base(request, KINDS[kinds], name, revision)
    header, *operations = (json.loads(line) for line in request.body.splitlines())
    if not base.id.startswith(header["value"].get("parentCommit", "")):
        raise HubFailure(412, "A commit has happened since. Please refresh and try again.")
    files = dict(base.files)
    for operation in operations:
        OPERATIONS[operation["key"]](request, files, operation["value"])
    reference = repository.full_name(revision) or ""
    pull_request = {}
    if request.query_value("create_pr"):
        number = repository.new_pull_request()
        reference = f"refs/pr/{number}"
        pull_request = {"pullRequestUrl": f"{request.page(repository.kind, name)}/discussions/{number}"}
    new = repository.add_commit(reference, base, header["value"]["summary"], files)
    url = f"{request.page(repository.kind, name)}/commit/{new.id}"
    request.answer_json({"success": True, "commitOid": new.id, "commitUrl": url, **pull_request})


def _add_file(request: Handler, files: dict[str, File], value: dict[str, Any]) -> None:
    files[value["path"]] = request.hub.store.regular_file(base64.b64decode(value["content"]))


def _add_lfs_file(request: Handler, files: dict[str, File], value: dict[str, Any]) -> None:
    if value["oid"] not in request.hub.store.blobs:
        raise HubFailure(400, f"{value['path']} points to an object that was not uploaded")
    files[value["path"]] = request.hub.store.lfs_file(value["oid"])


def _delete_file(request: Handler, files: dict[str, File], value: dict[str, Any]) -> None:
    del files[value["path"]]


def _delete_folder(request: Handler, files: dict[str, File], value: dict[str, Any]) -> None:
    for path in [path for path in files if path.startswith(value["path"].rstrip("/") + "/")]:
        del files[path]


OPERATIONS = {
    "file": _add_file,
    "lfsFile": _add_lfs_file,
    "deletedFile": _delete_file,
    "deletedFolder": _delete_folder,
}


@endpoint("GET", f"{REPOSITORY_PATH}(?:/revision/([^/]+))?")
def information(request: Handler, kinds: str, name: str, revision: str) -> None:
    repository = request.readable(KINDS[kinds], name)
    commit = repository.at(revision or "main")
    card = request.hub.store.card_data(commit)
    siblings = [{"rfilename": path, "size": file.size} for path, file in sorted(commit.files.items())]
    keys = {key: card[key] for key in ("library_name", "pipeline_tag", "tags") if key in card}
    request.answer_json(
        {"id": name, "modelId": name, "author": repository.owner, "sha": commit.id, "private": repository.private}
        | {"gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": [], **keys}
        | {"cardData": card, "siblings": siblings}
    )


@endpoint("GET", f"{REPOSITORY_PATH}/tree/([^/]+)(?:/(.*))?")
def tree(request: Handler, kinds: str, name: str, revision: str, folder: str) -> None:
    commit = request.readable(KINDS[kinds], name).at(revision)
    entries = commit.tree(folder.strip("/"), (request.query_value("recursive") or "").lower() in ("true", "1"))
    if folder and not entries:
        raise HubFailure(404, f"{folder} does not exist on {revision}", "EntryNotFound")
    request.answer_json(entries)


@endpoint("POST", f"{REPOSITORY_PATH}/paths-info/([^/]+)")
def paths_information(request: Handler, kinds: str, name: str, revision: str) -> None:
    commit = request.readable(KINDS[kinds], name).at(revision)
    is_json = "json" in request.headers.get("Content-Type", "")
    asked = request.json()["paths"] if is_json else parse_qs(request.body.decode())["paths"]
    entries = {entry["path"]: entry for entry in commit.tree("", recursive=True)}
    paths = [path.rstrip("/") for path in ([asked] if isinstance(asked, str) else asked)]
    request.answer_json([entries[path] for path in paths if path in entries])


@endpoint("GET", f"{REPOSITORY_PATH}/refs")
def references(request: Handler, kinds: str, name: str) -> None:
    repository = request.readable(KINDS[kinds], name)
    groups: dict[str, list[dict[str, str]]] = {"heads": [], "tags": [], "pr": []}
    for full_name, commit in repository.refs.items():
        _, group, short_name = full_name.split("/", 2)
        groups[group].append({"name": short_name, "ref": full_name, "targetCommit": commit.id})
    pull_requests = {"pullRequests": groups["pr"]} if request.query_value("include_prs") else {}
    request.answer_json({"branches": groups["heads"], "tags": groups["tags"], "converts": [], **pull_requests})


@endpoint("GET", f"{REPOSITORY_PATH}/commits/([^/]+)")
def commits(request: Handler, kinds: str, name: str, revision: str) -> None:
    history = request.readable(KINDS[kinds], name).at(revision).history()
    common = {"message": "", "authors": [], "date": "2026-01-01T00:00:00.000Z"}
    request.answer_json([{"id": commit.id, "title": commit.title, **common} for commit in history])


@endpoint("GET", "/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
def resolve(request: Handler, prefix: str, name: str, revision: str, path: str) -> None:
    commit = request.readable("dataset" if prefix else "model", name).at(revision)
    headers = {"X-Repo-Commit": commit.id, "Accept-Ranges": "bytes"}
    if path not in commit.files:
        raise HubFailure(404, "Entry not found", "EntryNotFound", headers)
    file, content = commit.files[path], request.hub.store.read(commit, path)
    headers["ETag"] = f'"{file.etag}"'
    if file.is_lfs:
        headers |= {"X-Linked-Etag": f'"{file.etag}"', "X-Linked-Size": str(file.size)}
    asked = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
    if asked is None or request.command == "HEAD":
        return request.answer(content, headers=headers)
    start, end = int(asked[1]), min(int(asked[2] or len(content) - 1), len(content) - 1)
    headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
    request.answer(content[start : end + 1], 206, headers)

"""Pushing a head to the Hugging Face Hub: everything is checked before the first request, and one commit brings it."""

import inspect
import json
import mmap
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi, ModelCardData, get_token
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from huggingface_hub.utils import DEFAULT_IGNORE_PATTERNS, filter_repo_objects, validate_repo_id
from safetensors import SafetensorError, safe_open
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME

from ..model_card import check_card
from ..model_card.metadata import TOKEN, is_hub_id


CARD, CONFIGS = "README.md", (CONFIG_NAME, ADAPTER_CONFIG_NAME)
WEIGHTS_SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
MAX_FILE_BYTES = 50 * 10**9  # the Hub's limit
LEFT_BY_TRAINING = ("_*", "checkpoint-*", ".unfinished-*")
LOG_IN = "log in with `hf auth login`, set `HF_TOKEN`, or pass `token`"
REMEDIES = {
    401: f"the token is not valid: {LOG_IN}",
    403: "the token may not write there: use one with write access, or propose the head with `create_pr=True`",
    404: "the repository or the revision does not exist, or is private and not yours: check both names, and whose "
    "token it is",
    409: "something else is changing the repository: wait until it is done",
    412: "someone else has committed meanwhile: look at what has changed",
    413: "a file is too large: save the weights in smaller shards with `max_shard_size`",
    429: "these were too many requests: wait {wait}",
}
HUB_FAILED = "the Hub itself has failed: wait a little"


class HubError(RuntimeError):
    """A push that the Hub did not take; says why and what to do, and never holds the token."""


def push(
    directory: str | Path,
    repo_id: str,
    *,
    token: str | bool | None = None,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str = "Upload draft head",
    path_in_repo: str | None = None,
    ignore_patterns: Sequence[str] | str | None = LEFT_BY_TRAINING,
    pickles: bool = False,
    base_model: str | None = None,
    again: str | None = None,
) -> CommitInfo:
    """Push the head in `directory`, as one commit of all its files. Local files are never changed.

    Args:
        repo_id: `user/name`, or `name` in the namespace of the token's account; made if it does not exist.
        token: None or True = the one logged in with, or `HF_TOKEN`.
        private: of a repository that is made; None = as the namespace has it by default.
        revision: branch, made if it does not exist, or `refs/pr/N`; None = `main`.
        create_pr: open a pull request instead of committing to `main`.
        path_in_repo: directory of the repository; None = its root.
        ignore_patterns: files to leave out, as in [`~huggingface_hub.HfApi.upload_folder`].
        pickles: push them too: a training checkpoint holds some.
        base_model: the target's Hub id, for the card of a repository that has none, where `directory` has none either.
        again: what to run after a failure; None = this call.

    Raises:
        ValueError: something here is not fit to be pushed; nothing was sent.
        HubError: there is no token, or the Hub could not be reached or refused.
    """
    if create_pr and revision is not None:
        raise ValueError(f"`create_pr` proposes to `main`: leave out `revision` ({revision!r}).")
    files = checked_files(directory, ignore_patterns, _secret(token), pickles=pickles)
    card = minimal_card(base_model)
    check_card(card)
    secret = check_push(repo_id, token)
    if again is None:
        options = {"private": private, "revision": revision, "create_pr": create_pr, "path_in_repo": path_in_repo}
        texts = {"commit_message": commit_message, "ignore_patterns": ignore_patterns, "base_model": base_model}
        again = _call(directory, repo_id, {**options, **texts, "pickles": pickles})
    with _explained(repo_id, secret, again):
        api = HfApi(token=secret, library_name="draftsmith")
        repo_id = _prepared_repository(api, repo_id, private, revision)
        operations = [
            CommitOperationAdd("/".join(filter(None, [path_in_repo, name])), path) for name, path in files.items()
        ]
        if path_in_repo is None and CARD not in files and not api.file_exists(repo_id, CARD, revision=revision):
            operations.append(CommitOperationAdd(CARD, card.encode()))
        # Not `upload_folder`, which may make several commits, the first of them without the weights.
        return api.create_commit(
            repo_id, operations, commit_message=commit_message, revision=revision, create_pr=create_pr
        )


def check_push(repo_id: str, token: str | bool | None = None) -> str:
    """What can be known of a push before there is anything to push; returns the token.

    Raises:
        ValueError: `repo_id` is no name of a repository.
        HubError: there is no token.
    """
    validate_repo_id(repo_id)
    secret = _secret(token)
    if secret is None:
        raise HubError(f"There is no token to push to `{repo_id}` with: {LOG_IN}.")
    return secret


def _secret(token: str | bool | None) -> str | None:
    return token if isinstance(token, str) else None if token is False else get_token()


def _call(directory: str | Path, repo_id: str, options: Mapping[str, Any]) -> str:
    """The call of [`push`] in Python; without the token, which is no option of it."""
    parameters = inspect.signature(push).parameters
    given = [f"{name}={value!r}" for name, value in options.items() if value != parameters[name].default]
    return f"draftsmith.hub.push({', '.join([repr(str(directory)), repr(repo_id), *given])})"


def _prepared_repository(api: HfApi, repo_id: str, private: bool | None, revision: str | None) -> str:
    """The full name of the repository; it and the branch exist then."""
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if private and not api.model_info(repo_id).private:
        raise HubError(
            f"`private` is asked for, but `{repo_id}` exists and is public: name another repository, make it private "
            "in its settings, or leave out `private`. Nothing was uploaded."
        )
    if revision is not None and not revision.startswith("refs/pr/"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    return repo_id


def hub_id(name: str | None) -> str | None:
    """`name` of a model, unless it is a directory's."""
    return name if name and is_hub_id(name) and not Path(name).exists() else None


def minimal_card(base_model: str | None = None) -> str:
    """A card that says what a head is and what loads it."""
    data = ModelCardData(
        base_model=base_model, library_name="draftsmith", tags=["speculative-decoding", "eagle3", "draft-model"]
    )
    target = f"[{base_model}](https://huggingface.co/{base_model})" if base_model else "its target"
    return f"""---
{data.to_yaml()}
---

# EAGLE-3 draft head

A draft head for speculative decoding with {target}. vLLM, SGLang and `draftsmith.Eagle3DraftModel.from_pretrained`
load it. Plain `transformers.AutoModel` would build an untrained Llama from it: `import draftsmith` first.
"""


def checked_files(
    directory: str | Path, ignore_patterns: Sequence[str] | str | None, token: str | None, *, pickles: bool = False
) -> dict[str, Path]:
    """The files to push by their names in `directory`, without asking the Hub.

    Raises:
        ValueError: they are no head that loads, or one of them must not be published.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"`directory`: {directory} is no directory.")
    paths = {path.relative_to(directory).as_posix(): path for path in sorted(directory.rglob("*")) if path.is_file()}
    patterns = [ignore_patterns] if isinstance(ignore_patterns, str) else ignore_patterns or ()
    names = filter_repo_objects(paths, ignore_patterns=[*patterns, *DEFAULT_IGNORE_PATTERNS])
    files = {name: paths[name] for name in names}
    for name, path in files.items():
        if not pickles and name.lower().endswith(PICKLE_SUFFIXES):
            raise ValueError(
                f"`{name}` may be a pickle, which runs code when it is loaded: save weights as safetensors, and move "
                "away what is not part of the head, or leave it out with `ignore_patterns`."
            )
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(
                f"`{name}` has {path.stat().st_size} bytes, more than the {MAX_FILE_BYTES} that the Hub takes: save "
                "in smaller shards with `max_shard_size`."
            )
    _check_head(directory, files)
    if CARD in files:
        check_card(files[CARD].read_text(encoding="utf-8"))
    _check_secrets(files, token)
    return files


def _check_head(directory: Path, files: Mapping[str, Path]) -> None:
    configs = [files[name] for name in CONFIGS if name in files]
    weights = {name: path for name, path in files.items() if name.endswith(WEIGHTS_SUFFIX)}
    if not configs or not weights:
        missing = CONFIG_NAME if not configs else f"*{WEIGHTS_SUFFIX}"
        raise ValueError(f"{directory} holds no head: {missing} is missing. Write one with `save_pretrained`.")
    for path in configs:
        config = read_json(path)
        base = config.get("base_model_name_or_path")
        if path.name == ADAPTER_CONFIG_NAME and not (base and is_hub_id(base)):
            raise ValueError(
                f"`{path.name}` names the base head {base!r}, which is not on the Hub, so the adapter could not be "
                "loaded: push that head first, and write its id there."
            )
    for name, path in weights.items():
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            raise ValueError(f"`{name}` is damaged ({error}): save the head again.") from error
    for index in (name for name in files if name.endswith(INDEX_SUFFIX)):
        shards = {str(PurePosixPath(index).with_name(name)) for name in read_json(files[index])["weight_map"].values()}
        if lost := sorted(shards - weights.keys()):
            raise ValueError(f"`{index}` names {', '.join(lost)}, which are missing: save the head again.")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"`{path.name}` is no JSON ({error}): save the head again.") from error


def _check_secrets(files: Mapping[str, Path], token: str | None) -> None:
    secrets = re.compile(b"|".join([TOKEN.pattern.encode(), *([re.escape(token.encode())] if token else [])]))
    for name, path in files.items():
        if path.stat().st_size == 0:
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end = len(content)
            if name.endswith(WEIGHTS_SUFFIX):  # the rest are weights
                end = 8 + int.from_bytes(content[:8], "little")
            found = secrets.search(content, 0, end)
        if found:
            raise ValueError(
                f"`{name}` holds an access token: remove it, and if anyone else could read the file, revoke the token "
                "on https://huggingface.co/settings/tokens."
            )


@contextmanager
def _explained(repo_id: str, token: str, again: str) -> Iterator[None]:
    """Failures of the Hub's client, whose types are many, as `HubError`."""
    try:
        yield
    except HubError:
        raise
    except Exception as error:
        _scrub(error, token)
        raise HubError(
            f"The push to `{repo_id}` failed: {_reason(error)}. Nothing local was changed. Then push again with "
            f"`{again}`; large files that have arrived are not sent again."
        ) from error


def _reason(error: Exception) -> str:
    causes = [error, *_causes(error)]
    answer = next((cause for cause in causes if isinstance(cause, HfHubHTTPError)), None)
    if answer is None:
        lost = next((cause for cause in causes if isinstance(cause, HTTPError | ConnectionError)), None)
        is_lost = f"no whole answer came ({lost}): see whether the Hub can be reached"
        return f"{type(error).__name__}: {str(error).rstrip('.')}" if lost is None else is_lost
    status, wait = answer.response.status_code, answer.response.headers.get("Retry-After")
    remedy = REMEDIES.get(status, HUB_FAILED if status >= 500 else "the Hub does not take it: see what it says")
    said = f" ({answer.server_message})" if answer.server_message else ""
    return f"status {status}{said}, {remedy.format(wait=f'{wait} seconds' if wait else 'some minutes')}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    while error.__cause__ is not None:
        error = error.__cause__
        yield error


def _scrub(error: BaseException | None, token: str) -> None:
    """Take the token out of the messages and requests of an error and of those behind it."""
    if error is None:
        return
    error.args = tuple(arg.replace(token, "***") if isinstance(arg, str) else arg for arg in error.args)
    if isinstance(error, HfHubHTTPError):
        error.server_message = error.server_message and error.server_message.replace(token, "***")
        error.response.request.headers.pop("Authorization", None)
    elif isinstance(error, HTTPError):
        with suppress(RuntimeError):  # it has no request
            error.request.headers.pop("Authorization", None)
    _scrub(error.__cause__ or error.__context__, token)

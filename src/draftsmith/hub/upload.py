"""Pushing a head to the Hugging Face Hub: everything is checked before the first request, and one commit brings it."""

import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCardData,
    get_token,
)
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers.utils import ADAPTER_CONFIG_NAME

from ..model_card import check_card
from ..model_card.metadata import TOKEN, USER_INFO, is_hub_id
from ..model_card.rendering import is_unedited
from .failures import LOG_IN, HubError, explained
from .files import CARD, CHECKPOINT, HEAD, LEFT_BY_TRAINING, adapted_head, checked_files, stale_files


PULL_REQUEST = re.compile(r"refs/pr/[0-9]+")
BRANCH = re.compile(r"(?![-/.])(?!refs/)(?!.*(?:\.\.|//|@\{|/\.))[^\x00-\x20\x7f~^:?*\[\\]+(?<![/.])(?<!\.lock)")


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
    only: str | None = None,
    base_model: str | None = None,
    again: str | None = None,
) -> CommitInfo:
    """Push the head, or adapter, in `directory` as one commit. Local files are never changed.

    All files go up but hidden ones, such as `.env`, and those of `ignore_patterns`; tokens, keys and passwords in them
    are searched for, and pickles refused. Of an earlier push, configs and weights that this one does not replace are
    deleted, so that a repository holds one head, or one adapter.

    Args:
        repo_id: `user/name`, or `name` in the namespace of the token's account; made if it does not exist.
        token: None or True = the one logged in with, or `HF_TOKEN`.
        private: of a repository that is made; None = as the namespace has it by default.
        revision: branch, made if it does not exist, or `refs/pr/N`; None = `main`.
        create_pr: open a pull request instead of committing to `main`.
        path_in_repo: directory of the repository; None = its root.
        ignore_patterns: files to leave out, as in [`~huggingface_hub.HfApi.upload_folder`].
        only: `head` = of all files those that belong to a head, and `ignore_patterns` are not asked: config, weights,
            tokenizer, `run.json`, license, card and the pictures in it; `checkpoint` = also what training is resumed
            from, without paths of this machine and without pickles of more than tensors.
        base_model: the target's Hub id, for the card of a repository that has none, where `directory` has none either.
        again: what to run after a failure; None = this call.

    Raises:
        ValueError: something here is not fit to be pushed; nothing was sent.
        HubError: there is no token, or the Hub could not be reached or refused.
    """
    secret = check_push(repo_id, token)
    texts = {
        "commit_message": commit_message, "revision": revision, "path_in_repo": path_in_repo, "base_model": base_model,
        "again": again,
    }  # fmt: skip
    _check_texts(texts, secret)
    _check_options(private, create_pr, revision, ignore_patterns, only)
    files = checked_files(directory, ignore_patterns, secret, only=only)
    base, card = adapted_head(files), minimal_card(base_model)
    check_card(card)
    if path_in_repo is None:
        refuse_own_base(repo_id, base if base is not None else base_model)
    if again is None:
        options = {"private": private, "create_pr": create_pr, "ignore_patterns": ignore_patterns, "only": only}
        again = _call(directory, repo_id, {**options, **texts})
    with explained(repo_id, secret, again):
        api = HfApi(token=secret, library_name="draftsmith")
        repo_id = _prepared_repository(api, repo_id, private, revision)
        if path_in_repo is None:
            refuse_own_base(repo_id, base if base is not None else base_model)
        there = api.list_repo_files(repo_id, revision=revision)
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationAdd("/".join(filter(None, [path_in_repo, name])), content)
            for name, content in files.items()
        ]
        operations += [CommitOperationDelete(name) for name in stale_files(there, files, path_in_repo, only)]
        if path_in_repo is None and CARD not in files and not _keeps_card(api, repo_id, revision, there, files):
            operations.append(CommitOperationAdd(CARD, card.encode()))
        # Not `upload_folder`, which may make several commits, the first of them without the weights.
        return api.create_commit(
            repo_id, operations, commit_message=commit_message, revision=revision, create_pr=create_pr
        )


def open_repository(
    repo_id: str, *, token: str | bool | None = None, private: bool | None = None, revision: str | None = None
) -> str:
    """Make sure, before there is anything to push, that the repository and its branch exist and can be written to.

    Args:
        repo_id, token, private, revision: as in [`push`].

    Returns:
        its full name.

    Raises:
        ValueError, HubError: as [`push`].
    """
    secret = check_push(repo_id, token)
    _check_texts({"revision": revision}, secret)
    with explained(repo_id, secret, again=None):
        api = HfApi(token=secret, library_name="draftsmith")
        repo_id = _prepared_repository(api, repo_id, private, revision)
        if revision is None or not PULL_REQUEST.fullmatch(revision):
            api.auth_check(repo_id, write=True)
    return repo_id


def check_push(repo_id: str, token: str | bool | None = None) -> str:
    """What can be known of a push before there is anything to push; returns the token.

    Raises:
        ValueError: `repo_id` is no name of a repository, or `token` no token.
        HubError: there is no token.
    """
    if not isinstance(repo_id, str):
        raise ValueError(f"`repo_id` is {repo_id!r}: pass `user/name`.")
    secret = _secret(token)
    if TOKEN.search(repo_id) or secret is not None and secret in repo_id:
        raise ValueError("`repo_id` holds an access token: pass the name of a repository, and the token as `token`.")
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"`repo_id` is {repo_id!r}: {error}") from error
    if secret is None:
        raise HubError(f"There is no token to push to `{repo_id}` with: {LOG_IN}.")
    return secret


def _secret(token: str | bool | None) -> str | None:
    """The token without white space around it, which files and variables easily add. Errors never show it."""
    if token is None or isinstance(token, bool):
        return None if token is False else get_token()
    if not isinstance(token, str):
        raise ValueError(f"`token` is of the type {type(token).__name__}: pass text, or {LOG_IN}.")
    token = token.strip()
    if not token:
        raise ValueError(f"`token` is empty: {LOG_IN}.")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError("`token` has white space or other characters within it that no token has: copy it once more.")
    return token


def _check_texts(texts: Mapping[str, str | None], token: str) -> None:
    for name, text in texts.items():
        if text is None and name != "commit_message":
            continue
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"`{name}` is {text!r}: pass some text, or leave it out.")
        if token in text or TOKEN.search(text) or USER_INFO.search(text):
            raise ValueError(f"`{name}` holds an access token, key or password, and would be published: take it out.")
    path, revision = texts.get("path_in_repo"), texts.get("revision")
    if path is not None and (not {"", ".", ".."}.isdisjoint(path.split("/")) or "\\" in path):
        raise ValueError(f"`path_in_repo` is {path!r}: pass a directory within the repository, such as `heads/small`.")
    if revision is not None and not PULL_REQUEST.fullmatch(revision) and not BRANCH.fullmatch(revision):
        raise ValueError(f"`revision` is {revision!r}: pass the name of a branch, or `refs/pr/<number>`.")


def _check_options(private: Any, create_pr: Any, revision: str | None, ignore_patterns: Any, only: str | None) -> None:
    if private is not None and not isinstance(private, bool):
        raise ValueError(f"`private` is {private!r}: pass True, False or None.")
    if create_pr and revision is not None:
        raise ValueError(f"`create_pr` proposes to `main`: leave out `revision` ({revision!r}).")
    patterns = ignore_patterns if isinstance(ignore_patterns, list | tuple) else [ignore_patterns or ""]
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f"`ignore_patterns` is {ignore_patterns!r}: pass patterns of file names.")
    if only not in (None, HEAD, CHECKPOINT):
        raise ValueError(f"`only` is {only!r}: pass {HEAD!r}, {CHECKPOINT!r} or None.")


def full_name(repo_id: str, token: str | bool | None = None, again: str = "the same call") -> str:
    """`repo_id` with its owner, by which it is loaded; the Hub is asked for the account of the token if it has none.

    Args:
        again: what to run after a failure.

    Raises:
        ValueError, HubError: as [`check_push`], or the Hub could not be reached or refused.
    """
    if "/" in repo_id:
        return repo_id
    secret = check_push(repo_id, token)
    with explained(repo_id, secret, again):
        return f"{HfApi(token=secret).whoami()['name']}/{repo_id}"


def is_same_repository(repo_id: str, other: str | None) -> bool:
    """The Hub tells names apart by their letters, not by their case."""
    return other is not None and repo_id.casefold() == other.casefold()


def refuse_own_base(repo_id: str, base: str | None) -> None:
    """Raise for a push into the repository of the model that it cannot do without, which it would overwrite."""
    if is_same_repository(repo_id, base):
        raise ValueError(
            f"`repo_id` {repo_id} holds the model that this needs beside it and would be overwritten: name another."
        )


def _call(directory: str | Path, repo_id: str, options: Mapping[str, Any]) -> str:
    """The call of [`push`] in Python; without the token, which is no option of it."""
    parameters = inspect.signature(push).parameters
    given = [f"{name}={value!r}" for name, value in options.items() if value != parameters[name].default]
    return f"draftsmith.hub.push({', '.join([repr(str(directory)), repr(repo_id), *given])})"


def _prepared_repository(api: HfApi, repo_id: str, private: bool | None, revision: str | None) -> str:
    """The full name of the repository; it and the branch exist then. One without the pull request is not made."""
    if revision is not None and PULL_REQUEST.fullmatch(revision):
        repo_id = repo_id if "/" in repo_id else f"{api.whoami()['name']}/{repo_id}"
        api.model_info(repo_id, revision=revision)
        return repo_id
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if private and not api.model_info(repo_id).private:
        raise HubError(
            f"`private` is asked for, but `{repo_id}` exists and is public: name another repository, make it private "
            "in its settings, or leave out `private`. Nothing was uploaded."
        )
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    return repo_id


def _keeps_card(
    api: HfApi, repo_id: str, revision: str | None, there: Sequence[str], files: Mapping[str, Any]
) -> bool:
    """Whether the repository's own card stays: not where it was rendered of an adapter, and a head comes, or so."""
    if CARD not in there:
        return False
    if (ADAPTER_CONFIG_NAME in there) == (ADAPTER_CONFIG_NAME in files):
        return True
    text = Path(api.hf_hub_download(repo_id, CARD, revision=revision)).read_text(encoding="utf-8", errors="replace")
    return not is_unedited(text)


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

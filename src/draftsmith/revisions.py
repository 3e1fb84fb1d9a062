"""Which commit of a Hub repository was loaded. transformers no longer says so: its cache does."""

from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import validate_repo_id
from transformers.utils.hub import REGEX_COMMIT_HASH


def cached_commit(name_or_path: Any, revision: str | None = None, cache_dir: str | Path | None = None) -> str | None:
    """The commit that the Hub's cache holds of a repository at `revision`: a branch, tag or commit; None is `main`.

    Asks nobody. None for directories, and for what is not in the cache.
    """
    repository = _cached_repository(name_or_path, cache_dir)
    if repository is None:
        return None
    revision = str(revision or constants.DEFAULT_REVISION)
    commit: str | None = revision
    if not REGEX_COMMIT_HASH.match(revision):
        reference = repository / "refs" / revision
        commit = reference.read_text().strip() if reference.is_file() else None
    return commit if commit and (repository / "snapshots" / commit).is_dir() else None


def note_commit(config: Any, name_or_path: Any, revision: str | None, cache_dir: str | Path | None = None) -> None:
    """Note in a config that was just loaded which commit it is of; it is never saved with it."""
    config._commit_hash = cached_commit(name_or_path, revision, cache_dir)


def commit_of(config: Any) -> str | None:
    """The commit that a loaded model's config is of, or None.

    Where it was not noted, as by transformers' own loaders, it is that of the only snapshot in the cache.
    """
    if noted := vars(config).get("_commit_hash"):
        return noted
    repository = _cached_repository(config.name_or_path, None)
    snapshots = [] if repository is None else list((repository / "snapshots").glob("*"))
    return snapshots[0].name if len(snapshots) == 1 else None


def _cached_repository(name_or_path: Any, cache_dir: str | Path | None) -> Path | None:
    """Its directory in the cache; None for directories, and for the empty name of a model that has none."""
    try:
        validate_repo_id(str(name_or_path))
    except HFValidationError:
        return None
    if Path(name_or_path).exists():
        return None
    return Path(cache_dir or constants.HF_HUB_CACHE) / repo_folder_name(repo_id=str(name_or_path), repo_type="model")

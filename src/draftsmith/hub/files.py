"""Which files of a directory go to the Hub, and what is checked of them before the first request."""

import json
import mmap
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

import torch
from huggingface_hub.utils import DEFAULT_IGNORE_PATTERNS, filter_repo_objects
from safetensors import SafetensorError, safe_open
from transformers.trainer_pt_utils import safe_globals
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME

from ..model_card import RUN_FILE, check_card
from ..model_card.metadata import LICENSE_FILES, LOCAL_PATH, TOKEN, USER_INFO, is_hub_id


CARD, CONFIGS = "README.md", (CONFIG_NAME, ADAPTER_CONFIG_NAME)
WEIGHTS_SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
MAX_FILE_BYTES = 50 * 10**9  # the Hub's limit
STATE, SETTINGS = "trainer_state.json", "settings.json"  # of a checkpoint
LEFT_BY_TRAINING = (
    "_*", "checkpoint-*", ".unfinished-*", "last-checkpoint/*", "runs/*", "wandb/*", "*.log", "training_args.bin",
    STATE, "*_results.json",
)  # fmt: skip
# What makes a head or an adapter. Of an earlier push, which may have been the other kind or had other shards, whatever
# a new one does not replace is deleted: it would be loaded in its place.
LOADED = (
    *CONFIGS, "generation_config.json", f"*{WEIGHTS_SUFFIX}", f"*{INDEX_SUFFIX}", "pytorch_model*.bin",
    "pytorch_model*.bin.index.json", "adapter_model.bin",
)  # fmt: skip
HEAD_FILES = (
    *CONFIGS, "generation_config.json", "model.safetensors", "model-*-of-*.safetensors",
    "model.safetensors.index.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model",
    "*.tiktoken", "chat_template.jinja", RUN_FILE, CARD, *LICENSE_FILES,
)  # fmt: skip
RESUME_FILES = (STATE, SETTINGS, "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth", "rng_state_*.pth")
HEAD, CHECKPOINT = "head", "checkpoint"
IMAGE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")


def checked_files(
    directory: str | Path, ignore_patterns: Sequence[str] | str | None, token: str, *, only: str | None = None
) -> dict[str, Path | bytes]:
    """The files to push, or their content, by their names in `directory`, without asking the Hub.

    Raises:
        ValueError: they are no head that loads, or one of them must not be published.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"`directory`: {directory} is no directory.")
    paths = {path.relative_to(directory).as_posix(): path for path in sorted(directory.rglob("*")) if path.is_file()}
    files = {name: paths[name] for name in _chosen(paths, ignore_patterns, only)}
    for name, path in files.items():
        if name.lower().endswith(PICKLE_SUFFIXES):
            _refuse_pickle(name, path, only)
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(
                f"`{name}` has {path.stat().st_size} bytes, more than the {MAX_FILE_BYTES} that the Hub takes: save "
                "in smaller shards with `max_shard_size`."
            )
    _check_head(directory, files)
    if CARD in files:
        check_card(files[CARD].read_text(encoding="utf-8"))
    _check_secrets(files, token)
    contents: dict[str, Path | bytes] = dict(files)
    if STATE in files:
        contents[STATE] = json.dumps(_without_paths(read_json(files[STATE])), indent=2).encode() + b"\n"
    return contents


def _chosen(paths: Mapping[str, Path], ignore_patterns: Sequence[str] | str | None, only: str | None) -> Iterable[str]:
    """Without hidden files, such as `.env`; with `only`, what belongs to a head, its card's pictures among it."""
    visible = [name for name in paths if not any(part.startswith(".") for part in name.split("/"))]
    patterns = [ignore_patterns] if isinstance(ignore_patterns, str) else ignore_patterns or ()
    if only is None:
        return filter_repo_objects(visible, ignore_patterns=[*patterns, *DEFAULT_IGNORE_PATTERNS])
    card = paths[CARD].read_text(encoding="utf-8", errors="replace") if CARD in paths else ""
    pictures = {unquote(name) for name in IMAGE.findall(card)}
    allowed = [*HEAD_FILES, *(RESUME_FILES if only == CHECKPOINT else ())]
    names = [name for name in visible if "/" not in name and any(fnmatch(name, pattern) for pattern in allowed)]
    return [*names, *sorted(pictures.intersection(visible).difference(names))]


def _refuse_pickle(name: str, path: Path, only: str | None) -> None:
    """Raise unless the file is one of a checkpoint that holds tensors and numbers alone, and so runs no code."""
    if only != CHECKPOINT:
        raise ValueError(
            f"`{name}` may be a pickle, which runs code when it is loaded: save weights as safetensors, and move "
            "away what is not part of the head, or leave it out with `ignore_patterns`."
        )
    try:
        with safe_globals():  # as the trainer itself reads it
            torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"`{name}` is a pickle of more than tensors, which is not pushed ({error}).") from error


def _check_head(directory: Path, files: Mapping[str, Path]) -> None:
    configs = [files[name] for name in CONFIGS if name in files]
    weights = {name: path for name, path in files.items() if name.endswith(WEIGHTS_SUFFIX)}
    if not configs or not weights:
        missing = CONFIG_NAME if not configs else f"*{WEIGHTS_SUFFIX}"
        raise ValueError(f"{directory} holds no head: {missing} is missing. Write one with `save_pretrained`.")
    if len(configs) > 1:
        raise ValueError(
            f"{directory} holds a head ({CONFIG_NAME}) and an adapter ({ADAPTER_CONFIG_NAME}), and of both only the "
            "adapter would be loaded: move away the one that is older, or leave it out with `ignore_patterns`."
        )
    if (base := adapted_head(files)) is not None and not is_hub_id(base):
        raise ValueError(
            f"`{ADAPTER_CONFIG_NAME}` names the base head {base!r}, which is not on the Hub, so the adapter could not "
            "be loaded: push that head first, and write its id there."
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


def adapted_head(files: Mapping[str, Any]) -> str | None:
    """The base head that an adapter names, empty if it names none; None for a whole head."""
    for name in CONFIGS:
        if name in files and not isinstance(config := read_json(files[name]), dict):
            raise ValueError(f"`{name}` is no mapping of fields ({config!r}): save the head again.")
    if ADAPTER_CONFIG_NAME not in files:
        return None
    return read_json(files[ADAPTER_CONFIG_NAME]).get("base_model_name_or_path") or ""


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"`{path.name}` is no JSON ({error}): save the head again.") from error


def _without_paths(value: Any) -> Any:
    """None for the paths of this machine; that of the best checkpoint leads nowhere on another."""
    if isinstance(value, dict):
        return {key: _without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_paths(item) for item in value]
    return None if isinstance(value, str) and LOCAL_PATH.search(value) else value


def _check_secrets(files: Mapping[str, Path], token: str) -> None:
    shapes = [TOKEN.pattern.encode(), USER_INFO.pattern.encode(), re.escape(token.encode())]
    secrets = re.compile(b"|".join(shapes))
    for name, path in files.items():
        found = secrets.search(name.encode())
        if found is None and path.stat().st_size > 0:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                end = len(content)
                if name.endswith(WEIGHTS_SUFFIX):  # the rest are weights
                    end = 8 + int.from_bytes(content[:8], "little")
                found = secrets.search(content, 0, end)
        if found:
            label = "the name of a file" if secrets.search(name.encode()) else f"`{name}`"
            raise ValueError(
                f"{label} holds an access token, key or password: remove it, and if anyone else could read the file, "
                "revoke it (those of the Hub on https://huggingface.co/settings/tokens)."
            )


def stale_files(there: Iterable[str], names: Iterable[str], folder: str | None, only: str | None) -> list[str]:
    """Of the files that a repository holds, those that a push of `names` to `folder` must delete."""
    prefix = f"{folder}/" if folder else ""
    pushed = {f"{prefix}{name}" for name in names}
    left = [path for path in there if path.startswith(prefix) and path not in pushed]
    if only == CHECKPOINT and folder:  # it is this checkpoint's alone
        return left
    ours = [(path, path.removeprefix(prefix)) for path in left]
    return [path for path, name in ours if "/" not in name and any(fnmatch(name, pattern) for pattern in LOADED)]

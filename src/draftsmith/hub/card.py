"""The card of a directory with a head or an adapter, with the commands that `draftsmith evaluate --launch` runs."""

import logging
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME

from ..model_card import License, RunRecord, Serving, Source, render_adapter_card, render_card
from ..model_card.rendering import is_unedited
from ..model_card.target_options import server_flags
from ..serving import compatibility
from ..serving.servers import launch_command
from .files import CARD, read_json


logger = logging.getLogger(__name__)

DEFAULT_DRAFT_TOKENS = 5  # those of `draftsmith evaluate`


def make_card(
    directory: Path,
    record: RunRecord,
    *,
    config: Mapping[str, Any] | None,
    repo_id: str | None = None,
    license: License | None = None,
    evaluations: Sequence[Mapping[str, Any]] = (),
    plots: Sequence[str] = (),
) -> str:
    """Text of README.md.

    Args:
        directory: holds the weights, or an adapter.
        record: of the run; it names the target.
        config: of the head, as in its `config.json`; None for an adapter.
        repo_id: where on the Hub it will be, `owner/name`; None: commands name the directory.
        license, evaluations, plots: as in [`draftsmith.model_card.render_card`].

    Raises:
        ValueError: the target is not named, `repo_id` lacks its owner, or a file of the directory cannot be read.
    """
    if repo_id is not None and repo_id.count("/") != 1:
        raise ValueError(f"`repo_id` is {repo_id!r}: pass `owner/name`, by which it is loaded.")
    name = repo_id.rpartition("/")[2] if repo_id else Source.of(directory.absolute()).name
    options: dict[str, Any] = {
        "name": name, "repo_id": repo_id, "license": license, "evaluations": evaluations, "plots": plots,
    }  # fmt: skip
    if config is None:
        return render_adapter_card(read_json(directory / ADAPTER_CONFIG_NAME), record, **options)
    trained_for = record.recipe.get("ttt_steps", DEFAULT_DRAFT_TOKENS)
    num_draft_tokens = evaluations[0]["results"][0]["num_draft_tokens"] if evaluations else trained_for
    target = record.target.name if record.target else ""
    servings = [
        _serving(server, config, _tensor_names(directory), (target, repo_id or name), num_draft_tokens, record)
        for server in compatibility.SERVERS
    ]
    return render_card(config, record, servings=servings, **options)


def read_config(directory: Path) -> dict[str, Any] | None:
    """The `config.json` of a head; None for an adapter."""
    return None if (directory / ADAPTER_CONFIG_NAME).is_file() else read_json(directory / CONFIG_NAME)


def keeps_edited_card(directory: Path, source: Path) -> bool:
    """Whether the card in `source` is not as it was rendered, but someone's own; then `directory` has it, too."""
    card = source / CARD
    if not card.is_file() or is_unedited(card.read_text(encoding="utf-8", errors="replace")):
        return False
    logger.warning("%s was not written by draftsmith, or was edited since, and stays as it is.", card)
    if directory.absolute() != source.absolute():
        shutil.copyfile(card, directory / CARD)
    return True


def _tensor_names(directory: Path) -> set[str]:
    names: set[str] = set()
    for path in directory.glob("*.safetensors"):
        try:
            with safe_open(path, framework="pt") as file:
                names |= set(file.keys())
        except SafetensorError as error:
            raise ValueError(f"{path} can't be read: {error}. Save the head again.") from error
    return names


def _serving(
    server: str,
    config: Mapping[str, Any],
    tensors: set[str],
    names: tuple[str, str],
    num_draft_tokens: int,
    record: RunRecord,
) -> Serving:
    """How `server` serves a head; `names` are those of target and head in its command."""
    refusals = compatibility.refusals(dict(config), tensors, server)
    flags = [] if refusals else [*server_flags(record), *compatibility.launch_flags(dict(config), server)]
    command = None if refusals else shlex.join(launch_command(server, *names, num_draft_tokens, flags=flags))
    return Serving(compatibility.READERS[server], command, refusals)

"""What a cache of hidden states was made of, and whether that is what training is asked to use."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..cached_target import save_ends
from ..data import DataArguments, PreparedData, read_template, tokenizer_fingerprint
from ..data.hidden_states import Manifest, plan_split
from ..model_card import Source
from ..revisions import cached_commit, commit_of
from ..target import FrozenTarget
from .arguments import DraftArguments, TargetArguments
from .run_record import sources_of


WEIGHT_FILES = {".safetensors", ".bin", ".gguf", ".pt", ".pth"}
# The data arguments that decide the rows and can be compared without the data: a cache goes on with the same.
DATA_ARGUMENTS = (
    "dataset_weights", "mixture_strategy", "deduplicate", "max_rows", "dataset_config", "split", "eval_split",
    "eval_fraction", "packing", "row_length", "max_length", "split_long_documents", "chat_template",
    "chat_template_kwargs", "messages_column", "text_column", "assistant_marker", "user_marker", "end_of_turn_marker",
)  # fmt: skip
_WINDOW, _WINDOWS = 256, 1024  # bytes of a weight file that are read, and at how many places


def manifest_of(
    target_args: TargetArguments,
    data_args: DataArguments,
    args: Any,
    data: PreparedData,
    target: FrozenTarget,
    tokenizer: Any,
    rows: Mapping[str, Any],
) -> tuple[Manifest, dict[str, list[int]]]:
    """The manifest of a cache that is to be written, and of each split how many states every row needs."""
    layers, width = len(target.aux_layer_ids), target.embedding_weight.shape[1]
    shard_bytes = args.shard_mib * 2**20
    planned = {
        name: plan_split(part, layers=layers, width=width, shard_bytes=shard_bytes) for name, part in rows.items()
    }
    identity = target_identity(target_args, commit_of(target.model.config))
    identity |= {"dtype": str(target.model.dtype).removeprefix("torch."), "precision": target.precision}
    manifest = Manifest(
        target=identity,
        tokenizer=tokenizer_fingerprint(tokenizer),
        aux_layer_ids=list(target.aux_layer_ids),
        width=width,
        storage=args.storage,
        batch_size=args.batch_size,
        data={
            "sources": [asdict(source) for source in sources_of(data_args.dataset, data_args.split, data.train)],
            "eval_sources": [
                asdict(source) for source in sources_of(data_args.eval_dataset, data_args.eval_split, data.evaluation)
            ],
            "cache_keys": {name: report.cache_keys for name, report in data.reports.items()},
            "arguments": data_arguments(data_args),
        },
        splits={name: split for name, (split, _) in planned.items()},
    )
    return manifest, {name: states for name, (_, states) in planned.items()}


def target_identity(target_args: TargetArguments, revision: str | None) -> dict[str, Any]:
    """What the arguments say of a target, without a path of this machine; `revision` is the commit, if known."""
    source = Source.of(target_args.target, revision=revision or target_args.target_revision)
    adapter = target_args.target_adapter
    return {
        "name": source.name,
        "kind": source.kind,
        "revision": source.revision,
        "fingerprint": _fingerprint(target_args.target, target_args.target_gguf_file),
        "gguf_file": target_args.target_gguf_file,
        "adapter": None if adapter is None else asdict(Source.of(adapter, revision=cached_commit(adapter))),
        "adapter_fingerprint": None if adapter is None else _fingerprint(adapter, None),
    }


def data_arguments(data_args: DataArguments) -> dict[str, Any]:
    """`DATA_ARGUMENTS`; of a template the digest, since it may come from a file."""
    values = {name: getattr(data_args, name) for name in DATA_ARGUMENTS}
    if template := read_template(data_args.chat_template):
        values["chat_template"] = hashlib.blake2b(template.encode(), digest_size=16).hexdigest()
    return values


def save_target(target: FrozenTarget, tokenizer: Any, directory: Path) -> None:
    save_ends(target, directory)
    tokenizer.save_pretrained(directory)


def refuse_other_sources(manifest: Manifest, target_args: TargetArguments, draft_args: DraftArguments) -> None:
    """Compare what is given with what the cache was made of; what is left out is the cache's.

    Raises:
        ValueError: names each difference, with both values.
    """
    found = []
    if draft_args.aux_layer_ids not in (None, manifest.aux_layer_ids):
        found.append(f"`aux_layer_ids` is {draft_args.aux_layer_ids}, the cache's are {manifest.aux_layer_ids}")
    if target_args.target is not None:
        found += _other_target(manifest, target_args)
    if found:
        raise ValueError(
            f"`hidden_states`: the cache is of something else: {'; '.join(found)}. Leave these arguments out to train "
            "on what the cache holds, or write a cache of them."
        )


def _other_target(manifest: Manifest, target_args: TargetArguments) -> Iterator[str]:
    ours, cached = target_identity(target_args, commit_of(target_args.config())), manifest.target
    # A directory is known by its weights, wherever it lies; a repository of the Hub by its name and commit.
    is_local = None not in (ours["fingerprint"], cached["fingerprint"])
    if is_local and ours["fingerprint"] != cached["fingerprint"]:
        yield f"`target` {ours['name']} has other weights than the target of the cache, {cached['name']}"
    if not is_local and ours["name"] != cached["name"]:
        yield f"`target` is {ours['name']}, the cache's {cached['name']}"
    elif (
        not is_local and None not in (revisions := (ours["revision"], cached["revision"])) and len(set(revisions)) > 1
    ):
        yield f"`target` {ours['name']} is at revision {revisions[0]}, the cache's at {revisions[1]}"
    if _adapter_identity(ours, cached) != _adapter_identity(cached, ours):
        names = [None if adapter is None else adapter["name"] for adapter in (ours["adapter"], cached["adapter"])]
        yield f"`target_adapter` is {names[0]}, the cache's {names[1]}, or of other weights"
    if ours["gguf_file"] != cached["gguf_file"]:
        yield f"`target_gguf_file` is {ours['gguf_file']}, the cache's {cached['gguf_file']}"
    if target_args.target_dtype not in ("auto", cached["dtype"]):
        yield f"`target_dtype` is {target_args.target_dtype}, the cache's {cached['dtype']}"
    if tokenizer_fingerprint(target_args.load_tokenizer()) != manifest.tokenizer:
        yield f"the tokenizer or chat template of `target` {ours['name']} is not that of the cache"


def _adapter_identity(ours: Mapping[str, Any], other: Mapping[str, Any]) -> Any:
    """What tells the adapter of one target from that of another: its weights, or else its name and commit if known."""
    if None not in (ours["adapter_fingerprint"], other["adapter_fingerprint"]):
        return ours["adapter_fingerprint"]
    adapters = [ours["adapter"], other["adapter"]]
    is_known = None not in adapters and all(adapter["revision"] for adapter in adapters)
    return ours["adapter"] if is_known or adapters[0] is None else {**adapters[0], "revision": None}


def _fingerprint(name: str | None, gguf_file: str | None) -> str | None:
    """Of the weight files of a local directory: their sizes, and bytes from a thousand places in each."""
    directory = Path(name or "").expanduser()
    if not name or not directory.is_dir():
        return None
    digest = hashlib.blake2b(digest_size=16)
    paths = sorted(path for path in directory.iterdir() if path.suffix in WEIGHT_FILES)
    for path in [directory / gguf_file] if gguf_file else paths:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest.update(f"{path.name} {size}".encode())
            for place in range(0, size, max(_WINDOW, size // _WINDOWS)):
                file.seek(place)
                digest.update(file.read(_WINDOW))
    return digest.hexdigest()

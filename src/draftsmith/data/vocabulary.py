"""The draft vocabulary: which tokens of the target the head can propose.

`d2t` holds offsets, as servers read them: draft id i stands for the target's token `i + d2t[i]`. `t2d` marks those
tokens in the target's embedding vocabulary. At full vocabulary there is no map at all.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from safetensors import safe_open
from safetensors.torch import save_file


def count_tokens(dataset: Dataset, vocab_size: int) -> torch.Tensor:
    """How often each token is supervised in a prepared dataset, packed or not: `[vocab_size]` int64.

    Raises:
        ValueError: a supervised id is not in the vocabulary.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for table in dataset.select_columns(["input_ids", "loss_mask"]).with_format("arrow").iter(batch_size=1000):
        ids, mask = (table[name].combine_chunks().flatten().to_numpy() for name in ("input_ids", "loss_mask"))
        supervised = np.bincount(ids[mask != 0], minlength=vocab_size)
        if len(supervised) > vocab_size:
            raise ValueError(
                f"token {len(supervised) - 1} is supervised, but the target's vocabulary has {vocab_size} tokens."
            )
        counts += supervised
    return torch.from_numpy(counts)


def build_vocabulary_map(
    counts: torch.Tensor, draft_vocab_size: int | None, target_vocab_size: int
) -> torch.Tensor | None:
    """The map of the most frequent tokens; ties and shortfall go to the lowest ids.

    Args:
        counts: `[<= target_vocab_size]` int64, from `count_tokens`.
        draft_vocab_size: D; None = the target's.
        target_vocab_size: rows of the target's embedding.

    Returns:
        `d2t`, `[D]` int64 offsets of ascending target ids; None at full vocabulary.

    Raises:
        ValueError: D is not in 1..target_vocab_size.
    """
    if draft_vocab_size is None or draft_vocab_size == target_vocab_size:
        return None
    if not 1 <= draft_vocab_size < target_vocab_size:
        raise ValueError(
            f"`draft_vocab_size`={draft_vocab_size} is not in 1..{target_vocab_size}, the target's vocabulary."
        )
    padded = torch.zeros(target_vocab_size, dtype=torch.int64)
    padded[: len(counts)] = counts
    kept = torch.sort(padded, descending=True, stable=True).indices[:draft_vocab_size].sort().values
    return kept - torch.arange(draft_vocab_size)


def d2t_to_t2d(d2t: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Bool `[vocab_size]`: which tokens of the target's embedding vocabulary the draft vocabulary holds.

    Raises:
        ValueError: `d2t` is not a map into that vocabulary (see `check_vocabulary_map`).
    """
    check_vocabulary_map(d2t, vocab_size)
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[torch.arange(len(d2t)) + d2t.cpu()] = True
    return t2d


def check_vocabulary_map(d2t: torch.Tensor, target_vocab_size: int, t2d: torch.Tensor | None = None) -> None:
    """Refuse a map whose target ids are not ascending and distinct, leave the vocabulary, or disagree with `t2d`.

    Raises:
        ValueError: says which.
    """
    if d2t.dim() != 1 or d2t.is_floating_point() or d2t.dtype == torch.bool or not 1 <= len(d2t) <= target_vocab_size:
        raise ValueError(f"`d2t` must be [1..{target_vocab_size}] integers, but is {d2t.dtype} {list(d2t.shape)}.")
    ids = torch.arange(len(d2t)) + d2t.cpu()
    outside = ids[(ids < 0) | (ids >= target_vocab_size)]
    if len(outside):
        raise ValueError(
            f"`d2t` points at token {int(outside[0])}, but the target's embedding has {target_vocab_size} rows: the "
            "map belongs to another model, or holds ids instead of offsets."
        )
    if (ids.diff() <= 0).any():
        raise ValueError("`d2t` must give ascending target ids `arange(D) + d2t`; this one repeats or reorders them.")
    if t2d is not None and (
        len(t2d) != target_vocab_size or not torch.equal(torch.nonzero(t2d.cpu()).squeeze(1), ids)
    ):
        raise ValueError(
            f"`t2d` marks {int(t2d.sum())} of {len(t2d)} tokens, but `d2t` points at {len(d2t)} of "
            f"{target_vocab_size}, or at others."
        )


def coverage(counts: torch.Tensor, d2t: torch.Tensor | None) -> float:
    """The share of the supervised tokens that the draft vocabulary holds."""
    if d2t is None or not counts.sum():
        return 1.0
    ids = torch.arange(len(d2t)) + d2t
    return float(counts[ids[ids < len(counts)]].sum() / counts.sum())


def save_vocabulary_map(path: str | Path, d2t: torch.Tensor, target_vocab_size: int) -> None:
    """Write `d2t` and `t2d` as safetensors."""
    save_file({"d2t": d2t.contiguous(), "t2d": d2t_to_t2d(d2t, target_vocab_size)}, str(path))


def load_vocabulary_map(
    path: str | Path, target_vocab_size: int, draft_vocab_size: int | None = None
) -> torch.Tensor | None:
    """Read and check a map.

    Args:
        path: safetensors (a map or a whole draft head), a torch file with a dict of `d2t` and `t2d` (SpecForge; read
            with `weights_only=True`), or `d2t.npy`, or the directory that has it (speculators).
        target_vocab_size: rows of the target's embedding.
        draft_vocab_size: D; None = whatever the file has.

    Returns:
        `d2t` `[D]` int64 offsets; None if the map is that of the full vocabulary.

    Raises:
        ValueError: the file has no map, or it doesn't fit the vocabularies.
    """
    path = Path(path)
    if path.is_dir():
        path /= "d2t.npy"
    if path.suffix not in READERS:
        raise ValueError(f"`vocab_map`: {path} is not one of {', '.join(READERS)}.")
    tensors = READERS[path.suffix](path)
    if not isinstance(tensors, Mapping) or not isinstance(tensors.get("d2t"), torch.Tensor):
        raise ValueError(f"`vocab_map`: {path} holds no tensor `d2t`.")
    d2t = tensors["d2t"]
    try:
        check_vocabulary_map(d2t, target_vocab_size, tensors.get("t2d"))
    except ValueError as error:
        raise ValueError(f"`vocab_map`: {path}: {error}") from error
    if draft_vocab_size not in (None, len(d2t)):
        raise ValueError(f"`vocab_map`: {path} has {len(d2t)} tokens, but `draft_vocab_size` is {draft_vocab_size}.")
    return None if len(d2t) == target_vocab_size else d2t.long()


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(str(path), framework="pt") as file:
        return {name: file.get_tensor(name) for name in ("d2t", "t2d") if name in file.keys()}


def _read_torch(path: Path) -> object:
    return torch.load(path, map_location="cpu", weights_only=True)


def _read_numpy(path: Path) -> dict[str, torch.Tensor]:
    files = {name: path.with_name(f"{name}.npy") for name in ("d2t", "t2d")}
    return {name: torch.from_numpy(np.load(file, allow_pickle=False)) for name, file in files.items() if file.exists()}


READERS = {
    ".bin": _read_torch,
    ".npy": _read_numpy,
    ".pt": _read_torch,
    ".pth": _read_torch,
    ".safetensors": _read_safetensors,
}

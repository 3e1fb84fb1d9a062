"""Reading a cache: checked when it is opened, then row by row from where it lies."""

from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..pipeline import PreparedData
from ..statistics import dataset_statistics
from .coding import DECODERS
from .manifest import INDEX, TARGET, UNFINISHED, Manifest, digest_of


class DamagedShard(ValueError):
    """A row cannot be read; the message says of which file, and what to do."""

    def __init__(self, message: str):
        # from a data loader's worker the message comes at the end of a traceback
        super().__init__(message.rpartition(f"{DamagedShard.__qualname__}: ")[2].strip())


class HiddenStateRows(torch.utils.data.Dataset):
    """Rows of one split: those of `tokens`, and the states that their loss depends on.

    Each row has, beside its columns, `aux_hidden_states` `[|context|, layers * Ht]` and `teacher_hidden_states`
    `[|R_0|, Ht]`, both bfloat16. Shards are mapped into memory when a process first reads of them, so every worker of
    a data loader has its own.

    With `storage` bfloat16 they are, bit by bit, what the forward gave that they were taken from, if that was in
    bfloat16, and rounded to it otherwise. A forward over other rows beside, or over another length, may round
    otherwise: training computes the same states beside the target where it gives it the same rows at once.
    """

    def __init__(self, directory: Path, name: str, manifest: Manifest):
        self.directory, self.name = directory, name
        self.tokens = Dataset.from_file(str(directory / f"{name}.arrow"))
        self.aux_layer_ids, self._width = manifest.aux_layer_ids, manifest.width
        self._decode, self._parts = DECODERS[manifest.storage]
        self._ends = [stop for _, stop in manifest.splits[name].shards]
        self._files = manifest.shard_files(name)
        self._opened: dict[str, Any] = {}

    def __len__(self) -> int:
        return self._ends[-1]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_opened": {}}

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Raises `IndexError`, or `DamagedShard`."""
        index = range(len(self))[index]
        row = dict(self.tokens[index])
        row["aux_hidden_states"] = self._states(index, "aux", len(self.aux_layer_ids) * self._width)
        row["teacher_hidden_states"] = self._states(index, "teacher", self._width)
        return row

    def _states(self, row: int, name: str, channels: int) -> Tensor:
        file = self._files[bisect_right(self._ends, row)]
        try:
            if file not in self._opened:
                self._opened[file] = safe_open(self.directory / file, framework="pt")
            arrays = {part: self._opened[file].get_tensor(f"{row}.{name}.{part}").numpy() for part in self._parts}
            return self._decode(arrays, channels)
        except (SafetensorError, ValueError, IndexError, OSError) as error:
            raise DamagedShard(
                f"`hidden_states`: {self.directory / file}: row {row} cannot be read ({error}): run "
                "`draftsmith cache` as it was run before, which writes damaged files anew."
            ) from error


class HiddenStateCache:
    """A finished cache in `directory`.

    Attributes: `manifest`; `target_dir`, with the target's config, tokenizer, embedding and head.

    Raises `ValueError` when the cache is unfinished or of another format, and when a file is missing or of another
    size than it was written with. What is inside the files is read by `damaged_files`.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        if not (self.directory / INDEX).is_file():
            unfinished = (self.directory / UNFINISHED).is_file()
            state = "is unfinished: run `draftsmith cache` again as it was begun" if unfinished else "holds no cache"
            raise ValueError(f"`hidden_states`: {self.directory} {state} ({INDEX} is missing).")
        self.manifest = Manifest.load(self.directory / INDEX)
        if misfits := list(self._misfits()):
            raise ValueError(
                f"`hidden_states`: {self.directory}: {'; '.join(misfits[:5])}"
                ": run `draftsmith cache` as it was run before, which writes them anew."
            )
        self.target_dir = self.directory / TARGET

    def _misfits(self) -> Iterator[str]:
        for name, (size, _) in self.manifest.files.items():
            path = self.directory / name
            if not path.is_file():
                yield f"{name} is missing"
            elif path.stat().st_size != size:
                yield f"{name} has {path.stat().st_size:,} bytes instead of {size:,}"

    def refuse_damage_beside_states(self) -> None:
        """Raise `ValueError` if the rows' tokens or what is kept of the target, which are small, are damaged."""
        shards = {name for split in self.manifest.splits for name in self.manifest.shard_files(split)}
        beside = {name: digest for name, (_, digest) in self.manifest.files.items() if name not in shards}
        damaged = [name for name, digest in beside.items() if digest_of(self.directory / name) != digest]
        if damaged:
            raise ValueError(
                f"`hidden_states`: {self.directory}: the content of {', '.join(damaged)} is not what was written: run "
                "`draftsmith cache` as it was run before, which writes it anew."
            )

    def damaged_files(self) -> Iterator[tuple[str, bool]]:
        """Every file of the cache, and whether its content is other than what was written."""
        for name, (_, digest) in self.manifest.files.items():
            yield name, digest_of(self.directory / name) != digest

    def rows(self, name: str) -> HiddenStateRows | None:
        """The split `train` or `evaluation`, if there is one."""
        return HiddenStateRows(self.directory, name, self.manifest) if name in self.manifest.splits else None

    def prepared_data(self) -> PreparedData:
        """The rows without states, as `prepare_datasets` returns them."""
        parts = {name: Dataset.from_file(str(self.directory / f"{name}.arrow")) for name in self.manifest.splits}
        statistics = {name: dataset_statistics(part) for name, part in parts.items()}
        return PreparedData(parts["train"], parts.get("evaluation"), statistics, {})

"""Writing a cache: rows become arrays, arrays become shards, each whole or not there."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset
from safetensors import SafetensorError
from safetensors.numpy import save_file
from torch import Tensor
from tqdm.auto import tqdm

from ... import alignment
from ..collator import DraftCollator
from ..files import PART, synchronize, written_whole
from .coding import Arrays, encode_bfloat16, encode_float8
from .manifest import INDEX, TARGET, UNFINISHED, Manifest, Split, digest_of, shard_stem


_ENTRY = 70  # bytes of one array in the header of a shard, apart from its name


@dataclass(frozen=True)
class NeededRows:
    """Which states of one row the loss depends on: `context` for auxiliary ones, `teacher` for last ones, int64."""

    context: Tensor
    teacher: Tensor

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "NeededRows":
        """Of a row as the collator takes it."""
        batch: Any = DraftCollator(ttt_steps=1)([row])
        rows = batch["row_sets"][0]
        documents = alignment.unique_document_ids(batch["document_ids"], batch["input_ids"]).flatten()
        return cls(alignment.context_rows(rows, documents), rows + 1)


def plan_split(rows: Dataset, *, layers: int, width: int, shard_bytes: int) -> tuple[Split, list[int]]:
    """Cut a split into shards of at most `shard_bytes` of bfloat16 states, or one row.

    Returns:
        The split, and of each row how many states it needs: `(layers * context + teacher)` of `width` numbers each.
    """
    bounds, states, filled = [0], [], 0  # type: ignore[var-annotated]
    table = rows.with_format("numpy")
    for number, row in enumerate(tqdm(table, desc="Planning", unit="row", leave=False)):  # type: ignore[arg-type]
        needed = NeededRows.of(row)
        states.append(layers * len(needed.context) + len(needed.teacher))
        size = 2 * width * states[-1]
        if filled and filled + size > shard_bytes:
            bounds.append(number)
            filled = 0
        filled += size
    return Split([list(pair) for pair in pairwise([*bounds, len(states)])]), states


class CacheWriter:
    """Writes what `manifest` promises to `directory`, or what is missing of it there."""

    def __init__(self, directory: Path, manifest: Manifest):
        self.directory, self.manifest = directory, manifest

    def begin(self, rows: Mapping[str, Dataset], save_target: Callable[[Path], None]) -> None:
        """Write all but the states: the manifest, the rows' tokens, and by `save_target` what is kept of the target.

        Raises:
            ValueError: the directory holds something else, or a cache that was begun otherwise.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        begun = [self.directory / name for name in (INDEX, UNFINISHED) if (self.directory / name).is_file()]
        if begun and (differences := Manifest.load(begun[0]).differences(self.manifest)):
            raise ValueError(
                f"`output_dir` {self.directory} holds a cache that was begun otherwise: {'; '.join(differences[:5])}. "
                "Run it as it was begun, or name another directory."
            )
        if not begun and [path for path in self.directory.iterdir() if not path.name.startswith(PART)]:
            raise ValueError(f"`output_dir` {self.directory} is not empty and holds no cache: name another directory.")
        self.manifest.save(self.directory, UNFINISHED)
        (self.directory / INDEX).unlink(missing_ok=True)
        for name, dataset in rows.items():
            if not (self.directory / f"{name}.arrow").is_file():
                write_tokens(dataset, self.directory / f"{name}.arrow")
        if not (self.directory / TARGET).is_dir():
            unfinished = self.directory / f"{PART}{TARGET}"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            save_target(unfinished)
            for path in unfinished.iterdir():
                synchronize(path)
            unfinished.rename(self.directory / TARGET)

    def missing(self) -> list[tuple[str, int]]:
        """The shards that are not there, each as its split and number."""
        present = {path.name.split(".")[0] for path in self.directory.glob("*.safetensors")}
        return [
            (name, number)
            for name, split in self.manifest.splits.items()
            for number in range(len(split.shards))
            if shard_stem(name, number, len(split.shards)) not in present
        ]

    def numbers(self, name: str, shard: int) -> range:
        """The rows of a shard."""
        return range(*self.manifest.splits[name].shards[shard])

    def encoded(self, row: int, aux: Tensor, teacher: Tensor) -> Arrays:
        """The arrays of one row's states, named for its shard.

        Args:
            aux: `[|context|, layers * Ht]` bfloat16 on the CPU.
            teacher: `[|R_0|, Ht]`.

        Raises:
            ValueError: a number is not finite, and the storage is `float8`.
        """
        arrays: Arrays = {}
        for name, states, layers in (("aux", aux, len(self.manifest.aux_layer_ids)), ("teacher", teacher, 1)):
            try:
                coded = encode_float8(states, layers) if self.manifest.storage == "float8" else encode_bfloat16(states)
            except ValueError as error:
                raise ValueError(f"row {row}: {error}. Write the cache with `storage` bfloat16.") from error
            arrays |= {f"{row}.{name}.{part}": values for part, values in coded.items()}
        return arrays

    def write(self, name: str, number: int, rows: Sequence[Arrays]) -> None:
        """Write one shard; its name has the digest of its content, so that it appears with that or not at all."""
        stem = shard_stem(name, number, len(self.manifest.splits[name].shards))
        unfinished = self.directory / f"{PART}{stem}"
        try:
            save_file({key: values for row in rows for key, values in row.items()}, unfinished)
            synchronize(unfinished)
            unfinished.rename(self.directory / f"{stem}.{digest_of(unfinished)}.safetensors")
        except (SafetensorError, OSError) as error:
            free = shutil.disk_usage(self.directory).free / 2**20
            raise OSError(
                f"{self.directory / stem} could not be written: {error}. {free:,.1f} MiB are free there: make room "
                "and run the same command again, which goes on where this one was."
            ) from error
        finally:
            unfinished.unlink(missing_ok=True)

    def finish(self) -> int:
        """Write the index and remove what killed runs left; returns the size of the cache in bytes."""
        for leftover in self.directory.glob(f"{PART}*"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        files: dict[str, list] = {}
        for path in sorted(self.directory.rglob("*")):
            if path.is_file() and path.name not in (INDEX, UNFINISHED):
                is_shard = path.suffix == ".safetensors" and path.parent == self.directory
                digest = path.name.split(".")[1] if is_shard else digest_of(path)
                files[path.relative_to(self.directory).as_posix()] = [path.stat().st_size, digest]
        replace(self.manifest, files=files).save(self.directory, INDEX)
        (self.directory / UNFINISHED).unlink()
        return sum(size for size, _ in files.values())


def stored_size(arrays: Arrays) -> int:
    """Bytes that these arrays take in a shard, their entries in its header included."""
    return sum(values.nbytes + len(key) + _ENTRY for key, values in arrays.items())


def write_tokens(rows: Dataset, path: Path) -> None:
    """The rows without states, as an Arrow file that is read where it lies."""
    table = rows.with_format("arrow")
    with written_whole(path) as unfinished, pa.OSFile(str(unfinished), "wb") as file:
        with pa.ipc.new_stream(file, table[:0].schema.remove_metadata()) as stream:
            for part in table.iter(batch_size=1000):
                stream.write_table(part.replace_schema_metadata(None).combine_chunks())

"""Writing a cache: rows become arrays, arrays become shards, each whole or not there."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
from datasets import Dataset
from safetensors import SafetensorError
from safetensors.numpy import save_file
from torch import Tensor
from tqdm.auto import tqdm

from ... import alignment
from ..collator import DraftCollator
from ..files import PART, FullDiskError, lock_for_one_run, synchronize, written_whole
from ..wording import counted
from .coding import Arrays, encode_bfloat16, encode_float8
from .manifest import INDEX, TARGET, UNFINISHED, Manifest, Split, digest_of


LOCK = ".lock"
_TOKEN = 9  # bytes: id and turn of four each, mask of one
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
    """Writes what `manifest` promises to `directory`, or what is missing or damaged of it there.

    One process at a time `begin`s in a directory, until it `close`s; others of its run write shards beside it.
    """

    def __init__(self, directory: Path, manifest: Manifest):
        self.directory, self.manifest = directory, manifest
        self._lock: IO[bytes] | None = None

    def begin(self) -> None:
        """Take the directory, and find out which files of an earlier run can be kept.

        Raises:
            ValueError: the directory holds something else, a cache that was begun otherwise, or one that another
                process writes.
            OSError: the directory could not be made.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.directory)
        self.manifest.files = self._kept_files()

    def size_beside_states(self, rows: Mapping[str, Dataset], target_size: int) -> int:
        """Bytes that `write_beside_states` will take; `target_size` are those that `save_target` writes."""
        missing = [part for name, part in rows.items() if f"{name}.arrow" not in self.manifest.files]
        tokens = sum(sum(part.with_format("numpy")["length"][:]) for part in missing)
        return _TOKEN * int(tokens) + (0 if self._keeps_target() else target_size)

    def _keeps_target(self) -> bool:
        return any(name.startswith(f"{TARGET}/") for name in self.manifest.files)

    def write_beside_states(self, rows: Mapping[str, Dataset], save_target: Callable[[Path], None]) -> None:
        """Write the manifest, the rows' tokens, and by `save_target` what is kept of the target.

        Raises:
            OSError: something could not be written.
        """
        kept = self.manifest.files
        with self._explained(UNFINISHED):
            self.manifest.save(self.directory, UNFINISHED)
        (self.directory / INDEX).unlink(missing_ok=True)
        written = {}
        for name, dataset in rows.items():
            if (file := f"{name}.arrow") not in kept:
                with self._explained(file):
                    write_tokens(dataset, self.directory / file)
                    written[file] = _size_and_digest(self.directory / file)
        if not self._keeps_target():
            written |= self._write_target(save_target)
        self.manifest.files = kept | written
        with self._explained(UNFINISHED):
            self.manifest.save(self.directory, UNFINISHED)

    def close(self) -> None:
        """Let others write to the directory."""
        if self._lock is not None:
            self._lock.close()

    def _kept_files(self) -> dict[str, list]:
        """What an earlier run wrote beside the shards and is as it was written: tokens, and the target as a whole."""
        begun = [self.directory / name for name in (INDEX, UNFINISHED) if (self.directory / name).is_file()]
        if not begun:
            if [path for path in self.directory.iterdir() if path.name != LOCK and not path.name.startswith(PART)]:
                raise ValueError(
                    f"`output_dir` {self.directory} is not empty and holds no cache: name another directory."
                )
            return {}
        before = Manifest.load(begun[0])
        if differences := before.differences(self.manifest):
            raise ValueError(
                f"`output_dir` {self.directory} holds a cache that was begun otherwise: {'; '.join(differences[:5])}. "
                "Run it as it was begun, or name another directory."
            )
        files = before.files
        whole = [name for name in files if name.endswith(".arrow") and self._is_whole(name, files[name])]
        target = [name for name in files if name.startswith(f"{TARGET}/")]
        if all(self._is_whole(name, files[name]) for name in target):
            whole += target
        return {name: files[name] for name in whole}

    def _is_whole(self, name: str, known: list) -> bool:
        path = self.directory / name
        return path.is_file() and _size_and_digest(path) == known

    def _write_target(self, save_target: Callable[[Path], None]) -> dict[str, list]:
        unfinished, final = self.directory / f"{PART}{TARGET}", self.directory / TARGET
        for left in (unfinished, final):
            shutil.rmtree(left, ignore_errors=True)
        try:
            with self._explained(TARGET):
                unfinished.mkdir()
                save_target(unfinished)
                for path in unfinished.iterdir():
                    synchronize(path)
                files = {f"{TARGET}/{path.name}": _size_and_digest(path) for path in sorted(unfinished.iterdir())}
                unfinished.rename(final)
        finally:  # what a full disk took of it is room for the next attempt
            shutil.rmtree(unfinished, ignore_errors=True)
        return files

    def remove_damaged(self, rank: int = 0, ranks: int = 1) -> None:
        """Read this rank's share of the shards that an earlier run wrote; those that are damaged are `missing` then.

        Of two for the same rows neither is trusted.
        """
        stems = [stem for name in self.manifest.splits for stem in self.manifest.shard_stems(name)]
        found = [paths for stem in stems[rank::ranks] if (paths := self._written(stem))]
        for paths in tqdm(found, desc="Checking", unit="shard", leave=False, disable=rank > 0):
            if len(paths) > 1 or digest_of(paths[0]) != _digest_in(paths[0]):
                for path in paths:
                    path.unlink()

    def missing(self) -> list[tuple[str, int]]:
        """The shards that are not there, each as its split and number."""
        return [
            (name, number)
            for name in self.manifest.splits
            for number, stem in enumerate(self.manifest.shard_stems(name))
            if not self._written(stem)
        ]

    def _written(self, stem: str) -> list[Path]:
        return list(self.directory.glob(f"{stem}.*.safetensors"))

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
        stem = self.manifest.shard_stems(name)[number]
        unfinished = self.directory / f"{PART}{stem}"
        try:
            with self._explained(stem):
                save_file({key: values for row in rows for key, values in row.items()}, unfinished)
                synchronize(unfinished)
                unfinished.rename(self.directory / f"{stem}.{digest_of(unfinished)}.safetensors")
        finally:
            unfinished.unlink(missing_ok=True)

    def finish(self) -> int:
        """Write the index and remove what killed runs left; returns the size of the cache in bytes.

        Raises `ValueError` if shards are not there that other ranks have written.
        """
        if missing := self.missing():
            raise ValueError(
                f"`output_dir`: {counted(len(missing), 'shard')} written, but not in {self.directory} of the first "
                "rank: all ranks must write to one disk."
            )
        for leftover in self.directory.glob(f"{PART}*"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        shards = [self._written(stem)[0] for name in self.manifest.splits for stem in self.manifest.shard_stems(name)]
        files = self.manifest.files | {path.name: [path.stat().st_size, _digest_in(path)] for path in shards}
        files = dict(sorted(files.items()))
        with self._explained(INDEX):
            replace(self.manifest, files=files).save(self.directory, INDEX)
        (self.directory / UNFINISHED).unlink()
        return sum(size for size, _ in files.values())

    @contextmanager
    def _explained(self, file: str) -> Iterator[None]:
        """What writing raises, with the file and the remedy."""
        try:
            yield
        except (SafetensorError, OSError) as error:
            free = shutil.disk_usage(self.directory).free / 2**20
            reason = error.__cause__ if isinstance(error, FullDiskError) else error  # which names the file, too
            raise OSError(
                f"{self.directory / file} could not be written: {reason}. {free:,.1f} MiB are free there: make room "
                "and run the same command again, which goes on where this one was."
            ) from error


def refuse_another_run(directory: Path) -> None:
    """Raise `ValueError` where a process writes already, before this one has worked for long."""
    if (directory / LOCK).exists():
        _locked(directory).close()


def _locked(directory: Path) -> IO[bytes]:
    """The directory is this process's until the file is closed."""
    file = open(directory / LOCK, "ab")
    try:
        lock_for_one_run(file, directory)
    except ValueError:
        file.close()
        raise
    return file


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


def _size_and_digest(path: Path) -> list:
    return [path.stat().st_size, digest_of(path)]


def _digest_in(shard: Path) -> str:
    """The digest that a shard was named for."""
    return shard.name.split(".")[1]

"""Where rows come from: local JSON Lines, JSON and Parquet files, saved datasets, the Hub, or memory."""

import glob
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, load_dataset, load_from_disk

from .files import FullDiskError, naming_full_disks
from .prepared_files import prepared_with
from .scratch import data_directory
from .streams import array_items, batched, rows_on_disk


COMPRESSIONS = {".bz2", ".gz", ".xz", ".zst"}
# What stands beside data and tells about it; hidden files are no data either, but unfinished.
DESCRIPTIONS = {"provenance.json", "statistics.json", "dataset_info.json", "dataset_infos.json"}


@dataclass(frozen=True)
class Source:
    """The rows of one file, Hub dataset or in-memory dataset.

    Attributes:
        name: what errors call it.
        rows: one column `text` with a JSON document per row if `is_json`, else the columns as they were stored.
        is_json: JSON stays text until a row is prepared, so that one broken line costs one row, and rows may differ in
            their keys and types (Arrow would merge them and invent nulls).
        entry: which entry of `dataset` it is of.
        prepared_with: fingerprint of the tokenizer and chat template, in a file that `draftsmith prepare` wrote.
    """

    name: str
    rows: Dataset
    is_json: bool = False
    entry: int = 0
    prepared_with: str | None = None

    def locate(self, index: int) -> str:
        """Human name of a row; rows and lines count from 1."""
        return f"{self.name}, {'line' if self.is_json else 'row'} {index + 1}"


@dataclass(frozen=True)
class Reading:
    """How datasets are read.

    Attributes:
        config, split: of Hub datasets.
        cache_dir: where `datasets` keeps its Arrow files, and what is streamed lies until it is prepared; None = its
            own default.
        streaming: read from the beginning only as far as `max_rows`, instead of fetching whole datasets first.
        max_rows: of each dataset; None = all.
        part: "train" or "evaluation", which file of a directory that `draftsmith prepare` wrote is read.
        argument: what errors call the datasets.
    """

    config: str | None = None
    split: str = "train"
    cache_dir: str | None = None
    streaming: bool = False
    max_rows: int | None = None
    part: str = "train"
    argument: str = "dataset"

    def load(self, name: str, *arguments: str | None, limit: int | None, **options: Any) -> Dataset:
        """`datasets.load_dataset`, on disk and memory-mapped either way."""
        if not self.streaming:
            with naming_full_disks(data_directory(self.cache_dir).parent):
                return load_dataset(name, *arguments, cache_dir=self.cache_dir, **options)
        stream = load_dataset(name, *arguments, streaming=True, **options)
        stream = stream if limit is None else stream.take(limit)
        return rows_on_disk(stream.with_format("arrow").iter(batch_size=1000), self.cache_dir)


def load_sources(
    datasets: Sequence[str | Dataset],
    *,
    config: str | None = None,
    split: str = "train",
    cache_dir: str | None = None,
    streaming: bool = False,
    max_rows: int | None = None,
    part: str = "train",
    argument: str = "dataset",
) -> list[Source]:
    """Open every dataset of `datasets`, in order.

    Args:
        datasets: local files (`.jsonl`, `.ndjson`, `.json`, `.parquet`, also compressed), globs, directories of such
            files or written by `Dataset.save_to_disk`, Hub ids, or `datasets.Dataset` objects.
        config, split, cache_dir, streaming, max_rows, part, argument: as in [`Reading`].

    Raises:
        FileNotFoundError: a name that looks like a path matches nothing.
        ValueError: a file of an unknown kind, or one that can't be read.
    """
    if isinstance(datasets, (str, Dataset)):
        raise TypeError(f"`{argument}` is a list: write [{argument}].")
    reading = Reading(config, split, cache_dir, streaming, max_rows, part, argument)
    return [
        replace(source, entry=position)
        for position, dataset in enumerate(datasets)
        for source in _limited(_open(dataset, position, reading), max_rows)
    ]


def _open(dataset: str | Dataset, position: int, reading: Reading) -> Iterator[Source]:
    """The sources of one entry, opened one by one."""
    if isinstance(dataset, Dataset):
        yield Source(f"in-memory dataset {position + 1}", dataset)
    elif not isinstance(dataset, str):
        raise TypeError(
            f"`{reading.argument}` takes names and `datasets.Dataset` objects, not {type(dataset).__name__}."
        )
    elif files := _local_files(dataset, reading):
        for file in files:
            yield _read_file(file, reading)
    else:
        rows = reading.load(dataset, reading.config, split=reading.split, limit=reading.max_rows)
        yield Source(dataset, rows)


def _limited(sources: Iterator[Source], max_rows: int | None) -> Iterator[Source]:
    """The sources up to `max_rows` rows of all together; those after are not opened."""
    for source in sources:
        if max_rows is not None and len(source.rows) >= max_rows:
            yield replace(source, rows=source.rows.select(range(max_rows)))
            return
        yield source
        max_rows = None if max_rows is None else max_rows - len(source.rows)


def _kind(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _is_saved_dataset(path: Path) -> bool:
    return (path / "state.json").is_file()


def _is_data(path: Path) -> bool:
    return _kind(path) in READERS and path.name not in DESCRIPTIONS and not path.name.startswith(".")


def _is_prepared(path: Path) -> bool:
    """Whether it is a directory that `draftsmith prepare` wrote: its parts are not to be read together."""
    return (path / "train.parquet").is_file() and (path / "statistics.json").is_file()


def _local_files(name: str, reading: Reading) -> list[Path]:
    """The files that `name` stands for, sorted; empty if it must be a Hub id."""
    path = Path(name).expanduser()
    if path.is_file() or _is_saved_dataset(path):
        return [path]
    if _is_prepared(path):
        if not (path / f"{reading.part}.parquet").is_file():
            raise FileNotFoundError(
                f"`eval_dataset`: {name} was prepared without evaluation data: prepare it with `eval_fraction` or "
                "`eval_dataset`, or name a file."
            )
        return [path / f"{reading.part}.parquet"]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if _is_data(file))
        if not files:
            raise FileNotFoundError(f"`{reading.argument}`: the directory {name} holds no {', '.join(READERS)} file.")
        return files
    if glob.has_magic(name):
        files = [Path(file) for file in sorted(glob.glob(str(path), recursive=True))]
        if not files:
            raise FileNotFoundError(f"`{reading.argument}`: no file matches {name}.")
        return files
    if _kind(path) in READERS or name.startswith(("/", ".", "~")):
        raise FileNotFoundError(f"`{reading.argument}`: {name} does not exist.")
    return []


def _read_file(path: Path, reading: Reading) -> Source:
    if _is_saved_dataset(path):
        rows = load_from_disk(str(path))
        if not isinstance(rows, Dataset):
            raise ValueError(
                f"`{reading.argument}`: {path} holds several splits ({', '.join(rows)}): name one, as {path}/<split>."
            )
        return Source(str(path), rows)
    if _kind(path) not in READERS:
        raise ValueError(f"`{reading.argument}`: {path} is not one of {', '.join(READERS)}.")
    try:
        return READERS[_kind(path)](path, reading)
    except (UnreadableError, FullDiskError):
        raise
    except Exception as error:  # `datasets` wraps whatever gzip or Arrow raised in errors of its own
        raise UnreadableError(f"`{reading.argument}`: {path} can't be read: {error.__cause__ or error}") from error


class UnreadableError(ValueError):
    """A file that can't be read as what its name says."""


def _read_json_lines(path: Path, reading: Reading) -> Source:
    if path.stat().st_size == 0:
        return Source(str(path), Dataset.from_dict({"text": []}), is_json=True)
    if path.suffix.lower() in COMPRESSIONS:  # where `datasets` gives up at the first undecodable byte
        with fsspec.open(
            str(path), "rt", compression="infer", encoding="utf-8-sig", errors="backslashreplace"
        ) as file:
            lines = (line.removesuffix("\n") for line in islice(file, reading.max_rows))
            return Source(str(path), _texts_on_disk(lines, reading), is_json=True)
    rows = reading.load(
        "text",
        data_files=[glob.escape(str(path))],
        split="train",
        limit=reading.max_rows,
        encoding="utf-8-sig",
        # an undecodable byte becomes `\xNN`, which JSON rejects: the error names the line, and only that line is lost
        encoding_errors="backslashreplace",
    )
    return Source(str(path), rows, is_json=True)


def _read_json(path: Path, reading: Reading) -> Source:
    """A JSON array of rows; anything else with this suffix holds JSON Lines."""
    with fsspec.open(str(path), "rt", compression="infer", encoding="utf-8-sig", errors="backslashreplace") as file:
        head = file.read(1)
        while head.isspace():
            head = file.read(1)
        if head != "[":
            return _read_json_lines(path, reading)
        try:
            rows = _texts_on_disk(islice(array_items(file), reading.max_rows), reading)
        except (json.JSONDecodeError, RecursionError) as error:
            raise UnreadableError(
                f"`{reading.argument}`: {path} is not a JSON array: {error}. JSON Lines would lose one row only."
            ) from error
    return Source(str(path), rows, is_json=True)


def _texts_on_disk(texts: Iterator[str], reading: Reading) -> Dataset:
    tables = (pa.table({"text": pa.array(batch, pa.string())}) for batch in batched(texts, 100))
    return rows_on_disk(tables, reading.cache_dir)


def _read_parquet(path: Path, reading: Reading) -> Source:
    with pq.ParquetFile(path) as file:
        if file.metadata.num_rows == 0:  # which `datasets` refuses
            return Source(str(path), Dataset(file.read()))
        fingerprint = prepared_with(file.schema_arrow)  # which `datasets` drops
    rows = reading.load(
        "parquet",
        data_files=[glob.escape(str(path))],
        split="train",
        limit=reading.max_rows,
        batch_size=1000,  # else as many rows as the first row group has, which may be none
    )
    return Source(str(path), rows, prepared_with=fingerprint)


READERS: dict[str, Callable[[Path, Reading], Source]] = {
    ".json": _read_json,
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".parquet": _read_parquet,
}

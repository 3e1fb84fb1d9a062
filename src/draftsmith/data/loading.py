"""Where rows come from: local JSON Lines, JSON and Parquet files, saved datasets, the Hub, or memory."""

import glob
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import fsspec
from datasets import Dataset, load_dataset, load_from_disk


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
    """

    name: str
    rows: Dataset
    is_json: bool = False

    def locate(self, index: int) -> str:
        """Human name of a row; rows and lines count from 1."""
        return f"{self.name}, {'line' if self.is_json else 'row'} {index + 1}"


def load_sources(
    datasets: Sequence[str | Dataset],
    *,
    config: str | None = None,
    split: str = "train",
    cache_dir: str | None = None,
) -> list[Source]:
    """Open every dataset of `datasets`, in order.

    Args:
        datasets: local files (`.jsonl`, `.ndjson`, `.json`, `.parquet`, also compressed), globs, directories of such
            files or written by `Dataset.save_to_disk`, Hub ids, or `datasets.Dataset` objects.
        config: configuration name of the Hub datasets.
        split: split of the Hub datasets.
        cache_dir: where `datasets` keeps its Arrow files; None = its own default.

    Raises:
        FileNotFoundError: a name that looks like a path matches nothing.
        ValueError: a file of an unknown kind, or one that can't be read.
    """
    if isinstance(datasets, (str, Dataset)):
        raise TypeError("`dataset` is a list: write [dataset].")
    sources: list[Source] = []
    for position, dataset in enumerate(datasets):
        if isinstance(dataset, Dataset):
            sources.append(Source(f"in-memory dataset {position + 1}", dataset))
        elif not isinstance(dataset, str):
            raise TypeError(f"`dataset` takes names and `datasets.Dataset` objects, not {type(dataset).__name__}.")
        elif files := _local_files(dataset):
            sources.extend(_read_file(file, cache_dir) for file in files)
        else:
            sources.append(Source(dataset, load_dataset(dataset, config, split=split, cache_dir=cache_dir)))
    return sources


def _kind(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _is_saved_dataset(path: Path) -> bool:
    return (path / "state.json").is_file()


def _is_data(path: Path) -> bool:
    return _kind(path) in READERS and path.name not in DESCRIPTIONS and not path.name.startswith(".")


def _local_files(name: str) -> list[Path]:
    """The files that `name` stands for, sorted; empty if it must be a Hub id."""
    path = Path(name).expanduser()
    if path.is_file() or _is_saved_dataset(path):
        return [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if _is_data(file))
        if not files:
            raise FileNotFoundError(f"`dataset`: the directory {name} holds no {', '.join(READERS)} file.")
        return files
    if glob.has_magic(name):
        files = [Path(file) for file in sorted(glob.glob(str(path), recursive=True))]
        if not files:
            raise FileNotFoundError(f"`dataset`: no file matches {name}.")
        return files
    if _kind(path) in READERS or name.startswith(("/", ".", "~")):
        raise FileNotFoundError(f"`dataset`: {name} does not exist.")
    return []


def _read_file(path: Path, cache_dir: str | None) -> Source:
    if _is_saved_dataset(path):
        rows = load_from_disk(str(path))
        if not isinstance(rows, Dataset):
            raise ValueError(
                f"`dataset`: {path} holds several splits ({', '.join(rows)}): name one, as {path}/<split>."
            )
        return Source(str(path), rows)
    if _kind(path) not in READERS:
        raise ValueError(f"`dataset`: {path} is not one of {', '.join(READERS)}.")
    return READERS[_kind(path)](path, cache_dir)


def _read_json_lines(path: Path, cache_dir: str | None) -> Source:
    if path.stat().st_size == 0:
        return Source(str(path), Dataset.from_dict({"text": []}), is_json=True)
    rows = load_dataset(
        "text",
        data_files=[glob.escape(str(path))],
        split="train",
        cache_dir=cache_dir,
        encoding="utf-8-sig",
        # an undecodable byte becomes `\xNN`, which JSON rejects: the error names the line, and only that line is lost
        encoding_errors="backslashreplace",
    )
    return Source(str(path), rows, is_json=True)


def _read_json(path: Path, cache_dir: str | None) -> Source:
    """A JSON array of rows; anything else with this suffix holds JSON Lines."""
    with fsspec.open(str(path), "rt", compression="infer", encoding="utf-8-sig", errors="backslashreplace") as file:
        head = file.read(1)
        while head.isspace():
            head = file.read(1)
        if head != "[":
            return _read_json_lines(path, cache_dir)
        try:
            rows = json.loads(head + file.read())
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"`dataset`: {path} is not a JSON array: {error}. JSON Lines would lose one row only."
            ) from error
    return Source(str(path), Dataset.from_dict({"text": [json.dumps(row) for row in rows]}), is_json=True)


def _read_parquet(path: Path, cache_dir: str | None) -> Source:
    try:
        rows = load_dataset("parquet", data_files=[glob.escape(str(path))], split="train", cache_dir=cache_dir)
    except Exception as error:  # `datasets` wraps whatever Arrow raised in errors of its own
        raise ValueError(f"`dataset`: {path} can't be read as Parquet: {error.__cause__ or error}") from error
    return Source(str(path), rows)


READERS: dict[str, Callable[[Path, str | None], Source]] = {
    ".json": _read_json,
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".parquet": _read_parquet,
}

"""Rows that come one after the other, kept on disk until they are prepared: memory stays flat in their number."""

import json
import weakref
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import IO, Any

import pyarrow as pa
from datasets import Dataset
from tqdm import tqdm

from .files import naming_full_disks
from .scratch import data_directory, make_scratch


CHUNK = 2**20  # characters


def rows_on_disk(tables: Iterable[pa.Table], cache_dir: str | None) -> Dataset:
    """The rows of `tables` as a memory-mapped dataset, whose file is deleted with it.

    All tables get the columns and types of the first; without a table, a dataset without rows and columns.
    """
    parent = data_directory(cache_dir)
    directory, discard = make_scratch(parent)
    try:
        with naming_full_disks(parent):
            rows = _written(iter(tables), str(directory / "rows.arrow"))
    except BaseException:
        discard()
        raise
    weakref.finalize(rows, discard)
    return rows


def _written(tables: Iterator[pa.Table], path: str) -> Dataset:
    first = next(tables, None)
    if first is None:
        return Dataset.from_dict({})
    with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, first.schema) as writer, tqdm(desc="Reading") as bar:
        writer.write_table(first)
        bar.update(len(first))
        for table in tables:
            writer.write_table(table.cast(first.schema))
            bar.update(len(table))
    return Dataset.from_file(path)


def batched(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    items = iter(items)
    return iter(lambda: list(islice(items, size)), [])


def array_items(file: IO[str]) -> Iterator[str]:
    """The texts of the items of a JSON array, after whose `[` the file stands.

    Raises:
        json.JSONDecodeError: the array is broken; its position counts from the item before.
    """
    decoder, text, is_first = json.JSONDecoder(), "", True
    while True:
        text = _filled(file, text)
        if text[:1] == "]" or not text:
            if not text or text[1:].strip() or file.read().strip():
                raise json.JSONDecodeError("the array has no end, or something after it", text, 0)
            return
        if not is_first:
            if text[0] != ",":
                raise json.JSONDecodeError("no comma between two items", text, 0)
            text = _filled(file, text[1:])
        item, text = _item(decoder, file, text)
        yield item
        is_first = False


def _filled(file: IO[str], text: str) -> str:
    """The text without white space before it, and more of the file where nothing else was left."""
    text = text.lstrip()
    while not text and (more := file.read(CHUNK)):
        text = more.lstrip()
    return text


def _item(decoder: json.JSONDecoder, file: IO[str], text: str) -> tuple[str, str]:
    """The item that the text begins with, and the text after it."""
    size = CHUNK
    while True:
        try:
            _, end = decoder.raw_decode(text)
            if end < len(text):  # else it may be a number that goes on
                return text[:end], text[end:]
            error = json.JSONDecodeError("the array has no end", text, end)
        except json.JSONDecodeError as broken:
            error = broken
        more = file.read(size)  # twice as much every time: an item is decoded anew after each
        if not more:
            raise error
        text, size = text + more, 2 * size

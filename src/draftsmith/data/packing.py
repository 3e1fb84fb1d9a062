"""Packing of whole documents into rows of nearly equal length."""

from bisect import bisect_left, insort
from itertools import accumulate

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, List, Value

from .encoding import FEATURES


PACKED_FEATURES = Features({**FEATURES, "document_lengths": List(Value("int32"))})
TOKEN_COLUMNS = ("input_ids", "loss_mask", "turn_ids")


def best_fit_decreasing(lengths: list[int], row_length: int) -> list[list[int]]:
    """Rows of indices into `lengths`: the longest document first, each into the fullest row that still takes it.

    Documents keep their order within a row, and rows are in the order of their first documents.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), ascending
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect_left(room, (lengths[index], -1))
        free, row = room.pop(place) if place < len(room) else (row_length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        insort(room, (free - lengths[index], row))
    return sorted(sorted(row) for row in rows)


def pack_dataset(
    dataset: Dataset, row_length: int, *, window: int = 2000, cache_file_name: str | None = None
) -> Dataset:
    """Pack whole documents into rows of at most `row_length` tokens; none is ever split.

    Args:
        dataset: a prepared dataset.
        row_length: longest row, in tokens.
        window: documents packed together; rows hold documents of one window, so the order of the data stays roughly.
        cache_file_name: Arrow file for the result; None = the dataset's own cache, or memory.

    Returns:
        The same columns, and `document_lengths` (int32) per row, which add up to the row's `length`.

    Raises:
        ValueError: a document is longer than `row_length`, or its columns have unequal lengths.
    """

    def pack(table: pa.Table, indices: list[int]) -> pa.Table:
        table = table.combine_chunks()
        lengths = table["length"].to_numpy()
        _check_lengths(table, lengths, indices[0], row_length)
        rows = best_fit_decreasing(lengths.tolist(), row_length)
        order = [index for row in rows for index in row]
        ends = np.cumsum([lengths[row].sum() for row in rows])
        columns = {
            name: _lists(table[name].combine_chunks().take(pa.array(order)).flatten(), ends) for name in TOKEN_COLUMNS
        }
        document_lengths = _lists(pa.array(lengths[order], pa.int32()), list(accumulate(map(len, rows))))
        columns["length"] = pa.array(np.diff(ends, prepend=0), pa.int32())
        return pa.table(columns | {"document_lengths": document_lengths})

    return dataset.with_format("arrow").map(
        pack,
        batched=True,
        batch_size=window,
        with_indices=True,
        remove_columns=dataset.column_names,
        features=PACKED_FEATURES,
        cache_file_name=cache_file_name,
        desc=f"Packing into rows of {row_length}",
    ).with_format(None)  # fmt: skip


def _lists(values: pa.Array, ends: np.ndarray | list[int]) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array([0, *ends], pa.int32()), values)


def _check_lengths(table: pa.Table, lengths: np.ndarray, first_row: int, row_length: int) -> None:
    for name in TOKEN_COLUMNS:
        found = np.diff(table[name].combine_chunks().offsets.to_numpy())
        if (wrong := np.flatnonzero(found != lengths)).size:
            row = int(wrong[0])
            raise ValueError(
                f"row {first_row + row}: `{name}` has {found[row]} entries, but `length` is {lengths[row]}."
            )
    if (long := np.flatnonzero(lengths > row_length)).size:
        row = int(long[0])
        raise ValueError(
            f"row {first_row + row} has {lengths[row]} tokens, more than `row_length`={row_length}: raise it, or "
            "lower `max_length`."
        )

"""Packing: whole documents, nearly full rows, the same rows every time."""

import random

import pytest
from datasets import Dataset

from draftsmith.data import pack_dataset
from draftsmith.data.packing import best_fit_decreasing


def documents(lengths):
    return Dataset.from_list(
        [
            {
                "input_ids": [1000 * index + token for token in range(length)],
                "loss_mask": [token % 2 for token in range(length)],
                "turn_ids": [-1 if token % 2 == 0 else index for token in range(length)],
                "length": length,
            }
            for index, length in enumerate(lengths)
        ]
    )


def unpack(row):
    start, parts = 0, []
    for length in row["document_lengths"]:
        parts.append({name: row[name][start : start + length] for name in ("input_ids", "loss_mask", "turn_ids")})
        start += length
    assert start == row["length"] == len(row["input_ids"])
    return parts


def test_rows_hold_whole_documents_unchanged():
    dataset = documents([3, 5, 8, 1, 9, 2, 10])
    packed = pack_dataset(dataset, 10)
    parts = [part for row in packed for part in unpack(row)]
    expected = [{name: row[name] for name in ("input_ids", "loss_mask", "turn_ids")} for row in dataset]
    assert sorted(parts, key=str) == sorted(expected, key=str)
    assert packed["document_lengths"][:] == [[3, 5], [8, 2], [1, 9], [10]]
    assert packed["length"][:] == [8, 10, 10, 10]
    assert packed.column_names == ["input_ids", "loss_mask", "turn_ids", "length", "document_lengths"]


def test_selected_rows_and_windows():
    dataset = documents([3, 5, 8, 1, 9, 2]).select([5, 3, 1, 0])
    assert pack_dataset(dataset, 10, window=2)["document_lengths"][:] == [[2, 1], [5, 3]]


def test_rows_are_nearly_full_and_deterministic():
    generator = random.Random(0)
    lengths = [min(int(generator.lognormvariate(5.5, 1)) + 1, 2048) for _ in range(5000)]
    rows = best_fit_decreasing(lengths, 2048)
    assert rows == best_fit_decreasing(lengths, 2048)
    assert sorted(index for row in rows for index in row) == list(range(5000))
    assert max(sum(lengths[index] for index in row) for row in rows) <= 2048
    assert sum(lengths) / (2048 * len(rows)) > 0.99


def test_lengths_that_do_not_add_up_are_refused():
    """Case: lengths that don't add up."""
    rows = [{**row, "length": row["length"] + (index == 1)} for index, row in enumerate(documents([3, 4, 5]))]
    with pytest.raises(ValueError, match="row 1: `input_ids` has 4 entries, but `length` is 5"):
        pack_dataset(Dataset.from_list(rows), 10)
    with pytest.raises(ValueError, match="row 2 has 12 tokens, more than `row_length`=10.*`max_length`"):
        pack_dataset(documents([3, 4, 12]), 10)

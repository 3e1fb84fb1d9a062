"""How long documents are, and how much of them is supervised."""

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset


QUANTILES = {"min": 0, "p5": 5, "p25": 25, "p50": 50, "p75": 75, "p95": 95, "p99": 99, "max": 100}


@dataclass
class Distribution:
    """Of a number per document: mean and quantiles, and how many lie in `edges[i] <= number < edges[i + 1]`."""

    mean: float
    quantiles: dict[str, int]
    edges: list[int]
    counts: list[int]


@dataclass
class DatasetStatistics:
    """Size and shape of a dataset; `rows` of training are packed rows with `packing`, else documents.

    A turn is a run of supervised tokens of one answer. `supervised_share` is that of all tokens together.
    """

    rows: int
    documents: int
    tokens: int
    supervised_tokens: int
    supervised_share: float
    turns: int
    lengths: Distribution
    supervised: Distribution
    turns_per_document: Distribution


def dataset_statistics(dataset: Dataset) -> DatasetStatistics:
    """Statistics of a prepared dataset, packed or not; needs a few bytes of memory per document."""
    lengths, supervised, turns = (np.concatenate(parts) for parts in zip(*_per_document(dataset), strict=True))
    tokens, supervised_tokens = int(lengths.sum()), int(supervised.sum())
    return DatasetStatistics(
        rows=len(dataset),
        documents=len(lengths),
        tokens=tokens,
        supervised_tokens=supervised_tokens,
        supervised_share=supervised_tokens / tokens,
        turns=int(turns.sum()),
        lengths=_distribution(lengths),
        supervised=_distribution(supervised),
        turns_per_document=_distribution(turns),
    )


def count_documents(rows: Any) -> int | None:
    """Documents of training rows, packed or not; None where there is no telling how many rows there are."""
    if not isinstance(rows, Sized):
        return None
    if not isinstance(rows, Dataset) or "document_lengths" not in rows.column_names:
        return len(rows)
    packed = rows.select_columns(["document_lengths"]).with_format("arrow")
    counts = (pc.list_value_length(table["document_lengths"]) for table in packed.iter(batch_size=10_000))
    return sum(pc.sum(count).as_py() for count in counts)


def _per_document(dataset: Dataset) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Tokens, supervised tokens and turns of each document, batch by batch."""
    lengths_column = "document_lengths" if "document_lengths" in dataset.column_names else "length"
    columns = dataset.select_columns(["loss_mask", "turn_ids", lengths_column]).with_format("arrow")
    for table in columns.iter(batch_size=500):
        lengths = _flat(table[lengths_column]).astype(np.int64)
        starts = np.cumsum(lengths) - lengths
        mask, turn_ids = _flat(table["loss_mask"]) != 0, _flat(table["turn_ids"])
        begins = mask.copy()
        begins[1:] &= ~mask[:-1] | (turn_ids[1:] != turn_ids[:-1])
        begins[starts] = mask[starts]
        yield tuple(
            numbers.astype(np.int32)
            for numbers in (lengths, *(np.add.reduceat(flags, starts, dtype=np.int64) for flags in (mask, begins)))
        )  # type: ignore[misc]


def _flat(column: pa.ChunkedArray) -> np.ndarray:
    column = column.combine_chunks()
    return (column.flatten() if pa.types.is_list(column.type) else column).to_numpy()


def _distribution(numbers: np.ndarray) -> Distribution:
    """Its edges are powers of two, from the lowest range that holds a number."""
    edges = [0, *(2**power for power in range(int(numbers.max()).bit_length() + 1))]
    counts = np.histogram(numbers, edges)[0]
    first = int(np.argmax(counts > 0))
    quantiles = np.percentile(numbers, list(QUANTILES.values()), method="nearest")
    return Distribution(
        mean=float(numbers.mean()),
        quantiles={name: int(value) for name, value in zip(QUANTILES, quantiles, strict=True)},
        edges=edges[first:],
        counts=counts[first:].tolist(),
    )

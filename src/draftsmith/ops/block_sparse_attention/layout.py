"""Which part of the key axis belongs to which queries, as contiguous runs."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..transfer import ValuePerTensor, being_captured


_ranges_of = ValuePerTensor()  # of document_ids


@dataclass(frozen=True)
class Run:
    """Neighbouring queries of one document, and that document's keys."""

    batch: slice
    queries: slice
    keys: slice
    positions: Tensor  # [n], rows of the queries on the key axis, strictly ascending


@dataclass(frozen=True)
class Layout:
    """Documents and query rows of one call. Everything derived is computed once; `runs` reads values on the host."""

    document_ids: Tensor | None  # [B, T]
    query_positions: Tensor | None  # [B, Q]
    batch: int
    keys: int

    @cached_property
    def key_ranges(self) -> dict[Any, tuple[Tensor, Tensor]]:
        """What `key_ranges.py` has worked out: for this call, or where every row is a query, for all of its documents.

        So a model's layers share it. A CUDA graph shares nothing with calls outside: it must work it out by itself, of
        the documents that it is replayed on, and what it works out is there only then.
        """
        ids = self.document_ids
        if ids is None or self.query_positions is not None:
            return {}
        if (kept := _ranges_of.get(ids)) is None:
            kept = {True: {}, False: {}}
            _ranges_of.put(ids, kept)
        return kept[being_captured(ids)]

    @cached_property
    def query_documents(self) -> Tensor | None:
        """[B, Q], -1 for a padding query; None: one document without padding."""
        if self.query_positions is None:
            return self.document_ids
        rows = self.query_positions.clamp(min=0).long()
        documents = torch.zeros_like(rows) if self.document_ids is None else self.document_ids.gather(1, rows).long()
        return documents.masked_fill(self.query_positions < 0, -1)

    @cached_property
    def padding(self) -> Tensor | None:
        """[B, Q] bool, true for padding queries; None where there cannot be any."""
        return None if self.query_documents is None else self.query_documents < 0

    @cached_property
    def query_places(self) -> Tensor | None:
        """[B * Q], each query's place in the flattened [B * T] rows, B * T for padding; None: every row is a query."""
        if self.query_positions is None:
            return None
        starts = torch.arange(self.batch, device=self.query_positions.device)[:, None] * self.keys
        places = self.query_positions + starts
        return places.masked_fill(self.query_positions < 0, self.batch * self.keys).flatten()

    @cached_property
    def document_keys(self) -> list[dict[int, slice]]:
        """Key range of each document, per batch row."""
        if self.document_ids is None:
            return [{0: slice(0, self.keys)}] * self.batch
        return [_document_slices(ids, row) for row, ids in enumerate(self.document_ids)]

    @cached_property
    def runs(self) -> list[Run]:
        if self.query_documents is None:
            whole = slice(0, self.keys)
            return [Run(slice(0, self.batch), whole, whole, torch.arange(self.keys))]
        return [run for row, documents in enumerate(self.query_documents) for run in self._row_runs(row, documents)]

    def _row_runs(self, row: int, documents: Tensor) -> Iterator[Run]:
        positions = torch.arange(self.keys) if self.query_positions is None else self.query_positions[row]
        for document, queries in _segments(documents):
            if document >= 0:
                keys = self.document_keys[row][document]
                yield Run(slice(row, row + 1), queries, keys, positions[queries])

    def check_values(self) -> None:
        """Raise ValueError for ids that are not contiguous runs, or positions that do not ascend inside [0, T)."""
        _ = self.document_keys  # raises for a document that resumes
        if self.query_positions is None:
            return
        positions = self.query_positions.long()
        before = positions.cummax(1).values.roll(1, 1)
        before[:, :1] = -1
        if ((positions >= 0) & (positions <= before)).any():
            raise ValueError("`query_positions` must ascend strictly in each batch row (-1 marks a padding query)")
        if (positions >= self.keys).any():
            raise ValueError(f"`query_positions` holds {int(positions.max())}, but there are only {self.keys} keys")


def _segments(ids: Tensor) -> Iterator[tuple[int, slice]]:
    values, counts = torch.unique_consecutive(ids, return_counts=True)
    start = 0
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        yield value, slice(start, start + count)
        start += count


def _document_slices(ids: Tensor, row: int) -> dict[int, slice]:
    slices: dict[int, slice] = {}
    for document, keys in _segments(ids):
        if document in slices:
            raise ValueError(
                f"`document_ids` must be contiguous runs: row {row} resumes document {document} at {keys.start}"
            )
        if document >= 0:
            slices[document] = keys
    return slices

"""From prepared rows, packed or not, to the tensors of a batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..alignment import context_rows, row_sets, unique_document_ids
from .documents import turns_from_mask


PADDING = {"input_ids": 0, "loss_mask": 0, "turn_ids": -1, "position_ids": 0, "document_ids": -1}
STATE_COLUMNS = ("aux_hidden_states", "teacher_hidden_states")  # of rows that bring the target's states


class RowSets:
    """K ascending int64 index tensors, and the `document_ids` of their batch.

    No `Sequence`, of which a data loader would make a list, and accelerate move that: they stay on the CPU when a
    batch moves. Their lengths are read there, and reading them from a device would wait for all it has been given to
    do.
    """

    def __init__(self, rows: Sequence[torch.Tensor], document_ids: torch.Tensor):
        self._rows, self.document_ids = list(rows), document_ids

    def pin_memory(self) -> "RowSets":
        """What a data loader does to a batch, so that copies to a GPU need not wait."""
        return RowSets([rows.pin_memory() for rows in self._rows], self.document_ids)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, step):
        return self._rows[step]


@dataclass
class OnHost:
    """A tensor that stays on the CPU when its batch moves, as `RowSets` do.

    All micro-batches of an optimizer step move before the first is used, but their states are needed one by one.
    """

    tensor: torch.Tensor

    def pin_memory(self) -> "OnHost":
        return OnHost(self.tensor.pin_memory())


@dataclass
class DraftCollator:
    """Pads rows on the right and computes which (row, step) pairs are supervised.

    Args:
        ttt_steps: K, the number of training-time-test steps.
        pad_to_multiple_of: T becomes a multiple of it.
    """

    ttt_steps: int
    pad_to_multiple_of: int | None = None

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor | RowSets | OnHost]:
        """Collate rows with `input_ids` and `loss_mask`, and optionally `turn_ids` and `document_lengths`.

        Without `turn_ids` every contiguous run of a document's mask is a turn; without `document_lengths` a row is
        one document.

        Returns:
            `input_ids`, `turn_ids` (-1 outside turns), `position_ids` (from 0 in each document) and `document_ids`
            (from 0 in each row, -1 = padding), all `[B, T]` int64; `loss_mask` `[B, T]` bool; `row_sets`, K ascending
            int64 tensors of indices into the flattened `[B * T]` rows. Of rows that bring the target's states, as
            [`hidden_states.HiddenStateRows`] do: `aux_hidden_states` `[B, T, n * Ht]`, 0 where nothing depends on
            them, and `teacher_hidden_states` `[|R_0|, Ht]`, each as `OnHost`.

        Raises:
            ValueError: columns of unequal length, document lengths that don't add up, or states of other rows than
                these need; names the row of the batch.
        """
        columns = [_columns(row, number) for number, row in enumerate(rows)]
        length = max(len(row["input_ids"]) for row in columns)
        multiple = self.pad_to_multiple_of or 1
        shape = (len(rows), -(-length // multiple) * multiple)
        batch: dict[str, Any] = {name: torch.full(shape, value, dtype=torch.int64) for name, value in PADDING.items()}
        for number, row in enumerate(columns):
            for name, values in row.items():
                batch[name][number, : len(values)] = torch.from_numpy(values)
        batch["loss_mask"] = batch["loss_mask"].bool()
        batch["row_sets"] = RowSets(
            row_sets(batch["loss_mask"], batch["document_ids"], batch["turn_ids"], ttt_steps=self.ttt_steps),
            batch["document_ids"],
        )
        if "aux_hidden_states" in rows[0]:
            batch |= _states(rows, batch)
        return batch


def _states(rows: Sequence[Mapping[str, Any]], batch: Mapping[str, Any]) -> dict[str, OnHost]:
    """Each state at its place: rows bring those that are needed, in order."""
    documents = unique_document_ids(batch["document_ids"], batch["input_ids"]).flatten()
    supervised, length = batch["row_sets"][0], batch["input_ids"].shape[1]
    context = context_rows(supervised, documents)
    counts = {}
    for name, places in (("aux_hidden_states", context), ("teacher_hidden_states", supervised)):
        counts[name] = torch.bincount(places // length, minlength=len(rows)).tolist()
        for number, (row, count) in enumerate(zip(rows, counts[name], strict=True)):
            if len(row[name]) != count:
                raise ValueError(
                    f"row {number} of the batch: `{name}` has the states of {len(row[name])} rows, but {count} are "
                    "needed: they were made for other data."
                )
    first = rows[0]["aux_hidden_states"]
    aux = first.new_zeros(len(rows), length, first.shape[1])
    for number, places in enumerate(context.split(counts["aux_hidden_states"])):
        aux[number].index_copy_(0, places - number * length, rows[number]["aux_hidden_states"])
    teacher = torch.cat([row["teacher_hidden_states"] for row in rows])
    return {"aux_hidden_states": OnHost(aux), "teacher_hidden_states": OnHost(teacher)}


def _columns(row: Mapping[str, Any], number: int) -> dict[str, np.ndarray]:
    """The columns of `PADDING` for one row, unpadded, `[T]` int64 each."""
    columns = {
        name: np.asarray(row[name], dtype=np.int64) for name in ("input_ids", "loss_mask", "turn_ids") if name in row
    }
    length = len(columns["input_ids"])
    for name, values in columns.items():
        if len(values) != length:
            raise ValueError(
                f"row {number} of the batch: `{name}` has {len(values)} entries for {length} `input_ids`."
            )
    document_lengths = np.asarray(row.get("document_lengths", [length]), dtype=np.int64)
    if document_lengths.sum() != length or (document_lengths < 0).any():
        raise ValueError(
            f"row {number} of the batch: `document_lengths` {document_lengths.tolist()} add up to "
            f"{document_lengths.sum()}, but the row has {length} tokens."
        )
    starts = np.cumsum(document_lengths) - document_lengths
    if "turn_ids" not in columns:
        documents = np.split(columns["loss_mask"], starts[1:])
        columns["turn_ids"] = np.concatenate([turns_from_mask(mask) for mask in documents]).astype(np.int64)
    columns["position_ids"] = np.arange(length) - np.repeat(starts, document_lengths)
    columns["document_ids"] = np.repeat(np.arange(len(document_lengths)), document_lengths)
    return columns

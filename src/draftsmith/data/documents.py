"""One document: its token ids and the assistant turn that each token belongs to."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Document:
    """Token ids of one row, and for each the assistant turn it belongs to, -1 outside (`[T]` int32)."""

    input_ids: list[int]
    turn_ids: np.ndarray

    def cut(self, max_length: int | None) -> "Document":
        """The first `max_length` tokens; what is kept of an answer stays supervised."""
        return Document(self.input_ids[:max_length], self.turn_ids[:max_length])

    def is_supervised(self) -> bool:
        """Whether a draft step has something to learn: two tokens of one answer in a row, after a first token."""
        current, following = self.turn_ids[1:-1], self.turn_ids[2:]
        return bool(((current >= 0) & (current == following)).any())


def turns_from_mask(loss_mask: np.ndarray) -> np.ndarray:
    """Turn ids of one document (`[T]` int32, -1 outside) where every contiguous run of the mask (`[T]`) is a turn."""
    mask = loss_mask.astype(bool)
    starts = mask & ~np.concatenate([[False], mask[:-1]])
    return np.where(mask, np.cumsum(starts) - 1, -1).astype(np.int32)

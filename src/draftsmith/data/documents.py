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

    def split(self, max_length: int) -> list["Document"]:
        """Pieces of at most `max_length` tokens, each a document of its own.

        Every piece starts without context, as a server would start on it, and counts its turns from 0; a turn that is
        cut goes on as a turn of the next piece. Pieces in which nothing is supervised are left out.
        """
        pieces = []
        for start in range(0, len(self.input_ids), max_length):
            turn_ids = self.turn_ids[start : start + max_length]
            first = turn_ids[turn_ids >= 0].min(initial=2**31 - 1)
            turn_ids = np.where(turn_ids >= 0, turn_ids - first, -1).astype(np.int32)
            pieces.append(Document(self.input_ids[start : start + max_length], turn_ids))
        return [piece for piece in pieces if piece.is_supervised()]

    def is_supervised(self) -> bool:
        """Whether a draft step has something to learn: two tokens of one answer in a row, after a first token."""
        current, following = self.turn_ids[1:-1], self.turn_ids[2:]
        return bool(((current >= 0) & (current == following)).any())


def turns_from_mask(loss_mask: np.ndarray) -> np.ndarray:
    """Turn ids of one document (`[T]` int32, -1 outside) where every contiguous run of the mask (`[T]`) is a turn."""
    mask = loss_mask.astype(bool)
    starts = mask & ~np.concatenate([[False], mask[:-1]])
    return np.where(mask, np.cumsum(starts) - 1, -1).astype(np.int32)

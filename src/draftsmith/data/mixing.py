"""Which documents are kept: without duplicates, and in the proportions that were asked for."""

from collections.abc import Sequence
from typing import Literal

import numpy as np


def is_first(keys: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Bool `[N]`: the documents of the first row with each key.

    Args:
        keys: `[N]` int64, fingerprints of the documents' rows.
        rows: `[N]` int64, which row each document is of; a row may have several, next to each other.
    """
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    return rows[first][inverse] == rows


def mix(
    lengths: np.ndarray,
    keys: np.ndarray,
    sources: np.ndarray,
    weights: Sequence[float],
    strategy: Literal["undersample", "oversample"],
) -> np.ndarray:
    """Indices of the documents in which every source has its share of the tokens; the same ones every time.

    A source that needs less than it has gives the documents whose keys come first: as good as random, and mostly the
    same ones when the data grows. One that needs more repeats all its documents before any of them comes again.

    Args:
        lengths: `[N]` tokens of each document.
        keys: `[N]` int64, fingerprints of the documents' rows.
        sources: `[N]` which source each document is of.
        weights: for each source, its share of the tokens, in any unit.
        strategy: "undersample": as many tokens as there are without repeating a document. "oversample": as few as
            there are with every document in them.

    Raises:
        ValueError: a source has no document.
    """
    totals = np.bincount(sources, lengths, minlength=len(weights))
    if not totals.all():
        raise ValueError(
            f"`dataset_weights`: dataset {int(np.argmin(totals)) + 1} of {len(weights)} has no document to mix in."
        )
    scales = totals / np.asarray(weights, dtype=np.float64)
    scale = scales.min() if strategy == "undersample" else scales.max()
    chosen = []
    for source, weight in enumerate(weights):
        members = np.flatnonzero(sources == source)
        passes, rest = divmod(round(scale * weight), round(totals[source]))
        order = members[np.argsort(keys[members], kind="stable")]
        middles = np.cumsum(lengths[order]) - lengths[order] / 2  # the last one is kept if more than half of it fits
        chosen += [members] * passes + [np.sort(order[: np.searchsorted(middles, rest)])]
    return np.concatenate(chosen)

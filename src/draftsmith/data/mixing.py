"""Which documents are kept: without duplicates, and in the proportions that were asked for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .wording import counted


MAX_PASSES = 100  # so often the same documents teach nothing more


@dataclass
class DatasetShare:
    """What one entry of `dataset` gives to the training documents.

    Attributes:
        rows: how many were read.
        documents: with every repeat.
        different: without.
        share: of all training tokens.
        weight: what was asked for; None without `dataset_weights`.
    """

    name: str
    rows: int
    documents: int
    different: int
    tokens: int
    share: float
    weight: float | None = None

    def __str__(self) -> str:
        repeated = f" ({self.different:,} different)" if self.different < self.documents else ""
        weight = "" if self.weight is None else f" (weight {self.weight:g})"
        documents = counted(self.documents, "document") + repeated
        return f"{self.name}: {counted(self.rows, 'row')}, {documents}, {self.share:.1%} of the tokens{weight}"


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
        ValueError: a source has no document, would get none, or would be repeated more than `MAX_PASSES` times.
    """
    totals = np.bincount(sources, lengths, minlength=len(weights))
    if not totals.all():
        raise ValueError(
            f"`dataset_weights`: dataset {int(np.argmin(totals)) + 1} of {len(weights)} has no document to mix in."
        )
    with np.errstate(all="ignore"):  # weights may be of any size; the checks below see what comes of that
        densities = np.asarray(weights, dtype=np.float64) / max(weights) / totals
        passes = densities / (densities.max() if strategy == "undersample" else densities.min())
        passes[np.isnan(passes)] = 1.0  # 0 / 0: itself the one with the lowest
    if not passes.max() <= MAX_PASSES:
        raise ValueError(
            f"`dataset_weights`: dataset {int(np.argmax(passes)) + 1} of {len(weights)} would be repeated "
            f"{passes.max():.3g} times, more than {MAX_PASSES}: bring the weights nearer to the sizes, or use "
            "`mixture_strategy=undersample`."
        )
    chosen = []
    for source, total in enumerate(totals):
        members = np.flatnonzero(sources == source)
        whole, rest = divmod(round(passes[source] * total), round(total))
        order = members[np.argsort(keys[members], kind="stable")]
        middles = np.cumsum(lengths[order]) - lengths[order] / 2  # the last one is kept if more than half of it fits
        chosen += [members] * whole + [np.sort(order[: np.searchsorted(middles, rest)])]
        if not whole and not len(chosen[-1]):
            raise ValueError(
                f"`dataset_weights`: the share of dataset {source + 1} of {len(weights)} is less than one document of "
                "it: raise its weight, leave it out, or use `mixture_strategy=oversample`."
            )
    return np.concatenate(chosen)

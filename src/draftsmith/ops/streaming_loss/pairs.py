"""The supervised (row, step) pairs of a draft loss, and which of them a chunk of teacher rows serves."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class Chunk(NamedTuple):
    teacher: slice  # entries of R_0
    states: list[slice]  # rows of each step's states whose teachers these are
    stacked: slice  # where those rows are once all chunks are laid end to end


@dataclass(frozen=True)
class DraftPairs:
    """P pairs, numbered step by step: all of R_0, then all of R_1, ... Everything lives on the CPU."""

    row_sets: Sequence[Tensor]  # K ascending [|R_k|]

    def __post_init__(self) -> None:
        places = zip(self.rows.split(self.sizes), self.entries.split(self.sizes), strict=True)
        for step, (rows, (own, taught)) in enumerate(zip(self.row_sets, places, strict=True)):
            if (rows.diff() <= 0).any():
                raise ValueError(f"`row_sets[{step}]` must ascend strictly")
            if not (self._stand_at(own, rows) and self._stand_at(taught, rows + step)):
                raise ValueError(f"`row_sets[0]` must hold t and t + {step} for every t in `row_sets[{step}]`")

    def _stand_at(self, places: Tensor, rows: Tensor) -> bool:
        """Whether ascending `rows` are those of R_0 at `places`, where they would be inserted."""
        first = self.row_sets[0]
        return len(rows) == 0 or (int(places[-1]) < len(first) and torch.equal(first[places], rows))

    @cached_property
    def sizes(self) -> list[int]:
        return [len(rows) for rows in self.row_sets]

    @cached_property
    def steps(self) -> Tensor:
        """[P], the pair's step."""
        return torch.repeat_interleave(torch.arange(len(self.sizes)), torch.tensor(self.sizes))

    @cached_property
    def rows(self) -> Tensor:
        """[P], where in R_0 the pair's own row is."""
        return torch.cat([torch.searchsorted(self.row_sets[0], rows) for rows in self.row_sets])

    @cached_property
    def entries(self) -> Tensor:
        """[P], where in R_0 the pair's teacher is: at row t + k."""
        first = self.row_sets[0]
        return torch.cat([torch.searchsorted(first, rows + step) for step, rows in enumerate(self.row_sets)])

    def chunks(self, chunk_size: int) -> list[Chunk]:
        edges = torch.arange(
            0, max(self.sizes[0], 1) + chunk_size, chunk_size
        )  # one empty chunk where there are no pairs
        # A step's rows ascend with their teachers, so those of one chunk are a slice.
        steps = [torch.searchsorted(entries, edges) for entries in self.entries.split(self.sizes)]
        bounds = torch.stack(steps, 1).tolist()  # [chunks + 1][K]
        return [
            Chunk(slice(start, start + chunk_size), list(map(slice, low, high)), slice(sum(low), sum(high)))
            for start, low, high in zip(edges.tolist(), bounds, bounds[1:], strict=False)
        ]

    def stacking(self, chunks: Sequence[Chunk]) -> Tensor:
        """[P], the pairs in the order in which the chunks bring them."""
        numbers = torch.arange(len(self.entries)).split(self.sizes)
        return torch.cat([step[rows] for chunk in chunks for step, rows in zip(numbers, chunk.states, strict=True)])

    def students(self, chunks: Sequence[Chunk], order: Tensor) -> Tensor:  # the `stacking` of the chunks
        """[|R_0|, K], where in its chunk's stacked rows the state is that an entry teaches at a step; -1 for none."""
        places = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)))  # [P]
        starts = torch.tensor([chunk.stacked.start for chunk in chunks])
        sizes = torch.tensor([chunk.stacked.stop - chunk.stacked.start for chunk in chunks])
        places -= torch.repeat_interleave(starts, sizes)[places]
        table = torch.full((self.sizes[0], len(self.sizes)), -1)
        table[self.entries, self.steps] = places
        return table

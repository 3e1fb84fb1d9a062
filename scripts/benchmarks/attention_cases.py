"""The shapes and masks that attention is measured on, and random inputs for them."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One shape and mask. Every batch row holds the same documents and queries."""

    name: str
    batch: int
    length: int
    heads: tuple[int, int] = (32, 8)  # query heads, key-value heads
    head_dim: int = 128
    documents: tuple[int, ...] = ()  # their lengths; () = one document
    turn: tuple[int, int] | None = None  # (n, m): the last n of every m rows are queries; None = all rows
    window: int | None = None
    sinks: bool = False
    steps: tuple[int, ...] = (0, 6)  # numbers of diagonals
    flex_steps: tuple[int, ...] = ()  # of these, those FlexAttention is compiled for: 10 to 20 seconds each

    def shrunk(self, factor: int) -> "Case":
        """The same kind of mask in `factor` times fewer rows, or a few more than that."""
        if factor <= 1:
            return self
        documents = tuple(min(rows, max(3, rows // factor)) for rows in self.documents)
        turn = None
        if self.turn is not None:
            period = max(4, self.turn[1] // factor)
            turn = (period * self.turn[0] // self.turn[1], period)
        return replace(
            self,
            length=sum(documents) or max(1, self.length // factor),
            documents=documents,
            turn=turn,
            window=None if self.window is None else max(2, self.window // factor),
        )

    def positions(self) -> Tensor:
        """[Q], the row of each query."""
        rows = torch.arange(self.length)
        return rows if self.turn is None else rows[rows % self.turn[1] >= self.turn[1] - self.turn[0]]

    def document_of_rows(self) -> Tensor:
        """[T]"""
        lengths = torch.tensor(self.documents or (self.length,))
        return torch.arange(len(lengths)).repeat_interleave(lengths)

    def visible_pairs(self, step: int) -> int:
        """(query, key) pairs of one head, diagonals included."""
        lengths = torch.tensor(self.documents or (self.length,))
        positions = self.positions()
        starts = (lengths.cumsum(0) - lengths)[self.document_of_rows()[positions]]
        seen = (positions - starts + 1).clamp(max=self.window or self.length)
        return self.batch * (int(seen.sum()) + step * len(positions))

    def forward_flops(self, step: int) -> int:
        """Of useful work: two products of `head_dim` per visible pair."""
        return 4 * self.head_dim * self.heads[0] * self.visible_pairs(step)


@dataclass
class Inputs:
    """Tensors of one case at one step, laid out as the model gives them: [B, T, H, D] viewed as [B, H, T, D]."""

    case: Case
    step: int
    query: Tensor  # [B, Hq, Q, D]
    key: Tensor  # [B, Hkv, T, D]
    value: Tensor
    diagonal_keys: list[Tensor]  # J x [B, Hkv, Q, D]
    diagonal_values: list[Tensor]
    sinks: list[Tensor]  # one [Hq], or none
    grad_out: Tensor  # [B, Hq, Q, D]
    positions: Tensor  # [Q]
    documents: Tensor  # [T]

    @property
    def tensors(self) -> list[Tensor]:
        """All that receive gradients."""
        return [self.query, self.key, self.value, *self.diagonal_keys, *self.diagonal_values, *self.sinks]


def make_inputs(case: Case, step: int, device: torch.device, dtype: torch.dtype) -> Inputs:
    positions = case.positions().to(device)

    def random(heads: int, rows: int) -> Tensor:
        states = torch.randn(case.batch, rows, heads, case.head_dim, device=device, dtype=dtype)
        return states.transpose(1, 2).requires_grad_()

    query_heads, kv_heads = case.heads
    queries = len(positions)
    return Inputs(
        case=case,
        step=step,
        query=random(query_heads, queries),
        key=random(kv_heads, case.length),
        value=random(kv_heads, case.length),
        diagonal_keys=[random(kv_heads, queries) for _ in range(step)],
        diagonal_values=[random(kv_heads, queries) for _ in range(step)],
        sinks=[torch.randn(query_heads, device=device, dtype=dtype).requires_grad_()] * case.sinks,
        grad_out=random(query_heads, queries).detach(),
        positions=positions,
        documents=case.document_of_rows().to(device),
    )


_MAIN = {"steps": (0, 3, 6), "flex_steps": (0, 3, 6)}
_GPT_OSS = {"heads": (64, 8), "head_dim": 64}
MAIN_CASES = [
    Case("2x8192", 2, 8192, **_MAIN),
    Case("1x32768", 1, 32768, **_MAIN),
    Case("packed 2x8x1024", 2, 8192, documents=(1024,) * 8, **_MAIN),
]
CASES = [
    *MAIN_CASES,
    Case("queries 25% of 1x32768", 1, 32768, turn=(256, 1024)),
    Case("documents 5000,3,3997,7384", 1, 16384, documents=(5000, 3, 3997, 7384), flex_steps=(6,)),
    Case("window 1024 in 1x32768", 1, 32768, window=1024, flex_steps=(6,)),
    Case("gpt-oss 2x8192", 2, 8192, **_GPT_OSS, flex_steps=(6,)),
    Case("gpt-oss 2x8192, window 128", 2, 8192, **_GPT_OSS, window=128, flex_steps=(6,)),
    Case("gpt-oss 2x8192, sinks", 2, 8192, **_GPT_OSS, sinks=True, flex_steps=(0,)),
    Case("gpt-oss 2x8192, window 128, sinks", 2, 8192, **_GPT_OSS, window=128, sinks=True, flex_steps=(0,)),
    Case("1x131072", 1, 131072, steps=(6,), flex_steps=(6,)),
]

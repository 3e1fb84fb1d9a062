"""Some rows of a tensor, each at most once."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def select_rows(
    states: Tensor,
    rows: Tensor,  # [n] integers, none twice
    dim: int,
) -> Tensor:
    """`states.index_select(dim, rows)`, its gradient a copy: indexing sorts the rows, in case one came twice."""
    return _SelectRows.apply(states, rows, dim)


class _SelectRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, rows: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape, ctx.dim = states.shape, dim
        return states.index_select(dim, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).index_copy_(ctx.dim, rows, grad), None, None

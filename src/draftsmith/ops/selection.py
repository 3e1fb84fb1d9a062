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
        return put_rows(grad.new_zeros(ctx.shape), ctx.dim, rows, grad), None, None


def put_rows(states: Tensor, dim: int, rows: Tensor, values: Tensor) -> Tensor:
    """`states.index_copy_(dim, rows, values)`, in words of eight bytes where memory allows: it moves one at a time."""
    values = values.contiguous()
    if dim != states.dim() - 1 and _has_words(states) and _has_words(values):
        states.view(torch.int64).index_copy_(dim, rows, values.view(torch.int64))
    else:
        states.index_copy_(dim, rows, values)
    return states


def _has_words(tensor: Tensor) -> bool:
    is_whole = tensor.shape[-1] * tensor.element_size() % 8 == 0 and tensor.data_ptr() % 8 == 0
    return is_whole and tensor.is_contiguous() and not tensor.is_complex()

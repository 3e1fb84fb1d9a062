"""Gradients of keys and values that several calls share, summed in fp32."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..precision import accumulation_dtype


class SharedKeys(NamedTuple):
    key: Tensor  # as given
    value: Tensor
    key_sum: Tensor  # fp32 stand-ins of the same shapes, of one element of memory: they receive the gradients
    value_sum: Tensor


def share_keys(key: Tensor, value: Tensor) -> SharedKeys:
    """For keys and values that several calls read, such as the step-0 ones of an unroll.

    Autograd would sum the calls' gradients in the keys' own dtype. Given `key_gradients=(key_sum, value_sum)`,
    `block_sparse_flash_attention` returns fp32 gradients for those instead, and they are rounded once, here.
    """
    return SharedKeys(*_Shared.apply(key, value))


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtype = key.dtype
        zeros = key.new_zeros(2, dtype=accumulation_dtype(key.dtype))
        return key.view_as(key), value.view_as(value), zeros[0].expand_as(key), zeros[1].expand_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        key, value, key_sum, value_sum = gradients
        return _rounded(key, key_sum, ctx.dtype), _rounded(value, value_sum, ctx.dtype)


def _rounded(gradient: Tensor | None, total: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if total is None:
        return gradient
    return (total if gradient is None else total + gradient).to(dtype)

"""Gradients of keys and values that several calls share, summed in fp32."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class KeyGradients:
    """The step-0 keys and values of an unroll get a gradient from every step; autograd would sum them in bf16.

    `track` the key and value once and hand this object to every `block_sparse_flash_attention` that reads them.
    """

    def __init__(self) -> None:
        self._sums: tuple[Tensor, Tensor] | None = None
        self._backward = -1  # id of the backward pass that the sums belong to

    def track(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return _Tracked.apply(self, key, value)

    def add(self, grad_key: Tensor, grad_value: Tensor) -> None:
        current = torch._C._current_graph_task_id()
        if self._sums is None or self._backward != current:  # sums of a pass that did not reach the keys are dropped
            self._sums, self._backward = (grad_key, grad_value), current
        else:
            self._sums[0].add_(grad_key)
            self._sums[1].add_(grad_value)

    def take(self) -> tuple[Tensor, Tensor] | None:
        sums, self._sums = self._sums, None
        return sums


class _Tracked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: KeyGradients, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # the calls that add to `gradients` return None
        ctx.gradients, ctx.dtype = gradients, key.dtype
        return key.view_as(key), value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *others: Tensor | None) -> tuple[Tensor | None, ...]:
        sums = ctx.gradients.take()
        if sums is None:
            return None, *others
        return None, *(
            (total if other is None else total.add_(other)).to(ctx.dtype)
            for total, other in zip(sums, others, strict=True)
        )

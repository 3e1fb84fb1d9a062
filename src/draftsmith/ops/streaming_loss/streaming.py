"""The autograd side of losses that compute their gradients together with their value."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..transfer import to_device
from .dispatch import row_functions


class Computed(NamedTuple):
    total: Tensor  # scalar
    gradients: Sequence[Tensor | None]  # of `total`, one per input; None where not needed
    extra: Any = None  # handed through, without a gradient


Compute = Callable[[Sequence[bool]], Computed]  # which inputs need a gradient -> value and gradients


def scaled_loss(compute: Compute, scale: Tensor, inputs: Sequence[Tensor | None]) -> tuple[Tensor, Any]:
    """(total * scale, extra), differentiable once in `inputs`: `compute` runs now and brings the gradients along."""
    with without_autocast(scale):
        if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs):
            return _GradientsInForward.apply(compute, scale, *inputs)
        with torch.no_grad():
            computed = compute([False] * len(inputs))
            return computed.total * scale, computed.extra


def without_autocast(tensor: Tensor) -> torch.autocast:
    """The losses choose their dtypes themselves."""
    return torch.autocast(tensor.device.type, enabled=False)


class _GradientsInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Compute, scale: Tensor, *inputs: Tensor | None) -> tuple[Tensor, Any]:
        computed = compute(ctx.needs_input_grad[2:])
        ctx.gradients, ctx.scale = computed.gradients, scale
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in inputs]
        return computed.total * scale, computed.extra

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("a streaming loss keeps its gradients for one backward only: compute the loss again")
        gradients, ctx.gradients = ctx.gradients, None  # scaled in place, so they serve once
        scale = grad * ctx.scale
        scaled = [
            None if gradient is None else row_functions(gradient).scaled(gradient, scale, dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return None, None, *scaled


def inverse_count(num_items: int | Tensor, like: Tensor) -> Tensor:
    """1 / max(num_items, 1) on `like`'s device, without a host synchronisation."""
    if not isinstance(num_items, Tensor):
        return like.new_full((), 1 / max(num_items, 1))
    return to_device(num_items, like.device, like.dtype).clamp(min=1).reciprocal()

"""What is left between matrix products, as one kernel each way on CUDA."""

import importlib
from types import ModuleType
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .kernels import has_kernels


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, of two tensors of one shape and dtype; keeps nothing but these for its backward."""
    kernels = _kernels(gate)
    return F.silu(gate) * up if kernels is None else _SwiGLU.apply(gate, up, kernels)


def rotated(
    states: Tensor,  # [B, S, heads, d], as a projection leaves them
    cos: Tensor,  # [B, S, d]
    sin: Tensor,
) -> Tensor:
    """Rotary embedding; keeps nothing but the tables for its backward, which give no gradient."""
    kernels = _kernels(states)
    if kernels is not None:
        return _Rotated.apply(states, cos, sin, kernels)
    low, high = states.chunk(2, dim=-1)
    return states * cos[:, :, None] + torch.cat([-high, low], dim=-1) * sin[:, :, None]


@overload
def rms_norm(states: Tensor, weight: Tensor, eps: float, residual: None = None) -> Tensor: ...
@overload
def rms_norm(states: Tensor, weight: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]: ...
def rms_norm(states, weight, eps, residual=None):
    """RMS norm of `states` `[..., H]`; with a `residual` of that shape, the sum of both, and this normed.

    `weight` `[H]` may have any dtype, the normed states have that of what is normed. Keeps what is normed, the weight
    itself and an fp32 of each row for its backward.
    """
    if weight.shape != states.shape[-1:] or residual is not None and residual.shape != states.shape:
        shapes = [list(tensor.shape) for tensor in (states, weight, residual) if tensor is not None]
        raise ValueError(
            f"`states`, `weight` and `residual` have the shapes {shapes}: [..., H], [H] and [..., H] fit."
        )
    kernels = _kernels(states)
    if kernels is not None and states.shape[-1] <= kernels.MAX_NORM_WIDTH:
        if residual is None or residual.dtype == states.dtype:
            return _RMSNorm.apply(states, residual, weight, eps, kernels)
    if residual is not None:
        total = residual + states
        return total, rms_norm(total, weight, eps)
    # Neither an fp32 master weight nor autocast may turn the activations fp32.
    return F.rms_norm(states, weight.shape, weight.to(states.dtype), eps).to(states.dtype)


def _kernels(tensor: Tensor) -> ModuleType | None:
    return importlib.import_module(".pointwise_triton", __package__) if has_kernels(tensor) else None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kernels: ModuleType) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.kernels = kernels
        product = torch.empty_like(gate)
        with torch.cuda.device_of(gate):
            kernels.swiglu(gate, up, product)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        with torch.cuda.device_of(gate):
            ctx.kernels.swiglu_backward(grad.contiguous(), gate, up, grad_gate, grad_up)
        return grad_gate, grad_up, None


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, cos: Tensor, sin: Tensor, kernels: ModuleType) -> Tensor:
        cos, sin = (table.expand(states.shape[0], -1, -1).flatten(0, 1).contiguous() for table in (cos, sin))
        ctx.save_for_backward(cos, sin)
        ctx.kernels = kernels
        return _rotate(states, cos, sin, kernels, backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, ctx.kernels, backward=True), None, None, None


def _rotate(states: Tensor, cos: Tensor, sin: Tensor, kernels: ModuleType, *, backward: bool) -> Tensor:
    """[B, S, heads, d] by tables [B * S, d]"""
    lines = states if states.stride(-1) == 1 else states.contiguous()
    out = torch.empty(states.shape, dtype=states.dtype, device=states.device)
    with torch.cuda.device_of(states):
        kernels.rotate(lines.flatten(0, 1), cos, sin, out.flatten(0, 1), backward=backward)
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, residual: Tensor | None, weight: Tensor, eps: float, kernels: ModuleType
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.kernels = kernels
        lines, residual = states.contiguous(), _contiguous(residual)
        normed = torch.empty_like(lines)
        total = None if residual is None else torch.empty_like(lines)
        rstd = torch.empty(states.shape[:-1], dtype=torch.float32, device=states.device)
        with torch.cuda.device_of(states):
            kernels.rms_norm(lines, residual, weight.contiguous(), eps, total, normed, rstd)
        # Not copies: ZeRO-3 empties a parameter and fills it again, and what a view shows is kept anyway.
        ctx.save_for_backward(states if total is None else total, weight, rstd)
        return normed if total is None else (total, normed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_total, grad = grads if len(grads) == 2 else (None, *grads)
        grad_states, grad_weight = grad_total, None
        if grad is not None:
            total, weight, rstd = ctx.saved_tensors
            grad = grad.contiguous()
            grad_states = torch.empty_like(grad) if any(ctx.needs_input_grad[:2]) else None
            with torch.cuda.device_of(grad):
                grad_weight = ctx.kernels.rms_norm_backward(
                    grad, _contiguous(grad_total), total.contiguous(), weight.contiguous(), rstd, grad_states
                ).to(weight.dtype)
        return grad_states, grad_states if ctx.needs_input_grad[1] else None, grad_weight, None, None


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()

"""What is left between matrix products, as one kernel each way on CUDA."""

import importlib
from types import ModuleType
from typing import Any

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

"""What is left between matrix products, as one kernel each way on CUDA."""

import functools
import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def fused(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function` of tensors, compiled on CUDA for all lengths at once; `TORCH_COMPILE_DISABLE=1` leaves it as it is.

    The compiled backward recomputes what it can from the inputs, so that these are all that is kept for it.
    """

    @functools.cache
    def compiled() -> Callable[..., Tensor]:
        return torch.compile(function, dynamic=True)

    @functools.wraps(function)
    def call(*tensors: Tensor) -> Tensor:
        return compiled()(*tensors) if _can_compile(tensors[0].device.type) else function(*tensors)

    return call


@functools.cache
def _can_compile(device_type: str) -> bool:
    return device_type == "cuda" and importlib.util.find_spec("triton") is not None


@fused
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up"""
    return F.silu(gate) * up

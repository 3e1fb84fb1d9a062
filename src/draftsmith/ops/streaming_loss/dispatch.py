"""Which implementation of the row functions serves a chunk of logits."""

import functools
import importlib
import importlib.util
from types import ModuleType

import torch
from torch import Tensor

from . import rows


KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def row_functions(logits: Tensor) -> ModuleType:
    """`triton.py` on CUDA, one kernel per chunk; else `rows.py`, plain PyTorch."""
    return importlib.import_module(".triton", __package__) if has_row_kernels(logits) else rows


def has_row_kernels(logits: Tensor) -> bool:
    return logits.is_cuda and logits.dtype in KERNEL_DTYPES and _triton_is_installed()


@functools.cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None

"""Which implementation of the row functions serves a chunk of logits."""

import importlib
from types import ModuleType

from torch import Tensor

from ..kernels import has_kernels
from . import rows


def row_functions(logits: Tensor) -> ModuleType:
    """`triton.py` on CUDA, one kernel per chunk; else `rows.py`, plain PyTorch."""
    return importlib.import_module(".triton", __package__) if has_kernels(logits) else rows

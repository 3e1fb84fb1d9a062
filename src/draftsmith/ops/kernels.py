"""Whether a tensor is served by our Triton kernels."""

import functools
import importlib.util

import torch
from torch import Tensor


KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def has_kernels(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype in KERNEL_DTYPES and _triton_is_installed()


@functools.cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None

"""The dtypes arithmetic runs in, given the dtype tensors are stored in."""

from functools import cache

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """dtype of softmax arithmetic, losses and sums: fp32, or fp64 for fp64 inputs."""
    return torch.promote_types(dtype, torch.float32)


def matmul_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """dtype of matrix products of `dtype` tensors: `dtype`, or fp32 on a CPU that lacks instructions for it.

    Such CPUs (AVX2) multiply bf16 matrices 10 to 100 times slower than fp32 ones.
    """
    if device.type == "cpu" and dtype in (torch.bfloat16, torch.float16) and not _cpu_multiplies(dtype):
        return torch.float32
    return dtype


@cache
def _cpu_multiplies(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.ops.mkldnn._is_mkldnn_fp16_supported()

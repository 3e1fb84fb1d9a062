"""Tensors on their way from the host to a device."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """`tensor.to(device, dtype)`, queued behind the device's work.

    From memory that is not pinned, the copy of more than 64 KiB would make the host wait for all of that work first.
    """
    if tensor.is_cpu and device.type == "cuda" and tensor.numel() > 0:
        tensor = tensor.to(dtype or tensor.dtype).pin_memory()
    return tensor.to(device, dtype or tensor.dtype, non_blocking=True)

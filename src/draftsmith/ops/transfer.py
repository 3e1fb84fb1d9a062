"""Between host and device, without one waiting for the other."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


_host_copies = WeakTensorKeyDictionary()  # device tensor -> (its version, the same values on the host)


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """`tensor.to(device, dtype)`, queued behind the device's work.

    From memory that is not pinned, the copy of more than 64 KiB would make the host wait for all of that work first.
    """
    if tensor.is_cpu and device.type == "cuda" and tensor.numel() > 0:
        tensor = tensor.to(dtype or tensor.dtype).pin_memory()
    return tensor.to(device, dtype or tensor.dtype, non_blocking=True)


def remember_on_host(tensor: Tensor, values: Tensor) -> None:
    """Spare `on_host` from waiting for the device: `values` are those of `tensor`, as long as it is not changed."""
    if not tensor.is_cpu and not tensor.is_inference():  # inference tensors do not count their changes
        _host_copies[tensor] = tensor._version, values


def known_on_host(tensor: Tensor) -> Tensor | None:
    """The values of `tensor` on the host, if no waiting is needed for them."""
    if tensor.is_cpu:
        return tensor
    version, values = _host_copies.get(tensor, (None, None))
    return values if not tensor.is_inference() and version == tensor._version else None


def derived(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """`function(tensor)`; what the host knows of `tensor` it then knows of the result, too."""
    result = function(tensor)
    if not result.is_cpu and (known := known_on_host(tensor)) is not None:
        remember_on_host(result, function(known))
    return result


def on_host(tensor: Tensor) -> Tensor:
    known = known_on_host(tensor)
    return tensor.cpu() if known is None else known

"""Between host and device, without one waiting for the other."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class ValuePerTensor:
    """What is worked out of a tensor once, as long as it lives unchanged."""

    def __init__(self) -> None:
        self._kept = WeakTensorKeyDictionary()  # tensor -> (its version, the value)

    def get(self, tensor: Tensor) -> Any:
        """None if there is no value, or one of what the tensor held before."""
        if tensor.is_inference():  # such tensors do not count their changes
            return None
        version, value = self._kept.get(tensor, (None, None))
        return value if version == tensor._version else None

    def put(self, tensor: Tensor, value: Any) -> None:
        if not tensor.is_inference():
            self._kept[tensor] = tensor._version, value


_host_copies = ValuePerTensor()  # of device tensors


def being_captured(tensor: Tensor) -> bool:
    """Whether what is done with `tensor` is being recorded as a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """`tensor.to(device, dtype)`, queued behind the device's work.

    From memory that is not pinned, the copy of more than 64 KiB would make the host wait for all of that work first.
    """
    tensor = tensor.to(dtype or tensor.dtype)
    if tensor.is_cpu and device.type == "cuda" and tensor.numel() > 0:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def remember_on_host(tensor: Tensor, values: Tensor) -> None:
    """Spare `on_host` from waiting for the device: `values` are those of `tensor`, as long as it is not changed."""
    if not tensor.is_cpu:
        _host_copies.put(tensor, values)


def known_on_host(tensor: Tensor) -> Tensor | None:
    """The values of `tensor` on the host, if no waiting is needed for them."""
    return tensor if tensor.is_cpu else _host_copies.get(tensor)


def derived(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """`function(tensor)`; what the host knows of `tensor` it then knows of the result, too."""
    result = function(tensor)
    if not result.is_cpu and (known := known_on_host(tensor)) is not None:
        remember_on_host(result, function(known))
    return result


def on_host(tensor: Tensor) -> Tensor:
    known = known_on_host(tensor)
    return tensor.cpu() if known is None else known

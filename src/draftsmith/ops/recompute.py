"""Cheap tensors that a backward pass makes again instead of keeping them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def made_again(
    tensor: Tensor, make: Callable[[], Tensor], *, parameters: Iterable[Tensor] = (), enabled: bool = True
) -> Iterator[None]:
    """What runs inside keeps `make` for its backward where it would keep `tensor`, or a view of all of it.

    Of `parameters` it keeps a reference alone: ZeRO-3 takes their values away after their module's forward and brings
    them back, elsewhere in memory, before its backward. Not `enabled` inside `torch.utils.checkpoint`, whose own hooks
    these would replace.
    """
    if not enabled:
        yield
        return
    dtype, place = tensor.dtype, _place(tensor)
    by_place = {_place(parameter): parameter for parameter in parameters}

    def pack(kept: Tensor) -> Tensor | Callable[[], Tensor]:
        size, stride = kept.size(), kept.stride()
        if _place(kept) == place and kept.is_contiguous():
            return lambda: make().to(dtype).view(size)  # autocast is over by then
        parameter = by_place.get(_place(kept))
        if parameter is None:
            return kept
        return lambda: parameter.detach().as_strided(size, stride, parameter.storage_offset())

    def unpack(kept: Tensor | Callable[[], Tensor]) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()

"""Cheap tensors that a backward pass makes again instead of keeping them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def made_again(tensor: Tensor, make: Callable[[], Tensor], *, enabled: bool = True) -> Iterator[None]:
    """What runs inside keeps `make` for its backward where it would keep `tensor`, or a view of all of it.

    Not `enabled` inside `torch.utils.checkpoint`, whose own hooks these would replace.
    """
    if not enabled:
        yield
        return
    place, dtype = (tensor.data_ptr(), tensor.numel()), tensor.dtype

    def pack(kept: Tensor) -> Tensor | torch.Size:
        is_it = (kept.data_ptr(), kept.numel()) == place and kept.is_contiguous()
        return kept.shape if is_it else kept

    def unpack(kept: Tensor | torch.Size) -> Tensor:
        return make().to(dtype).view(kept) if isinstance(kept, torch.Size) else kept  # autocast is over by then

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield

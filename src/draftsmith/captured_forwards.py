"""CUDA graphs for the forward of a frozen target, only while it makes states for training."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftsmith import cuda_graphs


logger = logging.getLogger(__name__)

MAX_GRAPHS = 8  # each keeps its states; where shapes are many, few of them come again


class CapturedForwards:
    """Runs a forward as it is for the first batch of a shape, and replays it as a graph from the second one on.

    A graph reads its batch from buffers that no code has seen before it was captured. So it cannot hold what the host
    knew of one batch's documents: a forward that needs to know them fails to be captured, and goes on without graphs.

    Args:
        name: of the model, for the warning that says so.
    """

    def __init__(self, name: str):
        self._name = name
        self._seen: set[tuple[torch.Size, ...]] = set()
        self._graphs: dict[tuple[torch.Size, ...], Callable[..., Any]] = {}
        self._pool: Any = None  # of all graphs, since they are replayed one after another
        self._failed = False

    def run(self, forward: Callable[..., Any], *batch: Tensor) -> Any:
        """The result of `forward(*batch)`, a dataclass of tensors, which no later call overwrites.

        `forward` must be the same in every call and do nothing beside its result. It runs as it is on the CPU, and for
        further shapes once there are `MAX_GRAPHS`.
        """
        shapes = tuple(tensor.shape for tensor in batch)
        comes_again = shapes in self._seen
        self._seen.add(shapes)
        if comes_again and shapes not in self._graphs and self._may_capture(batch[0].device):
            self._capture(shapes, forward, batch)
        return self._graphs.get(shapes, forward)(*batch)

    def _may_capture(self, device: torch.device) -> bool:
        return not self._failed and len(self._graphs) < MAX_GRAPHS and cuda_graphs.exist_on(device)

    def _capture(self, shapes: tuple[torch.Size, ...], forward: Callable[..., Any], batch: tuple[Tensor, ...]) -> None:
        buffers = [tensor.clone() for tensor in batch]
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.device_of(batch[0]):  # graphs are captured on the current device
                replay = cuda_graphs.capture(lambda: forward(*buffers), batch[0].device, self._pool)
        except RuntimeError as error:
            self._failed = True
            self._graphs.clear()  # it may have been their memory that was missing
            reason = str(error).partition("\n")[0]
            logger.warning("Running `%s` without CUDA graphs, since capturing one failed: %s", self._name, reason)
            return

        def run(*batch: Tensor) -> Any:
            for buffer, tensor in zip(buffers, batch, strict=True):
                buffer.copy_(tensor)
            result = replay()
            return replace(result, **{name: tensor.clone() for name, tensor in vars(result).items()})

        self._graphs[shapes] = run

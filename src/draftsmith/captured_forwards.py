"""CUDA graphs for the forward of a frozen target, only while it makes states for training."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftsmith import cuda_graphs


logger = logging.getLogger(__name__)

MAX_GRAPHS = 8  # each keeps its states; where shapes are many, few of them come again
MULTIPLE = 64  # rows end where the next document did not fit: mostly within so many tokens of the same length


class CapturedForwards:
    """Runs a forward as it is for the first batch of a shape, and replays it as a graph from the second one on.

    A graph reads its batch from buffers that no code has seen before it was captured. So it cannot hold what the host
    knew of one batch's documents: a forward that needs to know them fails to be captured, and goes on without graphs.

    Args:
        name: of the model, for the warning that says so.
    """

    def __init__(self, name: str):
        self._name = name
        self._seen: set[torch.Size] = set()
        self._graphs: dict[torch.Size, Callable[..., Any]] = {}
        self._pool: Any = None  # of all graphs, since they are replayed one after another
        self._failed = False

    def run(self, forward: Callable[..., Any], input_ids: Tensor, document_ids: Tensor) -> Any:
        """The result of `forward(input_ids, document_ids)`, a dataclass of tensors, which no later call overwrites.

        `forward` must be the same in every call and do nothing beside its result. It runs as it is on the CPU, and for
        further shapes once there are `MAX_GRAPHS`. On a GPU it is given padding, document -1, up to `MULTIPLE` tokens.

        Args:
            input_ids, document_ids: [B, T] int64. All results are [B, T, ..].
        """
        if not cuda_graphs.exist_on(input_ids.device) or self._failed:
            return forward(input_ids, document_ids)
        length = input_ids.shape[1]
        if padding := -length % MULTIPLE:
            input_ids = pad(input_ids, (0, padding))
            document_ids = pad(document_ids, (0, padding), value=-1)
        result = self._run(forward, input_ids, document_ids)
        return replace(result, **{name: tensor[:, :length].contiguous() for name, tensor in vars(result).items()})

    def _run(self, forward: Callable[..., Any], *batch: Tensor) -> Any:
        shape = batch[0].shape
        comes_again = shape in self._seen
        self._seen.add(shape)
        if comes_again and shape not in self._graphs and len(self._graphs) < MAX_GRAPHS:
            self._capture(shape, forward, batch)
        return self._graphs.get(shape, forward)(*batch)

    def _capture(self, shape: torch.Size, forward: Callable[..., Any], batch: tuple[Tensor, ...]) -> None:
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

        self._graphs[shape] = run

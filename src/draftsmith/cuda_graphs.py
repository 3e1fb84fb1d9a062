"""CUDA graphs: what a GPU runs in less time than the host needs to launch it, launched at once."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch


Outcome = TypeVar("Outcome")


def exist_on(device: torch.device) -> bool:
    return device.type == "cuda"


def capture(function: Callable[[], Outcome], device: torch.device, pool: Any = None) -> Callable[[], Outcome]:
    """Record what `function` launches on `device`, the current one, after a call that compiled what it needs.

    Args:
        function: reads tensors that stay where they are, and nothing of them on the host.
        pool: `torch.cuda.graph_pool_handle()` of graphs that share their memory, none of them replayed beside another.

    Returns:
        What replays it, and returns the outcome of the recorded call: the same tensors each time, with new values.

    Raises:
        RuntimeError: `function` waits for the device, or memory is out. Random numbers and later captures are none the
            worse.
    """
    graph, generator_state = torch.cuda.CUDAGraph(), torch.cuda.get_rng_state(device)
    try:
        # Other threads may pin memory meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            outcome = function()
    except BaseException:
        _free_generator(device, generator_state)
        raise

    def replay() -> Outcome:
        graph.replay()
        return outcome

    return replay


def _free_generator(device: torch.device, state: torch.Tensor) -> None:
    """A capture that failed leaves the device's generator in it for good: every later random number would raise."""
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(torch.Generator(device).graphsafe_get_state())
    torch.cuda.set_rng_state(state, device)

"""vLLM's connector of hidden states for its CPU build, which has no CUDA streams, events or pinned memory.

Named by `kv_connector_module_path` in the server's command. Only the copy out of the cache is other: it is done when
it is asked for.
"""

from contextlib import nullcontext
from unittest import mock

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import ExampleHiddenStatesConnector


_empty_like = torch.empty_like


class DoneAtOnce:
    """A stream or an event of a device that has finished whatever it was given."""

    def record(self, stream=None) -> None: ...

    def wait_event(self, event) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    def _submit_async_write(self, pending) -> None:
        with (
            mock.patch.multiple(torch.cuda, Stream=DoneAtOnce, Event=DoneAtOnce, stream=nullcontext),
            mock.patch.object(torch, "empty_like", lambda tensor, device, pin_memory: _empty_like(tensor)),
        ):
            super()._submit_async_write(pending)

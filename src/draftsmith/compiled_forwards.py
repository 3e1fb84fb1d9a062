"""`torch.compile` for the layers of a frozen target, only while it makes states for training."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from draftsmith.transformers_hooks import ATTENTION_NAME, block_sparse_flash_attention_forward


class CompiledForwards:
    """A context in which modules run compiled, each for all lengths at once, so that a batch compiles nothing new.

    Our attention is left out: it reads memory addresses and picks kernels. What the compiler fails on, it reports and
    leaves as it is. So is everything outside the context, where rows come one by one and keys are cached.
    """

    def __init__(self, modules: Iterable[nn.Module]):
        uncompiled = torch.compiler.disable(block_sparse_flash_attention_forward)
        AttentionInterface.register(ATTENTION_NAME, uncompiled)
        self._compiled: list[tuple[Any, Any]] = [
            (module, torch.compile(module.forward, dynamic=True)) for module in modules
        ]
        self._originals: list[Any] = []
        self._forgiving = torch._dynamo.config.patch(suppress_errors=True)

    def __enter__(self) -> None:
        self._forgiving.__enter__()
        self._originals = [vars(module).get("forward") for module, _ in self._compiled]
        for module, compiled in self._compiled:
            module.forward = compiled

    def __exit__(self, *error: Any) -> None:
        self._forgiving.__exit__(*error)
        for (module, _), original in zip(self._compiled, self._originals, strict=True):
            if original is None:
                del module.forward
            else:  # of accelerate, which moves inputs between devices
                module.forward = original

"""The engines by name, and which of them serves a call.

`triton` computes everything; `fa4`, `cudnn` and `sdpa` compute the causal, same-document, windowed part, (out0, lse0)
with 0 and -inf where a query sees no step-0 key, and a merge adds diagonals and sinks. Their backward gets the merged
(out, lse) and so returns the exact gradients of its own part: its probabilities are exp(score - lse), and
rowsum(grad_out * out) covers all parts.
"""

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from . import cudnn, fa4
from .layout import Layout
from .merge import MergeGradients


logger = logging.getLogger(__name__)

# The first that does not refuse a call serves it.
PREFERENCES = {"cuda": ("fa4", "cudnn", "triton", "reference"), "cpu": ("sdpa",)}
MERGES = {"fa4": "merge_triton", "cudnn": "merge_triton", "sdpa": "merge"}
IMPLEMENTATIONS = ("fa4", "cudnn", "triton", "sdpa", "reference")


class Engine(NamedTuple):
    """forward(query, key, value, diagonal_keys, diagonal_values, sinks, layout, *, window, scale) -> out, lse.
    backward(grad_out, <those six>, out, lse, layout, *, window, scale, key_dtype) -> gradients, grad_key, grad_value.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[MergeGradients, Tensor, Tensor]]
    refuses: Callable[[Tensor, Layout, int | None], str | None]  # the reason


@functools.cache
def load(name: str) -> Engine:
    module = importlib.import_module(f".{name}", __package__)
    if name not in MERGES:
        return Engine(module.forward, module.backward, module.refuses)
    merge = importlib.import_module(f".{MERGES[name]}", __package__)
    return Engine(
        functools.partial(_forward, part=module, merge=merge),
        functools.partial(_backward, part=module, merge=merge),
        module.refuses,
    )


def _forward(
    query: Tensor, key: Tensor, value: Tensor, diagonal_keys: Sequence[Tensor], diagonal_values: Sequence[Tensor],
    sinks: Tensor | None, layout: Layout, *, window: int | None, scale: float, part: ModuleType, merge: ModuleType,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out, lse = part.forward(query, key, value, layout, window=window, scale=scale)
    if not diagonal_keys and sinks is None:
        return out.to(query.dtype), lse.masked_fill(lse == float("-inf"), float("inf"))
    return merge.merge_forward(out, lse, query, diagonal_keys, diagonal_values, sinks, layout.padding, scale)


def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, diagonal_keys: Sequence[Tensor],
    diagonal_values: Sequence[Tensor], sinks: Tensor | None, out: Tensor, lse: Tensor, layout: Layout,
    *, window: int | None, scale: float, key_dtype: torch.dtype, part: ModuleType, merge: ModuleType,
) -> tuple[MergeGradients, Tensor, Tensor]:  # fmt: skip
    causal = part.backward(grad_out, query, key, value, out, lse, layout, window=window, scale=scale)
    grad_query, grad_key, grad_value = causal
    if not diagonal_keys and sinks is None:
        gradients = MergeGradients(grad_query.to(query.dtype), [], [], None)
    else:
        gradients = merge.merge_backward(
            grad_query, grad_out, out, lse, query, diagonal_keys, diagonal_values, sinks, layout.padding, scale
        )
    return gradients, grad_key.to(key_dtype), grad_value.to(key_dtype)


def choose(implementation: str | None, query: Tensor, layout: Layout, window: int | None) -> str:
    """The engine for a call: `implementation`, or the fastest that can serve it. Raises ValueError where it cannot."""
    if implementation is not None:
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(f"`implementation` {implementation!r} is unknown: pass None or one of {IMPLEMENTATIONS}")
        if reason := refusal(implementation, query, layout, window):
            raise ValueError(f"`implementation` {implementation!r} cannot serve this call: {reason}. Pass None.")
        return implementation
    reasons = {}
    for name in PREFERENCES.get(query.device.type, ("reference",)):
        reason = refusal(name, query, layout, window)
        if reason is None and name in ("fa4", "cudnn") and torch.are_deterministic_algorithms_enabled():
            reason = "its backward may not repeat bit by bit"
        if reason is None and name == "fa4" and query.shape[2] < fa4.SPREAD_SHARE * layout.keys:
            reason = f"fewer than {fa4.SPREAD_SHARE:.0%} of the rows are queries"
        if reason is None and name == "cudnn" and not cudnn.repeats(query):
            reason = "it would build a plan for a shape that has not come often yet"
        if reason is None:
            break
        reasons[name] = reason
    _log_choice(name, query.dtype, query.shape[-1], tuple(reasons.items()))
    return name


def refusal(name: str, query: Tensor, layout: Layout, window: int | None) -> str | None:
    """Why the engine cannot serve a call; None if it can."""
    if name == "reference":
        return None
    if (name == "triton" or MERGES.get(name) == "merge_triton") and not _is_installed("triton"):
        return "triton is not installed"
    return load(name).refuses(query, layout, window)


@functools.cache
def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@functools.cache  # once per choice, not once per call
def _log_choice(name: str, dtype: torch.dtype, head_dim: int, refused: tuple[tuple[str, str], ...]) -> None:
    others = "".join(f"; `{other}` not: {reason}" for other, reason in refused)
    level = logging.WARNING if name == "reference" else logging.INFO  # dense: it needs memory for every pair
    logger.log(level, "Attention runs on `%s` (%s, head_dim %d)%s", name, dtype, head_dim, others)

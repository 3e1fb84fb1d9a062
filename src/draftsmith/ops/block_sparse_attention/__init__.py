"""Attention of a training-time-test unroll: block-sparse causal part, one extra key per query row and later step."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .engines import ENGINES, Engine
from .layout import Layout
from .merge import merge_backward, merge_forward
from .reference import reference_attention
from .validation import check_masks, check_tensors


__all__ = ["block_sparse_flash_attention", "reference_attention"]


def block_sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    diagonal_keys: Sequence[Tensor] = (),
    diagonal_values: Sequence[Tensor] = (),
    document_ids: Tensor | None = None,
    query_positions: Tensor | None = None,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Causal attention inside documents, plus J keys that only their own query row sees.

    Query row t sees the step-0 keys s <= t of its document (within the window) and row t of every diagonal. Gradients
    reach every floating-point argument; a gradient of a gradient is refused (except by `"reference"`).

    Args:
        query: [B, Hq, Q, D].
        key, value: [B, Hkv, T, D], the step-0 keys and values, in `query`'s dtype; Hq is a multiple of Hkv.
        diagonal_keys, diagonal_values: J tensors [B, Hkv, Q, D] each.
        document_ids: [B, T] integers in contiguous runs, -1 for padding. None: each batch row is one document.
        query_positions: [B, Q] integers, the row on the T axis of each query, strictly ascending, -1 for a padding
            query. None: Q == T.
        sliding_window: a step-0 key is visible iff 0 <= query row - key row < `sliding_window`; 0 or less hides all of
            them. Diagonals are never hidden.
        sinks: [Hq] logits that join each softmax without a value.
        scale: factor on the scores; default D ** -0.5.
        implementation: None (`"sdpa"` on CPU; `"reference"`, dense, elsewhere), `"sdpa"` or `"reference"`.

    Returns:
        [B, Hq, Q, D] in `query`'s dtype. Padding queries (position or document -1) give 0 and zero gradients.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; an unknown `implementation`, or one that does not run on
            this device; on CPU also ids that are not contiguous runs and positions that do not ascend.
    """
    check_tensors(query, key, value, diagonal_keys, diagonal_values)
    check_masks(query, key, document_ids, query_positions, sinks)
    layout = Layout(document_ids, query_positions, query.shape[0], key.shape[2])
    if query.device.type == "cpu":  # elsewhere reading values would stall the device
        layout.check_values()
    attend = IMPLEMENTATIONS[_choose(implementation, query.device.type)]
    return attend(
        query, key, value, tuple(diagonal_keys), tuple(diagonal_values),
        layout=layout, window=sliding_window, sinks=sinks, scale=query.shape[-1] ** -0.5 if scale is None else scale,
    )  # fmt: skip


def _choose(implementation: str | None, device_type: str) -> str:
    if implementation is None:
        return "sdpa" if device_type == "cpu" else "reference"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"`implementation` {implementation!r} is not available; choose from {sorted(IMPLEMENTATIONS)} or None"
        )
    if implementation in ENGINES and ENGINES[implementation].device_type != device_type:
        needed = ENGINES[implementation].device_type
        raise ValueError(f"`implementation` {implementation!r} runs on {needed}, not on {device_type}: pass None")
    return implementation


def _reference(
    query: Tensor, key: Tensor, value: Tensor, diagonal_keys: Sequence[Tensor], diagonal_values: Sequence[Tensor],
    *, layout: Layout, window: int | None, sinks: Tensor | None, scale: float,
) -> Tensor:  # fmt: skip
    return reference_attention(
        query, key, value, diagonal_keys, diagonal_values, document_ids=layout.document_ids,
        query_positions=layout.query_positions, sliding_window=window, sinks=sinks, scale=scale,
    )  # fmt: skip


def _merged(
    query: Tensor, key: Tensor, value: Tensor, diagonal_keys: Sequence[Tensor], diagonal_values: Sequence[Tensor],
    *, engine: Engine, layout: Layout, window: int | None, sinks: Tensor | None, scale: float,
) -> Tensor:  # fmt: skip
    return _MergedAttention.apply(
        engine, layout, window, scale, query, key, value, sinks, *diagonal_keys, *diagonal_values
    )


class _MergedAttention(torch.autograd.Function):
    """An engine's causal part with diagonals and sinks merged in."""

    @staticmethod
    def forward(
        ctx: Any, engine: Engine, layout: Layout, window: int | None, scale: float,
        query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *diagonals: Tensor,
    ) -> Tensor:  # fmt: skip
        count = len(diagonals) // 2
        out, lse = engine.forward(query, key, value, layout, window=window, scale=scale)
        out, lse = merge_forward(out, lse, query, diagonals[:count], diagonals[count:], sinks, layout.padding, scale)
        ctx.save_for_backward(query, key, value, sinks, out, lse, *diagonals)
        ctx.engine, ctx.layout, ctx.window, ctx.scale = engine, layout, window, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse, *diagonals = ctx.saved_tensors
        count = len(diagonals) // 2
        grad_query, grad_key, grad_value = ctx.engine.backward(
            grad_out, query, key, value, out, lse, ctx.layout, window=ctx.window, scale=ctx.scale
        )
        merged = merge_backward(
            grad_query, grad_out, out, lse, query, diagonals[:count], diagonals[count:], sinks, ctx.layout.padding,
            ctx.scale,
        )  # fmt: skip
        gradients = (merged.query, grad_key.to(key.dtype), grad_value.to(value.dtype), merged.sinks)
        return None, None, None, None, *gradients, *merged.keys, *merged.values


IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {
    "reference": _reference,
    **{name: partial(_merged, engine=engine) for name, engine in ENGINES.items()},
}

"""Attention of a training-time-test unroll: block-sparse causal part, one extra key per query row and later step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .engines import Engine, choose, load
from .key_gradients import SharedKeys, share_keys
from .layout import Layout
from .reference import reference_attention
from .validation import check_key_gradients, check_masks, check_tensors


__all__ = ["KeptResult", "SharedKeys", "block_sparse_flash_attention", "reference_attention", "share_keys"]


@dataclass
class KeptResult:
    """(output, log-sum-exp) of a call, from which its repetition in a recomputed forward pass takes them."""

    value: tuple[Tensor, Tensor] | None = None


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
    *,
    key_gradients: tuple[Tensor, Tensor] | None = None,
    kept_result: KeptResult | None = None,
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
        implementation: None picks the fastest engine that serves the call and logs it once: `"fa4"`, `"cudnn"`,
            `"triton"` or `"reference"` (dense) on CUDA, `"sdpa"` on CPU; a name forces one.
        key_gradients: `(shared.key_sum, shared.value_sum)`, which receive the gradients of `key` and `value` that
            several calls share; see [`share_keys`].
        kept_result: under `torch.utils.checkpoint`, an object of this call alone: the first call fills it, and the
            recomputation reads it instead of computing attention again. `"reference"` ignores it.

    Returns:
        [B, Hq, Q, D] in `query`'s dtype. Padding queries (position or document -1) give 0 and zero gradients.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; an unknown `implementation`, or one that cannot serve
            this call, with the reason; on CPU also ids that are not contiguous runs and positions that do not ascend.
    """
    check_tensors(query, key, value, diagonal_keys, diagonal_values)
    check_masks(query, key, document_ids, query_positions, sinks)
    check_key_gradients(key_gradients, key)
    document_ids, query_positions = (
        None if ids is None else ids.contiguous() for ids in (document_ids, query_positions)
    )
    layout = Layout(document_ids, query_positions, query.shape[0], key.shape[2])
    if query.device.type == "cpu":  # elsewhere reading values would stall the device
        layout.check_values()
    scale = float(query.shape[-1] ** -0.5 if scale is None else scale)
    if scale <= 0:  # engines take the maximum of raw scores, then scale it
        query, scale = query * scale, 1.0
    if sliding_window is not None:
        sliding_window = min(max(int(sliding_window), 0), key.shape[2])  # all that differs, and no int64 overflows
    sinks = None if sinks is None else sinks.contiguous()
    name = choose(implementation, query, layout, sliding_window)
    if name == "reference":
        return reference_attention(
            query, key, value, diagonal_keys, diagonal_values, document_ids=document_ids,
            query_positions=query_positions, sliding_window=sliding_window, sinks=sinks, scale=scale,
        )  # fmt: skip
    stand_ins = key_gradients or (None, None)
    return _Attention.apply(
        load(name),
        layout,
        sliding_window,
        scale,
        kept_result,
        query,
        key,
        value,
        *stand_ins,
        sinks,
        *diagonal_keys,
        *diagonal_values,
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, engine: Engine, layout: Layout, window: int | None, scale: float, kept: KeptResult | None,
        query: Tensor, key: Tensor, value: Tensor, key_sum: Tensor | None, value_sum: Tensor | None,
        sinks: Tensor | None, *diagonals: Tensor,
    ) -> Tensor:  # fmt: skip
        count = len(diagonals) // 2
        if kept is not None and kept.value is not None:
            out, lse = kept.value
            kept.value = None  # a second backward computes it again
        else:
            with torch.cuda.device_of(query):  # kernels are launched on the current device
                out, lse = engine.forward(
                    query, key, value, diagonals[:count], diagonals[count:], sinks, layout, window=window, scale=scale
                )
            if kept is not None:
                kept.value = out.detach(), lse
        ctx.save_for_backward(query, key, value, sinks, out, lse, *diagonals)
        ctx.engine, ctx.layout, ctx.window, ctx.scale = engine, layout, window, scale
        ctx.key_dtype = key.dtype if key_sum is None else key_sum.dtype
        ctx.shared = key_sum is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse, *diagonals = ctx.saved_tensors
        count = len(diagonals) // 2
        gradients, *of_keys = ctx.engine.backward(
            grad_out, query, key, value, diagonals[:count], diagonals[count:], sinks, out, lse, ctx.layout,
            window=ctx.window, scale=ctx.scale, key_dtype=ctx.key_dtype,
        )  # fmt: skip
        of_keys = (None, None, *of_keys) if ctx.shared else (*of_keys, None, None)
        constants = (None,) * 5
        return *constants, gradients.query, *of_keys, gradients.sinks, *gradients.keys, *gradients.values

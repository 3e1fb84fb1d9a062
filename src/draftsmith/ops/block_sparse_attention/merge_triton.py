"""`merge.py` as two fused kernels: the diagonals and sinks of a row cost one pass over memory each way.

A program takes a few query rows with all heads of one key head, [G, R, D], so that a diagonal key is read once per
group and its gradient, a sum over the group, needs no atomics. Arithmetic is fp32.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .merge import MergeGradients, sinks_gradient


INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Elements of [G, R, D], where the group allows: programs of one warp add up a group without meeting another warp.
FORWARD_TILE, BACKWARD_TILE, WARP_ELEMENTS = 1024, 512, 1024
AHEAD = 6  # diagonals on their way in the backward kernel
MAX_ROW_STRIDE = 2**31 // 256  # kernels add up to 255 of them in int32


def rows_in_place(tensor: Tensor) -> Tensor:
    """`tensor`, copied only where its rows are not contiguous, or too far apart."""
    if tensor.stride(-1) == 1 and tensor.stride(2) < MAX_ROW_STRIDE:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def same_strides(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    tensors = tuple(rows_in_place(tensor) for tensor in tensors)
    if len({tensor.stride() for tensor in tensors}) > 1:
        tensors = tuple(tensor.contiguous() for tensor in tensors)
    return tensors


def strides(tensor: Tensor) -> tuple[int, int, int]:
    """Of batch, head and row."""
    return tensor.stride(0), tensor.stride(1), tensor.stride(2)


@triton.jit
def _group_tile(
    padding, queries, kv_heads, GROUP: tl.constexpr, HAS_PADDING: tl.constexpr, G: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """batch, key head, heads [G, 1], rows [1, R], and which of [G, R] exist and are no padding, of this program.

    Programs of the same rows are neighbours: where heads lie side by side, they read memory in its order.
    """
    tiles = tl.cdiv(queries, R)
    kv_head, index = tl.program_id(0) % kv_heads, tl.program_id(0) // kv_heads
    batch, tile = (index // tiles).to(tl.int64), index % tiles
    members = tl.arange(0, G)[:, None]
    rows = (tile * R + tl.arange(0, R))[None, :]
    exists = (members < GROUP) & (rows < queries)
    real = exists
    if HAS_PADDING:
        real = exists & (tl.load(padding + batch * queries + rows, mask=rows < queries, other=1) == 0)
    return batch, kv_head, kv_head * GROUP + members, rows, exists, real


@triton.jit
def _group_pointers(tensor, strides, batch, heads, rows, D: tl.constexpr):
    """[G, R, D] pointers into [B, H, Q, D]."""
    offsets = batch * strides[0] + heads.to(tl.int64) * strides[1] + rows.to(tl.int64) * strides[2]
    return tensor + offsets[:, :, None] + tl.arange(0, D)[None, None, :]


@triton.jit
def _row_pointers(tensor, strides, batch, kv_head, rows, D: tl.constexpr):
    """[1, R, D] pointers into [B, Hkv, Q, D]."""
    offsets = batch * strides[0] + kv_head.to(tl.int64) * strides[1] + rows.to(tl.int64) * strides[2]
    return tensor + offsets[:, :, None] + tl.arange(0, D)[None, None, :]


@triton.jit
def _load_pair(key, value, strides, batch, kv_head, rows, mask, D: tl.constexpr):
    """A diagonal's keys and values [1, R, D]."""
    key = tl.load(_row_pointers(key, strides, batch, kv_head, rows, D), mask=mask, other=0.0)
    return key, tl.load(_row_pointers(value, strides, batch, kv_head, rows, D), mask=mask, other=0.0)


@triton.jit(do_not_specialize=["queries"])
def _merge_kernel(
    out, lse, query, keys, values, sinks, padding,
    out_strides, query_strides, key_strides, queries, kv_heads, scale_log2,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_PADDING: tl.constexpr,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    batch, kv_head, heads, rows, exists, real = _group_tile(padding, queries, kv_heads, GROUP, HAS_PADDING, G, R)
    columns = (tl.arange(0, D) < HEAD_DIM)[None, None, :]
    lse_pointers = lse + (batch * kv_heads * GROUP + heads) * queries + rows
    out_pointers = _group_pointers(out, out_strides, batch, heads, rows, D)
    peak = tl.load(lse_pointers, mask=real, other=float("-inf")) * LOG2E  # [G, R]
    acc = tl.load(out_pointers, mask=real[:, :, None] & columns, other=0.0).to(tl.float32)  # [G, R, D]
    total = tl.where(peak == float("-inf"), 0.0, 1.0)
    peak = tl.maximum(peak, -1e30)
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=heads < kv_heads * GROUP, other=0.0).to(tl.float32) * LOG2E
        new_peak = tl.maximum(peak, sink)
        correction = tl.exp2(peak - new_peak)
        total = total * correction + tl.exp2(sink - new_peak)
        acc *= correction[:, :, None]
        peak = new_peak
    if len(keys) > 0:
        states = tl.load(
            _group_pointers(query, query_strides, batch, heads, rows, D), mask=real[:, :, None] & columns, other=0.0
        ).to(tl.float32)
        row_mask = (tl.max(real.to(tl.int32), 0)[None, :, None] > 0) & columns
        for j in tl.static_range(len(keys)):
            key, value = _load_pair(keys[j], values[j], key_strides, batch, kv_head, rows, row_mask, D)
            key, value = key.to(tl.float32), value.to(tl.float32)
            score = tl.sum(states * key, 2) * scale_log2  # [G, R]
            new_peak = tl.maximum(peak, score)
            correction, weight = tl.exp2(peak - new_peak), tl.exp2(score - new_peak)
            total = total * correction + weight
            acc = acc * correction[:, :, None] + weight[:, :, None] * value
            peak = new_peak
    seen = real & (total != 0)  # NaN is kept
    total = tl.where(seen, total, 1.0)
    acc = tl.where(seen[:, :, None], acc / total[:, :, None], 0.0)
    merged = tl.where(seen, (peak + tl.log2(total)) * LN2, float("inf"))
    tl.store(out_pointers, acc.to(out.dtype.element_ty), mask=exists[:, :, None] & columns)
    tl.store(lse_pointers, merged, mask=exists)


@triton.jit(do_not_specialize=["queries"])
def _backward_kernel(
    grad_out, out, lse, query, keys, values, padding, delta, grad_query, grad_keys, grad_values,
    grad_out_strides, out_strides, query_strides, key_strides, grad_query_strides, grad_key_strides,
    queries, kv_heads, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_PADDING: tl.constexpr, ADD: tl.constexpr, AHEAD: tl.constexpr,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    batch, kv_head, heads, rows, exists, real = _group_tile(padding, queries, kv_heads, GROUP, HAS_PADDING, G, R)
    columns = (tl.arange(0, D) < HEAD_DIM)[None, None, :]
    mask = real[:, :, None] & columns
    row_offsets = (batch * kv_heads * GROUP + heads) * queries + rows
    grad = tl.load(_group_pointers(grad_out, grad_out_strides, batch, heads, rows, D), mask=mask, other=0.0)
    grad = grad.to(tl.float32)
    merged = tl.load(_group_pointers(out, out_strides, batch, heads, rows, D), mask=mask, other=0.0).to(tl.float32)
    row_delta = tl.sum(grad * merged, 2)  # [G, R]
    if len(keys) > 0:
        states = tl.load(_group_pointers(query, query_strides, batch, heads, rows, D), mask=mask, other=0.0)
        states = states.to(tl.float32)
        row_lse = tl.load(lse + row_offsets, mask=real, other=float("inf")) * LOG2E
        query_pointers = _group_pointers(grad_query, grad_query_strides, batch, heads, rows, D)
        acc = tl.zeros([G, R, D], tl.float32)
        if ADD:
            acc += tl.load(query_pointers, mask=mask, other=0.0).to(tl.float32)
        row_mask = (tl.max(real.to(tl.int32), 0)[None, :, None] > 0) & columns
        row_exists = (rows < queries)[:, :, None] & columns
        pairs = _load_pair(keys[0], values[0], key_strides, batch, kv_head, rows, row_mask, D)
        for j in tl.static_range(1, min(AHEAD, len(keys))):
            pairs = pairs + _load_pair(keys[j], values[j], key_strides, batch, kv_head, rows, row_mask, D)
        for j in tl.static_range(len(keys)):
            if j + AHEAD < len(keys):  # asked for before this diagonal's stores, past which no load is moved
                pairs = pairs + _load_pair(
                    keys[j + AHEAD], values[j + AHEAD], key_strides, batch, kv_head, rows, row_mask, D
                )
            key, value = pairs[2 * j].to(tl.float32), pairs[2 * j + 1].to(tl.float32)
            weight = tl.exp2(tl.sum(states * key, 2) * (scale * LOG2E) - row_lse)  # [G, R]
            grad_score = weight * (tl.sum(grad * value, 2) - row_delta) * scale
            acc += grad_score[:, :, None] * key
            grad_key = tl.sum(grad_score[:, :, None] * states, 0)[None, :, :]  # [1, R, D]
            grad_value = tl.sum(weight[:, :, None] * grad, 0)[None, :, :]
            tl.store(
                _row_pointers(grad_keys[j], grad_key_strides, batch, kv_head, rows, D),
                grad_key.to(query.dtype.element_ty), mask=row_exists,
            )  # fmt: skip
            tl.store(
                _row_pointers(grad_values[j], grad_key_strides, batch, kv_head, rows, D),
                grad_value.to(query.dtype.element_ty), mask=row_exists,
            )  # fmt: skip
        tl.store(query_pointers, acc.to(query.dtype.element_ty), mask=exists[:, :, None] & columns)
    tl.store(delta + row_offsets, row_delta, mask=exists)


def _tile(query: Tensor, kv_heads: int, elements: int) -> tuple[tuple[int], dict[str, int]]:
    """The grid and the sizes of [G, R, D]."""
    batch, heads, queries, head_dim = query.shape
    group = heads // kv_heads
    padded_group, width = triton.next_power_of_2(group), triton.next_power_of_2(head_dim)
    rows = max(1, min(64, elements // (padded_group * width)))
    warps = max(1, min(8, padded_group * rows * width // WARP_ELEMENTS))
    grid = (triton.cdiv(queries, rows) * batch * kv_heads,)
    return grid, {"GROUP": group, "HEAD_DIM": head_dim, "G": padded_group, "R": rows, "D": width, "num_warps": warps}


def merge_forward(
    out: Tensor,  # [B, Hq, Q, D] of the causal part, overwritten
    lse: Tensor,  # [B, Hq, Q] fp32, -inf where the causal part is empty, overwritten
    query: Tensor,
    keys: Sequence[Tensor],  # J x [B, Hkv, Q, D]
    values: Sequence[Tensor],
    sinks: Tensor | None,
    padding: Tensor | None,  # [B, Q] bool
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`merge.merge_forward`, in place."""
    kv_heads = keys[0].shape[1] if keys else query.shape[1]
    query, diagonals = rows_in_place(query), same_strides([*keys, *values])
    lse = lse.contiguous()
    grid, sizes = _tile(query, kv_heads, FORWARD_TILE)
    if query.numel() > 0:
        _merge_kernel[grid](
            out, lse, query, diagonals[: len(keys)], diagonals[len(keys) :], sinks, padding,
            strides(out), strides(query), strides(diagonals[0]) if keys else (0, 0, 0),
            query.shape[2], kv_heads, scale * LOG2E.value,
            HAS_SINKS=sinks is not None, HAS_PADDING=padding is not None, **sizes,
        )  # fmt: skip
    return out, lse


def merge_backward(
    grad_query: Tensor | None,  # [B, Hq, Q, D] of the causal part, overwritten with the sum; None: nothing to add to
    grad_out: Tensor,
    out: Tensor,  # [B, Hq, Q, D], merged
    lse: Tensor,  # [B, Hq, Q], merged
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    sinks: Tensor | None,
    padding: Tensor | None,
    scale: float,
) -> MergeGradients:
    """`merge.merge_backward`, in place."""
    kv_heads = keys[0].shape[1] if keys else query.shape[1]
    grad_out, out, query = (rows_in_place(tensor) for tensor in (grad_out, out, query))
    diagonals = same_strides([*keys, *values])
    delta = torch.empty_like(lse)
    add = grad_query is not None
    if grad_query is None:
        grad_query = torch.empty_like(query)
    grad_diagonals = tuple(torch.empty_like(tensor) for tensor in diagonals)
    count = len(keys)
    grid, sizes = _tile(query, kv_heads, BACKWARD_TILE)
    if query.numel() > 0:
        _backward_kernel[grid](
            grad_out, out, lse, query, diagonals[:count], diagonals[count:], padding, delta, grad_query,
            grad_diagonals[:count], grad_diagonals[count:],
            strides(grad_out), strides(out), strides(query), strides(diagonals[0]) if keys else (0, 0, 0),
            strides(grad_query), strides(grad_diagonals[0]) if keys else (0, 0, 0),
            query.shape[2], kv_heads, scale, HAS_PADDING=padding is not None, ADD=add, AHEAD=AHEAD, **sizes,
        )  # fmt: skip
    grad_sinks = None if sinks is None else sinks_gradient(sinks, lse, delta)
    return MergeGradients(grad_query, list(grad_diagonals[:count]), list(grad_diagonals[count:]), grad_sinks, delta)

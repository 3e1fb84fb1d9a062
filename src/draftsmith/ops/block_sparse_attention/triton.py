"""The general GPU engine: every mask, compacted queries, diagonals and sinks, on any GPU that Triton compiles for.

A query row sees one contiguous range of step-0 keys, `first[row]..last[row]`. So a tile needs no block mask: the
ranges of its rows tell which key tiles are visible to some row (masked) and which to all of them (not masked).
Backward: a pre-kernel (delta, diagonals; `merge_triton.py`), dK/dV by key tile over all heads of its group, dQ by
query tile. No atomics, so results repeat bit by bit. Softmax runs in base 2, in fp32. Full tiles come through tensor
descriptors (Hopper's TMA), which leave the registers to the accumulators: worth a tenth of the time. Masked tiles
come through int64 pointers, since padding, which may hold NaN, must be loaded as 0.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .key_ranges import key_ranges
from .layout import Layout
from .merge import MergeGradients
from .merge_triton import INTERPRETED, LN2, LOG2E, merge_backward, rows_in_place, same_strides, strides


class Tile(NamedTuple):
    rows: int
    keys: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    forward: Tile
    key_value: Tile
    query: Tile


# By padded head dim, for 2-byte dtypes: measured on an H200; what they spill there is in
# tests/ops/test_triton_compilation.py.
TILES_16_BIT = {
    16: Tiles(Tile(128, 128, 4, 3), Tile(64, 128, 4, 3), Tile(128, 64, 4, 3)),
    32: Tiles(Tile(128, 128, 4, 3), Tile(64, 128, 4, 3), Tile(128, 64, 4, 3)),
    64: Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),
    128: Tiles(Tile(128, 128, 8, 3), Tile(64, 64, 4, 2), Tile(128, 64, 8, 4)),
    256: Tiles(Tile(128, 64, 8, 2), Tile(32, 64, 8, 2), Tile(64, 32, 4, 2)),
}
# For GPUs whose programs share less than the 163 KiB of an A100: 99 KiB, of gaming and workstation GPUs.
SMALL_TILES_16_BIT = TILES_16_BIT | {
    128: Tiles(Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
    256: Tiles(Tile(64, 32, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 2)),
}
# fp32 products run on the plain units: larger tiles would only take long to compile.
TILES_32_BIT = {
    **dict.fromkeys((16, 32, 64), Tiles(Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2))),
    **dict.fromkeys((128, 256), Tiles(Tile(16, 16, 4, 2), Tile(16, 16, 4, 2), Tile(16, 16, 4, 2))),
}


def tiles_for(query: Tensor) -> Tiles:
    tiles = TILES_32_BIT if query.dtype.itemsize == 4 else TILES_16_BIT
    if query.is_cuda and query.dtype.itemsize == 2 and _shared_memory(query.device) < 160 * 1024:
        tiles = SMALL_TILES_16_BIT
    return tiles[padded(query.shape[-1])]


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may use."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]


def padded(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def refuses(query: Tensor, layout: Layout, window: int | None) -> str | None:
    if query.device.type != "cuda" and not INTERPRETED.value:
        return "it runs on CUDA"
    if query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it computes float32, bfloat16 and float16, not {query.dtype}"
    if query.shape[-1] > 256:
        return f"head_dim {query.shape[-1]} exceeds 256"
    return None


@triton.jit
def _dot(a, b):
    if INTERPRETED:  # numpy has no bf16 product
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _load_tile(descriptor, batch, head, start):
    """Rows of one head of [B, H, rows, head_dim] from `start` on, all of which exist."""
    tile = descriptor.load([batch, head, start, 0])
    return tile.reshape(tile.shape[2], tile.shape[3])


@triton.jit
def _tile_pointers(tensor, strides, batch, head, start, ROWS: tl.constexpr, D: tl.constexpr):
    """[ROWS, D] into [B, H, rows, head_dim]."""
    base = tensor + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + start.to(tl.int64) * strides[2]
    return base + (tl.arange(0, ROWS)[:, None] * strides[2] + tl.arange(0, D)[None, :])


@triton.jit
def _load_rows(
    tensor, strides, batch, head, start, exists, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """The same as [ROWS, D], with 0 where a row does not exist: it may hold NaN, or belong to other memory."""
    pointers = _tile_pointers(tensor, strides, batch, head, start, ROWS, D)
    mask = exists[:, None] & (tl.arange(0, D) < HEAD_DIM)[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _store_rows(
    tensor, strides, batch, head, start, tile, exists, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    pointers = _tile_pointers(tensor, strides, batch, head, start, ROWS, D)
    mask = exists[:, None] & (tl.arange(0, D) < HEAD_DIM)[None, :]
    tl.store(pointers, tile.to(tensor.dtype.element_ty), mask=mask)


@triton.jit
def _split(lo, full_lo, full_hi, hi, STEP: tl.constexpr):
    """Cuts [lo, hi) into tiles of STEP: the count before the full ones, where those start and end, the count after."""
    full_start = lo + tl.cdiv(tl.maximum(full_lo - lo, 0), STEP) * STEP
    full_end = full_start + tl.maximum(tl.minimum(full_hi, hi) - full_start, 0) // STEP * STEP
    before = tl.cdiv(tl.maximum(tl.minimum(full_start, hi) - lo, 0), STEP)
    after = tl.cdiv(tl.maximum(hi - full_end, 0), STEP)
    return before, full_start, full_end, after


@triton.jit
def _key_exists(documents, batch, columns, keys, HAS_DOCUMENTS: tl.constexpr):
    exists = columns < keys
    if HAS_DOCUMENTS:  # padding keys between documents may hold anything
        exists &= tl.load(documents + batch.to(tl.int64) * keys + columns, mask=exists, other=-1) >= 0
    return exists


@triton.jit
def _masked_start(i, before, lo, full_end, STEP: tl.constexpr):
    """First row of the i-th masked tile: those before the full ones, then those after."""
    return tl.where(i < before, lo + i * STEP, full_end + (i - before) * STEP)


@triton.jit
def _masked_keys(
    key, value, key_strides, value_strides, documents, batch, kv_head, start, keys, row_first, row_last,
    HEAD_DIM: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Keys and values [N, D] from `start` on, and which query rows see them [M, N]."""
    columns = start + tl.arange(0, N)
    exists = _key_exists(documents, batch, columns, keys, HAS_DOCUMENTS)
    k = _load_rows(key, key_strides, batch, kv_head, start, exists, HEAD_DIM, N, D)
    v = _load_rows(value, value_strides, batch, kv_head, start, exists, HEAD_DIM, N, D)
    return k, v, (columns[None, :] >= row_first[:, None]) & (columns[None, :] <= row_last[:, None])


@triton.jit
def _query_tile(queries, heads, M: tl.constexpr):
    """batch, head and first row of this program; under causality the last rows see most keys, the longest go first."""
    tiles = tl.cdiv(queries, M)
    tile = tiles - 1 - tl.program_id(0) % tiles
    index = tl.program_id(0) // tiles
    return index // heads, index % heads, tile * M


@triton.jit
def _row_ranges(first, last, batch, rows, queries, keys):
    """First and last visible key of rows; keys and -1 for rows that do not exist."""
    offsets = batch.to(tl.int64) * queries + rows
    row_first = tl.load(first + offsets, mask=rows < queries, other=keys)
    row_last = tl.load(last + offsets, mask=rows < queries, other=-1)
    return row_first, row_last


@triton.jit
def _key_tiles(row_first, row_last, keys, N: tl.constexpr):
    """How the key ranges of a query tile's rows cut the key axis into tiles of N: the first, then as `_split`."""
    real = row_last >= 0
    lo, hi = tl.min(row_first), tl.max(row_last) + 1
    # Padding rows do not stop a tile from being full: their queries are loaded as 0 and their results dropped.
    full_lo, full_hi = tl.max(tl.where(real, row_first, 0)), tl.min(tl.where(real, row_last, keys)) + 1
    before, full_start, full_end, after = _split(lo, full_lo, full_hi, hi, N)
    return lo, before, full_start, full_end, after


@triton.jit
def _softmax_step(acc, total, peak, scores, values, scale_log2):
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - new_peak[:, None])
    correction = tl.exp2(peak - new_peak)
    total = total * correction + tl.sum(weights, 1)
    acc = acc * correction[:, None] + _dot(weights.to(values.dtype), values)
    return acc, total, new_peak


@triton.jit(do_not_specialize=["queries", "keys"])
def _forward_kernel(
    query, key, value, key_tiles, value_tiles, diagonal_keys, diagonal_values, sinks, first, last, documents, out, lse,
    query_strides, key_strides, value_strides, diagonal_strides, out_strides,
    heads, group, queries, keys, scale_log2,
    HEAD_DIM: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    batch, head, start_row = _query_tile(queries, heads, M)
    kv_head = head // group
    rows = start_row + tl.arange(0, M)
    row_first, row_last = _row_ranges(first, last, batch, rows, queries, keys)
    lo, before, full_start, full_end, after = _key_tiles(row_first, row_last, keys, N)
    real = row_last >= 0
    q = _load_rows(query, query_strides, batch, head, start_row, real, HEAD_DIM, M, D)
    peak, total, acc = tl.full([M], -1e30, tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, D], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        peak = tl.maximum(peak, sink)
        total += tl.exp2(sink - peak)  # 0 for a sink of -inf
    for j in tl.static_range(len(diagonal_keys)):
        own_key = _load_rows(diagonal_keys[j], diagonal_strides, batch, kv_head, start_row, real, HEAD_DIM, M, D)
        own_value = _load_rows(diagonal_values[j], diagonal_strides, batch, kv_head, start_row, real, HEAD_DIM, M, D)
        score = tl.sum(q.to(tl.float32) * own_key.to(tl.float32), 1) * scale_log2
        new_peak = tl.maximum(peak, score)
        correction, weight = tl.exp2(peak - new_peak), tl.exp2(score - new_peak)
        total = total * correction + weight
        acc = acc * correction[:, None] + weight[:, None] * own_value.to(tl.float32)
        peak = new_peak

    for i in tl.range(0, before + after, num_stages=1):
        start = _masked_start(i, before, lo, full_end, N)
        k, v, visible = _masked_keys(
            key, value, key_strides, value_strides, documents, batch, kv_head, start, keys, row_first, row_last,
            HEAD_DIM, HAS_DOCUMENTS, N, D,
        )  # fmt: skip
        scores = tl.where(visible, _dot(q, tl.trans(k)), float("-inf"))
        acc, total, peak = _softmax_step(acc, total, peak, scores, v, scale_log2)
    for i in tl.range(0, (full_end - full_start) // N, num_stages=STAGES):
        k = _load_tile(key_tiles, batch, kv_head, full_start + i * N)
        v = _load_tile(value_tiles, batch, kv_head, full_start + i * N)
        acc, total, peak = _softmax_step(acc, total, peak, _dot(q, tl.trans(k)), v, scale_log2)

    seen = real & (total != 0)  # NaN is kept
    total = tl.where(seen, total, 1.0)
    acc = tl.where(seen[:, None], acc / total[:, None], 0.0)
    row_lse = tl.where(seen, (peak + tl.log2(total)) * LN2, float("inf"))
    _store_rows(out, out_strides, batch, head, start_row, acc, rows < queries, HEAD_DIM, M, D)
    tl.store(lse + (batch.to(tl.int64) * heads + head) * queries + rows, row_lse, mask=rows < queries)


@triton.jit(do_not_specialize=["queries", "keys", "key_tiles"])
def _query_bounds_kernel(first, last, bounds, queries, keys, key_tiles, N: tl.constexpr, CHUNK: tl.constexpr):
    """Of each key tile: the first row that sees it, the run of rows that see all of it, the last row that sees it."""
    batch, tile = tl.program_id(0) // key_tiles, tl.program_id(0) % key_tiles
    start, end = tile * N, tl.minimum(tile * N + N, keys)
    lo, hi, full_lo, full_hi = queries, 0, queries, queries
    for chunk in range(0, queries, CHUNK):
        rows = chunk + tl.arange(0, CHUNK)
        row_first, row_last = _row_ranges(first, last, batch, rows, queries, keys)
        sees = (row_first < end) & (row_last >= start) & (row_first <= row_last)
        lo = tl.minimum(lo, tl.min(tl.where(sees, rows, queries)))
        hi = tl.maximum(hi, tl.max(tl.where(sees, rows + 1, 0)))
        full = (row_first <= start) & (row_last >= end - 1)
        full_lo = tl.minimum(full_lo, tl.min(tl.where(full, rows, queries)))
    for chunk in range(full_lo, hi, CHUNK):
        rows = chunk + tl.arange(0, CHUNK)
        row_first, row_last = _row_ranges(first, last, batch, rows, queries, keys)
        full = (row_first <= start) & (row_last >= end - 1)
        full_hi = tl.minimum(full_hi, tl.min(tl.where(full, queries, rows)))
    bounds += (batch.to(tl.int64) * key_tiles + tile) * 4
    tl.store(bounds, lo)
    tl.store(bounds + 1, full_lo)
    tl.store(bounds + 2, full_hi)
    tl.store(bounds + 3, hi)


@triton.jit
def _key_value_step(dk, dv, v, q, do, weights, row_delta):
    """Adds a query tile's part to dK, dV [N, D], from its `weights` [N, M]."""
    dv += _dot(weights.to(do.dtype), do)
    grad_scores = weights * (_dot(v, tl.trans(do)) - row_delta[None, :])
    dk += _dot(grad_scores.to(q.dtype), q)
    return dk, dv


@triton.jit(do_not_specialize=["queries", "keys"])
def _key_value_kernel(
    query, key, value, grad_out, query_tiles, grad_out_tiles, lse, delta, first, last, documents, bounds,
    grad_key, grad_value,
    query_strides, key_strides, value_strides, grad_out_strides, grad_key_strides, grad_value_strides,
    kv_heads, group, queries, keys, scale,
    HEAD_DIM: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(keys, N)
    tile, index = tl.program_id(0) % tiles, tl.program_id(0) // tiles  # the first keys are seen by most queries
    batch, kv_head, start_key = index // kv_heads, index % kv_heads, tile * N
    columns = start_key + tl.arange(0, N)
    exists = _key_exists(documents, batch, columns, keys, HAS_DOCUMENTS)
    k = _load_rows(key, key_strides, batch, kv_head, start_key, exists, HEAD_DIM, N, D)
    v = _load_rows(value, value_strides, batch, kv_head, start_key, exists, HEAD_DIM, N, D)
    dk, dv = tl.zeros([N, D], tl.float32), tl.zeros([N, D], tl.float32)
    bounds += (batch.to(tl.int64) * tiles + tile) * 4
    lo, hi = tl.load(bounds), tl.load(bounds + 3)
    before, full_start, full_end, after = _split(lo, tl.load(bounds + 1), tl.load(bounds + 2), hi, M)
    masked_tiles, full_tiles = before + after, (full_end - full_start) // M
    scale_log2 = scale * LOG2E
    heads_before = batch.to(tl.int64) * kv_heads * group

    for i in tl.range(0, masked_tiles * group, num_stages=1):
        head, t = kv_head * group + i // masked_tiles, i % masked_tiles
        start = _masked_start(t, before, lo, full_end, M)
        rows = start + tl.arange(0, M)
        row_first, row_last = _row_ranges(first, last, batch, rows, queries, keys)
        real = row_last >= 0
        q = _load_rows(query, query_strides, batch, head, start, real, HEAD_DIM, M, D)
        do = _load_rows(grad_out, grad_out_strides, batch, head, start, real, HEAD_DIM, M, D)
        offsets = (heads_before + head) * queries + rows
        row_lse = tl.load(lse + offsets, mask=real, other=float("inf")) * LOG2E
        row_delta = tl.load(delta + offsets, mask=real, other=0.0)
        visible = (columns[:, None] >= row_first[None, :]) & (columns[:, None] <= row_last[None, :])
        weights = tl.where(visible, tl.exp2(_dot(k, tl.trans(q)) * scale_log2 - row_lse[None, :]), 0.0)
        dk, dv = _key_value_step(dk, dv, v, q, do, weights, row_delta)
    for member in range(group):  # nested: one flat loop needs a division per tile, which costs a tenth
        head = kv_head * group + member
        head_lse, head_delta = lse + (heads_before + head) * queries, delta + (heads_before + head) * queries
        for i in tl.range(0, full_tiles, num_stages=STAGES):
            start = full_start + i * M
            rows = start + tl.arange(0, M)
            q = _load_tile(query_tiles, batch, head, start)
            do = _load_tile(grad_out_tiles, batch, head, start)
            row_lse, row_delta = tl.load(head_lse + rows) * LOG2E, tl.load(head_delta + rows)
            weights = tl.exp2(_dot(k, tl.trans(q)) * scale_log2 - row_lse[None, :])
            dk, dv = _key_value_step(dk, dv, v, q, do, weights, row_delta)

    inside = columns < keys
    _store_rows(grad_key, grad_key_strides, batch, kv_head, start_key, dk * scale, inside, HEAD_DIM, N, D)
    _store_rows(grad_value, grad_value_strides, batch, kv_head, start_key, dv, inside, HEAD_DIM, N, D)


@triton.jit
def _query_step(dq, k, v, do, weights, row_delta):
    """Adds a key tile's part to dQ [M, D], from its `weights` [M, N]."""
    grad_scores = weights * (_dot(do, tl.trans(v)) - row_delta[:, None])
    return dq + _dot(grad_scores.to(k.dtype), k)


@triton.jit(do_not_specialize=["queries", "keys"])
def _query_kernel(
    query, key, value, grad_out, key_tiles, value_tiles, lse, delta, first, last, documents, grad_query,
    query_strides, key_strides, value_strides, grad_out_strides, grad_query_strides,
    heads, group, queries, keys, scale,
    HEAD_DIM: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, ADD: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    batch, head, start_row = _query_tile(queries, heads, M)
    kv_head = head // group
    rows = start_row + tl.arange(0, M)
    row_first, row_last = _row_ranges(first, last, batch, rows, queries, keys)
    lo, before, full_start, full_end, after = _key_tiles(row_first, row_last, keys, N)
    real = row_last >= 0
    q = _load_rows(query, query_strides, batch, head, start_row, real, HEAD_DIM, M, D)
    do = _load_rows(grad_out, grad_out_strides, batch, head, start_row, real, HEAD_DIM, M, D)
    offsets = (batch.to(tl.int64) * heads + head) * queries + rows
    row_lse = tl.load(lse + offsets, mask=real, other=float("inf")) * LOG2E
    row_delta = tl.load(delta + offsets, mask=real, other=0.0)
    scale_log2 = scale * LOG2E
    dq = tl.zeros([M, D], tl.float32)

    for i in tl.range(0, before + after, num_stages=1):
        start = _masked_start(i, before, lo, full_end, N)
        k, v, visible = _masked_keys(
            key, value, key_strides, value_strides, documents, batch, kv_head, start, keys, row_first, row_last,
            HEAD_DIM, HAS_DOCUMENTS, N, D,
        )  # fmt: skip
        weights = tl.where(visible, tl.exp2(_dot(q, tl.trans(k)) * scale_log2 - row_lse[:, None]), 0.0)
        dq = _query_step(dq, k, v, do, weights, row_delta)
    for i in tl.range(0, (full_end - full_start) // N, num_stages=STAGES):
        k = _load_tile(key_tiles, batch, kv_head, full_start + i * N)
        v = _load_tile(value_tiles, batch, kv_head, full_start + i * N)
        weights = tl.exp2(_dot(q, tl.trans(k)) * scale_log2 - row_lse[:, None])
        dq = _query_step(dq, k, v, do, weights, row_delta)

    dq *= scale
    if ADD:
        dq += _load_rows(grad_query, grad_query_strides, batch, head, start_row, real, HEAD_DIM, M, D).to(tl.float32)
    _store_rows(grad_query, grad_query_strides, batch, head, start_row, dq, rows < queries, HEAD_DIM, M, D)


def _for_descriptor(tensor: Tensor) -> Tensor:
    """`tensor` [B, H, T, D] as a descriptor can address it; copied where strides, alignment or width forbid it."""
    unit = 16 // tensor.element_size()  # a descriptor counts in 16 bytes
    if tensor.shape[-1] % unit:
        return torch.nn.functional.pad(tensor, (0, -tensor.shape[-1] % unit))
    outer = [stride for stride, size in zip(tensor.stride()[:3], tensor.shape[:3], strict=True) if size > 1]
    fits = tensor.data_ptr() % 16 == 0 and all(stride > 0 and stride % unit == 0 for stride in outer)
    return rows_in_place(tensor) if fits else tensor.clone(memory_format=torch.contiguous_format)


def _descriptor(tensor: Tensor, rows: int) -> TensorDescriptor:
    """Tiles [1, 1, rows, D] of `tensor` [B, H, T, D]."""
    width = tensor.shape[-1]
    # An axis of one element may have any stride; a descriptor wants a valid one.
    steps = [stride if size > 1 else width for stride, size in zip(tensor.stride()[:3], tensor.shape[:3], strict=True)]
    return TensorDescriptor(tensor, list(tensor.shape), [*steps, 1], [1, 1, rows, padded(width)])


def _constants(head_dim: int, layout: Layout, tile: Tile) -> dict[str, int]:
    return {
        "HEAD_DIM": head_dim, "HAS_DOCUMENTS": layout.document_ids is not None, "M": tile.rows, "N": tile.keys,
        "D": padded(head_dim), "STAGES": tile.stages, "num_warps": tile.warps,
    }  # fmt: skip


def forward(
    query: Tensor, key: Tensor, value: Tensor, diagonal_keys: Sequence[Tensor], diagonal_values: Sequence[Tensor],
    sinks: Tensor | None, layout: Layout, *, window: int | None, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, heads, queries, head_dim = query.shape
    kv_heads, keys = key.shape[1:3]
    out = query.new_empty(batch, queries, heads, head_dim).transpose(1, 2)  # as the output projection reads it
    lse = query.new_empty(batch, heads, queries, dtype=torch.float32)
    if query.numel() == 0:
        return out, lse
    query, key, value = (_for_descriptor(tensor) for tensor in (query, key, value))
    diagonals, count = same_strides([*diagonal_keys, *diagonal_values]), len(diagonal_keys)
    first, last = key_ranges(layout, window, query.device)
    tile = tiles_for(query).forward
    _forward_kernel[(triton.cdiv(queries, tile.rows) * batch * heads,)](
        query, key, value, _descriptor(key, tile.keys), _descriptor(value, tile.keys),
        diagonals[:count], diagonals[count:], sinks, first, last, layout.document_ids, out, lse,
        strides(query), strides(key), strides(value), strides(diagonals[0]) if count else (0, 0, 0), strides(out),
        heads, heads // kv_heads, queries, keys, scale * LOG2E.value,
        HAS_SINKS=sinks is not None, **_constants(head_dim, layout, tile),
    )  # fmt: skip
    return out, lse


def backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, diagonal_keys: Sequence[Tensor],
    diagonal_values: Sequence[Tensor], sinks: Tensor | None, out: Tensor, lse: Tensor, layout: Layout,
    *, window: int | None, scale: float, key_dtype: torch.dtype,
) -> tuple[MergeGradients, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, diagonals and sinks; of key and of value, in `key_dtype`."""
    batch, heads, queries, head_dim = query.shape
    kv_heads, keys = key.shape[1:3]
    merged = merge_backward(
        None, grad_out, out, lse, query, diagonal_keys, diagonal_values, sinks, layout.padding, scale
    )
    grad_key, grad_value = (torch.empty_like(rows_in_place(tensor), dtype=key_dtype) for tensor in (key, value))
    if query.numel() == 0:
        return merged, grad_key.zero_(), grad_value.zero_()
    first, last = key_ranges(layout, window, query.device)
    states = [_for_descriptor(tensor) for tensor in (query, key, value, grad_out)]
    state_strides = [strides(tensor) for tensor in states]
    rows = (lse, merged.delta, first, last, layout.document_ids)
    group, tiles = heads // kv_heads, tiles_for(query)

    tile = tiles.query
    _query_kernel[(triton.cdiv(queries, tile.rows) * batch * heads,)](
        *states, _descriptor(states[1], tile.keys), _descriptor(states[2], tile.keys), *rows, merged.query,
        *state_strides, strides(merged.query), heads, group, queries, keys, scale,
        ADD=len(diagonal_keys) > 0, **_constants(head_dim, layout, tile),
    )  # fmt: skip

    tile = tiles.key_value
    key_tiles = triton.cdiv(keys, tile.keys)
    bounds = torch.empty(batch, key_tiles, 4, dtype=torch.int32, device=query.device)
    _query_bounds_kernel[(key_tiles * batch,)](first, last, bounds, queries, keys, key_tiles, N=tile.keys, CHUNK=1024)
    _key_value_kernel[(key_tiles * batch * kv_heads,)](
        *states, _descriptor(states[0], tile.rows), _descriptor(states[3], tile.rows), *rows, bounds,
        grad_key, grad_value, *state_strides, strides(grad_key), strides(grad_value),
        kv_heads, group, queries, keys, scale, **_constants(head_dim, layout, tile),
    )  # fmt: skip
    return merged, grad_key, grad_value

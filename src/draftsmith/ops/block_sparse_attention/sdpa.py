"""The CPU engine: PyTorch's flash operator, one call per document or per query block where needed."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..precision import accumulation_dtype, matmul_dtype
from .layout import Layout, Run


QUERY_BLOCK = 128  # bounds the masks of queries that are not a document's first rows: [QUERY_BLOCK, keys in sight]

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def refuses(query: Tensor, layout: Layout, window: int | None) -> str | None:
    return None if query.device.type == "cpu" else "it runs on CPU"


class _Block(NamedTuple):
    """One call of the flash operator; `mask` is additive, None where causality alone (or nothing) hides keys."""

    batch: slice
    queries: slice
    keys: slice
    is_causal: bool
    mask: Tensor | None


def _blocks(layout: Layout, window: int | None, dtype: torch.dtype) -> Iterator[_Block]:
    if window is None or window > 0:
        for run in layout.runs:
            yield from _run_blocks(run, window, dtype)


def _run_blocks(run: Run, window: int | None, dtype: torch.dtype) -> Iterator[_Block]:
    count, end = len(run.positions), int(run.positions[-1]) + 1
    if end - run.keys.start == count and (window is None or window >= count):
        yield _Block(run.batch, run.queries, slice(run.keys.start, end), True, None)
        return
    for start in range(0, count, QUERY_BLOCK):
        rows = run.positions[start : start + QUERY_BLOCK]
        first = run.keys.start if window is None else max(run.keys.start, int(rows[0]) - window + 1)
        keys = slice(first, int(rows[-1]) + 1)
        queries = slice(run.queries.start + start, run.queries.start + start + len(rows))
        yield _Block(run.batch, queries, keys, False, _mask(rows, keys, window, dtype))


def _mask(rows: Tensor, keys: slice, window: int | None, dtype: torch.dtype) -> Tensor | None:
    if len(rows) == 1:
        return None
    distance = rows[:, None] - torch.arange(keys.start, keys.stop)  # [q, k]
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


def _prepare(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    tensor = tensor.to(dtype)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def forward(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, *, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    dtype = matmul_dtype(query.dtype, query.device)
    out = query.new_zeros(query.shape, dtype=dtype)
    lse = query.new_full(query.shape[:-1], float("-inf"), dtype=accumulation_dtype(dtype))
    query, key, value = (_prepare(tensor, dtype) for tensor in (query, key, value))
    for batch, queries, keys, is_causal, mask in _blocks(layout, window, dtype):
        out[batch, :, queries], lse[batch, :, queries] = _flash(
            query[batch, :, queries], key[batch, :, keys], value[batch, :, keys],
            is_causal=is_causal, attn_mask=mask, scale=scale,
        )  # fmt: skip
    return out, lse


def backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, layout: Layout,
    *, window: int | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dtype = matmul_dtype(query.dtype, query.device)
    grads = tuple(torch.zeros(tensor.shape, dtype=dtype) for tensor in (query, key, value))
    grad_query, grad_key, grad_value = grads
    grad_out, query, key, value, out = (_prepare(tensor, dtype) for tensor in (grad_out, query, key, value, out))
    for batch, queries, keys, is_causal, mask in _blocks(layout, window, dtype):
        block_query, block_key, block_value = _flash_backward(
            grad_out[batch, :, queries], query[batch, :, queries], key[batch, :, keys], value[batch, :, keys],
            out[batch, :, queries], lse[batch, :, queries], 0.0, is_causal, attn_mask=mask, scale=scale,
        )  # fmt: skip
        grad_query[batch, :, queries] = block_query
        grad_key[batch, :, keys] += block_key
        grad_value[batch, :, keys] += block_value
    return grad_query, grad_key, grad_value

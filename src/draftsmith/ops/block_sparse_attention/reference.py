"""`block_sparse_flash_attention` dense and plain: the truth that engines are compared with."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..precision import accumulation_dtype


def visible_keys(
    positions: Tensor,  # [B, Q], -1 = padding query
    document_ids: Tensor,  # [B, T], -1 = padding
    sliding_window: int | None,
) -> tuple[Tensor, Tensor]:
    """Step-0 keys each query sees [B, Q, T], and which queries are real [B, Q]."""
    documents = document_ids.gather(1, positions.clamp(min=0))  # [B, Q]
    real = (positions >= 0) & (documents >= 0)  # [B, Q]
    distance = positions[:, :, None] - torch.arange(document_ids.shape[1], device=positions.device)  # [B, Q, T]
    visible = (distance >= 0) & (documents[:, :, None] == document_ids[:, None])  # [B, Q, T]
    if sliding_window is not None:
        visible &= distance < sliding_window
    return visible & real[:, :, None], real


def reference_attention(
    query: Tensor,  # [B, Hq, Q, D]
    key: Tensor,  # [B, Hkv, T, D]
    value: Tensor,  # [B, Hkv, T, D]
    diagonal_keys: Sequence[Tensor],  # J x [B, Hkv, Q, D]
    diagonal_values: Sequence[Tensor],  # J x [B, Hkv, Q, D]
    *,
    document_ids: Tensor | None,
    query_positions: Tensor | None,
    sliding_window: int | None,
    sinks: Tensor | None,
    scale: float,
) -> Tensor:
    """Differentiable to any order, any dtype and device; materialises [B, Hq, Q, T]."""
    batch, heads, queries, _ = query.shape
    length, group = key.shape[2], heads // key.shape[1]
    if document_ids is None:
        document_ids = torch.zeros(batch, length, dtype=torch.long, device=query.device)
    if query_positions is None:
        query_positions = torch.arange(length, device=query.device).expand(batch, -1)
    visible, real = visible_keys(query_positions.long(), document_ids, sliding_window)

    key, value, *diagonals = (
        tensor.repeat_interleave(group, 1) for tensor in (key, value, *diagonal_keys, *diagonal_values)
    )  # [B, Hq, T | Q, D]
    count = len(diagonal_keys)
    columns = [(query @ key.mT).masked_fill(~visible[:, None], float("-inf"))]  # [B, Hq, Q, T]
    columns += [(query * diagonal).sum(-1, keepdim=True) for diagonal in diagonals[:count]]  # J x [B, Hq, Q, 1]
    scores = torch.cat(columns, -1).to(accumulation_dtype(query.dtype)) * scale  # [B, Hq, Q, T + J]
    if sinks is not None:
        sink = sinks.to(scores.dtype)[:, None, None].expand(batch, heads, queries, 1)
        scores = torch.cat([scores, sink], -1)  # [B, Hq, Q, T + J + 1]

    # A row of -inf alone would give NaN: such rows, and padding queries, get finite scores and then weight 0.
    empty = ~real[:, None, :, None] | (scores == float("-inf")).all(-1, keepdim=True)  # [B, Hq, Q, 1]
    weights = scores.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0).to(query.dtype)
    out = weights[..., :length] @ value  # [B, Hq, Q, D]
    for index, diagonal_value in enumerate(diagonals[count:]):
        out = out + weights[..., length + index, None] * diagonal_value
    return out

"""Diagonals and sinks merged into a causal part (out0, lse0) by log-sum-exp, and the gradients of the merged result.

With s_j = scale * q.k_j and lse = logsumexp(lse0, s_1..s_J, sink), part j weighs exp(s_j - lse). A row without any key
stores lse = +inf, so that all its weights, and hence its gradients, are exp(-inf) = 0.
Arithmetic is fp32 (fp64 for fp64 inputs).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..precision import accumulation_dtype


class MergeGradients(NamedTuple):
    query: Tensor  # [B, Hq, Q, D], all parts
    keys: list[Tensor]  # J x [B, Hkv, Q, D]
    values: list[Tensor]  # J x [B, Hkv, Q, D]
    sinks: Tensor | None  # [Hq]
    delta: Tensor | None = None  # [B, Hq, Q], rowsum(grad_out * out), which other kernels need too


def _grouped(query: Tensor, kv_heads: int) -> Tensor:
    """[B, Hq, ...] -> [B, Hkv, Hq / Hkv, ...] in accumulation precision."""
    return query.to(accumulation_dtype(query.dtype)).unflatten(1, (kv_heads, -1))


def _scores(grouped_query: Tensor, key: Tensor, scale: float, padding: Tensor | None) -> Tensor:
    """[B, Hkv, G, Q], -inf at padding queries whatever they hold."""
    scores = (grouped_query * key.to(grouped_query.dtype)[:, :, None]).sum(-1).mul_(scale)
    return scores if padding is None else scores.masked_fill_(padding[:, None, None], float("-inf"))


def merge_forward(
    out0: Tensor,  # [B, Hq, Q, D]
    lse0: Tensor,  # [B, Hq, Q], -inf where the causal part is empty
    query: Tensor,  # [B, Hq, Q, D]
    keys: Sequence[Tensor],  # J x [B, Hkv, Q, D]
    values: Sequence[Tensor],  # J x [B, Hkv, Q, D]
    sinks: Tensor | None,  # [Hq]
    padding: Tensor | None,  # [B, Q] bool
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of all parts; out in `query`'s dtype, 0 at padding queries."""
    parts = [lse0]
    if keys:
        grouped = _grouped(query, keys[0].shape[1])
        parts += [_scores(grouped, key, scale, padding).flatten(1, 2) for key in keys]
    if sinks is not None:
        parts.append(sinks.to(lse0.dtype)[:, None].expand_as(lse0))
    scores = torch.stack(parts)  # [1 + J (+ 1), B, Hq, Q]
    lse = scores.logsumexp(0)
    if padding is not None:
        lse = lse.masked_fill(padding[:, None], float("-inf"))
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    weights = (scores - lse).exp_()[..., None]
    out = weights[0] * out0
    for weight, value in zip(weights[1:], values, strict=False):  # a sink's weight, the last, has no value
        out += (_grouped(weight, value.shape[1]) * value[:, :, None]).flatten(1, 2)
    if padding is not None:
        out.masked_fill_(padding[:, None, :, None], 0)
    return out.to(query.dtype), lse


def merge_backward(
    grad_query: Tensor,  # [B, Hq, Q, D], the causal part's
    grad_out: Tensor,  # [B, Hq, Q, D]
    out: Tensor,  # [B, Hq, Q, D], merged
    lse: Tensor,  # [B, Hq, Q], merged
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    sinks: Tensor | None,
    padding: Tensor | None,
    scale: float,
) -> MergeGradients:
    grad_out = grad_out.to(lse.dtype)
    delta = (grad_out * out).sum(-1)  # [B, Hq, Q]
    grad_query = grad_query.to(lse.dtype)
    grad_keys, grad_values = [], []
    for key, value in zip(keys, values, strict=True):
        gradients = _diagonal_backward(grad_out, delta, lse, query, key, value, padding, scale)
        grad_query += gradients[0]
        grad_keys.append(gradients[1])
        grad_values.append(gradients[2])
    grad_sinks = None if sinks is None else sinks_gradient(sinks, lse, delta)
    return MergeGradients(grad_query.to(query.dtype), grad_keys, grad_values, grad_sinks, delta)


def sinks_gradient(
    sinks: Tensor,  # [Hq]
    lse: Tensor,  # [B, Hq, Q], merged
    delta: Tensor,  # [B, Hq, Q]
) -> Tensor:
    weights = (sinks.to(lse.dtype)[:, None] - lse).exp_()
    return -(weights * delta).sum((0, 2)).to(sinks.dtype)


def _diagonal_backward(
    grad_out: Tensor, delta: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    heads = key.shape[1]
    grad_out, delta, lse, query = (_grouped(tensor, heads) for tensor in (grad_out, delta, lse, query))
    weights = (_scores(query, key, scale, padding) - lse).exp_()  # [B, Hkv, G, Q]
    grad_scores = weights * ((grad_out * value[:, :, None]).sum(-1) - delta) * scale
    grad_query = (grad_scores[..., None] * key[:, :, None]).flatten(1, 2)
    grad_key = (grad_scores[..., None] * query).sum(2)
    grad_value = (weights[..., None] * grad_out).sum(2)
    if padding is not None:  # 0 * NaN: whatever padding queries hold must not reach a gradient
        for gradient in (grad_query, grad_key, grad_value):
            gradient.masked_fill_(padding[:, None, :, None], 0)
    return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)

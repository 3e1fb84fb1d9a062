"""The causal part by cuDNN's flash attention, as PyTorch binds it: whole rows, one document each."""

from collections import Counter

import torch
from torch import Tensor

from .layout import Layout


MAX_HEAD_DIM = 128
# A new shape costs some 140 ms of plan building, forward and backward; a planned call saves a few ms. A shape that
# has come this often will come again often enough.
CALLS_BEFORE_PLAN = 64

_attention = torch.ops.aten._scaled_dot_product_cudnn_attention
_attention_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
_calls: Counter[tuple[torch.Size, torch.dtype]] = Counter()


def refuses(query: Tensor, layout: Layout, window: int | None) -> str | None:
    if query.device.type != "cuda":
        return f"`query` is on {query.device}, it needs a CUDA GPU"
    if not torch.backends.cudnn.is_available() or torch.cuda.get_device_capability(query.device) < (8, 0):
        return "it needs cuDNN and a GPU of compute capability 8.0 or more"
    if query.numel() == 0:
        return "there is nothing to compute"
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"`query` is {query.dtype}, it takes bfloat16 and float16"
    head_dim = query.shape[-1]
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        return f"head_dim is {head_dim}, it takes multiples of 8 up to {MAX_HEAD_DIM}"
    if layout.query_positions is not None or layout.document_ids is not None:
        return "it takes no `query_positions` and no `document_ids`"
    if window is not None and window < layout.keys:
        return "it takes no `sliding_window`"
    if layout.keys < 2:
        return "it takes two rows or more"
    return None


def repeats(query: Tensor) -> bool:
    """Whether calls of this shape are frequent enough for a plan; counts this one."""
    shape = query.shape, query.dtype
    _calls[shape] += 1
    return _calls[shape] > CALLS_BEFORE_PLAN


def forward(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, *, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    query, key, value = _arranged(query, key, value)
    out, lse, *_ = _attention(query, key, value, None, True, is_causal=True, scale=scale)
    return out, lse.view(query.shape[:-1])


def backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, layout: Layout,
    *, window: int | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    query, key, value, out, grad_out = _arranged(query, key, value, out, grad_out)
    unused = query.new_empty((), dtype=torch.int64)  # the random state of dropout
    return _attention_backward(
        grad_out, query, key, value, out, lse.contiguous()[..., None], unused, unused, None, None, None,
        layout.keys, layout.keys, 0.0, True, scale=scale,
    )  # fmt: skip


def _arranged(query: Tensor, *others: Tensor) -> list[Tensor]:
    """All in one memory order, [B, H, T, D] or [B, T, H, D].

    PyTorch looks a backward plan up by the strides of query, key and value alone: `out` and `grad_out` in another
    order would be read wrongly.
    """
    if query.is_contiguous():
        return [query, *(tensor.contiguous() for tensor in others)]
    return [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (query, *others)]

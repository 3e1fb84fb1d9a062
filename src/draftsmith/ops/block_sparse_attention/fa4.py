"""The causal part by FlashAttention 4 (package `flash-attn-4`, kernels in `flash_attn.cute`), Hopper and Blackwell.

Its autograd function cannot be given the merged (out, lse), so the two kernels are called directly. They are compiled
per head_dim, dtype, head counts, window or not, documents or not, never per length.

They take every row as a query. Queries of some rows are spread over all of them, the others filled with zeros.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..selection import put_rows
from ..transfer import ValuePerTensor, being_captured, on_host, to_device
from .layout import Layout


MAX_HEAD_DIM = {9: 256, 10: 128}  # by major compute capability
PADDING_SEGMENT = 128  # rows; work grows with the square of a segment's length
SPREAD_SHARE = 0.8  # of the rows: with fewer queries, `triton` is faster by leaving the others out


class Segments(NamedTuple):
    """The runs of equal ids in the flattened [B * T] rows, runs of padding included."""

    offsets: Tensor  # int32 [segments + 1]
    padding: Tensor | None  # [B, T] bool; None where there is none


_segments_of = ValuePerTensor()  # of document_ids


def refuses(query: Tensor, layout: Layout, window: int | None) -> str | None:
    if query.device.type != "cuda":
        return f"`query` is on {query.device}, it needs a CUDA GPU"
    major, minor = torch.cuda.get_device_capability(query.device)
    if major not in MAX_HEAD_DIM:
        return f"it needs a GPU of compute capability 9.x or 10.x, this one has {major}.{minor}"
    if query.numel() == 0:
        return "there is nothing to compute"
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"`query` is {query.dtype}, it takes bfloat16 and float16"
    head_dim = query.shape[-1]
    if head_dim % 8 or head_dim > MAX_HEAD_DIM[major]:
        return f"head_dim is {head_dim}, it takes multiples of 8 up to {MAX_HEAD_DIM[major]}"
    if window is not None and window <= 0:
        return "`sliding_window` hides all keys"
    if error := _import_error():
        return f"flash-attn-4 cannot be imported ({error}): pip install draftsmith[hopper]"
    return None


@functools.cache
def _import_error() -> str | None:
    try:
        import flash_attn.cute.interface  # noqa: F401  (seconds, hence not at the top)
    except ImportError as error:
        return str(error)
    return None


def forward(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, *, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    segments = _segments(layout)
    query, key, value = (_rows(tensor, segments) for tensor in (_spread(query, layout), key, value))
    room = _room(query)
    out = room[:-1].view_as(query)
    lse = _flash_attn_fwd(query, key, value, out=out, return_lse=True, **_options(layout, segments, window, scale))[1]
    if segments is not None:
        lse = lse.unflatten(1, (layout.batch, layout.keys)).transpose(0, 1)
        if segments.padding is not None:
            lse = lse.masked_fill(segments.padding[:, None], float("-inf"))
    return _gather(room, layout), _gather_lse(lse, layout)


def backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, layout: Layout,
    *, window: int | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from flash_attn.cute.interface import _flash_attn_bwd

    segments = _segments(layout)
    query, out, grad_out = (_spread(tensor, layout) for tensor in (query, out, grad_out))
    lse = _spread(lse[..., None], layout, fill=float("inf"))[..., 0].contiguous()  # [B, Hq, T]
    rows = [_rows(tensor, segments) for tensor in (query, key, value, out, grad_out)]
    if segments is not None:
        lse = lse.transpose(0, 1).flatten(1)  # [Hq, B * T]
    room = _room(rows[0])
    grad_query = room[:-1].view_as(rows[0])
    _, *of_keys = _flash_attn_bwd(*rows, lse, dq=grad_query, **_options(layout, segments, window, scale))
    if segments is not None:
        of_keys = [gradient.unflatten(0, (layout.batch, layout.keys)) for gradient in of_keys]
    grad_key, grad_value = (gradient.transpose(1, 2) for gradient in of_keys)
    return _gather(room, layout), grad_key, grad_value


def _spread(tensor: Tensor, layout: Layout, fill: float = 0) -> Tensor:
    """[B, H, Q, D] of the queries -> [B, H, T, D] of all rows."""
    if layout.query_places is None:
        return tensor
    queries = tensor.transpose(1, 2).flatten(0, 1)  # [B * Q, H, D]
    rows = queries.new_full((layout.batch * layout.keys + 1, *queries.shape[1:]), fill)
    put_rows(rows, 0, layout.query_places, queries)
    return rows[:-1].unflatten(0, (layout.batch, layout.keys)).transpose(1, 2)


def _room(rows: Tensor) -> Tensor:
    """Memory [B * T + 1, H, D] for results of all `rows`, and zeros for those of a padding query."""
    room = rows.new_empty(rows.shape[:-2].numel() + 1, *rows.shape[-2:])
    room[-1] = 0
    return room


def _gather(room: Tensor, layout: Layout) -> Tensor:
    """Results [B, H, Q, D] of the queries."""
    rows = room[:-1] if layout.query_places is None else room.index_select(0, layout.query_places)
    return rows.unflatten(0, (layout.batch, -1)).transpose(1, 2)


def _gather_lse(lse: Tensor, layout: Layout) -> Tensor:
    """[B, Hq, T] -> [B, Hq, Q], -inf for a padding query."""
    if layout.query_positions is None:
        return lse
    positions = layout.query_positions[:, None].long()  # [B, 1, Q]
    lse = lse.gather(2, positions.clamp(min=0).expand(-1, lse.shape[1], -1))
    return lse.masked_fill(positions < 0, float("-inf"))


def _rows(tensor: Tensor, segments: Segments | None) -> Tensor:
    """[B, H, T, D] -> [B, T, H, D], or [B * T, H, D] with documents.

    Tiles read past a document's end, where probability 0 times NaN would be NaN: padding becomes 0, and with it the
    outputs and gradients of its rows.
    """
    if 0 in tensor.stride():  # its compiler fails on an expanded axis, such as a summed output's gradient
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    tensor = tensor.transpose(1, 2)
    if segments is None:
        return tensor
    if segments.padding is not None:
        tensor = tensor.masked_fill(segments.padding[:, :, None, None], 0)
    return tensor.flatten(0, 1)


def _options(layout: Layout, segments: Segments | None, window: int | None, scale: float) -> dict[str, Any]:
    offsets = None if segments is None else segments.offsets
    return {
        "softmax_scale": scale,
        "causal": True,
        "window_size_left": None if window is None or window >= layout.keys else window - 1,  # besides the row itself
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets,
    }


def _segments(layout: Layout) -> Segments | None:
    """Kept as long as the tensor of ids: every step and layer of a batch shares one read of the device."""
    ids = layout.document_ids
    if ids is None:
        return None
    if being_captured(ids):
        raise RuntimeError("FlashAttention 4 reads documents on the host: a CUDA graph would hold those of one batch")
    segments = _segments_of.get(ids)
    if segments is None:
        segments = _read_segments(ids)
        _segments_of.put(ids, segments)
    return segments


def _read_segments(document_ids: Tensor) -> Segments:
    ids = on_host(document_ids)
    starts = ids.new_ones(ids.shape, dtype=torch.bool)
    starts[:, 1:] = ids.diff(dim=1) != 0
    padding = ids < 0
    starts |= padding & (torch.arange(ids.shape[1]) % PADDING_SEGMENT == 0)
    offsets = torch.cat([starts.flatten().nonzero().flatten(), torch.tensor([ids.numel()])])
    return Segments(to_device(offsets.int(), document_ids.device), document_ids < 0 if padding.any() else None)

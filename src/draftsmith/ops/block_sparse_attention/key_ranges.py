"""Which step-0 keys a query row sees: always one contiguous range, since documents are contiguous runs."""

import torch
from torch import Tensor

from .layout import Layout


def key_ranges(layout: Layout, window: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """First and last visible step-0 key of each query, int32 [B, Q], without reading a value on the host.

    A query that sees no key has first > last; a padding query has first = T, last = -1. Kept as the layout says.
    """
    if (window, device) not in layout.key_ranges:
        layout.key_ranges[window, device] = _key_ranges(layout, window, device)
    return layout.key_ranges[window, device]


def _key_ranges(layout: Layout, window: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
    columns = torch.arange(layout.keys, device=device)
    rows = columns.expand(layout.batch, -1) if layout.query_positions is None else layout.query_positions.long()
    first, last = torch.zeros_like(rows), rows
    if layout.document_ids is not None:
        starts = layout.document_ids.diff(dim=1) != 0  # [B, T - 1]
        starts = torch.where(starts, columns[1:], 0).cummax(1).values if layout.keys > 1 else starts.long()
        starts = torch.nn.functional.pad(starts, (1, 0))
        first = starts.gather(1, rows.clamp(min=0))
    if window is not None:
        first = torch.maximum(first, rows - window + 1)
    if layout.padding is not None:
        first, last = first.masked_fill(layout.padding, layout.keys), last.masked_fill(layout.padding, -1)
    return first.clamp(0, layout.keys).int().contiguous(), last.int().contiguous()

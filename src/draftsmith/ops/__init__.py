"""Mathematics of draft-head training: tensors in, tensors out."""

from .block_sparse_attention import KeptResult, block_sparse_flash_attention, share_keys
from .pointwise import rms_norm, rotated, swiglu
from .recompute import made_again
from .selection import select_rows
from .streaming_loss import OBJECTIVES, DraftLossSums, streaming_cross_entropy, streaming_draft_loss


__all__ = [
    "OBJECTIVES",
    "DraftLossSums",
    "KeptResult",
    "block_sparse_flash_attention",
    "made_again",
    "rms_norm",
    "rotated",
    "select_rows",
    "share_keys",
    "streaming_cross_entropy",
    "streaming_draft_loss",
    "swiglu",
]

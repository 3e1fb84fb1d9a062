"""Mathematics of draft-head training: tensors in, tensors out."""

from .block_sparse_attention import block_sparse_flash_attention, share_keys
from .streaming_loss import OBJECTIVES, DraftLossSums, streaming_cross_entropy, streaming_draft_loss


__all__ = [
    "OBJECTIVES",
    "DraftLossSums",
    "block_sparse_flash_attention",
    "share_keys",
    "streaming_cross_entropy",
    "streaming_draft_loss",
]

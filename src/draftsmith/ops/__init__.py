"""Mathematics of draft-head training: tensors in, tensors out."""

from .block_sparse_attention import KeyGradients, block_sparse_flash_attention
from .streaming_loss import OBJECTIVES, DraftLossSums, streaming_cross_entropy, streaming_draft_loss


__all__ = [
    "OBJECTIVES",
    "DraftLossSums",
    "KeyGradients",
    "block_sparse_flash_attention",
    "streaming_cross_entropy",
    "streaming_draft_loss",
]

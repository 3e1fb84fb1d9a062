"""Losses over large vocabularies whose logits exist one chunk at a time."""

from .cross_entropy import streaming_cross_entropy
from .draft_loss import DraftLossSums, streaming_draft_loss
from .rows import OBJECTIVES


__all__ = ["OBJECTIVES", "DraftLossSums", "streaming_cross_entropy", "streaming_draft_loss"]

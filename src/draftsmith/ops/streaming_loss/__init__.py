"""Losses over large vocabularies whose logits exist one chunk at a time."""

from .cross_entropy import streaming_cross_entropy
from .draft_loss import DraftLossSums, streaming_draft_loss


__all__ = ["DraftLossSums", "streaming_cross_entropy", "streaming_draft_loss"]

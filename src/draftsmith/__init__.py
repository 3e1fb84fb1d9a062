"""Train EAGLE-3 draft heads for speculative decoding inside the Hugging Face ecosystem."""

from .models.eagle3 import Eagle3DraftConfig, Eagle3DraftModel
from .trainer import Eagle3Trainer, Eagle3TrainingArguments, StreamingLossTrainer
from .transformers_hooks import register_attention, register_models


register_attention()
register_models()

__all__ = [
    "Eagle3DraftConfig",
    "Eagle3DraftModel",
    "Eagle3Trainer",
    "Eagle3TrainingArguments",
    "StreamingLossTrainer",
]
__version__ = "0.1.0"

from .arguments import Eagle3TrainingArguments
from .eagle3_trainer import Eagle3Trainer
from .streaming_loss_trainer import StreamingLossTrainer


__all__ = ["Eagle3Trainer", "Eagle3TrainingArguments", "StreamingLossTrainer"]

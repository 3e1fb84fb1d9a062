from .arguments import Eagle3TrainingArguments
from .eagle3_trainer import Eagle3Trainer


__all__ = ["Eagle3Trainer", "Eagle3TrainingArguments"]

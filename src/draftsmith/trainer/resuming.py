"""Checkpoints say what decided their weights, and a run goes on from one of the same settings alone."""

from pathlib import Path
from typing import Any

from ..model_card import RunRecord
from ..target_family import base_model
from .arguments import Eagle3TrainingArguments
from .checkpoints import TrainingFault
from .faults import FaultTolerantTrainer
from .settings import RESUMED, SCHEDULE, refuse_other_settings, resumed_record, save_settings, settings_of


class ResumingTrainer(FaultTolerantTrainer):
    """[`FaultTolerantTrainer`] that refuses checkpoints of other settings.

    Attributes:
        record: what is known of target and data; what the run itself finds out is added when it is saved.
        data_digest: of the training data, if it is known.
    """

    def __init__(self, *, args: Eagle3TrainingArguments, **kwargs: Any):
        self.record = RunRecord()
        self.data_digest: str | None = None
        self._changed: list[str] = []  # settings other than the checkpoint's
        super().__init__(args=args, **kwargs)

    def settings(self) -> dict[str, Any]:
        """What decides the weights: [`settings_of`]."""
        return settings_of(self.record, self.args, base_model(self.model).config, self.data_digest)  # type: ignore[arg-type]

    def save_settings(self, directory: str) -> None:
        save_settings(Path(directory), self.settings(), self.record.recipe.get(RESUMED, []))

    def refuse_other_settings(self, checkpoint: Path, *, is_named: bool) -> None:
        """Raise `OtherSettingsError` for settings that it was not trained with; the record says what may differ."""
        warns = self.is_world_process_zero()
        resumed, self._changed = refuse_other_settings(checkpoint, self.settings(), is_named=is_named, warns=warns)
        self.record = resumed_record(self.record, resumed)

    def refuse_shorter_schedule(self) -> None:
        """Raise `TrainingFault` where nothing was left to train since less was asked for than the checkpoint has."""
        if set(SCHEDULE).intersection(self._changed):
            raise TrainingFault(f"{self.resumed_from} has more steps than {self._changed} ask for: ask for more.")

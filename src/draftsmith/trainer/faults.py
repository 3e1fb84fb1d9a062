"""The transformers `Trainer` for long runs: safe against signals, kills, full disks, NaN and lack of memory."""

import logging
import time
from pathlib import Path
from signal import Signals
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput

from .arguments import Eagle3TrainingArguments
from .callbacks import BestHead, LogAllSteps, NonFiniteSteps, StopOnSignal
from .checkpoints import (
    STATE,
    UNFINISHED,
    TrainingFault,
    explained_write_errors,
    finish_checkpoint,
    has_all_epochs,
    last_whole_checkpoint,
    refuse_damaged,
    refuse_unwritable,
    remove_unfinished,
    rotate_checkpoints,
)


logger = logging.getLogger(__name__)


class FaultTolerantTrainer(Trainer):
    """A checkpoint exists under its name only when it is whole; a step that is not finite changes nothing.

    After a SIGTERM or SIGINT, [`train`] saves a checkpoint, returns, and leaves the signal in `stopped_by`.
    """

    args: Eagle3TrainingArguments

    def __init__(self, *, args: Eagle3TrainingArguments, **kwargs: Any):
        refuse_unwritable(args.output_dir)
        super().__init__(args=args, **kwargs)
        self._stop = StopOnSignal(self.args.world_size, self.args.process_index)
        self._best = BestHead()
        self.add_callback(self._stop)
        self.add_callback(self._best)
        self.add_callback(LogAllSteps())
        self._last_log = time.perf_counter()
        self._non_finite = NonFiniteSteps(self.args.max_nan_steps)
        self.resumed_from: Path | None = None  # the checkpoint that the last `train()` went on from
        self._has_all_epochs = False  # that checkpoint
        self._unfinished: Path | None = None  # where the checkpoint is that is being written

    @property
    def stopped_by(self) -> Signals | None:
        """The signal that ended the last `train()` early."""
        return self._stop.stopped_by

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        is_named = resume_from_checkpoint is not True and self.args.resume_from_checkpoint != "auto"
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_whole_checkpoint(self.args.output_dir, warn=logger.warning)
            if resume_from_checkpoint is None:
                raise ValueError(f"`resume_from_checkpoint`: {self.args.output_dir} holds no whole checkpoint.")
        elif resume_from_checkpoint:
            refuse_damaged(resume_from_checkpoint)
        self.resumed_from = Path(resume_from_checkpoint) if resume_from_checkpoint else None
        self._has_all_epochs = False
        if self.resumed_from is not None:
            self.refuse_other_settings(self.resumed_from, is_named=is_named)
            by_epochs = self.args.max_steps <= 0
            self._has_all_epochs = by_epochs and has_all_epochs(self.resumed_from, self.args.num_train_epochs)
        if self.args.should_save:
            remove_unfinished(Path(self.args.output_dir or "."))
        self._last_log = time.perf_counter()
        try:
            with self._stop.listening():
                return super().train(resume_from_checkpoint, *args, **kwargs)
        except torch.OutOfMemoryError as error:  # its own type and text stay: `auto_find_batch_size` knows it by them
            raise torch.OutOfMemoryError(f"{error}\n{self.memory_advice()}") from error

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:  # a training log
            now = time.perf_counter()
            logs = {**logs, "hours": self._last_logged("hours") + (now - self._last_log) / 3600}
            self._last_log = now
        super().log(logs, start_time)

    def _last_logged(self, name: str) -> float:
        """A running sum as it was last logged, also before an interruption."""
        return next((entry[name] for entry in reversed(self.state.log_history) if name in entry), 0.0)

    def memory_advice(self) -> str:
        raise NotImplementedError

    def refuse_other_settings(self, checkpoint: Path, *, is_named: bool) -> None:
        raise NotImplementedError

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """transformers would train a finished run on: by one step where the last one was within an epoch, and by many
        on fewer ranks, whose epochs have more steps."""
        if self.state.global_step < self.state.max_steps and not self._has_all_epochs:
            super()._run_epoch(*args, **kwargs)
        else:
            self.control.should_training_stop = True

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        return loss.where(loss.isfinite(), 0.0)  # the logged loss is reset by `x -= x`, which would keep NaN for good

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Optimizer:
        optimizer = super().create_optimizer(*args, **kwargs)
        plugin = self.accelerator.state.deepspeed_plugin
        if plugin is not None and plugin.zero_stage == 0 and not self.args.bf16:
            # The one kind of DeepSpeed engine that steps without a look at the gradients.
            optimizer.register_step_pre_hook(self._non_finite.before_step)
        return optimizer

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The last hook before the optimizer's step; the norm, which is that of all ranks, is there already."""
        grad_norm = super()._get_grad_norm(model, grad_norm)
        optimizer = self.optimizer.optimizer  # type: ignore[union-attr]  # below accelerate's wrapper
        if self.args.fp16:
            pass  # overflows are how the loss scale is found; the scaler skips them
        elif not self.is_deepspeed_enabled:
            self._non_finite.skip(optimizer, grad_norm)
        elif hasattr(optimizer, "overflow"):  # DeepSpeed's own: it has stepped, or skipped, within `backward`
            self._non_finite.count(torch.tensor(optimizer.overflow))
        return grad_norm

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._unfinished or super()._get_output_dir(trial))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write under a hidden name, and rename when every rank is done."""
        run_dir, name = Path(super()._get_output_dir(trial)), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        self._unfinished = unfinished = run_dir / f"{UNFINISHED}{PREFIX_CHECKPOINT_DIR}"
        try:
            with explained_write_errors(unfinished):
                super()._save_checkpoint(model, trial)
        except TrainingFault:
            remove_unfinished(run_dir)  # it may have filled the disk
            raise
        finally:
            self._unfinished = None
        self.accelerator.wait_for_everyone()
        is_best = self.state.best_model_checkpoint == str(unfinished / name)
        if is_best:
            self.state.best_model_checkpoint = str(run_dir / name)
        if self.args.should_save:
            if is_best:
                self.state.save_to_json(str(unfinished / name / STATE))
            finish_checkpoint(unfinished / name, run_dir / name)
            rotate_checkpoints(run_dir, self.args.save_total_limit, self.state)
            remove_unfinished(run_dir)
        self.accelerator.wait_for_everyone()  # no rank goes on before the checkpoint has its name
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(run_dir / name))

"""What watches a training run: signals that ask it to end, and steps that must not reach the weights."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerState

from .checkpoints import TrainingFault, step_of


class StopOnSignal(TrainerCallback):
    """SIGTERM or SIGINT: the running step is finished, a checkpoint saved and training ended.

    Not transformers' `enable_jit_checkpoint`: there every rank decides alone, after a timer of its own, so that ranks
    leave at different steps; under DeepSpeed it may save the weights of a step under the number of the one before; and
    it overwrites a checkpoint of the same step in place.
    """

    ECHO_SECONDS = 5  # Ctrl-C under a launcher arrives twice, from the terminal and from the launcher

    def __init__(self, world_size: int, rank: int = 0):
        self.world_size, self.rank = world_size, rank
        self.received = 0  # the signal's number, this rank's
        self.stopped_by: signal.Signals | None = None  # what all ranks agreed to stop on
        self._agreed = 0
        self._heard_at = 0.0
        self._flags = LateRead()

    @contextmanager
    def listening(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # no other may set handlers
            yield
            return
        self.received, self._agreed, self.stopped_by = 0, 0, None
        before = {number: signal.signal(number, self._hear) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def agree_after(self, received: int, accelerator: Any) -> None:
        """Stopped by what any rank has `received`. Every rank must call it."""
        flags = torch.tensor([received], device=accelerator.device)
        if number := int(accelerator.gather(flags).max() if self.world_size > 1 else received):
            self.stopped_by = signal.Signals(number)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            if number == signal.SIGINT and time.monotonic() - self._heard_at > self.ECHO_SECONDS:
                raise KeyboardInterrupt
            return
        self.received, self._heard_at = number, time.monotonic()
        name = signal.Signals(number).name
        text = f"\n{name}: training ends after this step with a checkpoint (Ctrl-C once more: at once, without)\n"
        if self.rank == 0:  # launchers signal all
            os.write(2, text.encode())  # a handler may have interrupted `print` or a logger, which don't nest

    def share(self, flags: Tensor) -> None:
        """Take the signals of all ranks at one step; every rank acts on them at the same later one."""
        self._agreed = max(self._agreed, self._flags.exchange(flags.max()))

    def on_step_end(self, args, state, control, **kwargs):
        stop = self.received if self.world_size == 1 else self._agreed
        if stop:
            self.stopped_by = signal.Signals(stop)
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # it comes before saving, and the time left is short

    def on_save(self, args, state, control, **kwargs):
        if self.world_size == 1 and self.received:  # while it was saved: no need for another step
            self.stopped_by = signal.Signals(self.received)
            control.should_training_stop = True
        if self.stopped_by:
            # With it the end of training would load the best weights and might delete the checkpoint just saved.
            state.best_model_checkpoint = None

    def on_epoch_end(self, args, state, control, **kwargs):
        if self.stopped_by:
            control.should_evaluate = control.should_save = False  # saved at the end of its step


class BestHead(TrainerCallback):
    """With `load_best_model_at_end` the head ends as that of an earlier step: which, and what was logged of it."""

    def __init__(self) -> None:
        self.step: int | None = None  # None: the head is that of the last step
        self._logs_before = 0

    def loaded(self, state: TrainerState) -> None:
        # Not `best_global_step`, at which there may have been no checkpoint.
        self.step, self._logs_before = step_of(Path(state.best_model_checkpoint or "")), len(state.log_history)

    def on_train_begin(self, args, state, control, **kwargs):
        self.step = None

    def logs(self, history: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What was logged until its step, and since it was loaded."""
        until = [entry for entry in history[: self._logs_before] if entry["step"] <= self.step]
        since = [{**entry, "step": self.step} for entry in history[self._logs_before :]]
        return [*until, *since]


class LogAllSteps(TrainerCallback):
    """A log before each checkpoint and at the end, so that no step is missing from the figures of either.

    It comes after the callbacks that decide; whether a checkpoint is the best is known only once it is evaluated.
    """

    def on_step_end(self, args, state, control, **kwargs):
        control.should_log |= control.should_save or control.should_evaluate or control.should_training_stop

    on_epoch_end = on_step_end


class NonFiniteSteps:
    """Steps whose gradient norm is not finite leave weights and optimizer as they are; too many in a row end training.

    The norm is that of all ranks, so they decide alike without communication of their own.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self._since_log: Tensor | int = 0
        self._in_row: Tensor | int = 0
        self._late_in_row = LateRead()

    def skip(self, optimizer: Optimizer, grad_norm: Tensor) -> None:
        """Make the coming `optimizer.step()` do nothing if the norm is not finite. Called at every optimizer step."""
        skipped = ~grad_norm.isfinite()
        if optimizer.defaults.get("fused"):
            # The protocol of `GradScaler`: the kernel reads the flag, the host need not.
            optimizer.found_inf = skipped.float()  # type: ignore[attr-defined]
        elif skipped:
            optimizer.zero_grad(set_to_none=True)  # parameters without a gradient are passed over
        self.count(skipped)

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """[`skip`] as a hook of the optimizer's step, for a caller that does not give the norm away."""
        parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
        self.skip(optimizer, get_total_norm([item.grad for item in parameters if item.grad is not None]))

    def count(self, skipped: Tensor) -> None:
        self._since_log = self._since_log + skipped
        self._in_row = (self._in_row + 1) * skipped
        if (in_row := self._late_in_row.exchange(self._in_row)) >= self.limit:
            raise TrainingFault(
                f"{in_row} steps in a row had a loss or gradients that are not finite "
                "(`max_nan_steps`); none of them changed the weights. Look for infinities in the target's states on "
                "the data of these steps (those of a cache are checked by `draftsmith cache --verify true`); if the "
                "loss grew before, resume from an earlier checkpoint with a lower `learning_rate`."
            )

    def pop_count(self) -> int:
        """The skipped steps since the last call. Waits for the device."""
        count, self._since_log = int(self._since_log), 0
        return count


class LateRead:
    """A number on the device for the host, one step late: by then it has long been made, and no step waits for it."""

    def __init__(self) -> None:
        self._pending: tuple[Tensor, torch.Event] | None = None

    def exchange(self, number: Tensor) -> int:
        """Hand in this step's number and get the last step's, 0 at first. On the CPU there is nothing to wait for."""
        if number.device.type == "cpu":
            return int(number)
        last, copy, event = self._pending, number.to("cpu", non_blocking=True), torch.Event(number.device)
        event.record()
        self._pending = (copy, event)
        if last is None:
            return 0
        last[1].synchronize()
        return int(last[0])

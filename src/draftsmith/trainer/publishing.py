"""Publishing what a run makes: its record, its card, and one checked upload, whatever the number of ranks."""

import logging
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any

from accelerate.utils import broadcast_object_list
from huggingface_hub import CommitInfo
from transformers.trainer_utils import HubStrategy, TrainOutput

from .. import hub
from ..data.files import written_whole
from ..model_card import RUN_FILE, License, RunRecord, check_card
from .adapters import is_adapted
from .arguments import Eagle3TrainingArguments, in_our_fields, refuse_unpublishable, repository_of
from .checkpoints import TrainingFault
from .records import finished_record, unnamed_models
from .resuming import ResumingTrainer
from .uploads import BackgroundPush, set_aside


logger = logging.getLogger(__name__)

WITH_CHECKPOINTS = (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS)
HEAD = "head"
STAGED = "_push-"  # what the name of a directory begins with whose files are on their way to the Hub


class PublishingTrainer(ResumingTrainer):
    """Heads come with `run.json`; the Hub gets them, checked, by `push_to_hub` and as `hub_strategy` says.

    Attributes:
        is_repeated: whether `train()` was given the last checkpoint of a finished run, and so trained nothing.
        push_follows: whether the caller pushes after `train()`, and says then what the last step's push fails at, too.
    """

    def __init__(self, *, args: Eagle3TrainingArguments, **kwargs: Any):
        self.is_repeated = False
        self.push_follows = False
        self._is_ready_to_push = False
        self._uploads = BackgroundPush()
        self._cut_by = 0  # the signal that ended a wait for a push
        self._makes_directory = not Path(args.output_dir or ".").exists()
        if args.push_to_hub:
            refuse_unpublishable(args)
        super().__init__(args=args, **kwargs)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        self.prepare_push()
        if self.args.should_save:
            with tempfile.TemporaryDirectory() as scratch:
                self.finished_record().save(scratch)  # what it refuses is not found out at the end
            for leftover in Path(self.args.output_dir or ".").glob(f"{STAGED}*"):
                shutil.rmtree(leftover, ignore_errors=True)
        self._cut_by = 0
        output = super().train(resume_from_checkpoint, *args, **kwargs)
        if self.resumed_from is not None and self.resumed_from.name == f"checkpoint-{self.state.global_step}":
            self.refuse_shorter_schedule()
            if self.is_world_process_zero():
                logger.warning("%s is of a finished run: nothing was left to train.", self.resumed_from)
            self.is_repeated = True
        if self.args.push_to_hub:
            self._stop.agree_after(self._cut_by, self.accelerator)
        return output

    def prepare_push(self) -> None:
        """Make the repository, if a push is asked for, before there is anything to push. Every rank must call it.

        Raises:
            ValueError: the card could not name the models that belong to the head, or the Hub does not let us push.
        """
        if not self.args.push_to_hub or self._is_ready_to_push:
            return
        refusal = unnamed_models(self.record, self.args, adapts=is_adapted(self.model)) or self._closed_repository()
        if refusal is not None:
            if self._makes_directory and self.args.should_save:
                with suppress(OSError):  # it is not empty
                    Path(self.args.output_dir or ".").rmdir()
            raise ValueError(f"`push_to_hub`: {refusal}")
        self._is_ready_to_push = True

    def _closed_repository(self) -> str | None:
        """Why the repository can't be pushed to, on all ranks; the first asks."""
        refusal: list[str | None] = [None]
        if self.is_world_process_zero():
            options = self._push_options("")
            try:
                self.hub_model_id = hub.open_repository(  # type: ignore[assignment]
                    repository_of(self.args), **{name: options[name] for name in ("token", "private", "revision")}
                )
            except (hub.HubError, ValueError) as error:
                refusal = [in_our_fields(error)]
        broadcast_object_list(refusal)
        return refusal[0]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, True)  # transformers would push here, before there is a card
        if not _internal_call:
            self.save_record(output_dir)
        elif self.args.should_save and output_dir is not None:
            self.save_settings(output_dir)

    def save_record(self, output_dir: str | None = None) -> None:
        """Write `run.json`; that of a finished run stays as it is when the run is only repeated."""
        directory = Path(output_dir or self.args.output_dir or ".")
        if self.args.should_save and not (self.is_repeated and (directory / RUN_FILE).exists()):
            self.finished_record().save(directory)

    def finished_record(self) -> RunRecord:
        """`record` with what the run has found out so far."""
        return finished_record(self.record, self.args, self.state.log_history, self.state.global_step, self._best)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        token, self.args.hub_token = self.args.hub_token, None  # the arguments are saved with the checkpoint
        try:
            super()._save(output_dir, state_dict)
        finally:
            self.args.hub_token = token

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """The name of the repository, which the first push makes: nothing goes up before everything is checked."""
        self.hub_model_id = repository_of(self.args)  # type: ignore[assignment]

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        *_: Any,
        directory: str | Path | None = None,
        evaluations: Sequence[Mapping[str, Any]] = (),
        **kwargs: Any,
    ) -> None:
        """Write README.md beside the head in `directory` (default: `output_dir`), unless its own was edited by hand.

        One in `output_dir` that someone has edited stays as it is, and goes along.

        Args:
            license: the Hub's identifier; default: `args.hub_license`.
            evaluations: what `draftsmith evaluate --output` wrote.

        Raises:
            ValueError: the target has no name, or the card is not one that the Hub takes.
        """
        if not self.is_world_process_zero():
            return
        own, directory = Path(self.args.output_dir or "."), Path(directory or self.args.output_dir or ".")
        if hub.keeps_edited_card(directory, own):
            return
        license = license or self.args.hub_license
        text = hub.make_card(
            directory,
            RunRecord.load(directory),
            config=hub.read_config(directory),
            repo_id=self.hub_model_id and hub.full_name(self.hub_model_id, self.args.hub_token),
            license=None if license is None else License(license),
            evaluations=evaluations,
        )
        check_card(text)
        with written_whole(directory / hub.CARD) as unfinished:
            unfinished.write_text(text, encoding="utf-8")

    def push_to_hub(  # type: ignore[override]
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        create_pr: bool = False,
        save: bool = True,
        **kwargs: Any,
    ) -> CommitInfo | Future | None:
        """Save the head and push it with its card, as one commit. Every rank must call it, and rank 0 pushes.

        Args:
            blocking: False returns a future of the commit.
            token, revision, private: default: `args.hub_token`, `args.hub_revision`, `args.hub_private_repo`.
            create_pr: open a pull request to `main` instead of committing; `args.hub_revision` does not count then.
            save: False pushes what `save_model` has written to `output_dir`, without writing it once more.
            kwargs: of `create_model_card`, such as `evaluations`.

        Raises:
            ValueError: the head or its card is not fit to be pushed; nothing was sent.
            draftsmith.hub.HubError: the Hub did not take it; local files are whole.
        """
        if self.hub_model_id is None:
            self.init_hf_repo()
        if save:
            self.save_model()
        if not self.is_world_process_zero():
            return None
        options = self._push_options(commit_message or "Upload draft head", token, revision, private)
        if create_pr:
            options |= {"create_pr": True, "revision": revision}
        repo_id = self._name_repository(options["token"])
        self.create_model_card(**kwargs)
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self._uploads.wait()
        push = partial(hub.push, self.args.output_dir or ".", repo_id, **options)
        return push() if blocking else self._uploads.start(push, outlives=True)

    def _name_repository(self, token: str | None) -> str:
        """Its full name, which the card says: whose it is, is asked only when there is something to push."""
        repo_id = hub.full_name(repository_of(self.args), token)
        self.hub_model_id = repo_id  # type: ignore[assignment]
        return repo_id

    @property
    def _push_at_the_end(self) -> str:
        return f"draftsmith.hub.push({self.args.output_dir!r}, {repository_of(self.args)!r}, only='head')"

    def _push_options(
        self, message: str, token: str | None = None, revision: str | None = None, private: bool | None = None
    ) -> dict[str, Any]:
        return {
            "commit_message": message,
            "token": token or self.args.hub_token,
            "revision": revision or self.args.hub_revision,
            "private": self.args.hub_private_repo if private is None else private,
            "only": "head",
        }

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push the head of this step, and its checkpoint if `hub_strategy` asks for it, while training goes on."""
        if self._unfinished is not None or self.args.hub_strategy == HubStrategy.END:
            return  # its files may still move
        if self.stopped_by is not None:
            return  # the time left is short
        staged = Path(self.args.output_dir or ".") / f"{STAGED}{self.state.global_step}"
        try:
            self.save_model(str(staged / HEAD))  # on all ranks: under ZeRO-3 they gather it together
            if not self.is_world_process_zero():
                return
            if self._uploads.is_busy and not self.args.hub_always_push:
                shutil.rmtree(staged, ignore_errors=True)
                return
            if self.args.hub_strategy in WITH_CHECKPOINTS:
                set_aside(Path(checkpoint_folder), staged / Path(checkpoint_folder).name)
        except (TrainingFault, OSError) as error:
            shutil.rmtree(staged, ignore_errors=True)
            logger.error(
                "Training goes on, but the head of step %d did not reach the Hub, since its files could not be set "
                "aside in %s: %s. Make room there; the next push, or the last, brings what this one lacked.",
                self.state.global_step, staged, error.__cause__ or error,
            )  # fmt: skip
            return
        self._finish_current_push()
        if self._cut_by:
            shutil.rmtree(staged, ignore_errors=True)
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        options = self._push_options(f"Training in progress, step {self.state.global_step}")
        options["again"] = self._push_at_the_end
        is_last = self.state.global_step >= self.state.max_steps  # asked now: training goes on beside the push
        push = partial(self._upload, staged, Path(checkpoint_folder).name, options, is_last=is_last)
        self._uploads.start(push, outlives=False)

    def _upload(self, staged: Path, checkpoint: str, options: dict[str, Any], *, is_last: bool) -> None:
        """A push that fails is reported and does not end the run: the next one, or the last, brings what it lacked."""
        strategy = self.args.hub_strategy
        try:
            repo_id = self._name_repository(options["token"])
            self.create_model_card(directory=staged / HEAD)
            hub.push(staged / HEAD, repo_id, **options)
            if strategy in WITH_CHECKPOINTS:
                path = "last-checkpoint" if strategy == HubStrategy.CHECKPOINT else checkpoint
                hub.push(staged / checkpoint, repo_id, **{**options, "only": "checkpoint", "path_in_repo": path})
        except (hub.HubError, ValueError, OSError) as error:
            if not (is_last and self.push_follows):
                begin = "The head" if is_last else "Training goes on, but its head"
                logger.error("%s did not reach the Hub. %s", begin, error)
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def _finish_current_push(self) -> None:
        """Wait for it, while training listens for signals: one that comes ends the wait, and with it the run."""
        if not self._uploads.wait(until=lambda: self._stop.received):
            self._cut_by = self._stop.received
            logger.error(
                "%s ended the wait for a push to `%s`, which may not have arrived whole; local files are whole. The "
                "run goes on, and pushes again, with `resume_from_checkpoint` auto.",
                Signals(self._cut_by).name, self.hub_model_id,
            )  # fmt: skip

    @property
    def is_pushing(self) -> bool:
        """Whether a push is under way beside this."""
        return self._uploads.is_busy

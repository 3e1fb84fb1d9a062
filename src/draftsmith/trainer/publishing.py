"""Publishing what a run makes: its record, its card, and one checked upload, whatever the number of ranks."""

import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo
from transformers.trainer_utils import HubStrategy, TrainOutput

from .. import hub
from ..model_card import (
    RUN_FILE,
    License,
    RunRecord,
    Source,
    check_card,
    device_counts,
    library_versions,
    training_recipe,
)
from ..model_card.run_record import HUB, MEMORY
from ..target_family import base_model
from .adapters import is_adapted
from .arguments import Eagle3TrainingArguments
from .checkpoints import files_moved_to
from .faults import FaultTolerantTrainer


logger = logging.getLogger(__name__)

STAGED = "_push-"  # what the name of a directory begins with whose files are on their way to the Hub
NOT_PUSHED = (*hub.LEFT_BY_TRAINING, "runs/*", "last-checkpoint/*", "training_args.bin")


class PublishingTrainer(FaultTolerantTrainer):
    """Heads come with `run.json`; the Hub gets them, checked, by `push_to_hub` and as `hub_strategy` says.

    Attributes:
        record: what is known of target and data; what the run itself finds out is added when it is saved.
        is_repeated: whether `train()` was given the last checkpoint of a finished run, and so trained nothing.
    """

    def __init__(self, *, args: Eagle3TrainingArguments, **kwargs: Any):
        self.record = RunRecord()
        self.is_repeated = False
        self._uploads: Future | None = None
        self._makes_directory = not Path(args.output_dir or ".").exists()
        if args.push_to_hub:
            _refuse_unpublishable(args)
        super().__init__(args=args, **kwargs)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        self.refuse_unnamed_models()
        if self.args.should_save:
            with tempfile.TemporaryDirectory() as scratch:
                self.finished_record().save(scratch)  # what it refuses is not found out at the end
            for leftover in Path(self.args.output_dir or ".").glob(f"{STAGED}*"):
                shutil.rmtree(leftover, ignore_errors=True)
        output = super().train(resume_from_checkpoint, *args, **kwargs)
        if resume_from_checkpoint and Path(str(resume_from_checkpoint)).name == f"checkpoint-{self.state.global_step}":
            if self.is_world_process_zero():
                logger.warning("%s is of a finished run: nothing was left to train.", resume_from_checkpoint)
            self.is_repeated = True
        return output

    def refuse_unnamed_models(self) -> None:
        """Raise `ValueError` if a push is asked for and its card could not name the models that belong to the head."""
        target, base, refusal = self.record.target, self.record.draft, None
        if not self.args.push_to_hub:
            return
        if target is None or target.kind == MEMORY:
            refusal = (
                "`push_to_hub`: the target has no name for the card: load it with `from_pretrained`, or say "
                "`trainer.record.target = draftsmith.model_card.Source(<Hub id>)`."
            )
        elif is_adapted(self.model) and (base is None or base.kind != HUB):
            refusal = (
                "`push_to_hub`: the head that is adapted is not on the Hub, so its adapter could not be loaded from "
                "there: push the head first, and adapt it by its id."
            )
        if refusal is not None:
            if self._makes_directory and self.args.should_save:
                with suppress(OSError):  # it is not empty
                    Path(self.args.output_dir or ".").rmdir()
            raise ValueError(refusal)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, True)  # transformers would push here, before there is a card
        if not _internal_call:
            self.save_record(output_dir)

    def save_record(self, output_dir: str | None = None) -> None:
        """Write `run.json`; that of a finished run stays as it is when the run is only repeated."""
        directory = Path(output_dir or self.args.output_dir or ".")
        if self.args.should_save and not (self.is_repeated and (directory / RUN_FILE).exists()):
            self.finished_record().save(directory)

    def finished_record(self) -> RunRecord:
        """`record` with what the run has found out so far."""
        trained, evaluated = (
            next((entry for entry in reversed(self.state.log_history) if name in entry), {})
            for name in ("loss", "eval_loss")
        )
        tokens, hours = trained.get("num_tokens"), trained.get("hours")
        return replace(
            self.record,
            recipe=training_recipe(self.args, **self.record.recipe, steps=self.state.global_step),
            devices=device_counts(self.args),
            hours=hours,
            tokens_seen=None if tokens is None else int(tokens),
            tokens_per_second=tokens / (3600 * hours) if tokens and hours else None,
            train_metrics={name: float(value) for name, value in trained.items()},
            eval_metrics={name: float(value) for name, value in evaluated.items()},
            versions=library_versions(),
        )

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        token, self.args.hub_token = self.args.hub_token, None  # the arguments are saved with the checkpoint
        try:
            super()._save(output_dir, state_dict)
        finally:
            self.args.hub_token = token

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """The name of the repository, which the first push makes: nothing goes up before everything is checked."""
        self.hub_model_id = _repository(self.args)  # type: ignore[assignment]

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        *_: Any,
        directory: str | Path | None = None,
        evaluations: Sequence[Mapping[str, Any]] = (),
        **kwargs: Any,
    ) -> None:
        """Write README.md beside the head in `directory` (default: `output_dir`), with what `run.json` there says.

        Args:
            license: the Hub's identifier; default: `args.hub_license`.
            evaluations: what `draftsmith evaluate --output` wrote.

        Raises:
            ValueError: the target has no name, or the card is not one that the Hub takes.
        """
        if not self.is_world_process_zero():
            return
        directory = Path(directory or self.args.output_dir or ".")
        license = license or self.args.hub_license
        config = directory / "config.json"
        text = hub.make_card(
            directory,
            RunRecord.load(directory),
            config=json.loads(config.read_text()) if config.is_file() else None,
            repo_id=self.hub_model_id,
            license=None if license is None else License(license),
            evaluations=evaluations,
        )
        check_card(text)
        with files_moved_to(directory) as unfinished:
            (unfinished / hub.CARD).write_text(text, encoding="utf-8")

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
            create_pr: open a pull request instead of committing.
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
        self.create_model_card(**kwargs)
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        options = self._push_options(commit_message or "Upload draft head", token, revision, private)
        options["create_pr"] = create_pr
        self._finish_current_push()
        push = partial(hub.push, self.args.output_dir or ".", _repository(self.args), **options)
        if blocking:
            return push()
        return self._in_background(push)

    def _push_options(
        self, message: str, token: str | None = None, revision: str | None = None, private: bool | None = None
    ) -> dict[str, Any]:
        return {
            "commit_message": message,
            "token": token or self.args.hub_token,
            "revision": revision or self.args.hub_revision,
            "private": self.args.hub_private_repo if private is None else private,
            "ignore_patterns": NOT_PUSHED,
            "again": "trainer.push_to_hub(..)",
        }

    def _in_background(self, push: Callable[[], Any]) -> Future:
        executor = ThreadPoolExecutor(1)
        self._uploads = executor.submit(push)
        executor.shutdown(wait=False)  # the thread ends with its push
        return self._uploads

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push the head of this step, and its checkpoint if `hub_strategy` asks for it, while training goes on."""
        if self._unfinished is not None or self.args.hub_strategy == HubStrategy.END:
            return  # its files may still move
        staged = Path(self.args.output_dir or ".") / f"{STAGED}{self.state.global_step}"
        self.save_model(str(staged))  # on all ranks: under ZeRO-3 they gather it together
        if not self.is_world_process_zero():
            return
        is_busy = self._uploads is not None and not self._uploads.done()
        if is_busy and not self.args.hub_always_push:
            shutil.rmtree(staged, ignore_errors=True)
            return
        self._finish_current_push()
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        options = self._push_options(f"Training in progress, step {self.state.global_step}")
        self._in_background(partial(self._upload, staged, Path(checkpoint_folder), options))

    def _upload(self, staged: Path, checkpoint: Path, options: dict[str, Any]) -> None:
        """A push that fails is reported and does not end the run: the next one, or the last, brings what it lacked."""
        strategy = self.args.hub_strategy
        try:
            self.create_model_card(directory=staged)
            hub.push(staged, _repository(self.args), **options)
            if strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
                path = "last-checkpoint" if strategy == HubStrategy.CHECKPOINT else checkpoint.name
                options |= {"ignore_patterns": None, "pickles": True, "path_in_repo": path}
                hub.push(checkpoint, _repository(self.args), **options)
        except (hub.HubError, ValueError, OSError) as error:
            logger.error("Training goes on, but its head did not reach the Hub. %s", error)
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def _finish_current_push(self) -> None:
        if self._uploads is not None:
            self._uploads.exception()  # waits; what it raised is for whoever holds the future


def record_of(model: Any, target: Any, train_dataset: Any, eval_dataset: Any, seed: int) -> RunRecord:
    """What a trainer is given; who knows where its data comes from says so in `record`."""
    head, config = base_model(model), target.model.config
    sets = [train_dataset], eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
    trained, evaluated = (
        [Source.of(None, rows=len(data) if isinstance(data, Sized) else None) for data in part if data is not None]
        for part in sets
    )
    return RunRecord(
        target=Source.of(config.name_or_path, revision=vars(config).get("_commit_hash")),
        target_precision=target.precision,
        target_adapter=None if target.adapter is None else Source.of(target.adapter),
        draft=Source.of(head.name_or_path) if head.name_or_path else None,
        datasets=trained,
        eval_datasets=evaluated,
        seed=seed,
        target_vocab_size=head.config.vocab_size,
        draft_vocab_size=head.config.draft_vocab_size,
        trained_parameters=sum(weight.numel() for weight in model.parameters() if weight.requires_grad),
    )


def _repository(args: Eagle3TrainingArguments) -> str:
    return args.hub_model_id or Path(args.output_dir or ".").absolute().name


def _refuse_unpublishable(args: Eagle3TrainingArguments) -> None:
    """What is known before training: the repository's name, the license, whether there is a token."""
    if args.hub_license is not None:
        License(args.hub_license)
    try:
        hub.check_push(_repository(args), args.hub_token)
    except hub.HubError as error:
        raise ValueError(f"`push_to_hub`: {error}") from error

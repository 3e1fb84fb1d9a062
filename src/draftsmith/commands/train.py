"""`draftsmith train`: a draft head for a frozen target, from chat data to a directory that servers load."""

import logging
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate.utils import broadcast_object_list
from huggingface_hub import CommitInfo
from transformers import set_seed
from transformers.trainer_callback import TrainerCallback

from ..data import DataArguments, PreparedData, draft_vocabulary_map
from ..hub import HubError
from ..model_card import RunRecord
from ..models.eagle3 import Eagle3DraftModel
from ..models.eagle3.adapters_eagle3 import is_adapter
from ..target_family import embedding_weight
from ..trainer import Eagle3Trainer, Eagle3TrainingArguments
from ..trainer.adapters import is_adapted, refuse_other_kind
from ..trainer.arguments import in_our_fields
from ..trainer.checkpoints import TrainingFault, last_whole_checkpoint, refuse_damaged, refuse_unwritable
from ..trainer.settings import OtherSettingsError, refuse_other_settings, settings_of
from . import leave_together
from .arguments import AdapterArguments, DraftArguments, OptionalTargetArguments, StateArguments, check_draft
from .parsing import UsageError, parse, usage_errors
from .run_record import as_given, with_sources
from .training_inputs import cached_inputs, computed_inputs, explained_damage


logger = logging.getLogger(__name__)


@explained_damage()
def main(argv: Sequence[str] | None = None, callbacks: Sequence[TrainerCallback] = ()) -> Eagle3Trainer:
    """Train, save the head, or its adapter, in the target's dtype to `output_dir`, and return the trainer.

    A run that a signal ends saves a checkpoint only and exits with status 128 plus the signal's number, as if that had
    killed it: launchers and schedulers must not take it for a finished one. Other faults exit with status 1.
    """
    target_args, state_args, draft_args, adapter_args, data_args, args = parse(
        (OptionalTargetArguments, StateArguments, DraftArguments, AdapterArguments, DataArguments,
         Eagle3TrainingArguments), argv
    )  # fmt: skip
    set_seed(args.seed)
    checkpoint = resume_point(args)
    with usage_errors():
        if checkpoint is not None and state_args.hidden_states is None:  # else its manifest says more
            given = settings_of(as_given(RunRecord(), target_args, draft_args, data_args), args)
            is_named = args.resume_from_checkpoint != "auto"
            refuse_other_settings(Path(checkpoint), given, is_named=is_named, warns=False)  # the trainer knows all
        trainer = make_trainer(target_args, state_args, draft_args, adapter_args, data_args, args, callbacks)
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
        if trainer.stopped_by is None:
            trainer.save_model()
    except OtherSettingsError as error:
        raise UsageError(str(error)) from error
    except TrainingFault as fault:
        sys.exit(f"error: {fault}")
    if trainer.stopped_by is not None:
        leave_stopped(trainer)
    trainer.save_state()
    if trainer.eval_dataset is not None:
        trainer.save_metrics("eval", trainer.evaluate())
        trainer.save_record()
    commit = push(trainer) if args.push_to_hub else None
    if trainer.is_world_process_zero():
        print(last_word(trainer, target_args), flush=True)
    if commit is not None:
        print(f"Pushed to {commit.repo_url}", flush=True)
    return trainer


def make_trainer(
    target_args: OptionalTargetArguments,
    state_args: StateArguments,
    draft_args: DraftArguments,
    adapter_args: AdapterArguments,
    data_args: DataArguments,
    args: Eagle3TrainingArguments,
    callbacks: Sequence[TrainerCallback],
) -> Eagle3Trainer:
    """Everything that can be refused, by `ValueError`, `OSError` or `ImportError`, is refused here."""
    peft_config = adapter_args.load(draft_args.draft)
    refuse_other_kind(args.output_dir or ".", adapts=peft_config is not None)
    if (source := draft_args.draft) is not None:
        refuse_another_head(draft_args, data_args)
        check_draft(source)
        if args.process_index == 0 and is_adapter(source):
            logger.warning("`draft` %s is an adapter: training starts from its head, merged with it.", source)
    if state_args.hidden_states is None:
        inputs = computed_inputs(target_args, data_args, args)
    else:
        inputs = cached_inputs(state_args.hidden_states, target_args, draft_args, args)
    draft_args, data_args = inputs.decide(draft_args, data_args)
    draft = make_draft(draft_args, data_args, inputs.draft_source, inputs.data)
    trainer = Eagle3Trainer(
        draft,
        inputs.target,
        args,
        train_dataset=inputs.train,
        eval_dataset=inputs.evaluation,
        processing_class=inputs.tokenizer,
        chat_template_kwargs=data_args.chat_template_kwargs,  # type: ignore[arg-type]  # a mapping by now
        peft_config=peft_config,
        callbacks=list(callbacks),
    )
    record = with_sources(trainer.record, target_args, draft_args, data_args, inputs.data, draft)
    trainer.record = inputs.of_cache(record)
    trainer.data_digest = inputs.data.digest
    trainer.prepare_push()
    trainer.push_follows = args.push_to_hub
    return trainer


def leave_stopped(trainer: Eagle3Trainer) -> NoReturn:
    """Exit as the signal would have made this process exit, which does not wait for a push either."""
    assert trainer.stopped_by is not None
    step, name, status = trainer.state.global_step, trainer.stopped_by.name, 128 + trainer.stopped_by
    if trainer.is_world_process_zero():
        logger.warning(f"{name} ended training at step {step}: go on with `--resume_from_checkpoint auto`.")
    if trainer.is_pushing:  # the threads of the Hub's client would be waited for
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def push(trainer: Eagle3Trainer) -> CommitInfo | None:
    """Push what is saved, from one rank. Where that fails, every rank exits with status 1, and one says why."""
    commit: Any = None
    failure: list[str | None] = [None]
    try:
        commit = trainer.push_to_hub(save=False)
    except (HubError, ValueError) as error:
        failure = [f"error: {in_our_fields(error)}"]
    broadcast_object_list(failure)
    if failure[0] is not None:
        leave_together()
        sys.exit(failure[0] if trainer.is_world_process_zero() else 1)
    return commit


def last_word(trainer: Eagle3Trainer, target_args: OptionalTargetArguments) -> str:
    """Where the head, or adapter, is, and the commands that come next."""
    directory, adapter = str(trainer.args.output_dir), is_adapted(trainer.model)
    given = [(item.name, getattr(target_args, item.name), item.default) for item in fields(target_args)]
    flags = [part for name, value, default in given if value != default for part in (f"--{name}", str(value))]
    flags = flags if target_args.target else ["--target", trainer.target.model.config.name_or_path or "TARGET", *flags]
    commands = [
        ["evaluate", *flags, "--draft", directory, "--prompts", "mt_bench", "--output", "result.json"],
        ["card", "--draft", directory, "--evaluation", "result.json"],
    ]
    if adapter:
        commands.append(["export", "--draft", directory, "--merge", "true", "--output", f"{directory}-merged"])
    again = "The run had finished before, and nothing was trained: " if trainer.is_repeated else ""
    serve = "and merge it into a head to serve" if adapter else "which has the commands that serve it"
    first = f"{again}{directory} holds the {'adapter' if adapter else 'head'}. Measure it, write its card, {serve}:"
    return "\n  ".join([first, *(shlex.join(["draftsmith", *words]) for words in commands)])


def refuse_another_head(draft_args: DraftArguments, data_args: DataArguments) -> None:
    """Raise for fields that ask for another head than the one that `draft` is."""
    if ignored := draft_args.architecture_given():
        raise ValueError(f"`draft` keeps its architecture: leave out {', '.join(ignored)}.")
    if data_args.draft_vocab_size is not None or data_args.vocab_map is not None:
        raise ValueError("`draft` keeps its vocabulary map: leave out `draft_vocab_size` and `vocab_map`.")


def make_draft(
    draft_args: DraftArguments, data_args: DataArguments, target: Any, data: PreparedData
) -> Eagle3DraftModel:
    """A warm start from `draft`, with its own map; or a new head with a map of the training data."""
    implementation = draft_args.draft_attn_implementation
    if draft_args.draft is not None:
        return Eagle3DraftModel.from_pretrained(
            draft_args.draft, target=target, dtype=torch.float32, attn_implementation=implementation
        )
    d2t = draft_vocabulary_map(data_args, data.train, len(embedding_weight(target)))
    return Eagle3DraftModel.from_target(target, d2t=d2t, **draft_args.options())


def resume_point(args: Eagle3TrainingArguments) -> str | None:
    """The checkpoint to go on from. An output directory that already holds some is never trained over by accident."""
    with usage_errors():
        refuse_unwritable(args.output_dir)
    warn = logger.warning if args.process_index == 0 else logger.debug
    last = last_whole_checkpoint(args.output_dir, warn=warn)
    if args.resume_from_checkpoint == "auto":
        if last is not None:
            warn("Resuming from %s", last)
        return last
    if args.resume_from_checkpoint is not None:
        with usage_errors():
            refuse_damaged(args.resume_from_checkpoint)
    elif last is not None:
        raise UsageError(
            f"`output_dir` {args.output_dir} already holds checkpoints, the last whole one {Path(last).name}: pass "
            "--resume_from_checkpoint auto to go on, or another `output_dir`."
        )
    return args.resume_from_checkpoint

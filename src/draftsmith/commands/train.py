"""`draftsmith train`: a draft head for a frozen target, from chat data to a directory that servers load."""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel, set_seed
from transformers.trainer_callback import TrainerCallback

from ..data import DataArguments, PreparedData, draft_vocabulary_map, prepare_datasets
from ..hub import HubError
from ..models.eagle3 import Eagle3DraftModel
from ..target_family import embedding_weight
from ..trainer import Eagle3Trainer, Eagle3TrainingArguments
from ..trainer.checkpoints import TrainingFault, last_whole_checkpoint, refuse_damaged, refuse_unwritable
from .arguments import AdapterArguments, DraftArguments, TargetArguments
from .parsing import UsageError, parse, usage_errors
from .run_record import with_sources


logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None, callbacks: Sequence[TrainerCallback] = ()) -> Eagle3Trainer:
    """Train, save the head, or its adapter, in the target's dtype to `output_dir`, and return the trainer.

    A run that a signal ends saves a checkpoint only and exits with status 128 plus the signal's number, as if that had
    killed it: launchers and schedulers must not take it for a finished one. Other faults exit with status 1.
    """
    target_args, draft_args, adapter_args, data_args, args = parse(
        (TargetArguments, DraftArguments, AdapterArguments, DataArguments, Eagle3TrainingArguments), argv
    )
    set_seed(args.seed)
    checkpoint = resume_point(args)
    with usage_errors():
        target_args.check_placement(args.target_tp)
        peft_config = adapter_args.load(draft_args.draft)
        tokenizer = target_args.load_tokenizer()
        with args.main_process_first(desc="data preparation"):
            data = prepare_datasets(data_args, tokenizer)
        target = target_args.load(tp_size=args.target_tp)
        draft = make_draft(draft_args, data_args, target, data)
        trainer = Eagle3Trainer(
            draft,
            target,
            args,
            train_dataset=data.train,
            eval_dataset=data.evaluation,
            processing_class=tokenizer,
            chat_template_kwargs=data_args.chat_template_kwargs,
            peft_config=peft_config,
            callbacks=list(callbacks),
        )
        trainer.record = with_sources(trainer.record, target_args, draft_args, data_args, data, draft)
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
        if trainer.stopped_by is None:
            trainer.save_model()
    except TrainingFault as fault:
        sys.exit(f"error: {fault}")
    if trainer.stopped_by is not None:
        step, name = trainer.state.global_step, trainer.stopped_by.name
        logger.warning(f"{name} ended training at step {step}: go on with `--resume_from_checkpoint auto`.")
        sys.exit(128 + trainer.stopped_by)
    trainer.save_state()
    if data.evaluation is not None:
        trainer.save_metrics("eval", trainer.evaluate())
        trainer.save_record()
    if args.push_to_hub:
        try:
            trainer.push_to_hub()
        except HubError as error:
            sys.exit(f"error: {error}")
    return trainer


def make_draft(
    draft_args: DraftArguments, data_args: DataArguments, target: PreTrainedModel, data: PreparedData
) -> Eagle3DraftModel:
    """A warm start from `draft`, with its own map; or a new head with a map of the training data."""
    implementation = draft_args.draft_attn_implementation
    if draft_args.draft is not None:
        if ignored := draft_args.architecture_given():
            raise ValueError(f"`draft` keeps its architecture: leave out {', '.join(ignored)}.")
        if data_args.draft_vocab_size is not None or data_args.vocab_map is not None:
            raise ValueError("`draft` keeps its vocabulary map: leave out `draft_vocab_size` and `vocab_map`.")
        return Eagle3DraftModel.from_pretrained(
            draft_args.draft, target=target, dtype=torch.float32, attn_implementation=implementation
        )
    d2t = draft_vocabulary_map(data_args, data.train, len(embedding_weight(target)))
    return Eagle3DraftModel.from_target(target, d2t=d2t, **draft_args.options())


def resume_point(args: Eagle3TrainingArguments) -> str | None:
    """The checkpoint to go on from. An output directory that already holds some is never trained over by accident."""
    with usage_errors():
        refuse_unwritable(args.output_dir)
    last = last_whole_checkpoint(args.output_dir, warn=logger.warning)
    if args.resume_from_checkpoint == "auto":
        if last is not None:
            logger.warning("Resuming from %s", last)
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

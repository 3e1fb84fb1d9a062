"""`draftsmith train`: a draft head for a frozen target, from chat data to a directory that servers load."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel, set_seed
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..data import DataArguments, PreparedData, draft_vocabulary_map, prepare_datasets
from ..models.eagle3 import Eagle3DraftModel
from ..target_family import embedding_weight
from ..trainer import Eagle3Trainer, Eagle3TrainingArguments
from .arguments import DraftArguments, TargetArguments
from .parsing import UsageError, parse, usage_errors


logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None, callbacks: Sequence[TrainerCallback] = ()) -> Eagle3Trainer:
    """Train, save the head in the target's dtype to `output_dir`, and return the trainer."""
    target_args, draft_args, data_args, args = parse(
        (TargetArguments, DraftArguments, DataArguments, Eagle3TrainingArguments), argv
    )
    set_seed(args.seed)
    checkpoint = resume_point(args)
    with usage_errors():
        tokenizer = target_args.load_tokenizer()
        with args.main_process_first(desc="data preparation"):
            data = prepare_datasets(data_args, tokenizer)
        target = target_args.load()
        draft = make_draft(draft_args, data_args, target, data)
        trainer = Eagle3Trainer(
            draft,
            target,
            args,
            train_dataset=data.train,
            eval_dataset=data.evaluation,
            processing_class=tokenizer,
            callbacks=list(callbacks),
        )
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    trainer.save_state()
    if data.evaluation is not None:
        trainer.save_metrics("eval", trainer.evaluate())
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
    last = last_whole_checkpoint(args.output_dir)
    if args.resume_from_checkpoint == "auto":
        if last is not None:
            logger.warning("Resuming from %s", last)
        return last
    if args.resume_from_checkpoint is None and last is not None:
        raise UsageError(
            f"`output_dir` {args.output_dir} already holds checkpoints, the last whole one {Path(last).name}: pass "
            "--resume_from_checkpoint auto to go on, or another `output_dir`."
        )
    return args.resume_from_checkpoint


def last_whole_checkpoint(output_dir: str | None) -> str | None:
    """The newest checkpoint that was written to its end: `trainer_state.json` is its last file."""
    states = Path(output_dir or ".").glob(f"{PREFIX_CHECKPOINT_DIR}-[0-9]*/trainer_state.json")
    whole = [path.parent for path in states if _is_json(path)]
    return str(max(whole, key=lambda path: int(path.name.split("-")[-1]))) if whole else None


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text())
    except ValueError:
        return False
    return True

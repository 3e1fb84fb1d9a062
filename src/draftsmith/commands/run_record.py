"""What `draftsmith train` knows of a run and a trainer does not: where target, head and data come from."""

from collections.abc import Sequence, Sized
from dataclasses import replace
from typing import Any

from ..data import DataArguments, PreparedData, count_tokens, coverage
from ..model_card import RunRecord, Source
from ..models.eagle3 import Eagle3DraftModel
from ..revisions import cached_commit
from .arguments import DraftArguments, TargetArguments


DECIDED = ("max_length", "packing", "row_length", "eval_fraction")  # data arguments of every recipe
CHOSEN = ("dataset_weights", "deduplicate", "max_rows", "split_long_documents")  # said only where they were given


def with_sources(
    record: RunRecord,
    target_args: TargetArguments,
    draft_args: DraftArguments,
    data_args: DataArguments,
    data: PreparedData,
    draft: Eagle3DraftModel,
) -> RunRecord:
    d2t = None if draft.d2t is None else draft.d2t.cpu()
    known = record.target.revision if record.target is not None else None
    adapter = target_args.target_adapter
    return replace(
        record,
        target=Source.of(target_args.target, revision=known or target_args.target_revision),
        target_adapter=None if adapter is None else Source.of(adapter, revision=cached_commit(adapter)),
        draft=None
        if draft_args.draft is None
        else Source.of(draft_args.draft, revision=cached_commit(draft_args.draft)),
        datasets=sources_of(data_args.dataset, data_args.split, data.train),
        eval_datasets=sources_of(data_args.eval_dataset, data_args.eval_split, data.evaluation),
        coverage=1.0 if d2t is None else coverage(count_tokens(data.train, draft.config.vocab_size), d2t),
        recipe={name: getattr(data_args, name) for name in DECIDED}
        | {name: value for name in CHOSEN if (value := getattr(data_args, name))},
    )


def sources_of(names: Sequence[str], split: str, data: Any) -> list[Source]:
    """Rows are those that were prepared of all sources together, so they are said of one alone."""
    rows = len(data) if len(names) == 1 and isinstance(data, Sized) else None
    return [Source.of(name, split=split, rows=rows) for name in names]

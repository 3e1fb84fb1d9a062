"""What `draftsmith train` knows of a run and a trainer does not: where target, head and data come from."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..data import DataArguments, PreparedData, count_documents, count_tokens, coverage
from ..model_card import RunRecord, Source
from ..model_card.metadata import LOCAL_PATH
from ..models.eagle3 import Eagle3DraftModel
from ..revisions import cached_commit
from .arguments import DraftArguments, TargetArguments


DECIDED = ("max_length", "packing", "row_length", "eval_fraction")  # data arguments of every recipe
CHOSEN = ("dataset_weights", "deduplicate", "max_rows", "split_long_documents")  # said only where they were given


def as_given(
    record: RunRecord, target_args: TargetArguments, draft_args: DraftArguments, data_args: DataArguments
) -> RunRecord:
    """`record` with what the arguments say, before anything is loaded."""
    known = record.target.revision if record.target is not None else None
    adapter, gguf_file, source = target_args.target_adapter, target_args.target_gguf_file, draft_args.draft
    return replace(
        record,
        target=Source.of(target_args.target, revision=known or target_args.target_revision),
        target_adapter=None if adapter is None else Source.of(adapter, revision=cached_commit(adapter)),
        target_gguf_file=gguf_file and (Path(gguf_file).name if LOCAL_PATH.search(gguf_file) else gguf_file),
        trust_remote_code=target_args.trust_remote_code or None,
        draft=None if source is None else Source.of(source, revision=cached_commit(source)),
        datasets=sources_of(data_args.dataset, data_args.split, None),
        recipe={name: getattr(data_args, name) for name in DECIDED}
        | {name: getattr(data_args, name) or None for name in CHOSEN},
    )


def with_sources(
    record: RunRecord,
    target_args: TargetArguments,
    draft_args: DraftArguments,
    data_args: DataArguments,
    data: PreparedData,
    draft: Eagle3DraftModel,
) -> RunRecord:
    d2t = None if draft.d2t is None else draft.d2t.cpu()
    return replace(
        as_given(record, target_args, draft_args, data_args),
        datasets=sources_of(data_args.dataset, data_args.split, data.train),
        eval_datasets=sources_of(data_args.eval_dataset, data_args.eval_split, data.evaluation),
        coverage=1.0 if d2t is None else coverage(count_tokens(data.train, draft.config.vocab_size), d2t),
    )


def sources_of(names: Sequence[str], split: str, data: Any) -> list[Source]:
    return with_rows([Source.of(name, split=split) for name in names], data)


def with_rows(sources: Sequence[Source], data: Any) -> list[Source]:
    """Rows are documents, packed or not. They were prepared of all sources together, so they are said of one alone."""
    rows = count_documents(data) if len(sources) == 1 else None
    return [replace(source, rows=rows) for source in sources]

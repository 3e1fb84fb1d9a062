"""From the data arguments to datasets: prepared, without duplicates, split, mixed and packed."""

import hashlib
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from .arguments import DataArguments
from .encoding import FEATURES
from .loading import load_sources
from .mixing import is_first, mix
from .packing import pack_dataset
from .prepare import CACHE_VERSION, Report, cached_dataset, prepare_sources
from .statistics import DatasetStatistics, dataset_statistics
from .vocabulary import build_vocabulary_map, count_tokens, coverage, load_vocabulary_map


logger = logging.getLogger(__name__)


@dataclass
class PreparedData:
    """Datasets as `DraftCollator` takes them, with their statistics (keys `train` and `evaluation`) and reports."""

    train: Dataset
    evaluation: Dataset | None
    statistics: dict[str, DatasetStatistics]
    reports: dict[str, Report]


@dataclass
class PreparedDocuments:
    """Documents of each part (`train`, `evaluation`), not packed, with their `conversation`, and the reports."""

    parts: dict[str, Dataset]
    reports: dict[str, Report]


@dataclass(frozen=True)
class _Columns:
    """What is known of each document of a dataset: `[N]` arrays."""

    lengths: np.ndarray
    keys: np.ndarray
    conversations: np.ndarray
    rows: np.ndarray  # of all sources together
    entries: np.ndarray = field(repr=False)


def prepare_datasets(args: DataArguments, tokenizer: PreTrainedTokenizerBase) -> PreparedData:
    """Load, render, tokenise, mask, split and pack the data; everything costly comes from the cache the second time.

    Args:
        args: `dataset` and `eval_dataset` may also hold `datasets.Dataset` objects.
        tokenizer: a fast tokenizer.

    Raises:
        BadRowsError: rows that can't be used, unless `on_bad_row="skip"`.
        ValueError: nothing is left to train or to evaluate on.
    """
    documents = prepare_documents(args, tokenizer)
    keys = {name: report.cache_keys for name, report in documents.reports.items()}
    finished = {name: _finish(name, part, args, keys) for name, part in documents.parts.items()}
    statistics = {name: dataset_statistics(dataset) for name, dataset in finished.items()}
    for name, numbers in statistics.items():
        logger.info(
            "%s data: %d documents in %d rows, %d tokens, %.1f%% supervised",
            name, numbers.documents, numbers.rows, numbers.tokens, 100 * numbers.supervised_share,
        )  # fmt: skip
    return PreparedData(finished["train"], finished.get("evaluation"), statistics, documents.reports)


def prepare_documents(args: DataArguments, tokenizer: PreTrainedTokenizerBase) -> PreparedDocuments:
    """What `prepare_datasets` packs; arguments and errors are the same."""
    if not args.dataset:
        raise ValueError("`dataset` is empty: name the training data.")
    train, columns, report = _prepare(args, args.dataset, args.split, tokenizer)
    kept = is_first(columns.keys, columns.rows)
    report.duplicates = len(np.unique(columns.rows[~kept]))
    kept |= not args.deduplicate
    held_out = np.zeros(len(train), dtype=bool)
    parts, reports = {}, {"train": report}
    if args.eval_dataset:
        evaluation, eval_columns, eval_report = _prepare(args, args.eval_dataset, args.eval_split, tokenizer)
        reports["evaluation"] = eval_report
        first = is_first(eval_columns.keys, eval_columns.rows)
        eval_report.duplicates = len(np.unique(eval_columns.rows[~first]))
        parts["evaluation"] = evaluation.select(np.flatnonzero(first)) if args.deduplicate else evaluation
        kept &= ~_shared_with_evaluation(columns, eval_columns, args)
    elif args.eval_fraction:
        held_out = columns.conversations < int(args.eval_fraction * 2**63)
        parts["evaluation"] = train.select(np.flatnonzero(held_out & kept))
    indices = np.flatnonzero(kept & ~held_out)
    if not all(map(len, [indices, *parts.values()])):
        raise ValueError(
            f"`eval_fraction`={args.eval_fraction} and `eval_dataset` leave one side of {len(train)} documents empty."
        )
    if args.dataset_weights:
        indices = indices[_mixture(columns, indices, args)]
    whole = len(indices) == len(train) and not args.dataset_weights
    return PreparedDocuments({"train": train if whole else train.select(indices), **parts}, reports)


def draft_vocabulary_map(args: DataArguments, train: Dataset, target_vocab_size: int) -> torch.Tensor | None:
    """The map named by `vocab_map`, or one built from the supervised tokens of `train` (anew: it can't be stale).

    Returns:
        `d2t` `[D]` int64 offsets; None at full vocabulary.
    """
    counts = count_tokens(train, target_vocab_size)
    if args.vocab_map:
        d2t = load_vocabulary_map(args.vocab_map, target_vocab_size, args.draft_vocab_size)
    else:
        d2t = build_vocabulary_map(counts, args.draft_vocab_size, target_vocab_size)
    if d2t is not None:
        share = 100 * coverage(counts, d2t)
        logger.info("The draft vocabulary holds %d tokens, %.2f%% of the supervised ones", len(d2t), share)
    return d2t


def _cache_dir(args: DataArguments) -> Path:
    return Path(args.cache_dir or datasets.config.HF_CACHE_HOME).expanduser() / "draftsmith"


def _prepare(
    args: DataArguments, names: list[str], split: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[Dataset, _Columns, Report]:
    sources = load_sources(
        names,
        config=args.dataset_config,
        split=split,
        cache_dir=args.cache_dir,
        streaming=args.streaming,
        max_rows=args.max_rows,
    )
    documents, report = prepare_sources(
        sources, tokenizer, args, cache_dir=_cache_dir(args), num_proc=args.num_proc, on_bad_row=args.on_bad_row
    )
    numbers = documents.with_format("numpy")
    source = np.repeat(np.arange(len(sources)), report.documents)
    columns = _Columns(
        lengths=numbers["length"][:],
        keys=numbers["key"][:],
        conversations=numbers["conversation"][:],
        rows=numbers["row"][:] + (source << 40),
        entries=np.array([source.entry for source in sources])[source],
    )
    return documents.select_columns([*FEATURES, "conversation"]), columns, report


def _shared_with_evaluation(train: _Columns, evaluation: _Columns, args: DataArguments) -> np.ndarray:
    """Bool `[N]`: the training documents to leave out because they are in the evaluation data, too."""
    shared = np.isin(train.keys, evaluation.keys)
    count = len(np.unique(train.rows[shared]))
    if count and not args.deduplicate:
        logger.warning("%d training rows are in the evaluation data, too; `deduplicate` leaves them out.", count)
    return shared & args.deduplicate


def _mixture(columns: _Columns, indices: np.ndarray, args: DataArguments) -> np.ndarray:
    assert args.dataset_weights is not None
    lengths, entries = columns.lengths[indices], columns.entries[indices]
    chosen = mix(lengths, columns.keys[indices], entries, args.dataset_weights, args.mixture_strategy)
    tokens = np.bincount(entries[chosen], lengths[chosen])
    for entry, name in enumerate(args.dataset):
        of_it = chosen[entries[chosen] == entry]
        logger.info(
            "mixture: %s gives %d documents, %d different of %d, %.1f%% of the tokens",
            name, len(of_it), len(np.unique(of_it)), (entries == entry).sum(), 100 * tokens[entry] / tokens.sum(),
        )  # fmt: skip
    return chosen


def _finish(part: str, documents: Dataset, args: DataArguments, cache_keys: dict[str, list[str]]) -> Dataset:
    documents = documents.select_columns(list(FEATURES))
    if not args.packing:
        return documents
    assert args.row_length is not None
    # all that decides which documents there are, and the rows they go to
    fraction = 0.0 if args.eval_dataset else args.eval_fraction
    mixture = [args.dataset_weights, args.mixture_strategy, len(args.dataset)]
    state = [CACHE_VERSION, cache_keys, part, fraction, args.deduplicate, mixture, len(documents), args.row_length]
    key = hashlib.blake2b(json.dumps(state).encode(), digest_size=16).hexdigest()
    row_length = args.row_length
    return cached_dataset(
        _cache_dir(args) / f"packed-{key}",
        lambda scratch: pack_dataset(documents, row_length, cache_file_name=str(scratch / "map.arrow")),
    )

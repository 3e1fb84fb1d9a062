"""From the data arguments to datasets: prepared, without duplicates, split, mixed and packed."""

import hashlib
import json
import logging
from dataclasses import dataclass, field

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from .arguments import DataArguments
from .encoding import FEATURES, IDENTITY
from .entries import cached_dataset
from .loading import Source, load_sources
from .mixing import DatasetShare, is_first, mix
from .packing import pack_dataset
from .prepare import CACHE_VERSION, Report, prepare_sources, refuse_other_preparation
from .scratch import data_directory
from .statistics import DatasetStatistics, dataset_statistics
from .vocabulary import build_vocabulary_map, count_tokens, coverage, load_vocabulary_map


logger = logging.getLogger(__name__)


@dataclass
class PreparedData:
    """Datasets as `DraftCollator` takes them, with their statistics (keys `train` and `evaluation`) and reports.

    `digest` names the contents of `train` before packing, if they were prepared here.
    """

    train: Dataset
    evaluation: Dataset | None
    statistics: dict[str, DatasetStatistics]
    reports: dict[str, Report]
    digest: str | None = None


@dataclass
class PreparedDocuments:
    """Documents of each part (`train`, `evaluation`), not packed, and the reports.

    Columns are those of a prepared dataset and of `identity.Identity`; `keys` names the contents of each part,
    `shares` says what each entry of `dataset` gives to `train`.
    """

    parts: dict[str, Dataset]
    reports: dict[str, Report]
    keys: dict[str, str]
    shares: list[DatasetShare]


@dataclass(frozen=True)
class _Columns:
    """What is known of each document of a dataset: `[N]` arrays."""

    lengths: np.ndarray
    keys: np.ndarray
    conversations: np.ndarray
    rows: np.ndarray
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
    finished = {name: _finish(part, documents.keys[name], args) for name, part in documents.parts.items()}
    statistics = {name: dataset_statistics(dataset) for name, dataset in finished.items()}
    for name, numbers in statistics.items():
        logger.info(
            "%s data: %d documents in %d rows, %d tokens, %.1f%% supervised",
            name, numbers.documents, numbers.rows, numbers.tokens, 100 * numbers.supervised_share,
        )  # fmt: skip
    evaluation = finished.get("evaluation")
    return PreparedData(finished["train"], evaluation, statistics, documents.reports, documents.keys["train"])


def prepare_documents(args: DataArguments, tokenizer: PreTrainedTokenizerBase) -> PreparedDocuments:
    """What `prepare_datasets` packs; arguments and errors are the same."""
    if not args.dataset:
        raise ValueError("`dataset` is empty: name the training data.")
    sources = {"dataset": _load(args, "train"), "eval_dataset": _load(args, "evaluation")}
    for name, of_it in sources.items():
        refuse_other_preparation(name, of_it, tokenizer, args)
    train, columns, report = _prepare(args, sources["dataset"], tokenizer)
    kept = is_first(columns.keys, columns.rows)
    report.duplicates = len(np.unique(columns.rows[~kept]))
    kept |= not args.deduplicate
    held_out = np.zeros(len(train), dtype=bool)
    chosen, reports = {}, {"train": report}
    if args.eval_dataset:
        evaluation, eval_columns, reports["evaluation"] = _prepare(args, sources["eval_dataset"], tokenizer)
        first = is_first(eval_columns.keys, eval_columns.rows)
        reports["evaluation"].duplicates = len(np.unique(eval_columns.rows[~first]))
        chosen["evaluation"] = (evaluation, np.flatnonzero(first | (not args.deduplicate)))
        kept &= ~_shared_with_evaluation(columns, eval_columns, args)
    elif args.eval_fraction:
        held_out = columns.conversations < int(args.eval_fraction * 2**63)
        chosen["evaluation"] = (train, np.flatnonzero(held_out & kept))
    indices = np.flatnonzero(kept & ~held_out)
    chosen = {"train": (train, indices), **chosen}
    _check_sides({name: len(of_it) for name, (_, of_it) in chosen.items()}, args)
    if args.dataset_weights:
        indices = indices[_mixture(columns, indices, args)]
        chosen["train"] = (train, indices)
    shares = _shares(columns, indices, sources["dataset"], args)
    keys = {name: _contents_key(reports.get(name, report).cache_keys, of_it) for name, (_, of_it) in chosen.items()}
    return PreparedDocuments({name: _select(*part) for name, part in chosen.items()}, reports, keys, shares)


def _check_sides(sizes: dict[str, int], args: DataArguments) -> None:
    if all(sizes.values()):
        return
    empty, other = sorted(sizes, key=lambda name: sizes[name])
    if args.eval_dataset:
        raise ValueError(f"`eval_dataset`: the {empty} data is empty, since all of it is in the {other} data, too.")
    raise ValueError(
        f"`eval_fraction`={args.eval_fraction} puts all {sizes[other]} documents into the {other} data and leaves the "
        f"{empty} data empty: a hash of the conversation decides, so data that was split by `eval_fraction` before is "
        "not split by the same fraction again. Name its other part as `eval_dataset`, or change the fraction."
    )


def _select(documents: Dataset, indices: np.ndarray) -> Dataset:
    whole = np.array_equal(indices, np.arange(len(documents)))
    return documents if whole else documents.select(indices)


def _contents_key(cache_keys: list[str], indices: np.ndarray) -> str:
    """Names a selection of documents by the contents of their sources and their indices in all of these together."""
    state = json.dumps([CACHE_VERSION, cache_keys]).encode() + indices.astype(np.int64).tobytes()
    return hashlib.blake2b(state, digest_size=16).hexdigest()


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


def _load(args: DataArguments, part: str) -> list[Source]:
    is_train = part == "train"
    return load_sources(
        args.dataset if is_train else args.eval_dataset,
        part=part,
        argument="dataset" if is_train else "eval_dataset",
        config=args.dataset_config,
        split=args.split if is_train else args.eval_split,
        cache_dir=args.cache_dir,
        streaming=args.streaming,
        max_rows=args.max_rows,
    )


def _prepare(
    args: DataArguments, sources: list[Source], tokenizer: PreTrainedTokenizerBase
) -> tuple[Dataset, _Columns, Report]:
    documents, report = prepare_sources(
        sources,
        tokenizer,
        args,
        cache_dir=data_directory(args.cache_dir),
        num_proc=args.num_proc,
        on_bad_row=args.on_bad_row,
    )
    numbers = documents.with_format("numpy")
    source = np.repeat(np.arange(len(sources)), report.documents)
    columns = _Columns(
        lengths=numbers["length"][:],
        keys=numbers["key"][:],
        conversations=numbers["conversation"][:],
        rows=_rows(numbers["key"][:], numbers["piece"][:], source),
        entries=np.array([source.entry for source in sources])[source],
    )
    return documents.select_columns([*FEATURES, *IDENTITY]), columns, report


def _rows(keys: np.ndarray, pieces: np.ndarray, sources: np.ndarray) -> np.ndarray:
    """Which row each document is of, `[N]`, whether it comes from that row or from a prepared file."""
    goes_on = (np.diff(keys) == 0) & (np.diff(pieces) > 0) & (np.diff(sources) == 0)
    return np.concatenate([[0], np.cumsum(~goes_on)])


def _shared_with_evaluation(train: _Columns, evaluation: _Columns, args: DataArguments) -> np.ndarray:
    """Bool `[N]`: the training documents to leave out because they are in the evaluation data, too."""
    shared = np.isin(train.conversations, evaluation.conversations)
    count = len(np.unique(train.rows[shared]))
    if count and not args.deduplicate:
        logger.warning("%d training rows are in the evaluation data, too; `deduplicate` leaves them out.", count)
    return shared & args.deduplicate


def _mixture(columns: _Columns, indices: np.ndarray, args: DataArguments) -> np.ndarray:
    assert args.dataset_weights is not None
    lengths, entries = columns.lengths[indices], columns.entries[indices]
    return mix(lengths, columns.keys[indices], entries, args.dataset_weights, args.mixture_strategy)


def _shares(columns: _Columns, chosen: np.ndarray, sources: list[Source], args: DataArguments) -> list[DatasetShare]:
    total = int(columns.lengths[chosen].sum())
    shares = []
    for entry, name in enumerate(args.dataset):
        of_it = chosen[columns.entries[chosen] == entry]
        tokens = int(columns.lengths[of_it].sum())
        shares.append(
            DatasetShare(
                name=name if isinstance(name, str) else f"in-memory dataset {entry + 1}",
                rows=sum(len(source.rows) for source in sources if source.entry == entry),
                documents=len(of_it),
                different=len(np.unique(of_it)),
                tokens=tokens,
                share=tokens / total,
                weight=args.dataset_weights[entry] if args.dataset_weights else None,
            )
        )
        if args.dataset_weights:
            logger.info("mixture: %s", shares[-1])
    return shares


def _finish(documents: Dataset, key: str, args: DataArguments) -> Dataset:
    documents = documents.select_columns(list(FEATURES))
    if not args.packing:
        return documents
    assert args.row_length is not None
    row_length = args.row_length
    return cached_dataset(
        data_directory(args.cache_dir) / f"packed-{key}-{row_length}",
        lambda scratch: pack_dataset(documents, row_length, cache_file_name=str(scratch / "map.arrow")),
    )

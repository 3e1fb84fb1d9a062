"""The data arguments of all commands, and the one call that turns them into datasets."""

import hashlib
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import datasets
import numpy as np
import pyarrow.compute as pc
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from .encoding import FEATURES, EncodingArguments
from .loading import load_sources
from .packing import pack_dataset
from .prepare import CACHE_VERSION, Report, cached_dataset, prepare_sources
from .vocabulary import build_vocabulary_map, count_tokens, coverage, load_vocabulary_map


logger = logging.getLogger(__name__)


@dataclass
class DataArguments(EncodingArguments):
    """What to train and evaluate on, and how rows become tokens (`EncodingArguments`)."""

    # Sources
    dataset: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Training data: JSON Lines, JSON or Parquet files, globs, directories, Hub ids. Rows hold "
            "`messages`, `conversations`, `prompt` and `completion`, `input_ids` and `loss_mask`, or rendered `text`."
        },
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration name of the Hub datasets."})
    split: str = field(default="train", metadata={"help": "Split of the Hub datasets to train on."})
    eval_dataset: list[str] = field(default_factory=list, metadata={"help": "Evaluation data, as `dataset`."})
    eval_split: str = field(default="test", metadata={"help": "Split of the Hub datasets to evaluate on."})
    eval_fraction: float = field(
        default=0.0,
        metadata={
            "help": "Share of the training conversations held out for evaluation without `eval_dataset`; chosen by a "
            "hash of the conversation, so that none changes sides."
        },
    )
    on_bad_row: Literal["error", "skip"] = field(
        default="error",
        metadata={"help": "Rows that can't be used: refuse the data, listing all of them, or skip them."},
    )
    # Packing
    packing: bool = field(default=False, metadata={"help": "Pack whole documents into rows of `row_length` tokens."})
    row_length: int | None = field(
        default=None, metadata={"help": "Longest packed row in tokens. Default: `max_length`."}
    )
    # Work
    num_proc: int | None = field(default=None, metadata={"help": "Worker processes of the preparation."})
    cache_dir: str | None = field(
        default=None,
        metadata={"help": "Prepared data is kept in its folder `draftsmith`. Default: the Hugging Face cache."},
    )
    # Draft vocabulary
    draft_vocab_size: int | None = field(
        default=None,
        metadata={
            "help": "Tokens that the head can propose: the most frequent supervised ones. None: the whole vocabulary."
        },
    )
    vocab_map: str | None = field(
        default=None,
        metadata={"help": "Existing vocabulary map: safetensors, SpecForge's .pt or speculators' d2t.npy."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.eval_fraction < 1.0:
            raise ValueError(f"`eval_fraction`={self.eval_fraction} is not in [0, 1).")
        if self.on_bad_row not in ("error", "skip"):
            raise ValueError(f"`on_bad_row`={self.on_bad_row!r} is neither 'error' nor 'skip'.")
        if self.packing:
            self.row_length = self.row_length or self.max_length
            if self.row_length is None:
                raise ValueError("`packing` needs `row_length` or `max_length`.")
            if self.max_length is None or self.max_length > self.row_length:
                raise ValueError(
                    f"`max_length`={self.max_length} is more than `row_length`={self.row_length} can pack."
                )


@dataclass
class DatasetStatistics:
    """Size of a dataset; `rows` of training are packed rows with `packing`, else documents."""

    rows: int
    documents: int
    tokens: int
    supervised_tokens: int


@dataclass
class PreparedData:
    """Datasets as `DraftCollator` takes them, with their statistics (keys `train` and `evaluation`) and reports."""

    train: Dataset
    evaluation: Dataset | None
    statistics: dict[str, DatasetStatistics]
    reports: dict[str, Report]


def prepare_datasets(args: DataArguments, tokenizer: PreTrainedTokenizerBase) -> PreparedData:
    """Load, render, tokenise, mask, split and pack the data; everything costly comes from the cache the second time.

    Args:
        args: `dataset` and `eval_dataset` may also hold `datasets.Dataset` objects.
        tokenizer: a fast tokenizer.

    Raises:
        BadRowsError: rows that can't be used, unless `on_bad_row="skip"`.
        ValueError: nothing is left to train or to evaluate on.
    """
    if not args.dataset:
        raise ValueError("`dataset` is empty: name the training data.")
    documents, report = _prepare(args, args.dataset, args.split, tokenizer)
    parts, reports = {"train": documents}, {"train": report}
    if args.eval_dataset:
        parts["evaluation"], reports["evaluation"] = _prepare(args, args.eval_dataset, args.eval_split, tokenizer)
    elif args.eval_fraction:
        held_out = np.asarray(documents.with_format("numpy")["hash"]) < args.eval_fraction * 2**32
        parts = {
            "train": documents.select(np.flatnonzero(~held_out)),
            "evaluation": documents.select(np.flatnonzero(held_out)),
        }
        if held_out.all() or not held_out.any():
            raise ValueError(
                f"`eval_fraction`={args.eval_fraction} leaves one side of {len(documents)} documents empty."
            )
    finished = {name: _finish(name, part, args, reports.get(name, report)) for name, part in parts.items()}
    statistics = {name: _statistics(dataset) for name, dataset in finished.items()}
    for name, numbers in statistics.items():
        logger.info(
            "%s data: %d documents in %d rows, %d tokens, %.1f%% supervised",
            name, numbers.documents, numbers.rows, numbers.tokens, 100 * numbers.supervised_tokens / numbers.tokens,
        )  # fmt: skip
    return PreparedData(finished["train"], finished.get("evaluation"), statistics, reports)


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
) -> tuple[Dataset, Report]:
    sources = load_sources(names, config=args.dataset_config, split=split, cache_dir=args.cache_dir)
    return prepare_sources(
        sources, tokenizer, args, cache_dir=_cache_dir(args), num_proc=args.num_proc, on_bad_row=args.on_bad_row
    )


def _finish(part: str, documents: Dataset, args: DataArguments, report: Report) -> Dataset:
    documents = documents.select_columns(list(FEATURES))
    if not args.packing:
        return documents
    assert args.row_length is not None
    fraction = 0.0 if args.eval_dataset else args.eval_fraction
    state = [CACHE_VERSION, report.cache_keys, part, fraction, args.row_length]
    key = hashlib.blake2b(json.dumps(state).encode(), digest_size=16).hexdigest()
    row_length = args.row_length
    return cached_dataset(
        _cache_dir(args) / f"packed-{key}",
        lambda scratch: pack_dataset(documents, row_length, cache_file_name=str(scratch / "map.arrow")),
    )


def _statistics(dataset: Dataset) -> DatasetStatistics:
    table = dataset.with_format("arrow")
    documents = tokens = supervised = 0
    for rows in table.iter(batch_size=1000):
        tokens += pc.sum(rows["length"]).as_py()
        supervised += pc.sum(pc.list_flatten(rows["loss_mask"])).as_py()
        documents += (
            pc.sum(pc.list_value_length(rows["document_lengths"])).as_py()
            if "document_lengths" in rows.column_names
            else len(rows)
        )
    return DatasetStatistics(len(dataset), documents, tokens, supervised)

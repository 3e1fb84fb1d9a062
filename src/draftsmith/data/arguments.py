"""The data arguments of all commands."""

from dataclasses import dataclass, field
from typing import Literal

from .encoding import EncodingArguments


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
    dataset_weights: list[float] | None = field(
        default=None,
        metadata={"help": "For each entry of `dataset`, its share of the training tokens. None: all documents, once."},
    )
    mixture_strategy: Literal["undersample", "oversample"] = field(
        default="undersample",
        metadata={
            "help": "With `dataset_weights`: leave documents out until the shares are right, repeating none; "
            "or keep all and repeat those of the datasets that have too few."
        },
    )
    deduplicate: bool = field(
        default=False,
        metadata={
            "help": "Keep the first of all rows with the same conversation, whatever datasets they are in, and no "
            "training row that is in `eval_dataset`."
        },
    )
    streaming: bool = field(
        default=False,
        metadata={"help": "Read datasets from their beginning, as far as `max_rows`, instead of fetching them whole."},
    )
    max_rows: int | None = field(
        default=None, metadata={"help": "Read this many rows of each entry of `dataset` and `eval_dataset` at most."}
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
        weights = self.dataset_weights
        if weights is not None and (
            len(weights) != len(self.dataset) or not all(0 < w < float("inf") for w in weights)
        ):
            raise ValueError(
                f"`dataset_weights`={weights} must hold one positive number for each of {len(self.dataset)} datasets."
            )
        if self.mixture_strategy not in ("undersample", "oversample"):
            raise ValueError(
                f"`mixture_strategy`={self.mixture_strategy!r} is neither 'undersample' nor 'oversample'."
            )
        if self.max_rows is not None and self.max_rows < 1:
            raise ValueError(f"`max_rows`={self.max_rows} is not positive.")
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

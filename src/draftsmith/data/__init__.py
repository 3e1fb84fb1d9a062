"""From conversations to batches: rendering, masks, packing, the draft vocabulary and the collator."""

from .arguments import DataArguments
from .collator import STATE_COLUMNS, DraftCollator
from .encoding import read_template
from .packing import pack_dataset
from .pipeline import PreparedData, PreparedDocuments, draft_vocabulary_map, prepare_datasets, prepare_documents
from .prepare import Report, preparation_fingerprint, tokenizer_fingerprint
from .prepared_files import write_prepared
from .prompts import PRESETS, LabelledPrompt, Prompt, pad_prompts, prompt_ids, read_prompts, render_prompts
from .statistics import DatasetStatistics, Distribution, count_documents, dataset_statistics
from .vocabulary import (
    build_vocabulary_map,
    check_vocabulary_map,
    count_tokens,
    coverage,
    d2t_to_t2d,
    load_vocabulary_map,
    save_vocabulary_map,
)


__all__ = [
    "PRESETS",
    "STATE_COLUMNS",
    "DataArguments",
    "DatasetStatistics",
    "Distribution",
    "DraftCollator",
    "LabelledPrompt",
    "PreparedData",
    "PreparedDocuments",
    "Prompt",
    "Report",
    "build_vocabulary_map",
    "check_vocabulary_map",
    "count_documents",
    "count_tokens",
    "coverage",
    "d2t_to_t2d",
    "dataset_statistics",
    "draft_vocabulary_map",
    "load_vocabulary_map",
    "pack_dataset",
    "pad_prompts",
    "preparation_fingerprint",
    "prepare_datasets",
    "prepare_documents",
    "prompt_ids",
    "read_prompts",
    "read_template",
    "render_prompts",
    "save_vocabulary_map",
    "tokenizer_fingerprint",
    "write_prepared",
]

"""From sources to the prepared dataset: multi-process, cached by content, with an account of the other rows.

A prepared dataset has one row per document: `input_ids`, `loss_mask`, `turn_ids` (equal lengths) and `length`.
"""

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from .encoding import FEATURES, IDENTITY, ROW_FEATURES, EncodingArguments, RowEncoder, parse_json_row, read_template
from .entries import cached_dataset
from .formats import COLUMNS, RowError
from .loading import Source
from .wording import counted


logger = logging.getLogger(__name__)

CACHE_VERSION = 5  # raised whenever the same rows would be prepared differently
SHOWN_ROWS = 20


class BadRowsError(ValueError):
    """Rows that can't be used; `rows` names each with its file, row, field and reason."""

    def __init__(self, rows: list[str], good: int):
        self.rows = rows
        super().__init__(
            f"{counted(len(rows), 'row')} can't be used ({counted(good, 'document')} can; `on_bad_row=skip` keeps "
            f"those):\n{listing(rows)}"
        )


@dataclass
class Report:
    """What happened to the rows of a source.

    Attributes:
        rows: number of source rows.
        truncated: of `documents`, those cut at `max_length`.
        unsupervised: rows without two assistant tokens in a row within `max_length`: nothing to learn, left out.
        errors: rows that can't be used, with the reason.
        duplicates: rows that repeat a conversation; left out with `deduplicate`.
        documents: number of documents of each source, before duplicates are left out.
        cache_keys: names of the cache entries, which are hashes of their contents.
    """

    rows: int = 0
    truncated: int = 0
    unsupervised: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    duplicates: int = 0
    documents: list[int] = field(default_factory=list)
    cache_keys: list[str] = field(default_factory=list)


def prepare_sources(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    arguments: EncodingArguments,
    *,
    cache_dir: str | os.PathLike,
    num_proc: int | None = None,
    on_bad_row: str = "error",
) -> tuple[Dataset, Report]:
    """Prepare every source, or read it from the cache.

    Args:
        sources: from `loading.load_sources`.
        tokenizer: a fast tokenizer.
        arguments: how rows become tokens.
        cache_dir: directory of the prepared datasets; an entry is named by its content and appears only when complete.
        num_proc: worker processes; None or 1 = this process, whose tokenizer uses all cores.
        on_bad_row: "error" or "skip".

    Returns:
        The prepared documents in the order of the sources, with the columns of `identity.Identity` and `row` (int64)
        besides, and the report.

    Raises:
        BadRowsError: rows that can't be used, all of them, unless `on_bad_row="skip"`.
        ValueError: no document is left.
    """
    datasets, total = [], Report()
    for source in sources:
        documents, report = _prepare_source(source, tokenizer, arguments, cache_dir=Path(cache_dir), num_proc=num_proc)
        datasets.append(documents)
        total.rows += report.rows
        total.truncated += report.truncated
        total.unsupervised += report.unsupervised
        total.errors += report.errors
        total.documents.append(len(documents))
        total.cache_keys += report.cache_keys
    if total.rows == 0:
        raise ValueError(f"`dataset`: no rows in {', '.join(source.name for source in sources)}.")
    documents = concatenate_datasets(datasets)
    if total.errors and on_bad_row == "error":
        raise BadRowsError(total.errors, len(documents))
    if total.errors:
        logger.warning("Skipped %s that can't be used:\n%s", counted(len(total.errors), "row"), listing(total.errors))
    if total.unsupervised:
        logger.warning(
            "Left out %s without an answer of two tokens within `max_length`=%s:\n%s",
            counted(len(total.unsupervised), "row"), arguments.max_length, listing(total.unsupervised),
        )  # fmt: skip
    if len(documents) == 0:
        raise ValueError(
            f"`dataset`: zero tokens are supervised in {total.rows} rows ({len(total.errors)} can't be used, "
            f"{len(total.unsupervised)} have no answer). Check `max_length`, the columns and, for rendered text, "
            f"`assistant_marker`={arguments.assistant_marker!r}."
        )
    return documents, total


def refuse_other_preparation(
    name: str, sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase, arguments: EncodingArguments
) -> None:
    """Raise `ValueError` for a file of argument `name` that was prepared with another tokenizer or chat template."""
    prepared = [source for source in sources if source.prepared_with]
    ours = preparation_fingerprint(tokenizer, arguments) if prepared else None
    if other := next((source for source in prepared if source.prepared_with != ours), None):
        target = tokenizer.name_or_path or type(tokenizer).__name__
        raise ValueError(
            f"`{name}`: {other.name} was prepared with another tokenizer or chat template than that of `target` "
            f"{target}: prepare it anew, or name the `chat_template` that it was prepared with."
        )


def _prepare_source(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    arguments: EncodingArguments,
    *,
    cache_dir: Path,
    num_proc: int | None,
) -> tuple[Dataset, Report]:
    rows = source.rows.with_format(None)
    if len(rows) == 0:
        return Dataset.from_dict({name: [] for name in ROW_FEATURES}, features=ROW_FEATURES), Report()
    if not source.is_json:
        if arguments.format_of(rows.column_names) is None:
            raise ValueError(
                f"{source.name}: none of the columns {', '.join(rows.column_names)} holds conversations; name it with "
                "`messages_column` or `text_column`."
            )
        known = COLUMNS | {arguments.messages_column, arguments.text_column}
        rows = rows.select_columns([name for name in rows.column_names if name in known])
    key = _cache_key(rows, tokenizer, arguments, is_json=source.is_json)

    def build(scratch: Path) -> Dataset:
        row_format = _row_format(rows, arguments, is_json=source.is_json)
        return rows.map(
            RowEncoder(tokenizer, arguments, row_format, is_json=source.is_json),
            batched=True,
            batch_size=256,
            with_indices=True,
            num_proc=num_proc if num_proc and num_proc > 1 else None,
            remove_columns=rows.column_names,
            features=ROW_FEATURES,
            cache_file_name=str(scratch / "map.arrow"),
            load_from_cache_file=False,
            new_fingerprint=key,
            desc=f"Preparing {source.name}",
        )

    documents, report = _split_off_report(cached_dataset(cache_dir / key, build), source)
    return documents, replace(report, cache_keys=[key])


def _split_off_report(prepared: Dataset, source: Source) -> tuple[Dataset, Report]:
    """The usable documents of a cache entry, and what became of the other rows."""
    table = prepared.data
    empty = table["length"].to_numpy() == 0
    report = Report(rows=len(source.rows), truncated=int((table["truncated"].to_numpy() & ~empty).sum()))
    others = table.select(["row", "error"]).filter(pc.equal(table["length"], 0))
    for number, error in zip(others["row"].to_pylist(), others["error"].to_pylist(), strict=True):
        if error is not None:
            report.errors.append(f"{source.locate(number)}: {error}")
        else:
            report.unsupervised.append(source.locate(number))
    if len(others):
        prepared = prepared.select(np.flatnonzero(~empty))
    return prepared.select_columns([*FEATURES, *IDENTITY, "row"]), report


def _row_format(rows: Dataset, arguments: EncodingArguments, *, is_json: bool) -> tuple[str, str | None]:
    """The format of a source, which the columns of its first usable row tell, and the column named by the user."""
    found = arguments.format_of(rows.column_names) if not is_json else None
    for row in rows if is_json else ():
        try:
            found = arguments.format_of(parse_json_row(row["text"]))
        except RowError:
            continue
        if found:
            break
    return found or ("messages", arguments.messages_column)  # every row then says what it lacks


def _cache_key(
    rows: Dataset, tokenizer: PreTrainedTokenizerBase, arguments: EncodingArguments, *, is_json: bool
) -> str:
    """Hash of everything that decides the prepared rows: the rows, the tokenizer and the arguments, by content."""
    digest = hashlib.blake2b(digest_size=16)
    options = {option.name: getattr(arguments, option.name) for option in fields(EncodingArguments)}
    options["chat_template"] = read_template(arguments.chat_template)
    state = [CACHE_VERSION, is_json, rows.column_names, options, tokenizer_fingerprint(tokenizer)]
    digest.update(json.dumps(state, sort_keys=True, default=str).encode())
    for table in rows.with_format("arrow").iter(batch_size=200):
        for batch in table.combine_chunks().to_batches():
            digest.update(batch.serialize())
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of all that decides how text becomes tokens, the chat template included."""
    return _fingerprint(tokenizer, tokenizer.chat_template, tokenizer.special_tokens_map)


def preparation_fingerprint(tokenizer: PreTrainedTokenizerBase, arguments: EncodingArguments) -> str:
    """Hash of the tokenizer and of the chat template that is used; without the padding token, which is not used."""
    special_tokens = {name: token for name, token in tokenizer.special_tokens_map.items() if name != "pad_token"}
    return _fingerprint(tokenizer, read_template(arguments.chat_template) or tokenizer.chat_template, special_tokens)


def _fingerprint(tokenizer: PreTrainedTokenizerBase, template: object, special_tokens: object) -> str:
    templates = json.dumps([template, special_tokens], sort_keys=True, default=str)
    return hashlib.blake2b(templates.encode() + _tokenizer_state(tokenizer), digest_size=16).hexdigest()


def _tokenizer_state(tokenizer: PreTrainedTokenizerBase) -> bytes:
    if not tokenizer.is_fast:
        return json.dumps(tokenizer.get_vocab(), sort_keys=True).encode()
    state = tokenizer.backend_tokenizer.to_str()
    # Before this come truncation and padding, which mere use of a tokenizer changes, and which are not used here.
    return state[state.index('"added_tokens"') :].encode()


def listing(rows: Sequence[str]) -> str:
    """The first rows, one a line, and how many more there are."""
    hidden = len(rows) - SHOWN_ROWS
    return "\n".join([f"  {row}" for row in rows[:SHOWN_ROWS]] + ([f"  and {hidden} more"] if hidden > 0 else []))

"""From a row of any format to token ids and turns."""

import json
import re
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
from datasets import Features, List, Value
from transformers import PreTrainedTokenizerBase

from .chat import ChatEncoder, attempt
from .documents import Document, turns_from_mask
from .formats import Completion, Content, Conversation, MarkedText, RowError, Tokens, detect_format, read_row
from .identity import Identity, identify
from .messages import RESERVED_KWARGS
from .text import TextEncoder, Turn, check_text


FEATURES = Features(
    {
        "input_ids": List(Value("int32")),
        "loss_mask": List(Value("uint8")),
        "turn_ids": List(Value("int32")),
        "length": Value("int32"),
    }
)
IDENTITY = [entry.name for entry in fields(Identity)]  # kept in prepared files
# What preparation needs to know about a row besides; not part of the prepared dataset.
ROW_FEATURES = Features(
    {
        **FEATURES,
        **{name: Value("int64") for name in IDENTITY},
        "row": Value("int64"),
        "truncated": Value("bool"),
        "error": Value("string"),
    }
)


@dataclass
class EncodingArguments:
    """How a row becomes tokens: everything here is part of the cache key."""

    chat_template: str | None = field(
        default=None,
        metadata={"help": "Chat template (a file or the Jinja text itself) used instead of the tokenizer's own."},
    )
    chat_template_kwargs: dict | str | None = field(
        default=None,
        metadata={
            "help": "Arguments of the chat template as JSON, as serving passes them: '{\"enable_thinking\": false}'."
        },
    )
    max_length: int | None = field(
        default=4096, metadata={"help": "Longest document in tokens; longer ones are cut at the end. None: never cut."}
    )
    split_long_documents: bool = field(
        default=False,
        metadata={
            "help": "Split longer documents into several of at most `max_length` tokens, each without the context "
            "before it, instead of cutting their ends off."
        },
    )
    messages_column: str | None = field(
        default=None, metadata={"help": "Column of the conversations. Default: `messages` or `conversations`."}
    )
    text_column: str | None = field(
        default=None, metadata={"help": "Column of already rendered text. Default: `text`."}
    )
    assistant_marker: str | None = field(
        default=None,
        metadata={"help": "In rendered text, what stands before an answer, e.g. '<|im_start|>assistant\\n'."},
    )
    user_marker: str | None = field(
        default=None,
        metadata={"help": "In rendered text, what stands before a question; an answer ends there at the latest."},
    )
    end_of_turn_marker: str | None = field(
        default=None,
        metadata={"help": "In rendered text, what ends an answer and is generated with it. Default: the EOS token."},
    )

    def __post_init__(self) -> None:
        if isinstance(self.chat_template_kwargs, str):
            try:
                self.chat_template_kwargs = json.loads(self.chat_template_kwargs)
            except json.JSONDecodeError as error:
                raise ValueError(f"`chat_template_kwargs` is not a JSON object: {error}") from error
        if not isinstance(self.chat_template_kwargs, (dict, type(None))):
            raise ValueError(f"`chat_template_kwargs` is not a JSON object: {self.chat_template_kwargs!r}")
        if reserved := sorted(RESERVED_KWARGS & set(self.chat_template_kwargs or {})):
            raise ValueError(f"`chat_template_kwargs` holds `{reserved[0]}`, which preparation itself sets.")
        if self.split_long_documents and self.max_length is None:
            raise ValueError("`split_long_documents` needs `max_length`.")
        if self.max_length is not None and self.max_length < 3:
            raise ValueError("`max_length` must be at least 3: a row needs a prompt token and two answer tokens.")

    def format_of(self, columns: Collection[str]) -> tuple[str, str | None] | None:
        """The format of rows with these columns and the column that the user named for it; None if unknown."""
        chosen = [("messages", self.messages_column), ("text", self.text_column)]
        if not any(column for _, column in chosen):
            found = detect_format(columns)
            return (found, None) if found else None
        return next(((name, column) for name, column in chosen if column in columns), None)


class RowEncoder:
    """Turns a batch of rows into documents: the function that `Dataset.map` runs.

    A row that can't be used gives one output row with `error`; one without anything to learn gives an empty one.

    Args:
        tokenizer: a fast tokenizer.
        arguments: how rows are read.
        row_format: a key of `formats.FORMATS`, and the column that the user named for it, if any.
        is_json: the rows are JSON documents in a column `text`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        arguments: EncodingArguments,
        row_format: tuple[str, str | None],
        *,
        is_json: bool,
    ):
        self.tokenizer = tokenizer
        self.arguments = arguments
        self.row_format = row_format
        self.is_json = is_json
        if row_format[0] == "text" and not arguments.assistant_marker:
            raise ValueError(
                "`assistant_marker` must say what stands before an answer in the column of rendered text."
            )

    @cached_property
    def text_encoder(self) -> TextEncoder:
        return TextEncoder(self.tokenizer)

    @cached_property
    def chat_encoder(self) -> ChatEncoder:
        kwargs = cast("dict[str, Any] | None", self.arguments.chat_template_kwargs)  # parsed in __post_init__
        return ChatEncoder(self.tokenizer, read_template(self.arguments.chat_template), kwargs)

    def __call__(self, batch: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        output: dict[str, list[Any]] = {name: [] for name in ROW_FEATURES}
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        found = [attempt(self._read, row) for row in rows]
        contents = [entry if isinstance(entry, RowError) else entry[0] for entry in found]
        for index, entry, documents in zip(indices, found, self._encode(contents), strict=True):
            identity = Identity() if isinstance(entry, RowError) else entry[1]
            results: Sequence[Document | RowError] = (
                [documents] if isinstance(documents, RowError) else self._fitted(documents)
            )
            first = (
                identity.piece << 16 if self.arguments.split_long_documents else identity.piece
            )  # pieces of a piece
            for piece, result in enumerate(results, start=first):
                kept = {**asdict(identity), "piece": piece % 2**63}
                for name, value in (self._output(result) | {"row": index, **kept}).items():
                    output[name].append(value)
        return output

    def _read(self, row: dict[str, Any]) -> tuple[Content | None, Identity]:
        """What a row holds, None for a blank line, and its identity."""
        if self.is_json:
            if not row["text"].strip():
                return None, Identity()
            row = parse_json_row(row["text"])
        else:
            row = without_nulls(row)
        content = read_row(row, *self.row_format)
        return content, identify(content)

    def _encode(self, contents: list[Content | RowError | None]) -> list[list[Document] | RowError]:
        conversations = [content for content in contents if isinstance(content, Conversation)]
        rendered = iter(self.chat_encoder.encode_conversations(conversations) if conversations else [])
        encoders = {Completion: self._completion, MarkedText: self._marked_text, Tokens: self._tokens}
        results: list[list[Document] | RowError] = []
        for content in contents:
            if content is None or isinstance(content, RowError):
                results.append(content or [])
            elif isinstance(content, Conversation):
                results.append(next(rendered))
            else:
                results.append(attempt(encoders[type(content)], content))
        return results

    def _fitted(self, documents: list[Document]) -> list[Document]:
        """The documents, or, where those are to be split, their pieces (one is left where there is nothing in any)."""
        max_length = self.arguments.max_length
        if max_length is None or not self.arguments.split_long_documents:
            return documents
        pieces = [piece for document in documents for piece in document.split(max_length)]
        return pieces or [document.cut(max_length) for document in documents[:1]]

    def _output(self, result: Document | RowError) -> dict[str, Any]:
        empty = Document([], np.empty(0, dtype=np.int32))
        document = empty if isinstance(result, RowError) else result.cut(self.arguments.max_length)
        truncated = not isinstance(result, RowError) and len(document.input_ids) < len(result.input_ids)
        document = document if document.is_supervised() else empty
        return {
            "input_ids": np.array(document.input_ids, dtype=np.int32),
            "loss_mask": (document.turn_ids >= 0).astype(np.uint8),
            "turn_ids": document.turn_ids,
            "length": len(document.input_ids),
            "truncated": truncated,
            "error": str(result) if isinstance(result, RowError) else None,
        }

    def _completion(self, content: Completion) -> list[Document]:
        """The prompt with the special tokens that a completions endpoint adds, the completion, and EOS."""
        eos = self.tokenizer.eos_token or ""
        answer = content.completion if content.completion.endswith(eos) else content.completion + eos
        check_text(content.prompt + answer, "prompt")
        prompt_ids = self.tokenizer(content.prompt, verbose=False)["input_ids"]
        plain_ids = self.text_encoder.ids(content.prompt)
        if prompt_ids[-1:] == [self.tokenizer.eos_token_id] != plain_ids[-1:]:
            prompt_ids = prompt_ids[:-1]  # appended by the tokenizer, but the text goes on
        whole = self.text_encoder.ids(content.prompt + answer)
        aligned = whole[: len(plain_ids)] == plain_ids
        answer_ids = whole[len(plain_ids) :] if aligned else self.text_encoder.encode_apart(answer).ids
        turn_ids = np.array([-1] * len(prompt_ids) + [0] * len(answer_ids), dtype=np.int32)
        return [Document(prompt_ids + answer_ids, turn_ids)]

    def _marked_text(self, content: MarkedText) -> list[Document]:
        check_text(content.text, "text")
        (encoded,) = self.text_encoder.encode([content.text])
        token_ends = [end for _, end in encoded.encoding.offsets]
        turn_ids = np.full(len(encoded.ids), -1, dtype=np.int32)
        for number, match in enumerate(self._answer_pattern.finditer(content.text)):
            turn = Turn(*match.span("answer"), position=number)
            # a token that begins in the marker's white space was generated too
            turn_ids[bisect_right(token_ends, turn.start) : encoded.answer_end(turn)[0]] = number
        return [Document(encoded.ids, turn_ids)]

    @cached_property
    def _answer_pattern(self) -> re.Pattern[str]:
        arguments = self.arguments
        end = arguments.end_of_turn_marker or self.tokenizer.eos_token
        stops = [re.escape(end)] if end else []
        stops += [
            f"(?={re.escape(marker)})" for marker in (arguments.user_marker, arguments.assistant_marker) if marker
        ]
        start = re.escape(arguments.assistant_marker or "")
        return re.compile(rf"{start}(?P<answer>.*?(?:{'|'.join(stops)}|\Z))", re.DOTALL)

    def _tokens(self, content: Tokens) -> list[Document]:
        if max(content.input_ids, default=0) >= len(self.tokenizer):
            raise RowError(
                "input_ids", f"holds {max(content.input_ids)}, but the tokenizer ends at {len(self.tokenizer) - 1}"
            )
        if content.turn_ids is None:
            return [Document(content.input_ids, turns_from_mask(np.array(content.loss_mask)))]
        turns = [turn if mask else -1 for turn, mask in zip(content.turn_ids, content.loss_mask, strict=True)]
        return [Document(content.input_ids, np.array(turns, dtype=np.int32))]


def read_template(template: str | None) -> str | None:
    """The Jinja text of a template that is given as such, or as the name of a file."""
    if template and "{" not in template:
        return Path(template).expanduser().read_text(encoding="utf-8")
    return template


def parse_json_row(text: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError("line", f"is broken JSON: {error}") from error
    if not isinstance(row, dict):
        raise RowError("line", f"is a JSON {type(row).__name__}, not an object")
    return row


def without_nulls(value: Any) -> Any:
    """Arrow gives every struct the keys of all rows; those that a row didn't have are null."""
    if isinstance(value, dict):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value

"""Prompts to decode: rows of the kinds that are trained on, or well-known sets by name."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset
from datasets.exceptions import DatasetNotFoundError
from transformers import BatchEncoding, PreTrainedTokenizerBase

from .encoding import parse_json_row
from .formats import RowError, read_messages
from .loading import Source, load_sources
from .messages import check_roles
from .questions import question_column


Prompt = list[dict[str, Any]] | str  # messages, or text for a completions endpoint


@dataclass(frozen=True)
class LabelledPrompt:
    content: Prompt
    category: str  # of the row's own, or the name of what it was read from


class Preset(NamedTuple):
    """A set on the Hub, as its authors published it: `column` is what the user says, in one turn."""

    path: str
    config: str | None
    split: str
    column: str


PRESETS = {
    "mt_bench": Preset("HuggingFaceH4/mt_bench_prompts", None, "train", "prompt"),  # the first of two turns
    "gsm8k": Preset("openai/gsm8k", "main", "test", "question"),
    "humaneval": Preset("openai/openai_humaneval", None, "test", "prompt"),
    "math500": Preset("HuggingFaceH4/MATH-500", None, "test", "problem"),
}


def read_prompts(
    datasets: Sequence[str | Dataset], *, config: str | None = None, split: str = "test", argument: str = "prompts"
) -> list[LabelledPrompt]:
    """The prompts of rows with `messages`, `conversations`, `turns` or `prompt`.

    Of a conversation, all before its last answer; of `turns`, the first.

    Args:
        datasets: as in [`loading.load_sources`], or names of `PRESETS`; `<preset>=<file>` reads a local copy of one.
        config, split: of Hub datasets that are no presets.
        argument: what errors call `datasets`.

    Raises:
        FileNotFoundError: a name that looks like a path matches nothing.
        ValueError: a file or data set that can't be read, or a row that holds no prompt, named with its file and row.
    """
    prompts: list[LabelledPrompt] = []
    for dataset in datasets:
        name, _, path = dataset.partition("=") if isinstance(dataset, str) else ("", "", "")
        preset = PRESETS.get(name)
        with _named(argument, dataset):
            if preset is None:
                sources = load_sources([dataset], config=config, split=split, argument=argument)
            elif path:
                sources = load_sources([path], argument=argument)
            else:
                sources = load_sources([preset.path], config=preset.config, split=preset.split, argument=argument)
        for source in sources:
            label = Path(source.name).stem if preset is None else name
            prompts += _read_source(source, label, None if preset is None else preset.column)
    if not prompts:
        raise ValueError(f"`{argument}`: {', '.join(map(str, datasets))} holds no row.")
    return prompts


@contextmanager
def _named(argument: str, dataset: Any) -> Iterator[None]:
    """What no Hub gives, by the name of the argument that asks for it, with what else could be given."""
    try:
        yield
    except (ConnectionError, DatasetNotFoundError) as error:
        remedy = "name a file, or go online"
        if dataset in PRESETS:
            remedy = f"go online, or pass a copy: `{dataset}=file.jsonl`"
        elif near := get_close_matches(dataset, PRESETS, n=1):
            remedy = f"did you mean `{near[0]}`?"
        raise ValueError(f"`{argument}`: {str(error).rstrip('.')}: {remedy}") from error


def _read_source(source: Source, label: str, column: str | None) -> list[LabelledPrompt]:
    prompts = []
    for index, row in enumerate(source.rows):
        if source.is_json and not row["text"].strip():
            continue
        try:
            values = parse_json_row(row["text"]) if source.is_json else row
            content = _prompt(values) if column is None else _preset_prompt(values, column)
        except RowError as error:
            hint = "" if column is None else f"; without `{label}=` the file is read as it is"
            raise ValueError(f"{source.locate(index)}: {error}{hint}") from error
        category = values.get("category")
        prompts.append(LabelledPrompt(content, category if isinstance(category, str) and category else label))
    return prompts


def _preset_prompt(row: dict[str, Any], column: str) -> Prompt:
    said = row.get(column)
    said = said[0] if isinstance(said, list) and said else said  # of several turns
    if not isinstance(said, str) or not said:
        raise RowError(column, f"is missing or no text; the row has {', '.join(row)}")
    return [{"role": "user", "content": said}]


def render_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], template_kwargs: dict[str, Any]
) -> BatchEncoding:
    """`input_ids` and `attention_mask` [B, T], padded on the left, of prompts as a server renders them.

    A string is a plain completion prompt.
    """
    return pad_prompts(tokenizer, [prompt_ids(tokenizer, prompt, template_kwargs) for prompt in prompts])


def pad_prompts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[list[int]]) -> BatchEncoding:
    """`input_ids` and `attention_mask` [B, T], padded on the left."""
    if tokenizer.pad_token is None:  # any will do, since it is masked
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer.pad({"input_ids": list(ids)}, padding_side="left", return_tensors="pt")


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, template_kwargs: dict[str, Any]) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    check_roles(prompt, tokenizer.get_chat_template, f"the chat template of {tokenizer.name_or_path}")
    # A rendered chat already has its special tokens.
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **template_kwargs)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _prompt(row: dict[str, Any]) -> Prompt:
    column = question_column(row)
    if column == "turns":
        return _preset_prompt(row, column)
    if column == "prompt" and isinstance(row["prompt"], str):
        return row["prompt"]
    messages = read_messages(row[column], column)
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise RowError(column, "holds answers only")
    return messages

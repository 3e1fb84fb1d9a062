"""Build the demo's training conversations: our own prompts, answered greedily by the target that the demo serves.

python scripts/make_demo_data.py --target DIR_OR_ID [--gguf-file NAME] [--device cuda] [--limit N]
"""

import argparse
import gzip
import hashlib
import json
import os
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, chain, islice, product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


DEMO = Path(__file__).resolve().parent.parent / "demo"
KINDS = ("explanation", "code", "lists", "dialogue", "summary")
PROMPTS_PER_KIND = 390
HELD_OUT_PERCENT = 8
MAX_SHARED_WORDS = 0.5  # of the smaller of two prompts' word sets
WORD_PATTERNS = (r"\S+", r"\w+", r"[a-z]+", r"[\w'-]+")  # the bar holds whichever way a text is cut into words
MAX_ATTEMPTS = 2000  # candidates tried for one prompt
MIN_DISTINCT_NGRAMS = 0.4  # an answer with a smaller share of distinct word 4-grams is a repetition loop


@dataclass
class Conversation:
    """A prompt (all user turns, in order) and the messages exchanged so far."""

    kind: str
    turns: list[str]
    messages: list[dict[str, str]] = field(default_factory=list)
    finished: bool = True  # False: the last reply was cut at the token limit, before its terminator

    @property
    def id(self) -> str:
        return hashlib.sha256("\n".join(self.turns).encode()).hexdigest()[:16]


def split(conversation_id: str) -> str:
    """Return `"held_out"` for about 8% of the ids, else `"train"`; the id is a hash of the prompt alone."""
    return "held_out" if int(conversation_id[:8], 16) % 100 < HELD_OUT_PERCENT else "train"


# Prompts


class Pool:
    """Named lists of phrases; `pool[name]` deals one at random, none again before all others had their turn."""

    def __init__(self, path: Path, rng: random.Random) -> None:
        self.phrases: dict[str, list[str]] = {}
        self.rng = rng
        self.left: dict[str, list[str]] = defaultdict(list)
        for line in filter(None, path.read_text().splitlines()):
            if line.startswith("["):
                section = self.phrases.setdefault(line.strip("[]"), [])
            else:
                section.append(line)

    def __getitem__(self, name: str) -> str:
        if not self.left[name]:
            self.left[name] = self.rng.sample(self.phrases[name], len(self.phrases[name]))
        return self.left[name].pop()


def single_turns(pool: Pool) -> Iterator[list[str]]:
    while True:
        yield [pool["template"].format_map(pool)]


def dialogues(pool: Pool) -> Iterator[list[str]]:
    """An opening about a goal, then one or two questions on aspects of that goal."""
    while True:
        goal, *aspects = pool["goal"].split(" | ")
        asked = pool.rng.sample(aspects, k=pool.rng.choice((1, 2)))
        opening = pool["opening"].format(situation=pool["situation"], goal=goal, remark=pool["remark"])
        yield [opening, *(pool["follow_up"].format(aspect=aspect) for aspect in asked)]


def summaries(pool: Pool) -> Iterator[list[str]]:
    """A request and a passage: one story in full, two in part, or the first sentences of three."""
    parts = 3  # a section holds its stories' openings, then their middles, then their endings, in the same order
    stories = []
    for name in filter(lambda name: name.startswith("passage"), pool.phrases):
        lines = pool.phrases[name]
        count = len(lines) // parts
        stories += [lines[i::count] for i in range(count)]
    pool.phrases["n"] = [str(n) for n in range(3, 98)]
    while True:
        first, second, third = pool.rng.sample(stories, k=3)
        sentences = pool.rng.choice((first, [*first[:2], second[0], second[2]], [first[0], second[0], third[0]]))
        passage = " ".join(sentences).format_map(pool)
        yield [pool["template"].format(passage=passage)]


COMPOSERS: dict[str, Callable[[Pool], Iterator[list[str]]]] = {"dialogue": dialogues, "summary": summaries}


class OverlapIndex:
    """Word sets of the prompts admitted so far, looked up by word: a candidate meets all of them at once."""

    def __init__(self, word_pattern: str) -> None:
        self.words = re.compile(word_pattern)
        self.sizes: list[int] = []
        self.postings: dict[str, list[int]] = defaultdict(list)

    def admits(self, text: str) -> bool:
        """Whether no admitted text shares more than `MAX_SHARED_WORDS` of the smaller of the two word sets."""
        candidate = set(self.words.findall(text.lower()))
        shared = Counter(chain.from_iterable(self.postings[word] for word in candidate))
        return all(n <= MAX_SHARED_WORDS * min(len(candidate), self.sizes[i]) for i, n in shared.items())

    def add(self, text: str) -> None:
        candidate = set(self.words.findall(text.lower()))
        for word in candidate:
            self.postings[word].append(len(self.sizes))
        self.sizes.append(len(candidate))


def prefixes(turns: list[str]) -> list[str]:
    """The first turn, the first two, and so on: an answered dialogue may end early."""
    return list(accumulate(turns, "{}\n{}".format))


def build_prompts(per_kind: int = PROMPTS_PER_KIND, seed: int = 0) -> list[Conversation]:
    """Compose `per_kind` unanswered conversations of each kind, the kinds taking turns.

    Candidates that share too many words with an earlier prompt are skipped.
    """
    indexes = [OverlapIndex(pattern) for pattern in WORD_PATTERNS]
    candidates = {}
    for kind in KINDS:
        pool = Pool(DEMO / "ingredients" / f"{kind}.txt", random.Random(f"{seed}/{kind}"))
        candidates[kind] = COMPOSERS.get(kind, single_turns)(pool)
    conversations = []
    for kind in KINDS * per_kind:
        for turns in islice(candidates[kind], MAX_ATTEMPTS):
            turns = [turn[0].upper() + turn[1:] for turn in turns]
            if all(index.admits(text) for text in prefixes(turns) for index in indexes):
                break
        else:
            raise ValueError(f"`per_kind` {per_kind} is too many: add {kind} ingredients or ask for fewer prompts")
        for text, index in product(prefixes(turns), indexes):
            index.add(text)
        conversations.append(Conversation(kind, turns))
    return conversations


# Answers


def is_loop(ids: list[int], n: int = 4) -> bool:
    """Whether less than `MIN_DISTINCT_NGRAMS` of the token n-grams are distinct."""
    ngrams = list(zip(*(ids[i:] for i in range(n)), strict=False))
    return len(set(ngrams)) < MIN_DISTINCT_NGRAMS * len(ngrams)


def terminator_ids(model: Any) -> list[int]:
    """Where generation stops; from the model, since tokenizers read from GGUF may name another token."""
    ids = model.generation_config.eos_token_id
    return ids if isinstance(ids, list) else [ids]


@torch.no_grad()
def reply(model: Any, tokenizer: Any, batch: list[Conversation], max_new_tokens: int) -> list[list[int]]:
    """Append the model's greedy reply to each conversation; return the replies' tokens without terminator."""
    inputs = tokenizer.apply_chat_template(
        [conversation.messages for conversation in batch],
        add_generation_prompt=True,
        padding=True,
        return_dict=True,
        return_tensors="pt",
    ).to(model.device)
    output = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)  # [B, prompt + reply]
    terminators = terminator_ids(model)
    replies = output[:, inputs["input_ids"].shape[1] :].tolist()
    for i, conversation in enumerate(batch):
        end = next((at for at, token in enumerate(replies[i]) if token in terminators), None)
        conversation.finished = end is not None
        replies[i] = replies[i][:end]
        text = tokenizer.decode(replies[i]).rstrip("\N{REPLACEMENT CHARACTER}")  # a cut may split a character
        conversation.messages.append({"role": "assistant", "content": text})
    return replies


def converse(
    model: Any, tokenizer: Any, conversations: list[Conversation], *, batch_size: int, max_new_tokens: int
) -> list[Conversation]:
    """Answer turn after turn; return the conversations without an empty or looping reply, in the order given.

    A dialogue ends with its first cut reply: no user goes on from half a sentence.
    """
    dropped: set[str] = set()
    progress = logging.tqdm(total=sum(len(conversation.turns) for conversation in conversations), unit="turn")
    for turn in range(max(len(conversation.turns) for conversation in conversations)):
        going = [c for c in conversations if len(c.turns) > turn and c.finished and c.id not in dropped]
        for conversation in going:
            conversation.messages.append({"role": "user", "content": conversation.turns[turn]})
        going.sort(key=lambda conversation: sum(len(message["content"]) for message in conversation.messages))
        for start in range(0, len(going), batch_size):
            batch = going[start : start + batch_size]
            for conversation, ids in zip(batch, reply(model, tokenizer, batch, max_new_tokens), strict=True):
                if not conversation.messages[-1]["content"].strip() or is_loop(ids):
                    dropped.add(conversation.id)
            progress.update(len(batch))
    progress.close()
    return [conversation for conversation in conversations if conversation.id not in dropped]


def write(conversations: Iterable[Conversation], path: Path) -> None:
    """Write gzipped JSON lines, the same bytes for the same conversations, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as raw, gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as file:
        for c in conversations:
            row = {"id": c.id, "kind": c.kind, "messages": c.messages, "finished": c.finished}
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    os.replace(partial, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="model directory or Hub id")
    parser.add_argument("--gguf-file", help="file name inside `--target`, for a GGUF checkpoint")
    parser.add_argument("--output", type=Path, default=DEMO / "conversations.jsonl.gz")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--max-new-tokens", type=int, default=200, help="limit of one reply")
    parser.add_argument("--limit", type=int, help="number of prompts (default: all)")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.target, gguf_file=args.gguf_file, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.target, gguf_file=args.gguf_file, dtype=torch.bfloat16)
    model.to(args.device).eval()
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(terminator_ids(model)[0])
    prompts = build_prompts()[: args.limit]
    kept = converse(model, tokenizer, prompts, batch_size=args.batch_size, max_new_tokens=args.max_new_tokens)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    write(kept, args.output)
    print(f"{args.output}: {len(kept)} of {len(prompts)} conversations, {args.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()

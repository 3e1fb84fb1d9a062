"""The demo's prompts, the rules that its data keep, and the shipped file itself."""

import gzip
import importlib.util
import json
from collections import Counter
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import BatchEncoding


ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ROOT / "demo" / "conversations.jsonl.gz"
SIZE_LIMIT = 2_000_000

spec = importlib.util.spec_from_file_location("make_demo_data", ROOT / "scripts" / "make_demo_data.py")
demo_data = importlib.util.module_from_spec(spec)
spec.loader.exec_module(demo_data)


@pytest.fixture(scope="module")
def prompts():
    return demo_data.build_prompts()


@pytest.fixture(scope="module")
def shipped():
    with gzip.open(SHIPPED, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def user_text(row):
    return "\n".join(message["content"] for message in row["messages"] if message["role"] == "user")


def assert_no_pair_shares_more_than_half(texts):
    word_sets = [frozenset(text.lower().split()) for text in texts]
    for (i, a), (j, b) in combinations(enumerate(word_sets), 2):
        assert len(a & b) <= 0.5 * min(len(a), len(b)), f"{texts[i]!r} and {texts[j]!r} share {sorted(a & b)}"


def test_no_two_prompts_share_more_than_half_their_words(prompts):
    assert_no_pair_shares_more_than_half(["\n".join(prompt.turns) for prompt in prompts])


def test_no_two_first_turns_share_more_than_half_their_words(prompts):
    assert_no_pair_shares_more_than_half([prompt.turns[0] for prompt in prompts])


def test_kinds_are_balanced_and_dialogues_have_several_turns(prompts):
    assert Counter(prompt.kind for prompt in prompts) == dict.fromkeys(demo_data.KINDS, demo_data.PROMPTS_PER_KIND)
    for prompt in prompts:
        assert len(prompt.turns) in ((2, 3) if prompt.kind == "dialogue" else (1,))


def test_prompts_are_filled_in(prompts):
    assert not [turn for prompt in prompts for turn in prompt.turns if set("{}|[]") & set(turn) or "  " in turn]


def test_prompts_depend_on_the_seed_alone():
    first, again, other = (demo_data.build_prompts(per_kind=10, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert not {prompt.id for prompt in first} & {prompt.id for prompt in other}


def test_too_many_prompts_are_refused(monkeypatch):
    monkeypatch.setattr(demo_data, "MAX_SHARED_WORDS", 0.0)
    with pytest.raises(ValueError, match="`per_kind` 50 .* add .* ingredients"):
        demo_data.build_prompts(per_kind=50)


def test_overlap_is_measured_against_the_smaller_prompt():
    index = demo_data.OverlapIndex(r"\w+")
    index.add("red green blue grey")
    assert index.admits("Red GREEN one two three")
    assert not index.admits("red green blue one two three four five")
    assert not index.admits("red green one")


def test_split_is_a_function_of_the_id_with_every_kind_on_both_sides(prompts):
    assert {demo_data.split("0" * 16), demo_data.split("00000007" + "f" * 8)} == {"held_out"}
    assert demo_data.split("00000008" + "0" * 8) == "train"
    sides = {side: {p.id for p in prompts if demo_data.split(p.id) == side} for side in ("train", "held_out")}
    assert sum(map(len, sides.values())) == len({prompt.id for prompt in prompts}) == len(prompts)
    assert 0.05 < len(sides["held_out"]) / len(prompts) < 0.11
    for side in sides.values():
        assert {prompt.kind for prompt in prompts if prompt.id in side} == set(demo_data.KINDS)


def test_repetition_loops_are_recognised():
    assert demo_data.is_loop(list(range(30)) + [1, 2, 3] * 40)
    assert not demo_data.is_loop(list(range(60)) + [1, 2, 3] * 20)
    assert not demo_data.is_loop([])


@pytest.mark.parametrize("eos_token_id", [7, [9, 7]])
def test_replies_end_at_the_models_terminator(eos_token_id):
    class Model:
        device = torch.device("cpu")
        generation_config = SimpleNamespace(eos_token_id=eos_token_id)

        def generate(self, input_ids, **_):
            return torch.cat([input_ids, torch.tensor([[5, 6, 7, 7], [5, 6, 5, 6]])], dim=1)

    class Tokenizer:
        eos_token_id = 1

        def apply_chat_template(self, messages, **_):
            return BatchEncoding({"input_ids": torch.zeros(len(messages), 3, dtype=torch.long)})

        def decode(self, ids):
            return " ".join(map(str, ids))

    batch = [demo_data.Conversation("lists", ["a"]), demo_data.Conversation("lists", ["b"])]
    assert demo_data.reply(Model(), Tokenizer(), batch, max_new_tokens=4) == [[5, 6], [5, 6, 5, 6]]
    assert [(c.messages[-1]["content"], c.finished) for c in batch] == [("5 6", True), ("5 6 5 6", False)]


def test_cut_replies_end_a_dialogue_and_loops_drop_it(monkeypatch):
    replies = {"a1": "fine", "a2": "fine", "b1": "cut", "c1": "loop", "d1": "fine", "d2": " "}

    def scripted_reply(model, tokenizer, batch, max_new_tokens):
        for conversation in batch:
            text = replies[conversation.messages[-1]["content"]]
            conversation.finished = text != "cut"
            conversation.messages.append({"role": "assistant", "content": text})
        return [[5] * 99 if c.messages[-1]["content"] == "loop" else [1, 2, 3] for c in batch]

    monkeypatch.setattr(demo_data, "reply", scripted_reply)
    asked = [demo_data.Conversation("dialogue", [f"{name}1", f"{name}2"]) for name in "abcd"]
    kept = demo_data.converse(None, None, asked, batch_size=3, max_new_tokens=8)
    assert [(c.turns[0], len(c.messages), c.finished) for c in kept] == [("a1", 4, True), ("b1", 2, False)]


def test_file_is_reproducible_and_replaced_whole(tmp_path):
    path = tmp_path / "out.jsonl.gz"
    conversation = demo_data.Conversation("lists", ["Név?"], [{"role": "user", "content": "Név?"}])
    demo_data.write([conversation], path)
    first = path.read_bytes()

    def failing():
        yield conversation
        raise RuntimeError

    with pytest.raises(RuntimeError):
        demo_data.write(failing(), path)
    assert path.read_bytes() == first
    demo_data.write([conversation], path)
    assert path.read_bytes() == first


def test_shipped_file_is_small_and_holds_answered_prompts(prompts, shipped):
    assert SHIPPED.stat().st_size <= SIZE_LIMIT
    by_id = {prompt.id: prompt for prompt in prompts}
    assert len({row["id"] for row in shipped}) == len(shipped) >= 1400
    for row in shipped:
        assert list(row) == ["id", "kind", "messages", "finished"] and isinstance(row["finished"], bool)
        questions, answers = row["messages"][::2], row["messages"][1::2]
        assert {message["role"] for message in questions} == {"user"} and len(questions) == len(answers)
        assert {message["role"] for message in answers} == {"assistant"}
        assert all(message["content"].strip() and "<|im_" not in message["content"] for message in answers)
        prompt = by_id[row["id"]]
        assert prompt.kind == row["kind"]
        assert [message["content"] for message in questions] == prompt.turns[: len(questions)]
        assert len(questions) == len(prompt.turns) or not row["finished"]


def test_shipped_conversations_keep_the_word_bar_and_the_balance(shipped):
    assert_no_pair_shares_more_than_half([user_text(row) for row in shipped])
    kinds = Counter(row["kind"] for row in shipped)
    assert set(kinds) == set(demo_data.KINDS) and min(kinds.values()) >= 200
    held_out = [row for row in shipped if demo_data.split(row["id"]) == "held_out"]
    assert len(held_out) >= 20 and {row["kind"] for row in held_out} == set(demo_data.KINDS)
    assert any(len(row["messages"]) > 2 for row in held_out)
    assert sum(row["finished"] for row in shipped) > 0.2 * len(shipped)

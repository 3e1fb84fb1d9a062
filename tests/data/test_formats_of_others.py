"""Files as other trainers write them: conversations, pre-formatted text, vocabulary maps."""

import json
from collections import Counter

import numpy as np
import pytest
import torch

from draftsmith.data import load_vocabulary_map
from draftsmith.data.prepare import BadRowsError
from tests.data.common import CHATML, answers, build_tokenizer, chat


QUESTIONS, REPLIES = ("Hello", "What is it?"), ("one two", "It is what it is.")
TURNS = [text for pair in zip(QUESTIONS, REPLIES, strict=True) for text in pair]
SHAREGPT = [{"from": speaker, "value": text} for speaker, text in zip(("human", "gpt") * 2, TURNS, strict=True)]


@pytest.mark.parametrize(
    "row",
    [
        {"id": "a_0", "conversations": chat(*TURNS)},  # SpecForge's prepare_data.py
        {"id": "a_0", "conversations": chat(*TURNS), "status": "success"},  # and after regeneration
        {"id": "QWJhYvA_0", "conversations": SHAREGPT},  # ShareGPT as published
        {"id": 7, "conversations": [{**turn, "markdown": None, "text": None} for turn in SHAREGPT]},
        {"id": "a", "source": "web", "model": "", "conversations": [{**turn, "weight": None} for turn in SHAREGPT]},
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_conversations(row, kind, prepare, tokenizer, tmp_path):
    path = tmp_path / f"train.{kind}"
    other = {**row, "id": "b", "conversations": row["conversations"][:2]}
    path.write_text(json.dumps([row, other]) if kind == "json" else f"{json.dumps(row)}\n{json.dumps(other)}\n")
    first, second = prepare(str(path), tokenizer).train
    assert answers(first, tokenizer) == [f"{reply}<|im_end|>" for reply in REPLIES]
    assert answers(second, tokenizer) == [f"{REPLIES[0]}<|im_end|>"]


def test_system_prompt_and_a_first_answer_without_question(prepare, tokenizer, write_jsonl):
    """ShareGPT is cut out of longer chats: rows may begin with an answer, which is context."""
    row = {"id": "a_1", "conversations": [{"from": "system", "value": "What"}, SHAREGPT[1], *SHAREGPT]}
    (found,) = prepare(write_jsonl([row]), tokenizer).train
    assert answers(found, tokenizer)[-2:] == [f"{reply}<|im_end|>" for reply in REPLIES]


def test_regenerated_reasoning(prepare, write_jsonl):
    """SpecForge with `--reasoning save`: `reasoning_content` beside the content."""
    from tests.data.common import QWEN3

    tokenizer = build_tokenizer(QWEN3)
    conversation = chat("Hello", "one")
    conversation[1]["reasoning_content"] = "it is"
    (row,) = prepare(write_jsonl([{"id": "a", "conversations": conversation}]), tokenizer).train
    assert answers(row, tokenizer) == ["<think>\nit is\n</think>\n\none<|im_end|>"]


def test_preformatted_text(prepare, tokenizer, write_jsonl):
    """SpecForge's `is-preformatted`: `id` and rendered `text`."""
    text = build_tokenizer(CHATML).apply_chat_template(chat(*TURNS), tokenize=False)
    options = {"assistant_marker": "<|im_start|>assistant\n", "user_marker": "<|im_start|>user\n"}
    (row,) = prepare(write_jsonl([{"id": "a", "text": text}]), tokenizer, **options).train
    (expected,) = prepare(write_jsonl([{"conversations": chat(*TURNS)}], "b.jsonl"), tokenizer).train
    assert row == expected


def test_rows_that_are_neither(prepare, tokenizer, write_jsonl):
    rows = [{"id": "a", "conversations": SHAREGPT}, {"id": "b", "conversation": SHAREGPT}, {"id": "c", "text": "x"}]
    with pytest.raises(BadRowsError) as error:
        prepare(write_jsonl(rows), tokenizer)
    assert [entry.split(", ", 1)[1] for entry in error.value.rows] == [
        "line 2: `conversations` is missing; the row has conversation, id",
        "line 3: `conversations` is missing; the row has id, text",
    ]


def maps(frequencies, draft_size, target_size):
    """What both libraries do: the most frequent ids, filled up from the lowest, as ascending offsets and a mask."""
    chosen = sorted(frequencies, key=lambda token: (-frequencies[token], token))[:draft_size]
    chosen += [token for token in range(target_size) if token not in chosen][: draft_size - len(chosen)]
    chosen.sort()
    mask = [token in chosen for token in range(target_size)]
    return chosen, [token - index for index, token in enumerate(chosen)], mask


@pytest.mark.parametrize("layout", ["SpecForge", "speculators", "speculators int32"])
@pytest.mark.parametrize("frequencies", [Counter({5: 9, 90: 4, 7: 4, 31: 1}), Counter({127: 1})])
def test_vocabulary_maps(layout, frequencies, tmp_path):
    """SpecForge: a torch file of a dict; speculators: `d2t.npy` and `t2d.npy` in a directory. Read as data only."""
    chosen, offsets, mask = maps(frequencies, 16, 128)
    if layout == "SpecForge":
        path = tmp_path / "0123456789abcdef.pt"
        torch.save({"d2t": torch.tensor(offsets), "t2d": torch.tensor(mask)}, path)
    else:
        path = tmp_path
        np.save(tmp_path / "d2t.npy", np.array(offsets, dtype=np.int32 if "int32" in layout else np.int64))
        np.save(tmp_path / "t2d.npy", np.array(mask))
    d2t = load_vocabulary_map(path, 128, 16)
    assert d2t.dtype == torch.int64 and (torch.arange(16) + d2t).tolist() == chosen
    with pytest.raises(ValueError, match="`vocab_map`"):
        load_vocabulary_map(path, 120, 16)


def test_token_frequencies_are_no_map(tmp_path):
    """speculators keeps those in a torch file, too."""
    torch.save({5: 9, 90: 4}, tmp_path / "token_freq.pt")
    with pytest.raises(ValueError, match="token_freq.pt holds no tensor `d2t`"):
        load_vocabulary_map(tmp_path / "token_freq.pt", 128)

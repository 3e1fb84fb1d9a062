"""`prepare --inspect`: what people see, and what never reaches a terminal or a browser."""

import json
import re
from html.parser import HTMLParser

import pytest
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftsmith.commands import prepare
from draftsmith.commands.inspection import Token, read_tokens, sample, to_html, to_terminal, visible
from draftsmith.commands.parsing import UsageError
from tests.data.common import CHATML, answers, build_tokenizer, chat


NASTY = "\x1b[31mred\x07\x9b2J \u202eback \u200b\ufeff\x00\r<script>alert('1')</script> & \"q\" \U000e0041"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\U000e0041]")


class Page(HTMLParser):
    """The text of each token's element, its class and title, and every other tag."""

    def __init__(self, text):
        super().__init__()
        self.tokens, self.tags = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag == "span":
            self.tokens.append({**dict(attrs), "text": ""})

    def handle_data(self, data):
        if self.tokens and self.lasttag in ("span", "i"):
            self.tokens[-1]["text"] += data


@pytest.fixture
def tokenizer():
    return build_tokenizer(CHATML)


def test_tokens_make_up_the_text(tokenizer):
    text = tokenizer.apply_chat_template(chat("Hello", "It is what\n\nit is: ünïcødé 你好 🙂"), tokenize=False)
    ids = tokenizer.encode(text)
    tokens = read_tokens(tokenizer, ids, [-1] * len(ids))
    assert [token.id for token in tokens] == ids and "".join(token.text for token in tokens) == text
    ascii_only = tokenizer.encode("Hello there, hello again. What is it?\n\n")
    tokens = read_tokens(tokenizer, ascii_only, [-1] * len(ascii_only))
    assert "".join(token.text for token in tokens) == tokenizer.decode(ascii_only)


def test_characters_of_several_tokens(tokenizer):
    ids = tokenizer.encode("a🙂b\u202e")
    tokens = read_tokens(tokenizer, ids, [-1] * len(ids))
    assert [token.text for token in tokens] == ["a", "", "", "", "🙂", "b", "", "", "\u202e"]
    shown = to_terminal("x", tokens, colour=False)
    assert "a🙂b\\u202e" in shown
    halves = read_tokens(tokenizer, [*ids[1:3], *ids[:1], *ids[3:5]], [-1] * 5)
    assert [token.text for token in halves] == ["⟨ð⟩", "⟨Ł⟩", "a", "⟨Ļ⟩", "⟨Ĥ⟩"]  # as the vocabulary writes bytes


def test_spaces_that_a_decoder_drops_at_the_start_are_kept():
    words = {"▁Hello": 0, "▁there": 1, "▁it": 2, "s": 3}
    backend = Tokenizer(models.WordLevel(words, unk_token="s"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokens = read_tokens(PreTrainedTokenizerFast(tokenizer_object=backend), [0, 1, 2, 3], [-1] * 4)
    assert [token.text for token in tokens] == ["Hello", " there", " it", "s"]


def test_nothing_in_the_data_is_obeyed_by_a_terminal(tokenizer):
    ids = tokenizer.encode(NASTY)
    for colour in (False, True):
        shown = to_terminal(NASTY, read_tokens(tokenizer, ids, [-1] * len(ids)), colour=colour)
        assert not OBEYED.search(shown)
        shown = to_terminal("a", read_tokens(tokenizer, ids, [0] * len(ids)), colour=colour)
        ours = {"\x1b[30;42m", "\x1b[0m"}
        assert not OBEYED.search(re.sub("|".join(map(re.escape, ours)), "", shown))
    assert visible(NASTY).startswith(r"\x1b[31mred\x07\x9b2J \u202eback \u200b\ufeff\x00\r<script>")
    assert visible("half \ud800\n\ttwo") == "half \\ud800\n\ttwo"


def test_supervised_turns_in_the_terminal():
    tokens = [Token(1, "Hello", -1), Token(2, "one", 0), Token(3, "\ntwo", 0), Token(4, "it", 1), Token(5, "is", -1)]
    assert to_terminal("a", tokens, colour=False) == (
        "── a: 5 tokens, 3 supervised in 2 turns\nHello[[one\ntwo]][[it]]is\n"
    )
    assert to_terminal("a", tokens, colour=True).endswith(
        "Hello\x1b[30;42mone\x1b[0m\n\x1b[30;42mtwo\x1b[0m\x1b[30;46mit\x1b[0mis\n"
    )


def test_page(tokenizer):
    ids = tokenizer.encode(NASTY + "\n\tone")
    turns = [-1] * (len(ids) - 2) + [0, 1]
    page = to_html("<b>Title", [("<i>name", read_tokens(tokenizer, ids, turns))])
    assert not OBEYED.search(page) and "http" not in page.replace("http-equiv", "") and "script-src" not in page
    assert "default-src 'none'" in page
    found = Page(page)
    assert found.tags == {"html", "head", "meta", "title", "style", "body", "h1", "p", "h2", "pre", "span", "i"}
    assert [int(token["title"].split(":")[0].split(",")[0]) for token in found.tokens] == ids
    assert [token.get("class") for token in found.tokens] == [None] * (len(ids) - 2) + ["t0", "t1"]
    assert [token["text"].replace("⏎", "").replace("⇥", "") for token in found.tokens[:-1]] == [
        visible(token.text) for token in read_tokens(tokenizer, ids, turns)[:-1]
    ]


def test_documents_from_all_over_the_data():
    dataset = Dataset.from_dict({"a": range(100)})
    assert (
        sample(dataset, 3) == [0, 50, 99] and sample(dataset, 1) == [0] and sample(dataset, 1000) == list(range(100))
    )


def test_prepare_prints_and_writes(tmp_path, tokenizer, capsys, monkeypatch):
    tokenizer.save_pretrained(tmp_path / "target")
    rows = [{"messages": chat("Hello\x1b[2J", "one <b>two</b>")}] * 2 + [
        {"messages": chat("What?", "It is what it is.")}
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = ["--target", str(tmp_path / "target"), "--dataset", str(tmp_path / "chats.jsonl"), "--deduplicate", "true"]
    flags += ["--cache_dir", str(tmp_path / "cache"), "--output_dir", str(tmp_path / "out")]
    prepare.main([*flags, "--inspect", "2", "--max_length", "40"])
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and r"Hello\x1b[2J" in printed and "[[one <b>two</b><|im_end|>]]" in printed
    assert (
        "train: 3 rows read, 0 unusable, 0 without an answer, 1 duplicate left out, 0 documents truncated" in printed
    )
    page = Page((tmp_path / "out/inspect.html").read_text())
    assert "b" not in page.tags and len(page.tokens) > 20
    statistics = json.loads((tmp_path / "out/statistics.json").read_text())["train"]
    assert statistics["documents"] == 2 and statistics["rows_read"]["duplicates"] == 1
    assert statistics["rows_read"]["truncated_share"] == 0 and statistics["lengths"]["quantiles"]["max"] <= 40
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"train.parquet", "statistics.json", "inspect.html"}
    (row, _) = Dataset.from_parquet(str(tmp_path / "out/train.parquet"))
    assert answers(row, tokenizer) == ["one <b>two</b><|im_end|>"]
    with pytest.raises(UsageError, match="`inspect`=-1 is negative"):
        prepare.main([*flags, "--inspect", "-1"])

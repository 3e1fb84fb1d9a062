"""The preparation benchmark on few tokens: both sides tokenise the same, and what is counted is there."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from benchmarks import prepare


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_runs_on_few_tokens(tmp_path, monkeypatch):
    conversations = prepare.read_demo()[:50]
    tokenizer = prepare.train_tokenizer(conversations)
    options = Namespace(tokens=60_000, repeats=2, num_proc=2)
    speed = prepare.measure_speed(conversations, tokenizer, options, tmp_path)
    assert 60_000 <= speed["tokens"] < 70_000 and len(speed["seconds"]["ours"]) == 2
    assert min(speed["ratio"].values()) > 0
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    memory = prepare.peak_memory(str(tmp_path / "rows.jsonl"), str(tmp_path / "tokenizer"))
    assert memory["peak_mib"] >= memory["before_mib"] > 50 and memory["tokens"] == speed["tokens"]
    packing = prepare.measure_packing(200)
    assert packing["filled"] > 0.9
    result = {"machine": {"device": "x"}, "tokenizer": "y", "speed": speed, "packing": [packing]}
    text = prepare.to_markdown(json.loads(json.dumps({**result, "memory": [{"bytes": 5, **memory}]})))
    assert text.count("\n## ") == 3 and f"{speed['tokens']:,} tokens" in text

"""Heads that the Hub does not have, or not for this user: found by `evaluate` before the target is loaded."""

import json

import pytest
from huggingface_hub import HfApi

from draftsmith.commands import evaluate
from draftsmith.commands.parsing import UsageError
from tests.data.common import CHATML, build_tokenizer

from ..trainer.common import make_target
from .hub_server import STRANGER_TOKEN


@pytest.fixture
def asked(tmp_path, monkeypatch):
    make_target().save_pretrained(tmp_path / "target")
    build_tokenizer(CHATML).save_pretrained(tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "What is 3?"}) + "\n")
    monkeypatch.setattr("draftsmith.commands.arguments.load_target", None)
    return ["--target", str(tmp_path / "target"), "--prompts", str(tmp_path / "prompts.jsonl"), "--draft"]


def test_an_id_that_is_not_there(hub, asked):
    with pytest.raises(UsageError, match=r"`draft`: user/gone is no directory, and the Hub has no such repository"):
        evaluate.main([*asked, "user/gone"])


def test_a_private_one_of_someone_else(hub, asked, head, monkeypatch):
    head.push_to_hub("user/head", private=True)
    monkeypatch.setenv("HF_TOKEN", STRANGER_TOKEN)
    with pytest.raises(UsageError, match=r"`draft`: user/head .* or not for you: .* `hf auth login`"):
        evaluate.main([*asked, "user/head"])


def test_a_repository_without_a_head(hub, asked):
    HfApi().create_repo("user/empty")
    with pytest.raises(UsageError, match=r"`draft`: user/empty has neither config.json nor adapter_config.json"):
        evaluate.main([*asked, "user/empty"])


def test_a_hub_that_fails(hub, asked):
    hub.fail(500, method="GET", path=".*", times=1000)
    hub.fail(500, method="HEAD", path=".*", times=1000)
    with pytest.raises(UsageError, match=r"`draft`: user/head is no directory and did not come from the Hub \("):
        evaluate.main([*asked, "user/head"])

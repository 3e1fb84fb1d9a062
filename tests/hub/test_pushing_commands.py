"""`draftsmith train --push_to_hub`: refused before the first step, or told where the head is."""

import pytest
from huggingface_hub import HfApi
from transformers import AutoTokenizer

from draftsmith.commands import train
from draftsmith.commands.parsing import UsageError
from tests.commands.conftest import flags, target_dir  # noqa: F401  # fixtures

from .hub_server import OWNER_TOKEN, STRANGER_TOKEN, HubServer


@pytest.fixture
def pushing(flags, tmp_path):  # noqa: F811
    saving = ["--max_steps", "2", "--save_strategy", "steps", "--save_steps", "1", "--eval_fraction", "0"]
    return [*flags, *saving, "--push_to_hub", "true", "--output_dir", str(tmp_path / "head")]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--hub_model_id", "someone/head"], r"status 403 .* may not write there: .* a repository of yours"),
        (["--hub_model_id", "user/other", "--hub_token", STRANGER_TOKEN], r"status 403 .*no write permission"),
        (["--hub_model_id", "user/head", "--hub_token", "hf_" + "x" * 34], "status 401 .*or pass `hub_token`"),
        (["--hub_model_id", "user/other", "--hub_private_repo", "true"], "`hub_private_repo` is asked for, but"),
        (["--hub_model_id", "user/head", "--hub_revision", "a b"], "`hub_revision` is 'a b'"),
        (["--hub_model_id", "user//head"], "`hub_model_id` is 'user//head'"),
        (["--hub_license", "apach"], "`hub_license` is 'apach'"),
    ],
)
def test_what_the_hub_would_refuse_is_refused_before_the_first_step(hub, pushing, given, message, tmp_path):
    HfApi().create_repo("user/other")
    with pytest.raises(UsageError, match=message):
        train.main([*pushing, *given])
    assert not (tmp_path / "head").exists() and hub.store.repositories.keys() == {("model", "user/other")}


def test_a_hub_that_is_away_is_named_before_the_first_step(hub, pushing, tmp_path, monkeypatch):
    with HubServer() as gone:
        pass
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", gone.endpoint)
    with pytest.raises(UsageError, match=r"^`push_to_hub`: `user/head` can't be pushed to: no whole answer came"):
        train.main([*pushing, "--hub_model_id", "user/head"])
    assert not (tmp_path / "head").exists()


def test_a_push_brings_the_tokenizer_and_ends_with_its_address(hub, pushing, target_dir, capsys):  # noqa: F811
    train.main([*pushing, "--hub_strategy", "every_save", "--hub_model_id", "user/head"])
    assert capsys.readouterr().out.splitlines()[-1] == f"Pushed to {hub.endpoint}/user/head"
    assert AutoTokenizer.from_pretrained("user/head")("What is 3?") == AutoTokenizer.from_pretrained(target_dir)(
        "What is 3?"
    )
    assert str(target_dir).encode() not in b"".join(hub.files("user/head").values())


def test_a_push_that_fails_at_the_last_step_and_after_it_is_told_once(hub, pushing, caplog):
    hub.fail(500, method="POST", path=r".*/commit/.*", times=1000)
    with pytest.raises(SystemExit) as caught:
        train.main([*pushing, "--hub_strategy", "every_save", "--save_steps", "2", "--hub_model_id", "user/head"])
    assert "failed: status 500" in str(caught.value.code) and OWNER_TOKEN not in str(caught.value.code)
    assert "did not reach the Hub" not in caplog.text

"""`Eagle3Trainer` and the Hub: checked first, one commit of a head that serves, a run that outlives failures."""

import json
import logging
from functools import partial

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from draftsmith import Eagle3DraftModel, Eagle3Trainer
from draftsmith.hub import HubError, push
from draftsmith.model_card import RunRecord, check_card

from ..trainer.common import make_rows, make_target, make_trainer
from .heads import digests
from .hub_server import OWNER_TOKEN


REPOSITORY = "user/head"


@pytest.fixture
def target(tmp_path):
    make_target().to(torch.bfloat16).save_pretrained(tmp_path / "target")
    return AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.bfloat16)


def trainer_of(tmp_path, target, **options):
    options = {"push_to_hub": True, "hub_model_id": REPOSITORY, "hub_strategy": "end", **options}
    return make_trainer(tmp_path / "run", make_rows([12, 9]), target=target, **options)


def files_of(revision=None):
    return set(HfApi().list_repo_files(REPOSITORY, revision=revision))


def test_what_is_pushed_is_the_head_in_the_targets_dtype_with_record_and_card(hub, tmp_path, target):
    trainer = trainer_of(tmp_path, target, hub_private_repo=True, hub_license="apache-2.0")
    assert not hub.log, "something was asked before there was anything to push"
    trainer.train()
    commit = trainer.push_to_hub(commit_message="The head")
    assert commit.commit_message == "The head" and hub.count("POST", r".*/commit/.*") == 1
    assert {"config.json", "model.safetensors", "README.md", "run.json"} <= files_of()
    assert not [name for name in files_of() if name.endswith((".bin", ".pt"))]
    assert HfApi().model_info(REPOSITORY).private
    card = ModelCard.load(REPOSITORY)
    check_card(str(card))
    assert card.data.license == "apache-2.0" and str(tmp_path) not in str(card)
    record = RunRecord.load(trainer.args.output_dir)
    assert (record.target.name, record.target.kind) == ("target", "local")
    assert record.recipe["steps"] == 1 and record.tokens_seen == 21 and record.hours > 0
    loaded = Eagle3DraftModel.from_pretrained(REPOSITORY, target=target)
    assert loaded.dtype == torch.bfloat16
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight.to(loaded.dtype))


def test_revision_and_pull_request(hub, tmp_path, target):
    trainer = trainer_of(tmp_path, target)
    trainer.train()
    trainer.push_to_hub()
    trainer.push_to_hub(revision="other")
    assert "model.safetensors" in files_of("other")
    commit = trainer.push_to_hub(create_pr=True, license="mit")
    assert commit.pr_revision == "refs/pr/1" and "license: mit" not in str(ModelCard.load(REPOSITORY))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hub_license": "foo"}, "foo"),
        ({"hub_model_id": "user/a/b"}, "user/a/b"),
    ],
)
def test_what_cannot_be_pushed_is_refused_before_training(hub, tmp_path, target, options, message):
    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path, target, **options)
    assert not hub.log and not (tmp_path / "run").exists()


def test_without_a_token_no_run_begins(hub, tmp_path, target, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ValueError, match="`push_to_hub`: There is no token"):
        trainer_of(tmp_path, target)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("was_there", [False, True])
def test_a_target_without_a_name_is_refused_before_training(hub, tmp_path, was_there):
    if was_there:
        (tmp_path / "run").mkdir()
    trainer = trainer_of(tmp_path, make_target())
    with pytest.raises(ValueError, match="trainer.record.target"):
        trainer.train()
    assert (tmp_path / "run").exists() == was_there


@pytest.mark.parametrize("status", [401, 500])
def test_a_push_that_fails_leaves_local_files_whole(hub, tmp_path, target, status):
    trainer = trainer_of(tmp_path, target)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()
    before = digests(tmp_path / "run")
    hub.fail(status, method="POST", path=r".*/commit/.*", times=20)
    with pytest.raises(HubError, match=str(status)):
        trainer.push_to_hub()
    after = digests(tmp_path / "run")
    assert {name: after[name] for name in ("model.safetensors", "config.json")} == {
        name: before[name] for name in ("model.safetensors", "config.json")
    }
    hub.repair()
    trainer.push_to_hub()
    assert "model.safetensors" in files_of()


@pytest.mark.parametrize("save", [True, False])
def test_what_is_saved_already_is_pushed_as_it_is(hub, tmp_path, target, save):
    trainer = trainer_of(tmp_path, target)
    trainer.train()
    trainer.save_model()
    weights = tmp_path / "run" / "model.safetensors"
    before = weights.stat()
    trainer.push_to_hub(save=save)
    assert (weights.stat().st_ino == before.st_ino) == (not save)
    assert hub.files(REPOSITORY)["model.safetensors"] == weights.read_bytes()


@pytest.mark.parametrize("strategy", ["every_save", "checkpoint", "all_checkpoints"])
def test_every_checkpoint_pushes_its_head(hub, tmp_path, target, strategy):
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "hub_always_push": True}
    trainer = trainer_of(tmp_path, target, hub_strategy=strategy, hub_token=OWNER_TOKEN, **options)
    trainer.train()
    commits = [commit.title for commit in HfApi().list_repo_commits(REPOSITORY)]
    assert {"Training in progress, step 1", "Training in progress, step 2"} <= set(commits)
    pushed = {name.partition("/")[0] for name in files_of() if "/" in name}
    expected = {"every_save": set(), "checkpoint": {"last-checkpoint"}}
    assert pushed == expected.get(strategy, {"checkpoint-1", "checkpoint-2"})
    loaded = Eagle3DraftModel.from_pretrained(REPOSITORY, target=target)
    assert torch.equal(loaded.fc.weight, trainer.model.fc.weight.bfloat16())
    assert not list((tmp_path / "run").glob("_push-*"))
    for path in (tmp_path / "run").rglob("*"):
        assert not path.is_file() or OWNER_TOKEN.encode() not in path.read_bytes(), f"{path} holds the token"
    assert trainer.args.hub_token == OWNER_TOKEN


def test_a_run_goes_on_when_a_push_fails_midway(hub, tmp_path, target, caplog):
    hub.fail(500, method="POST", path=r".*/commit/.*", times=100)
    options = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1}
    trainer = trainer_of(tmp_path, target, hub_strategy="every_save", **options)
    with caplog.at_level(logging.ERROR):
        trainer.train()
    assert trainer.state.global_step == 3 and "did not reach the Hub" in caplog.text
    assert OWNER_TOKEN not in caplog.text
    hub.repair()
    trainer.push_to_hub()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["recipe"]["steps"] == 3
    assert "model.safetensors" in files_of()


def test_an_adapter_is_pushed_with_its_base_on_the_hub(hub, tmp_path, target):
    head = Eagle3DraftModel.from_target(target)
    head.push_to_hub("user/base")
    config = LoraConfig(r=2, target_modules=["o_proj"])
    options = {"hub_model_id": "user/adapter", "trainer_class": partial(Eagle3Trainer, peft_config=config)}
    trainer = trainer_of(
        tmp_path, target, draft=Eagle3DraftModel.from_pretrained("user/base", target=target), **options
    )
    trainer.train()
    trainer.push_to_hub()
    assert not [name for name in HfApi().list_repo_files("user/adapter") if name.endswith((".bin", ".pt"))]
    check_card(str(ModelCard.load("user/adapter")))
    loaded = Eagle3DraftModel.from_pretrained("user/adapter", target=target)
    merged = trainer.model.merge_and_unload()
    ours, live = (model.midlayer.self_attn.o_proj.weight for model in (loaded, merged))
    torch.testing.assert_close(ours.float(), live.float(), rtol=1e-2, atol=1e-3)  # the adapter is saved in bf16


def test_an_adapter_of_a_local_head_is_refused_before_training(hub, tmp_path, target):
    Eagle3DraftModel.from_target(target).save_pretrained(tmp_path / "base")
    draft = Eagle3DraftModel.from_pretrained(tmp_path / "base", target=target)
    config = LoraConfig(r=2, target_modules=["o_proj"])
    trainer = trainer_of(tmp_path, target, draft=draft, trainer_class=partial(Eagle3Trainer, peft_config=config))
    with pytest.raises(ValueError, match="push the head first"):
        trainer.train()
    trainer.save_model()
    with pytest.raises(ValueError, match="is not on the Hub"):
        push(tmp_path / "run", "user/adapter")
    assert not hub.log


def test_repeating_a_finished_run_keeps_its_record(tmp_path, target, caplog):
    options = {"save_strategy": "steps", "save_steps": 1, "push_to_hub": False}
    first = trainer_of(tmp_path, target, **options)
    first.train()
    first.save_model()
    before = (tmp_path / "run" / "run.json").read_text()
    again = trainer_of(tmp_path, target, learning_rate=0.5, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    again.save_model()
    assert (tmp_path / "run" / "run.json").read_text() == before and again.is_repeated and not first.is_repeated
    assert "nothing was left to train" in caplog.text

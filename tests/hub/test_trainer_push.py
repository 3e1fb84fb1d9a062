"""`Eagle3Trainer` and the Hub: checked first, one commit of a head that serves, a run that outlives failures."""

import errno
import json
import logging
import os
import re
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi, ModelCard, constants, snapshot_download
from peft import LoraConfig
from transformers import AutoModelForCausalLM, TrainerCallback

from draftsmith import Eagle3DraftModel, Eagle3Trainer
from draftsmith.commands import export
from draftsmith.hub import HubError, push
from draftsmith.model_card import RunRecord, check_card
from draftsmith.revisions import cached_commit, commit_of
from draftsmith.target import load_target

from ..trainer.common import BEST, make_rows, make_target, make_trainer
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


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == self.step


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


def test_a_pushed_checkpoint_is_resumed_from_and_knows_no_paths(hub, tmp_path, target):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    options |= {"load_best_model_at_end": True, "eval_rows": make_rows([11, 13]), "learning_rate": 0.01}
    straight = trainer_of(tmp_path / "straight", target, push_to_hub=False, **options)
    straight.train()
    pushing = trainer_of(tmp_path, target, hub_strategy="checkpoint", hub_always_push=True, **options)
    pushing.add_callback(StopAt(2))
    pushing.train()
    pushing._finish_current_push()
    names = {name for name in files_of() if name.startswith("last-checkpoint/")}
    assert "last-checkpoint/optimizer.pt" in names and "last-checkpoint/training_args.bin" not in names
    for name, content in hub.files(REPOSITORY).items():
        assert str(tmp_path).encode() not in content, f"{name} has a path"
    checkpoint = Path(snapshot_download(REPOSITORY, allow_patterns="last-checkpoint/*")) / "last-checkpoint"
    assert json.loads((checkpoint / "trainer_state.json").read_text())["best_model_checkpoint"] is None
    resumed = trainer_of(tmp_path / "elsewhere", target, push_to_hub=False, **options)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.state.global_step == 4
    for name, weight in straight.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], weight), name


def test_pickles_of_a_checkpoint_run_no_code(hub, tmp_path, target):
    trainer = trainer_of(tmp_path, target, push_to_hub=False, save_strategy="steps", save_steps=1)
    trainer.train()
    checkpoint = tmp_path / "run" / "checkpoint-1"
    torch.save({"path": Path("/")}, checkpoint / "scheduler.pt")
    with pytest.raises(ValueError, match=r"`scheduler.pt` is a pickle of more than tensors"):
        push(checkpoint, REPOSITORY, only="checkpoint", path_in_repo="last-checkpoint")
    assert not hub.log


def test_what_lies_in_the_output_directory_stays_there(hub, tmp_path, target):
    trainer = trainer_of(tmp_path, target)
    trainer.train()
    trainer.save_state()
    (tmp_path / "run" / "wandb").mkdir()
    for name in (".env", "wandb/run.wandb", "train.log", "result.json", "all_results.json"):
        (tmp_path / "run" / name).write_text(f"{tmp_path}")
    trainer.push_to_hub()
    assert files_of() == {"README.md", "config.json", "model.safetensors", "run.json"}


def test_the_call_that_pushes_again_does(hub, tmp_path, target):
    trainer = trainer_of(tmp_path, target, hub_revision="v2", hub_private_repo=True)
    trainer.train()
    trainer.save_state()
    hub.fail(500, method="POST", path=r".*/commit/.*", times=20)
    with pytest.raises(HubError) as caught:
        trainer.push_to_hub()
    hub.repair()
    eval(re.search("`draftsmith.hub.(push.*)`;", str(caught.value))[1])
    assert HfApi().model_info(REPOSITORY, revision="v2").private and "model.safetensors" in files_of("v2")
    assert "trainer_state.json" not in files_of("v2")


@pytest.mark.parametrize("strategy", ["end", "every_save"])
def test_a_card_that_was_edited_by_hand_stays(hub, tmp_path, target, strategy, caplog):
    options = {"hub_strategy": strategy, "save_strategy": "steps", "save_steps": 1, "hub_always_push": True}
    trainer = trainer_of(tmp_path, target, push_to_hub=False)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()
    card = tmp_path / "run" / "README.md"
    card.write_text(card.read_text().replace("# run", "# run\n\nMy own words", 1))
    trainer = trainer_of(tmp_path, target, **options)
    trainer.train()
    if strategy == "end":
        trainer.push_to_hub()
    trainer._finish_current_push()
    assert "My own words" in card.read_text() and hub.files(REPOSITORY)["README.md"] == card.read_bytes()
    assert "stays as it is" in caplog.text


def test_a_card_knows_the_owner_of_the_repository(hub, tmp_path, target):
    trainer = trainer_of(tmp_path, target, hub_model_id=None)
    trainer.train()
    trainer.push_to_hub()
    card = str(ModelCard.load("user/run"))
    assert "--draft user/run" in card and '"model": "user/run", "num_speculative_tokens": 3' in card


def test_an_adapter_does_not_replace_its_base(hub, tmp_path, target):
    Eagle3DraftModel.from_target(target).push_to_hub(REPOSITORY)
    config = LoraConfig(r=2, target_modules=["o_proj"])
    draft = Eagle3DraftModel.from_pretrained(REPOSITORY, target=target)
    trainer = trainer_of(tmp_path, target, draft=draft, trainer_class=partial(Eagle3Trainer, peft_config=config))
    with pytest.raises(ValueError, match=f"`hub_model_id` {REPOSITORY} holds the head that is adapted"):
        trainer.train()


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


def test_a_merged_adapter_of_the_hub_keeps_its_record(hub, tmp_path, target):
    Eagle3DraftModel.from_target(target).push_to_hub("user/base")
    draft = Eagle3DraftModel.from_pretrained("user/base", target=target)
    config = LoraConfig(r=2, target_modules=["o_proj"])
    trainer = trainer_of(tmp_path, target, draft=draft, trainer_class=partial(Eagle3Trainer, peft_config=config))
    trainer.train()
    trainer.push_to_hub()
    for source in (REPOSITORY, str(tmp_path / "run")):
        merged = tmp_path / Path(source).name / "merged"
        merged.parent.mkdir(exist_ok=True)
        export.main(["--draft", source, "--merge", "true", "--output", str(merged)])
        record, of_adapter = RunRecord.load(merged), RunRecord.load(tmp_path / "run")
        assert of_adapter.repo_id == REPOSITORY and record == replace(of_adapter, repo_id=None)


def test_repeating_a_finished_run_keeps_its_record(tmp_path, target, caplog):
    options = {"save_strategy": "steps", "save_steps": 1, "push_to_hub": False}
    first = trainer_of(tmp_path, target, **options)
    first.train()
    first.save_model()
    before = (tmp_path / "run" / "run.json").read_text()
    again = trainer_of(tmp_path, target, logging_steps=3, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    again.save_model()
    assert (tmp_path / "run" / "run.json").read_text() == before and again.is_repeated and not first.is_repeated
    assert "nothing was left to train" in caplog.text


def adapter_trainer(tmp_path, target, base, **options):
    config = LoraConfig(r=2, target_modules=["o_proj"])
    draft = base if isinstance(base, Eagle3DraftModel) else Eagle3DraftModel.from_pretrained(base, target=target)
    options = {"hub_model_id": "user/adapter", "trainer_class": partial(Eagle3Trainer, peft_config=config), **options}
    return trainer_of(tmp_path, target, draft=draft, **options)


def test_a_name_without_a_namespace_is_the_accounts_on_the_card_too(hub, tmp_path, target):
    trainer = trainer_of(tmp_path, target, hub_model_id=None)
    trainer.train()
    trainer.push_to_hub()
    card = str(ModelCard.load("user/run"))
    assert '"user/run"' in card and '"run"' not in card


def test_an_edited_card_is_kept_and_pushed(hub, tmp_path, target, caplog):
    trainer = trainer_of(tmp_path, target, max_steps=2, save_strategy="steps", save_steps=1, hub_strategy="every_save")
    trainer.train()
    trainer.push_to_hub()
    card = tmp_path / "run" / "README.md"
    edited = card.read_text().replace("# head", "# head\n\nOur own words.", 1)
    card.write_text(edited)
    trainer.push_to_hub()
    trainer.train()  # whose pushes set the head aside
    assert card.read_text() == edited and hub.files(REPOSITORY)["README.md"].decode() == edited
    assert "was edited" in caplog.text


def test_a_pull_request_proposes_to_main_wherever_the_run_pushes(hub, tmp_path, target):
    trainer = trainer_of(tmp_path, target, hub_revision="dev")
    trainer.train()
    trainer.push_to_hub()
    assert trainer.push_to_hub(create_pr=True).pr_revision == "refs/pr/1"
    with pytest.raises(ValueError, match="leave out `revision`"):
        trainer.push_to_hub(create_pr=True, revision="dev")


def test_checkpoints_that_rotation_deletes_still_arrive(hub, tmp_path, target, monkeypatch):
    checkpoints, real_push = tmp_path / "run", push

    def slow_push(directory, *args, **options):
        if "path_in_repo" not in options:  # the head: its checkpoint comes after
            deadline = time.monotonic() + 20
            step = int(directory.parent.name.rpartition("-")[2])
            while step < 3 and (checkpoints / f"checkpoint-{step}").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
        return real_push(directory, *args, **options)

    monkeypatch.setattr("draftsmith.hub.push", slow_push)
    options = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    trainer = trainer_of(tmp_path, target, hub_strategy="all_checkpoints", **options)
    trainer.train()
    assert not (checkpoints / "checkpoint-1").exists()
    assert {"checkpoint-1/model.safetensors", "checkpoint-1/optimizer.pt"} <= files_of()
    assert not list(checkpoints.glob("_push-*"))


def test_a_disk_too_full_to_set_files_aside_costs_a_push_and_no_more(hub, tmp_path, target, monkeypatch, caplog):
    save = Eagle3DraftModel.save_pretrained

    def save_with_little_room(self, directory, *args, **options):
        save(self, directory, *args, **options)
        if "_push-1" in str(directory):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Eagle3DraftModel, "save_pretrained", save_with_little_room)
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "hub_always_push": True}
    trainer = trainer_of(tmp_path, target, hub_strategy="every_save", **options)
    trainer.train()
    assert trainer.state.global_step == 2 and (tmp_path / "run" / "checkpoint-1").is_dir()
    assert "step 1 did not reach the Hub" in caplog.text and "No space left" in caplog.text
    commits = [commit.title for commit in HfApi().list_repo_commits(REPOSITORY)]
    assert "Training in progress, step 2" in commits and "Training in progress, step 1" not in commits
    assert not list((tmp_path / "run").glob("_push-*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_wait_for_a_push(hub, tmp_path, target, monkeypatch, caplog, number):
    released = threading.Event()
    monkeypatch.setattr("draftsmith.hub.push", lambda *args, **options: released.wait(60))
    trainer = trainer_of(tmp_path, target, hub_strategy="every_save", save_strategy="steps", save_steps=1)
    sender = threading.Timer(4, os.kill, (os.getpid(), number))
    sender.start()
    begun = time.monotonic()
    try:
        trainer.train()
    finally:
        sender.cancel()
        waited, is_pushing = time.monotonic() - begun, trainer.is_pushing
        released.set()
    assert waited < 30 and is_pushing
    assert trainer.stopped_by == number and trainer.state.global_step == 1
    assert "local files are whole" in caplog.text and "`resume_from_checkpoint` auto" in caplog.text
    assert (tmp_path / "run" / "checkpoint-1" / "model.safetensors").is_file()
    trainer.push_to_hub()  # waits for what is under way


def test_the_record_of_the_best_head_is_of_its_step(tmp_path, target):
    rows = make_rows([11, 13], seed=3)
    options = {**BEST, "push_to_hub": False, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    trainer = trainer_of(tmp_path, target, eval_rows=rows, **options)
    trainer.train()
    trainer.save_model()
    best = Path(trainer.state.best_model_checkpoint)
    losses = {entry["step"]: entry for entry in trainer.state.log_history if "eval_loss" in entry}
    assert best.name == "checkpoint-1" and losses[1]["eval_loss"] > losses[3]["eval_loss"]
    record = RunRecord.load(tmp_path / "run")
    assert (record.recipe["steps"], record.recipe["steps_run"]) == (1, 3)
    assert record.eval_metrics["eval_loss"] == losses[1]["eval_loss"]
    assert record.train_metrics["step"] == 1 and record.tokens_seen == record.train_metrics["num_tokens"]
    trainer.evaluate()
    trainer.save_record()
    again = RunRecord.load(tmp_path / "run").eval_metrics
    assert again["eval_loss"] == pytest.approx(losses[1]["eval_loss"], rel=1e-3) and again["step"] == 1


def test_a_repeated_run_is_known_by_resuming_from_the_last_checkpoint_too(tmp_path, target):
    options = {"save_strategy": "steps", "save_steps": 1, "push_to_hub": False}
    trainer_of(tmp_path, target, **options).train()
    again = trainer_of(tmp_path, target, **options)
    again.train(resume_from_checkpoint=True)
    assert again.is_repeated


def test_an_adapter_records_the_commits_that_it_was_trained_on(hub, tmp_path, target):
    api = HfApi()
    api.create_repo("user/target")
    api.upload_folder(repo_id="user/target", folder_path=str(tmp_path / "target"))
    torch.manual_seed(1)
    Eagle3DraftModel.from_target(target).push_to_hub("user/base")
    api.create_branch("user/base", branch="v1")
    torch.manual_seed(2)
    Eagle3DraftModel.from_target(target).push_to_hub("user/base")
    commits = {branch.name: branch.target_commit for branch in api.list_repo_refs("user/base").branches}
    hub_target = AutoModelForCausalLM.from_pretrained("user/target", dtype=torch.bfloat16)
    base = Eagle3DraftModel.from_pretrained("user/base", target=hub_target, revision="v1")
    trainer = adapter_trainer(tmp_path, hub_target, base)
    trainer.train()
    trainer.push_to_hub()
    config = json.loads(hub.files("user/adapter")["adapter_config.json"])
    assert (config["base_model_name_or_path"], config["revision"]) == ("user/base", commits["v1"])
    record = RunRecord.load(tmp_path / "run")
    assert record.draft.revision == commits["v1"] != commits["main"]
    assert record.target.revision == api.model_info("user/target").sha
    merged = Eagle3DraftModel.from_pretrained("user/adapter", target=hub_target)
    assert torch.equal(merged.fc.weight, base.fc.weight)
    assert merged.config._commit_hash == api.model_info("user/adapter").sha
    config["revision"] = "main"  # the commit is not pinned, and main has moved on
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "moved").mkdir(exist_ok=True)
        (tmp_path / "moved" / name).write_bytes((tmp_path / "run" / name).read_bytes())
    (tmp_path / "moved" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="user/base has other weights than in training"):
        Eagle3DraftModel.from_pretrained(tmp_path / "moved", target=hub_target)


@pytest.mark.parametrize("offline", [False, True])
def test_the_commit_of_what_is_loaded_is_known(hub, tmp_path, target, offline, monkeypatch):
    api = HfApi()
    api.create_repo("user/target")
    api.upload_folder(repo_id="user/target", folder_path=str(tmp_path / "target"))
    first = api.model_info("user/target").sha
    api.create_tag("user/target", tag="v1")
    load_target("user/target", revision="v1")
    (tmp_path / "target" / "NOTES").write_text("more")
    api.upload_folder(repo_id="user/target", folder_path=str(tmp_path / "target"))
    second = api.model_info("user/target").sha
    load_target("user/target")
    if offline:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for revision, commit in ((None, second), ("main", second), ("v1", first), (first, first)):
        assert commit_of(load_target("user/target", revision=revision).config) == commit
        assert cached_commit("user/target", revision) == commit
    assert commit_of(AutoModelForCausalLM.from_pretrained("user/target").config) in (None, second)  # of two
    assert commit_of(target.config) is None and commit_of(make_target().config) is None
    assert "_commit_hash" not in load_target("user/target").config.to_dict()

"""`draftsmith train` on two ranks, pushing: one commit per push, every rank returns, one of them speaks."""

import json
import os
import subprocess

import pytest
from huggingface_hub import HfApi

from draftsmith import Eagle3DraftModel
from draftsmith.model_card import RunRecord
from tests.data.common import CHATML, build_tokenizer

from ..trainer.common import make_rows, make_target
from ..trainer.ranks import ROOT, TORCHRUN
from .heads import digests
from .hub_server import OWNER_TOKEN


REPOSITORY = "user/head"
LENGTHS = [30, 41, 12, 25]
EVERY_SAVE = [
    "--hub_strategy",
    "every_save",
    "--hub_always_push",
    "true",
    "--save_strategy",
    "steps",
    "--save_steps",
    "1",
]


@pytest.fixture
def flags(tmp_path):
    make_target().save_pretrained(tmp_path / "target")
    build_tokenizer(CHATML).save_pretrained(tmp_path / "target")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in make_rows(LENGTHS)))
    (tmp_path / "train.yaml").write_text(
        f"target: {tmp_path / 'target'}\ndataset: [{tmp_path / 'rows.jsonl'}]\ncache_dir: {tmp_path / 'cache'}\n"
        f"output_dir: {tmp_path / 'head'}\nttt_steps: 2\nmax_steps: 2\nper_device_train_batch_size: 1\n"
        f"save_strategy: 'no'\nreport_to: none\ndisable_tqdm: true\nuse_cpu: true\nddp_timeout: 60\n"
        f"push_to_hub: true\nhub_model_id: {REPOSITORY}\nhub_strategy: end\n"
    )
    return ["--config", str(tmp_path / "train.yaml")]


def launch(flags):
    command = [*TORCHRUN, "-m", "tests.trainer.train_script", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150)


def commits(hub):
    return hub.count("POST", r".*/commit/.*")


def assert_head_is_whole(directory):
    head = Eagle3DraftModel.from_pretrained(directory, target=make_target())
    record = RunRecord.load(directory)
    assert record.recipe["world_size"] == 2 and record.tokens_seen == sum(LENGTHS)
    return head


@pytest.mark.parametrize("strategy", ["end", "every_save"])
def test_two_ranks_make_one_commit_per_push(hub, tmp_path, flags, strategy):
    done = launch([*flags, *(EVERY_SAVE if strategy == "every_save" else [])])
    assert done.returncode == 0, done.stderr[-6000:]
    titles = [commit.title for commit in HfApi().list_repo_commits(REPOSITORY)]
    in_training = ["Training in progress, step 2", "Training in progress, step 1"]  # and the end brings nothing new
    expected = in_training if strategy == "every_save" else ["End of training"]
    assert titles[:-1] == expected  # the last one made the repository
    assert commits(hub) == len(expected)
    pushed = Eagle3DraftModel.from_pretrained(REPOSITORY, target=make_target())
    local = assert_head_is_whole(tmp_path / "head")
    assert all((pushed.state_dict()[name] == weight).all() for name, weight in local.state_dict().items())
    assert done.stdout.count(f"{tmp_path / 'head'} holds the head.") == 1
    assert OWNER_TOKEN not in done.stdout + done.stderr


def test_two_ranks_end_together_when_the_hub_fails(hub, tmp_path, flags):
    hub.fail(500, method="POST", path=r".*/commit/.*", times=1000)
    done = launch([*flags, *EVERY_SAVE])
    assert done.returncode == 1 and commits(hub) == 0
    assert done.stderr.count(f"error: The push to `{REPOSITORY}` failed: status 500") == 1, done.stderr[-6000:]
    assert done.stderr.count("Training goes on, but its head did not reach the Hub") == 1  # of step 1
    assert 'scripts/train.py", line' not in done.stderr, "a rank ended by an exception"
    assert "exitcode  : -6" not in done.stderr, "a rank aborted"
    assert OWNER_TOKEN not in done.stdout + done.stderr
    assert_head_is_whole(tmp_path / "head")
    assert {"model.safetensors", "config.json", "README.md", "run.json"} <= digests(tmp_path / "head").keys()
    assert not list((tmp_path / "head").glob("_push-*"))


def test_a_usage_error_is_said_by_one_rank_and_leaves_nothing(hub, tmp_path, flags):
    done = launch([*flags, "--hub_license", "foo"])
    assert done.returncode != 0 and not hub.log
    assert done.stderr.count("error: `hub_license` is 'foo'") == 1, done.stderr[-6000:]
    assert not (tmp_path / "head").exists()

"""Heads that are pushed, and loaded again by their id."""

import pytest
import torch
from datasets import Dataset, load_dataset
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import RepositoryNotFoundError
from transformers import AutoModel

from draftsmith import Eagle3DraftModel
from draftsmith.hub import HubError, push
from draftsmith.model_card import check_card

from .heads import digests, equal, make_head, make_target
from .hub_server import STRANGER_TOKEN


CARD = "---\nlicense: apache-2.0\nbase_model: user/target\n---\n\n# Mine\n"


@pytest.fixture
def directory(head, tmp_path):
    head.save_pretrained(tmp_path / "head")
    return tmp_path / "head"


def test_a_pushed_head_loads_by_its_id(hub, head):
    info = head.push_to_hub("user/head")
    target = make_target()
    loaded = Eagle3DraftModel.from_pretrained("user/head", target=target)
    assert equal(loaded, head) and loaded._target_embedding is not None
    by_auto_class = AutoModel.from_pretrained("user/head")
    assert type(by_auto_class) is Eagle3DraftModel and equal(by_auto_class, head)
    assert set(hub.files("user/head")) == {"README.md", "config.json", "model.safetensors"}
    commits = HfApi().list_repo_commits("user/head")
    assert [commit.title for commit in commits] == ["Upload draft head", "initial commit"]
    assert info.oid == commits[0].commit_id


def test_a_directory_is_pushed_as_it_is(hub, head, directory):
    for name in ("checkpoint-3/optimizer.pt", ".unfinished-head/model.safetensors", "_cache.json", ".git/config"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(b"not part of the head")
    before = digests(directory)
    push(directory, "head", commit_message="First head")
    assert digests(directory) == before
    pushed = hub.files("user/head")
    assert pushed.pop("README.md") and pushed.keys() == {"config.json", "model.safetensors"}
    assert all(content == (directory / name).read_bytes() for name, content in pushed.items())
    assert HfApi().list_repo_commits("user/head")[0].title == "First head"


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_weights_have_the_dtype_that_is_asked_for(hub, head, dtype):
    head.push_to_hub("user/head", dtype=dtype)
    loaded = Eagle3DraftModel.from_pretrained("user/head", dtype="auto")
    assert loaded.dtype == (dtype or torch.float32) and head.dtype == torch.float32
    assert torch.equal(loaded.fc.weight, head.fc.weight.to(loaded.dtype)) and torch.equal(loaded.d2t, head.d2t)


def test_private_repositories_are_read_with_their_owners_token(hub, head, tmp_path):
    head.push_to_hub("user/head", private=True)
    assert HfApi().model_info("user/head").private
    assert equal(Eagle3DraftModel.from_pretrained("user/head"), head)
    for token in (False, STRANGER_TOKEN):
        with pytest.raises(OSError, match="user/head"):
            Eagle3DraftModel.from_pretrained("user/head", token=token, cache_dir=tmp_path)
        with pytest.raises(RepositoryNotFoundError):
            HfApi().model_info("user/head", token=token)


def test_nothing_private_goes_to_a_public_repository(hub, head):
    HfApi().create_repo("user/head", private=False)
    with pytest.raises(HubError, match=r"`private` is asked for.*is public: name another repository"):
        head.push_to_hub("user/head", private=True)
    assert not hub.files("user/head")


def test_branches(hub, head):
    later = make_head(seed=1)
    assert not equal(head, later)
    head.push_to_hub("user/head")
    for _ in range(2):  # the branch is made, then it is there
        later.push_to_hub("user/head", revision="wider/v2")
    assert equal(Eagle3DraftModel.from_pretrained("user/head"), head)
    assert equal(Eagle3DraftModel.from_pretrained("user/head", revision="wider/v2"), later)
    commit = HfApi().model_info("user/head", revision="wider/v2").sha
    assert equal(AutoModel.from_pretrained("user/head", revision=commit), later)
    with pytest.raises(OSError, match="v3"):
        Eagle3DraftModel.from_pretrained("user/head", revision="v3")


def test_pull_requests_leave_the_main_branch_alone(hub, head):
    head.push_to_hub("user/head")
    before, proposed, corrected = hub.files("user/head"), make_head(seed=1), make_head(seed=2)
    info = proposed.push_to_hub("user/head", create_pr=True, token=STRANGER_TOKEN)
    assert info.pr_revision == "refs/pr/1" and hub.files("user/head") == before
    assert equal(Eagle3DraftModel.from_pretrained("user/head", revision="refs/pr/1"), proposed)
    corrected.push_to_hub("user/head", revision="refs/pr/1")
    assert equal(Eagle3DraftModel.from_pretrained("user/head", revision="refs/pr/1"), corrected)
    assert hub.files("user/head") == before
    assert [request.ref for request in HfApi().list_repo_refs("user/head", include_pull_requests=True).pull_requests]


def test_a_directory_within_the_repository(hub, head, directory):
    push(directory, "user/heads", path_in_repo="small/v1")
    assert set(hub.files("user/heads")) == {"small/v1/config.json", "small/v1/model.safetensors"}
    assert equal(Eagle3DraftModel.from_pretrained("user/heads", subfolder="small/v1"), head)


def test_the_card_that_is_written_without_one_is_sound(hub, head):
    head.push_to_hub("user/head")
    text = hub.files("user/head")["README.md"].decode()
    check_card(text)
    data = HfApi().model_info("user/head").card_data
    assert data.library_name == "draftsmith" and data.base_model is None and "eagle3" in data.tags
    assert "vLLM, SGLang" in text and "untrained Llama" in text


def test_the_card_names_a_target_of_the_hub_and_no_directory(hub, tmp_path):
    target = make_target()
    target.push_to_hub("user/target")
    target.save_pretrained(tmp_path)
    for name, base_model in (("user/target", "user/target"), (str(tmp_path), None)):
        loaded = type(target).from_pretrained(name)
        Eagle3DraftModel.from_target(loaded, aux_layer_ids=[1, 2, 3]).push_to_hub("user/head")
        assert HfApi().model_info("user/head").card_data.base_model == base_model
        HfApi().delete_repo("user/head")


def test_a_card_that_is_given_or_there_already_is_kept(hub, head):
    head.push_to_hub("user/head", card=CARD)
    make_head(seed=1).push_to_hub("user/head")
    assert ModelCard.load("user/head").data.license == "apache-2.0"
    assert hub.files("user/head")["README.md"].decode() == CARD


def test_the_same_head_twice_is_one_commit(hub, head):
    first, second = head.push_to_hub("user/head"), head.push_to_hub("user/head")
    assert first.oid == second.oid and hub.count("POST", "/commit/") == 1


def test_pushed_rows_load_as_a_dataset(hub):
    rows = [{"input_ids": [5, 6, 7 + n], "loss_mask": [0, 1, 1]} for n in range(10)]
    Dataset.from_list(rows).push_to_hub("user/rows", private=True)
    assert load_dataset("user/rows", split="train").to_list() == rows
    assert HfApi().dataset_info("user/rows").private

"""Repositories that hold something already: one commit leaves one head, or one adapter, that loads."""

import json

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from peft import LoraConfig, get_peft_model

from draftsmith import Eagle3DraftModel
from draftsmith.hub import push
from draftsmith.model_card import RunRecord, Source
from draftsmith.model_card.rendering import render_adapter_card

from .heads import equal, make_head, make_target


WEIGHTS = {"config.json", "model.safetensors"}
ADAPTER = {"adapter_config.json", "adapter_model.safetensors"}


@pytest.fixture
def adapter(hub, head, tmp_path):
    """A directory with an adapter of `user/base`, whose weights differ from those of the base."""
    head.push_to_hub("user/base")
    model = get_peft_model(
        Eagle3DraftModel.from_pretrained("user/base", target=make_target()), LoraConfig(r=2, target_modules=["o_proj"])
    )
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(weight)
    model.save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "README.md").unlink()  # of peft
    hub.log.clear()
    return tmp_path / "adapter"


def changed(loaded, head):
    return not torch.equal(loaded.midlayer.self_attn.o_proj.weight, head.midlayer.self_attn.o_proj.weight)


@pytest.mark.parametrize("sizes", [("50GB", "20KB"), ("20KB", "50GB"), ("20KB", "30KB")])
@pytest.mark.parametrize("folder", [None, "small/v1"])
def test_shards_of_an_earlier_push_are_gone(hub, head, sizes, folder, tmp_path):
    for seed, size in enumerate(sizes):
        make_head(seed).save_pretrained(tmp_path / f"{seed}", max_shard_size=size)
        push(tmp_path / f"{seed}", "user/head", path_in_repo=folder)
    names = {path.name for path in (tmp_path / "1").iterdir()}
    assert {path.rpartition("/")[2] for path in hub.files("user/head")} - {"README.md"} == names
    options = {"subfolder": folder} if folder else {}
    assert equal(Eagle3DraftModel.from_pretrained("user/head", **options), make_head(1))
    assert len(HfApi().list_repo_commits("user/head")) == 3, "one commit for each push, and the initial one"


def test_what_is_not_a_heads_stays(hub, head):
    HfApi().create_repo("user/head")
    for name in ("notes.md", "onnx/model.safetensors", "quantize_config.json"):
        HfApi().upload_file(path_or_fileobj=b"{}", path_in_repo=name, repo_id="user/head")
    head.push_to_hub("user/head")
    assert {"notes.md", "onnx/model.safetensors", "quantize_config.json"} < set(hub.files("user/head"))


def test_a_head_after_an_adapter_and_an_adapter_after_a_head(hub, head, adapter):
    push(adapter, "user/code")
    assert set(hub.files("user/code")) == ADAPTER | {"README.md"}
    assert changed(Eagle3DraftModel.from_pretrained("user/code"), head)
    whole = make_head(seed=1)
    whole.push_to_hub("user/code")
    assert set(hub.files("user/code")) == WEIGHTS | {"README.md"}
    assert equal(Eagle3DraftModel.from_pretrained("user/code"), whole)
    push(adapter, "user/code")
    assert set(hub.files("user/code")) == ADAPTER | {"README.md"}
    assert changed(Eagle3DraftModel.from_pretrained("user/code"), head)


@pytest.mark.parametrize("is_edited", [False, True])
def test_the_card_of_an_adapter_does_not_describe_a_head(hub, adapter, is_edited):
    config = json.loads((adapter / "adapter_config.json").read_text())
    card = render_adapter_card(config, RunRecord(target=Source("user/target")), name="code", repo_id="user/code")
    (adapter / "README.md").write_text(card.replace("# code", "# Mine") if is_edited else card)
    push(adapter, "user/code")
    make_head(seed=1).push_to_hub("user/code")
    assert ("PeftModel" in str(ModelCard.load("user/code"))) == is_edited


@pytest.mark.parametrize("name", ["user/base", "User/BASE"])
def test_no_adapter_into_the_repository_of_its_base(hub, adapter, name):
    with pytest.raises(ValueError, match="`repo_id` .* holds the model that this needs beside it"):
        push(adapter, name)
    assert not hub.log


def test_a_name_without_its_owner_is_no_way_around(hub, head, adapter):
    before = hub.files("user/base")
    with pytest.raises(Exception, match="holds the model that this needs beside it"):
        push(adapter, "base")
    assert hub.files("user/base") == before

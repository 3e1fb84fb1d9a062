"""What is written for others to serve is readable as the umask says."""

import os

import pytest
from peft import LoraConfig

from draftsmith import Eagle3DraftModel, Eagle3Trainer
from draftsmith.commands import export

from .hub.heads import make_head, make_target
from .trainer.common import make_rows, make_trainer


@pytest.fixture(params=[0o022, 0o027], ids=oct)
def mode(request):
    before = os.umask(request.param)
    yield 0o666 & ~request.param
    os.umask(before)


def modes(directory):
    return {path.name: path.stat().st_mode & 0o777 for path in directory.iterdir() if path.is_file()}


def assert_modes(directory, mode, weights):
    found = modes(directory)
    assert weights in found and set(found.values()) == {mode}, found


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "30KB"}], ids=["one file", "shards"])
def test_saved_heads(tmp_path, mode, options):
    make_head().save_pretrained(tmp_path / "head", **options)
    found = modes(tmp_path / "head")
    assert len([name for name in found if name.endswith(".safetensors")]) > len(options)
    assert set(found.values()) == {mode}, found


def test_trained_heads_and_their_checkpoints(tmp_path, mode):
    trainer = make_trainer(tmp_path / "run", make_rows([9, 12]), save_strategy="steps", save_steps=1)
    trainer.train()
    trainer.save_model()
    assert modes(tmp_path / "run")["model.safetensors"] == mode
    assert modes(tmp_path / "run" / "checkpoint-1")["model.safetensors"] == mode


def test_adapters_and_exports(tmp_path, mode):
    make_target().save_pretrained(tmp_path / "target")
    make_head().save_pretrained(tmp_path / "head")
    trainer = make_trainer(
        tmp_path / "adapter",
        make_rows([9, 12]),
        target=make_target(),
        draft=Eagle3DraftModel.from_pretrained(tmp_path / "head", target=make_target()),
        trainer_class=lambda *args, **kwargs: Eagle3Trainer(
            *args, peft_config=LoraConfig(r=2, target_modules=["o_proj"]), **kwargs
        ),
    )
    trainer.save_model()
    assert modes(tmp_path / "adapter")["adapter_model.safetensors"] == mode
    export.main(["--draft", str(tmp_path / "adapter"), "--merge", "true", "--output", str(tmp_path / "merged")])
    assert_modes(tmp_path / "merged", mode, "model.safetensors")
    head, target = str(tmp_path / "head"), str(tmp_path / "target")
    speculators = ["--format", "speculators", "--target", target, "--output", str(tmp_path / "speculators")]
    export.main(["--draft", head, *speculators])
    assert_modes(tmp_path / "speculators", mode, "model.safetensors")

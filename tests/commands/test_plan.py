import json

import pytest
import torch
from transformers import BartConfig, GPT2Config, LlamaConfig, MambaConfig, T5Config

from draftsmith import Eagle3DraftConfig, Eagle3DraftModel
from draftsmith.commands import main, plan
from draftsmith.commands.arguments import DraftArguments
from draftsmith.commands.plan import shapes


CONFIG = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def target(tmp_path):
    config = LlamaConfig(**CONFIG, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path / "target")
    return str(tmp_path / "target")


def test_a_plan_is_printed_and_written(target, tmp_path, capsys):
    output = tmp_path / "plan.json"
    main(["plan", "--target", target, "--gpu_memory", "24", "--draft_vocab_size", "128", "--output", str(output)])
    text = capsys.readouterr().out
    assert "target weights" in text and "gradient_checkpointing: true" in text
    report = json.loads(output.read_text())
    option = report["options"]["as it is"]
    assert option["fits"] and option["longest_context"] > 8192
    assert option["peak"] >= sum(option["held"].values())


def test_shapes_are_those_of_the_models_without_allocating_them(target):
    config = LlamaConfig(**CONFIG)
    of_target, of_head = shapes(config, DraftArguments(), 128)
    head = Eagle3DraftModel(Eagle3DraftConfig.from_target(config, draft_vocab_size=128))
    assert of_head.trained_parameters == sum(weight.numel() for weight in head.parameters() if weight.requires_grad)
    assert (of_target.aux_states, of_head.vocab_size) == (3, 128)
    layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 96 + 2 * 64
    assert of_target.weight_bytes == 2 * (8 * layer + 2 * 512 * 64 + 64)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--supervised", "0", "--gpu_memory", "24"], "`supervised` is 0"),
        (["--zero_stage", "4", "--gpu_memory", "24"], "`zero_stage` is 4"),
        (["--offload_optimizer", "true", "--gpu_memory", "24"], "`offload_optimizer` needs DeepSpeed"),
        (["--row_length", "0", "--gpu_memory", "24"], "`row_length` is 0"),
        (["--gpu_memory", "0"], "`gpu_memory` is 0"),
        (["--gpu_memory", "nan"], "`gpu_memory` is nan"),
        (["--objective", "CE", "--gpu_memory", "24"], "`objective` is 'CE'"),
        (["--output", "nowhere/plan.json", "--gpu_memory", "24"], "`output`: the directory of nowhere/plan.json"),
        (["--output", ".", "--gpu_memory", "24"], "`output` is '.', a directory"),
        (["--output", "/proc/plan.json", "--gpu_memory", "24"], "`output`: /proc/plan.json cannot be written"),
        (["--target_dtype", "float17", "--gpu_memory", "24"], "`target_dtype` is 'float17'"),
        (["--target_adapter", "./nothere", "--gpu_memory", "24"], "`target_adapter`: ./nothere does not exist"),
        (["--target_adapter", "some/where", "--gpu_memory", "24"], "`target_adapter`: the weights of an adapter"),
        (["--draft", "./nothere", "--gpu_memory", "24"], "`draft`: ./nothere does not exist"),
        (["--draft", "some/where", "--norm_output", "true", "--gpu_memory", "24"], "leave out `norm_output`"),
        (["--draft", "some/where", "--draft_vocab_size", "8", "--gpu_memory", "24"], "leave out `draft_vocab_size`"),
        (["--init_from_layer", "99", "--gpu_memory", "24"], "`init_from_layer` is 99, but the target has 8 layers"),
        (["--draft_hidden_size", "0", "--gpu_memory", "24"], "`draft_hidden_size` is 0"),
        (["--draft_hidden_size", "-4", "--gpu_memory", "24"], "`draft_hidden_size` is -4"),
        (["--draft_hidden_size", "20", "--gpu_memory", "24"], "`draft_hidden_size` is 20: pass a multiple of 8"),
        (["--draft_intermediate_size", "0", "--gpu_memory", "24"], "`draft_intermediate_size` is 0"),
    ],
)
def test_wrong_arguments_name_the_remedy(target, flags, message, capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--target", target, *flags])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("gpu_memory", "is_bounded"), [("24", True), ("0.0001", False)])
def test_rows_longer_than_the_positions_of_the_target_are_said_to_be_of_several_documents(
    target, gpu_memory, is_bounded, capsys
):
    report = plan.main(["--target", target, "--gpu_memory", gpu_memory, "--row_length", "1024"])
    said = "The target has 2,048 positions: rows may be longer, but no document in them."
    assert report["positions"] == 2048 and (said in capsys.readouterr().out) == is_bounded


@pytest.mark.parametrize("command", ["plan", "profile"])
@pytest.mark.parametrize("family", [MambaConfig, T5Config, BartConfig])
def test_families_without_a_head_are_named(command, family, tmp_path, capsys):
    family().save_pretrained(tmp_path)
    given = {"plan": ["--gpu_memory", "24"], "profile": ["--output", str(tmp_path / "heap.png")]}
    with pytest.raises(SystemExit):
        main([command, "--target", str(tmp_path), *given[command]])
    assert f"`target` is of the family `{family.model_type}`, for which no head can be made" in capsys.readouterr().err


def test_a_target_without_rope_is_planned_for():
    config = GPT2Config(n_embd=32, n_head=4, n_layer=8, vocab_size=96)
    assert shapes(config, DraftArguments(), None)[0].layer_width == 3 * 4 * 32 + 3 * 32  # n_inner is left out


def test_bytes_of_the_target_follow_its_dtype():
    config = LlamaConfig(**CONFIG)
    half, single = (shapes(config, DraftArguments(), None, target_dtype=dtype)[0] for dtype in ("float16", "float32"))
    assert (half.itemsize, single.itemsize) == (2, 4) and single.weight_bytes == 2 * half.weight_bytes
    assert shapes(config, DraftArguments(), None)[0] == half  # `auto` of a config that does not say
    assert shapes(LlamaConfig(**CONFIG, dtype="float32"), DraftArguments(), None)[0] == single


def test_float32_targets_need_more(target, capsys):
    flags = ["--target", target, "--gpu_memory", "24", "--row_length", "4096"]
    half, single = (
        plan.main([*flags, "--target_dtype", dtype])["options"]["as it is"] for dtype in ("auto", "float32")
    )
    for name in ("target weights", "target states"):
        assert single["held"][name] == 2 * half["held"][name]
    assert single["phases"]["loss"]["logits"] > half["phases"]["loss"]["logits"]


def test_a_head_to_go_on_from_is_planned_as_it_is(target, tmp_path):
    config, head = LlamaConfig(**CONFIG), str(tmp_path / "head")
    Eagle3DraftConfig.from_target(config, draft_vocab_size=96, intermediate_size=40).save_pretrained(head)
    of_head = shapes(config, DraftArguments(draft=head), None)[1]
    assert (of_head.intermediate_size, of_head.vocab_size) == (40, 96)
    with pytest.raises(ValueError, match="`draft` .* belongs to another target"):
        shapes(LlamaConfig(**{**CONFIG, "hidden_size": 32}), DraftArguments(draft=head), None)
    with pytest.raises(ValueError, match="`draft` .* has no config of a head to read"):
        shapes(config, DraftArguments(draft=target), None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the memory is read from the GPU")
def test_without_a_gpu_its_memory_is_asked_for(target, capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--target", target])
    assert "`gpu_memory` is needed" in capsys.readouterr().err

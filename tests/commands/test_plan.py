import json

import pytest
import torch
from transformers import LlamaConfig

from draftsmith import Eagle3DraftConfig, Eagle3DraftModel
from draftsmith.commands import main
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
    ],
)
def test_wrong_arguments_name_the_remedy(target, flags, message, capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--target", target, *flags])
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="the memory is read from the GPU")
def test_without_a_gpu_its_memory_is_asked_for(target, capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--target", target])
    assert "`gpu_memory` is needed" in capsys.readouterr().err

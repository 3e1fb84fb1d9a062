"""Adapters through the command line: train on a head for other data, evaluate, merge and serve."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from draftsmith import Eagle3DraftModel
from draftsmith.commands import evaluate, export, train
from draftsmith.commands.parsing import UsageError
from tests.data.common import chat


SCRIPTS = str(Path(__file__).parents[2] / "scripts")
LORA = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "fc"],
    "modules_to_save": ["lm_head"],
}


@pytest.fixture
def head(tmp_path, flags):
    train.main([*flags, "--output_dir", str(tmp_path / "head"), "--max_steps", "2", "--eval_fraction", "0"])
    config = tmp_path / "train.yaml"
    config.write_text(config.read_text().replace("draft_vocab_size: 100\n", ""))
    return tmp_path / "head"


def test_an_adapter_is_trained_evaluated_and_merged(tmp_path, head, flags, target_dir, capsys):
    rows = [{"messages": chat(f"Add {n}.", f"That makes {n + 7}, of course.")} for n in range(24)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "lora.json").write_text(json.dumps(LORA))
    adapter = tmp_path / "adapter"
    adapt = ["--draft", str(head), "--output_dir", str(adapter), "--max_steps", "3"]
    trainer = train.main([*flags, *adapt, "--peft_config", str(tmp_path / "lora.json")])
    assert json.loads((adapter / "eval_results.json").read_text())["eval_loss"] > 0
    target = LlamaForCausalLM.from_pretrained(target_dir)
    live = PeftModel.from_pretrained(Eagle3DraftModel.from_pretrained(head, target=target), adapter)
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, live.state_dict()[name]), name

    to_decode = ["--target", str(target_dir), "--prompts", str(tmp_path / "chats.jsonl"), "--num_prompts", "3"]
    to_decode += ["--max_new_tokens", "8"]
    counts = evaluate.main([*to_decode, "--draft", str(adapter)]).results[0].total
    with pytest.raises(UsageError, match="adapter.*export --merge"):
        evaluate.main([*to_decode, "--draft", str(adapter), "--engine", "vllm", "--launch", "true"])

    with pytest.raises(UsageError, match="adapter.*--merge"):
        export.main(["--draft", str(adapter), "--output", str(tmp_path / "served")])
    export.main(["--draft", str(adapter), "--output", str(tmp_path / "served"), "--merge", "true"])
    assert "vLLM" in capsys.readouterr().out
    served, base = (load_file(path / "model.safetensors") for path in (tmp_path / "served", head))
    expected = live.merge_and_unload().state_dict()
    assert served.keys() == base.keys() == expected.keys()
    for name in served:
        torch.testing.assert_close(served[name], expected[name], rtol=1e-6, atol=1e-7)
        trained = name in ("fc.weight", "lm_head.weight", "midlayer.self_attn.q_proj.weight")
        assert torch.equal(served[name], base[name]) != trained
    total = evaluate.main([*to_decode, "--draft", str(tmp_path / "served")]).results[0].total
    assert (total.rounds, total.accepted) == (counts.rounds, counts.accepted)
    with pytest.raises(UsageError, match="whole head"):
        export.main(["--draft", str(head), "--output", str(tmp_path / "again"), "--merge", "true"])


def test_the_config_may_be_yaml_or_a_flag_and_a_run_resumes(tmp_path, head, flags):
    (tmp_path / "adapt.yaml").write_text(
        f"draft: {head}\npeft_config:\n  peft_type: IA3\n  target_modules: [k_proj, down_proj]\n"
        "  feedforward_modules: [down_proj]\n"
    )
    whole, part = tmp_path / "whole", tmp_path / "part"
    train.main([*flags, "--config", str(tmp_path / "adapt.yaml"), "--output_dir", str(whole), "--max_steps", "4"])
    as_flag = json.dumps(json.loads((whole / "adapter_config.json").read_text()))  # as peft writes it
    again = [*flags, "--draft", str(head), "--peft_config", as_flag, "--output_dir", str(part)]
    train.main([*again, "--max_steps", "4", "--save_total_limit", "3"])
    for step in (3, 4):
        (part / f"checkpoint-{step}").rename(tmp_path / f"gone-{step}")
    train.main([*again, "--max_steps", "4", "--resume_from_checkpoint", "auto"])
    ours, truth = (load_file(path / "adapter_model.safetensors") for path in (part, whole))
    assert ours.keys() == truth.keys() and all(torch.equal(ours[name], truth[name]) for name in truth)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--peft_config", json.dumps(LORA)], "name it with `draft`"),
        (["--draft", "x/y", "--peft_config", "nowhere.json"], "nowhere.json"),
        (["--draft", "x/y", "--peft_config", '{"peft_type": "LORRA"}'], "LORRA.*did you mean `LORA`"),
        (["--draft", "x/y", "--peft_config", '{"r": 4}'], "peft_type"),
        (["--draft", "x/y", "--peft_config", '{"peft_type": "LORA", "lora_apha": 1}'], "lora_apha.*`lora_alpha`"),
        (["--draft", "x/y", "--peft_config", '{"peft_type": "LORA", "layers_pattern": "h"}'], "layers_pattern"),
    ],
)
def test_unusable_configs_are_refused_before_anything_is_loaded(tmp_path, flags, given, message):
    with pytest.raises(UsageError, match=message):
        train.main([*flags, *given, "--output_dir", str(tmp_path / "adapter")])


def test_a_directory_with_the_other_kind_is_refused_before_anything_is_loaded(tmp_path, flags):
    held = tmp_path / "held"
    held.mkdir()
    (held / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match="holds an adapter"):
        train.main([*flags, "--target", "no/target", "--output_dir", str(held)])
    (held / "adapter_config.json").rename(held / "config.json")
    with pytest.raises(UsageError, match="holds a head"):
        train.main([*flags, "--draft", "x/y", "--peft_config", json.dumps(LORA), "--output_dir", str(held)])


def test_the_benchmark_of_adaptation_runs_dry(tmp_path, target_dir, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    from benchmarks import adaptation

    monkeypatch.setattr(adaptation, "ROOT", tmp_path)
    monkeypatch.setattr(adaptation, "BASE", [word.replace("6144", "100") for word in adaptation.BASE])
    adaptation.main(["--dry-run", "--target", str(target_dir), "--lora-rates", "1e-3", "2e-3"])
    rows = json.loads((tmp_path / "runs" / "adaptation-dry" / "adaptation.json").read_text())["rows"]
    assert [(row["head"], row["learning_rate"]) for row in rows] == [
        ("base", ""), ("full", "1e-3"), ("LoRA", "1e-3"), ("LoRA", "2e-3")
    ]  # fmt: skip
    assert rows[0]["trained"] == rows[1]["trained"] != rows[2]["trained"] == rows[3]["trained"]
    held_out, trained = (
        (tmp_path / "runs" / "adaptation-dry" / f"{name}.jsonl").read_text().splitlines()
        for name in ("held_out", "domain")
    )
    assert len(held_out) == 4 and not set(held_out) & set(trained)


def test_adapters_that_are_their_own_base_are_refused(tmp_path, head, monkeypatch):
    for name in ("first", "second"):
        draft = Eagle3DraftModel.from_pretrained(head)
        get_peft_model(draft, LoraConfig(r=2, target_modules=["fc"])).save_pretrained(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    flags = ["--draft", "first", "--merge", "true", "--output", str(tmp_path / "merged")]
    for bases in ({"first": "first"}, {"first": str(tmp_path / "second"), "second": "./first"}):
        for name, base in bases.items():
            path = tmp_path / name / "adapter_config.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": base}))
        with pytest.raises(UsageError, match="names itself as its base head .*write there which head it adapts"):
            export.main(flags)
    assert not (tmp_path / "merged").exists()

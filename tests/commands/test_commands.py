"""The whole path through the command line, on a tiny target: prepare, train, interrupt, resume, evaluate."""

import json
import os
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from draftsmith import Eagle3DraftModel
from draftsmith.commands import evaluate, prepare, train
from draftsmith.commands.parsing import UsageError
from tests.data.common import CHATML, build_tokenizer, chat


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("target")
    tokenizer = build_tokenizer(CHATML)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 5,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=8,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def flags(tmp_path, target_dir):
    rows = [{"messages": chat(f"What is {n}?", f"It is {n} and then {n * n}, what else?")} for n in range(24)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tmp_path / "train.yaml"
    config.write_text(
        f"target: {target_dir}\ncache_dir: {tmp_path / 'cache'}\nmax_length: 64\npacking: true\nrow_length: 128\n"
        "ttt_steps: 3\ndraft_vocab_size: 100\nper_device_train_batch_size: 1\nmax_steps: 8\nsave_steps: 1\n"
        "learning_rate: 1e-2\nreport_to: none\nuse_cpu: true\ndisable_tqdm: true\neval_fraction: 0.2\n"
        "logging_steps: 1\n"
    )
    return ["--config", str(config), "--dataset", str(tmp_path / "chats.jsonl")]


class StopAfter(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def weights(directory):
    return load_file(directory / "model.safetensors")


def test_interrupted_run_resumes_and_ends_with_the_same_weights(tmp_path, flags, target_dir):
    whole, part = tmp_path / "whole", tmp_path / "part"
    trainer = train.main([*flags, "--output_dir", str(whole)])
    train.main([*flags, "--output_dir", str(part)], callbacks=[StopAfter(3)])
    assert not all(torch.equal(value, weights(part)[name]) for name, value in weights(whole).items())
    (part / "checkpoint-99").mkdir()  # killed while it was written: no `trainer_state.json`
    with pytest.raises(UsageError, match="checkpoint-3.*resume_from_checkpoint auto"):
        train.main([*flags, "--output_dir", str(part)])
    train.main([*flags, "--output_dir", str(part), "--resume_from_checkpoint", "auto"])
    assert weights(part).keys() == weights(whole).keys()
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(part).items())
    metrics = json.loads((whole / "eval_results.json").read_text())
    assert metrics["eval_loss"] > 0 and metrics["eval_acceptance_length"] >= 1
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 8 and losses[-1] < losses[0]
    head = Eagle3DraftModel.from_pretrained(whole, target=LlamaForCausalLM.from_pretrained(target_dir))
    assert head.config.draft_vocab_size == 100 and head.d2t is not None


class Terminate(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def test_terminated_run_saves_its_checkpoint_alone_and_exits_as_terminated(tmp_path, flags, caplog):
    with pytest.raises(SystemExit) as exit_:
        train.main([*flags, "--output_dir", str(tmp_path / "head"), "--save_steps", "100"], callbacks=[Terminate()])
    assert exit_.value.code == 128 + signal.SIGTERM
    assert "SIGTERM ended training at step 3: go on with `--resume_from_checkpoint auto`" in caplog.text
    assert [path.name for path in (tmp_path / "head").iterdir()] == ["checkpoint-3"]


def test_evaluation_counts_and_reports(tmp_path, flags, target_dir, capsys):
    train.main([*flags, "--output_dir", str(tmp_path / "head")])
    output = tmp_path / "result.json"
    result = evaluate.main(
        [
            *(
                "--target",
                str(target_dir),
                "--draft",
                str(tmp_path / "head"),
                "--prompts",
                str(tmp_path / "chats.jsonl"),
            ),
            *("--num_prompts", "5", "--batch_size", "2", "--num_draft_tokens", "3", "--max_new_tokens", "12"),
            *("--output", str(output)),
        ]
    )
    assert result.prompts == 5 and result.drafted % 3 == 0
    assert result.new_tokens == result.prompts + result.rounds + sum(result.accepted_per_position)
    assert f"acceptance length {result.acceptance_length:.3f}" in capsys.readouterr().out
    assert json.loads(output.read_text())["accepted_per_position"] == result.accepted_per_position


def test_prepared_data_trains_to_the_same_weights(tmp_path, flags, target_dir):
    prepared = tmp_path / "prepared"
    chats = str(tmp_path / "chats.jsonl")
    prepare.main(
        [
            *(
                "--target",
                str(target_dir),
                "--dataset",
                chats,
                "--max_length",
                "64",
                "--cache_dir",
                str(tmp_path / "cache"),
            ),
            *("--output_dir", str(prepared)),
        ]
    )
    assert json.loads((prepared / "statistics.json").read_text())["train"]["documents"] == 24
    train.main([*flags, "--eval_fraction", "0", "--output_dir", str(tmp_path / "a")])
    train.main(
        [
            *flags[:2],
            "--eval_fraction",
            "0",
            "--dataset",
            str(prepared / "train.parquet"),
            "--output_dir",
            str(tmp_path / "b"),
        ]
    )
    truth = weights(tmp_path / "a")
    assert all(torch.equal(value, truth[name]) for name, value in weights(tmp_path / "b").items())


def test_warm_start_goes_on_from_a_head_and_refuses_another_map(tmp_path, flags):
    train.main([*flags, "--output_dir", str(tmp_path / "first")])
    warm = ["--draft", str(tmp_path / "first"), "--output_dir", str(tmp_path / "second"), "--max_steps", "1"]
    with pytest.raises(UsageError, match="vocabulary map"):
        train.main([*flags, *warm])
    config = tmp_path / "train.yaml"
    config.write_text(config.read_text().replace("draft_vocab_size: 100\n", ""))
    train.main([*flags, *warm])
    assert torch.equal(weights(tmp_path / "first")["d2t"], weights(tmp_path / "second")["d2t"])


def test_warm_start_refuses_an_architecture(tmp_path, flags):
    with pytest.raises(UsageError, match="draft_sliding_window.*norm_output"):
        given = ["--draft", "x/y", "--draft_sliding_window", "8", "--norm_output", "true"]
        train.main([*flags, *given, "--output_dir", str(tmp_path)])


def test_half_written_checkpoints_are_passed_over(tmp_path):
    for step, state in ((1, "{}"), (2, ""), (3, '{"epoch')):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
        save_file({"w": torch.ones(3)}, tmp_path / f"checkpoint-{step}" / "model.safetensors")
    (tmp_path / "checkpoint-old").mkdir()
    (tmp_path / "checkpoint-old" / "trainer_state.json").write_text("{}")
    assert train.last_whole_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-1")


def test_mixed_prompts_get_special_tokens_by_their_own_kind():
    tokenizer = build_tokenizer(CHATML)
    text, messages = "Hello there", [{"role": "user", "content": "Hello"}]
    alone = [evaluate.render(tokenizer, [prompt], {})["input_ids"][0].tolist() for prompt in (text, messages)]
    together = evaluate.render(tokenizer, [messages, text], {})
    for row, ids in zip((1, 0), alone, strict=True):
        assert together["input_ids"][row][together["attention_mask"][row].bool()].tolist() == ids


@pytest.mark.parametrize("flag", ["--batch_size", "--num_draft_tokens", "--max_new_tokens"])
def test_evaluation_refuses_impossible_numbers_before_it_loads(flag):
    with pytest.raises(UsageError, match=flag.removeprefix("--")):
        evaluate.main(["--target", "x/y", "--draft", "x/z", "--prompts", "p.jsonl", flag, "0"])


def test_missing_directories_are_named():
    with pytest.raises(UsageError, match="`target`: ./nowhere"):
        train.main(["--target", "./nowhere", "--dataset", "x.jsonl", "--output_dir", "y"])


def test_unusable_data_is_a_usage_error_before_the_target_is_loaded(tmp_path, flags, monkeypatch):
    monkeypatch.setattr(train, "make_draft", None)
    (tmp_path / "chats.jsonl").write_text('{"messages": []}\n')
    with pytest.raises(UsageError, match="line 1"):
        train.main([*flags, "--output_dir", str(tmp_path / "head")])


def test_states_that_are_kept_give_the_same_weights(tmp_path, flags):
    train.main([*flags, "--num_train_epochs", "3", "--output_dir", str(tmp_path / "a")])
    train.main(
        [*flags, "--num_train_epochs", "3", "--keep_target_states", "true", "--output_dir", str(tmp_path / "b")]
    )
    truth = weights(tmp_path / "a")
    assert all(torch.equal(value, truth[name]) for name, value in weights(tmp_path / "b").items())


def test_head_that_starts_from_a_target_layer(tmp_path, flags, target_dir):
    target = LlamaForCausalLM.from_pretrained(target_dir)
    head = Eagle3DraftModel.from_target(target, init_from_layer=-1)
    layer = target.model.layers[-1]
    assert torch.equal(head.midlayer.mlp.up_proj.weight, layer.mlp.up_proj.weight)
    assert torch.equal(head.midlayer.self_attn.q_proj.weight[:, 32:], layer.self_attn.q_proj.weight)
    assert torch.equal(head.norm.weight, target.model.norm.weight)
    for wrong, message in (
        ({"init_from_layer": 8}, "8 layers"),
        ({"init_from_layer": 0, "intermediate_size": 8}, "shape"),
    ):
        with pytest.raises(ValueError, match=message):
            Eagle3DraftModel.from_target(target, **wrong)

"""The whole path through the command line, on a tiny target: prepare, train, interrupt, resume, evaluate."""

import json
import os
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, TrainerCallback

from draftsmith import Eagle3DraftModel
from draftsmith.commands import evaluate, prepare, train
from draftsmith.commands.parsing import UsageError
from draftsmith.data import render_prompts
from tests.data.common import CHATML, build_tokenizer


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
    report = evaluate.main([
        *("--target", str(target_dir), "--draft", str(tmp_path / "head"), "--prompts", str(tmp_path / "chats.jsonl")),
        *("--num_prompts", "5", "--batch_size", "2", "--num_draft_tokens", "3", "2", "--max_new_tokens", "12"),
        *("--temperature", "0", "0.7", "--length_buckets", "16", "64", "--plain", "true", "--output", str(output)),
    ])  # fmt: skip
    assert [(result.num_draft_tokens, result.temperature) for result in report.results] == [
        (3, 0.0), (3, 0.7), (2, 0.0), (2, 0.7),
    ]  # fmt: skip
    printed, written = capsys.readouterr().out, json.loads(output.read_text())
    for result, saved in zip(report.results, written["results"], strict=True):
        total = result.total
        assert total.prompts == 5 == len(total.rounds) and list(result.categories) == ["chats"]
        assert total.new_tokens == total.prompts + sum(total.rounds) + sum(total.accepted)
        assert sum(total.accepted) == sum(total.accepted_per_position)
        assert sum(counts.prompts for counts in result.lengths.values()) == 5
        assert f"acceptance length {total.acceptance_length:.3f}" in printed and result.table() in printed
        assert saved["total"]["accepted_per_position"] == total.accepted_per_position
        assert saved["plain_tokens_per_second"] > 0
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert report.results[0].table() in output.with_suffix(".md").read_text()


def test_the_best_head_may_be_the_one_that_decodes_best(tmp_path, flags):
    decode = ["--eval_prompts", str(tmp_path / "chats.jsonl"), "--eval_num_prompts", "3", "--eval_max_new_tokens", "8"]
    steps = ["--eval_strategy", "steps", "--eval_steps", "2", "--save_steps", "2", "--load_best_model_at_end", "true"]
    best = ["--metric_for_best_model", "eval_decoded_acceptance_length"]
    trainer = train.main([*flags, *decode, *steps, *best, "--output_dir", str(tmp_path / "decoded")])
    found = [log["eval_decoded_acceptance_length"] for log in trainer.state.log_history if "eval_loss" in log]
    assert all(1.0 <= value <= 1.0 + trainer.args.ttt_steps for value in found)
    assert trainer.state.best_metric == max(found[:-1])  # the last one is of the best head once more
    train.main([*flags, *steps, "--output_dir", str(tmp_path / "plain"), "--metric_for_best_model", "eval_loss"])
    checkpoints = [tmp_path / name / "checkpoint-2" for name in ("decoded", "plain")]
    ours, truth = map(weights, checkpoints)  # decoding leaves training as it is
    assert all(torch.equal(value, truth[name]) for name, value in ours.items())


def test_decoding_in_training_needs_an_evaluation_set(tmp_path, flags):
    with pytest.raises(UsageError, match="`eval_prompts`.*`eval_dataset`"):
        prompts = ["--eval_prompts", str(tmp_path / "chats.jsonl")]
        train.main([*flags, *prompts, "--eval_fraction", "0", "--output_dir", str(tmp_path / "head")])


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
    alone = [render_prompts(tokenizer, [prompt], {})["input_ids"][0].tolist() for prompt in (text, messages)]
    together = render_prompts(tokenizer, [messages, text], {})
    for row, ids in zip((1, 0), alone, strict=True):
        assert together["input_ids"][row][together["attention_mask"][row].bool()].tolist() == ids


@pytest.mark.parametrize(
    "flags",
    [
        ["--batch_size", "0"],
        ["--num_draft_tokens", "3", "0"],
        ["--max_new_tokens", "0"],
        ["--temperature", "-1"],
        ["--temperature", "nan"],
        ["--num_prompts", "0"],
        ["--engine", "tgi"],
        ["--engine", "vllm", "--num_draft_tokens", "3", "5"],
        ["--engine", "openai", "--launch", "true"],
        ["--output", "result.md"],
    ],
)
def test_evaluation_refuses_impossible_settings_before_it_loads(flags):
    with pytest.raises(UsageError, match=(flags[2] if len(flags) > 3 else flags[0]).removeprefix("--")):
        evaluate.main(["--target", "x/y", "--draft", "x/z", "--prompts", "p.jsonl", *flags])


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

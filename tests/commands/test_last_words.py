"""What `draftsmith train` says about where it starts and when it is done."""

import json
import shlex

import pytest

from draftsmith import __version__
from draftsmith.commands import card, evaluate, export, main, train
from draftsmith.commands.parsing import UsageError


def commands_in(text):
    return [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("  draftsmith ")]


def test_the_commands_that_come_next_run_as_they_are_printed(tmp_path, flags, capsys, monkeypatch):
    head = tmp_path / "head"
    train.main([*flags, "--output_dir", str(head), "--max_steps", "2", "--target_dtype", "float32"])
    said = capsys.readouterr().out
    assert f"{head} holds the head. Measure it, write its card" in said and len(commands_in(said)) == 2
    evaluation, description = commands_in(said)
    assert "--target_dtype float32" in shlex.join(evaluation)
    monkeypatch.chdir(tmp_path)
    preset = evaluation.index("mt_bench")
    evaluation[preset] = f"mt_bench={tmp_path / 'questions.jsonl'}"
    question = {"category": "writing", "prompt": ["What is 3?", "And 4?"]}
    (tmp_path / "questions.jsonl").write_text(json.dumps(question) + "\n")
    evaluate.main([*evaluation[1:], "--max_new_tokens", "8"])
    card.main(description[1:])
    assert "acceptance length" in (head / "README.md").read_text()


def test_an_adapter_is_said_to_be_one_and_what_it_is_merged_into_is_a_head(tmp_path, flags, capsys, caplog):
    head, adapter = tmp_path / "head", tmp_path / "adapter"
    steps = ["--max_steps", "1", "--eval_fraction", "0"]
    train.main([*flags, *steps, "--output_dir", str(head)])
    assert "is an adapter" not in caplog.text
    config = tmp_path / "train.yaml"
    config.write_text(config.read_text().replace("draft_vocab_size: 100\n", ""))
    lora = ["--peft_config", json.dumps({"peft_type": "LORA", "r": 2, "target_modules": ["o_proj"]})]
    capsys.readouterr()
    train.main([*flags, *steps, *lora, "--draft", str(head), "--output_dir", str(adapter)])
    said = capsys.readouterr().out
    assert f"{adapter} holds the adapter." in said
    export.main(commands_in(said)[-1][1:])
    assert (tmp_path / "adapter-merged" / "model.safetensors").exists()
    train.main([*flags, *steps, "--draft", str(adapter), "--output_dir", str(tmp_path / "second")])
    assert f"`draft` {adapter} is an adapter: training starts from its head, merged with it" in caplog.text


def test_a_finished_run_says_that_nothing_was_trained(tmp_path, flags, capsys):
    again = [*flags, "--max_steps", "2", "--output_dir", str(tmp_path / "head"), "--resume_from_checkpoint", "auto"]
    train.main(again)
    assert "nothing was trained" not in capsys.readouterr().out
    before = (tmp_path / "head" / "run.json").read_text()
    train.main(again)
    assert "The run had finished before, and nothing was trained" in capsys.readouterr().out
    assert (tmp_path / "head" / "run.json").read_text() == before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--hub_license", "foo"], "`hub_license` is 'foo'"),
        (["--hub_model_id", "user/a/b"], "user/a/b"),
        (
            ["--draft", "LOCAL", "--peft_config", '{"peft_type": "LORA", "target_modules": ["fc"]}'],
            "push the head first",
        ),
    ],
)
def test_a_refused_push_leaves_no_directory(tmp_path, flags, given, message, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "Ab3" * 12)
    if "LOCAL" in given:
        train.main([*flags, "--output_dir", str(tmp_path / "local"), "--max_steps", "1", "--eval_fraction", "0"])
        config = tmp_path / "train.yaml"
        config.write_text(config.read_text().replace("draft_vocab_size: 100\n", ""))
        given = [str(tmp_path / "local") if word == "LOCAL" else word for word in given]
    with pytest.raises(UsageError, match=message):
        train.main([*flags, *given, "--push_to_hub", "true", "--output_dir", str(tmp_path / "head")])
    assert not (tmp_path / "head").exists()


def test_a_missing_head_is_found_offline_before_the_target_is_loaded(tmp_path, flags, target_dir, monkeypatch):
    monkeypatch.setattr("draftsmith.commands.arguments.load_target", None)
    prompts = ["--prompts", str(tmp_path / "chats.jsonl"), "--target", str(target_dir)]
    config = tmp_path / "train.yaml"
    config.write_text(config.read_text().replace("draft_vocab_size: 100\n", ""))
    (tmp_path / "empty").mkdir()
    for command, arguments in (
        (evaluate, prompts),
        (train, [*flags, "--output_dir", str(tmp_path / "head")]),
        (export, ["--output", str(tmp_path / "served")]),
    ):
        with pytest.raises(UsageError, match=r"`draft`: user/gone is no directory .*: name a directory, or go online"):
            command.main([*arguments, "--draft", "user/gone"])
        with pytest.raises(UsageError, match=r"`draft`: .*empty has neither config.json nor adapter_config"):
            command.main([*arguments, "--draft", str(tmp_path / "empty")])


def test_the_version_is_printed(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"{__version__}\n"


def test_license_and_id_of_a_run_are_those_of_a_later_card(tmp_path, flags):
    head = tmp_path / "head"
    train.main([
        *flags, "--output_dir", str(head), "--max_steps", "1", "--hub_license", "mit", "--hub_model_id", "user/h2",
        "--eval_fraction", "0", "--save_strategy", "no",
    ])  # fmt: skip
    card.main(["--draft", str(head)])
    text = (head / "README.md").read_text()
    assert "license: mit" in text and '"model": "user/h2", "num_speculative_tokens": 3' in text

"""Files and flags become dataclasses; every mistake of a user becomes one clear message and exit status 2."""

import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from transformers import TrainingArguments

from draftsmith.commands import COMMANDS, main
from draftsmith.commands.parsing import UsageError, parse


@dataclass
class DataArguments:
    target: str = field(metadata={"help": "Target model."})
    max_length: int = field(default=4096, metadata={"help": "Longest document, in tokens."})
    packing: bool = field(default=True, metadata={"help": "Whether to pack."})
    objective: Literal["kl", "ce"] = field(default="kl", metadata={"help": "Per-pair loss."})
    aux_layer_ids: list[int] | None = field(default=None, metadata={"help": "Layers to read."})
    chat_template_kwargs: dict[str, Any] | None = field(default=None, metadata={"help": "For the template."})

    def __post_init__(self) -> None:
        if self.max_length < 1:
            raise ValueError(f"`max_length` is {self.max_length}, but must be positive.")


@dataclass
class DraftTrainingArguments(TrainingArguments):
    learning_rate: float = field(default=1e-3, metadata={"help": "Peak learning rate."})
    ttt_steps: int = field(default=7, metadata={"help": "Steps of the unroll."})


@pytest.fixture
def config(tmp_path):
    def write(text: str, name: str = "x.yaml") -> str:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def parse_data(*argv: str) -> DataArguments:
    return parse([DataArguments], argv)[0]


def test_files_win_over_defaults_and_flags_over_files(config):
    path = config("target: from-file\nmax_length: 100\n")
    assert parse_data("--config", path) == DataArguments(target="from-file", max_length=100)
    assert parse_data("--max-length=7", "--config", path) == DataArguments(target="from-file", max_length=7)


def test_a_flag_that_repeats_the_default_still_wins_over_the_file(config):
    path = config("target: t\nmax_length: 100\nobjective: ce\npacking: false\n")
    arguments = parse_data("--config", path, "--max_length", "4096", "--objective", "kl", "--packing")
    assert arguments == DataArguments(target="t")


def test_later_files_win_over_earlier_ones(config):
    first, second = config("target: a\nmax_length: 1\n", "a.yaml"), config("target: b\n", "b.yaml")
    assert parse_data("--config", first, "--config", second) == DataArguments(target="b", max_length=1)


@pytest.mark.parametrize("value", ["false", "False", "no", "0"])
def test_booleans_as_flags(value):
    assert parse_data("--target", "t", "--packing", value).packing is False
    assert parse_data("--target", "t", "--no_packing").packing is False


def test_dictionaries_and_lists_are_yaml_in_files_and_json_in_flags(config):
    expected = DataArguments("t", aux_layer_ids=[2, 14, 25], chat_template_kwargs={"thinking": False, "depth": [1]})
    path = config("target: t\naux_layer_ids: [2, 14, 25]\nchat_template_kwargs:\n  thinking: no\n  depth: [1]\n")
    assert parse_data("--config", path) == expected
    flags = ("--target", "t", "--chat_template_kwargs", '{"thinking": false, "depth": [1]}', "--aux_layer_ids")
    assert parse_data(*flags, "[2, 14, 25]") == expected
    assert parse_data(*flags, "2", "14", "25") == expected


def test_training_arguments_keep_their_coercions(config):
    path = config(
        "target: t\nlearning_rate: 1e-4\nnum_train_epochs: 2\nlr_scheduler_type: cosine\nreport_to: [none]\n"
        "lr_scheduler_kwargs: {min_lr: 1e-5}\nsave_strategy: 'no'\noptim_args: a=1,b=2\nuse_cpu: true\n"
        "include_num_input_tokens_seen: all\n"
    )
    data, training = parse([DataArguments, DraftTrainingArguments], ["--config", path, "--ttt_steps", "3"])
    assert data == DataArguments("t")
    assert (training.learning_rate, training.num_train_epochs, training.ttt_steps) == (1e-4, 2.0, 3)
    assert (training.lr_scheduler_type, training.save_strategy) == ("cosine", "no")
    assert (training.lr_scheduler_kwargs, training.optim_args) == ({"min_lr": 1e-5}, "a=1,b=2")
    assert (training.report_to, training.include_num_input_tokens_seen) == ([], "all")

    flags = ["--use_cpu", "--report_to", "none", "--lr_scheduler_kwargs", '{"num_cycles": "2", "warm": "true"}']
    assert parse([DraftTrainingArguments], flags)[0].lr_scheduler_kwargs == {"num_cycles": 2, "warm": True}


def test_deepspeed_configuration_inline_or_as_a_file(config):
    pytest.importorskip("deepspeed")
    inline = config("use_cpu: true\ndeepspeed: {zero_optimization: {stage: 2}, train_batch_size: auto}\n")
    (training,) = parse([DraftTrainingArguments], ["--config", inline])
    assert training.deepspeed == {"zero_optimization": {"stage": 2}, "train_batch_size": "auto"}
    path = config('{"zero_optimization": {"stage": 1}}', "zero1.json")
    (training,) = parse([DraftTrainingArguments], ["--use_cpu", "--deepspeed", path])
    assert training.deepspeed == path
    with pytest.raises(UsageError, match=r"--deepspeed.*expected dict.* as JSON, got '\{stage: 2\}'"):
        parse([DraftTrainingArguments], ["--use_cpu", "--deepspeed", "{stage: 2}"])


def test_the_rank_that_the_deepspeed_launcher_appends_is_accepted_everywhere():
    assert parse_data("--target", "t", "--local_rank=0") == DataArguments("t")


def test_the_environment_is_not_read(monkeypatch, tmp_path):
    (tmp_path / "train.args").write_text("--max_length 1")  # HfArgumentParser's own file beside the program
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py"), "--target", "t"])
    monkeypatch.setenv("MAX_LENGTH", "1")
    assert parse([DataArguments])[0].max_length == 4096


WRONG_FILES = {
    "max_lenght: 8": r"x\.yaml: unknown key `max_lenght`; did you mean `max_length`\?",
    "max-length: 8": r"x\.yaml: unknown key `max-length`; did you mean `max_length`\?",
    "1: 8": r"x\.yaml: unknown key `1`",
    "max_length: many": r"x\.yaml: `max_length` is 'many' \(str\), expected int$",
    "max_length: true": r"`max_length` is True \(bool\), expected int",
    "max_length: 8.5": r"`max_length` is 8.5 \(float\), expected int",
    "max_length:": r"`max_length` is None \(NoneType\), expected int",
    "packing: 3": r"`packing` is 3 \(int\), expected bool",
    "target: 2024-01-01": r"`target` is .* \(date\), expected str; quote it to make it text",
    "objective: kll": r"`objective` is 'kll' \(str\), expected Literal\['kl', 'ce'\]",
    "aux_layer_ids: [2, x]": r"`aux_layer_ids` is \[2, 'x'\] \(list\), expected list\[int\] \| None",
    "chat_template_kwargs: [1]": r"`chat_template_kwargs` is \[1\] \(list\), expected dict\[str, .*Any\] \| None",
    "max_length: 8\ntarget: a\nmax_length: 9": r"(?s)x\.yaml.*`max_length` is given twice.*line 3",
    "chat_template_kwargs: {a: 1, a: 2}": r"(?s)`a` is given twice.*line 1",
    "target: a\nmax_length: b: c": r"(?s)x\.yaml is not valid YAML.*line 2",
    "target: 2024-13-45": r"x\.yaml is not valid YAML: month",
    "- target": r"x\.yaml must hold one mapping",
    "max_length: 0\ntarget: t": r"`max_length` is 0, but must be positive",
}


@pytest.mark.parametrize("text", WRONG_FILES)
def test_wrong_files_are_named_with_the_reason(config, text):
    with pytest.raises(UsageError, match=WRONG_FILES[text]):
        parse_data("--config", config(text))


WRONG_FLAGS = {
    "--target t --max_lenght 8": r"unknown flag `--max_lenght`; did you mean `--max_length`\?",
    "--target t --max_len 8": r"unknown flag `--max_len`; did you mean `--max_length`\?",  # no abbreviations
    "--trget=t": r"unknown flag `--trget`; did you mean `--target`\?",
    "--target t x.yaml": r"unexpected `x\.yaml`.*--config file\.yaml",
    "--max_length 5": r"`target` is required",
    "--target t --max_length x": r"--max_length.*invalid int value: 'x'",
    "--target t --packing maybe": r"--packing.*got maybe",
    "--target t --objective kll": r"--objective.*invalid choice: 'kll'",
    "--target t --aux_layer_ids 2 x": r"--aux_layer_ids.*invalid int value: 'x'",
    "--target t --aux_layer_ids [2,true]": r"--aux_layer_ids.*expected list\[int\] as JSON, got '\[2,true\]'",
    "--target t --chat_template_kwargs {a:1}": r"--chat_template_kwargs.*expected dict.* as JSON, got '\{a:1\}'",
    "--config nowhere.yaml": r"cannot read `--config` nowhere\.yaml: No such file",
}


@pytest.mark.parametrize("flags", WRONG_FLAGS)
def test_wrong_flags_are_named_with_the_reason(flags):
    with pytest.raises(UsageError, match=WRONG_FLAGS[flags]):
        parse_data(*flags.split())


def test_an_empty_file_sets_nothing(config):
    assert parse_data("--config", config("# nothing yet\n"), "--target", "t") == DataArguments("t")


def test_yaml_anchors_may_be_overridden(config):
    path = config("target: &base t\nchat_template_kwargs: {<<: {a: 1}, a: 2}\n")
    assert parse_data("--config", path).chat_template_kwargs == {"a": 2}


def test_help_groups_our_fields_before_inherited_ones(capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse([DataArguments, DraftTrainingArguments], ["--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    headings = [text.index(f"\n{name}:") for name in ("DataArguments", "DraftTrainingArguments", "TrainingArguments")]
    assert headings == sorted(headings)
    assert headings[1] < text.index("--learning_rate") < headings[2] < text.index("--weight_decay")


def test_main_runs_the_named_command_with_the_remaining_arguments(monkeypatch):
    calls = []
    for name in COMMANDS:
        module = SimpleNamespace(main=lambda argv, name=name: calls.append((name, argv)))
        monkeypatch.setitem(sys.modules, f"draftsmith.commands.{name}", module)
        main([name, "--config", "x.yaml"])
    assert calls == [(name, ["--config", "x.yaml"]) for name in COMMANDS]


def test_main_prints_usage_errors_and_exits_with_two(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "draftsmith.commands.train", SimpleNamespace(main=parse_data_of))
    for argv, message in (
        (["train", "--trget", "t"], "error: unknown flag `--trget`; did you mean `--target`?\n"),
        (["trian"], "error: unknown command `trian`; did you mean `train`?\n"),
    ):
        with pytest.raises(SystemExit) as exit_info:
            main(argv)
        assert exit_info.value.code == 2
        assert capsys.readouterr().err == message


def parse_data_of(argv: list[str]) -> None:
    parse_data(*argv)


def test_main_lets_other_errors_through(monkeypatch):
    def fail(argv):
        raise ValueError("a bug")

    monkeypatch.setitem(sys.modules, "draftsmith.commands.train", SimpleNamespace(main=fail))
    with pytest.raises(ValueError, match="a bug"):
        main(["train"])


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_main_without_a_command_lists_them(argv, capsys):
    main(argv)
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in COMMANDS)

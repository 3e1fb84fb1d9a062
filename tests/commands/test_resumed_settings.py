"""A run goes on from its checkpoints with the settings that they were trained with, or says that it does not."""

import json
import shutil

import pytest
from transformers import TrainerCallback

from draftsmith.commands import train, training_inputs
from draftsmith.commands.parsing import UsageError
from tests.data.common import chat


class StopAfter(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == self.step


@pytest.fixture
def part(tmp_path, flags):
    """A run of eight steps that was interrupted after three."""
    train.main([*flags, "--output_dir", str(tmp_path / "part")], callbacks=[StopAfter(3)])
    return tmp_path / "part"


def resume(flags, directory, *changed, checkpoint="auto"):
    return train.main([*flags, *changed, "--output_dir", str(directory), "--resume_from_checkpoint", checkpoint])


def recipe_of(directory):
    return json.loads((directory / "run.json").read_text())["recipe"]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (["--learning_rate", "1e-3"], "`learning_rate` was 0.01 and is 0.001"),
        (["--seed", "7", "--objective", "tv"], "`seed` was 42 and is 7, .*`objective` was 'kl' and is 'tv'"),
        (["--ttt_steps", "2"], "`ttt_steps` was 3 and is 2"),
        (["--max_steps", "12"], "`max_steps` was 8 and is 12"),
        (["--dataset", "elsewhere/others.jsonl"], r"`dataset` was \['chats.jsonl'\] and is \['others.jsonl'\]"),
        (["--deduplicate", "true"], "`deduplicate` was None and is True"),
        (["--gradient_accumulation_steps", "2"], "`gradient_accumulation_steps` was 1 and is 2"),
    ],
)
def test_other_settings_are_refused_before_anything_is_loaded(part, flags, changed, named, monkeypatch):
    monkeypatch.setattr(training_inputs, "prepare_datasets", lambda *_: pytest.fail("data was prepared"))
    before = (part / "run.json").read_text()
    with pytest.raises(UsageError, match=f"checkpoint-3 was trained with other settings: {named}.*`output_dir`"):
        resume(flags, part, *changed)
    assert (part / "run.json").read_text() == before


@pytest.mark.parametrize("changed", [["--norm_output", "true"], ["--draft_vocab_size", "90"]])
def test_another_head_is_refused(part, flags, changed):
    with pytest.raises(UsageError, match=f"trained with other settings: `{changed[0][2:]}` was"):
        resume(flags, part, *changed)


def test_a_checkpoint_of_another_run_is_refused_even_if_nothing_would_be_left_to_train(tmp_path, part, flags):
    shutil.copytree(part / "checkpoint-3", tmp_path / "copy" / "checkpoint-3")
    for checkpoint in ("auto", str(tmp_path / "copy" / "checkpoint-3")):
        with pytest.raises(UsageError, match="`max_steps` was 8 and is 3, `objective` was 'kl' and is 'tv'"):
            resume(flags, tmp_path / "copy", "--objective", "tv", "--max_steps", "3", checkpoint=checkpoint)
    assert not (tmp_path / "copy" / "run.json").exists()


def test_data_that_changed_in_its_file_is_refused(tmp_path, part, flags):
    with (tmp_path / "chats.jsonl").open("a") as file:
        file.write(json.dumps({"messages": chat("What is new?", "This row is, and then what else?")}) + "\n")
    with pytest.raises(UsageError, match="`data_digest` was '.*' and is '"):
        resume(flags, part)


def test_what_leaves_the_weights_alone_may_change(part, flags):
    changed = [
        "--save_steps",
        "4",
        "--logging_steps",
        "3",
        "--eval_strategy",
        "epoch",
        "--dataloader_num_workers",
        "1",
    ]
    resume(flags, part, *changed, "--eval_strategy", "epoch", "--gradient_checkpointing", "true")
    recipe = recipe_of(part)
    assert recipe["steps"] == 8 and recipe["resumed"] == ["until step 3 with gradient_checkpointing False"]


def test_a_named_checkpoint_goes_on_with_another_schedule_and_the_record_has_both(part, flags, caplog):
    checkpoint = str(part / "checkpoint-3")
    with pytest.raises(UsageError, match=f"to change it on purpose, pass --resume_from_checkpoint {checkpoint}"):
        resume(flags, part, "--max_steps", "5")
    resume(flags, part, "--max_steps", "5", checkpoint=checkpoint)
    assert "was trained with other settings, and goes on: `max_steps` was 8 and is 5" in caplog.text
    assert (recipe_of(part)["max_steps"], recipe_of(part)["resumed"]) == (5, ["until step 3 with max_steps 8"])
    for step in (5, 4):
        assert (part / f"checkpoint-{step}").exists()
    shutil.rmtree(part / "checkpoint-5")
    resume(flags, part, "--max_steps", "5")  # a later interruption forgets nothing
    assert recipe_of(part)["resumed"] == ["until step 3 with max_steps 8"]
    before = (part / "run.json").read_text()
    with pytest.raises(SystemExit, match="error: .*checkpoint-3 has more steps than"):
        resume(flags, part, "--max_steps", "2", checkpoint=checkpoint)
    assert (part / "run.json").read_text() == before


def test_checkpoints_of_earlier_versions_go_on_with_a_warning(part, flags, caplog):
    for path in part.glob("checkpoint-*/settings.json"):
        path.unlink()
    resume(flags, part)
    assert "checkpoint-3 does not say what it was trained with" in caplog.text and recipe_of(part)["steps"] == 8

"""The figures of a run are those of all its steps, wherever log lines fall and however often it was interrupted."""

import json

import pytest
from datasets import Dataset
from transformers import TrainerCallback

from draftsmith.data import pack_dataset
from draftsmith.hub import SETTINGS
from draftsmith.trainer.settings import OtherSettingsError

from .common import assert_equal_weights, logged, make_rows, make_trainer, weights_of


LENGTHS = [12, 9, 20, 15, 7, 30, 11]
OPTIONS = {
    "max_steps": 7,
    "logging_steps": 3,
    "save_strategy": "steps",
    "save_steps": 5,
    "per_device_train_batch_size": 1,
}


class StopAfter(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def record_of(directory):
    return json.loads((directory / "run.json").read_text())


def test_figures_go_to_the_last_step(tmp_path):
    trainer = make_trainer(tmp_path, make_rows(LENGTHS), **OPTIONS)
    output = trainer.train()
    trainer.save_model()
    record = record_of(tmp_path)
    assert record["tokens_seen"] == sum(LENGTHS) == record["train_metrics"]["num_tokens"]
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in entries] == [3, 5, 6, 7]
    assert record["train_metrics"]["loss"] == entries[-1]["loss"]
    steps = [3, 2, 1, 1]
    assert sum(entry["loss"] * count for entry, count in zip(entries, steps, strict=True)) / 7 == pytest.approx(
        output.training_loss, rel=1e-6
    )
    assert 0 < record["hours"] <= output.metrics["train_runtime"] / 3600 + 1e-3
    assert record["tokens_per_second"] == pytest.approx(sum(LENGTHS) / (3600 * record["hours"]))


def test_documents_are_told_of_packed_rows(tmp_path):
    rows = [{**row, "turn_ids": [bit - 1 for bit in row["loss_mask"]], "length": 9} for row in make_rows([9] * 6)]
    packed = pack_dataset(Dataset.from_list(rows), 20)
    make_trainer(tmp_path, packed, eval_rows=packed.select([0])).save_model()
    record = record_of(tmp_path)
    assert len(packed) == 3 and record["datasets"][0]["rows"] == 6 and record["eval_datasets"][0]["rows"] == 2


@pytest.mark.parametrize("logging_strategy", ["steps", "no"])
def test_figures_of_a_resumed_run_count_the_part_before(tmp_path, logging_strategy):
    options = {**OPTIONS, "logging_strategy": logging_strategy}
    whole = make_trainer(tmp_path / "whole", make_rows(LENGTHS), **options)
    whole.train()
    first = make_trainer(tmp_path / "run", make_rows(LENGTHS), callbacks=[StopAfter(5)], **options)
    first.train()
    first.save_model()
    before = record_of(tmp_path / "run")
    resumed = make_trainer(tmp_path / "run", make_rows(LENGTHS), **options)
    resumed.train(resume_from_checkpoint=True)
    resumed.save_model()
    after = record_of(tmp_path / "run")
    assert before["tokens_seen"] < after["tokens_seen"] == sum(LENGTHS)
    assert after["hours"] > before["hours"] > 0 and after["tokens_per_second"] > 0
    assert logged(resumed, "loss") == pytest.approx(logged(whole, "loss"))


@pytest.mark.parametrize("steps", [3, 7], ids=["within an epoch", "a whole epoch"])
def test_a_finished_run_is_not_trained_on(tmp_path, steps):
    options = {**OPTIONS, "max_steps": steps}
    first = make_trainer(tmp_path, make_rows(LENGTHS), **options)
    first.train()
    again = make_trainer(tmp_path, make_rows(LENGTHS), **options)
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{steps}"))
    assert again.state.global_step == steps and again.is_repeated
    assert_equal_weights(weights_of(again), weights_of(first), 0)


EPOCHS = {**OPTIONS, "max_steps": -1, "num_train_epochs": 2, "save_steps": 2}
EVEN = LENGTHS[:6]


def test_a_run_finished_on_more_ranks_is_not_trained_on(tmp_path):
    """One rank has more steps in an epoch: as many as it would take would be added."""
    first = make_trainer(tmp_path, make_rows(EVEN), **EPOCHS | {"per_device_train_batch_size": 2})
    first.train()
    first.save_model()
    as_if_on_two_ranks(tmp_path / "checkpoint-6")
    again = make_trainer(tmp_path, make_rows(EVEN), **EPOCHS)
    again.train(resume_from_checkpoint=True)
    assert again.state.max_steps == 12 and again.state.global_step == first.state.global_step == 6
    assert again.is_repeated
    assert_equal_weights(weights_of(again), weights_of(first), 0)


def test_an_interrupted_run_goes_on_with_as_many_rows_in_a_step(tmp_path):
    two_rows = {"per_device_train_batch_size": 2}
    first = make_trainer(tmp_path, make_rows(EVEN), **EPOCHS | two_rows, callbacks=[StopAfter(2)])
    first.train()
    as_if_on_two_ranks(tmp_path / "checkpoint-2")
    with pytest.raises(OtherSettingsError, match="`world_size` was 2 and is 1.*`gradient_accumulation_steps` keeps"):
        make_trainer(tmp_path, make_rows(EVEN), **EPOCHS).train(resume_from_checkpoint=True)
    resumed = make_trainer(tmp_path, make_rows(EVEN), **EPOCHS | {"gradient_accumulation_steps": 2})
    resumed.train(resume_from_checkpoint=True)
    whole = make_trainer(tmp_path / "whole", make_rows(EVEN), **EPOCHS | two_rows)
    whole.train()
    assert resumed.state.global_step == whole.state.global_step == 6
    assert_equal_weights(weights_of(resumed), weights_of(whole), 1e-5)


def as_if_on_two_ranks(checkpoint):
    """What two ranks with a row each would have written."""
    content = json.loads((checkpoint / SETTINGS).read_text())
    content["settings"] |= {"per_device_train_batch_size": 1, "world_size": 2}
    (checkpoint / SETTINGS).write_text(json.dumps(content))

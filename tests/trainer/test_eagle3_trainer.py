"""The trainer on CPU: normalisation, metrics, evaluation, checkpoints."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from draftsmith import Eagle3DraftModel, Eagle3Trainer, Eagle3TrainingArguments
from draftsmith.data import DraftCollator
from draftsmith.trainer.metrics import draft_metrics

from .common import BEST, SAVING, assert_equal_weights, logged, make_rows, make_target, make_trainer, weights_of


LENGTHS = [5, 40, 9, 17, 30, 3, 22, 12]


@pytest.mark.parametrize("normalization", ["token", "sequence"])
def test_batch_times_accumulation_is_invariant(tmp_path, normalization):
    """8 uneven samples as 8x1, 4x2 and 1x8: same update, same logged loss, and the update of plain autograd."""
    results = []
    for batch, accumulation in ((8, 1), (4, 2), (1, 8)):
        trainer = make_trainer(
            tmp_path,
            make_rows(LENGTHS),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            loss_normalization=normalization,
        )
        before = weights_of(trainer)
        trainer.train()
        results.append((weights_of(trainer), logged(trainer, "loss"), logged(trainer, "acceptance_length")))
    for weights, loss, length in results[1:]:
        assert_equal_weights(weights, results[0][0])
        assert loss == pytest.approx(results[0][1], rel=1e-5) and length == pytest.approx(results[0][2])
    expected = plain_update(before, make_rows(LENGTHS), normalization)
    assert_equal_weights(results[0][0], expected, 1e-4)


def plain_update(before, rows, normalization):
    target = make_target()
    model = Eagle3DraftModel.from_target(target)
    model.load_state_dict(before, strict=False)
    batch = DraftCollator(3)(rows)
    with torch.no_grad():
        states = target.model(
            batch["input_ids"], attention_mask=(batch["document_ids"] >= 0), output_hidden_states=True
        )
    aux = torch.cat([states.hidden_states[i] for i in (2, 4, 5)], -1)
    loss = model(
        batch["input_ids"], aux, states.last_hidden_state, target.lm_head.weight, batch["loss_mask"],
        document_ids=batch["document_ids"], ttt_steps=3, loss_normalization=normalization,
    ).loss  # fmt: skip
    loss.backward()
    return {name: before[name] - 0.1 * parameter.grad for name, parameter in model.named_parameters()}


def test_last_accumulation_window_is_normalised_by_its_own_tokens(tmp_path):
    """7 batches, accumulation 4: two updates; the second equals a fresh update on its three rows."""
    rows = make_rows(LENGTHS[:7])
    options = {"per_device_train_batch_size": 1, "max_steps": -1, "num_train_epochs": 1}
    trainer = make_trainer(
        tmp_path, rows, gradient_accumulation_steps=4, train_sampling_strategy="sequential", **options
    )
    trainer.train()
    assert trainer.state.global_step == 2
    first = make_trainer(tmp_path, rows[:4], gradient_accumulation_steps=4, **options)
    first.train()
    second = make_trainer(tmp_path, rows[4:], gradient_accumulation_steps=3, draft=first.model, **options)
    second.train()
    assert_equal_weights(weights_of(trainer), weights_of(second))
    assert logged(trainer, "loss") == pytest.approx(logged(first, "loss") + logged(second, "loss"), rel=1e-5)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_nothing_supervised_leaves_the_weights_and_says_so(tmp_path, accumulation, caplog):
    rows = make_rows([9] * 4, supervised=[0] * 4)
    trainer = make_trainer(tmp_path, rows, gradient_accumulation_steps=accumulation, per_device_train_batch_size=2)
    before = weights_of(trainer)
    trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in weights_of(trainer).items())
    assert logged(trainer, "loss") == [0.0] and logged(trainer, "acceptance_length") == [1.0]
    assert "no supervised row" in caplog.text


def test_an_unsupervised_row_in_four_changes_nothing(tmp_path):
    rows = make_rows([9, 14, 20, 7])
    masked = [*rows[:3], {**rows[3], "loss_mask": [0] * 7}]
    results = []
    for data in (masked, rows[:3]):
        trainer = make_trainer(tmp_path, data, per_device_train_batch_size=len(data))
        trainer.train()
        results.append(weights_of(trainer))
    assert_equal_weights(*results)


def test_chains_end_at_the_first_miss():
    """Per-step hits [1, 0, 1] of one row make the chain [1, 0, 0]."""
    sums = {"rows": [1.0, 1.0, 1.0], "hits": [1.0, 0.0, 1.0], "chain": [1.0, 0.0, 0.0], "alpha": [0.9, 0.2, 0.8]}
    metrics = draft_metrics(sums)
    assert metrics["acceptance_length"] == 2.0 and metrics["step_2/accuracy"] == 1.0 and metrics["step_1/alpha"] == 0.2
    assert draft_metrics({"rows": [0.0], "hits": [0.0], "chain": [0.0]})["acceptance_length"] == 1.0


def test_evaluation_is_that_of_the_whole_set(tmp_path):
    """Three uneven samples in batches of 1, 2 and 3 and by hand: one `eval_loss`."""
    rows = make_rows([6, 31, 14])
    values = []
    for batch in (1, 2, 3):
        trainer = make_trainer(tmp_path, rows, eval_rows=rows, per_device_eval_batch_size=batch)
        metrics = trainer.evaluate()
        values.append((metrics["eval_loss"], metrics["eval_acceptance_length"], metrics["eval_step_1/accuracy"]))
    assert values[1] == pytest.approx(values[0]) and values[2] == pytest.approx(values[0])
    target = trainer.target
    batch = DraftCollator(3)(rows)
    states = target(batch["input_ids"], document_ids=batch["document_ids"])
    by_hand = trainer.model(
        batch["input_ids"], states.aux_hidden_states, states.last_hidden_state, target.head_weight, batch["loss_mask"],
        document_ids=batch["document_ids"], ttt_steps=3,
    )  # fmt: skip
    assert values[0][0] == pytest.approx(by_hand.loss.item(), rel=1e-5)


@pytest.mark.parametrize("metric", ["eval_loss", "eval_acceptance_length"])
def test_best_model_is_found_and_loaded(tmp_path, metric):
    rows = make_rows(LENGTHS)
    trainer = make_trainer(
        tmp_path,
        rows,
        eval_rows=rows,
        **BEST,
        metric_for_best_model=metric,
        learning_rate=0.5,
    )
    trainer.train()
    values = logged(trainer, metric)
    best = (min if metric == "eval_loss" else max)(values)
    assert len(values) == 3 and trainer.state.best_metric == best
    assert trainer.evaluate()[metric] == pytest.approx(best, rel=1e-5)


class StopAfter(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


@pytest.mark.parametrize("stop", [2, 5])  # in the first epoch of four steps, and in the second
def test_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path, stop):
    options = {"max_steps": 7, **SAVING}
    rows = make_rows(LENGTHS)
    whole = make_trainer(tmp_path / "whole", rows, **options)
    whole.train()
    make_trainer(tmp_path / "part", rows, callbacks=[StopAfter(stop)], **options).train()
    resumed = make_trainer(tmp_path / "part", rows, **options)
    resumed.train(resume_from_checkpoint=True)
    truth = weights_of(whole)
    assert all(torch.equal(value, truth[name]) for name, value in weights_of(resumed).items())
    assert logged(resumed, "loss") == logged(whole, "loss")


def test_checkpoints_are_fp32_and_the_saved_head_has_the_targets_dtype(tmp_path):
    target = make_target().to(torch.bfloat16)
    draft = Eagle3DraftModel.from_target(target).to(torch.bfloat16)
    args = Eagle3TrainingArguments(
        str(tmp_path), max_steps=1, save_steps=1, use_cpu=True, report_to="none", ttt_steps=2
    )
    trainer = Eagle3Trainer(draft, target, args, train_dataset=make_rows([9, 12]))
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    trainer.train()
    trainer.save_model()
    checkpoint = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    served = load_file(tmp_path / "model.safetensors")
    assert checkpoint.keys() == served.keys() and not any("embed" in name or "target" in name for name in served)
    assert checkpoint["fc.weight"].dtype == torch.float32 and served["fc.weight"].dtype == torch.bfloat16
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert not (tmp_path / "training_args.bin").exists()  # a pickle
    assert Eagle3DraftModel.from_pretrained(tmp_path, target=target).dtype == torch.bfloat16


def test_bf16_compute_keeps_fp32_masters_and_learns(tmp_path):
    rows = make_rows([24] * 8)
    trainer = make_trainer(
        tmp_path, rows, bf16=True, max_steps=30, optim="adamw_torch", learning_rate=0.01, per_device_train_batch_size=8
    )
    trainer.train()
    assert trainer.model.fc.weight.dtype == torch.float32
    losses = logged(trainer, "loss")
    assert losses[-1] < 0.5 * losses[0]


def test_log_names(tmp_path):
    trainer = make_trainer(tmp_path, make_rows(LENGTHS), objective="ce")
    trainer.train()
    entry = trainer.state.log_history[0]
    assert {
        "loss",
        "grad_norm",
        "learning_rate",
        "epoch",
        "num_tokens",
        "acceptance_length",
        "step_2/accuracy",
    } <= set(entry)
    assert "step_0/alpha" not in entry  # hard labels have no target distribution


@pytest.mark.parametrize(
    "options",
    [{"objective": "mse"}, {"loss_normalization": "rows"}, {"ttt_steps": 0}, {"average_tokens_across_devices": False}],
)
def test_wrong_arguments_are_refused_by_name(tmp_path, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Eagle3TrainingArguments(str(tmp_path), **options)


def test_several_gpus_in_one_process_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Eagle3TrainingArguments, "n_gpu", 2)
    with pytest.raises(ValueError, match="torchrun"):
        make_trainer(tmp_path, make_rows(LENGTHS))


def test_warm_start_keeps_the_vocabulary_map(tmp_path):
    target = make_target()
    ids = torch.tensor([1, 4, 90])
    draft = Eagle3DraftModel.from_target(target, d2t=ids - torch.arange(3))
    draft.save_pretrained(tmp_path / "head")
    loaded = Eagle3DraftModel.from_pretrained(tmp_path / "head", target=target)
    trainer = make_trainer(tmp_path, make_rows(LENGTHS), draft=loaded)
    trainer.train()
    trainer.save_model()
    assert torch.equal(load_file(tmp_path / "model.safetensors")["d2t"], draft.d2t)


def test_reentrant_recompute_is_refused(tmp_path):
    with pytest.raises(ValueError, match="use_reentrant"):
        Eagle3TrainingArguments(str(tmp_path), gradient_checkpointing_kwargs={"use_reentrant": True})


def test_recompute_through_the_arguments_changes_nothing(tmp_path):
    results = []
    for recompute in (False, True):
        trainer = make_trainer(tmp_path, make_rows(LENGTHS), gradient_checkpointing=recompute, max_steps=2)
        trainer.train()
        results.append(weights_of(trainer))
    assert_equal_weights(*results)


def test_sampling_by_length_evaluates_and_ends(tmp_path):
    rows = make_rows(LENGTHS)
    trainer = make_trainer(tmp_path, rows, eval_rows=rows[:3], train_sampling_strategy="group_by_length")
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0


def test_empty_evaluation_set_is_refused(tmp_path):
    with pytest.raises(ValueError, match="eval_dataset"):
        make_trainer(tmp_path, make_rows(LENGTHS), eval_rows=[]).evaluate()

"""`StreamingLossTrainer` against transformers' own `Trainer`: same losses, same weights, no logits."""

import math

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForSeq2SeqLM, LlamaForCausalLM, T5Config, Trainer, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss

from draftsmith import StreamingLossTrainer

from ..tiny_models import VOCAB_SIZE, tiny_model
from .common import assert_equal_weights, logged, weights_of
from .ranks import run_two_ranks


LENGTHS = [5, 40, 9, 17, 30, 3, 22]
AUXILIARY = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


def make_lm(family="llama", **fields):
    return tiny_model(family, **fields).train()


def make_lm_rows(lengths, *, supervised=None, seed=0):
    """Rows of token ids whose last `supervised[i]` tokens are labels (default: two thirds)."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length, answer in zip(lengths, supervised or [2 * length // 3 for length in lengths], strict=True):
        ids = torch.randint(3, 90, (length,), generator=generator)
        labels = ids.where(torch.arange(length) >= length - answer, -100)
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return rows


def two_rank_rows():
    """Rank 1 reads every second row: nothing supervised in its first step."""
    return make_lm_rows([9, 12, 20, 7, 11, 30, 8, 10], supervised=[5, 0, 11, 0, 2, 20, 0, 9])


def padded(rows):
    length = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    rows = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows]
    return {
        name: torch.tensor([row[name] + [value] * (length - len(row[name])) for row in rows])
        for name, value in fill.items()
    }


def packed(rows):
    """One row, positions that restart, labels aligned already: none crosses into the next document."""
    ids, labels, positions = [], [], []
    for row in rows:
        ids += row["input_ids"]
        labels += [*row["labels"][1:], -100]
        positions += range(len(row["input_ids"]))
    columns = {"input_ids": ids, "labels": ids, "shift_labels": labels, "position_ids": positions}
    return {name: torch.tensor([values]) for name, values in columns.items()}


def make_lm_trainer(trainer_class, output_dir, rows, model, *, collator=padded, **options):
    options = {
        "learning_rate": 0.1,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_steps": 2,
        "logging_steps": 1,
        "train_sampling_strategy": "sequential",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "per_device_eval_batch_size": 2,
        **options,
    }
    ours = {"chunk_size": 7} if trainer_class is StreamingLossTrainer else {}
    args = TrainingArguments(str(output_dir), **options)
    return trainer_class(model, args, data_collator=collator, train_dataset=rows, eval_dataset=rows, **ours)


def trained(trainer_class, output_dir, rows, model, **options):
    """Weights, losses, gradient norms and `eval_loss` after training."""
    trainer = make_lm_trainer(trainer_class, output_dir, rows, model, **options)
    trainer.train()
    figures = logged(trainer, "loss") + logged(trainer, "grad_norm") + [trainer.evaluate()["eval_loss"]]
    return weights_of(trainer), figures


def assert_trains_like_stock(output_dir, rows, make_model, *, tolerance=1e-6, **options):
    truth, figures = trained(Trainer, output_dir, rows, make_model(), **options)
    ours, our_figures = trained(StreamingLossTrainer, output_dir, rows, make_model(), **options)
    assert our_figures == pytest.approx(figures, rel=10 * tolerance)
    for name, value in truth.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=tolerance * max(1, value.abs().max()), msg=name)


@pytest.mark.parametrize(
    "family, fields",
    [
        ("llama", {"tie_word_embeddings": True}),
        ("phi", {}),  # biased head
        ("gemma2", {"final_logit_softcapping": 2.0}),
        ("granite", {}),
        ("cohere", {}),
        ("qwen3_next", AUXILIARY),
        ("gpt_oss", AUXILIARY),
        ("qwen2_5_vl", {}),
    ],
)
def test_families_train_like_stock(tmp_path, family, fields):
    def make_model():
        model = make_lm(family, **fields)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        return model

    assert_trains_like_stock(tmp_path, make_lm_rows([9, 14]), make_model, learning_rate=0.01)


@pytest.mark.parametrize(
    "options",
    [
        {"per_device_train_batch_size": 7},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 5},  # the last window has two batches
        {"gradient_accumulation_steps": 2, "collator": packed},
        {"gradient_accumulation_steps": 2, "gradient_checkpointing": True},
        {"gradient_accumulation_steps": 2, "average_tokens_across_devices": False},
    ],
    ids=lambda options: "-".join(options),
)
def test_trains_like_stock(tmp_path, options):
    options = {"per_device_train_batch_size": 2, "learning_rate": 0.01, "max_steps": 4, **options}
    assert_trains_like_stock(tmp_path, make_lm_rows(LENGTHS), make_lm, **options)


def test_model_that_takes_no_item_count_trains_like_stock(tmp_path):
    """Each batch is a mean of its own tokens then, and the trainer divides by the accumulation steps."""

    def make_model():
        model = make_lm()
        model.accepts_loss_kwargs = False
        return model

    assert_trains_like_stock(tmp_path, make_lm_rows(LENGTHS), make_model, gradient_accumulation_steps=2)


def test_bf16_autocast_trains_like_stock(tmp_path):
    rows = make_lm_rows(LENGTHS)
    assert_trains_like_stock(tmp_path, rows, make_lm, tolerance=3e-3, bf16=True, per_device_train_batch_size=4)


class LargestTensor(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                self.numel = max(self.numel, leaf.numel())
        return output


@pytest.mark.parametrize("run", ["train", "evaluate"])
def test_logits_never_exist(tmp_path, run):
    rows, vocab_size = make_lm_rows([40, 40]), 2048
    logits = 2 * 40 * vocab_size
    largest = {}
    for trainer_class in (Trainer, StreamingLossTrainer):
        model = make_lm(vocab_size=vocab_size)
        trainer = make_lm_trainer(trainer_class, tmp_path, rows, model, per_device_train_batch_size=2)
        with LargestTensor() as seen:
            getattr(trainer, run)()
        largest[trainer_class] = seen.numel
    assert largest[Trainer] >= logits
    assert largest[StreamingLossTrainer] == model.lm_head.weight.numel() < logits  # 7 rows of logits are smaller


@pytest.mark.parametrize("accumulation", [1, 2])
def test_nothing_supervised_leaves_the_weights(tmp_path, accumulation):
    rows = make_lm_rows([9] * 4, supervised=[0] * 4)
    trainer = make_lm_trainer(
        StreamingLossTrainer, tmp_path, rows, make_lm(), gradient_accumulation_steps=accumulation
    )
    before = weights_of(trainer)
    trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in weights_of(trainer).items())
    assert logged(trainer, "loss") == logged(trainer, "grad_norm") == [0.0, 0.0]
    assert math.isnan(trainer.evaluate()["eval_loss"])  # as with transformers


@pytest.mark.parametrize("batch_size", [1, 2])
def test_batches_without_labels_leave_the_evaluation_as_it_is(tmp_path, batch_size):
    rows = make_lm_rows([9] * 4, supervised=[5, 0, 0, 0])
    losses = [
        make_lm_trainer(trainer_class, tmp_path, rows, make_lm(), per_device_eval_batch_size=batch_size).evaluate()[
            "eval_loss"
        ]
        for trainer_class in (Trainer, StreamingLossTrainer)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


class ChangesLabels(LlamaForCausalLM):
    def forward(self, input_ids, labels=None, **kwargs):
        return super().forward(input_ids, labels=labels.masked_fill(labels < 40, -100), **kwargs)


class IgnoresAnotherLabel(LlamaForCausalLM):
    def forward(self, input_ids, labels=None, **kwargs):
        return super().forward(input_ids, labels=labels, ignore_index=7, **kwargs)


@pytest.mark.parametrize(
    ("model_class", "message"), [(ChangesLabels, "changes the labels"), (IgnoresAnotherLabel, "ignore the label 7")]
)
def test_a_loss_of_other_labels_is_refused_at_the_first_batch(tmp_path, model_class, message):
    trainer = make_lm_trainer(StreamingLossTrainer, tmp_path, make_lm_rows(LENGTHS), model_class(make_lm().config))
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_arguments_are_checked_when_it_is_made(tmp_path):
    with pytest.raises(ValueError, match="`chunk_size`"):
        StreamingLossTrainer(make_lm(), TrainingArguments(str(tmp_path), use_cpu=True), chunk_size=0)
    with pytest.raises(ValueError, match="`model` is a string"):
        StreamingLossTrainer("gpt2", TrainingArguments(str(tmp_path), use_cpu=True))


def lora(**options):
    torch.manual_seed(0)
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)
    return get_peft_model(make_lm(), config)


@pytest.mark.parametrize("modules_to_save", [None, ["lm_head"]])
def test_adapters_train_like_stock(tmp_path, modules_to_save):
    make_model = lambda: lora(modules_to_save=modules_to_save)  # noqa: E731
    assert_trains_like_stock(tmp_path, make_lm_rows(LENGTHS), make_model, gradient_accumulation_steps=2)
    before = make_model().state_dict()
    trainer = make_lm_trainer(StreamingLossTrainer, tmp_path, make_lm_rows(LENGTHS), make_model())
    trainer.train()
    changed = {name for name, value in trainer.model.state_dict().items() if not torch.equal(value, before[name])}
    expected = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert changed == expected and any("lm_head" in name for name in changed) == bool(modules_to_save)


def test_the_model_is_left_as_it_was(tmp_path):
    model = make_lm()
    trainer = make_lm_trainer(StreamingLossTrainer, tmp_path, make_lm_rows(LENGTHS), model)
    trainer.train()
    with pytest.raises(ValueError, match="labels"):  # one label too few, seen inside the head
        trainer.compute_loss(model, {"input_ids": torch.ones(1, 4).long(), "labels": torch.ones(1, 3).long()})
    assert "forward" not in vars(model.lm_head) and not model.lm_head._forward_hooks
    assert model.loss_function is ForCausalLMLoss
    assert model(torch.ones(1, 4).long()).logits.shape == (1, 4, VOCAB_SIZE)


def test_a_forward_that_accelerate_put_on_the_head_stays(tmp_path):
    model = make_lm()
    add_hook_to_module(model.lm_head, ModelHook())
    forward = model.lm_head.forward
    make_lm_trainer(StreamingLossTrainer, tmp_path, make_lm_rows(LENGTHS), model).train()
    assert model.lm_head.forward is forward


@pytest.mark.parametrize("name", ["compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics"])
def test_functions_of_logits_are_refused_by_name(tmp_path, name):
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(ValueError, match=f"`{name}`.*Trainer"):
        StreamingLossTrainer(make_lm(), args, **{name: print})


@pytest.mark.parametrize(
    "options", [{"label_smoothing_factor": 0.1}, {"use_liger_kernel": True}, {"torch_compile": True}]
)
def test_arguments_that_replace_the_loss_are_refused_by_name(tmp_path, options):
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **options)
    with pytest.raises(ValueError, match=f"`{next(iter(options))}`"):
        StreamingLossTrainer(make_lm(), args)


class AnotherHead(torch.nn.Linear):
    pass


def with_another_head():
    model = make_lm()
    model.lm_head = AnotherHead(32, VOCAB_SIZE)
    return model


def with_another_loss():
    model = make_lm()
    model.loss_function = torch.nn.functional.cross_entropy
    return model


def with_adapted_head():
    return get_peft_model(make_lm(), LoraConfig(task_type="CAUSAL_LM", target_modules=["lm_head"]))


def encoder_decoder():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    return AutoModelForSeq2SeqLM.from_config(T5Config(vocab_size=VOCAB_SIZE, **sizes))


@pytest.mark.parametrize(
    "make_model, message",
    [
        (with_another_head, "AnotherHead"),
        (with_another_loss, "`model.loss_function`"),
        (with_adapted_head, "`modules_to_save`"),
        (encoder_decoder, "encoder-decoder"),
        (lambda: make_lm().model, "output head"),
    ],
)
def test_models_without_a_streamable_head_are_refused(tmp_path, make_model, message):
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(ValueError, match=message):
        StreamingLossTrainer(make_model(), args)


def own_loss(model, logits, **_):
    return torch.nn.functional.cross_entropy(logits[0], torch.zeros(12).long())


def z_loss(model, logits, **inputs):
    loss = model.loss_function(logits=logits, vocab_size=VOCAB_SIZE, **inputs)
    return loss + logits.logsumexp(-1).pow(2).mean()


def masked(model, logits, **inputs):
    logits[..., 5] = -1e4
    return model.loss_function(logits=logits, vocab_size=VOCAB_SIZE, **inputs)


def scaled(model, logits, **inputs):
    return model.loss_function(logits=1.5 * logits, vocab_size=VOCAB_SIZE, **inputs)


def two_heads(model, logits, hidden_states, **inputs):
    return model.loss_function(logits=model.lm_head(hidden_states), vocab_size=VOCAB_SIZE, **inputs)


@pytest.mark.parametrize(
    "loss_of, message",
    [
        (own_loss, "does not take its loss from `loss_function`"),
        (z_loss, "uses its logits for more than cross-entropy"),
        (masked, "changes its logits"),
        (scaled, "changes its logits"),
        (two_heads, "more than once"),
    ],
)
def test_losses_of_another_form_are_refused_at_the_first_batch(tmp_path, loss_of, message):
    model = make_lm()

    def forward(input_ids, labels=None, attention_mask=None, **kwargs):
        hidden = model.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        inputs = {"labels": labels, "hidden_states": hidden, **kwargs}
        return {"loss": loss_of(model, model.lm_head(hidden), **inputs)}

    model.forward = forward
    trainer = make_lm_trainer(StreamingLossTrainer, tmp_path, make_lm_rows([12]), model)
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_batches_without_labels_and_predictions_are_refused(tmp_path):
    rows = [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in make_lm_rows([8, 8])]
    trainer = make_lm_trainer(
        StreamingLossTrainer, tmp_path, rows, make_lm(), collator=lambda rows: {"input_ids": padded(rows)["input_ids"]}
    )
    for run in (trainer.train, trainer.evaluate):
        with pytest.raises(ValueError, match="`labels`"):
            run()
    with pytest.raises(ValueError, match="`predict`"):
        trainer.predict(rows)


def assert_equal_stock_in_one_process(results, output_dir, tolerance, weight_tolerance):
    for tied in (False, True):
        model = make_lm(tie_word_embeddings=tied)
        stock = make_lm_trainer(
            Trainer, output_dir, two_rank_rows(), model, per_device_train_batch_size=2, gradient_accumulation_steps=2
        )
        stock.train()
        losses = [*logged(stock, "loss"), stock.evaluate()["eval_loss"]]
        for mode in ("zero3",) if tied else ("ddp", "zero0", "zero3"):
            result = results[mode, tied]
            assert [*result["loss"], result["metrics"]["eval_loss"]] == pytest.approx(losses, rel=tolerance)
            assert_equal_weights(result["weights"], weights_of(stock), weight_tolerance)
            assert (result["head_numel"] == 0) == (mode == "zero3")  # empty outside its forward


def test_two_ranks_and_zero_equal_one_process(tmp_path):
    """DDP, ZeRO-0 and ZeRO-3 over two ranks, one without labels in the first step, against stock in one process."""
    results = run_two_ranks("streaming_two_ranks", tmp_path)
    assert_equal_stock_in_one_process(results, tmp_path, 1e-6, 2e-6)

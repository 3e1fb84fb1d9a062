"""A tiny target, random supervised rows and a trainer over them."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith import Eagle3DraftModel, Eagle3Trainer, Eagle3TrainingArguments


VOCABULARY = 97


def make_target(seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=8,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config)


def make_rows(lengths, *, supervised=None, seed=0):
    """Rows of the given lengths; the last `supervised[i]` tokens of row i are an answer (default: two thirds)."""
    generator = torch.Generator().manual_seed(seed)
    supervised = supervised or [2 * length // 3 for length in lengths]
    return [
        {
            "input_ids": torch.randint(VOCABULARY, (length,), generator=generator).tolist(),
            "loss_mask": [0] * (length - answer) + [1] * answer,
        }
        for length, answer in zip(lengths, supervised, strict=True)
    ]


def make_trainer(
    output_dir, rows, *, eval_rows=None, target=None, draft=None, trainer_class=Eagle3Trainer, callbacks=(), **options
):
    target = target or make_target()
    torch.manual_seed(1)
    draft = draft or Eagle3DraftModel.from_target(target)
    options = {
        "ttt_steps": 3,
        "learning_rate": 0.1,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "max_grad_norm": 0.0,
        "max_steps": 1,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        **options,
    }
    args = Eagle3TrainingArguments(str(output_dir), **options)
    return trainer_class(draft, target, args, train_dataset=rows, eval_dataset=eval_rows, callbacks=list(callbacks))


def weights_of(trainer):
    return {
        name: value.detach().clone() for name, value in trainer.model.state_dict().items() if value.is_floating_point()
    }


def assert_equal_weights(ours, truth, tolerance=2e-5):
    assert ours.keys() == truth.keys()
    for name in truth:
        torch.testing.assert_close(ours[name], truth[name], rtol=tolerance, atol=tolerance * 0.1, msg=name)


def logged(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


BEST = {  # a run that ends with the best of its three checkpoints
    "max_steps": 3,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "load_best_model_at_end": True,
}

RESUMABLE = {  # a run to resume from its second step
    "max_steps": 3,
    "save_strategy": "steps",
    "save_steps": 2,
    "optim": "adamw_torch",
    "learning_rate": 0.01,
    "adam_epsilon": 1e-3,  # so that rounding does not decide signs, and clipping counts
    "max_grad_norm": 0.3,
}
UNEVEN = {"lengths": [30, 41, 12, 25, 50, 9], "supervised": [20, 33, 5, 7, 0, 6]}  # rows of it


SAVING = {  # a run with a checkpoint after every step
    "per_device_train_batch_size": 2,
    "optim": "adamw_torch",
    "learning_rate": 0.01,
    "lr_scheduler_type": "linear",
    "save_strategy": "steps",
    "save_steps": 1,
}

"""Run under torchrun by tests: train an adapter and the output head on two ranks, save, resume and evaluate."""

import sys
from functools import partial
from pathlib import Path

from peft import LoraConfig

from draftsmith import Eagle3DraftModel, Eagle3Trainer
from draftsmith.commands import leave_together

from .common import RESUMABLE, UNEVEN, make_rows, make_target, make_trainer
from .ranks import launch_options, result_of, save_results
from .two_ranks import decoded


PEFT_MODES = ("ddp", "zero2", "zero3")
LINEAR = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "fc"]
CONFIG = LoraConfig(r=4, target_modules=LINEAR, modules_to_save=["lm_head", "norm"])


def make_adapter_trainer(output_dir, base: str, *, ranks: int = 1, **options):
    target = make_target()
    trainer = make_trainer(
        output_dir,
        make_rows(**UNEVEN),
        eval_rows=make_rows([6, 31, 14]),
        target=target,
        draft=Eagle3DraftModel.from_pretrained(base, target=target),
        trainer_class=partial(Eagle3Trainer, peft_config=CONFIG),
        per_device_train_batch_size=2 // ranks,
        **RESUMABLE,
        gradient_checkpointing=True,
        **options,
    )
    trainer._decoded = decoded(trainer.args)
    return trainer


def main(output_dir: Path, base: str) -> None:
    results = {}
    for mode in PEFT_MODES:
        with launch_options(mode) as options:
            whole = make_adapter_trainer(output_dir / mode, base, ranks=2, **options)
            whole.train()
            whole.save_model()
            results[mode, "whole"] = result_of(whole) | {
                "in_memory": whole.model.lm_head.modules_to_save["default"].weight.numel()
            }
            resumed = make_adapter_trainer(output_dir / mode, base, ranks=2, **options)
            resumed.train(resume_from_checkpoint=str(output_dir / mode / "checkpoint-2"))
            results[mode, "resumed"] = result_of(resumed)
    save_results(results, output_dir)


if __name__ == "__main__":
    main(Path(sys.argv[1]), str(Path(sys.argv[1]) / "base"))
    leave_together()

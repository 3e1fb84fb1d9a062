"""Run under torchrun by `test_streaming_loss_trainer.py`: train on two ranks as DDP, with ZeRO-0 and ZeRO-3."""

import sys
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from deepspeed.ops import __compatible_ops__
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from draftsmith import StreamingLossTrainer

from .common import logged
from .test_streaming_loss_trainer import make_lm, make_lm_trainer, two_rank_rows


def zero(stage: int) -> dict:
    return {
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,  # a weight is whole only inside its module's forward
            "stage3_max_reuse_distance": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_force_ds_cpu_optimizer": False,
    }


RUNS = [("ddp", None, False), ("zero0", zero(0), False), ("zero3", zero(3), False), ("zero3", zero(3), True)]


def main(output_dir: str) -> None:
    __compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, for more than a minute
    results = {}
    for name, deepspeed, tied in RUNS:
        trainer = make_lm_trainer(
            StreamingLossTrainer,
            output_dir,
            two_rank_rows(),
            make_lm("llama", tie_word_embeddings=tied),
            per_device_train_batch_size=1,
            per_device_eval_batch_size=1,
            gradient_accumulation_steps=2,
            deepspeed=deepspeed,
        )
        trainer.train()
        head_numel = trainer.model.lm_head.weight.numel()
        weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        results[name, tied] = {
            "loss": logged(trainer, "loss"),
            "eval_loss": trainer.evaluate()["eval_loss"],
            "weights": weights,
            "head_numel": head_numel,
        }
        AcceleratorState._reset_state()
        unset_hf_deepspeed_config()
    if trainer.is_world_process_zero():
        torch.save(results, Path(output_dir) / "result.pt")


if __name__ == "__main__":
    main(sys.argv[1])

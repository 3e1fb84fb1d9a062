"""Run under torchrun by `test_two_ranks.py`: train one step on two rows, evaluate three, and write what came out."""

import sys
from pathlib import Path

import torch

from tests.trainer.common import logged, make_rows, make_trainer, weights_of


def main(output_dir: str, batch_size: int) -> None:
    rows = make_rows([70, 70], supervised=[2, 61])
    trainer = make_trainer(
        output_dir,
        rows,
        eval_rows=make_rows([6, 31, 14]),
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=1,
    )
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        result = {"weights": weights_of(trainer), "loss": logged(trainer, "loss"), "eval_loss": metrics["eval_loss"]}
        result["length"] = metrics["eval_acceptance_length"]
        torch.save(result, Path(output_dir) / "result.pt")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

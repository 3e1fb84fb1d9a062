"""Run under torchrun by tests: train on two ranks as DDP, with ZeRO-0 and ZeRO-3."""

import sys

from draftsmith import StreamingLossTrainer
from draftsmith.commands import leave_together

from .ranks import launch_options, result_of, save_results
from .test_streaming_loss_trainer import make_lm, make_lm_trainer, two_rank_rows


RUNS = [("ddp", False), ("zero0", False), ("zero3", False), ("zero3", True)]  # mode, tied embeddings


def main(output_dir: str) -> None:
    results = {}
    for mode, tied in RUNS:
        with launch_options(mode) as options:
            trainer = make_lm_trainer(
                StreamingLossTrainer,
                output_dir,
                two_rank_rows(),
                make_lm("llama", tie_word_embeddings=tied),
                per_device_train_batch_size=1,
                per_device_eval_batch_size=1,
                gradient_accumulation_steps=2,
                **options,
            )
            trainer.train()
            results[mode, tied] = result_of(trainer)
    save_results(results, output_dir)


if __name__ == "__main__":
    main(sys.argv[1])
    leave_together()

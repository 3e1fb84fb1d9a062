"""Run under torchrun by tests: train two steps on two rows as DDP, with ZeRO-0 and ZeRO-3, and evaluate three."""

import sys

from .common import make_rows, make_trainer
from .ranks import MODES, launch_options, result_of, save_results


# Supervised tokens of the two rows; in the second case one rank has none.
CASES = {"uneven": [2, 61], "one rank without rows": [0, 61]}


def make_case_trainer(output_dir, case: str, **options):
    return make_trainer(
        output_dir,
        make_rows([70, 70], supervised=CASES[case]),
        eval_rows=make_rows([6, 31, 14]),
        per_device_eval_batch_size=1,
        max_steps=2,
        **options,
    )


def main(output_dir: str) -> None:
    results = {}
    for mode in MODES:
        for case in CASES:
            with launch_options(mode) as options:
                trainer = make_case_trainer(output_dir, case, per_device_train_batch_size=1, **options)
                trainer.train()
                results[mode, case] = result_of(trainer)
    save_results(results, output_dir)


if __name__ == "__main__":
    main(sys.argv[1])

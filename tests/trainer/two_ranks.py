"""Run under torchrun by tests: train on two ranks as DDP and with ZeRO 0 to 3, evaluate, save and resume."""

import copy
import sys
from functools import partial
from pathlib import Path

import torch

from draftsmith import Eagle3DraftModel
from draftsmith.commands import leave_together
from draftsmith.models.eagle3 import modeling_eagle3
from draftsmith.trainer.decoding import DecodedAcceptance

from .common import RESUMABLE, UNEVEN, make_rows, make_target, make_trainer
from .ranks import MODES, launch_options, result_of, save_results


CASES = {  # supervised tokens of the rows of one optimizer step
    "one rank without rows": [0, 320],
    "accumulation of 2": [64, 320, 320, 64],
    "accumulation of 4": [64, 0, 0, 320, 2, 1, 0, 30],
}
RECOMPUTED = "accumulation of 2"
RESUMED_MODES = ("zero1", "zero2", "zero3")


def make_case_trainer(output_dir, case: str, *, ranks: int = 1, **options):
    supervised = CASES[case]
    trainer = make_trainer(
        output_dir,
        make_rows([max(70, answer + 9) for answer in supervised], supervised=supervised),
        eval_rows=make_rows([6, 31, 14]),
        per_device_train_batch_size=2 // ranks,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=len(supervised) // 2,
        max_steps=2,
        **options,
    )
    trainer._decoded = decoded(trainer.args)
    return trainer


def decoded(args) -> DecodedAcceptance:
    """Three prompts of unequal lengths, which two ranks cannot share evenly."""
    prompts = [row["input_ids"] for row in make_rows([5, 9, 7], seed=1)]
    ranks = {"rank": args.process_index, "world_size": args.world_size}
    return DecodedAcceptance(prompts, num_draft_tokens=3, max_new_tokens=8, batch_size=2, **ranks)


def make_resumed_trainer(output_dir, *, ranks: int = 1, **options):
    target = make_target()
    ids = torch.arange(1, 80, 2)  # a draft vocabulary with a map
    torch.manual_seed(1)
    return make_trainer(
        output_dir,
        make_rows(**UNEVEN),
        draft=Eagle3DraftModel.from_target(target, d2t=ids - torch.arange(len(ids))),
        per_device_train_batch_size=2 // ranks,
        **RESUMABLE,
        **options,
    )


def resumed_result(output_dir, **options) -> dict:
    """Train three steps and save; train the third again from the checkpoint before it."""
    whole = make_resumed_trainer(output_dir, ranks=2, **options)
    whole.train()
    whole.save_model()
    resumed = make_resumed_trainer(output_dir, ranks=2, **options)
    resumed.train(resume_from_checkpoint=str(output_dir / "checkpoint-2"))
    results = {}
    for name, trainer in (("whole", whole), ("resumed", resumed)):
        weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        log = {name: value for name, value in trainer.state.log_history[-2].items() if name != "hours"}
        results[name] = {"weights": weights, "log": log}
    return results


def bare(mode: str) -> dict:
    """A config that leaves clipping out and asks for shards only."""
    config = copy.deepcopy(MODES[mode])
    del config["gradient_clipping"]
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = False
    return config


def main(output_dir: Path) -> None:
    modeling_eagle3.streaming_draft_loss = partial(modeling_eagle3.streaming_draft_loss, chunk_size=256)
    results = {}
    for mode in MODES:
        for case in CASES:
            with launch_options(mode) as options:
                trainer = make_case_trainer(
                    output_dir, case, ranks=2, gradient_checkpointing=case == RECOMPUTED, **options
                )
                trainer.train()
                results[mode, case] = result_of(trainer)
    for mode in RESUMED_MODES:
        with launch_options(mode) as options:
            results[mode, "resumed"] = resumed_result(output_dir / mode, **options | {"deepspeed": bare(mode)})
    save_results(results, output_dir)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave_together()

"""`draftsmith train`, also with what is no option of it, and the counts of the run as JSON: a run of `heads`.

The variants exist to measure what the library decides by itself.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from draftsmith.commands import train
from draftsmith.data import collator
from draftsmith.data.files import write_json
from draftsmith.models.eagle3 import checkpoint_eagle3


AS_IT_IS = "as_it_is"
LOGGED = 40  # points of a training's own curve, at most


def random_rows() -> list[TrainerCallback]:
    """`lm_head` starts at random, not from the target's rows."""
    checkpoint_eagle3.copy_head_rows = lambda model, target: None
    return []


def all_labels() -> list[TrainerCallback]:
    """Every label position is supervised, whatever path leads there."""
    collator.row_sets = label_row_sets
    return []


def label_row_sets(
    loss_mask: torch.Tensor, document_ids: torch.Tensor, turn_ids: torch.Tensor, *, ttt_steps: int
) -> list[torch.Tensor]:
    """K ascending row sets, as of `alignment.row_sets`: t is in R_k iff x_{t+2+j} is a label for a j from k to K - 1.

    A label of step k needs row t in all steps before it, where the up to K - 1 tokens that precede a turn are learned
    then, too; for the teacher gives them and the row is computed anyway.
    """
    supervised = loss_mask.bool() & (document_ids >= 0)
    length = supervised.shape[1]
    later = torch.zeros(ttt_steps + 1, *supervised.shape, dtype=torch.bool, device=supervised.device)
    for step in range(ttt_steps - 1, -1, -1):
        ahead = step + 2
        later[step] = later[step + 1]
        if ahead < length:
            same = document_ids[:, :-ahead] == document_ids[:, ahead:]
            later[step, :, :-ahead] |= supervised[:, ahead:] & same
    return [torch.nonzero(later[step].flatten()).squeeze(1) for step in range(ttt_steps)]


class RoundedWeights(TrainerCallback):
    """Weights, gradients and moments in bf16, as without fp32 masters."""

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.to(torch.bfloat16)


VARIANTS: dict[str, Callable[[], list[TrainerCallback]]] = {
    AS_IT_IS: list,
    "random_rows": random_rows,
    "all_labels": all_labels,
    "bf16_weights": lambda: [RoundedWeights()],
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", choices=VARIANTS, default=AS_IT_IS)
    parser.add_argument("--config", required=True, help="of `draftsmith train`")
    parser.add_argument("--output", type=Path, required=True, help="JSON of the counts")
    args = parser.parse_args(arguments)
    trainer = train.main(["--config", args.config], VARIANTS[args.variant]())
    tokens, supervised = count(trainer.train_dataset)
    content = {
        **progress(trainer.state.log_history),
        "logged": logged(trainer.state.log_history),
        "steps": trainer.state.global_step,
        "supervised_share": supervised / tokens,
        "trained_parameters": sum(weight.numel() for weight in trainer.model.parameters() if weight.requires_grad),
    }
    write_json(content, args.output)


def progress(log_history: list[dict[str, Any]]) -> dict[str, float]:
    """Tokens seen, and seconds of training, by the last log of a trainer."""
    last = next(entry for entry in reversed(log_history) if "num_tokens" in entry)
    return {"tokens": int(last["num_tokens"]), "seconds": 3600 * last["hours"]}


def logged(log_history: list[dict[str, Any]]) -> list[dict[str, float]]:
    """The acceptance length on the batches trained on, over the tokens seen, evenly thinned; the last log is kept."""
    entries = [entry for entry in log_history if "acceptance_length" in entry and "num_tokens" in entry]
    kept = entries[:: -max(1, -(-len(entries) // LOGGED))][::-1]
    return [{"tokens": int(entry["num_tokens"]), "acceptance_length": entry["acceptance_length"]} for entry in kept]


def count(rows: Any) -> tuple[int, int]:
    """Tokens of prepared rows, and how many of them are supervised."""
    tokens = supervised = 0
    for table in rows.select_columns(["loss_mask"]).with_format("arrow").iter(batch_size=1000):
        mask = table["loss_mask"].combine_chunks().flatten().to_numpy()
        tokens, supervised = tokens + len(mask), supervised + int((mask != 0).sum())
    return tokens, supervised


if __name__ == "__main__":
    main()

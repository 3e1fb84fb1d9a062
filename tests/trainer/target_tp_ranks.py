"""Run under torchrun by tests: targets in shards of two ranks beside whole ones, and heads trained on their states."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers.distributed.mixin import DistributedMixin

from draftsmith import Eagle3DraftModel, Eagle3TrainingArguments
from draftsmith.commands import leave_together
from draftsmith.target import FrozenTarget, load_target
from tests.tiny_models import random_tokens

from .common import SAVING, make_rows, make_trainer
from .ranks import MODES, launch_options, result_of, save_results


AUX = (1, 2, 3)


def local_size(module) -> int:
    tensors = (p.to_local() if hasattr(p, "to_local") else p for p in module.parameters())
    return sum(tensor.numel() for tensor in tensors)


def first_weights(target: FrozenTarget) -> list[torch.Tensor]:
    """Of a head that starts from a layer of the target."""
    torch.manual_seed(0)
    return list(Eagle3DraftModel.from_target(target.model, aux_layer_ids=AUX, init_from_layer=-1).parameters())


def compare_states(directory: Path, family: str) -> dict:
    """Batches of another shape on every rank, packed and padded; then one rank has none; then no rank has any."""
    hooks = dict(vars(DistributedMixin))
    path = str(directory / family)
    whole, sharded = (FrozenTarget(load_target(path, tp_size=size), AUX) for size in (1, 2))
    assert dict(vars(DistributedMixin)) == hooks  # as before loading
    rank, errors = dist.get_rank(), []
    for batch in range(2):
        if batch == 0 and rank % 2 == 0:
            sharded.take_part()  # before it has made any states itself
        elif batch == 0:
            sharded(random_tokens(1, 5))
        if batch == 1 and rank % 2 == 0:
            sharded.take_part()
            continue
        input_ids = random_tokens(1 + rank % 2, 9 + 7 * rank, seed=rank)
        document_ids = torch.zeros_like(input_ids, dtype=torch.int32 if rank == 1 else torch.int64)
        document_ids[:, 4:], document_ids[:, -2:] = 1, -1
        ours, truth = (target(input_ids, document_ids=document_ids) for target in (sharded, whole))
        for name in ("aux_hidden_states", "last_hidden_state"):
            kept, expected = getattr(ours, name)[:, :-2], getattr(truth, name)[:, :-2]
            errors.append(float((kept - expected).norm() / expected.norm()))
    sharded.take_part()
    return {
        "errors": errors,
        "same_start": family != "llama" or all(map(torch.equal, first_weights(sharded), first_weights(whole))),
        "share": local_size(sharded.layers) / local_size(whole.layers),
        "ends_are_whole": torch.equal(sharded.head_weight, whole.head_weight)
        and torch.equal(sharded.embedding_weight, whole.embedding_weight),
    }


def make_tp_trainer(output_dir, target, **options):
    """Rows whose number no count of ranks divides, some without supervision, and fewer to evaluate than four ranks."""
    ids = torch.arange(1, 80, 2)  # a draft vocabulary with a map
    torch.manual_seed(1)
    return make_trainer(
        output_dir,
        make_rows([30, 41, 12, 25, 50, 9, 33], supervised=[20, 33, 0, 7, 40, 6, 0]),
        eval_rows=make_rows([16, 31, 14]),
        target=target,
        draft=Eagle3DraftModel.from_target(target, d2t=ids - torch.arange(len(ids))),
        per_device_eval_batch_size=1,
        **{"max_steps": 3, **options, "per_device_train_batch_size": 1},
    )


def train(path, output_dir, *, tp_size, **options) -> dict:
    trainer = make_tp_trainer(output_dir, load_target(path, tp_size=tp_size), target_tp=tp_size, **options)
    trainer.train()
    return result_of(trainer)


def resume(path, output_dir, **options) -> dict:
    """The last step once more, from the checkpoint before it."""
    resumed = make_tp_trainer(output_dir, load_target(path, tp_size=2), target_tp=2, **options)
    resumed.train(resume_from_checkpoint=str(output_dir / "checkpoint-2"))
    return result_of(resumed)


def main(output_dir: Path) -> None:
    Eagle3TrainingArguments(str(output_dir), use_cpu=True, ddp_timeout=90)  # connects the ranks
    results: dict = {}
    for family in ("llama", "qwen3", "gpt_oss"):
        results[family] = [None] * dist.get_world_size()
        dist.all_gather_object(results[family], compare_states(output_dir, family))
    path = str(output_dir / "target")
    modes = MODES if dist.get_world_size() == 2 else ("ddp", "zero2")
    for mode, tp_size in [("ddp", 1), *((mode, 2) for mode in modes)]:
        with launch_options(mode) as options:
            options |= {"gradient_accumulation_steps": 2, "max_steps": 3}
            results[mode, tp_size] = train(path, output_dir, tp_size=tp_size, **options)
    with launch_options("ddp") as options:
        # Later epochs find some states kept: on each rank others.
        results["kept"] = train(path, output_dir, tp_size=2, keep_target_states=True, max_steps=8, **options)
        results["not kept"] = train(path, output_dir, tp_size=1, max_steps=8, **options)
        if dist.get_world_size() == 2:
            results["whole run"] = train(path, output_dir / "saved", tp_size=2, **SAVING | options)
            results["resumed run"] = resume(path, output_dir / "saved", **SAVING | options)
    save_results(results, output_dir)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave_together()

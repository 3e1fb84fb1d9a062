"""What a trainer knows of its run, for `run.json`."""

from dataclasses import replace
from typing import Any

from ..data import count_documents
from ..hub import is_same_repository
from ..model_card import License, RunRecord, Source, device_counts, library_versions, training_recipe
from ..model_card.run_record import HUB, MEMORY
from ..revisions import cached_commit, commit_of
from ..target_family import base_model
from .arguments import Eagle3TrainingArguments, repository_of
from .callbacks import BestHead


def record_of(model: Any, target: Any, train_dataset: Any, eval_dataset: Any, seed: int) -> RunRecord:
    """What a trainer is given; who knows where its data comes from says so in `record`."""
    head, config, adapter = base_model(model), target.model.config, target.adapter
    sets = [train_dataset], eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
    trained, evaluated = (
        [Source.of(None, rows=count_documents(data)) for data in part if data is not None] for part in sets
    )
    return RunRecord(
        target=Source.of(config.name_or_path, revision=commit_of(config)),
        target_precision=target.precision,
        target_adapter=None if adapter is None else Source.of(adapter, revision=cached_commit(adapter)),
        draft=Source.of(head.name_or_path, revision=commit_of(head.config)) if head.name_or_path else None,
        datasets=trained,
        eval_datasets=evaluated,
        seed=seed,
        target_vocab_size=head.config.vocab_size,
        draft_vocab_size=head.config.draft_vocab_size,
        trained_parameters=sum(weight.numel() for weight in model.parameters() if weight.requires_grad),
    )


def unnamed_models(record: RunRecord, args: Eagle3TrainingArguments, *, adapts: bool) -> str | None:
    """Why a card could not name the models that belong to a head, or an adapter if it `adapts`; None if it could."""
    target, base = record.target, record.draft
    if target is None or target.kind == MEMORY:
        return (
            "the target has no name for the card: load it with `from_pretrained`, or say "
            "`trainer.record.target = draftsmith.model_card.Source(<Hub id>)`."
        )
    if adapts and (base is None or base.kind != HUB):
        return (
            "the head that is adapted is not on the Hub, so its adapter could not be loaded from there: push the head "
            "first, and adapt it by its id."
        )
    if adapts and base and is_same_repository(repository_of(args), base.name):
        return f"`hub_model_id` {base.name} holds the head that is adapted: name another for its adapter."
    return None


def finished_record(
    record: RunRecord, args: Eagle3TrainingArguments, log_history: list[dict[str, Any]], step: int, best: BestHead
) -> RunRecord:
    """`record` with what the run has found out by `step`; of the head that is there, which may be an earlier one."""
    if best.step is not None:
        recipe, log_history = {"steps": best.step, "steps_run": step}, best.logs(log_history)
    else:
        recipe = {"steps": step}
    last: list[dict[str, Any]] = [
        next((entry for entry in reversed(log_history) if name in entry), {}) for name in ("loss", "eval_loss")
    ]
    trained, evaluated = last
    tokens, hours = trained.get("num_tokens"), trained.get("hours")
    return replace(
        record,
        recipe=training_recipe(args, **record.recipe, **recipe),
        devices=device_counts(args),
        hours=hours,
        tokens_seen=None if tokens is None else int(tokens),
        tokens_per_second=tokens / (3600 * hours) if tokens and hours else None,
        train_metrics={name: float(value) for name, value in trained.items()},
        eval_metrics={name: float(value) for name, value in evaluated.items()},
        versions=library_versions(),
        repo_id=args.hub_model_id,
        license=None if args.hub_license is None else License(args.hub_license),
    )

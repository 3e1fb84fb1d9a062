"""What the weights of a checkpoint were trained with, kept in it: no run goes on with something else unsaid."""

import json
import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..data.files import written_whole
from ..data.wording import changes
from ..hub import SETTINGS
from ..model_card import RunRecord, Source, training_recipe
from .arguments import Eagle3TrainingArguments
from .checkpoints import has_all_epochs, step_of


logger = logging.getLogger(__name__)

RESUMED = "resumed"  # in a recipe: what earlier steps were trained with
SCHEDULE = ("max_steps", "num_train_epochs")
BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", "world_size")
PLACEMENT = {"deepspeed_zero_stage", "target_tp", "gradient_checkpointing"}  # of how it is computed
CHOSEN = {*SCHEDULE, "data_digest", "world_size"}  # who names a checkpoint may mean to change them
HEAD = (
    "hidden_size", "intermediate_size", "sliding_window", "eagle_aux_hidden_state_layer_ids", "norm_output", "fc_norm",
    "norm_before_fc",
)  # fmt: skip


class OtherSettingsError(ValueError):
    """A checkpoint was trained with other settings."""


def settings_of(
    record: RunRecord, args: Eagle3TrainingArguments, head: Any = None, data_digest: str | None = None
) -> dict[str, Any]:
    """What decides the weights, by name, as JSON has it; names are left out whose values are not known (yet).

    Args:
        record: of the run, as far as it is known.
        head: the config of the head, if it is made already.
    """
    settings: dict[str, Any] = {"seed": args.seed, **dict.fromkeys(SCHEDULE), **training_recipe(args, **record.recipe)}
    settings.pop(RESUMED, None)
    if record.target is not None:
        settings |= _named("target", record.target) | _named("target_adapter", record.target_adapter)
        settings |= {"target_gguf_file": record.target_gguf_file} | _named("draft", record.draft)
    if record.datasets:
        settings |= {"dataset": [source.name for source in record.datasets], "split": record.datasets[0].split}
    if head is not None:
        settings |= {name: getattr(head, name) for name in ("draft_vocab_size", *HEAD)}
    if data_digest is not None:
        settings["data_digest"] = data_digest
    return json.loads(json.dumps(settings))


def _named(name: str, source: Source | None) -> dict[str, str | None]:
    revision = None if source is None else source.revision
    return {name: None if source is None else source.name} | ({f"{name}_revision": revision} if revision else {})


def save_settings(directory: Path, settings: dict[str, Any], resumed: list[str]) -> None:
    with written_whole(directory / SETTINGS) as unfinished:
        unfinished.write_text(json.dumps({"settings": settings, RESUMED: resumed}, indent=2) + "\n", encoding="utf-8")


def resumed_record(record: RunRecord, resumed: list[str]) -> RunRecord:
    """`record` of a run that went on from earlier steps, trained as `resumed` says."""
    recipe = {name: value for name, value in record.recipe.items() if name != RESUMED}
    return replace(record, recipe=recipe | ({RESUMED: resumed} if resumed else {}))


def refuse_other_settings(
    checkpoint: Path, now: dict[str, Any], *, is_named: bool, warns: bool = True
) -> tuple[list[str], list[str]]:
    """Compare `now` with what the checkpoint was trained with.

    What changes no update may differ, so the number of ranks where a step has as many rows as before, or no epoch is
    left. Of a checkpoint that `is_named` by its path any number may, and the schedule and contents of the data, too.

    Returns:
        What earlier steps were trained with, for the recipe; and the names that are other now.

    Raises:
        OtherSettingsError: something else differs.
    """
    warn = logger.warning if warns else logger.debug
    if not (checkpoint / SETTINGS).is_file():
        warn("%s does not say what it was trained with: settings are not compared with those of now.", checkpoint)
        return [], []
    kept = json.loads((checkpoint / SETTINGS).read_text(encoding="utf-8"))
    before = kept["settings"]
    changed = [name for name in before if name in now and before[name] != now[name]]
    free = PLACEMENT | set(BATCH if _batch(before) == _batch(now) else ())
    if now["num_train_epochs"] is not None and has_all_epochs(checkpoint, now["num_train_epochs"]):
        free.add("world_size")
    refused = [name for name in changed if name not in free]
    if refused and not (is_named and CHOSEN.issuperset(refused)):
        may_be_named = CHOSEN.issuperset(refused)
        named = f"; to change it on purpose, pass --resume_from_checkpoint {checkpoint}" if may_be_named else ""
        if "world_size" in refused:
            named += "; `gradient_accumulation_steps` keeps a step's rows on another number of ranks"
        raise OtherSettingsError(
            f"`output_dir`: {checkpoint} was trained with other settings: {_changes(refused, before, now)}. Go on "
            f"with the former, or name another `output_dir`{named}."
        )
    if not changed:
        return kept[RESUMED], []
    warn("%s was trained with other settings, and goes on: %s", checkpoint, _changes(changed, before, now))
    values = ", ".join(f"{name} {before[name]}" for name in changed)
    step = step_of(checkpoint)
    return [*kept[RESUMED], f"until {'then' if step is None else f'step {step}'} with {values}"], changed


def _batch(settings: dict[str, Any]) -> int:
    """Rows of an optimizer step."""
    rows, steps, ranks = (settings[name] for name in BATCH)
    return rows * steps * ranks


def _changes(names: Iterable[str], before: dict[str, Any], now: dict[str, Any]) -> str:
    return changes((name, before[name], now[name]) for name in names)

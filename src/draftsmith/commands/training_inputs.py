"""What `draftsmith train` trains on: rows and a target that runs beside, or a cache of its states."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..cached_target import CachedTarget
from ..data import DataArguments, PreparedData, prepare_datasets
from ..data.hidden_states import DamagedShard, HiddenStateCache, Manifest
from ..model_card import RunRecord, Source
from ..model_card.run_record import HUB
from ..trainer import Eagle3TrainingArguments
from ..trainer.target_states import OF_THE_FORWARD
from .arguments import DraftArguments, OptionalTargetArguments
from .cached_sources import refuse_other_sources
from .run_record import CHOSEN, DECIDED, with_rows


_DECIDED = (*DECIDED, "chat_template_kwargs")  # data arguments that a run needs, decided when its cache was written


@dataclass
class TrainingInputs:
    """Target and rows, as trainer and head take them.

    Attributes:
        target: for the trainer.
        draft_source: what a new head is made from: the target, or its config, embedding and head.
        data: the rows without states, and their statistics.
        train, evaluation: for the trainer.
        manifest: of the cache, if they are of one.
    """

    tokenizer: PreTrainedTokenizerBase
    target: PreTrainedModel | CachedTarget
    draft_source: Any
    data: PreparedData
    train: Any
    evaluation: Any
    manifest: Manifest | None = None

    def decide(self, draft_args: DraftArguments, data_args: Any) -> tuple[DraftArguments, Any]:
        """The arguments, with what a cache decides."""
        if self.manifest is None:
            return draft_args, data_args
        if draft_args.draft is None:
            draft_args = replace(draft_args, aux_layer_ids=self.manifest.aux_layer_ids)
        decided = self.manifest.data["arguments"]
        return draft_args, replace(data_args, **{name: decided[name] for name in _DECIDED if name in decided})

    def of_cache(self, record: RunRecord) -> RunRecord:
        """The record, with what the cache knows of the target and the data."""
        if self.manifest is None:
            return record
        target, data = self.manifest.target, self.manifest.data
        chosen = {name: value for name in CHOSEN if (value := data["arguments"].get(name))}
        return replace(
            record,
            target=Source(target["name"], target["kind"], target["revision"]),
            target_precision=target["precision"],
            target_adapter=None if target["adapter"] is None else Source(**target["adapter"]),
            datasets=with_rows([Source(**source) for source in data["sources"]], self.data.train),
            eval_datasets=with_rows([Source(**source) for source in data["eval_sources"]], self.data.evaluation),
            recipe={**record.recipe, **chosen, "hidden_states": self.manifest.storage},
        )


def computed_inputs(
    target_args: OptionalTargetArguments, data_args: DataArguments, args: Eagle3TrainingArguments
) -> TrainingInputs:
    """Prepare the data, then load the target."""
    target_args.require()
    target_args.check_placement(args.target_tp)
    tokenizer = target_args.load_tokenizer()
    with args.main_process_first(desc="data preparation"):
        data = prepare_datasets(data_args, tokenizer)
    target = target_args.load(tp_size=args.target_tp)
    return TrainingInputs(tokenizer, target, target, data, data.train, data.evaluation)


def cached_inputs(
    directory: str,
    target_args: OptionalTargetArguments,
    draft_args: DraftArguments,
    args: Eagle3TrainingArguments,
) -> TrainingInputs:
    """Open a cache and check that it is of what else was given. The target is loaded only where its layers are used.

    Raises:
        ValueError: the cache is unfinished, damaged or of something else; or an option is of no use with it, or needs
            a target that is not given.
    """
    for name, default in {"target_tp": 1, **dict.fromkeys(OF_THE_FORWARD, False)}.items():
        if getattr(args, name) != default:
            raise ValueError(f"`{name}` is of no use with `hidden_states`, where the target is not run: leave it out.")
    needing = {"eval_prompts": args.eval_prompts, "init_from_layer": draft_args.init_from_layer}
    given = [f"`{name}`" for name, value in needing.items() if value is not None]
    if given and target_args.target is None:
        raise ValueError(f"{', '.join(given)}: the target's layers are not in `hidden_states`: name `target`, too.")
    cache = HiddenStateCache(directory)
    refuse_other_sources(cache.manifest, target_args, draft_args)
    cache.refuse_damage_beside_states()
    tokenizer = AutoTokenizer.from_pretrained(cache.target_dir, trust_remote_code=target_args.trust_remote_code)
    known = cache.manifest.target
    ends = CachedTarget(
        cache.target_dir,
        device=args.device,
        precision=known["precision"],
        name=known["name"] if known["kind"] == HUB else "",
        revision=known["revision"],
        trust_remote_code=target_args.trust_remote_code,
    )
    model = target_args.load() if given else None
    return TrainingInputs(
        tokenizer,
        ends if model is None or args.eval_prompts is None else model,
        ends.model if model is None else model,
        cache.prepared_data(),
        cache.rows("train"),
        cache.rows("evaluation"),
        cache.manifest,
    )


@contextmanager
def explained_damage() -> Iterator[None]:
    """Exit with status 1 and a message where a shard turns out to be damaged, in whatever process it is read."""
    try:
        yield
    except DamagedShard as error:
        sys.exit(f"error: {error}")

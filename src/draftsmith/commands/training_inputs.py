"""What `draftsmith train` trains on: rows and a target that runs beside, or a cache of its states."""

from dataclasses import dataclass, replace
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..cached_target import CachedTarget
from ..data import DataArguments, PreparedData, prepare_datasets
from ..data.hidden_states import HiddenStateCache, Manifest
from ..model_card import RunRecord, Source
from ..model_card.run_record import HUB
from ..models.eagle3 import Eagle3DraftModel
from ..trainer import Eagle3TrainingArguments
from .arguments import DraftArguments, OptionalTargetArguments
from .cached_sources import refuse_other_sources


_DECIDED = ("max_length", "packing", "row_length", "eval_fraction", "chat_template_kwargs")  # when a cache is written


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
        return draft_args, replace(data_args, **{name: self.manifest.data["arguments"][name] for name in _DECIDED})

    def check_head(self, draft: Eagle3DraftModel) -> None:
        """Refuse a head that fuses other states than the cache has."""
        ids = draft.config.eagle_aux_hidden_state_layer_ids
        if self.manifest is not None and ids != self.manifest.aux_layer_ids:
            raise ValueError(
                f"`draft` fuses the states of layers {ids}, but the cache in `hidden_states` has those of "
                f"{self.manifest.aux_layer_ids}: write one with `--aux_layer_ids {' '.join(map(str, ids))}`."
            )

    def of_cache(self, record: RunRecord) -> RunRecord:
        """The record, with what the cache knows of the target and the data."""
        if self.manifest is None:
            return record
        target, data = self.manifest.target, self.manifest.data
        return replace(
            record,
            target=Source(target["name"], target["kind"], target["revision"]),
            target_precision=target["precision"],
            target_adapter=None if target["adapter"] is None else Source(**target["adapter"]),
            datasets=[Source(**source) for source in data["sources"]],
            eval_datasets=[Source(**source) for source in data["eval_sources"]],
            recipe={**record.recipe, "hidden_states": self.manifest.storage},
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
    data_args: DataArguments,
    args: Eagle3TrainingArguments,
) -> TrainingInputs:
    """Open a cache and check that it is of what else was given. The target is loaded only where its layers are used.

    Raises:
        ValueError: the cache is unfinished, damaged or of something else; or an option is of no use with it, or needs
            a target that is not given.
    """
    for name, default in (("target_tp", 1), ("compile_target", False), ("keep_target_states", False)):
        if getattr(args, name) != default:
            raise ValueError(f"`{name}` is of no use with `hidden_states`, where the target is not run: leave it out.")
    needing = {"eval_prompts": args.eval_prompts, "init_from_layer": draft_args.init_from_layer}
    given = [f"`{name}`" for name, value in needing.items() if value is not None]
    if given and target_args.target is None:
        raise ValueError(f"{', '.join(given)}: the target's layers are not in `hidden_states`: name `target`, too.")
    cache = HiddenStateCache(directory)
    refuse_other_sources(cache.manifest, target_args, draft_args, data_args)
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

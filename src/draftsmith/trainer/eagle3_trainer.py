"""`Trainer` for draft heads: runs the frozen target, normalises by the global count, reduces metrics as sums."""

import logging
from collections.abc import Sized
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import EvalLoopOutput

from .. import alignment
from ..cached_target import CachedTarget
from ..data import STATE_COLUMNS, DraftCollator, prompt_ids, read_prompts
from ..models.eagle3 import Eagle3DraftModel
from ..models.eagle3.adapters_eagle3 import is_adapter, load_adapter
from ..ops.transfer import remember_on_host, to_device
from ..target import FrozenTarget
from .adapters import adapted, is_adapted, refuse_other_kind, save_adapter
from .arguments import Eagle3TrainingArguments, refuse_unsupported_launches
from .checkpoints import explained_write_errors, files_moved_to
from .decoding import DecodedAcceptance
from .metrics import MetricSums, draft_metrics
from .publishing import PublishingTrainer
from .records import record_of
from .target_states import TargetStateSource, refuse_states_of_other_layers, refuse_without_layers, verification_of


logger = logging.getLogger(__name__)


class Eagle3Trainer(PublishingTrainer):
    """Trains an [`Eagle3DraftModel`] beside its frozen target.

    Args:
        model: the head; its trainable parameters are raised to fp32, the compute dtype is `args.bf16`'s. Or a
            `PeftModel` of a head.
        target: the target model, or a [`FrozenTarget`] of it; for rows that bring its states, the [`CachedTarget`] of
            their cache will do.
        args: [`Eagle3TrainingArguments`].
        train_dataset, eval_dataset: rows as `draftsmith prepare` makes them: `input_ids`, `loss_mask`, and optionally
            `turn_ids` and `document_lengths`. Or with the target's states, as
            [`~draftsmith.data.hidden_states.HiddenStateRows`]: then the target is not run.
        processing_class: the target's tokenizer, saved beside the head; renders `eval_prompts`.
        chat_template_kwargs: arguments of its template for them.
        peft_config: a peft method on layers of the head, such as `LoraConfig`: the adapter alone is trained and saved,
            and `lm_head` where `modules_to_save` names it.
        kwargs: as for [`~transformers.Trainer`].
    """

    args: Eagle3TrainingArguments

    def __init__(
        self,
        model: Eagle3DraftModel | Any,
        target: PreTrainedModel | FrozenTarget | CachedTarget,
        args: Eagle3TrainingArguments,
        *,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        peft_config: Any | None = None,
        **kwargs: Any,
    ):
        refuse_unsupported_launches(args)
        refuse_other_kind(args.output_dir or ".", adapts=peft_config is not None or is_adapted(model))
        model = adapted(model, peft_config, args)
        self._decoded = None
        refuse_without_layers(args, target)
        if args.eval_prompts is not None:
            self._decoded = _decoded_acceptance(args, eval_dataset, processing_class, chat_template_kwargs or {})
        if isinstance(target, FrozenTarget | CachedTarget):
            model.fit_to_target(target.model)
        else:
            if target.device.type == "cpu":  # one that was loaded onto devices, or quantised there, stays where it is
                target.to(args.device)  # type: ignore[arg-type]
            model.fit_to_target(target)  # it may fill in the layer ids
            target = FrozenTarget(target, model.config.eagle_aux_hidden_state_layer_ids)
        for rows in (train_dataset, eval_dataset):
            refuse_states_of_other_layers(rows, model.config.eagle_aux_hidden_state_layer_ids)
        if model.t2d is None and len(target.head_weight) != model.config.draft_vocab_size:
            raise ValueError(
                f"The target's head has {len(target.head_weight)} rows, its embedding {model.config.vocab_size}: make "
                "the draft head with a `draft_vocab_size` of at most the former."
            )
        if target.tp_size != args.target_tp:
            raise ValueError(
                f"`target_tp` is {args.target_tp}, but the target is held by {target.tp_size} ranks together: load it "
                "with `draftsmith.target.load_target(.., tp_size=args.target_tp)`."
            )
        self.target: Any = target  # FrozenTarget | CachedTarget
        if args.compile_target and isinstance(target, FrozenTarget):
            target.compile_layers()
        if args.capture_target and isinstance(target, FrozenTarget):
            target.capture_forward()
        for parameter in model.parameters():
            if parameter.requires_grad:  # fp32 masters, however the head was loaded
                parameter.data = parameter.data.float()
        kwargs.setdefault("data_collator", DraftCollator(args.ttt_steps))
        self._train_sums, self._eval_sums = MetricSums(), MetricSums()
        self._states = TargetStateSource(target)
        self._batch_sizes = (0, 0, 0)  # rows, tokens of each, supervised rows: for the message when memory is out
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            **kwargs,
        )
        self.record = record_of(model, target, train_dataset, eval_dataset, args.seed)

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor:
        """The denominator N of an optimizer step: supervised rows (or documents) of all micro-batches and ranks."""
        count = self._count_documents if self.args.loss_normalization == "sequence" else _count_rows
        items = sum(count(batch) for batch in batch_samples)
        items_and_signal = to_device(torch.tensor([items, self._stop.received]), device)
        if self.args.world_size > 1:
            items_and_signal = self.accelerator.gather(items_and_signal).view(-1, 2)
            self._stop.share(items_and_signal[:, 1])
        return items_and_signal.view(-1, 2)[:, 0].sum()

    @staticmethod
    def _count_documents(batch: dict[str, Any]) -> int:
        documents = alignment.unique_document_ids(batch["document_ids"], batch["input_ids"]).flatten()
        return int(alignment.sequence_weights(batch["row_sets"][0].to(documents.device), documents)[1])

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self._batch_sizes = (*inputs["input_ids"].shape, len(inputs["row_sets"][0]))
        remember_on_host(inputs["document_ids"], inputs["row_sets"].document_ids)
        aux, teacher = self._states(inputs, keep=self.args.keep_target_states and model.training)
        draft_inputs = {
            "input_ids": inputs["input_ids"],
            "aux_hidden_states": aux,
            "teacher_hidden_states": teacher,
            "teacher_head": self.target.head_weight,
            "teacher_bias": self.target.head_bias,
            "teacher_softcap": self.target.softcap,
            "document_ids": inputs["document_ids"],
            "position_ids": inputs["position_ids"],
            "row_sets": inputs["row_sets"],
            "ttt_steps": self.args.ttt_steps,
            "ttt_step_loss_decay": self.args.ttt_step_loss_decay,
            "objective": self.args.objective,
            "loss_normalization": self.args.loss_normalization,
        }
        loss, outputs = super().compute_loss(
            model, draft_inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        loss = loss * (1 + 0 * loss.detach())  # a loss that is not finite takes every gradient with it, on every rank
        sums = self._train_sums if model.training else self._eval_sums
        scalars = {"num_tokens": (inputs["document_ids"] >= 0).sum()}
        if num_items_in_batch is not None:
            scalars["unsupervised_batches"] = num_items_in_batch == 0
        if self.args.loss_normalization == "sequence":
            scalars["num_documents"] = torch.tensor(self._count_documents(inputs), device=loss.device)
        sums.add(outputs.raw_sums, keep=loss.isfinite() if model.training else None, **scalars)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:  # a training log, made on every rank
            sums = self._train_sums.reduce(self.accelerator)
            logs = {**logs, **draft_metrics(sums)}
            logs["num_tokens"] = self._last_logged("num_tokens") + sums["num_tokens"][0]
            warn = logger.warning if self.is_world_process_zero() else logger.debug  # the sums are of all ranks
            if empty := sums["unsupervised_batches"][0]:
                warn(f"{empty:.0f} micro-batches since the last log had no supervised row in their whole step.")
            if skipped := self._non_finite.pop_count():
                logs["nan_steps"] = skipped
                hint = verification_of(self.train_dataset)
                warn(f"{skipped} steps since the last log had a loss or gradients that are not finite.{hint}")
        super().log(logs, start_time)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs)
        return loss.detach(), None, None

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ) -> EvalLoopOutput:
        """Loss and metrics of the whole set from its raw sums: means of batch means would weigh short batches more."""
        output = super().evaluation_loop(dataloader, description, True, ignore_keys, metric_key_prefix)
        sums = self._eval_sums.reduce(self.accelerator)
        items = sums["num_documents"] if self.args.loss_normalization == "sequence" else sums["rows"]
        loss = sum(self.args.ttt_step_loss_decay**step * total for step, total in enumerate(sums["loss"]))
        metrics = {"loss": loss / max(items[0], 1.0), **draft_metrics(sums)}
        if self._decoded is not None:
            head = self.accelerator.unwrap_model(self.model)
            metrics["decoded_acceptance_length"] = self._decoded.measure(head, self.target).acceptance_length
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        return output._replace(metrics={**(output.metrics or {}), **metrics})

    def _get_dataloader(self, dataset, description, batch_size, *args, **kwargs):
        if description != "Training":
            if not isinstance(dataset, Sized) or len(dataset) == 0:
                raise ValueError(
                    "`eval_dataset` must have a length and at least one row: its sums are taken over the whole set."
                )
            dataset = _EvenlySplit(dataset, batch_size * self.args.world_size)
        return super()._get_dataloader(dataset, description, batch_size, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the head: fp32 masters in checkpoints, the target's dtype where it is to be served."""
        self._saves_checkpoint = _internal_call
        with explained_write_errors(Path(output_dir or self.args.output_dir or ".")):
            super().save_model(output_dir, _internal_call)

    def memory_advice(self) -> str:
        rows, tokens, supervised = self._batch_sizes
        return (
            f"The last batch had {rows} x {tokens} tokens, {supervised} of them supervised, and `ttt_steps` is "
            f"{self.args.ttt_steps}. What lowers memory, cheapest first: `gradient_checkpointing=True`, a lower "
            "`per_device_train_batch_size` with more `gradient_accumulation_steps`, a shorter `max_length` or "
            "`row_length` of the data, a smaller `draft_vocab_size`, a target in shards (`target_tp`), DeepSpeed ZeRO "
            "with offload (`deepspeed=`)."
        )

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        head = self.accelerator.unwrap_model(self.model)
        if self._saves_checkpoint and not is_adapted(head):
            return super()._save(output_dir, state_dict)
        if not self.args.should_save:
            return
        directory = Path(output_dir or self.args.output_dir or ".")
        refuse_other_kind(directory, adapts=is_adapted(head))
        with files_moved_to(directory) as unfinished:
            if is_adapted(head):
                save_adapter(head, unfinished, state_dict, None if self._saves_checkpoint else self.target.model.dtype)
            else:
                state_dict = head.state_dict() if state_dict is None else state_dict
                served = {name: self._as_served(tensor) for name, tensor in state_dict.items()}
                head.save_pretrained(unfinished, state_dict=served)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(unfinished)

    def _as_served(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.target.model.dtype) if tensor.is_floating_point() else tensor

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if is_adapted(self.model):
            load_adapter(self.model, resume_from_checkpoint)
        elif is_adapter(resume_from_checkpoint):
            raise ValueError(f"{resume_from_checkpoint} holds an adapter: pass the `peft_config` of its run.")
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if is_adapted(self.model) and not self.is_deepspeed_enabled:
            load_adapter(self.model, self.state.best_model_checkpoint or "")
        else:
            super()._load_best_model()
        self._best.loaded(self.state)


def _decoded_acceptance(
    args: Eagle3TrainingArguments, eval_dataset: Any, tokenizer: Any, chat_template_kwargs: dict[str, Any]
) -> DecodedAcceptance:
    for name, value in (("eval_dataset", eval_dataset), ("processing_class", tokenizer)):
        if value is None:
            raise ValueError(f"`eval_prompts` are decoded when the model is evaluated, which needs `{name}`: pass it.")
    prompts = read_prompts(args.eval_prompts or [], argument="eval_prompts")[: args.eval_num_prompts]
    return DecodedAcceptance(
        [prompt_ids(tokenizer, prompt.content, chat_template_kwargs) for prompt in prompts],
        num_draft_tokens=args.eval_num_draft_tokens or args.ttt_steps,
        max_new_tokens=args.eval_max_new_tokens,
        batch_size=args.per_device_eval_batch_size,
        rank=args.process_index,
        world_size=args.world_size,
    )


class _EvenlySplit(Dataset):
    """A dataset filled with fully masked rows, so that every rank runs whole batches and no row counts twice."""

    def __init__(self, dataset, multiple: int):
        self.dataset = dataset
        self.length = -(-len(dataset) // multiple) * multiple

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index < len(self.dataset):
            return self.dataset[index]
        if index >= self.length:
            raise IndexError(index)  # ends plain iteration
        row = self.dataset[0]
        states = {name: row[name][:0] for name in STATE_COLUMNS if name in row}
        return {**row, "loss_mask": [0] * len(row["loss_mask"]), **states}


def _count_rows(batch: dict[str, Any]) -> int:
    return len(batch["row_sets"][0])

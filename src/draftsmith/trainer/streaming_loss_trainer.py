"""`Trainer` for plain fine-tuning of causal language models whose logits exist one chunk at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss

from .. import target_family as family
from ..ops import streaming_cross_entropy
from ..ops.streaming_loss.validation import check_chunk_size
from .arguments import refuse_unsupported_launches


_IGNORE_INDEX = -100  # of transformers' losses


class StreamingLossTrainer(Trainer):
    """The transformers `Trainer` for a causal language model, with the same loss and gradients and without the logits.

    The model's own forward runs, scaled or soft-capped logits and router losses included. Only its output head returns
    the cross-entropy of its chunks instead of logits, inside the head's module, where ZeRO-3 gathers the weight. A
    batch without a supervised token has loss 0. The `logits` of outputs are one row without meaning.

    Args:
        model: a causal language model with a plain linear head, tied or not (None beside `model_init`); a PEFT wrapper
            of one, in which the head is frozen or in `modules_to_save`.
        args: [`~transformers.TrainingArguments`].
        chunk_size: tokens whose logits exist at a time; None: chosen from the shapes.
        kwargs: as for [`~transformers.Trainer`]. Batches hold `labels` [B, T] that the model shifts, beside them
            `shift_labels` [B, T] where these are aligned already, and whatever else the model takes.

    Raises:
        ValueError: an argument that needs whole logits, or a model whose loss is not the cross-entropy of a linear
            head; for what only the model's forward can tell, at the first batch.
    """

    def __init__(
        self,
        model: PreTrainedModel | nn.Module | None,
        args: TrainingArguments | None = None,
        *,
        chunk_size: int | None = None,
        **kwargs: Any,
    ):
        if isinstance(model, str):
            raise ValueError(f"`model` is a string: load it first, AutoModelForCausalLM.from_pretrained({model!r}).")
        args = args or TrainingArguments("trainer_output")  # as transformers does
        refuse_unsupported_launches(args)
        for name in ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics"):
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"`{name}` is given whole logits, which `StreamingLossTrainer` never builds: leave it out, or use "
                    "transformers' `Trainer`."
                )
        for name in ("label_smoothing_factor", "use_liger_kernel", "torch_compile", "parallelism_config"):
            if getattr(args, name):
                raise ValueError(f"`{name}` replaces or splits the loss that is streamed here: leave it unset.")
        check_chunk_size(chunk_size)
        super().__init__(model, args, **kwargs)
        _refuse_other_losses(self.model)
        self.chunk_size = chunk_size
        self.label_names = ["labels"]  # what evaluation asks for, PEFT wrappers included
        self._inspects_forward = True  # the first one only: it reads values on the host

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        forward = _StreamedForward(
            self.model, inputs.get("labels"), _next_tokens(inputs), self.chunk_size, inspects=self._inspects_forward
        )
        with forward.installed():
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if self._inspects_forward:
            forward.refuse_other_uses_of_logits(loss)
            self._inspects_forward = False
        return (loss, outputs) if return_outputs else loss

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        _next_tokens(inputs)  # without labels, transformers would run the model's plain forward
        return super().prediction_step(model, inputs, True, ignore_keys)

    def predict(self, *args: Any, **kwargs: Any):
        raise ValueError(
            "`predict` returns whole logits, which `StreamingLossTrainer` never builds: call `evaluate` for the loss, "
            "or use transformers' `Trainer`."
        )


class _StreamedForward:
    """One forward of a model whose head returns the sum of its losses, and whose `loss_function` divides it."""

    def __init__(
        self,
        model: Any,
        given_labels: Tensor,  # [B, T], as the batch holds them
        labels: Tensor,  # [B, T], each position's next token
        chunk_size: int | None,
        *,
        inspects: bool,
    ):
        self.model, self.head = family.base_model(model), family.linear_head(model)
        self.given_labels, self.labels = given_labels, labels
        self.chunk_size, self.inspects = chunk_size, inspects
        config = self.model.config.get_text_config()
        self.scale, self.softcap = family.logit_scale(config), family.softcap(config)
        self.loss_sum: Tensor | None = None
        self.stand_in = torch.empty(0)  # for logits
        self.asked_for_loss = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        # The hook comes after DeepSpeed's, which must see the differentiable output of the module.
        hook = self.head.register_forward_hook(self._keep_loss)
        own_forward = vars(self.head).get("forward")  # accelerate puts one there
        self.head.forward = self._head_forward  # type: ignore[assignment,method-assign]
        self.model.loss_function = self._loss_function
        try:
            yield
        except _NotStreamableError:
            raise
        except Exception as error:
            if self.inspects and self.loss_sum is not None and not self.asked_for_loss:
                raise self._refusal("does not take its loss from `loss_function`") from error
            raise
        finally:
            hook.remove()
            del self.head.forward
            if own_forward is not None:
                self.head.forward = own_forward  # type: ignore[method-assign]
            self.model.loss_function = ForCausalLMLoss

    def _head_forward(self, hidden_states: Tensor) -> Tensor:
        """[B, T, H] -> scalar"""
        if self.loss_sum is not None:
            raise self._refusal("calls its output head more than once")
        weight: Tensor = self.head.weight
        bias: Tensor | None = self.head.bias
        self.stand_in = _stand_in(len(weight), weight.device, telling=self.inspects)
        if self.scale != 1:
            hidden_states, bias = hidden_states * self.scale, None if bias is None else bias * self.scale
        if torch.is_autocast_enabled(hidden_states.device.type):
            hidden_states = hidden_states.to(torch.get_autocast_dtype(hidden_states.device.type))
        return streaming_cross_entropy(
            hidden_states,
            weight,
            self.labels,
            bias=bias,
            ignore_index=_IGNORE_INDEX,
            logit_softcap=self.softcap,
            reduction="sum",
            chunk_size=self.chunk_size,
        )

    def _keep_loss(self, _head: nn.Module, _inputs: Any, loss: Tensor) -> Tensor:
        self.loss_sum = loss
        return self.stand_in.clone()  # a model may write into its logits

    def _loss_function(
        self, logits, labels, vocab_size, num_items_in_batch=None, ignore_index=_IGNORE_INDEX, **_: Any
    ) -> Tensor:
        self.asked_for_loss = True
        if self.inspects and labels is not None and not torch.equal(labels.to(self.given_labels), self.given_labels):
            raise self._refusal("changes the labels of the batch")
        if ignore_index != _IGNORE_INDEX:
            raise self._refusal(f"asks its loss to ignore the label {ignore_index}")
        if self.loss_sum is None:
            raise self._refusal("does not call its output head")
        if self.inspects and not self._scales_as_known(logits):
            raise self._refusal(
                "changes its logits before the loss in a way that the tables of `draftsmith/target_family.py` lack"
            )
        if num_items_in_batch is None:
            num_items_in_batch = (self.labels != _IGNORE_INDEX).sum()
        items = torch.as_tensor(num_items_in_batch, device=self.loss_sum.device)
        # In evaluation NaN, as transformers has it, which leaves such a batch out of the mean.
        return self.loss_sum / (items.clamp(min=1) if torch.is_grad_enabled() else items)

    def _scales_as_known(self, logits: Tensor) -> bool:
        expected = self.stand_in * self.scale
        if self.softcap is not None:
            expected = self.softcap * torch.tanh(expected / self.softcap)
        # the tolerance of logits that a model rounds to bf16
        return logits.shape == expected.shape and torch.allclose(logits.float(), expected, rtol=0.02, equal_nan=True)

    def refuse_other_uses_of_logits(self, loss: Tensor) -> None:
        """The probe's NaN reaches the loss of a model that adds, say, a z-loss of its logits."""
        if not self.asked_for_loss:
            raise self._refusal("does not take its loss from `loss_function`")
        if self.loss_sum is not None and self.loss_sum.isfinite() and not loss.isfinite():
            raise self._refusal("uses its logits for more than cross-entropy")

    def _refusal(self, reason: str) -> "_NotStreamableError":
        return _NotStreamableError(
            f"`{type(self.model).__name__}` {reason}, so its loss cannot be streamed: use transformers' `Trainer`."
        )


class _NotStreamableError(ValueError):
    pass


def _stand_in(vocab_size: int, device: torch.device, *, telling: bool) -> Tensor:
    """[1, 1, V] NaN in place of logits; `telling`: one NaN beside values that show what a model does to its logits."""
    values = torch.linspace(-100, 100, vocab_size, device=device)[None, None]
    values[..., : 1 if telling else None] = torch.nan
    return values


def _next_tokens(inputs: dict[str, Any]) -> Tensor:
    """[B, T] the label of each position: `shift_labels`, or `labels` moved by one."""
    if inputs.get("labels") is None:
        raise ValueError(
            "The batch has no `labels`: let the collator add them (`DataCollatorForLanguageModeling(mlm=False)`), or "
            "name the column `labels`."
        )
    if inputs.get("shift_labels") is not None:
        return inputs["shift_labels"]
    return nn.functional.pad(inputs["labels"][..., 1:], (0, 1), value=_IGNORE_INDEX)


def _refuse_other_losses(model: Any) -> None:
    base = family.base_model(model)
    if base.config.is_encoder_decoder:
        raise ValueError(
            f"`model` is the encoder-decoder {type(base).__name__}: only causal language models are served."
        )
    family.linear_head(model)
    if base.loss_function is not ForCausalLMLoss:
        raise ValueError(
            f"`model.loss_function` is {base.loss_function}: only transformers' `ForCausalLMLoss` can be streamed."
        )

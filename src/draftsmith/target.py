"""The frozen target: loaded as it is served, read without being touched, hidden states out."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations import deepspeed as hf_deepspeed
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from draftsmith import target_family as family
from draftsmith.captured_forwards import CapturedForwards
from draftsmith.compiled_forwards import CompiledForwards
from draftsmith.revisions import note_commit
from draftsmith.tensor_parallel import ShardGroup, sharded_loading
from draftsmith.transformers_hooks import ATTENTION_NAME, UnsupportedAttentionError


logger = logging.getLogger(__name__)

# Attention implementations whose masks keep documents apart wherever `position_ids` restart, at any batch size.
_PACKING_IMPLEMENTATIONS = {ATTENTION_NAME, "sdpa", "eager", "flex_attention"}
_PROBE_IDS = range(3, 11)  # ordinary tokens of every vocabulary, no two alike


@dataclass
class TargetStates:
    """Hidden states of one forward, without gradient, in the target's dtype."""

    aux_hidden_states: torch.Tensor  # [B, T, len(aux_layer_ids) * Ht]
    last_hidden_state: torch.Tensor  # [B, T, Ht], after the final norm, times the logit scale


@contextmanager
def deepspeed_init_suspended() -> Iterator[None]:
    """Build or load models whole while a ZeRO-3 `TrainingArguments` is alive; the flag is restored on leaving.

    Under the flag `from_pretrained` partitions every weight as it is created, which leaves empty tensors on a model
    that DeepSpeed never manages.
    """
    active = hf_deepspeed._hf_deepspeed_config_weak_ref
    hf_deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        hf_deepspeed._hf_deepspeed_config_weak_ref = active


def auto_class_of(config: PreTrainedConfig) -> Any:
    """The transformers auto class that makes a target of this config."""
    multimodal = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if multimodal else AutoModelForCausalLM


def load_target(
    name_or_path: str,
    *,
    revision: str | None = None,
    dtype: str | torch.dtype = "auto",
    attn_implementation: str | None = ATTENTION_NAME,
    adapter: str | None = None,
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
    device_map: Any = None,
    tp_size: int = 1,
) -> PreTrainedModel:
    """Load the target as it is served: quantised weights stay quantised, a PEFT `adapter` (id or path) unmerged.

    A family that `block_sparse_flash` does not compute gets transformers' own attention, and a warning says so.
    `gguf_file` names a file in `name_or_path`; its weights are dequantised to `dtype`. `tp_size` neighbouring ranks
    hold one target together, sharded by transformers' tensor parallelism; every rank must load it.
    """
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code, "gguf_file": gguf_file}
    options = {key: value for key, value in options.items() if value is not None}
    config = AutoConfig.from_pretrained(name_or_path, **options)
    auto_class = auto_class_of(config)
    options |= {"dtype": dtype, "device_map": device_map}
    if gguf_file is not None:
        # Left packed, the blocks are unpacked again by every forward wherever transformers finds no kernel for them.
        options["quantization_config"] = GgufConfig(dequantize=True)

    placed = sharded_loading(config, tp_size, adapter=adapter, gguf_file=gguf_file, device_map=device_map)
    with deepspeed_init_suspended(), placed as placement:
        options |= placement
        try:
            model = auto_class.from_pretrained(name_or_path, attn_implementation=attn_implementation, **options)
        except UnsupportedAttentionError as error:
            # transformers' default is sdpa, which leaves a soft cap out on some versions
            softcapped = family.config_field(config.get_text_config(), "attn_logit_softcapping") is not None
            default = "eager" if softcapped else None
            model = auto_class.from_pretrained(name_or_path, attn_implementation=default, **options)
            logger.warning("%s Loaded with %r.", error, model.config._attn_implementation)
        note_commit(model.config, name_or_path, revision)
        if gguf_file is not None:
            model.hf_quantizer = None  # the weights are plain now; left in place it would forbid `save_pretrained`
            model.config.__dict__.pop("quantization_config", None)
            model.gguf_file = gguf_file
        if adapter is not None:
            family.require_peft()
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, adapter)
            model.adapter_name_or_path = adapter  # type: ignore[assignment]
    return model.eval()


class FrozenTarget:
    """A target that only runs its text decoder, without gradient, for the states a draft head is trained on.

    Freezes `model` in place: evaluation mode, no trainable parameter, and `dynamic` or `longrope` frequencies fixed at
    those that servers use, since transformers would otherwise derive them from the longest document of a batch.

    Attributes: `model`; `text_config`; `aux_layer_ids`; `head_weight` [V, Ht] and `head_bias` [V] or None, whole and
    dequantised; `softcap` or None; `embedding_weight` [Vemb, Ht], the raw matrix; `precision`, e.g. "bfloat16" or
    "mxfp4". The target's logits are `z = last_hidden_state @ head_weight.T + head_bias`, with a soft cap
    `softcap * tanh(z / softcap)`; `adapter`, the id or path that [`load_target`] put on, or None.

    Args:
        model: a causal language model, or a multimodal one with a text decoder; with or without a PEFT adapter.
        aux_layer_ids: ascending ids in 1..L-1, `i` meaning `hidden_states[i]`, the output of decoder layer `i - 1`.

    Raises `ValueError` for ids out of range, a model without output head, and an adapted or quantised embedding.
    """

    def __init__(self, model: PreTrainedModel, aux_layer_ids: Sequence[int]):
        self.model = model.eval().requires_grad_(False)
        self.text_config = model.config.get_text_config()
        self.decoder, self.layers = family.text_decoder(model, self.text_config)
        self.aux_layer_ids = family.checked_layer_ids(aux_layer_ids, len(self.layers))
        self.precision = family.precision(model)
        self.adapter: str | None = vars(model).get("adapter_name_or_path")
        self.embedding_weight = family.embedding_weight(model)
        self.softcap = family.softcap(self.text_config)
        self._logit_scale = family.logit_scale(self.text_config)
        self.head_weight, bias = family.head_tensors(model)
        self.head_bias = None if bias is None else bias * self._logit_scale
        self._recurrent_layers = family.recurrent_layers(self.decoder, self.text_config)
        family.freeze_rope(self.decoder)
        self._packing_obstacle: str | None = None
        self._verified = False
        self._compiled: AbstractContextManager = nullcontext()
        self._captured: CapturedForwards | None = None
        self._shards = ShardGroup.of(model)

    def compile_layers(self) -> None:
        """Fuse what lies between the products and attention of each layer; the first batches compile, for minutes."""
        self._compiled = CompiledForwards(self.layers)

    def capture_forward(self) -> None:
        """Replay batches of a shape that has come before as a CUDA graph. `ValueError` for parts of a target."""
        family.refuse_parts(self.model)
        self._captured = CapturedForwards(self.text_config.model_type)

    def __call__(
        self,
        input_ids: torch.Tensor,
        *,
        position_ids: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
    ) -> TargetStates:
        """Run the decoder stack, no logits. The first call also checks head and packing on a few of its tokens.

        Args:
            input_ids: [B, T] int64.
            position_ids: [B, T] int64, restarting with each document. Not read beside `document_ids`: they imply it.
            document_ids: [B, T] int64, contiguous runs, -1 = padding. None: as `position_ids` say, or one per row.

        States at padding are finite and mean nothing. Raises `ValueError` when documents share a row and the target
        cannot keep them apart (recurrent layers, or an `attn_implementation` that ignores packed positions), and when
        the target's logits are not those of its head.
        """
        self.verify(input_ids.device)
        if document_ids is None:
            document_ids = _documents_of(input_ids, position_ids)
        input_ids, document_ids = input_ids.long(), document_ids.long()  # as other ranks expect to receive them
        runner = self._captured or self._shards
        if runner is None:
            return self._training_forward(input_ids, document_ids)
        return runner.run(self._training_forward, input_ids, document_ids)

    @property
    def tp_size(self) -> int:
        """How many ranks hold the target together: a call on one needs a call, or `take_part`, on all of them."""
        return 1 if self._shards is None else self._shards.size

    def take_part(self) -> None:
        """On a rank that needs no states now: help the others that hold the target to theirs."""
        if self._shards is not None:
            self.verify(self.embedding_weight.device)
            self._shards.run(self._training_forward)

    def _training_forward(self, input_ids: torch.Tensor, document_ids: torch.Tensor) -> TargetStates:
        with self._compiled:  # checks run without: the target's own logits are not of compiled layers
            return self._forward(input_ids, document_ids)

    @torch.no_grad()  # not inference_mode: the draft's `fc(aux)` must be able to save these for its backward
    def _forward(self, input_ids: torch.Tensor, document_ids: torch.Tensor) -> TargetStates:
        captured: dict[int, torch.Tensor] = {}
        served_precision = torch.autocast(input_ids.device.type, enabled=False)
        with served_precision, family.captured_outputs(self.layers, self.aux_layer_ids, captured):
            output = self.decoder(input_ids=input_ids, use_cache=False, **self._documents_as_inputs(document_ids))
        last = output.last_hidden_state
        aux = torch.cat([captured[i].to(last.device) for i in self.aux_layer_ids], dim=-1)
        return TargetStates(aux, last if self._logit_scale == 1 else last * self._logit_scale)

    def _documents_as_inputs(self, document_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Restarting `position_ids` keep documents apart in transformers' masks; padding is a document of its own."""
        positions = _positions_of(document_ids)
        if self._packing_obstacle is None:
            inputs = {"position_ids": positions}
            if "mrope_section" in (family.config_field(self.text_config, "rope_parameters") or {}):
                inputs["position_ids"] = positions.expand(4, -1, -1)  # text, time, height and width
            if self.text_config._attn_implementation == ATTENTION_NAME:
                inputs["document_ids"] = document_ids  # lets it skip the padding
            return inputs
        visible = document_ids >= 0
        if bool((visible[:, 1:] & visible[:, :-1] & (document_ids.diff() != 0)).any()):
            raise ValueError(
                f"`document_ids` put several documents into one row, but {self._packing_obstacle}. "
                "Prepare the data without packing: one document per row."
            )
        return {"position_ids": positions, "attention_mask": visible.long()}

    def verify(self, device: torch.device) -> None:
        """Find out once, on a few tokens, whether documents can be packed, and `verify_head`."""
        if self._verified:
            return
        self._packing_obstacle = None
        probe = torch.tensor([*_PROBE_IDS], device=device)[None]
        implementation = self.text_config._attn_implementation
        if self._recurrent_layers:
            self._packing_obstacle = f"the target has recurrent layers ({', '.join(self._recurrent_layers)})"
        elif implementation not in _PACKING_IMPLEMENTATIONS or not self._separates_documents(probe):
            self._packing_obstacle = (
                f"`{self.text_config.model_type}` does not keep documents apart by `position_ids` under "
                f"`attn_implementation={implementation!r}`"
            )
        self.verify_head(probe)
        self._verified = True

    @torch.no_grad()
    def verify_head(self, input_ids: torch.Tensor) -> None:
        """Compare `last_hidden_state @ head_weight.T` with the target's own logits on `input_ids` [B, T]."""
        expected = self.model(input_ids=input_ids, use_cache=False).logits
        states = self._forward(input_ids, torch.zeros_like(input_ids)).last_hidden_state
        logits = family.head_logits(states, self.head_weight, self.head_bias, self.softcap)
        if logits.shape != expected.shape or _relative_error(logits, expected) > _tolerance(states.dtype):
            raise ValueError(
                f"The output head of `{self.text_config.model_type}` is not `last_hidden_state @ head_weight.T`: the "
                "logits are scaled or transformed in a way this version does not know. Add the field to the tables of "
                "`draftsmith/target_family.py`."
            )

    def _separates_documents(self, document: torch.Tensor) -> bool:
        """Whether a document [1, S] gives the same states behind another one as alone."""
        alone = self._forward(document, torch.zeros_like(document)).last_hidden_state
        packed_ids = torch.cat([document.flip(-1), document], dim=-1)
        documents = torch.arange(2, device=document.device).repeat_interleave(document.shape[1])[None]
        packed = self._forward(packed_ids, documents).last_hidden_state[:, document.shape[1] :]
        return _relative_error(packed, alone) <= _tolerance(alone.dtype)


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """[1, S, D] twice -> the median token's error: rounding may send one token to another expert, a fault hits all."""
    error, size = (actual.float() - expected.float()).norm(dim=-1), expected.float().norm(dim=-1)
    return float((error / size.clamp_min(1e-30)).median())


def _tolerance(dtype: torch.dtype) -> float:
    return 0.5 * torch.finfo(dtype).eps ** 0.5  # 4% in bf16, 0.02% in fp32


def _positions_of(document_ids: torch.Tensor) -> torch.Tensor:
    """[B, T] contiguous runs -> [B, T] positions counted from the start of each run, padding runs included."""
    rows = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    starts = nn.functional.pad(document_ids.diff() != 0, (1, 0), value=True)
    return rows - torch.where(starts, rows, 0).cummax(-1).values


def _documents_of(input_ids: torch.Tensor, position_ids: torch.Tensor | None) -> torch.Tensor:
    """[B, T] document ids that restart where `position_ids` do not rise by one; zeros without positions."""
    if position_ids is None:
        return torch.zeros_like(input_ids)
    return nn.functional.pad(position_ids.diff() != 1, (1, 0)).cumsum(-1)

"""Whoever runs a draft step here: ours, SpecForge where it is installed, and our mathematics with nothing spared."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import LlamaConfig

from draftsmith import Eagle3DraftConfig
from draftsmith.models.eagle3 import modeling_eagle3
from draftsmith.ops.streaming_loss.draft_loss import DraftLossSums

from .loss_check import row_losses
from .loss_contenders import peer
from .train_cases import Inputs, make_draft


DECAY = 0.8  # of the steps' weights


class Contender:
    """Something to time. A step leaves gradients behind, which `release` drops."""

    model: nn.Module

    def run(self) -> list[Tensor]:
        """One step; its gradients, which the next one replaces."""
        self.release()
        self.loss().backward()
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def loss(self) -> Tensor:
        raise NotImplementedError

    def release(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def results(self) -> dict[str, Tensor]:
        """The loss and the gradients of the weight matrices by the names that all of us share."""
        self.release()
        loss = self.loss()
        loss.backward()
        matrices = {name: parameter.grad for name, parameter in self.model.named_parameters() if parameter.dim() == 2}
        results = {name: grad for name, grad in matrices.items() if grad is not None}
        self.release()
        return {"loss": loss.detach(), **results}


class Ours(Contender):
    def __init__(self, inputs: Inputs, recompute: bool = False):
        self.inputs, self.model, self.recompute = inputs, inputs.draft, recompute

    def loss(self) -> Tensor:
        inputs = self.inputs
        if self.recompute:
            inputs.draft.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            inputs.draft.gradient_checkpointing_disable()
        return inputs.batch.step(inputs.draft, inputs.aux, inputs.last, inputs.head)


class Dense(Contender):
    """The same head with transformers' eager attention over the whole mask, and every logit in memory."""

    def __init__(self, inputs: Inputs, dtype: torch.dtype | None = None, draft_loss: Callable | None = None):
        dtype = dtype or inputs.head.dtype
        config = copy.deepcopy(inputs.draft.config)
        config._attn_implementation = "eager"
        self.model = make_draft(config, inputs.embedding.to(dtype), None)
        self.model.load_state_dict(inputs.draft.state_dict())
        self.inputs, self.draft_loss = inputs, draft_loss or dense_draft_loss
        self.tensors = [tensor.to(dtype) for tensor in (inputs.aux, inputs.last, inputs.head)]

    def loss(self) -> Tensor:
        with mock.patch.object(modeling_eagle3, "streaming_draft_loss", self.draft_loss):
            return self.inputs.batch.step(self.model, *self.tensors)


def dense_draft_loss(
    states: Sequence[Tensor],  # K x [|R_k|, H]
    weight: Tensor,  # [D, H]
    teacher_states: Tensor,  # [|R_0|, H]
    teacher_weight: Tensor,  # [V, H]
    row_sets: Sequence[Tensor],  # K x [|R_k|], on the CPU
    *,
    t2d: Tensor | None,
    step_weights: Sequence[float],
    **_unused: Any,
) -> tuple[Tensor, DraftLossSums]:
    """`streaming_draft_loss` by KL as it is usually written; hits are counted, chains are not."""
    device = weight.device
    teacher_logits = linear(teacher_states, teacher_weight)
    teacher_logits = teacher_logits.to(torch.promote_types(teacher_logits.dtype, torch.float32))  # [|R_0|, V]
    best = teacher_logits.argmax(-1)
    if t2d is not None:
        best = torch.where(t2d[best], t2d.cumsum(0)[best] - 1, -1)
    losses, hits = [], []
    for step, (state, rows) in enumerate(zip(states, row_sets, strict=True)):
        entries = torch.searchsorted(row_sets[0], rows + step).to(device)
        logits = linear(state, weight).to(teacher_logits.dtype)
        losses.append(row_losses(logits, None, teacher_logits[entries], t2d, "kl").sum())
        hits.append((logits.argmax(-1) == best[entries]).sum())
    rows_per_step = torch.tensor([len(rows) for rows in row_sets])
    loss = sum(factor * total for factor, total in zip(step_weights, losses, strict=True))
    sums = DraftLossSums(torch.stack(losses).detach(), torch.stack(hits), torch.stack(hits), rows_per_step, None)
    return loss / max(1, len(row_sets[0])), sums


class SpecForge(Contender):
    """SpecForge 0.2.0: its draft and its online model, as its `Eagle3TrainStrategy` calls them.

    It computes every row and masks losses: step k of row t counts where row t + k is supervised. With all of a
    document supervised these are our pairs, and else some more. Packed documents are its batch. Its loss is the
    cross-entropy of the same distributions, whose gradients are the same, over the number of rows; here it is scaled
    to our denominator.
    """

    def __init__(self, inputs: Inputs, attention: str, compact: bool):
        draft_module = peer("specforge.modeling.draft.llama3_eagle")
        online_module = peer("specforge.algorithms.eagle3.model")
        self.shifted = peer("specforge.utils").padding
        self.inputs, self.compact = inputs, compact
        case, config = inputs.case, inputs.draft.config
        with inputs.head.device:
            its_config = specforge_config(config, longest=case.length + case.steps)
            draft = draft_module.LlamaForCausalLMEagle3(its_config, attention_backend=attention)
        draft.to(inputs.head.dtype)
        weights = {**inputs.draft.state_dict(), "embed_tokens.weight": inputs.embedding}
        kept = {"d2t", "t2d"} if not config.has_reduced_vocabulary else set()  # its own are the identity
        missing, unexpected = draft.load_state_dict(weights, strict=False, assign=True)
        if unexpected or set(missing) - kept:
            raise RuntimeError(f"other weights than ours: {missing} and {unexpected}")
        draft.freeze_embedding()
        self.model = online_module.OnlineEagle3Model(draft, length=case.steps, attention_backend=attention)
        supervised = inputs.batch.supervised
        self.scale = supervised.numel() / max(1, int(supervised.sum()))
        self.loss_mask = self._as_batch(supervised)[..., None]
        self.input_ids = self._as_batch(inputs.batch.input_ids)

    def _as_batch(self, tensor: Tensor) -> Tensor:
        """[1, T, ..] -> [documents, T / documents, ..]"""
        documents = self.inputs.case.documents
        return tensor.view(documents, tensor.shape[1] // documents, *tensor.shape[2:])

    def loss(self) -> Tensor:
        inputs = self.inputs
        last = self.shifted(self._as_batch(inputs.last), left=False)
        teacher: dict[str, Any] = {"target": None if self.compact else last @ inputs.head.T}
        if self.compact:
            teacher |= {"target_hidden_for_compact": last, "target_head_weight": inputs.head}
        losses, *_ = self.model(
            input_ids=self.shifted(self.input_ids, left=False),
            attention_mask=torch.ones_like(self.input_ids),
            loss_mask=self.loss_mask,
            hidden_states=self._as_batch(inputs.aux),
            **teacher,
        )
        return self.scale * sum(DECAY**step * loss for step, loss in enumerate(losses))

    def results(self) -> dict[str, Tensor]:
        return {name.removeprefix("draft_model."): value for name, value in super().results().items()}


def specforge_config(ours: Eagle3DraftConfig, longest: int, **fields: Any) -> LlamaConfig:
    """SpecForge's config of a head of our sizes; `longest`: positions that its table of rotations must hold."""
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "vocab_size", "draft_vocab_size", "rms_norm_eps", "rope_parameters",
    )  # fmt: skip
    sizes = {name: getattr(ours, name) for name in names}
    config = LlamaConfig(**sizes, max_position_embeddings=max(ours.max_position_embeddings, longest), **fields)
    if config.rope_parameters["rope_type"] == "yarn":  # it has no defaults for these: what transformers does
        config.rope_parameters |= {"mscale": 1.0, "mscale_all_dim": 0.0}
    return config


CONTENDERS: dict[str, Callable[[Inputs], Contender]] = {
    "ours": Ours,
    "ours recompute": partial(Ours, recompute=True),
    "specforge compact": partial(SpecForge, attention="flex_attention", compact=True),
    "specforge": partial(SpecForge, attention="flex_attention", compact=False),
    "specforge sdpa": partial(SpecForge, attention="sdpa", compact=True),
    "dense": Dense,
}

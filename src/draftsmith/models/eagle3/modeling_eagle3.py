"""The EAGLE-3 draft head: one decoder layer over fused target states, unrolled over training-time-test steps.

Shapes: B batch, T tokens, K steps, H draft width, Ht target width, n auxiliary states, V target vocabulary, D draft
vocabulary, Hkv key heads, d head width, R_k the supervised rows of step k, N = B * T flattened rows.
"""

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Cache
from transformers.utils import ModelOutput

from ... import alignment
from ...ops import DraftLossSums, streaming_draft_loss
from ...ops.transfer import derived, to_device
from .checkpoint_eagle3 import Eagle3PreTrainedModel
from .layers_eagle3 import Eagle3DecoderLayer, Eagle3Head, Eagle3RMSNorm, Eagle3RotaryEmbedding
from .unroll_eagle3 import unroll


logger = logging.getLogger(__name__)


@dataclass
class Eagle3Output(ModelOutput):
    """The loss, differentiable, and each step's detached sums: metrics reduce sums over ranks first, then divide."""

    loss: torch.Tensor | None = None
    raw_sums: DraftLossSums | None = None


class Eagle3DraftModel(Eagle3PreTrainedModel):
    """A draft head. Parameters are named as servers read them; see [`Eagle3DraftConfig`] for the options."""

    accepts_loss_kwargs = True  # Trainer hands the global token count to forward

    def __init__(self, config: Any):
        if config._attn_implementation is None:
            config._attn_implementation = "block_sparse_flash"
        super().__init__(config)
        width, fused_width = config.hidden_size, config.num_aux_hidden_states * config.target_hidden_size
        norm = partial(Eagle3RMSNorm, eps=config.rms_norm_eps)
        if config.norm_before_fc:
            self.input_norm = norm(fused_width)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(norm(config.target_hidden_size) for _ in range(config.num_aux_hidden_states))
        self.fc = nn.Linear(fused_width, width, bias=False)
        self.midlayer = Eagle3DecoderLayer(config)
        self.norm = norm(width)
        self.lm_head = Eagle3Head(width, config.draft_vocab_size, bias=False)
        self.rotary_emb = Eagle3RotaryEmbedding(config)
        self._init_embedding_slot()
        self._init_vocabulary_map()
        self.gradient_checkpointing = False
        self.post_init()
        logger.info("The draft head's attention is `%s`", config._attn_implementation)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Eagle3RotaryEmbedding):
            module.reset_frequencies()

    def fuse(self, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        """The first recurrent state h^0 `[..., H]` of auxiliary states `[..., n * Ht]`."""
        hidden_states = aux_hidden_states.to(self.compute_dtype)
        if self.config.norm_before_fc:
            hidden_states = self.input_norm(hidden_states)
        if self.config.fc_norm:
            parts = hidden_states.chunk(len(self.fc_norm), dim=-1)
            hidden_states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(hidden_states)

    def draft_step(
        self,
        input_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        position_ids: torch.Tensor,
        cache: Cache,
        attention_mask: torch.Tensor | None = None,
        columns: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One drafting step with a KV cache: what a server runs.

        Args:
            input_ids: `[B, S]`, the target's id of the token after each row.
            hidden_states: `[B, S, H]`, fused target features or the recurrent states of the step before.
            position_ids: `[B, S]`.
            cache: keys and values of earlier rows; extended in place.
            attention_mask: `[B, past + S]`, 0 = padding, on the left; a sliding window counts columns.
            columns: `[B, S]` of a cache whose size is fixed, where the mask has its width: the rows' places among all
                columns. None: the last ones.

        Returns:
            logits `[B, S, D]` over the draft vocabulary and the next recurrent states `[B, S, H]`.
        """
        batch, length = input_ids.shape
        if attention_mask is None:
            attention_mask = input_ids.new_ones(batch, cache.get_seq_length() + length)
        if columns is None:
            total = attention_mask.shape[1]
            columns = torch.arange(total - length, total, device=input_ids.device)
            columns = columns.where(attention_mask[:, -length:].bool(), -1)
        hidden_states = hidden_states.to(self.compute_dtype)
        output, normed, *_ = self.midlayer(
            partial(self.embed, input_ids),
            hidden_states,
            self.rotary_emb(hidden_states, position_ids),
            norm=self.norm,
            cache=cache,
            visibility={
                "document_ids": attention_mask.long() - 1,
                "query_positions": columns,
                "sliding_window": self.config.sliding_window,
            },
        )
        return self.lm_head(normed), normed if self.config.norm_output else output

    def forward(
        self,
        input_ids: torch.Tensor,
        aux_hidden_states: torch.Tensor,
        teacher_hidden_states: torch.Tensor,
        teacher_head: torch.Tensor,
        loss_mask: torch.Tensor | None = None,
        *,
        document_ids: torch.Tensor | None = None,
        turn_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        row_sets: list[torch.Tensor] | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        ttt_steps: int = 7,
        ttt_step_loss_decay: float = 0.8,
        objective: str = "kl",
        loss_normalization: str = "token",
        teacher_bias: torch.Tensor | None = None,
        teacher_softcap: float | None = None,
    ) -> Eagle3Output:
        """The training loss over all steps, computed for supervised rows only.

        Args:
            input_ids: `[B, T]`.
            aux_hidden_states: `[B, T, n * Ht]`, the target's states at the config's layer ids, concatenated.
            teacher_hidden_states: `[B, T, Ht]` after the target's final norm, logit scales folded in; or, with
                `row_sets`, `[|R_0|, Ht]` where entry i belongs to position R_0[i] + 1.
            teacher_head: `[V, Ht]`.
            loss_mask: `[B, T]`, nonzero on supervised tokens; may be None with `row_sets`.
            document_ids: `[B, T]` int, contiguous runs, -1 = padding; None = one document per batch row.
            turn_ids: `[B, T]` int; None = a contiguous run of `loss_mask` is one turn.
            position_ids: `[B, T]` int; None = counted from each document's start.
            row_sets: K ascending int64 tensors as [`alignment.row_sets`] makes them; None = made here.
            num_items_in_batch: the denominator N of the global batch; None = this batch's.
            ttt_steps: K.
            ttt_step_loss_decay: step k weighs `decay ** k`.
            objective: `kl`, `ce`, `tv`, `lk_alpha` or `lk_lambda`.
            loss_normalization: `token`, or `sequence`: every document weighs the same.
            teacher_bias, teacher_softcap: of the target's head.

        Raises:
            ValueError: neither `loss_mask` nor `row_sets`, fewer `row_sets` than steps, or an unknown option.
            RuntimeError: the embedding slot is empty.
        """
        given_sets = self._row_sets(row_sets, loss_mask, document_ids, turn_ids, ttt_steps)
        row_sets = [to_device(rows, self.fc.weight.device) for rows in given_sets]
        document_ids = torch.zeros_like(input_ids) if document_ids is None else document_ids
        documents = derived(lambda ids: alignment.unique_document_ids(ids, input_ids).view(1, -1), document_ids)
        tokens, rows = input_ids.flatten(), row_sets[0]
        if position_ids is None:
            position_ids = alignment.positions_within_documents(documents[0])
        if teacher_hidden_states.dim() == 3:
            teacher_hidden_states = teacher_hidden_states.flatten(0, 1)[rows + 1]
        row_weights = None
        if loss_normalization == "sequence":
            row_weights, num_documents = alignment.sequence_weights(rows, documents[0])
            num_items_in_batch = num_documents if num_items_in_batch is None else num_items_in_batch
        elif loss_normalization != "token":
            raise ValueError(f"`loss_normalization` is {loss_normalization!r}: pass 'token' or 'sequence'.")
        states = unroll(self, tokens, aux_hidden_states.flatten(0, 1), documents, position_ids.flatten(), row_sets)
        loss = partial(
            streaming_draft_loss,
            teacher_states=teacher_hidden_states.to(states[0].dtype),
            teacher_weight=teacher_head,
            row_sets=given_sets,  # those on the CPU spare the loss a synchronisation
            labels=tokens[rows + 2],
            t2d=self.t2d,
            objective=objective,
            step_weights=[ttt_step_loss_decay**step for step in range(ttt_steps)],
            row_weights=row_weights,
            num_items=num_items_in_batch,
            teacher_bias=teacher_bias,
            teacher_softcap=teacher_softcap,
            overwrite_states=self.gradient_checkpointing,  # the layers keep what the norm made them of
        )
        return Eagle3Output(*self.lm_head(states, loss=loss))

    def _row_sets(self, row_sets, loss_mask, document_ids, turn_ids, ttt_steps) -> list[torch.Tensor]:
        if row_sets is None:
            if loss_mask is None:
                raise ValueError("`loss_mask` is needed where `row_sets` are not given.")
            row_sets = alignment.row_sets(loss_mask, document_ids, turn_ids, ttt_steps=ttt_steps)
        if len(row_sets) < ttt_steps:
            raise ValueError(
                f"`row_sets` has {len(row_sets)} steps but `ttt_steps` is {ttt_steps}: collate with that many."
            )
        return row_sets[:ttt_steps]

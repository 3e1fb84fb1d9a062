"""One round: the head drafts, the target verifies, and where the head stands after it."""

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from ..models.eagle3 import Eagle3DraftModel
from ..target_family import captured_outputs, text_decoder
from .rows import RightAlignedCache
from .verification import Proposal, choose, verify


# transformers renamed the argument within the supported range, and the old name warns on new versions.
CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


class PlacedRows(Protocol):
    """Where the new columns of a batch go."""

    def inputs(self, cache: Any, start: int, stop: int) -> dict[str, Any]:
        """`position_ids` [b, stop - start] and `attention_mask` for new columns `start..stop-1`."""


def speculative_round(verifier: "Verifier", drafter: "Drafter", rows: PlacedRows) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens that follow the columns x_L, drafts.. [b, K + 1], accepted drafts [b], features [b, K + 1, n * Ht]."""
    proposal = drafter.propose(rows)
    logits, features = verifier.forward(torch.cat([drafter.last_tokens, proposal.tokens], dim=1), rows)
    accepted, token = verify(logits, proposal, drafter.temperature)
    following = torch.cat([proposal.tokens, token[:, None]], dim=1).scatter(1, accepted[:, None], token[:, None])
    return following, accepted, features


class Verifier:
    """The target and its cache."""

    cache: Any  # `RightAlignedCache` or `SlotCache`

    def __init__(self, target: PreTrainedModel, aux_layer_ids: Sequence[int]):
        self.target, self.aux_layer_ids, self.cache = target, aux_layer_ids, RightAlignedCache()
        _, self.layers = text_decoder(target, target.config.get_text_config(decoder=True))

    def forward(self, input_ids: Tensor, rows: PlacedRows, logits_to_keep: int = 0) -> tuple[Tensor, Tensor]:
        """Read S new columns: logits [b, S, V], or at least the last `logits_to_keep`, and aux states [b, S, n*Ht]."""
        columns = input_ids.shape[1]
        captured: dict[int, Tensor] = {}
        with captured_outputs(self.layers, self.aux_layer_ids, captured):
            output = self.target(
                input_ids=input_ids,
                use_cache=True,
                logits_to_keep=logits_to_keep,
                **rows.inputs(self.cache, 0, columns),
                **{CACHE_ARGUMENT: self.cache},
            )
        return output.logits, torch.cat([captured[i].to(input_ids.device) for i in self.aux_layer_ids], dim=-1)


class Drafter:
    """The head, its cache, and where its last verified row of every sequence stands."""

    cache: Any  # as the verifier's
    last_tokens: Tensor  # [b, 1] int64, the token after that row
    states: Tensor  # [b, 1, H], its recurrent state
    logits: Tensor  # [b, 1, D], for the first draft

    def __init__(self, draft: Eagle3DraftModel, num_draft_tokens: int, temperature: float):
        self.draft, self.num_draft_tokens, self.temperature = draft, num_draft_tokens, temperature
        self.cache = RightAlignedCache()

    def read(self, features: Tensor, following: Tensor, rows: PlacedRows) -> None:
        """Columns with the target's features [b, S, n*Ht], and the tokens [b, S] that follow them: one output each."""
        fused = self.draft.fuse(features)
        self.logits, self.states = self._step(following, fused, rows, 0)  # [b, S, D], [b, S, H]
        self.last_tokens = following

    def stand_at(self, going: Tensor, last: Tensor) -> None:
        """Of what was read, batch rows `going` [r] at their columns `last` [r]."""
        at = going.to(self.logits.device), last.to(self.logits.device)
        self.last_tokens, self.states, self.logits = (
            outputs[at][:, None] for outputs in (self.last_tokens, self.states, self.logits)
        )

    def propose(self, rows: PlacedRows) -> Proposal:
        """Draft K tokens after the last verified row, and forget their keys and values again."""
        logits, states = self.logits, self.states
        target_ids = self.draft.to_target_ids(torch.arange(logits.shape[-1], device=logits.device))
        draft_ids: list[Tensor] = []
        distributions: list[Tensor] = []
        for step in range(self.num_draft_tokens):
            if step > 0:
                logits, states = self._step(target_ids[draft_ids[-1]][:, None], states, rows, step - 1)
            chosen, distribution = choose(logits[:, 0], self.temperature)
            draft_ids.append(chosen)
            if distribution is not None:
                distributions.append(distribution)
        self.cache.crop(1 - self.num_draft_tokens)
        chain = torch.stack(draft_ids, dim=1)
        probabilities = torch.stack(distributions, dim=1) if distributions else None
        return Proposal(target_ids[chain], chain, target_ids, probabilities)

    def _step(self, tokens: Tensor, states: Tensor, rows: PlacedRows, start: int) -> tuple[Tensor, Tensor]:
        inputs = rows.inputs(self.cache, start, start + tokens.shape[1])
        return self.draft.draft_step(tokens, states, cache=self.cache, columns=self.cache.columns, **inputs)

"""The decoding loop.

In each round the head drafts a chain of K tokens and the target checks them in one forward of K + 1 tokens; then the
head reads the verified rows again with the target's true features, as servers do.
"""

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from ..models.eagle3 import Eagle3DraftModel
from ..target_family import captured_outputs, text_decoder
from .rows import Continuation, RightAlignedCache, Rows, stop_and_pad_ids
from .verification import Proposal, choose, verify


# transformers renamed the argument within the supported range, and the old name warns on new versions.
CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
# Layers that plain keys and values serve; recurrent and compressed states cannot take rejected tokens back.
REWINDABLE_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "dummy", "mlp", "moe"}


@torch.no_grad()
def speculative_generate(
    target: PreTrainedModel,
    draft: Eagle3DraftModel,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    num_draft_tokens: int = 5,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    eos_token_id: int | Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Continue prompts with the target's own tokens, drafted by the head and verified K + 1 at a time.

    Lossless whatever the head proposes: greedy output is the target's own greedy output, sampled output follows the
    target's own distribution.

    The first new token comes from the prompt's forward and belongs to no round. Each round of a row then emits m >= 1
    tokens, of which m - 1 count as accepted drafts: the last one counts as the target's own, also where EOS or
    `max_new_tokens` cuts the round inside its drafts. So a row's new tokens are 1 + rounds + accepted, and
    `acceptance_length` is exactly the tokens per verification. Finished rows leave the batch: the rows that the target
    is given after the prompt, summed over its forwards, are the rounds.

    Args:
        target: causal language model, under any attention implementation.
        draft: its draft head, on the same device.
        input_ids: [B, T] int64 prompts.
        attention_mask: [B, T], 0 on left padding; None = no padding.
        num_draft_tokens: K, the drafts of a round.
        max_new_tokens: new tokens of a row that meets no EOS.
        temperature: 0 is greedy; above 0 both models sample from softmax(logits / temperature), with torch's global
            generator.
        eos_token_id: id or ids that end a row; None = those of the target's generation config, `[]` = never.

    Returns:
        sequences: [B, T + N] int64, prompts included, N the longest continuation; shorter ones are right-padded with
            the generation config's pad id, or the first EOS id without one.
        drafted: [B] int64, K per round of the row: `drafted // K` are its rounds.
        accepted_per_position: [K] int64, in how many rounds the drafts up to this position were accepted.

    Raises:
        ValueError: an argument is out of range, or the target has layers whose cache cannot be rewound.
    """
    _check_arguments(target, num_draft_tokens, max_new_tokens, temperature)
    rows = Rows.of_prompts(input_ids, attention_mask)
    eos_and_pad = stop_and_pad_ids(eos_token_id, target.generation_config)
    continuation = Continuation(len(input_ids), num_draft_tokens, max_new_tokens, *eos_and_pad)
    verifier = _Verifier(target, _aux_layer_ids(draft))
    drafter = _Drafter(draft, num_draft_tokens, temperature)

    logits, features = verifier.forward(input_ids, rows, logits_to_keep=1)
    token, _ = choose(logits[:, -1], temperature)  # [B]
    following = torch.cat([input_ids[:, 1:], token[:, None]], dim=1)  # [B, T], the token after each column
    kept = torch.full_like(rows.lengths, input_ids.shape[1])  # [B], verified columns of the last forward
    _, going = continuation.append(rows.index, token[:, None], torch.ones_like(kept))
    while len(going):
        drafter.observe(features, following, rows, going, kept)
        rows = rows.advance(going, kept, [verifier.cache, drafter.cache])
        proposal = drafter.propose(rows)
        logits, features = verifier.forward(torch.cat([drafter.last_tokens, proposal.tokens], dim=1), rows)
        accepted, token = verify(logits, proposal, temperature)
        following = torch.cat([proposal.tokens, token[:, None]], dim=1).scatter(1, accepted[:, None], token[:, None])
        kept = accepted.cpu() + 1
        going = continuation.append_round(rows.index, following, kept)
    return continuation.sequences(input_ids), continuation.drafted, continuation.accepted_per_position


def acceptance_length(drafted: Tensor, accepted_per_position: Tensor) -> float:
    """Tokens per verification, 1 + accepted / rounds; 1.0 where nothing was drafted.

    Args:
        drafted: int64 counts of drafted tokens, any shape, of one or several calls of `speculative_generate`.
        accepted_per_position: [K] int64, summed over the same calls.
    """
    rounds = int(drafted.sum()) // len(accepted_per_position)
    return 1.0 + int(accepted_per_position.sum()) / max(rounds, 1)


class _Verifier:
    """The target and its cache."""

    def __init__(self, target: PreTrainedModel, aux_layer_ids: Sequence[int]):
        self.target, self.aux_layer_ids, self.cache = target, aux_layer_ids, RightAlignedCache()
        _, self.layers = text_decoder(target, target.config.get_text_config(decoder=True))

    def forward(self, input_ids: Tensor, rows: Rows, logits_to_keep: int = 0) -> tuple[Tensor, Tensor]:
        """Read S new columns: logits [b, S, V], or at least the last `logits_to_keep`, and aux states [b, S, n*Ht]."""
        columns = input_ids.shape[1]
        captured: dict[int, Tensor] = {}
        with captured_outputs(self.layers, self.aux_layer_ids, captured):
            output = self.target(
                input_ids=input_ids,
                attention_mask=rows.mask(columns),
                position_ids=rows.positions(0, columns),
                use_cache=True,
                logits_to_keep=logits_to_keep,
                **{CACHE_ARGUMENT: self.cache},
            )
        return output.logits, torch.cat([captured[i].to(input_ids.device) for i in self.aux_layer_ids], dim=-1)


class _Drafter:
    """The head, its cache, and where its last verified row of every sequence stands."""

    last_tokens: Tensor  # [b, 1] int64, the token after that row
    states: Tensor  # [b, 1, H], its recurrent state
    logits: Tensor  # [b, 1, D], for the first draft

    def __init__(self, draft: Eagle3DraftModel, num_draft_tokens: int, temperature: float):
        self.draft, self.num_draft_tokens, self.temperature = draft, num_draft_tokens, temperature
        self.cache = RightAlignedCache()

    def observe(self, features: Tensor, following: Tensor, rows: Rows, going: Tensor, kept: Tensor) -> None:
        """Run verified rows with the target's features [b, S, n*Ht] and the tokens [b, S] that follow them.

        Only the first `kept[r]` are verified; they do not see the later ones, which `Rows.advance` drops.
        """
        columns = int(kept.max())
        logits, states = self.draft.draft_step(
            following[:, :columns],
            self.draft.fuse(features[:, :columns]),
            rows.positions(0, columns),
            self.cache,
            rows.mask(columns),
        )
        last = going.to(following.device), kept[going].to(following.device) - 1
        self.last_tokens, self.states, self.logits = (x[last][:, None] for x in (following, states, logits))

    def propose(self, rows: Rows) -> Proposal:
        """Draft K tokens after the last verified row, and forget their keys and values again."""
        logits, states = self.logits, self.states
        target_ids = self.draft.to_target_ids(torch.arange(logits.shape[-1], device=logits.device))
        draft_ids: list[Tensor] = []
        distributions: list[Tensor] = []
        for step in range(self.num_draft_tokens):
            if step > 0:
                token, position = target_ids[draft_ids[-1]][:, None], rows.positions(step - 1, step)
                logits, states = self.draft.draft_step(token, states, position, self.cache, rows.mask(step))
            chosen, distribution = choose(logits[:, 0], self.temperature)
            draft_ids.append(chosen)
            if distribution is not None:
                distributions.append(distribution)
        self.cache.crop(1 - self.num_draft_tokens)
        chain = torch.stack(draft_ids, dim=1)
        probabilities = torch.stack(distributions, dim=1) if distributions else None
        return Proposal(target_ids[chain], chain, target_ids, probabilities)


def _check_arguments(target: PreTrainedModel, num_draft_tokens: int, max_new_tokens: int, temperature: float) -> None:
    for name, value in (("num_draft_tokens", num_draft_tokens), ("max_new_tokens", max_new_tokens)):
        if value < 1:
            raise ValueError(f"`{name}` is {value}: pass at least 1.")
    if temperature < 0:
        raise ValueError(f"`temperature` is {temperature}: pass 0 for greedy decoding or a positive number.")
    layer_types, _ = get_layer_types_and_kwargs(target.config.get_text_config(decoder=True))
    if recurrent := sorted(set(layer_types) - REWINDABLE_LAYER_TYPES):
        raise ValueError(
            f"`target` has layers of type {', '.join(recurrent)}, whose states cannot take rejected tokens back: use "
            "a target whose layers all keep plain keys and values."
        )


def _aux_layer_ids(draft: Eagle3DraftModel) -> list[int]:
    ids = draft.config.eagle_aux_hidden_state_layer_ids
    if ids is None:
        raise ValueError(
            "`draft` does not say which hidden states of the target it reads: set `eagle_aux_hidden_state_layer_ids` "
            "in its config, or load it with `target=`."
        )
    return ids

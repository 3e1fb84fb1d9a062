"""The decoding loop.

In each round the head drafts a chain of K tokens and the target checks them in one forward of K + 1 tokens; then the
head reads the verified rows again with the target's true features, as servers do.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from ..models.eagle3 import Eagle3DraftModel
from .rounds import Drafter, Verifier, speculative_round
from .rows import Continuation, Rows, stop_and_pad_ids
from .static_rounds import StaticRounds, static_rounds_serve
from .verification import choose


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
    verifier, drafter = Verifier(target, _aux_layer_ids(draft)), Drafter(draft, num_draft_tokens, temperature)

    logits, features = verifier.forward(input_ids, rows, logits_to_keep=1)
    token, _ = choose(logits[:, -1], temperature)  # [B]
    following = torch.cat([input_ids[:, 1:], token[:, None]], dim=1)  # [B, T], the token after each column
    kept = torch.full_like(rows.lengths, input_ids.shape[1])  # [B], verified columns of the last forward
    _, going = continuation.append(rows.index, token[:, None], torch.ones_like(kept))
    static = static_rounds_serve(target, draft)
    while len(going):
        columns = int(kept[going].max())  # no row reads more; what it rejected it does not see
        drafter.read(features[:, :columns], following[:, :columns], rows)
        drafter.stand_at(going, kept[going] - 1)
        rows = rows.advance(going, kept, [verifier.cache, drafter.cache])
        if static and StaticRounds(verifier, drafter, rows, max_new_tokens).finish(continuation):
            break
        static = False
        following, accepted, features = speculative_round(verifier, drafter, rows)
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

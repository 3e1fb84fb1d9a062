"""Which drafts the target accepts, and the token that it puts after them."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Proposal:
    """A chain of K drafts per row; sampled ones carry the head's distribution q over its own D tokens."""

    tokens: Tensor  # [b, K] int64 target ids
    draft_ids: Tensor  # [b, K] int64 draft ids
    target_ids: Tensor  # [D] int64, the target id of every draft id
    probabilities: Tensor | None  # [b, K, D] fp32; None when greedy


def choose(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor | None]:
    """An id per row of [b, V] logits, and the distribution [b, V] fp32 that it was sampled from (None when greedy)."""
    if temperature == 0:
        return logits.argmax(dim=-1), None
    probabilities = (logits.float() / temperature).softmax(dim=-1)
    return torch.multinomial(probabilities, 1).squeeze(1), probabilities


def verify(logits: Tensor, proposal: Proposal, temperature: float) -> tuple[Tensor, Tensor]:
    """Accept the longest valid prefix of each chain.

    Args:
        logits: [b, K + 1, V] of the target; column j follows j drafts.
        proposal: greedy drafts are held against the target's argmax, sampled ones against its distribution.
        temperature: what the drafts were sampled with.

    Returns:
        The number of accepted drafts [b] int64, 0..K, and the target's token after them [b] int64.
    """
    if proposal.probabilities is not None:
        return _rejection_sample(logits.float() / temperature, proposal, proposal.probabilities)
    choices = logits.argmax(dim=-1)
    accepted = _prefix_length(choices[:, :-1] == proposal.tokens)
    return accepted, choices.gather(1, accepted[:, None]).squeeze(1)


def _rejection_sample(logits: Tensor, proposal: Proposal, q: Tensor) -> tuple[Tensor, Tensor]:
    """Accept x with probability min(1, p(x) / q(x)); the token after the prefix follows max(p - q, 0), normalised."""
    log_p = logits[:, :-1].gather(-1, proposal.tokens[..., None]).squeeze(-1) - logits[:, :-1].logsumexp(dim=-1)
    log_q = q.gather(-1, proposal.draft_ids[..., None]).squeeze(-1).log()
    accepted = _prefix_length(torch.rand_like(log_p).log() < log_p - log_q)

    row, last_draft = torch.arange(len(accepted), device=accepted.device), q.shape[1] - 1
    p = logits[row, accepted].softmax(dim=-1)  # [b, V]
    rejected_q = q[row, accepted.clamp(max=last_draft)] * (accepted <= last_draft)[:, None]  # [b, D]
    residual = p.index_add(1, proposal.target_ids, -rejected_q).clamp(min=0)
    # Where p equals q up to rounding nothing is left, and a rejection as rare as the rounding may draw from p.
    residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, p)
    return accepted, torch.multinomial(residual, 1).squeeze(1)


def _prefix_length(hits: Tensor) -> Tensor:
    """[b, K] bool -> [b] int64, the hits before the first miss."""
    return hits.long().cumprod(dim=1).sum(dim=1)

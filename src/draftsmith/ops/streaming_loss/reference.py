"""The streaming losses dense and plain, differentiable by autograd: the truth that streaming is compared with."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from ..precision import accumulation_dtype
from .draft_loss import DraftLossSums


def reference_cross_entropy(
    hidden_states: Tensor,  # [..., H]
    weight: Tensor,  # [V, H]
    labels: Tensor,  # [...]
    bias: Tensor | None = None,  # [V]
    token_weights: Tensor | None = None,  # [...]
    ignore_index: int = -100,
    logit_softcap: float | None = None,
    num_items: int | Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    logits = _logits(hidden_states, weight, bias, logit_softcap)  # [..., V]
    losses = cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=ignore_index, reduction="none")
    losses = losses.view(labels.shape)  # [...]
    if token_weights is not None:
        losses = losses * token_weights
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    if num_items is None:
        num_items = (labels != ignore_index).sum()
    return losses.sum() / torch.as_tensor(num_items).clamp(min=1)


def reference_draft_loss(
    states: Sequence[Tensor],  # K x [|R_k|, H]
    weight: Tensor,  # [D, H]
    teacher_states: Tensor,  # [|R_0|, Ht]
    teacher_weight: Tensor,  # [V, Ht]
    row_sets: Sequence[Tensor],  # K x [|R_k|]
    *,
    labels: Tensor | None = None,  # [|R_0|]
    t2d: Tensor | None = None,  # bool [V]
    objective: str = "kl",
    step_weights: Sequence[float] | None = None,  # K
    row_weights: Tensor | None = None,  # [|R_0|]
    num_items: int | None = None,
    teacher_bias: Tensor | None = None,  # [V]
    teacher_softcap: float | None = None,
    overwrite_states: bool = False,  # it may, it need not
) -> tuple[Tensor, DraftLossSums]:
    dtype, device = accumulation_dtype(states[0].dtype), states[0].device
    place = {int(row): index for index, row in enumerate(row_sets[0])}
    if row_weights is None:
        row_weights = torch.ones(len(place), dtype=dtype, device=device)
    mask = (
        torch.ones(len(teacher_weight), dtype=torch.bool, device=device) if t2d is None else t2d[: len(teacher_weight)]
    )
    draft_of = torch.where(mask, mask.cumsum(0) - 1, -1)  # [V]

    teacher_logits = _logits(teacher_states, teacher_weight, teacher_bias, teacher_softcap)  # [|R_0|, V]
    teacher_logits = teacher_logits.clamp(min=-1e30)  # ids masked with -inf have p = 0, and add 0 to a KL
    all_log_p = teacher_logits[:, mask].log_softmax(-1)  # [|R_0|, D]
    all_full_p = teacher_logits.softmax(-1)[:, mask]  # [|R_0|, D]
    best = draft_of[labels if objective == "ce" else teacher_logits.argmax(-1)]  # [|R_0|], draft ids, -1 outside

    sums: dict[str, list[Tensor]] = {name: [] for name in ("loss", "hits", "chain", "alpha")}
    right: dict[int, bool] = {}  # whether row t was right at every step so far
    for step, (state, rows) in enumerate(zip(states, row_sets, strict=True)):
        own = torch.tensor([place[int(row)] for row in rows], dtype=torch.long, device=device)  # [|R_k|]
        teacher = torch.tensor([place[int(row) + step] for row in rows], dtype=torch.long, device=device)  # [|R_k|]
        logits = _logits(state, weight)  # [|R_k|, D]
        log_q = logits.log_softmax(-1)
        alpha = torch.minimum(all_full_p[teacher], log_q.exp()).sum(-1)  # [|R_k|]
        target = best[teacher]
        losses = _pair_losses(objective, all_log_p[teacher], log_q, alpha, target.clamp(min=0))
        hits = (logits.argmax(-1) == target).tolist()
        right = {int(row): hit and right.get(int(row), True) for row, hit in zip(rows, hits, strict=True)}
        sums["loss"].append((torch.where(target >= 0, losses, 0) * row_weights[own]).sum())
        sums["hits"].append(torch.tensor(float(sum(hits))))
        sums["chain"].append(torch.tensor(float(sum(right.values()))))
        sums["alpha"].append(alpha.sum())

    loss = sum(
        step_sum if step_weights is None else step_sum * step_weights[k] for k, step_sum in enumerate(sums["loss"])
    )
    count = row_weights.sum() if num_items is None else torch.tensor(num_items)
    stacked = {name: torch.stack(values).detach() for name, values in sums.items()}
    rows_per_step = torch.tensor([float(len(rows)) for rows in row_sets])
    alphas = None if objective == "ce" else stacked.pop("alpha")
    return loss / count.clamp(min=1), DraftLossSums(
        loss=stacked["loss"], hits=stacked["hits"], chain=stacked["chain"], rows=rows_per_step, alpha=alphas
    )


def _logits(states: Tensor, weight: Tensor, bias: Tensor | None = None, softcap: float | None = None) -> Tensor:
    """The projection in `states`' dtype, everything after it in fp32 or fp64."""
    logits = linear(states, weight.to(states.dtype), None if bias is None else bias.to(states.dtype))
    logits = logits.to(accumulation_dtype(states.dtype))
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _pair_losses(objective: str, log_p: Tensor, log_q: Tensor, alpha: Tensor, label: Tensor) -> Tensor:
    """[n] from distributions [n, D], alpha [n] and draft labels [n]."""
    if objective == "ce":
        return -log_q.gather(1, label[:, None])[:, 0]
    if objective == "tv":
        return 1 - alpha
    if objective == "lk_alpha":
        return torch.where(alpha > 0, -torch.where(alpha > 0, alpha, 1).log(), 0)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    if objective == "kl":
        return kl
    share = torch.exp(-3 * alpha.detach())
    return share * kl + (1 - share) * (1 - alpha)

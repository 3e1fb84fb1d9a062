"""Logits of one chunk -> per-row loss, hit and alpha, with the gradient written over the logits.

One function per family, `cross_entropy_rows` and `teacher_rows`, in plain PyTorch: a fused kernel replaces a whole
function. Both work through small blocks of rows, so that their fp32 temporaries stay far below the chunk's logits.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..precision import accumulation_dtype


MASKED_LOGIT = -1e30  # of a teacher: e to it is 0, and sums of it stay finite
BLOCK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 26}  # a CPU block stays in its caches, a CUDA block fills the device


class RowLosses(NamedTuple):
    loss: Tensor  # [n]
    hit: Tensor  # [n] bool
    alpha: Tensor | None  # [n]


class DraftVocabulary(NamedTuple):
    """The part of the target's vocabulary that the draft predicts."""

    target_ids: Tensor  # [D], ascending
    draft_ids: Tensor  # [V], of each target id, -1 outside


def _blocks(logits: Tensor) -> Iterator[slice]:
    rows = max(1, BLOCK_ELEMENTS[logits.device.type] // logits.shape[1])
    return (slice(start, start + rows) for start in range(0, len(logits), rows))


def softcap_(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap), in place."""
    return logits.div_(cap).tanh_().mul_(cap)


def cross_entropy_rows(
    logits: Tensor,  # [n, V], overwritten (with the gradient if `coefficient` is given)
    labels: Tensor,  # [n], in [0, V)
    coefficient: Tensor | None,  # [n], the loss's factor in the gradient; None: no gradient
    softcap: float | None = None,
) -> RowLosses:
    dtype = accumulation_dtype(logits.dtype)
    loss = logits.new_empty(len(logits), dtype=dtype)
    hit = torch.empty(len(logits), dtype=torch.bool, device=logits.device)
    for block in _blocks(logits):
        x = logits[block].to(dtype)  # fp32 logits are worked on in place
        label = labels[block, None]
        if softcap is not None:
            slope = 1 - (softcap_(x, softcap) / softcap).square_()
        highest, best = x.max(-1, keepdim=True)
        hit[block] = (best == label)[:, 0]
        label_logit = x.gather(1, label)
        total = x.sub_(highest).exp_().sum(-1, keepdim=True)
        loss[block] = (total.log() + highest - label_logit)[:, 0]
        if coefficient is None:
            continue
        factor = coefficient[block, None]
        x.mul_(factor / total).scatter_add_(1, label, -factor)
        if softcap is not None:
            x.mul_(slope)
        if x.dtype != logits.dtype:
            logits[block] = x
    return RowLosses(loss, hit, None)


class Slopes(NamedTuple):
    """A per-row loss and its derivatives; None is zero."""

    loss: Tensor
    by_kl: Tensor | None
    by_alpha: Tensor | None


def _lk_alpha(kl: Tensor, alpha: Tensor) -> Slopes:
    some = alpha > 0
    safe = alpha.where(some, 1)
    # Of a smaller number the reciprocal would be infinite.
    return Slopes(-safe.log(), None, -safe.clamp(min=torch.finfo(safe.dtype).tiny).reciprocal() * some)


def _lk_lambda(kl: Tensor, alpha: Tensor) -> Slopes:
    share = torch.exp(-3 * alpha)
    return Slopes(share * kl + (1 - share) * (1 - alpha), share, share - 1)


TEACHER_OBJECTIVES: dict[str, Callable[[Tensor, Tensor], Slopes]] = {
    "kl": lambda kl, alpha: Slopes(kl, torch.ones_like(kl), None),
    "tv": lambda kl, alpha: Slopes(1 - alpha, None, torch.full_like(alpha, -1)),
    "lk_alpha": _lk_alpha,
    "lk_lambda": _lk_lambda,
}
OBJECTIVES = (*TEACHER_OBJECTIVES, "ce")


class _TeacherRows(NamedTuple):
    logits: Tensor  # [C, D], the draft vocabulary's, before the soft cap
    lse: Tensor  # [C, 1], over the draft vocabulary
    share: Tensor  # [C, 1], the draft vocabulary's part of the full probability
    best: Tensor  # [C], draft id of the full vocabulary's argmax, -1 outside


def _capped(logits: Tensor, softcap: float | None, dtype: torch.dtype) -> Tensor:
    """A teacher's, in `dtype`; never -inf, which times a probability of 0 would be NaN."""
    logits = logits.to(dtype)
    logits = logits if softcap is None else softcap_(logits.clone(), softcap)
    return logits.clamp(min=MASKED_LOGIT)


def _summarise(logits: Tensor, vocabulary: DraftVocabulary | None, softcap: float | None) -> _TeacherRows:
    dtype = accumulation_dtype(logits.dtype)
    restricted = logits if vocabulary is None else logits.new_empty(len(logits), len(vocabulary.target_ids))
    lse, full_lse = (logits.new_empty(len(logits), 1, dtype=dtype) for _ in range(2))
    best = torch.empty(len(logits), dtype=torch.long, device=logits.device)
    for block in _blocks(logits):
        x = _capped(logits[block], softcap, dtype)
        best[block] = x.argmax(-1)
        full_lse[block] = x.logsumexp(-1, keepdim=True)
        if vocabulary is not None:
            restricted[block] = logits[block].index_select(1, vocabulary.target_ids)
            lse[block] = _capped(restricted[block], softcap, dtype).logsumexp(-1, keepdim=True)
    if vocabulary is None:
        lse = full_lse
    else:
        best = vocabulary.draft_ids[best]
    return _TeacherRows(restricted, lse, (lse - full_lse).exp_(), best)


def teacher_rows(
    logits: Tensor,  # [n, D], overwritten with the gradient if `coefficient` is given
    teacher_logits: Tensor,  # [C, V]
    students: Tensor,  # [C, K], the row of `logits` of each teacher row and step, -1 where there is none
    coefficient: Tensor | None,  # [n], the loss's factor in the gradient; None: no gradient
    *,
    objective: str,
    vocabulary: DraftVocabulary | None,
    teacher_softcap: float | None,
) -> RowLosses:
    dtype = accumulation_dtype(logits.dtype)
    entries = torch.empty(len(logits), dtype=torch.long, device=logits.device)  # the teacher row of each student row
    taught = students >= 0
    entries[students[taught]] = taught.nonzero()[:, 0]
    teacher = _summarise(teacher_logits, vocabulary, teacher_softcap)
    best = teacher.best[entries]  # [n]
    loss, alpha = (logits.new_empty(len(logits), dtype=dtype) for _ in range(2))
    hit = torch.empty(len(logits), dtype=torch.bool, device=logits.device)
    for block in _blocks(logits):
        x, entry, inside = logits[block], entries[block], best[block] >= 0
        hit[block] = x.to(dtype).argmax(-1) == best[block]
        log_q = x.log_softmax(-1, dtype=dtype)
        log_p = _capped(teacher.logits[entry], teacher_softcap, dtype) - teacher.lse[entry]
        p, q = log_p.exp(), log_q.exp()
        kl = torch.linalg.vecdot(p, log_p.sub_(log_q))
        full_p = torch.mul(p, teacher.share[entry], out=log_p)
        alpha[block] = torch.minimum(full_p, q, out=log_q).sum(-1)
        slopes = TEACHER_OBJECTIVES[objective](kl, alpha[block])
        loss[block] = slopes.loss * inside
        if coefficient is not None:
            logits[block] = _logit_gradient(p, q, full_p, slopes, (coefficient[block] * inside)[:, None])
    return RowLosses(loss, hit, alpha)


def _logit_gradient(p: Tensor, q: Tensor, full_p: Tensor, slopes: Slopes, coefficient: Tensor) -> Tensor:
    """[n, D], with d kl = q - p and d alpha = q * (b - sum(b * q)), b = 1 where q < full_p; overwrites `p` and `q`."""
    if slopes.by_kl is not None:
        p = torch.sub(q, p, out=p).mul_(slopes.by_kl[:, None] * coefficient)
    if slopes.by_alpha is None:
        return p
    below = (q < full_p) * q
    by_alpha = below.sub_(q.mul_(below.sum(-1, keepdim=True))).mul_(slopes.by_alpha[:, None] * coefficient)
    return by_alpha if slopes.by_kl is None else by_alpha.add_(p)


def scaled(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient * scale, a scalar on its device, in `dtype`; in place where that is its own."""
    return gradient.mul_(scale).to(dtype)

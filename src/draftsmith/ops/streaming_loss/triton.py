"""`rows.py` as one kernel per family: logits are read two or three times and their gradient written over them once.

A program of `cross_entropy_rows` takes one row. A program of `teacher_rows` takes one teacher row with all the student
rows that it teaches, [K, BLOCK] at a time, so a teacher tile is loaded once for all of them; with a reduced draft
vocabulary it gathers the teacher's logits in place. Arithmetic is fp32, row offsets are int64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rows import DraftVocabulary, RowLosses


BLOCK = 8192  # elements per tile
OBJECTIVE_CODES = {"kl": 0, "tv": 1, "lk_alpha": 2, "lk_lambda": 3}


@triton.jit
def _capped(logits, cap, HAS_CAP: tl.constexpr):
    """cap * tanh(logits / cap)"""
    if HAS_CAP:
        logits = cap - 2 * cap / (tl.exp(2 * logits / cap) + 1)
    return logits


@triton.jit
def _row_summary(row, size, cap, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr):
    """log-sum-exp and argmax of a whole row."""
    peak, total, best = -float("inf"), 0.0, 0
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(row + columns, mask=columns < size, other=0.0).to(tl.float32)
        x = tl.where(columns < size, _capped(x, cap, HAS_CAP), -float("inf"))
        highest, place = tl.max(x, 0, return_indices=True)
        best = tl.where(highest > peak, start + place, best)  # the first of equals, as torch.argmax
        new_peak = tl.maximum(peak, highest)
        total = total * tl.exp(peak - new_peak) + tl.sum(tl.exp(x - new_peak))
        peak = new_peak
    return peak + tl.log(total), best


@triton.jit
def _cross_entropy_kernel(
    logits, labels, coefficient, losses, hits, vocabulary, cap,
    HAS_GRADIENT: tl.constexpr, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    logits += row.to(tl.int64) * vocabulary
    label = tl.load(labels + row)
    label_logit = _capped(tl.load(logits + label).to(tl.float32), cap, HAS_CAP)
    lse, best = _row_summary(logits, vocabulary, cap, HAS_CAP, BLOCK)
    tl.store(losses + row, lse - label_logit)
    tl.store(hits + row, best == label)
    if HAS_GRADIENT:
        factor = tl.load(coefficient + row)
        for start in range(0, vocabulary, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = _capped(tl.load(logits + columns, mask=columns < vocabulary, other=0.0).to(tl.float32), cap, HAS_CAP)
            gradient = (tl.exp(x - lse) - tl.where(columns == label, 1.0, 0.0)) * factor
            if HAS_CAP:
                gradient *= 1 - (x / cap) * (x / cap)
            tl.store(logits + columns, gradient.to(logits.dtype.element_ty), mask=columns < vocabulary)


@triton.jit
def _teacher_tile(
    teacher, target_ids, columns, size, cap, HAS_CAP: tl.constexpr, HAS_VOCABULARY: tl.constexpr
):  # fmt: skip
    """[1, BLOCK] teacher logits of the draft's columns."""
    inside = columns < size
    if HAS_VOCABULARY:
        ids = tl.load(target_ids + columns, mask=inside, other=0)
        x = tl.load(teacher + ids, mask=inside, other=0.0)
    else:
        x = tl.load(teacher + columns, mask=inside, other=0.0)
    return tl.where(inside, _capped(x.to(tl.float32), cap, HAS_CAP), -float("inf"))[None, :]


@triton.jit
def _probabilities(
    student, teacher, target_ids, columns, taught, lse, teacher_lse, draft_size, cap,
    HAS_CAP: tl.constexpr, HAS_VOCABULARY: tl.constexpr,
):  # fmt: skip
    """The students' [K, BLOCK], the teacher's over the draft vocabulary [1, BLOCK], and which elements exist."""
    mask = taught[:, None] & (columns < draft_size)[None, :]
    x = tl.load(student + columns[None, :], mask=mask, other=-float("inf")).to(tl.float32)
    t = _teacher_tile(teacher, target_ids, columns, draft_size, cap, HAS_CAP, HAS_VOCABULARY)
    return tl.exp(x - lse[:, None]), tl.exp(t - teacher_lse), mask


@triton.jit
def _slopes(kl, alpha, OBJECTIVE: tl.constexpr):
    """The loss and its derivatives by KL and by alpha; `rows.TEACHER_OBJECTIVES`."""
    zero = tl.zeros_like(kl)
    if OBJECTIVE == 0:
        return kl, zero + 1, zero
    if OBJECTIVE == 1:
        return 1 - alpha, zero, zero - 1
    if OBJECTIVE == 2:
        some = alpha > 0
        safe = tl.where(some, alpha, 1.0)
        return -tl.log(safe), zero, tl.where(some, -1 / safe, 0.0)
    share = tl.exp(-3 * alpha)
    return share * kl + (1 - share) * (1 - alpha), share, share - 1


@triton.jit
def _teacher_kernel(
    logits, teacher_logits, students, coefficient, target_ids, draft_ids, losses, hits, alphas,
    count, draft_size, target_size, cap,
    OBJECTIVE: tl.constexpr, HAS_GRADIENT: tl.constexpr, HAS_CAP: tl.constexpr, HAS_VOCABULARY: tl.constexpr,
    K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0)
    steps = tl.arange(0, K)
    rows = tl.load(students + entry * count + steps, mask=steps < count, other=-1)  # [K], -1 where a step has none
    taught = rows >= 0
    if tl.max(taught.to(tl.int32)) == 0:
        return
    teacher = teacher_logits + entry.to(tl.int64) * target_size
    student = logits + tl.where(taught, rows, 0).to(tl.int64)[:, None] * draft_size  # [K, 1]
    full_lse, best = _row_summary(teacher, target_size, cap, HAS_CAP, K * BLOCK)
    if HAS_VOCABULARY:
        best = tl.load(draft_ids + best)  # -1 outside the draft vocabulary

    peak = tl.full([K], -float("inf"), tl.float32)
    total, chosen = tl.zeros([K], tl.float32), tl.zeros([K], tl.int32)
    teacher_peak, teacher_total, cross = -float("inf"), 0.0, tl.zeros([K], tl.float32)
    for start in range(0, draft_size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = taught[:, None] & (columns < draft_size)[None, :]
        x = tl.load(student + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        x = tl.where((columns < draft_size)[None, :], x, -float("inf"))
        highest, place = tl.max(x, 1, return_indices=True)
        chosen = tl.where(highest > peak, start + place, chosen)
        new_peak = tl.maximum(peak, highest)
        total = total * tl.exp(peak - new_peak) + tl.sum(tl.exp(x - new_peak[:, None]), 1)
        peak = new_peak
        t = _teacher_tile(teacher, target_ids, columns, draft_size, cap, HAS_CAP, HAS_VOCABULARY)
        new_teacher_peak = tl.maximum(teacher_peak, tl.max(t))
        weights = tl.exp(t - new_teacher_peak)  # [1, BLOCK]
        correction = tl.exp(teacher_peak - new_teacher_peak)
        teacher_total = teacher_total * correction + tl.sum(weights)
        # sum p (log p - log q) = sum p (t - x) - lse_p + lse_q
        cross = cross * correction + tl.sum(tl.where(weights > 0, weights * (t - x), 0.0), 1)
        teacher_peak = new_teacher_peak
    lse = peak + tl.log(total)
    teacher_lse = teacher_peak + tl.log(teacher_total)
    kl = cross / teacher_total - teacher_lse + lse
    share = tl.exp(teacher_lse - full_lse)  # of the full probability, that falls on the draft vocabulary

    alpha, below = tl.zeros([K], tl.float32), tl.zeros([K], tl.float32)
    factor = tl.zeros([K], tl.float32)
    if HAS_GRADIENT:
        factor = tl.load(coefficient + rows, mask=taught, other=0.0) * tl.where(best >= 0, 1.0, 0.0)
    for start in range(0, draft_size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        q, p, mask = _probabilities(
            student, teacher, target_ids, columns, taught, lse, teacher_lse, draft_size, cap, HAS_CAP, HAS_VOCABULARY
        )
        alpha += tl.sum(tl.minimum(p * share, q), 1)
        below += tl.sum(tl.where(q < p * share, q, 0.0), 1)
        if HAS_GRADIENT and OBJECTIVE == 0:  # KL alone needs nothing that this pass is still summing
            tl.store(student + columns[None, :], ((q - p) * factor[:, None]).to(logits.dtype.element_ty), mask=mask)
    loss, by_kl, by_alpha = _slopes(kl, alpha, OBJECTIVE)
    tl.store(losses + rows, tl.where(best >= 0, loss, 0.0), mask=taught)
    tl.store(hits + rows, chosen == best, mask=taught)
    tl.store(alphas + rows, alpha, mask=taught)
    if HAS_GRADIENT and OBJECTIVE != 0:
        for start in range(0, draft_size, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            q, p, mask = _probabilities(
                student,
                teacher,
                target_ids,
                columns,
                taught,
                lse,
                teacher_lse,
                draft_size,
                cap,
                HAS_CAP,
                HAS_VOCABULARY,
            )
            # d kl = q - p; d alpha = q (b - sum(b q)), b = 1 where q < p_full
            by_logit = tl.where(q < p * share, q, 0.0) - q * below[:, None]
            gradient = (q - p) * by_kl[:, None] + by_logit * by_alpha[:, None]
            tl.store(student + columns[None, :], (gradient * factor[:, None]).to(logits.dtype.element_ty), mask=mask)


def cross_entropy_rows(
    logits: Tensor, labels: Tensor, coefficient: Tensor | None, softcap: float | None = None
) -> RowLosses:
    """`rows.cross_entropy_rows`."""
    count, vocabulary = logits.shape
    loss = torch.empty(count, dtype=torch.float32, device=logits.device)
    hit = torch.empty(count, dtype=torch.bool, device=logits.device)
    if count > 0:
        with torch.cuda.device_of(logits):  # kernels are launched on the current device
            _cross_entropy_kernel[(count,)](
                logits, labels, coefficient, loss, hit, vocabulary, softcap or 1.0,
                HAS_GRADIENT=coefficient is not None, HAS_CAP=softcap is not None,
                BLOCK=_block(vocabulary, 1), num_warps=8,
            )  # fmt: skip
    return RowLosses(loss, hit, None)


def teacher_rows(
    logits: Tensor,
    teacher_logits: Tensor,
    students: Tensor,
    coefficient: Tensor | None,
    *,
    objective: str,
    vocabulary: DraftVocabulary | None,
    teacher_softcap: float | None,
) -> RowLosses:
    """`rows.teacher_rows`."""
    count, draft_size = logits.shape
    loss, alpha = (torch.empty(count, dtype=torch.float32, device=logits.device) for _ in range(2))
    hit = torch.empty(count, dtype=torch.bool, device=logits.device)
    teachers, steps = students.shape
    padded_steps = triton.next_power_of_2(steps)
    target_ids, draft_ids = (None, None) if vocabulary is None else vocabulary
    if count > 0:
        with torch.cuda.device_of(logits):
            _teacher_kernel[(teachers,)](
                logits, teacher_logits, students, coefficient, target_ids, draft_ids, loss, hit, alpha,
                steps, draft_size, teacher_logits.shape[1], teacher_softcap or 1.0,
                OBJECTIVE=OBJECTIVE_CODES[objective], HAS_GRADIENT=coefficient is not None,
                HAS_CAP=teacher_softcap is not None, HAS_VOCABULARY=vocabulary is not None,
                K=padded_steps, BLOCK=_block(draft_size, padded_steps), num_warps=8,
            )  # fmt: skip
    return RowLosses(loss, hit, alpha)


def _block(vocabulary: int, rows: int) -> int:
    return max(16, min(BLOCK // rows, triton.next_power_of_2(vocabulary)))

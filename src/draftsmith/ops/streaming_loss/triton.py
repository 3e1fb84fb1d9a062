"""`rows.py` as one kernel per family: logits are read two or three times, their gradient is written over them once.

A program of `cross_entropy_rows` takes one row. A program of `teacher_rows` takes one teacher row with all the student
rows that it teaches, [K, BLOCK] at a time, so a teacher tile is loaded once for all of them; with a reduced draft
vocabulary it gathers the teacher's logits in place. Arithmetic is fp32, row offsets are int64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import rows as rows_in_torch
from .rows import DraftVocabulary, RowLosses


BLOCK = 2048  # logits per tile, those of all rows of a program
WARP_COLUMNS = 256
STAGES = 3  # tiles on their way
GROUP = tl.constexpr(8)  # neighbouring logits in one thread: 16 bytes of bf16
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234e38)
TINY = tl.constexpr(1.1754944e-38)  # the least normal number
MASKED_LOGIT = tl.constexpr(rows_in_torch.MASKED_LOGIT)
OBJECTIVE_CODES = {"kl": 0, "tv": 1, "lk_alpha": 2, "lk_lambda": 3}


@triton.jit
def _exp(x):
    return tl.exp2(x * LOG2E)  # `tl.exp` spends four more instructions on denormal results


@triton.jit
def _capped(logits, cap, HAS_CAP: tl.constexpr):
    """cap * tanh(logits / cap)"""
    if HAS_CAP:
        logits = cap - 2 * cap / (_exp(2 * logits / cap) + 1)
    return logits


@triton.jit
def _columns(tile, BLOCK: tl.constexpr):
    """[1, L, GROUP] of a tile; sums and maxima over the last axis stay in a thread."""
    groups = tile * BLOCK + tl.arange(0, BLOCK // GROUP) * GROUP
    return groups[None, :, None] + tl.arange(0, GROUP)[None, None, :]


@triton.jit
def _load(row, columns, size, MASKED: tl.constexpr):
    """fp32 logits, -inf where a column does not exist, which only the last tile asks for."""
    if MASKED:
        return tl.load(row + columns, mask=columns < size, other=-float("inf")).to(tl.float32)
    return tl.load(row + columns).to(tl.float32)


@triton.jit
def _no_tiles(ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Peak, total and best tile of groups that have seen nothing; a finite peak, for -inf to be subtracted from."""
    peak = tl.full([ROWS, BLOCK // GROUP], LOWEST, tl.float32)
    return peak, tl.zeros_like(peak), tl.zeros([ROWS, BLOCK // GROUP], tl.int32)


@triton.jit
def _add_tile(x, tile, peak, total, best):
    """One more tile [R, L, GROUP] in each group's own maximum, its tile, and the sum of exp(x - maximum).

    Groups meet only after the last tile. Returns also what earlier terms are corrected by, and this tile's weights.
    """
    highest = tl.max(x, 2)
    new_peak = tl.maximum(peak, highest)
    correction = _exp(peak - new_peak)
    weights = _exp(x - new_peak[:, :, None])
    total = total * correction + tl.sum(weights, 2)
    return new_peak, total, tl.where(highest > peak, tile, best), correction, weights


@triton.jit
def _across_groups(row, size, cap, peak, total, best, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr):
    """Of each row: the highest logit, sum of exp(logit - highest), the first column with it, exp(peaks - highest)."""
    highest = tl.max(peak, 1)
    groups = best * BLOCK + (tl.arange(0, BLOCK // GROUP) * GROUP)[None, :]
    first = tl.min(tl.where(peak == highest[:, None], groups, size - 1), 1)
    columns = first[:, None] + tl.arange(0, GROUP)[None, :]
    x = tl.load(row + columns, mask=columns < size, other=-float("inf")).to(tl.float32)
    x = tl.where(columns < size, _capped(x, cap, HAS_CAP), -float("inf"))
    scale = _exp(peak - highest[:, None])
    return highest, tl.sum(total * scale, 1), tl.minimum(first + tl.argmax(x, 1), size - 1), scale


@triton.jit
def _row_summary(row, size, cap, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Highest logit, sum of exp(logit - highest) and argmax, [1] each, of a whole row given by its pointer [1, 1]."""
    peak, total, best = _no_tiles(1, BLOCK)
    tiles = size // BLOCK
    for tile in tl.range(0, tiles, num_stages=STAGES):
        x = _load(row[:, :, None], _columns(tile, BLOCK), size, False)
        peak, total, best, _, _ = _add_tile(_capped(x, cap, HAS_CAP), tile, peak, total, best)
    if tiles * BLOCK < size:
        columns = _columns(tiles, BLOCK)
        x = _capped(_load(row[:, :, None], columns, size, True), cap, HAS_CAP)
        x = tl.where(columns < size, x, -float("inf"))
        peak, total, best, _, _ = _add_tile(x, tiles, peak, total, best)
    highest, total, first, _ = _across_groups(row, size, cap, peak, total, best, HAS_CAP, BLOCK)
    return highest, total, first


@triton.jit
def _write_hard_gradient(
    logits, tile, size, label, highest, per_total, factor, cap,
    HAS_CAP: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    columns = _columns(tile, BLOCK)
    x = _capped(_load(logits, columns, size, MASKED), cap, HAS_CAP)
    probability = _exp(x - highest[:, None, None]) * per_total[:, None, None]
    gradient = (probability - tl.where(columns == label, 1.0, 0.0)) * factor
    if HAS_CAP:
        gradient *= 1 - (x / cap) * (x / cap)
    gradient = gradient.to(logits.dtype.element_ty)
    tl.store(logits + columns, gradient, mask=(columns < size) if MASKED else None)


@triton.jit
def _cross_entropy_kernel(
    logits, labels, coefficient, losses, hits, vocabulary, cap,
    HAS_GRADIENT: tl.constexpr, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    logits += row.to(tl.int64) * vocabulary
    label = tl.load(labels + row)
    label_logit = _capped(tl.load(logits + label).to(tl.float32), cap, HAS_CAP)
    pointer = logits + tl.zeros([1, 1], tl.int32)
    highest, total, best = _row_summary(pointer, vocabulary, cap, HAS_CAP, BLOCK, STAGES)
    one = row + tl.arange(0, 1)
    tl.store(losses + one, tl.log(total) - (label_logit - highest))
    tl.store(hits + one, best == label)
    if HAS_GRADIENT:
        factor, per_total = tl.load(coefficient + row), 1 / total
        tiles = vocabulary // BLOCK  # backwards: the last ones are still in the cache
        if tiles * BLOCK < vocabulary:
            _write_hard_gradient(
                logits, tiles, vocabulary, label, highest, per_total, factor, cap, HAS_CAP, BLOCK, True
            )
        for tile in tl.range(0, tiles, num_stages=STAGES):
            _write_hard_gradient(
                logits, tiles - 1 - tile, vocabulary, label, highest, per_total, factor, cap, HAS_CAP, BLOCK, False
            )


@triton.jit
def _teacher_tile(
    teacher, target_ids, columns, size, cap, HAS_CAP: tl.constexpr, HAS_VOCABULARY: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """[1, L, GROUP] teacher logits of the draft's columns; never -inf, which times a probability of 0 would be NaN."""
    if HAS_VOCABULARY:
        columns_in_target = tl.load(target_ids + columns, mask=(columns < size) if MASKED else None)
        x = tl.load(teacher + columns_in_target, mask=(columns < size) if MASKED else None).to(tl.float32)
    else:
        x = _load(teacher, columns, size, MASKED)
    x = _capped(x, cap, HAS_CAP)
    if MASKED:
        x = tl.where(columns < size, x, -float("inf"))
    return tl.where(x < MASKED_LOGIT, MASKED_LOGIT, x)  # NaN stays


@triton.jit
def _compare_tile(
    student, teacher, target_ids, tile, size, cap,
    peak, total, chosen, teacher_peak, teacher_total, teacher_best, cross,
    HAS_CAP: tl.constexpr, HAS_VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One more tile in the summaries of students and teacher, and in sum exp(t - teacher's peak) * (t - x)."""
    columns = _columns(tile, BLOCK)
    x = _load(student, columns, size, MASKED)
    peak, total, chosen, _, _ = _add_tile(x, tile, peak, total, chosen)
    t = _teacher_tile(teacher, target_ids, columns, size, cap, HAS_CAP, HAS_VOCABULARY, MASKED)
    teacher_peak, teacher_total, teacher_best, correction, weights = _add_tile(
        t, tile, teacher_peak, teacher_total, teacher_best
    )
    terms = weights * (t - x)
    if MASKED:
        terms = tl.where(columns < size, terms, 0.0)
    return peak, total, chosen, teacher_peak, teacher_total, teacher_best, cross * correction + tl.sum(terms, 2)


@triton.jit
def _probabilities(
    student, teacher, target_ids, columns, scales, size, cap,
    HAS_CAP: tl.constexpr, HAS_VOCABULARY: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The students' [K, L, GROUP] and the teacher's [1, L, GROUP] over the draft vocabulary.

    `scales` are the students' highest logits and 1 / sum of exp(logit - highest), then the teacher's.
    """
    x = _load(student, columns, size, MASKED)
    t = _teacher_tile(teacher, target_ids, columns, size, cap, HAS_CAP, HAS_VOCABULARY, MASKED)
    q = _exp(x - scales[0][:, None, None]) * scales[1][:, None, None]
    return q, _exp(t - scales[2][:, None, None]) * scales[3][:, None, None]


@triton.jit
def _agreement_tile(
    student, teacher, target_ids, tile, size, cap, taught, scales, share, factor, shared, below,
    WRITES_KL: tl.constexpr, NEEDS_BELOW: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One more tile in sum min(p, q) and sum of q < p, p full; KL alone needs neither and writes its gradient here."""
    columns = _columns(tile, BLOCK)
    q, p = _probabilities(student, teacher, target_ids, columns, scales, size, cap, HAS_CAP, HAS_VOCABULARY, MASKED)
    full_p = p * share
    shared += tl.sum(tl.minimum(full_p, q), 2)
    if NEEDS_BELOW:
        below += tl.sum(tl.where(q < full_p, q, 0.0), 2)
    if WRITES_KL:
        gradient = ((q - p) * factor).to(student.dtype.element_ty)
        tl.store(student + columns, gradient, mask=(taught & (columns < size)) if MASKED else taught)
    return shared, below


@triton.jit
def _write_soft_gradient(
    student, teacher, target_ids, tile, size, cap, taught, scales, share, below, by_kl, by_alpha,
    HAS_CAP: tl.constexpr, HAS_VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """d kl = q - p; d alpha = q (b - sum(b q)), b = 1 where q < p, full"""
    columns = _columns(tile, BLOCK)
    q, p = _probabilities(student, teacher, target_ids, columns, scales, size, cap, HAS_CAP, HAS_VOCABULARY, MASKED)
    gradient = (q - p) * by_kl + (tl.where(q < p * share, q, 0.0) - q * below) * by_alpha
    mask = (taught & (columns < size)) if MASKED else taught
    tl.store(student + columns, gradient.to(student.dtype.element_ty), mask=mask)


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
        return -tl.log(safe), zero, tl.where(some, -1 / tl.maximum(safe, TINY), 0.0)
    share = tl.exp(-3 * alpha)
    return share * kl + (1 - share) * (1 - alpha), share, share - 1


@triton.jit
def _teacher_kernel(
    logits, teacher_logits, students, coefficient, target_ids, draft_ids, losses, hits, alphas,
    count, draft_size, target_size, cap,
    OBJECTIVE: tl.constexpr, HAS_GRADIENT: tl.constexpr, HAS_CAP: tl.constexpr, HAS_VOCABULARY: tl.constexpr,
    K: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0)
    steps = tl.arange(0, K)
    rows = tl.load(students + entry * count + steps, mask=steps < count, other=-1)  # [K], -1 where a step has none
    exists = rows >= 0
    if tl.max(exists.to(tl.int32)) == 0:
        return
    taught = exists[:, None, None]
    teacher = teacher_logits + entry.to(tl.int64) * target_size
    student_rows = logits + tl.where(exists, rows, 0).to(tl.int64)[:, None] * draft_size  # [K, 1]
    student = student_rows[:, :, None]
    tiles = draft_size // BLOCK
    has_rest = tiles * BLOCK < draft_size

    peak, total, chosen = _no_tiles(K, BLOCK)
    teacher_peak, teacher_total, teacher_best = _no_tiles(1, BLOCK)
    cross = tl.zeros([K, BLOCK // GROUP], tl.float32)
    for tile in tl.range(0, tiles, num_stages=STAGES):
        peak, total, chosen, teacher_peak, teacher_total, teacher_best, cross = _compare_tile(
            student, teacher, target_ids, tile, draft_size, cap,
            peak, total, chosen, teacher_peak, teacher_total, teacher_best, cross,
            HAS_CAP, HAS_VOCABULARY, BLOCK, False,
        )  # fmt: skip
    if has_rest:
        peak, total, chosen, teacher_peak, teacher_total, teacher_best, cross = _compare_tile(
            student, teacher, target_ids, tiles, draft_size, cap,
            peak, total, chosen, teacher_peak, teacher_total, teacher_best, cross,
            HAS_CAP, HAS_VOCABULARY, BLOCK, True,
        )  # fmt: skip
    teacher_row = teacher + tl.zeros([1, 1], tl.int32)
    highest, total, choice, _ = _across_groups(student_rows, draft_size, 1.0, peak, total, chosen, False, BLOCK)  # [K]
    if HAS_VOCABULARY:
        teacher_highest = tl.max(teacher_peak, 1)
        scale = _exp(teacher_peak - teacher_highest[:, None])
        mass = tl.sum(teacher_total * scale, 1)
        full_highest, full_mass, best = _row_summary(teacher_row, target_size, cap, HAS_CAP, K * BLOCK, STAGES)
        best = tl.load(draft_ids + best)  # -1 outside the draft vocabulary
        share = mass / full_mass * _exp(teacher_highest - full_highest)
    else:
        teacher_highest, mass, best, scale = _across_groups(
            teacher_row, draft_size, cap, teacher_peak, teacher_total, teacher_best, HAS_CAP, BLOCK
        )
        share = tl.full([1], 1.0, tl.float32)
    share = share[:, None, None]  # of the full probability, on the draft vocabulary
    # sum p (log p - log q) = sum p (t - x) - lse_p + lse_q
    kl = tl.sum(cross * scale, 1) / mass + (highest - teacher_highest) + (tl.log(total) - tl.log(mass))
    scales = (highest, 1 / total, teacher_highest, 1 / mass)
    supervised = best >= 0

    factor = tl.zeros([K], tl.float32)
    if HAS_GRADIENT:
        factor = tl.load(coefficient + rows, mask=exists, other=0.0) * tl.where(supervised, 1.0, 0.0)
    shared, below = tl.zeros_like(cross), tl.zeros_like(cross)
    WRITES_KL: tl.constexpr = HAS_GRADIENT and OBJECTIVE == 0
    NEEDS_BELOW: tl.constexpr = HAS_GRADIENT and OBJECTIVE != 0
    if has_rest:
        shared, below = _agreement_tile(
            student, teacher, target_ids, tiles, draft_size, cap, taught, scales, share,
            factor[:, None, None], shared, below, WRITES_KL, NEEDS_BELOW, HAS_CAP, HAS_VOCABULARY, BLOCK, True,
        )  # fmt: skip
    for tile in tl.range(0, tiles, num_stages=STAGES):  # backwards: the last ones are still in the cache
        shared, below = _agreement_tile(
            student, teacher, target_ids, tiles - 1 - tile, draft_size, cap, taught, scales, share,
            factor[:, None, None], shared, below, WRITES_KL, NEEDS_BELOW, HAS_CAP, HAS_VOCABULARY, BLOCK, False,
        )  # fmt: skip
    alpha = tl.sum(shared, 1)
    loss, by_kl, by_alpha = _slopes(kl, alpha, OBJECTIVE)
    tl.store(losses + rows, loss * supervised.to(tl.float32), mask=exists)  # NaN stays
    tl.store(hits + rows, choice == best, mask=exists)
    tl.store(alphas + rows, alpha, mask=exists)
    if NEEDS_BELOW:
        below_sum = tl.sum(below, 1)[:, None, None]
        by_kl, by_alpha = (by_kl * factor)[:, None, None], (by_alpha * factor)[:, None, None]
        for tile in tl.range(0, tiles, num_stages=STAGES):
            _write_soft_gradient(
                student, teacher, target_ids, tile, draft_size, cap, taught, scales, share, below_sum,
                by_kl, by_alpha, HAS_CAP, HAS_VOCABULARY, BLOCK, False,
            )  # fmt: skip
        if has_rest:
            _write_soft_gradient(
                student, teacher, target_ids, tiles, draft_size, cap, taught, scales, share, below_sum,
                by_kl, by_alpha, HAS_CAP, HAS_VOCABULARY, BLOCK, True,
            )  # fmt: skip


@triton.jit
def _scale_kernel(gradient, scale, out, count, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(gradient + places, mask=places < count).to(tl.float32)
    tl.store(out + places, (x * tl.load(scale)).to(out.dtype.element_ty), mask=places < count)


def scaled(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`rows.scaled`, by one pass over memory."""
    if not gradient.is_contiguous():
        return rows_in_torch.scaled(gradient, scale, dtype)
    out = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    if gradient.numel() > 0:
        with torch.cuda.device_of(gradient):
            _scale_kernel[(triton.cdiv(gradient.numel(), BLOCK),)](gradient, scale, out, gradient.numel(), BLOCK=BLOCK)
    return out


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
                STAGES=STAGES, **_tile(vocabulary, 1),
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
                K=padded_steps, STAGES=STAGES, **_tile(draft_size, padded_steps),
            )  # fmt: skip
    return RowLosses(loss, hit, alpha)


def _tile(vocabulary: int, rows: int) -> dict[str, int]:
    """A thread holds its columns of all rows, so what it computes of the teacher's serves all of them."""
    block = max(16, min(BLOCK // rows, triton.next_power_of_2(vocabulary)))
    return {"BLOCK": block, "num_warps": max(1, min(4, block // WARP_COLUMNS))}

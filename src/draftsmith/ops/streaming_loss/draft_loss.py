"""The loss of a training-time-test unroll: K steps of draft states against one teacher, chunk by chunk."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import has_kernels
from ..precision import accumulation_dtype, matmul_dtype
from ..transfer import to_device
from .chunking import choose_chunk_size
from .head import LinearHead
from .pairs import DraftPairs
from .rows import RowLosses
from .streaming import Computed, inverse_count, scaled_loss
from .targets import Targets, label_targets, teacher_targets
from .validation import check_draft_inputs, require


@dataclass(frozen=True)
class DraftLossSums:
    """Per-step sums [K], without gradient: add them over ranks and batches before dividing."""

    loss: Tensor  # sum of row_weight * loss over R_k, without step weights and denominator
    hits: Tensor  # pairs whose draft argmax is right
    chain: Tensor  # rows of R_k whose steps 0..k are all right
    rows: Tensor  # |R_k|
    alpha: Tensor | None  # sum of sum_v min(p_full, q); None under "ce"


def streaming_draft_loss(
    states: Sequence[Tensor],
    weight: Tensor,
    teacher_states: Tensor | None,
    teacher_weight: Tensor | None,
    row_sets: Sequence[Tensor],
    *,
    labels: Tensor | None = None,
    t2d: Tensor | None = None,
    objective: str = "kl",
    step_weights: Tensor | Sequence[float] | None = None,
    row_weights: Tensor | None = None,
    num_items: int | Tensor | None = None,
    teacher_bias: Tensor | None = None,
    teacher_softcap: float | None = None,
    chunk_size: int | None = None,
    overwrite_states: bool = False,
) -> tuple[Tensor, DraftLossSums]:
    """sum_k step_weights[k] * sum_{R_k} row_weight * loss / max(num_items, 1), and sums for metrics.

    Chunks run over teacher rows, so a chunk of teacher logits is computed once and serves all K steps. Gradients of
    `states` and `weight` are computed in the forward pass where they are needed and returned in each one's dtype; one
    backward is possible. Matrix products run in the dtype of the states on their side (fp32 on a CPU without
    instructions for it), softmax and the sum over chunks in fp32.

    Args:
        states: K tensors [|R_k|, H] of one dtype, ready for the head (normed).
        weight: [D, H], the draft's head, any floating dtype.
        teacher_states: [|R_0|, Ht], after the target's final norm; entry i belongs to position R_0[i] + 1. The teacher
            of (t, k) is the entry of row t + k. Unused, may be None, under "ce".
        teacher_weight: [V, Ht], the target's full head. Unused, may be None, under "ce".
        row_sets: K ascending integer tensors [|R_k|] of rows, where R_0 holds t and t + k for every t in R_k. On the
            CPU they cost no device synchronisation.
        labels: [|R_0|] target ids, needed by "ce"; entry i belongs to position R_0[i] + 2.
        t2d: bool [V or the target's embedding size], true for the D ids of the draft vocabulary. None: D == V.
        objective: "kl", "tv", "lk_alpha", "lk_lambda" (against the teacher) or "ce" (against `labels`).
        step_weights: K factors; default 1.
        row_weights: [|R_0|], a factor per row t; no gradient reaches it.
        num_items: an int or a scalar tensor; default: the sum of `row_weights`, which is |R_0| without them.
        teacher_bias: [V].
        teacher_softcap: teacher logits become cap * tanh(logits / cap).
        chunk_size: teacher rows per chunk, which brings up to K rows of draft logits each; None: as large as the draft
            layer's own backward allows, at most 8192 rows of logits, the teacher's among them.
        overwrite_states: gradients of `states` may take the place of their values, which nothing else may need.

    Pairs out of the draft vocabulary (by the teacher's full argmax, under "ce" by the label) add no loss and count as
    misses.

    Raises:
        ValueError: shapes that do not fit, row sets that do not nest, an unknown objective; on CPU also labels or a
            `t2d` that the heads have no rows for.
    """
    check_draft_inputs(
        states, weight, teacher_states, teacher_weight, row_sets,
        labels=labels, t2d=t2d, step_weights=step_weights, row_weights=row_weights, num_items=num_items,
        teacher_bias=teacher_bias, teacher_softcap=teacher_softcap, objective=objective, chunk_size=chunk_size,
    )  # fmt: skip
    pairs = DraftPairs([rows.cpu().long() for rows in row_sets])
    if chunk_size is None:
        chunk_size = _chunk_size(states, weight, None if objective == "ce" else teacher_weight, t2d, pairs)
    if objective == "ce":
        targets: Targets = label_targets(require(labels, "labels", objective), t2d, draft_size=len(weight))
    else:
        targets = teacher_targets(
            require(teacher_states, "teacher_states", objective), require(teacher_weight, "teacher_weight", objective),
            teacher_bias, t2d, objective=objective, softcap=teacher_softcap,
            draft_size=len(weight), capacity=min(chunk_size, pairs.sizes[0]),
        )  # fmt: skip
    factors = _Factors.build(pairs, step_weights, row_weights, like=states[0])

    def compute(needs: Sequence[bool]) -> Computed:
        losses, gradients = _stream(
            states, weight, pairs, targets, factors.of_steps[factors.steps] * factors.of_pairs, chunk_size, needs,
            overwrite_states,
        )  # fmt: skip
        sums = _sums(losses, pairs, factors)
        return Computed((sums.loss * factors.of_steps).sum(), gradients, sums)

    count = factors.of_rows.sum() if num_items is None else num_items
    return scaled_loss(compute, inverse_count(count, like=factors.of_rows), (*states, weight))


def _chunk_size(
    states: Sequence[Tensor], weight: Tensor, teacher_weight: Tensor | None, t2d: Tensor | None, pairs: DraftPairs
) -> int:
    logits = len(states) * len(weight)
    if teacher_weight is not None:
        gathers = t2d is None or has_kernels(states[0])  # else the draft's part of the teacher is copied out
        logits += len(teacher_weight) + (0 if gathers else len(weight))
    return choose_chunk_size(
        rows=sum(pairs.sizes), hidden_size=weight.shape[1], logits_per_row=logits, stacked=len(states),
        itemsize=matmul_dtype(states[0].dtype, weight.device).itemsize,
    )  # fmt: skip


@dataclass(frozen=True)
class _Factors:
    """What each pair's loss is multiplied by."""

    of_steps: Tensor  # [K]
    of_rows: Tensor  # [|R_0|]
    of_pairs: Tensor  # [P], the pair's row's
    steps: Tensor  # [P]
    cells: Tensor  # [P], the pair's place in a flattened [K, |R_0|] table

    @staticmethod
    def build(
        pairs: DraftPairs, step_weights: Tensor | Sequence[float] | None, row_weights: Tensor | None, like: Tensor
    ) -> "_Factors":
        dtype, device = accumulation_dtype(like.dtype), like.device
        of_steps = torch.as_tensor([1.0] * len(pairs.sizes) if step_weights is None else step_weights)
        of_rows = torch.ones(pairs.sizes[0], device=device) if row_weights is None else row_weights.detach()
        of_rows = of_rows.to(device, dtype)
        rows, steps = to_device(pairs.rows, device), to_device(pairs.steps, device)
        cells = steps * pairs.sizes[0] + rows
        of_steps = to_device(of_steps.detach(), device, dtype)
        return _Factors(of_steps, of_rows, of_rows[rows], steps, cells)


def _stream(
    states: Sequence[Tensor],  # K x [|R_k|, H]
    weight: Tensor,  # [D, H]
    pairs: DraftPairs,
    targets: Targets,
    coefficient: Tensor,  # [P], each loss's factor in the gradients
    chunk_size: int,  # teacher rows
    needs: Sequence[bool],  # gradients of each of `states`, and of `weight`
    overwrite: bool,
) -> tuple[RowLosses, list[Tensor | None]]:
    """Losses, hits and alphas [P], without the factor, and the gradients."""
    dtype = matmul_dtype(states[0].dtype, weight.device)
    chunks = pairs.chunks(chunk_size)
    capacity = max(chunk.stacked.stop - chunk.stacked.start for chunk in chunks)
    head = LinearHead(weight, None, dtype=dtype, capacity=capacity, needs_weight_grad=needs[-1])
    stacking = pairs.stacking(chunks)
    order = to_device(stacking, weight.device)
    entries = to_device(pairs.entries, weight.device)[order]
    students = to_device(pairs.students(chunks, stacking), weight.device)
    factor = coefficient[order] if any(needs) else None
    grads = [_room_for(state, overwrite) if needed else None for state, needed in zip(states, needs, strict=False)]
    results = []
    for chunk in chunks:
        rows = torch.cat([state[part] for state, part in zip(states, chunk.states, strict=True)]).to(dtype)
        logits = head.logits(rows)
        chunk_factor = None if factor is None else factor[chunk.stacked]
        taught = entries[chunk.stacked], students[chunk.teacher]
        results.append(targets.losses(logits, chunk.teacher, *taught, chunk_factor))
        head.accumulate(logits, rows)
        if any(needs[:-1]):
            _scatter(head.rows_grad(logits), grads, chunk.states)
    alphas = [result.alpha for result in results if result.alpha is not None]
    losses = RowLosses(
        loss=_unstack([result.loss for result in results], order),
        hit=_unstack([result.hit for result in results], order),
        alpha=_unstack(alphas, order) if alphas else None,
    )
    return losses, [*grads, head.finish()[0]]


def _room_for(state: Tensor, overwrite: bool) -> Tensor:
    """Memory for its gradient. A chunk's rows are read before they are written, and autograd notices who kept them."""
    return state.detach() if overwrite else torch.empty_like(state)


def _scatter(stacked: Tensor, grads: Sequence[Tensor | None], parts: Sequence[slice]) -> None:
    pieces = stacked.split([part.stop - part.start for part in parts])
    for grad, part, piece in zip(grads, parts, pieces, strict=True):
        if grad is not None:
            grad[part] = piece


def _unstack(parts: list[Tensor], order: Tensor) -> Tensor:
    """Results of all chunks [P] in the pairs' own order."""
    stacked = torch.cat(parts)
    return torch.empty_like(stacked).index_copy_(0, order, stacked)


def _sums(losses: RowLosses, pairs: DraftPairs, factors: _Factors) -> DraftLossSums:
    def table(values: Tensor) -> Tensor:  # [P] -> [K, |R_0|], 0 where a row is not in R_k
        zeros = factors.of_rows.new_zeros(len(pairs.sizes), pairs.sizes[0])
        return zeros.view(-1).index_copy_(0, factors.cells, values.to(zeros.dtype)).view_as(zeros)

    hits = table(losses.hit)
    return DraftLossSums(
        loss=table(losses.loss * factors.of_pairs).sum(1),
        hits=hits.sum(1),
        chain=hits.cumprod(0).sum(1),
        rows=to_device(torch.tensor(pairs.sizes), hits.device, hits.dtype),
        alpha=None if losses.alpha is None else table(losses.alpha).sum(1),
    )

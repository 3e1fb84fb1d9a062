"""Linear cross-entropy without the [tokens, V] logits."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..precision import accumulation_dtype, matmul_dtype
from ..selection import put_rows
from .chunking import choose_chunk_size
from .dispatch import row_functions
from .head import LinearHead
from .streaming import Computed, inverse_count, scaled_loss, without_autocast
from .validation import check_cross_entropy_inputs, check_labels


def streaming_cross_entropy(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    token_weights: Tensor | None = None,
    ignore_index: int = -100,
    logit_softcap: float | None = None,
    num_items: int | Tensor | None = None,
    reduction: str = "mean",
    chunk_size: int | None = None,
) -> Tensor:
    """Cross-entropy of `hidden_states @ weight.T + bias`, one chunk of logits at a time, supervised rows only.

    Gradients of `hidden_states`, `weight` and `bias` are computed in the forward pass where they are needed and
    returned in each one's dtype; one backward is possible. With `reduction="none"` the backward computes the chunks
    again. Matrix products run in `hidden_states`' dtype (fp32 on a CPU without instructions for it), softmax and sums
    in fp32.

    Args:
        hidden_states: [..., H].
        weight: [V, H], any floating dtype (fp32 masters under bf16 states are cast inside).
        labels: [...] integers, already aligned with `hidden_states`. Which of them are supervised is read on the host:
            the one device synchronisation of a call.
        bias: [V].
        token_weights: [...], a factor on each token's loss; no gradient reaches it.
        ignore_index: the label of tokens without supervision; what their hidden states hold does not matter.
        logit_softcap: logits become cap * tanh(logits / cap).
        num_items: "mean" is the weighted sum / max(num_items, 1); an int or a scalar tensor; default: the number of
            supervised labels.
        reduction: "mean", "sum" (ignores `num_items`) or "none" (0 where ignored).
        chunk_size: tokens per chunk; None: as large as the draft layer's own backward allows, at most 4096.

    Returns:
        A scalar, or [...] for "none"; fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: shapes that do not fit, a soft cap that is not positive and finite, an unknown reduction, a label
            outside [0, V) on CPU (on CUDA a device-side assertion).
    """
    check_cross_entropy_inputs(
        hidden_states, weight, labels, bias, token_weights,
        softcap=logit_softcap, num_items=num_items, reduction=reduction, chunk_size=chunk_size,
    )  # fmt: skip
    hidden, flat_labels = hidden_states.reshape(-1, hidden_states.shape[-1]), labels.reshape(-1)
    rows = (flat_labels != ignore_index).nonzero()[:, 0]
    labelled = flat_labels[rows]
    check_labels(labelled, len(weight))
    dtype = accumulation_dtype(hidden.dtype)
    if token_weights is None:
        weights = torch.ones(len(rows), dtype=dtype, device=hidden.device)
    else:
        weights = token_weights.reshape(-1)[rows].to(dtype)
    if chunk_size is None:
        itemsize = matmul_dtype(hidden.dtype, hidden.device).itemsize
        chunk_size = choose_chunk_size(
            rows=len(rows), hidden_size=hidden.shape[1], logits_per_row=len(weight), itemsize=itemsize
        )
    problem = _LabelledRows(rows, labelled, logit_softcap, chunk_size)

    if reduction == "none":
        with without_autocast(hidden):
            losses = _PerTokenCrossEntropy.apply(problem, hidden, weight, bias) * weights
        return losses.new_zeros(len(flat_labels)).index_copy(0, rows, losses).view(labels.shape)

    def compute(needs: Sequence[bool]) -> Computed:
        losses, gradients = _stream(hidden, weight, bias, problem, weights, needs)
        return Computed((losses * weights).sum(), gradients)

    count = 1 if reduction == "sum" else len(rows) if num_items is None else num_items
    return scaled_loss(compute, inverse_count(count, like=weights), (hidden, weight, bias))[0]


class _LabelledRows(NamedTuple):
    rows: Tensor  # [n], into the flattened hidden states
    labels: Tensor  # [n], in [0, V)
    softcap: float | None
    chunk_size: int


def _stream(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    bias: Tensor | None,  # [V]
    problem: _LabelledRows,
    coefficient: Tensor,  # [n], each loss's factor in the gradients
    needs: Sequence[bool],  # gradients of hidden, weight, bias
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Losses [n], without the factor, and the gradients."""
    dtype = matmul_dtype(hidden.dtype, hidden.device)
    count, size = len(problem.rows), problem.chunk_size
    head = LinearHead(
        weight, bias, dtype=dtype, capacity=min(size, count), needs_weight_grad=needs[1], needs_bias_grad=needs[2]
    )
    losses = torch.empty_like(coefficient)
    grad_hidden = torch.zeros_like(hidden) if needs[0] else None
    for chunk in (slice(start, start + size) for start in range(0, count, size)):
        rows = problem.rows[chunk]
        states = hidden[rows].to(dtype)
        logits = head.logits(states)
        factor = coefficient[chunk] if any(needs) else None
        row_losses = row_functions(logits).cross_entropy_rows
        losses[chunk] = row_losses(logits, problem.labels[chunk], factor, problem.softcap).loss
        head.accumulate(logits, states)
        if grad_hidden is not None:
            put_rows(grad_hidden, 0, rows, head.rows_grad(logits).to(hidden.dtype))
    return losses, (grad_hidden, *head.finish())


class _PerTokenCrossEntropy(torch.autograd.Function):
    """Losses [n]: their gradients depend on n incoming ones, so backward computes the chunks again."""

    @staticmethod
    def forward(ctx: Any, problem: _LabelledRows, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.problem = problem
        ctx.save_for_backward(hidden, weight, bias)
        losses = hidden.new_zeros(len(problem.rows), dtype=accumulation_dtype(hidden.dtype))
        return _stream(hidden, weight, bias, problem, losses, [False] * 3)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = hidden, weight, bias = ctx.saved_tensors
        with without_autocast(grad):  # a caller's may surround the backward, too
            _, gradients = _stream(hidden, weight, bias, ctx.problem, grad, ctx.needs_input_grad[1:])
        cast = [
            None if gradient is None else gradient.to(tensor.dtype)
            for gradient, tensor in zip(gradients, inputs, strict=True)
        ]
        return None, *cast

"""What a contender must compute before it is timed: fp64 mathematics, within twice the error of dense losses.

The truth is dense and plain, block by block of rows; only the formula of a row goes through autograd.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from .common import ALLOWED, Refused, allowed_error
from .loss_cases import CONFIDENCE, Inputs


BLOCK = 512
SAME_LOSS, SAME_GRADIENT = 0.05, 0.95  # what a peer must reach: the same quantity, in whatever precision it chooses


def row_losses(
    logits: Tensor,  # [n, D]
    labels: Tensor | None,  # [n]
    teacher_logits: Tensor | None,  # [n, V]; None: hard labels
    t2d: Tensor | None,  # [V] bool
    objective: str,
) -> Tensor:  # [n]
    if teacher_logits is None:
        return cross_entropy(logits, labels, reduction="none")
    ids = slice(None) if t2d is None else t2d.nonzero()[:, 0]
    log_q = logits.log_softmax(-1)
    losses = logits.new_zeros(len(logits))
    if objective != "tv":
        log_p = teacher_logits[:, ids].log_softmax(-1)
        losses = kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    if objective != "kl":
        alpha = torch.minimum(teacher_logits.softmax(-1)[:, ids], log_q.exp()).sum(-1)
        share = torch.exp(-3 * alpha.detach()) if objective == "lk_lambda" else 0
        losses = share * losses + (1 - share) * (1 - alpha)
    return losses if t2d is None else losses * t2d[teacher_logits.argmax(-1)]


def dense_results(inputs: Inputs, dtype: torch.dtype) -> list[Tensor]:
    """The loss, sum_k of the mean over R_k, and its gradients by `inputs.leaves`, matrix products in `dtype`."""
    wide = torch.promote_types(dtype, torch.float32)
    weight = inputs.weight.detach().to(dtype)
    teacher_weight = None if inputs.teacher_weight is None else inputs.teacher_weight.to(dtype)
    loss = torch.zeros((), dtype=wide, device=weight.device)
    grads = [torch.empty_like(states, dtype=dtype) for states in inputs.states]
    weight_grad = torch.zeros_like(weight, dtype=wide)
    for block, teacher in _blocks(inputs):
        teacher_logits = None
        if teacher_weight is not None:
            teacher_logits = (inputs.teacher_states[teacher].to(dtype) @ teacher_weight.T).to(wide)
        for step, states in enumerate(inputs.states):
            rows = states.detach()[block].to(dtype)
            logits = (rows @ weight.T).to(wide).requires_grad_()
            entries = slice(step, step + len(rows))  # of the block's teacher
            labels = inputs.labels[teacher][entries]
            own_teacher = None if teacher_logits is None else teacher_logits[entries]
            value = row_losses(logits, labels, own_teacher, inputs.t2d, inputs.case.objective).sum() / len(states)
            (grad,) = torch.autograd.grad(value, logits)
            grad = grad.to(dtype)
            loss += value.detach()
            grads[step][block] = grad @ weight
            weight_grad = add_product(weight_grad, grad.T, rows)
    return [loss, *grads, weight_grad.to(dtype)]


def _blocks(inputs: Inputs) -> Iterator[tuple[slice, slice]]:
    """Rows, and the teacher's entries of these rows at all steps."""
    for start in range(0, inputs.case.rows, BLOCK):
        yield slice(start, start + BLOCK), slice(start, start + BLOCK + len(inputs.states) - 1)


def add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left @ right with sums of at least fp32, in place; None is zero."""
    wide = torch.promote_types(right.dtype, torch.float32)
    if wide == right.dtype:
        return left @ right if total is None else total.addmm_(left, right)
    if not right.is_cuda:  # a wider result is CUDA's only
        product = (left @ right).to(wide)
        return product if total is None else total.add_(product)
    if total is None:
        return torch.mm(left, right, out_dtype=wide)
    return torch.addmm(total, left, right, out_dtype=wide, out=total)


@dataclass
class Agreement:
    error_over_dense: float  # the largest, over the loss and all gradients
    weight_cosine: float | None  # of the head's gradient with the truth
    loss_error: float  # relative


class Reference:
    """The truth about `inputs`, and the error that plain dense mathematics makes in their dtype."""

    def __init__(self, inputs: Inputs):
        self.inputs = inputs
        dtype = inputs.weight.dtype
        truth, plain = (dense_results(inputs, dtype) for dtype in (torch.float64, dtype))
        self.truth = truth
        self.allowed = [allowed_error(*pair, dtype) for pair in zip(plain, truth, strict=True)]
        # A mean may be exact by luck too: what rounding the label's logit alone may do to it.
        rounding = torch.finfo(dtype).eps / 4 * max(CONFIDENCE.values()) / inputs.case.rows**0.5
        self.allowed[0] = max(
            ALLOWED * (plain[0] - truth[0]).abs().item(),
            ALLOWED * rounding + 20 * torch.finfo(torch.float32).eps * truth[0].abs().item(),
        )

    def compare(self, results: list[Tensor]) -> Agreement:
        worst = torch.zeros(())
        for result, truth, allowed in zip(results, self.truth, self.allowed, strict=True):
            error = (result.detach().double() - truth).norm().cpu() / allowed
            worst = torch.maximum(worst, ALLOWED * error)  # unlike max(), keeps NaN
        weight_grad, true_grad = results[-1].double().flatten(), self.truth[-1].flatten()
        cosine = weight_grad.dot(true_grad) / (weight_grad.norm() * true_grad.norm())
        loss_error = (results[0].detach().double() / self.truth[0] - 1).abs()
        return Agreement(worst.item(), cosine.item(), loss_error.item())


class SampledReference:
    """The truth about the states' gradient at some rows of a hard cross-entropy: affordable at any number of rows."""

    def __init__(self, inputs: Inputs, rows: int):
        self.inputs = inputs
        count = inputs.case.rows
        self.rows = torch.randperm(count)[:rows].sort().values.to(inputs.weight.device)
        dtype = inputs.weight.dtype
        self.truth, plain = (self._gradient(inputs, dtype) for dtype in (torch.float64, dtype))
        self.allowed = allowed_error(plain, self.truth, dtype)

    def _gradient(self, inputs: Inputs, dtype: torch.dtype) -> Tensor:
        weight = inputs.weight.detach().to(dtype)
        logits = inputs.states[0].detach()[self.rows].to(dtype) @ weight.T
        grad = logits.to(torch.promote_types(dtype, torch.float32)).softmax(-1)
        grad.scatter_add_(1, inputs.labels[self.rows, None], -torch.ones_like(grad[:, :1]))
        return (grad / inputs.case.rows).to(dtype) @ weight

    def compare(self, results: list[Tensor]) -> Agreement:
        error = (results[1][self.rows].double() - self.truth).norm() / self.allowed
        return Agreement(ALLOWED * error.item(), None, 0.0)


def accept(agreement: Agreement, *, ours: bool) -> None:
    """Ours must be as good as dense; a peer, whose precision is its own choice, must compute the same."""
    if ours and not agreement.error_over_dense <= ALLOWED:
        raise Refused(f"wrong: {agreement.error_over_dense:.2f} times the error of the dense loss")
    if not ours:
        alike = agreement.weight_cosine is None or agreement.weight_cosine >= SAME_GRADIENT
        if not (alike and agreement.loss_error <= SAME_LOSS):
            raise Refused(
                f"another loss: off by {agreement.loss_error:.1%}, the head's gradient at a cosine of "
                f"{agreement.weight_cosine}"
            )

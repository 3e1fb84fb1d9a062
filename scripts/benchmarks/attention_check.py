"""What a contender must compute before it is timed: fp64 mathematics, within twice the error of dense attention."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .attention_cases import Inputs
from .common import ALLOWED, allowed_error


def dense_attention(
    query: Tensor,  # [B, Hq, Q, D]
    keys: Tensor,  # [B, Hkv, S, D]
    values: Tensor,  # [B, Hkv, S, D]
    visible: Tensor,  # [Q, S] bool
    sinks: list[Tensor],  # one [Hq], or none
) -> Tensor:
    """Textbook attention; in place where autograd allows it, so that it needs three score matrices and not five."""
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = (query @ keys.mT).mul_(query.shape[-1] ** -0.5).masked_fill_(~visible, float("-inf"))
    if not sinks:
        return scores.softmax(-1) @ values
    (sink,) = sinks
    scores = torch.cat([scores, sink[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., :-1] @ values


def visible_keys(inputs: Inputs, queries: Tensor) -> Tensor:
    """[n, T + J * n] bool: what `queries` [n] see of [k0 | k1 | .. | kJ], the later keys being those of these rows."""
    rows = inputs.positions[queries]
    distance = rows[:, None] - torch.arange(inputs.case.length, device=rows.device)
    visible = (distance >= 0) & (inputs.documents[rows][:, None] == inputs.documents)
    if inputs.case.window is not None:
        visible &= distance < inputs.case.window
    own = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    return torch.cat([visible, *[own] * inputs.step], 1)


def dense_results(inputs: Inputs, queries: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The output at `queries` and the gradients of `inputs.tensors` if `grad_out` were zero at all other rows."""

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().to(dtype).requires_grad_()

    query, key, value = leaf(inputs.query[:, :, queries]), leaf(inputs.key), leaf(inputs.value)
    sinks = [leaf(sink) for sink in inputs.sinks]
    later_keys = [leaf(tensor[:, :, queries]) for tensor in inputs.diagonal_keys]
    later_values = [leaf(tensor[:, :, queries]) for tensor in inputs.diagonal_values]
    leaves = [query, key, value, *later_keys, *later_values, *sinks]
    keys, values = torch.cat([key, *later_keys], 2), torch.cat([value, *later_values], 2)
    out = dense_attention(query, keys, values, visible_keys(inputs, queries), sinks)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs.grad_out[:, :, queries].to(dtype))]


@dataclass
class Reference:
    """The truth about some query rows of `inputs`, and the error that plain attention makes there."""

    inputs: Inputs
    queries: Tensor  # [n]
    truth: list[Tensor]  # fp64
    allowed: list[float]  # per tensor of `truth`

    @classmethod
    def of(cls, inputs: Inputs, rows: int) -> "Reference":
        """At most `rows` query rows, the first and the last among them. The rest are random."""
        count = inputs.query.shape[2]
        queries = torch.arange(count)
        if count > rows:
            between = 1 + torch.randperm(count - 2)[: rows - 2].sort().values
            queries = torch.cat([queries[:1], between, queries[-1:]])
        queries = queries.to(inputs.query.device)
        dtype = inputs.query.dtype
        truth = dense_results(inputs, queries, torch.float64)
        plain = dense_results(inputs, queries, dtype)
        allowed = [allowed_error(*pair, dtype) for pair in zip(plain, truth, strict=True)]
        return cls(inputs, queries, truth, allowed)

    def error(self, run: Callable[[Tensor], list[Tensor]]) -> float:
        """Largest error over all results, in errors of dense attention; NaN stays NaN.

        `run` takes `grad_out` and returns the output and the gradients of `inputs.tensors`. A `grad_out` that is zero
        except at a few rows makes every gradient depend on these rows only: so the truth is affordable at any length.
        """
        grad_out = torch.zeros_like(self.inputs.grad_out)
        grad_out[:, :, self.queries] = self.inputs.grad_out[:, :, self.queries]
        results = run(grad_out)
        worst = torch.zeros(())
        for result, truth, allowed in zip(results, self.truth, self.allowed, strict=True):
            if result.dim() == 4 and result.shape != truth.shape:
                result = result[:, :, self.queries]
            error = (result.double() - truth).norm().cpu() / allowed
            worst = torch.maximum(worst, ALLOWED * error)  # unlike max(), keeps NaN
        return worst.item()

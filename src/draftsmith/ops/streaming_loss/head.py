"""A vocabulary projection used chunk by chunk."""

import torch
from torch import Tensor

from ..precision import accumulation_dtype


class LinearHead:
    """logits = rows @ weight.T + bias in one reused buffer; the gradients of weight and bias accumulate in fp32."""

    def __init__(
        self,
        weight: Tensor,  # [V, H], any dtype
        bias: Tensor | None,  # [V]
        *,
        dtype: torch.dtype,  # of the matrix products
        capacity: int,  # rows of the largest chunk
        needs_weight_grad: bool = False,
        needs_bias_grad: bool = False,
    ) -> None:
        self.weight = weight.detach().to(dtype)
        self.bias = None if bias is None else bias.detach().to(dtype)
        self.needs_weight_grad, self.needs_bias_grad = needs_weight_grad, needs_bias_grad
        self.weight_grad: Tensor | None = None  # [V, H]
        self.bias_grad: Tensor | None = None  # [V]
        self._buffer = self.weight.new_empty(capacity, len(weight))

    def logits(self, rows: Tensor) -> Tensor:
        """[n, H] -> [n, V]; the next call overwrites the result."""
        out = self._buffer[: len(rows)]
        if self.bias is None:
            return torch.mm(rows, self.weight.t(), out=out)
        return torch.addmm(self.bias, rows, self.weight.t(), out=out)

    def rows_grad(self, grad_logits: Tensor) -> Tensor:
        """[n, V] -> [n, H]"""
        return grad_logits @ self.weight

    def accumulate(self, grad_logits: Tensor, rows: Tensor) -> None:
        """Add one chunk to the gradients that are needed."""
        if self.needs_weight_grad:
            self.weight_grad = _add_product(self.weight_grad, grad_logits, rows)
        if self.needs_bias_grad:
            chunk = grad_logits.sum(0, dtype=accumulation_dtype(rows.dtype))
            self.bias_grad = chunk if self.bias_grad is None else self.bias_grad.add_(chunk)

    def finish(self) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of weight and bias: None where not needed, zeros where there was no chunk."""
        if self.needs_weight_grad and self.weight_grad is None:
            self.weight_grad = torch.zeros_like(self.weight)
        if self.needs_bias_grad and self.bias_grad is None:
            self.bias_grad = torch.zeros_like(self.weight[:, 0])
        return self.weight_grad, self.bias_grad


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left.T @ right in accumulation precision; None is zero."""
    dtype = accumulation_dtype(right.dtype)
    if dtype != right.dtype and not right.is_cuda:  # only CUDA has products with a wider result
        product = (left.t() @ right).to(dtype)
        return product if total is None else total.add_(product)
    if total is None:
        return torch.mm(left.t(), right) if dtype == right.dtype else torch.mm(left.t(), right, out_dtype=dtype)
    if dtype == right.dtype:
        return total.addmm_(left.t(), right)
    return torch.addmm(total, left.t(), right, out_dtype=dtype, out=total)

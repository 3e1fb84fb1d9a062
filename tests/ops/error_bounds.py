"""Errors are judged against those of plain PyTorch in the same dtype, both measured from an fp64 truth."""

import torch


def error_ratio(ours, dense, truth, dtype, term_size=0.0):
    """Our error over its bound: 2 * (error of dense PyTorch) + a floor, for results where that error is zero by luck.

    The floor is one rounding in `dtype` (the inputs') and 20 in fp32, relative to the result's norm or, if larger, to
    elements of `term_size`: a result that cancels to zero keeps the rounding of its terms.
    """
    truth = truth.double()
    size = max(truth.norm().item(), term_size * truth.numel() ** 0.5)
    floor = (torch.finfo(dtype).eps / 2 + 20 * torch.finfo(torch.float32).eps) * size + 1e-30
    return ((ours.double() - truth).norm() / (2 * (dense.double() - truth).norm() + floor)).item()


def assert_close_as_dense(ours, dense, truth, dtype, term_size=0.0):
    """Compare lists of outputs and gradients."""
    for index, (tensor, other, exact) in enumerate(zip(ours, dense, truth, strict=True)):
        assert tensor.dtype == other.dtype and tensor.shape == exact.shape, index
        assert tensor.isfinite().all(), index
        ratio = error_ratio(tensor, other, exact, dtype, term_size)
        assert ratio <= 1, f"tensor {index}: {ratio:.2f} of the allowed error"

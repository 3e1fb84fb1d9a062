import functools

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from draftsmith.ops import pointwise


@pytest.fixture
def compilations(monkeypatch):
    """Functions are compiled on the CPU too, without code generation."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    monkeypatch.setattr(pointwise, "_can_compile", lambda device_type: True)
    return counter


def test_compiled_once_for_all_lengths(compilations):
    swiglu = pointwise.fused(pointwise.swiglu.__wrapped__)
    for rows in (7, 64, 1000, 3, 12, 0, 1, 5, 0, 1):
        gate, up = (torch.randn(1, rows, 24, requires_grad=True) for _ in range(2))
        gradients = torch.autograd.grad(swiglu(gate, up).square().sum(), [gate, up])
        expected = torch.autograd.grad((F.silu(gate) * up).square().sum(), [gate, up])
        for gradient, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, other)
    assert compilations.frame_count <= 3  # no rows, one row, many


def test_inputs_are_all_that_is_kept(compilations):
    swiglu = pointwise.fused(pointwise.swiglu.__wrapped__)
    gate, up = (torch.randn(9, 24, requires_grad=True) for _ in range(2))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        swiglu(gate, up)
    assert {tensor.data_ptr() for tensor in kept} == {gate.data_ptr(), up.data_ptr()}

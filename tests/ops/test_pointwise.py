"""SwiGLU and rotary embedding: the kernels, interpreted on a CPU, against fp64 and PyTorch in the same dtype."""

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from draftsmith.ops import pointwise
from tests.ops.error_bounds import assert_close_as_dense


pytest.importorskip("triton")

from draftsmith.ops import pointwise_triton


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
pytestmark = [
    pytest.mark.usefixtures(*(["round_bf16_as_gpus_do"] if DEVICE == "cpu" else [])),
    *([pytest.mark.gpu] if DEVICE == "cuda" else []),
]


@pytest.fixture(autouse=True)
def through_kernels(monkeypatch):
    monkeypatch.setattr(pointwise, "_kernels", lambda tensor: pointwise_triton)


def random(*shape, dtype):
    return torch.randn(shape, dtype=dtype, device=DEVICE, requires_grad=True)


def results(function, inputs, dtype):
    """The output of `function` in `dtype`, and the gradients of a random sum of it."""
    inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
    output = function(*inputs)
    weights = torch.linspace(-1, 2, output.numel(), device=DEVICE).view(output.shape).to(dtype)
    return [output.detach(), *torch.autograd.grad(output, inputs, weights)]


@DTYPES
@pytest.mark.parametrize("shape", [(1, 7, 24), (2, 1, 5), (3, 1000), (1, 0, 24), (4099,)])
def test_swiglu_equals_fp64(shape, dtype):
    inputs = [random(*shape, dtype=dtype), random(*shape, dtype=dtype)]

    def dense(gate, up):
        return F.silu(gate) * up

    ours = results(pointwise.swiglu, inputs, dtype)
    assert_close_as_dense(ours, results(dense, inputs, dtype), results(dense, inputs, torch.float64), dtype)


def test_swiglu_of_extreme_gates_is_finite():
    gate = torch.tensor([-1e30, -200.0, 0.0, 200.0, 1e30], device=DEVICE, requires_grad=True)
    product = pointwise.swiglu(gate, torch.ones_like(gate))
    (gradient,) = torch.autograd.grad(product.sum(), gate)
    assert product.tolist() == [0, 0, 0, 200, pytest.approx(1e30)] and gradient.tolist() == [0, 0, 0.5, 1, 1]


@DTYPES
@pytest.mark.parametrize(
    ("batch", "rows", "heads", "width"), [(1, 7, 3, 16), (2, 5, 1, 6), (1, 33, 8, 128), (2, 3, 2, 80), (1, 0, 4, 16)]
)
def test_rotation_equals_fp64(batch, rows, heads, width, dtype):
    states = random(batch, rows, heads, width, dtype=dtype)
    cos, sin = (torch.randn(batch, rows, width, dtype=dtype, device=DEVICE) for _ in range(2))  # halves may differ

    def dense(states):
        tables = (table.to(states.dtype) for table in (cos, sin))
        return apply_rotary_pos_emb(states, states, *tables, unsqueeze_dim=2)[0]

    ours = results(lambda states: pointwise.rotated(states, cos, sin), [states], dtype)
    assert_close_as_dense(ours, results(dense, [states], dtype), results(dense, [states], torch.float64), dtype)


def test_rotation_reads_heads_and_gradients_by_their_strides():
    states = random(2, 6, 9, 16, dtype=torch.float32)
    cos, sin = (torch.randn(1, 9, 16, device=DEVICE) for _ in range(2))  # of both batch rows
    view = states[:, 1:4].transpose(1, 2)  # [2, 9, 3, 16]
    weights = torch.randn(2, 3, 9, 16, device=DEVICE).transpose(1, 2)
    output = pointwise.rotated(view, cos, sin)
    expected = apply_rotary_pos_emb(view, view, cos, sin, unsqueeze_dim=2)[0]
    torch.testing.assert_close(output, expected)
    gradients = [torch.autograd.grad(tensor, states, weights)[0] for tensor in (output, expected)]
    torch.testing.assert_close(*gradients)


def test_inputs_are_all_that_is_kept():
    gate, up = random(9, 24, dtype=torch.float32), random(9, 24, dtype=torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        pointwise.swiglu(gate, up)
    assert {tensor.data_ptr() for tensor in kept} == {gate.data_ptr(), up.data_ptr()}


def test_the_plain_versions_equal_the_kernels(monkeypatch):
    gate, up = random(9, 24, dtype=torch.float32), random(9, 24, dtype=torch.float32)
    states, (cos, sin) = random(1, 5, 2, 16, dtype=torch.float32), torch.randn(2, 1, 5, 16, device=DEVICE)
    ours = [pointwise.swiglu(gate, up), pointwise.rotated(states, cos, sin)]
    monkeypatch.setattr(pointwise, "_kernels", lambda tensor: None)
    torch.testing.assert_close(ours, [pointwise.swiglu(gate, up), pointwise.rotated(states, cos, sin)])

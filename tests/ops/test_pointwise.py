"""SwiGLU, rotary embedding and RMS norm: the kernels, interpreted on a CPU, against fp64 and plain PyTorch."""

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


def plain_norm(states, weight, eps, residual=None):
    total = states if residual is None else residual + states
    normed = F.rms_norm(total, weight.shape, weight.to(total.dtype), eps)
    return normed if residual is None else (total, normed)


def norm_inputs(*shape, dtype, weight_dtype=None, residual=True):
    states, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=weight_dtype or dtype)
    return [states, weight, *([random(*shape, dtype=dtype)] if residual else [])]


def assert_norm_equals_fp64(inputs, used=(0, 1)):
    """Of states, weight and perhaps a residual; then only the `used` ones of sum and normed states get a gradient."""

    def results(norm, dtype=None):
        states, weight, *residual = leaves = [
            tensor.detach().to(dtype or tensor.dtype).requires_grad_() for tensor in inputs
        ]
        outputs = norm(states, weight, 1e-5, *residual)
        outputs = [outputs[index] for index in used] if residual else [outputs]
        grads = [torch.linspace(-1, 2, out.numel(), device=DEVICE).cos().view(out.shape) for out in outputs]
        grads = [grad.to(inputs[0].dtype).to(states.dtype) for grad in grads]
        gradients = torch.autograd.grad(outputs, leaves, grads, allow_unused=True)
        return [tensor.detach() for tensor in (*outputs, *gradients) if tensor is not None]

    ours, dense, truth = results(pointwise.rms_norm), results(plain_norm), results(plain_norm, torch.float64)
    assert_close_as_dense(ours, dense, truth, inputs[0].dtype)


ALONE_OR_NOT = pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])


@DTYPES
@ALONE_OR_NOT
@pytest.mark.parametrize(
    "shape", [(1, 7, 24), (80,), (2, 3, 1000), (1, 2880), (1, 0, 24), (37, 4096), (5, 16384), (2, 20000)], ids=str
)
def test_norm_equals_fp64(shape, residual, dtype):
    assert_norm_equals_fp64(norm_inputs(*shape, dtype=dtype, residual=residual))


@DTYPES
@pytest.mark.parametrize("used", [[0], [1]], ids=["sum", "normed"])
def test_an_output_of_the_norm_may_stay_unused(used, dtype):
    assert_norm_equals_fp64(norm_inputs(3, 5, 80, dtype=dtype), used)


@ALONE_OR_NOT
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_norm_of_states_narrower_than_its_weight(residual, dtype):
    inputs = norm_inputs(21, 80, dtype=dtype, weight_dtype=torch.float32, residual=residual)
    assert_norm_equals_fp64(inputs)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert_norm_equals_fp64(inputs)


@ALONE_OR_NOT
@pytest.mark.parametrize("size", [0.0, 1e-4, 1e4])
def test_norm_of_extreme_states(size, residual):
    inputs = norm_inputs(9, 1000, dtype=torch.bfloat16, residual=residual)
    with torch.no_grad():
        for states in inputs[::2]:
            states[:5] *= size
    assert_norm_equals_fp64(inputs)


def test_the_sum_is_rounded_before_it_is_normed():
    states, weight, residual = norm_inputs(9, 1000, dtype=torch.bfloat16)
    total, normed = pointwise.rms_norm(states, weight, 1e-5, residual)
    assert torch.equal(total, states + residual)
    assert torch.equal(normed, pointwise.rms_norm(total, weight, 1e-5))


def test_norm_reads_states_residuals_and_gradients_by_their_strides():
    wide, weight = random(5, 3, 48, dtype=torch.float32), random(24, dtype=torch.float32)
    states, residual = wide.transpose(0, 1).chunk(2, dim=-1)
    grads = torch.randn(2, 24, 5, 3, device=DEVICE).permute(0, 3, 2, 1).unbind()
    ours, expected = (norm(states, weight, 1e-5, residual) for norm in (pointwise.rms_norm, plain_norm))
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(*(torch.autograd.grad(outputs, [wide, weight], grads) for outputs in (ours, expected)))


@pytest.mark.parametrize("trained", [0, 1, 2], ids=["states", "weight", "residual"])
def test_only_what_is_trained_gets_a_gradient_from_the_norm(trained):
    inputs = norm_inputs(9, 24, dtype=torch.float32)
    states, weight, residual = (tensor if i == trained else tensor.detach() for i, tensor in enumerate(inputs))
    grad = torch.randn(9, 24, device=DEVICE)
    gradients = [
        torch.autograd.grad(norm(states, weight, 1e-5, residual)[1], inputs[trained], grad)
        for norm in (pointwise.rms_norm, plain_norm)
    ]
    torch.testing.assert_close(*gradients)


def test_a_residual_of_another_dtype_is_added_as_pytorch_does():
    states, weight, residual = norm_inputs(9, 24, dtype=torch.bfloat16)
    outputs = [norm(states, weight, 1e-5, residual.float()) for norm in (pointwise.rms_norm, plain_norm)]
    torch.testing.assert_close(*outputs)


def test_backward_of_a_norm_reads_the_parameter_as_it_is_by_then():
    states, weight, _ = norm_inputs(9, 24, dtype=torch.float32)
    values, grad = weight.detach().clone(), torch.randn(9, 24, device=DEVICE)
    expected = torch.autograd.grad(plain_norm(states, weight, 1e-5), [states, weight], grad)
    normed = pointwise.rms_norm(states, weight, 1e-5)
    weight.data = torch.empty(0, device=DEVICE)  # as ZeRO-3 does behind the forward
    weight.data = 2 * values
    of_states, of_weight = torch.autograd.grad(normed, [states, weight], grad)
    torch.testing.assert_close((of_states / 2, of_weight), expected)


def test_the_norm_keeps_what_is_normed_without_a_copy():
    states, weight, residual = norm_inputs(9, 48, dtype=torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        total, _ = pointwise.rms_norm(states, weight, 1e-5, residual)
        pointwise.rms_norm(states[:, 24:], weight[24:], 1e-5)
    places = [tensor.data_ptr() for tensor in (total, weight, states[:, 24:], weight[24:])]
    assert [tensor.data_ptr() for tensor in kept if tensor.shape != (9,)] == places


def test_inputs_are_all_that_is_kept():
    gate, up = random(9, 24, dtype=torch.float32), random(9, 24, dtype=torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        pointwise.swiglu(gate, up)
    assert {tensor.data_ptr() for tensor in kept} == {gate.data_ptr(), up.data_ptr()}


def test_the_plain_versions_equal_the_kernels(monkeypatch):
    gate, up = random(9, 24, dtype=torch.float32), random(9, 24, dtype=torch.float32)
    states, (cos, sin) = random(1, 5, 2, 16, dtype=torch.float32), torch.randn(2, 1, 5, 16, device=DEVICE)

    def outputs():
        normed = pointwise.rms_norm(gate, up[0], 1e-5), *pointwise.rms_norm(gate, up[0], 1e-5, up)
        return [pointwise.swiglu(gate, up), pointwise.rotated(states, cos, sin), *normed]

    ours = outputs()
    monkeypatch.setattr(pointwise, "_kernels", lambda tensor: None)
    torch.testing.assert_close(ours, outputs())


@pytest.mark.parametrize(("states", "weight", "residual"), [((4, 24), (12,), None), ((4, 24), (24,), (1, 24))])
def test_rms_norm_names_shapes_that_do_not_fit(states, weight, residual):
    with pytest.raises(ValueError, match=r"\[4, 24\]"):
        pointwise.rms_norm(
            torch.ones(states, device=DEVICE), torch.ones(weight, device=DEVICE), 1e-6,
            None if residual is None else torch.ones(residual, device=DEVICE),
        )  # fmt: skip

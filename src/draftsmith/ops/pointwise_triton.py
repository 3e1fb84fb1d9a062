"""SwiGLU, rotary embedding and RMS norm as one kernel each way: they cost one pass over what they read and write.

Arithmetic is fp32. Tensors may be empty and longer than 2^31 elements.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


BLOCK = 2048  # elements of a program
KERNEL_OPTIONS = {"num_warps": 4}
MAX_NORM_WIDTH = 16384  # a program holds a row
NORM_WARPS = 16  # of all backward programs of a multiprocessor: registers suffice for these to run at once
MAX_FETCHED = 32 * 1024  # bytes of a row that are fetched ahead: of three tensors 99 KiB of shared memory hold them


@triton.jit
def _swiglu_kernel(gate, up, out, elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < elements
    x = tl.load(gate + offsets, mask=mask).to(tl.float32)
    y = tl.load(up + offsets, mask=mask).to(tl.float32)
    tl.store(out + offsets, x * tl.sigmoid(x) * y, mask=mask)


@triton.jit
def _swiglu_backward_kernel(grad, gate, up, grad_gate, grad_up, elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < elements
    g = tl.load(grad + offsets, mask=mask).to(tl.float32)
    x = tl.load(gate + offsets, mask=mask).to(tl.float32)
    y = tl.load(up + offsets, mask=mask).to(tl.float32)
    sigmoid = tl.sigmoid(x)
    tl.store(grad_gate + offsets, g * y * sigmoid * (1 + x * (1 - sigmoid)), mask=mask)
    tl.store(grad_up + offsets, g * x * sigmoid, mask=mask)


@triton.jit
def _rotate_kernel(
    states, cos, sin, out, lines, row_stride, head_stride,
    HEADS: tl.constexpr, HALF: tl.constexpr, BACKWARD: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A line is one head of one row, `states` lie by the strides, `out` one line behind the other."""
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (line < lines) & (column < HALF)
    row, head = line // HEADS, line % HEADS
    source = states + row * row_stride + head * head_stride + column
    table = row * 2 * HALF + column
    low = tl.load(source, mask=mask).to(tl.float32)
    high = tl.load(source + HALF, mask=mask).to(tl.float32)
    low_cos = tl.load(cos + table, mask=mask).to(tl.float32)
    high_cos = tl.load(cos + table + HALF, mask=mask).to(tl.float32)
    low_sin = tl.load(sin + table, mask=mask).to(tl.float32)
    high_sin = tl.load(sin + table + HALF, mask=mask).to(tl.float32)
    if BACKWARD:  # the transpose
        new_low, new_high = low * low_cos + high * high_sin, high * high_cos - low * low_sin
    else:
        new_low, new_high = low * low_cos - high * low_sin, high * high_cos + low * high_sin
    target = out + line * 2 * HALF + column
    tl.store(target, new_low, mask=mask)
    tl.store(target + HALF, new_high, mask=mask)


@triton.jit
def _rms_norm_kernel(
    states, residual, weight, total, normed, rstd, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One row a program. `residual` may be None, as is `total` then."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    place = row * WIDTH + column
    x = tl.load(states + place, mask=mask, other=0).to(tl.float32)
    if residual is not None:
        x += tl.load(residual + place, mask=mask, other=0).to(tl.float32)
        rounded = x.to(total.dtype.element_ty)  # what backward will read
        tl.store(total + place, rounded, mask=mask)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / WIDTH + eps)
    tl.store(rstd + row, scale)
    tl.store(normed + place, x * scale * tl.load(weight + column, mask=mask).to(tl.float32), mask=mask)


@triton.jit
def _rms_norm_backward_kernel(
    grad, grad_total, total, weight, rstd, grad_states, grad_weights, rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every `num_programs`-th row, and these rows' part of the weight's gradient.

    `grad_total` is None for zeros, `grad_states` where it is not wanted.
    """
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    w = tl.load(weight + column, mask=mask, other=0).to(tl.float32)
    grad_weight = tl.zeros([BLOCK], tl.float32)
    for row in tl.range(program, rows, tl.num_programs(0), num_stages=STAGES):
        place = row * WIDTH + column
        scale = tl.load(rstd + row)
        g = tl.load(grad + place, mask=mask, other=0).to(tl.float32)
        x = tl.load(total + place, mask=mask, other=0).to(tl.float32) * scale
        grad_weight += g * x
        if grad_states is not None:
            g *= w
            grad_state = scale * (g - x * (tl.sum(g * x) / WIDTH))
            if grad_total is not None:
                grad_state += tl.load(grad_total + place, mask=mask, other=0).to(tl.float32)
            tl.store(grad_states + place, grad_state, mask=mask)
    tl.store(grad_weights + program * WIDTH + column, grad_weight, mask=mask)


def swiglu(gate: Tensor, up: Tensor, out: Tensor) -> None:
    """Contiguous tensors of one shape; `out` is written."""
    if elements := gate.numel():
        _swiglu_kernel[(triton.cdiv(elements, BLOCK),)](gate, up, out, elements, BLOCK=BLOCK, **KERNEL_OPTIONS)


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor, grad_gate: Tensor, grad_up: Tensor) -> None:
    """Contiguous tensors of one shape; the last two are written."""
    if elements := gate.numel():
        _swiglu_backward_kernel[(triton.cdiv(elements, BLOCK),)](
            grad, gate, up, grad_gate, grad_up, elements, BLOCK=BLOCK, **KERNEL_OPTIONS
        )


def rotate(states: Tensor, cos: Tensor, sin: Tensor, out: Tensor, *, backward: bool) -> None:
    """`states` [N, heads, d] by any strides of rows and heads; `cos`, `sin` [N, d] and `out`, written, contiguous."""
    rows, heads, width = states.shape
    columns = triton.next_power_of_2(width // 2)
    lines = max(1, BLOCK // (2 * columns))
    if rows:
        _rotate_kernel[(triton.cdiv(rows * heads, lines),)](
            states, cos, sin, out, rows * heads, states.stride(0), states.stride(1),
            HEADS=heads, HALF=width // 2, BACKWARD=backward, LINES=lines, COLUMNS=columns, **KERNEL_OPTIONS,
        )  # fmt: skip


def rms_norm(
    states: Tensor, residual: Tensor | None, weight: Tensor, eps: float, total: Tensor | None, normed: Tensor,
    rstd: Tensor,
) -> None:  # fmt: skip
    """Contiguous `[..., H]` of one dtype, `weight` `[H]` of any; writes the last three, `rstd` in fp32."""
    if rows := rstd.numel():
        width = states.shape[-1]
        block, warps = _norm_block(width)
        _rms_norm_kernel[(rows,)](
            states, residual, weight, total, normed, rstd, eps, WIDTH=width, BLOCK=block, num_warps=warps
        )


def rms_norm_backward(
    grad: Tensor, grad_total: Tensor | None, total: Tensor, weight: Tensor, rstd: Tensor, grad_states: Tensor | None
) -> Tensor:
    """As `rms_norm`; writes `grad_states`, unless None, and returns the gradient of `weight` in fp32."""
    rows, width = rstd.numel(), grad.shape[-1]
    block, warps = _norm_block(width)
    programs = min(rows, _multiprocessors(grad.device) * NORM_WARPS // warps)
    grad_weights = torch.empty(programs, width, dtype=torch.float32, device=grad.device)
    if rows:
        _rms_norm_backward_kernel[(programs,)](
            grad, grad_total, total, weight, rstd, grad_states, grad_weights, rows,
            WIDTH=width, BLOCK=block, STAGES=1 + (block * grad.element_size() <= MAX_FETCHED), num_warps=warps,
        )  # fmt: skip
    return grad_weights.sum(0)


def _norm_block(width: int) -> tuple[int, int]:
    """Elements of a row's block, and the warps of its program."""
    block = triton.next_power_of_2(width)
    return block, min(max(block // 512, 4), NORM_WARPS)


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1

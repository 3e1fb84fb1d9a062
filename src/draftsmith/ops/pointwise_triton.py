"""SwiGLU and rotary embedding as one kernel each way: they cost one pass over what they read and write.

Arithmetic is fp32. Tensors may be empty and longer than 2^31 elements.
"""

import triton
import triton.language as tl
from torch import Tensor


BLOCK = 2048  # elements of a program
KERNEL_OPTIONS = {"num_warps": 4}


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

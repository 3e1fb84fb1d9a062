"""Compiles the kernels that an attention call launches for an H100 or H200, on a machine without any GPU.

    python -m tests.ops.offline_compilation '[["bfloat16", 128, "large"]]'

prints one JSON line per kernel, with the tiles of GPUs of large or small shared memory. Needs a process of its own:
under TRITON_INTERPRET nothing is compiled.
"""

import json
import re
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from draftsmith.ops import pointwise_triton
from draftsmith.ops.block_sparse_attention import merge_triton
from draftsmith.ops.block_sparse_attention import triton as engine
from draftsmith.ops.block_sparse_attention.layout import Layout
from draftsmith.ops.streaming_loss import triton as losses
from draftsmith.ops.streaming_loss.rows import DraftVocabulary


DIAGONALS, LENGTH = 6, 4096


class Usage(NamedTuple):
    registers: int
    spill_bytes: int  # and any other local memory
    static_shared: int


def resource_usage(cubin: bytes) -> Usage:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack, shared = map(int, re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", text).groups())
    return Usage(registers, stack, shared)


class OfflineDriver:
    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(monkeypatched: type[JITFunction]) -> dict[str, Any]:
    """From now on a launch compiles its kernel and stops there; returns the kernels by name, as they come."""
    kernels: dict[str, Any] = {}
    run = monkeypatched.run

    def compile_kernel(self, *args, warmup, **kwargs):
        kernels[self.fn.__name__] = run(self, *args, warmup=True, **kwargs)

    triton.runtime.driver.set_active(OfflineDriver())
    monkeypatched.run = compile_kernel
    return kernels


def call(dtype: torch.dtype, head_dim: int) -> None:
    """Forward and backward of an unroll's last step, with documents and sinks; other engines' merge; all else."""
    query = torch.empty(1, 8, LENGTH, head_dim, dtype=dtype)
    key = value = torch.empty(1, 2, LENGTH, head_dim, dtype=dtype)
    diagonals, sinks = [key] * DIAGONALS, torch.empty(8)
    layout = Layout(torch.zeros(1, LENGTH, dtype=torch.long), None, 1, LENGTH)
    out, lse = engine.forward(query, key, value, diagonals, diagonals, sinks, layout, window=None, scale=1.0)
    engine.backward(
        out, query, key, value, diagonals, diagonals, sinks, out, lse, layout, window=None, scale=1.0, key_dtype=dtype
    )
    merge_triton.merge_forward(out, lse, query, diagonals, diagonals, sinks, layout.padding, 1.0)
    pointwise_triton.swiglu(query, query, query)
    pointwise_triton.swiglu_backward(query, query, query, query, query)
    pointwise_triton.rotate(query[0], query[0, 0], query[0, 0], query[0], backward=True)
    normed, weight, rstd = query.view(-1, 4096), torch.empty(4096), torch.empty(query.numel() // 4096)
    pointwise_triton.rms_norm(normed, normed, weight, 1e-6, normed, normed, rstd)
    pointwise_triton.rms_norm_backward(normed, normed, normed, weight, rstd, normed)
    logits, rows = torch.empty(7, 32_000, dtype=dtype), torch.zeros(7, dtype=torch.long)
    losses.cross_entropy_rows(logits, rows, torch.empty(7), softcap=30.0)
    losses.teacher_rows(
        logits, torch.empty(1, 128_256, dtype=dtype), rows[None], torch.empty(7), objective="lk_lambda",
        vocabulary=DraftVocabulary(torch.zeros(32_000, dtype=torch.long), torch.zeros(128_256, dtype=torch.long)),
        teacher_softcap=None,
    )  # fmt: skip


def main(configurations: list[tuple[str, int, str]]) -> None:
    kernels, tiles_for = compile_only(JITFunction), engine.tiles_for
    for dtype, head_dim, memory in configurations:
        engine.tiles_for = tiles_for if memory == "large" else lambda query: engine.SMALL_TILES_16_BIT[query.shape[-1]]
        call(getattr(torch, dtype), head_dim)
        for name, kernel in kernels.items():
            usage = resource_usage(kernel.asm["cubin"])
            fields = {"kernel": name, "configuration": [dtype, head_dim, memory], "shared": kernel.metadata.shared}
            print(json.dumps(fields | usage._asdict()), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

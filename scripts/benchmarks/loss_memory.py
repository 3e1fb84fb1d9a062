"""Peak resident growth of the draft loss over its rows, streamed and dense; one subprocess per point."""

import argparse
import json
import os
import platform
import subprocess
import sys

import torch

from .common import OUTPUT, ROOT


HIDDEN, VOCABULARY, CHUNK = 64, 128 * 1024, 256
DENSE_ROWS = 1024  # beyond, the dense loss needs more than 20 GiB


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmark.py loss-memory", description=__doc__)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.worker:
        print(measure(args.worker[0], int(args.worker[1])))
    else:
        loss_memory()


def loss_memory() -> None:
    """Growth in MiB for several row counts at V = 128k; the streamed loss must not grow with the rows."""
    logits = 2 * CHUNK * VOCABULARY * 4 / 2**20  # draft and teacher logits of one chunk
    table = []
    for rows in (256, 1024, 4096):
        row: dict[str, int | None] = {"rows": rows, "dense": None}
        for kind in ("streamed", "dense") if rows <= DENSE_ROWS else ("streamed",):
            script = str(ROOT / "scripts" / "benchmark.py")
            command = [sys.executable, script, "loss-memory", "--worker", kind, str(rows)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            row[kind] = round(float(done.stdout))
        table.append(row)
        print(f"{rows:5d} rows: streamed {row['streamed']} MiB, dense {row['dense']} MiB", flush=True)
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "shape": {"vocabulary": VOCABULARY, "hidden": HIDDEN, "chunk_size": CHUNK, "dtype": "float32"},
        "chunk_logits_mib": logits,
        "peak_growth_mib": table,
    }
    path = OUTPUT / "loss_memory.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"logits of one chunk: {logits:.0f} MiB; written to {path.relative_to(ROOT)}")


def measure(kind: str, rows: int) -> float:
    """Peak resident growth in MiB of one forward and backward, over the resident size before it."""
    from draftsmith.ops import streaming_draft_loss
    from draftsmith.ops.streaming_loss.reference import reference_draft_loss

    torch.manual_seed(0)
    weight = torch.randn(VOCABULARY, HIDDEN, requires_grad=True)
    teacher_weight = torch.randn(VOCABULARY, HIDDEN)
    states, teacher = [torch.randn(rows, HIDDEN, requires_grad=True)], torch.randn(rows, HIDDEN)
    options = {"streamed": {"chunk_size": CHUNK}, "dense": {}}[kind]
    loss_function = {"streamed": streaming_draft_loss, "dense": reference_draft_loss}[kind]
    before = _kibibytes("VmRSS")
    loss_function(states, weight, teacher, teacher_weight, [torch.arange(rows)], **options)[0].backward()
    return (_kibibytes("VmHWM") - before) / 1024


def _kibibytes(name: str) -> int:
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

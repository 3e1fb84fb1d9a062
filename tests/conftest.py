"""Triton kernels run without a GPU, and uninitialised memory is poisoned in every test.

So reading such memory cannot pass unnoticed.
"""

import json
import os

import pytest
import torch
from torch.utils._device import _device_constructors


if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported, which importing draftsmith does

_device_constructors()  # cached: with what is patched below in it, `with device:` would not know `torch.empty`


def _poisoned(create):
    def create_poisoned(*args, **kwargs):
        tensor = create(*args, **kwargs)
        with torch.no_grad():
            if tensor.is_floating_point() or tensor.is_complex():
                return tensor.fill_(float("nan"))
            return tensor.fill_(True if tensor.dtype == torch.bool else 113)  # garbage that fits every integer dtype

    return create_poisoned


@pytest.fixture(autouse=True)
def poison_uninitialised_memory(monkeypatch):
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


@pytest.fixture
def replays(monkeypatch):
    """The CUDA graphs that are replayed, as often as they are."""
    calls = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (calls.append(graph), replay(graph)))
    return calls


def pytest_terminal_summary(terminalreporter):
    """The worst errors of tests that record them; here, because under xdist no other process sees all tests."""
    properties = [
        item for reports in terminalreporter.stats.values() for report in reports
        for item in getattr(report, "user_properties", ()) if getattr(report, "when", None) == "call"
    ]  # fmt: skip
    worst = {}
    for engine, tensor, ratio, bound, case in (value for name, value in properties if name == "attention_error"):
        figures = worst.setdefault(engine, {}).setdefault(tensor, {"ratio": 0.0, "bound": 0.0})
        if bound >= figures["bound"]:
            figures |= {"bound": bound, "case": case}
        figures["ratio"] = max(figures["ratio"], ratio)
    groups = [value for name, value in properties if name == "attention_group"]
    for engine, tensors in worst.items():
        counts = [sum(group[index] for group in groups if group[0] == engine) for index in (1, 2)]
        terminalreporter.write_line(f"{engine}: {counts[0]} cases, {counts[1]} Triton compilations")
        for tensor, figures in tensors.items():
            terminalreporter.write_line(
                f"    {tensor}: {figures['ratio']:.2f} of dense attention's error, {figures['bound']:.2f} of the bound"
            )
    if worst and (path := os.environ.get("ATTENTION_FUZZ_REPORT")):
        with open(path, "w") as file:
            json.dump({"worst": worst, "groups": groups}, file, indent=1)

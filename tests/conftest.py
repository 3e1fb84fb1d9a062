"""Uninitialised memory is poisoned in every test, so that reading it cannot pass unnoticed."""

import pytest
import torch


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
    monkeypatch.setattr(torch, "empty", _poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", _poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", _poisoned(torch.Tensor.new_empty))

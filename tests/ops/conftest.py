import numpy as np
import pytest
import torch


@pytest.fixture
def round_bf16_as_gpus_do(monkeypatch):
    """The interpreter cuts the low bits of an fp32 off where a GPU rounds to the nearest bf16."""
    from triton.runtime import interpreter

    convert, tl = interpreter._convert_float, interpreter.tl

    def convert_exactly(values, source, target, rounding_mode):
        values = np.ascontiguousarray(values)
        if (source, target) == (tl.float32, tl.bfloat16):
            return torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
        if (source, target) == (tl.bfloat16, tl.float32):
            return values.view(np.uint16).astype(np.uint32) << 16
        return convert(values, source, target, rounding_mode)

    monkeypatch.setattr(interpreter, "_convert_float", convert_exactly)

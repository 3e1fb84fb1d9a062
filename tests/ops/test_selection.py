import pytest
import torch

from draftsmith.ops import select_rows


@pytest.mark.parametrize("rows", [[], [4], [0, 3, 4], [4, 0, 2, 1, 3]])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("width", "dtype"), [(3, torch.float64), (3, torch.bfloat16), (8, torch.bfloat16)])
def test_equals_indexing(rows, dim, width, dtype):
    states = torch.randn(5, 5, width, dtype=dtype, requires_grad=True)
    rows = torch.tensor(rows, dtype=torch.long)
    indexed = states[rows] if dim == 0 else states[:, rows]
    weights = torch.randn_like(indexed)
    selected = select_rows(states, rows, dim)
    assert torch.equal(selected, indexed)
    (gradient,) = torch.autograd.grad((selected * weights).sum(), states)
    (expected,) = torch.autograd.grad((indexed * weights).sum(), states)
    assert torch.equal(gradient, expected)

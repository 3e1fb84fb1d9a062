import pytest
import torch
from torch.utils.checkpoint import checkpoint

from draftsmith.ops import KeptResult, block_sparse_flash_attention
from draftsmith.ops import block_sparse_attention as attention
from draftsmith.ops.block_sparse_attention import engines


@pytest.fixture
def forwards(monkeypatch):
    """The forward passes that engines compute, by name."""
    calls = []

    def load(name):
        engine = engines.load(name)
        return engine._replace(forward=lambda *args, **options: calls.append(name) or engine.forward(*args, **options))

    monkeypatch.setattr(attention, "load", load)
    return calls


@pytest.mark.parametrize("implementation", ["sdpa", "triton", "reference"])
def test_a_recomputation_takes_what_was_kept(implementation, forwards):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, heads, 9, 16, generator=generator) for heads in (4, 2, 2, 2, 2)]
    leaves = [tensor.requires_grad_() for tensor in tensors]

    def attend(query, key, value, *diagonals, kept_result=None):
        return block_sparse_flash_attention(
            query * 2, key, value, diagonals[:1], diagonals[1:], implementation=implementation, kept_result=kept_result
        )

    expected = torch.autograd.grad(attend(*leaves).square().sum(), leaves)
    forwards.clear()
    loss = checkpoint(attend, *leaves, kept_result=KeptResult(), use_reentrant=False).square().sum()
    for kept, backwards in ((True, 1), (False, 2)):  # what was kept is used once, then computed again
        gradients = torch.autograd.grad(loss, leaves, retain_graph=kept)
        for gradient, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, other)
        assert len(forwards) == (0 if implementation == "reference" else backwards)

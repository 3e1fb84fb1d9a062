from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from draftsmith.ops import block_sparse_flash_attention, share_keys


def leaves(dtype=torch.float64, steps=3):
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 2, 20, 16)] * 2 + [(1, 4, 20, 16)] * steps
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [tensor.requires_grad_() for tensor in tensors]


def attend(query, key, value, *sums, implementation=None):
    return block_sparse_flash_attention(query, key, value, implementation=implementation, key_gradients=sums or None)


def loss(
    key,
    value,
    *queries,
    shared=True,
    implementations=None,
    wrapped=lambda function, *args, **kw: function(*args, **kw),
):
    keys = share_keys(key, value) if shared else (key, value)
    names = implementations or [None] * len(queries)
    outputs = [wrapped(attend, query, *keys, implementation=name) for query, name in zip(queries, names, strict=True)]
    return sum(out.square().sum() for out in outputs)


def assert_gradients_of_autograd(**options):
    tensors = leaves()
    expected = torch.autograd.grad(loss(*tensors, shared=False), tensors)
    for gradient, truth in zip(torch.autograd.grad(loss(*tensors, **options), tensors), expected, strict=True):
        torch.testing.assert_close(gradient, truth, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("implementations", [(None, None, None), (None, "reference", None), ("reference",) * 3])
def test_the_sum_over_calls_is_autograd_s(implementations):
    assert_gradients_of_autograd(implementations=implementations)


def test_recomputed_calls_sum_the_same():
    def recomputed(function, *args, **options):
        return checkpoint(partial(function, **options), *args, use_reentrant=False)

    assert_gradients_of_autograd(wrapped=recomputed)


def test_reentrant_recompute_sums_the_same():
    tensors = leaves()
    expected = torch.autograd.grad(loss(*tensors, shared=False), tensors)

    def recomputed(function, *args, **options):
        return checkpoint(partial(function, **options), *args, use_reentrant=True)

    loss(*tensors, wrapped=recomputed).backward()
    for tensor, truth in zip(tensors, expected, strict=True):
        torch.testing.assert_close(tensor.grad, truth, rtol=1e-11, atol=1e-11)


def test_a_compiled_loss_sums_the_same():
    assert_gradients_of_autograd(
        wrapped=torch.compile(lambda function, *args, **options: function(*args, **options), backend="aot_eager")
    )


def test_the_sum_is_rounded_once():
    """Forty steps in bf16: the truth is the sum of the same gradients, added in fp64."""
    tensors = leaves(torch.bfloat16, steps=40)
    key, value, *queries = tensors
    parts = [torch.autograd.grad(loss(key, value, query, shared=False), key)[0] for query in queries]
    truth = sum(part.double() for part in parts)

    def error(shared):
        return (torch.autograd.grad(loss(*tensors, shared=shared), key)[0].double() - truth).norm()

    assert error(shared=True) < 0.5 * error(shared=False)


def test_a_second_backward_starts_from_zero():
    tensors = leaves()
    total = loss(*tensors)
    first = torch.autograd.grad(total, tensors, retain_graph=True)
    for again, before in zip(torch.autograd.grad(total, tensors), first, strict=True):
        assert torch.equal(again, before)


def test_a_backward_that_does_not_reach_the_keys_leaves_nothing_behind():
    tensors = leaves()
    expected = torch.autograd.grad(loss(*tensors, shared=False), tensors[:2])
    total = loss(*tensors)
    torch.autograd.grad(total, tensors[2:], retain_graph=True)
    for gradient, truth in zip(torch.autograd.grad(total, tensors[:2]), expected, strict=True):
        torch.testing.assert_close(gradient, truth, rtol=1e-11, atol=1e-11)


def test_keys_without_gradient_are_left_alone():
    key, value, *queries = leaves()
    key, value = key.detach(), value.detach()
    expected = torch.autograd.grad(loss(key, value, *queries, shared=False), queries)
    for gradient, truth in zip(torch.autograd.grad(loss(key, value, *queries), queries), expected, strict=True):
        assert torch.equal(gradient, truth)

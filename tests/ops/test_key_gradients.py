import pytest
import torch

from draftsmith.ops import KeyGradients, block_sparse_flash_attention


def leaves(dtype=torch.float64, steps=3):
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 2, 20, 16)] * 2 + [(1, 4, 20, 16)] * steps
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [tensor.requires_grad_() for tensor in tensors]


def loss(key, value, *queries, key_gradients=None, implementations=(None, None, None)):
    if key_gradients is not None:
        key, value = key_gradients.track(key, value)
    return sum(
        block_sparse_flash_attention(query, key, value, implementation=name, key_gradients=key_gradients)
        .square()
        .sum()
        for query, name in zip(queries, implementations, strict=True)
    )


@pytest.mark.parametrize("implementations", [(None, None, None), (None, "reference", None), ("reference",) * 3])
def test_the_sum_over_calls_is_autograd_s(implementations):
    tensors = leaves()
    expected = torch.autograd.grad(loss(*tensors), tensors)
    ours = torch.autograd.grad(loss(*tensors, key_gradients=KeyGradients(), implementations=implementations), tensors)
    for gradient, truth in zip(ours, expected, strict=True):
        torch.testing.assert_close(gradient, truth, rtol=1e-11, atol=1e-11)


def test_the_sum_is_rounded_once():
    """Forty steps in bf16: the truth is the sum of the same gradients, added in fp64."""
    tensors = leaves(torch.bfloat16, steps=40)
    key, value, *queries = tensors
    parts = [torch.autograd.grad(loss(key, value, query, implementations=(None,)), key)[0] for query in queries]
    truth = sum(part.double() for part in parts)

    def error(gradients):
        total = loss(*tensors, key_gradients=gradients, implementations=(None,) * 40)
        return (torch.autograd.grad(total, key)[0].double() - truth).norm()

    assert error(KeyGradients()) < 0.5 * error(None)


def test_a_second_backward_starts_from_zero():
    tensors = leaves()
    total = loss(*tensors, key_gradients=KeyGradients())
    first = torch.autograd.grad(total, tensors, retain_graph=True)
    for again, before in zip(torch.autograd.grad(total, tensors), first, strict=True):
        assert torch.equal(again, before)


def test_a_backward_that_does_not_reach_the_keys_leaves_nothing_behind():
    tensors = leaves()
    expected = torch.autograd.grad(loss(*tensors), tensors[:2])
    total = loss(*tensors, key_gradients=KeyGradients())
    torch.autograd.grad(total, tensors[2:], retain_graph=True)
    for gradient, truth in zip(torch.autograd.grad(total, tensors[:2]), expected, strict=True):
        torch.testing.assert_close(gradient, truth, rtol=1e-11, atol=1e-11)


def test_keys_without_gradient_are_left_alone():
    key, value, *queries = leaves()
    key, value = key.detach(), value.detach()
    expected = torch.autograd.grad(loss(key, value, *queries), queries)
    for gradient, truth in zip(
        torch.autograd.grad(loss(key, value, *queries, key_gradients=KeyGradients()), queries), expected, strict=True
    ):
        assert torch.equal(gradient, truth)

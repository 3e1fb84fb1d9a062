import weakref

import torch
from torch import nn

from draftsmith.ops import made_again


def test_the_tensor_is_not_kept_and_gradients_are_the_same():
    torch.manual_seed(0)
    linear = nn.Linear(6, 4, dtype=torch.float64)
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(linear(x.sin()).square().sum(), [x, *linear.parameters()])
    made = []
    product = x.sin()
    with made_again(product, lambda: made.append(1) or x.sin()):
        out = linear(product)
    product.detach().fill_(float("nan"))  # nobody reads it any more
    gradients = torch.autograd.grad(out.square().sum(), [x, *linear.parameters()])
    assert made == [1]
    for gradient, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, other)


def test_parameters_may_move_in_between_and_their_memory_is_not_kept():
    torch.manual_seed(0)
    linear = nn.Linear(6, 4, bias=False, dtype=torch.float64)
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(linear(x.sin()).square().sum(), [x, *linear.parameters()])
    product = x.sin()
    with made_again(product, x.sin, parameters=linear.parameters()):
        out = linear(product)
    values = linear.weight.detach().clone()
    memory = weakref.ref(linear.weight.untyped_storage())
    linear.weight.data = torch.empty(0, dtype=torch.float64)  # as ZeRO-3 does behind the forward
    assert memory() is None
    linear.weight.data = torch.cat([torch.ones(3, dtype=torch.float64), values.flatten()])[3:].view(4, 6)
    gradients = torch.autograd.grad(out.square().sum(), [x, *linear.parameters()])
    for gradient, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, other)

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

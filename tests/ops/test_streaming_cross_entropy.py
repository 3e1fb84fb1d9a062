import logging
import random

import pytest
import torch

from draftsmith.ops import streaming_cross_entropy
from draftsmith.ops.streaming_loss import chunking
from draftsmith.ops.streaming_loss.reference import reference_cross_entropy
from tests.ops.error_bounds import assert_close_as_dense


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def make_inputs(*, rows=37, hidden=16, vocab=101, bias=None, seed=0):
    """hidden states, weight (, bias) in fp64, and labels of which a third is ignored."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(rows, hidden, generator=generator), torch.randn(vocab, hidden, generator=generator)]
    if bias is not None:
        tensors.append(torch.where(torch.rand(vocab, generator=generator) < 0.5, bias, -bias))
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    labels[torch.rand(rows, generator=generator) < 0.33] = -100
    return [tensor.double() for tensor in tensors], labels


def run(loss_function, tensors, labels, *, dtype=torch.float64, factor=3.0, **options):
    """The loss and the gradients of `factor` times it."""
    leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
    bias = leaves[2] if len(leaves) == 3 else None
    loss = loss_function(leaves[0], leaves[1], labels, bias, **options)
    if loss.dim():
        factor = torch.linspace(-1, 2, loss.numel(), device=loss.device).view_as(loss)
    return [loss.detach(), *torch.autograd.grad((loss * factor).sum(), leaves)]


def check(tensors, labels, dtype, chunk_size=None, **options):
    tensors = [tensor.to(dtype).double() for tensor in tensors]
    truth = run(reference_cross_entropy, tensors, labels, **options)
    dense = run(reference_cross_entropy, tensors, labels, dtype=dtype, **options)
    ours = run(streaming_cross_entropy, tensors, labels, dtype=dtype, chunk_size=chunk_size, **options)
    assert_close_as_dense(ours, dense, truth, dtype)


@DTYPES
@pytest.mark.parametrize("seed", range(24))
def test_equals_dense_for_random_options(seed, dtype):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    tensors, labels = make_inputs(
        rows=rng.choice((1, 2, 37, 130)),
        vocab=rng.choice((2, 101, 1000)),
        bias=rng.choice((None, 0.5, 5.0)),
        seed=seed,
    )
    check(
        tensors, labels, dtype, rng.choice((1, 7, 64, None)), reduction=("mean", "sum", "none")[seed % 3],
        token_weights=torch.rand(len(labels)) if rng.random() < 0.5 else None,
        logit_softcap=rng.choice((None, None, 2.0, 30.0)), num_items=rng.choice((None, 5, torch.tensor(11))),
    )  # fmt: skip


def test_head_with_bias_of_five_and_soft_cap():
    tensors, labels = make_inputs(bias=5.0)
    check(tensors, labels, torch.float32, 8, logit_softcap=4.0)


def test_loss_times_three_and_token_weights_equal_unfused_autograd():
    tensors, labels = make_inputs()
    options = {"token_weights": torch.rand(len(labels)), "num_items": 7}
    unfused = run(reference_cross_entropy, tensors, labels, factor=3.0, **options)
    streamed = run(streaming_cross_entropy, tensors, labels, factor=3.0, chunk_size=5, **options)
    torch.testing.assert_close(streamed, unfused)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_leading_dimensions_and_chunk_sizes_do_not_matter(reduction):
    tensors, labels = make_inputs(rows=36)
    flat = run(streaming_cross_entropy, tensors, labels, reduction=reduction)
    tensors[0], labels = tensors[0].view(3, 12, -1), labels.view(3, 12)
    for chunk_size in (1, 5, 1000):
        shaped = run(streaming_cross_entropy, tensors, labels, reduction=reduction, chunk_size=chunk_size)
        for tensor, expected in zip(shaped, flat, strict=True):
            torch.testing.assert_close(tensor.view_as(expected), expected)


@pytest.mark.parametrize("num_items", [None, 0, torch.tensor(0)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_masked_gives_zero_loss_and_zero_gradients(reduction, num_items):
    tensors, labels = make_inputs(bias=5.0)
    labels.fill_(-100)
    for tensor in run(streaming_cross_entropy, tensors, labels, reduction=reduction, num_items=num_items):
        assert (tensor == 0).all()


def test_padding_and_nan_at_ignored_rows_change_nothing():
    tensors, labels = make_inputs()
    plain = run(streaming_cross_entropy, tensors, labels)
    ignored = labels == -100
    hidden = tensors[0].masked_fill(ignored[:, None], float("nan"))
    hidden = torch.cat([hidden, hidden.new_full((100, hidden.shape[1]), float("nan"))])
    padded = run(streaming_cross_entropy, [hidden, tensors[1]], torch.cat([labels, labels.new_full((100,), -100)]))
    padded[1] = padded[1][: len(labels)]
    torch.testing.assert_close(padded, plain)


def test_second_backward_raises_also_with_a_retained_graph():
    tensors, labels = make_inputs()
    hidden = tensors[0].requires_grad_()
    loss = streaming_cross_entropy(hidden, tensors[1], labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward only"):
        loss.backward()


def test_per_token_losses_can_be_differentiated_twice_over_a_retained_graph():
    tensors, labels = make_inputs()
    hidden = tensors[0].requires_grad_()
    losses = streaming_cross_entropy(hidden, tensors[1], labels, reduction="none")
    (once,) = torch.autograd.grad(losses.sum(), hidden, retain_graph=True)
    (again,) = torch.autograd.grad(losses.sum(), hidden)
    assert torch.equal(once, again)


def test_no_grad_and_inference_mode_give_the_training_value():
    tensors, labels = make_inputs()
    value = run(streaming_cross_entropy, tensors, labels)[0]
    for context in (torch.no_grad(), torch.inference_mode()):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        with context:
            loss = streaming_cross_entropy(*leaves, labels)
        assert torch.equal(loss, value) and not loss.requires_grad


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_frozen_head_allocates_no_weight_gradient(reduction, monkeypatch):
    from draftsmith.ops.streaming_loss import head

    def refuse(*_):
        raise AssertionError("a frozen head has no weight gradient")

    monkeypatch.setattr(head, "_add_product", refuse)
    tensors, labels = make_inputs()
    hidden, weight = tensors[0].requires_grad_(), tensors[1]
    loss = streaming_cross_entropy(hidden, weight, labels, reduction=reduction)
    loss.sum().backward()
    assert hidden.grad is not None and weight.grad is None


def test_frozen_hidden_states_still_train_the_head():
    tensors, labels = make_inputs()
    expected = run(streaming_cross_entropy, tensors, labels, factor=1.0)[2]
    weight = tensors[1].requires_grad_()
    streaming_cross_entropy(tensors[0], weight, labels).backward()
    torch.testing.assert_close(weight.grad, expected)


def test_backward_inside_autocast_is_that_outside():
    states, weight = torch.randn(6, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    gradients = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            losses = streaming_cross_entropy(states, weight, torch.arange(6), reduction="none", chunk_size=2)
            gradients.append(torch.autograd.grad(losses.sum(), [states, weight]))
    for ours, truth in zip(*gradients, strict=True):
        assert torch.equal(ours, truth)


@pytest.mark.parametrize("softcap", [0.0, -1.0, float("inf"), float("nan")])
def test_a_soft_cap_must_be_positive_and_finite(softcap):
    with pytest.raises(ValueError, match="`logit_softcap`"):
        streaming_cross_entropy(torch.randn(2, 8), torch.randn(11, 8), torch.arange(2), logit_softcap=softcap)


def test_fp32_master_weights_under_bf16_states_and_autocast():
    tensors, labels = make_inputs()
    hidden, weight = tensors[0].bfloat16().requires_grad_(), tensors[1].float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = streaming_cross_entropy(hidden, weight, labels)
    loss.backward()
    truth = run(reference_cross_entropy, [tensors[0].bfloat16().double(), tensors[1]], labels, factor=1.0)
    assert (loss.dtype, hidden.grad.dtype, weight.grad.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    for tensor, exact in zip((loss, hidden.grad, weight.grad), truth, strict=True):
        torch.testing.assert_close(tensor.double(), exact, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("vocab", [128 * 1024, 256 * 1024])
def test_bf16_weight_gradient_of_a_large_vocabulary_is_independent_of_the_chunk_count(vocab):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 16, generator=generator).bfloat16()
    weight = torch.randn(vocab, 16, generator=generator).bfloat16()
    labels = torch.randint(0, vocab, (64,), generator=generator)
    truth = run(reference_cross_entropy, [hidden.double(), weight.double()], labels)[2]
    for chunk_size in (64, 8, 4):
        grad = run(streaming_cross_entropy, [hidden, weight], labels, dtype=torch.bfloat16, chunk_size=chunk_size)[2]
        cosine = torch.cosine_similarity(grad.double().flatten(), truth.flatten(), dim=0)
        assert cosine > 0.9995, (chunk_size, cosine)


@pytest.mark.slow
def test_logits_of_more_than_2_to_the_31_elements():
    vocab, rows = 2**20, 2**11 + 8
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(count, 2, generator=generator) for count in (rows, vocab))
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    losses = streaming_cross_entropy(hidden, weight, labels, reduction="none", chunk_size=rows)
    last = reference_cross_entropy(hidden[-8:], weight, labels[-8:], reduction="none")
    torch.testing.assert_close(losses[-8:], last, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("label", [-1, 101])
def test_labels_out_of_range_are_refused(label):
    tensors, labels = make_inputs()
    labels[3] = label
    with pytest.raises(ValueError, match=r"`labels` must be in \[0, 101\)"):
        streaming_cross_entropy(*tensors, labels)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("`weight`", {"weight": torch.zeros(101, 15)}),
        ("`labels`", {"labels": torch.zeros(36, dtype=torch.long)}),
        ("`bias`", {"bias": torch.zeros(100)}),
        ("`token_weights` must be", {"token_weights": torch.zeros(36)}),
        ("`token_weights` gets no gradient", {"token_weights": torch.zeros(37, requires_grad=True)}),
        ("`reduction`", {"reduction": "avg"}),
        ("`chunk_size`", {"chunk_size": 0}),
    ],
)
def test_wrong_arguments_are_named(message, changes):
    tensors, labels = make_inputs()
    arguments = {"hidden_states": tensors[0], "weight": tensors[1], "labels": labels, **changes}
    with pytest.raises(ValueError, match=message):
        streaming_cross_entropy(**arguments)


def test_chosen_chunk_follows_the_layer_up_to_4096_rows_and_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(chunking, "_logged", set())
    shape = {"hidden_size": 4096, "logits_per_row": 128256, "itemsize": 2}
    with caplog.at_level(logging.INFO, logger=chunking.__name__):
        assert chunking.choose_chunk_size(rows=1000, **shape) == 1000 * 20 * 4096 // 128256
        assert chunking.choose_chunk_size(rows=100_000, **shape) == 4096
    assert chunking.choose_chunk_size(rows=100_000, stacked=7, **shape) == 1024  # with 7 draft rows each
    assert chunking.choose_chunk_size(rows=1000, memory_budget=2**20, **shape) == 2**20 // (128256 * 2)
    assert chunking.choose_chunk_size(rows=0, **shape) == 1
    assert len(caplog.records) == 1
    assert "MiB, one decoder layer's backward" in caplog.text

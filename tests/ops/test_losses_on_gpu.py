"""The streaming losses on CUDA: through the Triton row kernels and cuBLAS, against fp64.

python -m pytest -m gpu -n 8 tests/ops/test_losses_on_gpu.py
"""

import random

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from draftsmith.ops import streaming_cross_entropy, streaming_draft_loss
from tests.ops import test_streaming_cross_entropy as hard_loss
from tests.ops import test_streaming_draft_loss as draft_loss


pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


def on_gpu(inputs):
    """Everything but the row sets, which cost no synchronisation on the CPU."""

    def move(value):
        if isinstance(value, list):
            return [move(item) for item in value]
        return value.cuda() if isinstance(value, torch.Tensor) else value

    return {name: value if name == "row_sets" else move(value) for name, value in inputs.items()}


@DTYPES
@pytest.mark.parametrize("objective", draft_loss.OBJECTIVES)
@pytest.mark.parametrize("seed", range(12))
def test_draft_loss_equals_dense(objective, seed, dtype):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    ttt_steps = rng.choice((1, 2, 3, 7, 8))
    vocab = rng.choice((60, 400, 5003, 9000))
    inputs = draft_loss.make_inputs(
        ttt_steps=ttt_steps, vocab=vocab, draft_vocab=rng.choice((25, 57, vocab)), hidden=64, seed=seed
    )
    inputs["weight"] /= 8
    count = len(inputs["labels"])
    draft_loss.check(
        on_gpu(inputs), dtype, rng.choice((1, 3, 16, None)), objective=objective,
        step_weights=rng.choice((None, [0.8**k for k in range(ttt_steps)])),
        row_weights=rng.choice((None, torch.rand(count).cuda())), num_items=rng.choice((None, 3)),
        teacher_bias=rng.choice((None, torch.randn(vocab).cuda())), teacher_softcap=rng.choice((None, 30.0)),
    )  # fmt: skip


@DTYPES
@pytest.mark.parametrize("seed", range(24))
def test_cross_entropy_equals_dense(seed, dtype):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    tensors, labels = hard_loss.make_inputs(
        rows=rng.choice((1, 2, 37, 700)),
        vocab=rng.choice((2, 101, 9001)),
        bias=rng.choice((None, 0.5, 5.0)),
        seed=seed,
    )
    hard_loss.check(
        [tensor.cuda() for tensor in tensors], labels.cuda(), dtype, rng.choice((7, 64, None)),
        reduction=("mean", "sum", "none")[seed % 3],
        token_weights=torch.rand(len(labels)).cuda() if rng.random() < 0.5 else None,
        logit_softcap=rng.choice((None, None, 2.0, 30.0)), num_items=rng.choice((None, 5, torch.tensor(11).cuda())),
    )  # fmt: skip


@pytest.mark.parametrize("objective", draft_loss.OBJECTIVES)
def test_the_draft_loss_never_waits_for_the_device(objective):
    inputs = draft_loss.cast(on_gpu(draft_loss.make_inputs()), torch.bfloat16)

    def step():
        loss, _ = streaming_draft_loss(**inputs, objective=objective, step_weights=[1.0, 0.8, 0.6, 0.5], num_items=3)
        (2 * loss).backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
    copies = [event.key for event in recorded.key_averages() if "Memcpy HtoD" in event.key]
    assert copies and not any("Pageable" in copy for copy in copies)  # above 64 KiB such copies wait, and do not tell


@pytest.mark.parametrize("objective", ["kl", "tv"])
def test_results_repeat_bit_by_bit(objective):
    inputs = on_gpu(draft_loss.make_inputs(vocab=5003, draft_vocab=3000, hidden=128))
    first, _ = draft_loss.run(streaming_draft_loss, inputs, dtype=torch.bfloat16, objective=objective, chunk_size=7)
    again, _ = draft_loss.run(streaming_draft_loss, inputs, dtype=torch.bfloat16, objective=objective, chunk_size=7)
    for tensor, other in zip(first, again, strict=True):
        assert torch.equal(tensor, other)


def test_more_than_2_to_the_31_logits():
    """The last of 20,000 rows of 128k logits; the truth is the same rows alone."""
    rows, vocab, hidden = 20_000, 131_072, 32
    generator = torch.Generator("cuda").manual_seed(0)
    states, weight = (torch.randn(n, hidden, generator=generator, device="cuda").bfloat16() for n in (rows, vocab))
    labels = torch.randint(0, vocab, (rows,), generator=generator, device="cuda")
    states.requires_grad_()
    (whole,) = torch.autograd.grad(
        streaming_cross_entropy(states, weight, labels, reduction="sum", chunk_size=rows), states
    )
    loss = streaming_cross_entropy(states[-5:], weight, labels[-5:], reduction="sum")
    (last,) = torch.autograd.grad(loss, states)
    torch.testing.assert_close(whole[-5:], last[-5:], rtol=2e-2, atol=1e-3)


def peak_over(make):
    """Bytes allocated at most while `make()` runs, what it returns included."""
    make()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = make()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak


@pytest.mark.parametrize("vocab", [32_000, 128_256])
def test_the_logits_of_the_chosen_chunk_need_no_more_than_a_layer_does(vocab):
    """streaming_lm_peak <= transformer_block_peak, both as the allocator counts them."""
    hidden, rows = 1024, 8192
    config = LlamaConfig(hidden_size=hidden, intermediate_size=3584, num_attention_heads=8, vocab_size=vocab)
    config._attn_implementation = "sdpa"
    layer = LlamaDecoderLayer(config, 0).to("cuda", torch.bfloat16)
    rotary = LlamaRotaryEmbedding(config).cuda()
    states = torch.randn(1, rows, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, hidden, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(0, vocab, (rows,), device="cuda")
    positions = rotary(states, torch.arange(rows, device="cuda")[None])

    def layer_backward():
        out = layer(states, position_embeddings=positions)
        return torch.autograd.grad(out.sum(), [states, *layer.parameters()])

    def loss_backward():
        return torch.autograd.grad(streaming_cross_entropy(states[0], weight, labels), states)

    assert peak_over(loss_backward) <= peak_over(layer_backward)


@pytest.mark.parametrize("draft_vocab", [None, 8_000])
def test_a_chunk_takes_the_memory_it_announces(draft_vocab, caplog):
    """Peak over inputs, outputs and gradients: the logits of one chunk, and little else."""
    hidden, vocab, ttt_steps, rows = 1024, 32_000, 3, 8192
    row_sets = [torch.arange(rows - step) for step in range(ttt_steps)]

    def normal(*shape):
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    states = [normal(len(part), hidden).requires_grad_() for part in row_sets]
    teacher, teacher_weight, t2d = normal(rows, hidden), normal(vocab, hidden), None
    weight = normal(draft_vocab or vocab, hidden).requires_grad_()
    if draft_vocab is not None:
        t2d = torch.arange(vocab, device="cuda") < draft_vocab
    options = {"t2d": t2d, "objective": "kl"}

    def step(chunk_size):
        loss, _ = streaming_draft_loss(
            states, weight, teacher, teacher_weight, row_sets, chunk_size=chunk_size, **options
        )
        return torch.autograd.grad(loss, [*states, weight])

    peaks = {}
    for chunk_size in (256, 512):
        peaks[chunk_size] = peak_over(lambda chunk_size=chunk_size: step(chunk_size))
    logits_per_row = vocab + ttt_steps * len(weight)
    expected = 256 * logits_per_row * 2
    assert 0.8 * expected < peaks[512] - peaks[256] < 1.3 * expected

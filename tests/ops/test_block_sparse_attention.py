import random

import pytest
import torch

from draftsmith.ops import block_sparse_flash_attention
from tests.ops.error_bounds import assert_close_as_dense


HEAD_DIMS = (16, 32, 64, 80, 96, 128)
HEADS = ((8, 1), (8, 2), (8, 8))
TTT_STEPS = (1, 2, 7, 8)
WINDOWS = (None, None, 1, 2, 5, 1000, 0, -3)


def make_inputs(*, batch=1, heads=(8, 2), queries, keys, head_dim=16, diagonals=0, sinks=False, seed=0):
    """query, key, value, J diagonal keys, J diagonal values (, sinks) in fp64."""
    generator = torch.Generator().manual_seed(seed)
    q_heads, kv_heads = heads
    shapes = [(batch, q_heads, queries, head_dim)] + [(batch, kv_heads, keys, head_dim)] * 2
    shapes += [(batch, kv_heads, queries, head_dim)] * 2 * diagonals + [(q_heads,)] * sinks
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def attend(inputs, *, sinks=False, **options):
    query, key, value, *rest = inputs
    sink = rest.pop() if sinks else None
    half = len(rest) // 2
    return block_sparse_flash_attention(query, key, value, rest[:half], rest[half:], sinks=sink, **options)


def run(inputs, grad_out, *, dtype=torch.float64, **options):
    """The output and the gradient of every input."""
    leaves = [tensor.to(dtype).requires_grad_() for tensor in inputs]
    out = attend(leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out.to(dtype))]


def check(inputs, dtype, **options):
    # The truth starts from the same rounded inputs.
    inputs = [tensor.to(dtype).double() for tensor in inputs]
    grad_out = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1)).to(dtype).double()
    truth = run(inputs, grad_out, implementation="reference", **options)
    dense = run(inputs, grad_out, implementation="reference", dtype=dtype, **options)
    ours = run(inputs, grad_out, dtype=dtype, **options)
    assert_close_as_dense(
        ours, dense, truth, dtype, term_size=0.3
    )  # gradients of a softmax over one key cancel to zero


def random_documents(rng, batch, length):
    """[B, T] ids of random runs, with padding behind, between and before them."""
    ids = torch.full((batch, length), -1)
    for row in range(batch):
        start, document = 0, 0
        while start < length:
            end = min(length, start + rng.choice((1, 2, 3, 5, 8, 40)))
            if rng.random() < 0.8:
                ids[row, start:end] = document
                document += 1
            start = end
    return ids


def random_positions(rng, batch, length):
    """[B, Q] some rows of each batch row, padded behind."""
    kept = [sorted(rng.sample(range(length), rng.randint(1, length))) for _ in range(batch)]
    width = max(map(len, kept)) + rng.randint(0, 2)
    return torch.tensor([rows + [-1] * (width - len(rows)) for rows in kept])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("seed", range(40))
def test_equals_dense_for_random_shapes_masks_and_options(seed, dtype):
    rng = random.Random(seed)
    batch, length, sinks = rng.choice((1, 2)), rng.choice((1, 2, 16, 127, 129)), rng.random() < 0.4
    documents = random_documents(rng, batch, length) if rng.random() < 0.7 else None
    positions = random_positions(rng, batch, length) if rng.random() < 0.6 else None
    inputs = make_inputs(
        batch=batch, heads=HEADS[seed % 3], queries=length if positions is None else positions.shape[1], keys=length,
        head_dim=HEAD_DIMS[seed % 6], diagonals=TTT_STEPS[seed % 4] - 1, sinks=sinks, seed=seed,
    )  # fmt: skip
    check(
        inputs, dtype, sinks=sinks, document_ids=documents, query_positions=positions,
        sliding_window=rng.choice(WINDOWS),
    )  # fmt: skip


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims_and_head_counts(heads, head_dim):
    check(make_inputs(heads=heads, queries=33, keys=33, head_dim=head_dim, diagonals=1), torch.float32)


@pytest.mark.parametrize("window", [None, 100])
def test_lengths_shrinking_then_growing_leave_no_stale_mask(window):
    for length in (1025, 129, 127, 2, 1, 2, 127, 129, 1025):
        inputs = make_inputs(heads=(2, 1), queries=length, keys=length, diagonals=1, seed=length)
        check(inputs, torch.float32, sliding_window=window)


def test_reference_equals_a_loop_over_queries():
    documents = torch.tensor([[0, 0, 0, 3, 3, 3, 3, -1]])
    positions = torch.tensor([[1, 2, 4, 6, -1]])
    query, key, value, diagonal_key, diagonal_value = make_inputs(heads=(2, 1), queries=5, keys=8, diagonals=1)
    out = block_sparse_flash_attention(
        query, key, value, [diagonal_key], [diagonal_value], documents, positions, sliding_window=2,
        sinks=torch.tensor([0.3, -0.2]), scale=0.5, implementation="reference",
    )  # fmt: skip
    for head, sink in ((0, 0.3), (1, -0.2)):
        for row, keys in enumerate(([0, 1], [1, 2], [3, 4], [5, 6])):
            keys_seen = torch.cat([key[0, 0, keys], diagonal_key[0, 0, row, None]])
            values_seen = torch.cat([value[0, 0, keys], diagonal_value[0, 0, row, None]])
            weights = torch.exp(0.5 * keys_seen @ query[0, head, row])
            expected = weights @ values_seen / (weights.sum() + torch.tensor(sink).exp())
            torch.testing.assert_close(out[0, head, row], expected, rtol=1e-6, atol=1e-6)
    assert (out[:, :, 4] == 0).all()


def test_gradients_pass_finite_differences():
    documents, positions = torch.tensor([[0, 0, 0, 1, 1, -1]]), torch.tensor([[0, 2, 4, -1]])
    inputs = make_inputs(heads=(4, 2), queries=4, keys=6, head_dim=8, diagonals=2, sinks=True)
    leaves = [tensor.requires_grad_() for tensor in inputs]

    def function(*tensors):
        return attend(tensors, sinks=True, document_ids=documents, query_positions=positions, sliding_window=2)

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


def test_packed_documents_equal_separate_ones():
    lengths, diagonals = (3, 5, 8), 3
    documents = torch.tensor([sum(([index] * length for index, length in enumerate(lengths)), [])])
    inputs = make_inputs(queries=16, keys=16, diagonals=diagonals)
    grad_out = torch.randn_like(inputs[0])
    packed = run(inputs, grad_out, document_ids=documents)
    apart = [
        run([part.split(lengths, 2)[index] for part in inputs], grad_out.split(lengths, 2)[index])
        for index in range(len(lengths))
    ]
    for tensor, parts in zip(packed, zip(*apart, strict=True), strict=True):
        torch.testing.assert_close(tensor, torch.cat(parts, 2), rtol=1e-12, atol=1e-12)


def test_changing_one_document_leaves_the_other_bit_identical():
    documents = torch.tensor([[0] * 40 + [1] * 50])
    inputs = make_inputs(queries=90, keys=90, diagonals=1)
    before = attend(inputs, document_ids=documents)
    after = attend(
        [tensor.index_add(2, torch.arange(40), tensor[:, :, :40]) for tensor in inputs], document_ids=documents
    )
    assert torch.equal(before[:, :, 40:], after[:, :, 40:])
    assert not torch.equal(before[:, :, :40], after[:, :, :40])


@pytest.mark.parametrize("explicit_positions", [False, True])
def test_padding_of_nan_changes_nothing_and_gets_zero_gradients(explicit_positions):
    length, pads = 9, 100
    inputs = make_inputs(queries=length, keys=length, diagonals=2, sinks=True)
    grad_out = torch.randn_like(inputs[0])
    plain = run(inputs, grad_out, sinks=True)

    def padded(tensor, fill):
        return torch.cat([tensor, tensor.new_full((*tensor.shape[:2], pads, tensor.shape[3]), fill)], 2)

    documents = torch.tensor([[0] * length + [-1] * pads])
    positions = torch.tensor([[*range(length)] + [-1] * pads]) if explicit_positions else None
    inputs = [*(padded(tensor, float("nan")) for tensor in inputs[:-1]), inputs[-1]]
    options = {"document_ids": documents, "query_positions": positions, "sinks": True}
    result = run(inputs, padded(grad_out, 1.0), **options)
    for tensor, expected in zip(result[:-1], plain[:-1], strict=True):
        torch.testing.assert_close(tensor[:, :, :length], expected, rtol=1e-12, atol=1e-12)
        assert (tensor[:, :, length:] == 0).all()
    torch.testing.assert_close(result[-1], plain[-1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [0, -2])
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_without_any_key_give_zero_and_zero_gradients(window, sinks):
    inputs = make_inputs(queries=5, keys=5, sinks=sinks)
    for tensor in run(inputs, torch.ones_like(inputs[0]), sliding_window=window, sinks=sinks):
        assert (tensor == 0).all()


def test_a_closed_window_leaves_the_diagonals():
    query, key, value, diagonal_key, diagonal_value = make_inputs(heads=(2, 2), queries=5, keys=5, diagonals=1)
    out = block_sparse_flash_attention(query, key, value, [diagonal_key], [diagonal_value], sliding_window=0)
    torch.testing.assert_close(out, diagonal_value)


@pytest.mark.parametrize("new", [1, 3])
def test_decoding_with_a_cache_equals_the_last_rows(new):
    documents = torch.tensor([[-1, -1] + [0] * 18, [0] * 20])
    query, key, value = make_inputs(batch=2, queries=20, keys=20)
    full = block_sparse_flash_attention(query, key, value, document_ids=documents)
    positions = torch.arange(20 - new, 20).expand(2, -1)
    last = block_sparse_flash_attention(query[:, :, -new:], key, value, (), (), documents, positions)
    torch.testing.assert_close(last, full[:, :, -new:])


def test_without_gradients_the_value_is_the_same():
    inputs = make_inputs(queries=20, keys=20, diagonals=1)
    value = run(inputs, torch.ones_like(inputs[0]))[0]
    with torch.no_grad():
        assert torch.equal(attend(inputs), value)
    with torch.inference_mode():
        assert torch.equal(attend(inputs), value)


def test_strided_views_and_fp16():
    inputs = [tensor.mT.contiguous().mT for tensor in make_inputs(queries=12, keys=12, diagonals=1)]
    check(inputs, torch.float16)


def test_twenty_lengths_keep_no_memory_between_calls():
    for length in range(100, 120):
        inputs = make_inputs(heads=(2, 1), queries=length, keys=length)
        ours, dense = (attend(inputs, implementation=name) for name in ("sdpa", "reference"))
        torch.testing.assert_close(ours, dense)


@pytest.mark.parametrize("window", [10**20, -(10**20), True])
def test_windows_of_any_size(window):
    inputs = make_inputs(queries=6, keys=6)
    for name in ("sdpa", "reference"):
        expected = attend(inputs, sliding_window=min(max(int(window), 0), 6), implementation=name)
        assert torch.equal(attend(inputs, sliding_window=window, implementation=name), expected)


def test_second_order_gradients_are_refused():
    leaves = [tensor.requires_grad_() for tensor in make_inputs(queries=4, keys=4)]
    (grad,) = torch.autograd.grad(attend(leaves).square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def bad_call(**changes):
    query, key, value, diagonal_key, diagonal_value = make_inputs(queries=6, keys=6, diagonals=1)
    arguments = {
        "query": query, "key": key, "value": value,
        "diagonal_keys": [diagonal_key], "diagonal_values": [diagonal_value], **changes,
    }  # fmt: skip
    return block_sparse_flash_attention(**arguments)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("`query`", {"query": torch.zeros(8, 6, 16)}),
        ("multiple of", {"query": torch.zeros(1, 3, 6, 16, dtype=torch.float64)}),
        ("`key`", {"key": torch.zeros(2, 2, 6, 16)}),
        ("`key` is torch.float32", {"key": torch.zeros(1, 2, 6, 16)}),
        ("`value`", {"value": torch.zeros(1, 2, 5, 16, dtype=torch.float64)}),
        ("`diagonal_values`", {"diagonal_values": []}),
        (r"`diagonal_keys\[0\]`", {"diagonal_keys": [torch.zeros(1, 2, 5, 16, dtype=torch.float64)]}),
        ("`document_ids` must be integers", {"document_ids": torch.zeros(1, 5, dtype=torch.long)}),
        ("`document_ids` must be contiguous", {"document_ids": torch.tensor([[0, 0, 1, 1, 0, 0]])}),
        ("`query_positions` must be integers", {"query_positions": torch.zeros(1, 5, dtype=torch.long)}),
        ("`query_positions` must ascend", {"query_positions": torch.tensor([[0, 1, 3, -1, 2, 5]])}),
        ("`query_positions` holds 6", {"query_positions": torch.tensor([[0, 1, 2, 3, 4, 6]])}),
        ("`sinks`", {"sinks": torch.zeros(2)}),
        ("`sinks` must hold", {"sinks": torch.zeros(8, dtype=torch.long)}),
        ("attention needs heads", {"key": torch.zeros(1, 2, 0, 16, dtype=torch.float64)}),
        ("'flash' is unknown", {"implementation": "flash"}),
        ("'fa4' cannot serve this call: `query` is on cpu", {"implementation": "fa4"}),
        ("'cudnn' cannot serve this call: `query` is on cpu", {"implementation": "cudnn"}),
    ],
)
def test_wrong_arguments_are_named(message, changes):
    with pytest.raises(ValueError, match=message):
        bad_call(**changes)


def test_fewer_queries_than_keys_need_positions():
    query, key, value = make_inputs(queries=3, keys=6)
    with pytest.raises(ValueError, match="`query_positions`"):
        block_sparse_flash_attention(query, key, value)

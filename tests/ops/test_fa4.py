"""What fa4.py does around FlashAttention 4, with plain torch in place of the kernels: the real ones need a GPU."""

import random
import sys
import types

import pytest
import torch

from draftsmith.ops.block_sparse_attention import engines, fa4
from draftsmith.ops.block_sparse_attention.layout import Layout
from draftsmith.ops.block_sparse_attention.reference import reference_attention
from draftsmith.ops.transfer import derived, on_host, remember_on_host


TILE = 16  # rows; a segment's tiles read past its end
GARBAGE = 7.0


def tiles(q, offsets):
    """Each segment's rows, and those that its tiles read."""
    for start, end in zip(offsets[:-1], offsets[1:], strict=True):
        yield slice(start, end), slice(start, min(len(q), start + -(-(end - start) // TILE) * TILE))


def scores_of(q, k, own, read, scale, left):
    scores = torch.einsum("qhd,khd->hqk", q[read], k[read].repeat_interleave(q.shape[1] // k.shape[1], 1)) * scale
    rows = torch.arange(read.stop - read.start)
    distance = rows[:, None] - rows
    hidden = (distance < 0) | (rows >= own.stop - own.start)
    if left is not None:
        hidden |= distance > left
    return scores.masked_fill(hidden, float("-inf"))


def flattened(tensors, cu_seqlens):
    """[rows, H, D] each, and where segments start."""
    shape = tensors[0].shape
    offsets = [row * shape[1] for row in range(len(tensors[0]) + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    return [tensor.flatten(0, 1) if tensor.dim() == 4 else tensor for tensor in tensors], offsets


def flash_attn_fwd(q, k, v, *, out, return_lse, softmax_scale, causal, window_size_left, cu_seqlens_q, cu_seqlens_k):
    assert return_lse and causal and cu_seqlens_q is cu_seqlens_k and out.shape == q.shape and out.is_contiguous()
    batch = len(q)
    (q, k, v, flat_out), offsets = flattened((q, k, v, out), cu_seqlens_q)
    flat_out.fill_(GARBAGE)
    lse = q.new_full((q.shape[1], len(q)), GARBAGE)
    for own, read in tiles(q, offsets):
        scores, rows = scores_of(q, k, own, read, softmax_scale, window_size_left), own.stop - own.start
        values = v[read].repeat_interleave(q.shape[1] // v.shape[1], 1)
        flat_out[own] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)[:rows]
        lse[:, own] = scores.logsumexp(-1)[:, :rows]
    if cu_seqlens_q is None:
        lse = lse.unflatten(1, (batch, -1)).transpose(0, 1).contiguous()
    return out, lse, None, None, None


def flash_attn_bwd(
    q, k, v, out, dout, lse, *, dq, softmax_scale, causal, window_size_left, cu_seqlens_q, cu_seqlens_k
):
    shapes = k.shape, v.shape
    if cu_seqlens_q is None:
        assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
        lse = lse.transpose(0, 1).flatten(1)
    (q, k, v, out, dout, flat_dq), offsets = flattened((q, k, v, out, dout, dq), cu_seqlens_q)
    assert lse.shape == (q.shape[1], len(q))
    group = q.shape[1] // k.shape[1]
    dk, dv = torch.full_like(k, GARBAGE), torch.full_like(v, GARBAGE)
    flat_dq.fill_(GARBAGE)
    for own, read in tiles(q, offsets):
        rows, past = own.stop - own.start, read.stop - own.stop
        statistics = torch.nn.functional.pad(lse[:, own], (0, past), value=float("inf"))
        weights = (scores_of(q, k, own, read, softmax_scale, window_size_left) - statistics[..., None]).exp()
        delta = torch.nn.functional.pad((out[own] * dout[own]).sum(-1).T, (0, past))
        grad = torch.einsum("qhd,khd->hqk", dout[read], v[read].repeat_interleave(group, 1))
        grad = weights * (grad - delta[..., None]) * softmax_scale
        flat_dq[own] = torch.einsum("hqk,khd->qhd", grad, k[read].repeat_interleave(group, 1))[:rows]
        dk[own] = torch.einsum("hqk,qhd->khd", grad, q[read])[:rows].unflatten(1, (-1, group)).sum(2)
        dv[own] = torch.einsum("hqk,qhd->khd", weights, dout[read])[:rows].unflatten(1, (-1, group)).sum(2)
    return dq, dk.view(shapes[0]), dv.view(shapes[1])


@pytest.fixture
def stand_ins(monkeypatch):
    interface = types.ModuleType("flash_attn.cute.interface")
    interface._flash_attn_fwd, interface._flash_attn_bwd = flash_attn_fwd, flash_attn_bwd
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    monkeypatch.setitem(engines.MERGES, "fa4", "merge")  # the Triton merge needs a GPU, too
    engines.load.cache_clear()
    yield
    engines.load.cache_clear()


def random_documents(rng, batch, length):
    ids = torch.full((batch, length), -1)
    for row in ids:
        start = 0
        while start < length:
            end = min(length, start + rng.choice((1, 3, 20, 150)))
            if rng.random() < 0.7:
                row[start:end] = start
            start = end
    return ids


def random_positions(rng, batch, length):
    """Most rows, in order, some padding among them."""
    queries = rng.randint(1, length)
    kept = [sorted(rng.sample(range(length), queries)) for _ in range(batch)]
    return torch.tensor([[-1 if rng.random() < 0.1 else position for position in row] for row in kept])


@pytest.mark.parametrize("seed", range(60))
def test_equals_dense(seed, stand_ins):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    batch, length, heads, kv_heads = rng.choice((1, 2, 3)), rng.choice((1, 15, 16, 33, 300)), 4, rng.choice((1, 2, 4))
    documents = random_documents(rng, batch, length) if rng.random() < 0.8 else None
    positions = random_positions(rng, batch, length) if rng.random() < 0.7 else None
    window, diagonals = rng.choice((None, 1, 5, 1000)), rng.choice((0, 2))
    row_major = rng.random() < 0.5
    queries = length if positions is None else positions.shape[1]

    def make(heads, rows):
        if row_major:
            return torch.randn(batch, rows, heads, 8, dtype=torch.float64).transpose(1, 2)
        return torch.randn(batch, heads, rows, 8, dtype=torch.float64)

    query, grad_out = make(heads, queries), make(heads, queries)
    keys = [make(kv_heads, length) for _ in range(2)]
    own = [make(kv_heads, queries) for _ in range(2 * diagonals)]
    leaves = [tensor.clone().requires_grad_() for tensor in (query, *keys, *own)]
    dense = reference_attention(
        *leaves[:3], leaves[3 : 3 + diagonals], leaves[3 + diagonals :], document_ids=documents,
        query_positions=positions, sliding_window=window, sinks=None, scale=0.3,
    )  # fmt: skip
    expected = [dense.detach(), *torch.autograd.grad(dense, leaves, grad_out)]
    layout = Layout(documents, positions, batch, length)
    if layout.padding is not None:
        for tensor in (query, grad_out, *own):
            tensor.masked_fill_(layout.padding[:, None, :, None], float("nan"))
    if documents is not None:
        for tensor in keys:
            tensor.masked_fill_((documents < 0)[:, None, :, None], float("nan"))

    engine = engines.load("fa4")
    tensors = (query, *keys, own[:diagonals], own[diagonals:], None)
    out, lse = engine.forward(*tensors, layout, window=window, scale=0.3)
    gradients, *of_keys = engine.backward(
        grad_out, *tensors, out, lse, layout, window=window, scale=0.3, key_dtype=torch.float64
    )
    for got, want in zip([out, gradients.query, *of_keys, *gradients.keys, *gradients.values], expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_segments_are_runs_and_padding_is_cut():
    ids = torch.tensor([[0] * 3 + [-1] * 300, [7] * 300 + [8] * 3])
    assert fa4._read_segments(ids).offsets.tolist() == [0, 3, 128, 256, 303, 603, 606]
    assert torch.equal(fa4._read_segments(ids).padding, ids < 0)
    assert fa4._read_segments(ids.clamp(min=0)).padding is None
    assert fa4._read_segments(torch.zeros(1, 1, dtype=torch.long)).offsets.tolist() == [0, 1]


def test_ids_known_on_the_host_are_not_read():
    ids = torch.zeros(1, 8, dtype=torch.long, device="meta")
    remember_on_host(ids, torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]]))
    assert on_host(ids).tolist() == [[0, 0, 0, 1, 1, 1, 1, 1]]
    assert on_host(derived(lambda known: 2 * known, ids)).tolist() == [[0, 0, 0, 2, 2, 2, 2, 2]]
    ids[0, 4:] = 1
    with pytest.raises(NotImplementedError, match="meta"):
        on_host(ids)


def test_ids_are_read_once_until_they_change(monkeypatch):
    reads, read = [], fa4._read_segments
    monkeypatch.setattr(fa4, "_read_segments", lambda ids: reads.append(1) or read(ids))
    ids = torch.zeros(1, 8, dtype=torch.long)
    for _ in range(3):
        fa4._segments(Layout(ids, None, 1, 8))
    assert len(reads) == 1
    ids[0, 4:] = 1
    assert fa4._segments(Layout(ids, None, 1, 8)).offsets.tolist() == [0, 4, 8]
    assert len(reads) == 2


def test_documents_are_not_recorded_in_a_cuda_graph(monkeypatch):
    """Not even those that are known already: replayed, the graph would keep them whatever the tensor then holds."""
    ids = torch.zeros(1, 8, dtype=torch.long)
    fa4._segments(Layout(ids, None, 1, 8))
    monkeypatch.setattr(fa4, "being_captured", lambda tensor: True)
    with pytest.raises(RuntimeError, match="FlashAttention 4 reads documents on the host"):
        fa4._segments(Layout(ids, None, 1, 8))
    assert fa4._segments(Layout(None, None, 1, 8)) is None

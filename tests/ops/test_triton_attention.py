"""The Triton engine under Triton's interpreter: what its kernels compute, not how fast."""

import dataclasses

import pytest
import torch

from draftsmith.ops import block_sparse_flash_attention
from tests.ops.attention_cases import NAN, OPTIONS, Case, check, make_problem, random_cases, run


pytest.importorskip("triton")

from triton.runtime import interpreter

from draftsmith.ops.block_sparse_attention import merge_triton
from draftsmith.ops.block_sparse_attention import triton as engine


pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_attention_on_gpu.py runs the compiled kernels"),
    pytest.mark.usefixtures("round_bf16_as_gpus_do"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's: rows without keys divide 0 by 0
]

LENGTHS = (1, 2, 5, 16, 63, 64, 65, 127, 129, 150)
# Of 3000 seeds the one that best pairs options: groups of 7 heads with diagonals, NaN between documents, and so on.
CASES = list(random_cases(30, seed=846, batch=(1, 1, 2, 3), length=LENGTHS))
MEDIUM = Case(
    seed=0, batch=2, heads=(4, 2), head_dim=16, length=150, documents="gaps", queries="holes", window=None,
    diagonals=2, sinks=True, scale=None, dtype=torch.bfloat16, memory="transposed", grad_memory="contiguous",
    padding=NAN, needs_grad="all", id_dtype=torch.int64, id_memory="contiguous",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.seed))
def test_equals_dense(case):
    check(case, "triton")


def test_the_cases_use_every_option():
    for name, values in OPTIONS.items():
        assert {getattr(case, name) for case in CASES} == set(LENGTHS if name == "length" else values), name


@pytest.mark.parametrize(
    "changes", [{"documents": "packed"}, {"documents": "none", "queries": "all", "length": 1400, "window": 1250}]
)
def test_many_tiles_on_both_axes(changes):
    """Some rows see a key tile in part, some all of it; in the second case more rows than 1024."""
    case = dataclasses.replace(MEDIUM, batch=1, heads=(2, 1), length=1100, queries="subset", diagonals=1)
    check(dataclasses.replace(case, **changes), "triton")


def attend(inputs, implementation="triton", **options):
    """Query, key, value (, diagonal key, diagonal value): the output and all gradients."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = block_sparse_flash_attention(*leaves[:3], leaves[3:4], leaves[4:], implementation=implementation, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


def make_inputs(length, *, batch=1, heads=(2, 1), dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    counts = (heads[0], *[heads[1]] * 4)
    return [torch.randn(batch, count, length, 16, generator=generator).to(dtype) for count in counts]


@pytest.mark.parametrize(("rows", "keys", "length"), [(16, 16, 64), (16, 32, 128), (32, 16, 64)])
def test_ranges_that_start_and_end_anywhere_in_a_tile(rows, keys, length, monkeypatch):
    """Small tiles, and documents that start one row later in each batch row: every offset turns up."""
    tile, batch = engine.Tile(rows, keys, 4, 1), 1024 // length
    monkeypatch.setattr(engine, "tiles_for", lambda query: engine.Tiles(tile, tile, tile))
    columns = torch.arange(length).expand(batch, -1)
    documents = (columns >= torch.arange(batch)[:, None]).long() - 1
    half = torch.rand(batch, length, generator=torch.Generator().manual_seed(0)).argsort(1)[:, ::2].sort(1).values
    query, key, value, *_ = make_inputs(length, batch=batch, heads=(1, 1))
    for positions, window in ((None, 31), (half, None)):
        inputs = [query if positions is None else query[:, :, ::2], key, value]
        options = {"document_ids": documents, "query_positions": positions, "sliding_window": window}
        ours, dense = (attend(inputs, implementation, **options) for implementation in ("triton", "reference"))
        for tensor, expected in zip(ours, dense, strict=True):
            torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=1e-5)


def test_results_repeat_whatever_the_order_of_programs(monkeypatch):
    """Bit by bit: no program reads what another writes, and none writes outside its tile."""
    problem = make_problem(MEDIUM)
    inputs = problem.inputs(MEDIUM.padding)
    first, second = run(problem, inputs, "triton"), run(problem, inputs, "triton")
    builder, set_index = interpreter.interpreter_builder, interpreter.interpreter_builder.set_grid_idx

    def set_mirrored_index(*index):
        set_index(*(count - 1 - i for count, i in zip(builder.grid_dim, index, strict=True)))

    monkeypatch.setattr(builder, "set_grid_idx", set_mirrored_index)
    mirrored = run(problem, inputs, "triton")
    for tensor, *others in zip(first, second, mirrored, strict=True):
        assert all(torch.equal(tensor, other) for other in others)


@pytest.mark.parametrize(("heads", "head_dim"), [((4, 2), 16), ((7, 1), 80)])
def test_nothing_is_written_outside_the_buffers(heads, head_dim, monkeypatch):
    buffers, guard = [], 4096

    def guarded(create):
        def create_guarded(*args, **kwargs):
            tensor = create(*args, **kwargs)
            size = tensor.untyped_storage().nbytes() // tensor.itemsize
            buffer = torch.full((size + 2 * guard,), 77).to(tensor.dtype)
            buffers.append(buffer)
            return buffer.as_strided(tensor.shape, tensor.stride(), guard).copy_(tensor)

        return create_guarded

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, guarded(getattr(owner, name)))
    check(dataclasses.replace(MEDIUM, heads=heads, head_dim=head_dim), "triton")
    assert buffers
    for buffer in buffers:
        canary = torch.tensor(77).to(buffer.dtype)
        assert (buffer[:guard] == canary).all() and (buffer[-guard:] == canary).all()


@pytest.mark.parametrize(("axis", "size"), [(0, 3), (1, 4), (2, 400)])
def test_rows_more_than_2_to_the_31_elements_apart(axis, size):
    """The memory between the rows is never touched, so it takes address space only."""
    sizes = [1, 2, 40, 16]
    sizes[axis] = size
    far = 3_300_000_000 // (size - 1) // 16 * 16  # neither unaligned nor so far that rows are copied
    storage = torch.UntypedStorage(2 * (2**31 + 3_400_000_000))
    inputs = make_inputs(sizes[2], batch=sizes[0], heads=(sizes[1], sizes[1]), dtype=torch.bfloat16)

    def spread(index, tensor):
        apart = torch.empty_like(tensor.movedim(axis, 0), memory_format=torch.contiguous_format).movedim(0, axis)
        strides = [far if dim == axis else stride for dim, stride in enumerate(apart.stride())]
        # A 32-bit offset that wraps around to -2**31 still falls into the storage.
        start = 2**31 + index * tensor.numel()
        return torch.empty(0, dtype=tensor.dtype).set_(storage, start, tensor.shape, strides).copy_(tensor)

    expected = attend(inputs)
    actual = attend([spread(index, tensor) for index, tensor in enumerate(inputs)])
    for tensor, other in zip(actual, expected, strict=True):
        assert torch.equal(tensor, other)


def test_packed_documents_equal_separate_ones():
    lengths = (3, 70, 1, 40)
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
    inputs = make_inputs(sum(lengths))
    packed = attend(inputs, document_ids=documents)
    apart = [attend([tensor.split(lengths, 2)[index] for tensor in inputs]) for index in range(len(lengths))]
    for tensor, parts in zip(packed, zip(*apart, strict=True), strict=True):
        torch.testing.assert_close(tensor, torch.cat(parts, 2), rtol=1e-5, atol=1e-6)


def test_changing_one_document_leaves_the_others_bit_identical():
    documents = torch.tensor([[0] * 40 + [1] * 50 + [2] * 30])
    inputs = make_inputs(120)
    changed = [tensor.index_add(2, torch.arange(40, 90), tensor[:, :, 40:90]) for tensor in inputs]
    for before, after in zip(
        attend(inputs, document_ids=documents), attend(changed, document_ids=documents), strict=True
    ):
        assert torch.equal(before[:, :, :40], after[:, :, :40]) and torch.equal(before[:, :, 90:], after[:, :, 90:])
        assert not torch.equal(before[:, :, 40:90], after[:, :, 40:90])


@pytest.mark.parametrize("window", [0, -2])
@pytest.mark.parametrize("sinks", [None, torch.ones(2)], ids=["no sinks", "sinks"])
def test_rows_without_any_key_give_zero_and_zero_gradients(window, sinks):
    for tensor in attend(make_inputs(5)[:3], sliding_window=window, sinks=sinks):
        assert (tensor == 0).all()


@pytest.mark.parametrize(
    ("query", "reason"),
    [(torch.zeros(1, 1, 3, 257), "257"), (torch.zeros(1, 1, 3, 16, dtype=torch.float64), "float64")],
)
def test_what_it_cannot_compute_is_refused(query, reason):
    with pytest.raises(ValueError, match=f"`implementation` 'triton' .*{reason}"):
        block_sparse_flash_attention(query, query, query, implementation="triton")


@pytest.mark.parametrize("sinks", ["column", "expanded", "minus infinity"])
def test_sinks_in_any_memory_and_without_weight(sinks):
    """A sink of -inf weighs nothing, also where the first tile of a row is hidden."""
    length, heads = 70, 4
    query, key, value, *_ = make_inputs(length, heads=(heads, 2))
    values = {
        "column": torch.randn(heads, 3)[:, 1],
        "expanded": torch.randn(1).expand(heads),
        "minus infinity": torch.tensor([0.5, float("-inf"), torch.finfo(torch.float32).min, -3.0]),
    }[sinks]
    options = {"sliding_window": 5, "sinks": values}
    ours, dense = (
        block_sparse_flash_attention(query, key, value, implementation=name, **options)
        for name in ("triton", "reference")
    )
    torch.testing.assert_close(ours, dense)


def test_rows_too_far_apart_for_int32_are_copied():
    far = torch.zeros(2 * 2**24 + 16).as_strided((1, 1, 3, 16), (0, 0, 2**24, 1))
    assert merge_triton.rows_in_place(far).stride(2) == 16


@pytest.mark.parametrize("name", ["query", "key", "diagonal"])
def test_not_a_number_in_a_real_row_is_not_hidden(name):
    query, key, value, *_ = make_inputs(20, heads=(2, 1))
    diagonal = torch.randn_like(key)
    {"query": query, "key": key, "diagonal": diagonal}[name][0, 0, 7] = float("nan")
    ours, dense = (
        block_sparse_flash_attention(query, key, value, [diagonal], [value], implementation=implementation)
        for implementation in ("triton", "reference")
    )
    assert torch.equal(ours.isnan(), dense.isnan()) and ours.isnan().any()

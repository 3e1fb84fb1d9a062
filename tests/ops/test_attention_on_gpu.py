"""Every GPU engine against dense attention, and what only a GPU can show of the Triton engine.

    python -m pytest -m gpu -n 8 tests/ops/test_attention_on_gpu.py

Most of the time goes into compiling, hence `-n` (pytest-xdist). The worst errors per engine are printed at the end,
and written to the file that ATTENTION_FUZZ_REPORT names.
"""

import contextlib
import dataclasses
import gc

import pytest
import torch

from tests.ops.attention_cases import INFINITY, NAN, OPTIONS, Case, attend, errors, make_problem, random_cases, run
from tests.ops.error_bounds import assert_close_as_dense


pytestmark = pytest.mark.gpu

LENGTHS = (1, 2, 5, 16, 63, 65, 127, 128, 129, 200, 255, 256, 257, 700, 1500, 2049, 4500)
# What kernels are compiled for is fixed per group, to bound the number of compilations; everything else varies inside.
COMPILED = ("dtype", "head_dim", "heads", "diagonals", "sinks", "id_dtype")
ALIGNED = ("contiguous", "transposed", "expanded", "strided")
# fmt: off
ONLY = {  # of `OPTIONS`, where an engine serves fewer
    "triton": {"dtype": (torch.bfloat16, torch.float16, torch.bfloat16, torch.float32)},
    "fa4": {"dtype": (torch.bfloat16, torch.float16), "head_dim": (128, 64, 96, 256),
            "window": (None, None, 64, 1, 1000)},
    "cudnn": {"dtype": (torch.bfloat16, torch.float16), "head_dim": (128, 64), "queries": ("all",),
              "documents": ("none",), "window": (None, 10_000)},
}
# fmt: on
GROUPS = {"triton": 20, "fa4": 4, "cudnn": 3}
CASES_PER_GROUP = 16


def group_of_cases(engine: str, group: int) -> list[Case]:
    options = OPTIONS | {"batch": (1, 2), "length": LENGTHS} | ONLY[engine]
    compiled = {name: options[name] for name in COMPILED}
    drawn = [*random_cases(GROUPS[engine], seed=11, **compiled)][group]
    options |= {name: (getattr(drawn, name),) for name in COMPILED}
    options["memory"] = ("guarded",) if group % 4 == 3 else ALIGNED
    cases = random_cases(CASES_PER_GROUP, seed=100 + group, **options)
    # fp64 scores of the longest rows take gigabytes.
    return [dataclasses.replace(case, batch=1) if case.length > 2000 else case for case in cases]


def test_the_triton_cases_use_every_option():
    cases = [case for group in range(GROUPS["triton"]) for case in group_of_cases("triton", group)]
    assert len(cases) >= 300
    for name, values in (OPTIONS | {"batch": (1, 2), "length": LENGTHS}).items():
        assert {getattr(case, name) for case in cases} == set(values), name


@contextlib.contextmanager
def compilations():
    """Names the kernels compiled inside."""
    import triton

    names: list[str] = []
    previous = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda *, fn, **kwargs: names.append(fn.name)
    try:
        yield names
    finally:
        triton.knobs.runtime.jit_post_compile_hook = previous


@pytest.mark.parametrize(
    ("engine", "group"), [(engine, group) for engine, count in GROUPS.items() for group in range(count)]
)
def test_equals_dense(engine, group, record_property):
    cases, failures, served = group_of_cases(engine, group), [], 0
    label = f"{engine} {str(cases[0].dtype).removeprefix('torch.')}"
    with compilations() as compiled:
        for case in cases:
            try:
                worst = errors(case, engine, "cuda")
            except Exception as failure:  # one run on a rented machine shows all that is wrong
                if "cannot serve this call" in str(failure):
                    reason = str(failure)
                else:
                    failures.append(f"{type(failure).__name__} {failure}: {case}")
                continue
            finally:
                torch.cuda.empty_cache()
            served += 1
            failures += [f"{name} {error}: {case}" for name, error in worst.items() if error.bound > 1]
            for name, error in worst.items():
                record_property("attention_error", (label, name, error.ratio, error.bound, str(case)))
    record_property("attention_group", (label, served, len(compiled)))
    assert not failures, "\n".join(failures)
    if not served:
        pytest.skip(reason)  # of the last case


# The Triton engine alone

LARGE = Case(
    seed=5, batch=2, heads=(16, 4), head_dim=128, length=4096, documents="gaps", queries="all", window=None,
    diagonals=3, sinks=True, scale=None, dtype=torch.bfloat16, memory="transposed", grad_memory="transposed",
    padding=NAN, needs_grad="all", id_dtype=torch.int64, id_memory="contiguous",
)  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [{}, {"queries": "turns", "window": 700}, {"documents": "none", "head_dim": 64, "diagonals": 6}],
    ids=str,
)
def test_triton_repeats_bit_by_bit(changes):
    problem = make_problem(dataclasses.replace(LARGE, **changes), "cuda")
    inputs = problem.inputs(NAN)
    first = run(problem, inputs, "triton")
    for _ in range(4):
        for tensor, again in zip(first, run(problem, inputs, "triton"), strict=True):
            assert torch.equal(tensor, again)


def test_deterministic_algorithms_get_the_triton_engine():
    problem = make_problem(dataclasses.replace(LARGE, length=1000), "cuda")
    inputs = problem.inputs(NAN)
    expected = run(problem, inputs, "triton")
    torch.use_deterministic_algorithms(True)
    try:
        actual = run(problem, inputs, None)
    finally:
        torch.use_deterministic_algorithms(False)
    for tensor, other in zip(actual, expected, strict=True):
        assert torch.equal(tensor, other)


def test_triton_never_waits_for_the_device():
    case = dataclasses.replace(LARGE, length=1000, queries="holes", window=300, padding=INFINITY)
    problem = make_problem(case, "cuda")
    inputs = problem.inputs(INFINITY)
    run(problem, inputs, "triton")
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(problem, inputs, "triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_triton_compiles_once_for_all_lengths():
    def run_length(length, queries="turns"):
        problem = make_problem(dataclasses.replace(LARGE, length=length, queries=queries, window=100), "cuda")
        run(problem, problem.inputs(0.0), "triton")

    run_length(512)
    run_length(333)
    with compilations() as compiled:
        for length in range(340, 740, 20):
            run_length(length)
        run_length(1, "listed")
        run_length(512, "one")
    assert not compiled


@pytest.mark.parametrize("engine", ["triton", "fa4", "cudnn"])
def test_twenty_lengths_keep_no_memory(engine):
    def used_after(length):
        case = dataclasses.replace(LARGE, length=length, documents="none" if engine == "cudnn" else "gaps")
        problem = make_problem(case, "cuda")
        run(problem, problem.inputs(0.0), engine)
        del problem
        gc.collect()
        return torch.cuda.memory_allocated()

    try:
        used_after(512)
    except ValueError as refusal:
        pytest.skip(str(refusal))
    used = [used_after(length) for length in range(300, 700, 20)]
    assert min(used[-5:]) <= used[0]  # autograd's own thread lets go of its last tensors a little later


def test_triton_takes_little_memory_over_inputs_and_outputs():
    """The mask, the scores and copies of the inputs would take gigabytes each."""
    counts = (32, *[8] * 14)  # heads: query, key, value, 6 diagonals
    leaves = [torch.randn(2, count, 8192, 128, device="cuda", dtype=torch.bfloat16) for count in counts]
    for leaf in leaves:
        leaf.requires_grad_()
    grad_out = torch.randn_like(leaves[0])

    def step():
        out = attend(leaves, implementation="triton")
        return out.detach(), torch.autograd.grad(out, leaves, grad_out)

    step()
    torch.cuda.reset_peak_memory_stats()
    results = step()
    assert torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated() <= 2**29
    del results


@pytest.mark.parametrize(
    ("length", "heads", "every_row"), [(2**24 + 10_000, 4, False), (2**21 + 10_000, 8, True)], ids=["keys", "queries"]
)
def test_triton_reaches_more_than_2_to_the_31_elements(length, heads, every_row):
    """Gradients flow from some rows at the start, in the middle and at the end of one huge row.

    In dense attention these places are documents of their own.
    """
    span, window, head_dim = 90, 50, 128
    starts = torch.tensor([[0], [length // 2], [length - span]])
    columns = (starts + torch.arange(span)).flatten().cuda()
    rows = (starts + torch.arange(window - 1, span)).flatten().cuda()  # which see no key in front of the span
    picked = rows if every_row else torch.arange(len(rows)).cuda()
    queries = length if every_row else len(rows)

    def normal(*shape):
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    inputs = [normal(1, queries, heads, head_dim).transpose(1, 2)]
    inputs += [normal(1, 1, count, head_dim) for count in (length, length, queries, queries)]
    grad_out = torch.zeros_like(inputs[0])
    grad_out[:, :, picked] = normal(1, heads, len(rows), head_dim)

    def run_with(inputs, grad_out, **options):
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        out = attend(leaves, sliding_window=window, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad_out.to(out.dtype))]

    ours = run_with(inputs, grad_out, query_positions=None if every_row else rows[None], implementation="triton")
    compared = (picked, picked, columns, columns, picked, picked)
    for tensor, kept in zip(ours[1:], compared[1:], strict=True):
        assert tensor.count_nonzero() == tensor[:, :, kept].count_nonzero()
    ours, inputs = (
        [tensor[:, :, kept] for tensor, kept in zip(tensors, kept_rows, strict=True)]
        for tensors, kept_rows in ((ours, compared), (inputs, compared[1:]))
    )
    options = {
        "document_ids": torch.arange(3).repeat_interleave(span)[None].cuda(),
        "query_positions": (torch.arange(3)[:, None] * span + torch.arange(window - 1, span)).flatten()[None].cuda(),
        "implementation": "reference",
    }
    dense = run_with(inputs, grad_out[:, :, picked], **options)
    truth = run_with([tensor.double() for tensor in inputs], grad_out[:, :, picked], **options)
    assert_close_as_dense(ours, dense, truth, torch.bfloat16)

"""Seeded random calls of `block_sparse_flash_attention`, and how an engine's results are judged."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.ops import block_sparse_flash_attention
from draftsmith.ops.block_sparse_attention.reference import visible_keys
from tests.ops.error_bounds import error_ratio


NAN, INFINITY = float("nan"), float("inf")
# The values of each field of a `Case`.
OPTIONS: dict[str, Sequence[Any]] = {
    "batch": (1, 2, 3),
    "heads": ((8, 1), (8, 2), (8, 8), (4, 4), (7, 1), (6, 3)),  # query and key heads
    "head_dim": (16, 32, 64, 80, 96, 128, 256),
    "length": (1, 2, 5, 16, 63, 64, 65, 127, 128, 129, 200),
    "documents": ("none", "packed", "gaps", "padded", "a row of padding"),
    "queries": ("all", "listed", "subset", "turns", "holes", "all but a document", "a row of padding", "one", "none"),
    "window": (None, None, 1, 2, 5, 64, 1000, 0, -3),
    "diagonals": (0, 1, 3, 6, 7),
    "sinks": (False, True),
    "scale": (None, 0.3),
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
    "memory": ("contiguous", "transposed", "guarded", "strided", "expanded"),
    "grad_memory": ("contiguous", "transposed", "expanded"),
    "padding": (0.0, NAN, INFINITY),  # what padding rows hold
    "needs_grad": ("all", "all", "some", "none"),
    "id_dtype": (torch.int64, torch.int32),
    "id_memory": ("contiguous", "strided"),
}


@dataclass(frozen=True)
class Case:
    seed: int
    batch: int
    heads: tuple[int, int]
    head_dim: int
    length: int
    documents: str
    queries: str
    window: int | None
    diagonals: int
    sinks: bool
    scale: float | None
    dtype: torch.dtype
    memory: str
    grad_memory: str
    padding: float
    needs_grad: str
    id_dtype: torch.dtype
    id_memory: str


def random_cases(count: int, *, seed: int, **options: Sequence[Any]) -> Iterator[Case]:
    """Cases whose fields are dealt from shuffled decks, so that `count` of them show every one of `count` values.

    `options` replace values of `OPTIONS`.
    """
    rng = random.Random(seed)
    decks: dict[str, list[Any]] = {}
    for index in range(count):
        fields = {}
        for name, values in (OPTIONS | options).items():
            if not decks.get(name):
                decks[name] = rng.sample(values, len(values))
            fields[name] = decks[name].pop()
        yield Case(seed=1000 * seed + index, **fields)


@dataclass(frozen=True)
class Problem:
    """The tensors of a case. `names` and `needs_grad` describe its inputs, which `inputs` makes."""

    case: Case
    names: list[str]  # query, key, value, J x diagonal_keys, J x diagonal_values (, sinks)
    values: list[Tensor]  # in the case's dtype
    needs_grad: list[bool]
    grad_out: Tensor
    document_ids: Tensor | None
    query_positions: Tensor | None
    visible: Tensor  # [B, Q, T]
    padding: dict[str, Tensor]  # which rows are padding: [B, T] of key and value, [B, Q] of all others

    def inputs(self, fill: float) -> list[Tensor]:
        """In the case's memory layout, with `fill` in the padding rows."""
        return [
            tensor if name == "sinks"
            else arranged(tensor.masked_fill(self.padding[name][:, None, :, None], fill), self.case.memory)
            for name, tensor in zip(self.names, self.values, strict=True)
        ]  # fmt: skip


def make_problem(case: Case, device: str = "cpu") -> Problem:
    rng = random.Random(case.seed)
    generator = torch.Generator(device).manual_seed(case.seed)
    document_ids, query_positions = (_as_tensor(ids, case, device) for ids in _ids(case, rng))
    every = torch.arange(case.length, device=device).expand(case.batch, -1)
    documents = torch.zeros_like(every) if document_ids is None else document_ids.long()
    visible, real = visible_keys(every if query_positions is None else query_positions.long(), documents, case.window)

    (q_heads, kv_heads), queries, count = case.heads, real.shape[1], case.diagonals
    names = ["query", "key", "value"] + ["diagonal_keys"] * count + ["diagonal_values"] * count
    names += ["sinks"] * case.sinks
    rows = {"key": case.length, "value": case.length}

    def normal(name: str, memory: str) -> Tensor:
        shape = (case.batch, q_heads if name == "query" else kv_heads, rows.get(name, queries), case.head_dim)
        tensor = torch.randn((q_heads,) if name == "sinks" else shape, generator=generator, device=device)
        return tensor if name == "sinks" else arranged(tensor.to(case.dtype), memory)

    needs_grad = [case.needs_grad == "all" or (case.needs_grad == "some" and rng.random() < 0.5) for _ in names]
    padding = {name: documents < 0 if name in rows else ~real for name in ["out", *names] if name != "sinks"}
    return Problem(
        case, names, [normal(name, case.memory) for name in names], needs_grad, normal("query", case.grad_memory),
        document_ids, query_positions, visible, padding,
    )  # fmt: skip


def arranged(tensor: Tensor, memory: str) -> Tensor:
    """[B, H, T, D] with other strides; "expanded" repeats the first batch row (or head)."""
    if memory == "contiguous":
        return tensor
    if memory == "transposed":  # as a projection's [B, T, H, D] comes
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if memory == "guarded":  # unaligned rows, between others that must not be read
        batch, heads, rows, head_dim = tensor.shape
        buffer = tensor.new_full((batch, heads, rows + 6, head_dim + 3), NAN)
        buffer[:, :, 3:-3, 1:-2] = tensor
        return buffer[:, :, 3:-3, 1:-2]
    if memory == "strided":
        return tensor.mT.contiguous().mT
    return tensor[:1].expand_as(tensor) if tensor.shape[0] > 1 else tensor[:, :1].expand_as(tensor)


# Documents and positions


def _ids(case: Case, rng: random.Random) -> tuple[list[list[int]] | None, list[list[int]] | None]:
    documents = [_documents(case, rng) for _ in range(case.batch)]
    if case.documents == "a row of padding":
        documents[rng.randrange(case.batch)] = [-1] * case.length
    positions = [_positions(case, rng, row) for row in documents]
    if case.queries == "a row of padding":
        positions[rng.randrange(case.batch)] = []
    width = max(map(len, positions)) + (rng.randint(0, 2) if case.queries in ("subset", "a row of padding") else 0)
    positions = [row + [-1] * (width - len(row)) for row in positions]
    if case.memory == "expanded":  # whose padding rows must agree
        documents, positions = documents[:1] * case.batch, positions[:1] * case.batch
    return None if case.documents == "none" else documents, None if case.queries == "all" else positions


def _as_tensor(ids: list[list[int]] | None, case: Case, device: str) -> Tensor | None:
    if ids is None:
        return None
    tensor = torch.tensor(ids, dtype=case.id_dtype, device=device)
    if case.id_memory == "contiguous":
        return tensor
    return tensor[:1].expand_as(tensor) if case.memory == "expanded" else tensor.T.contiguous().T


def _documents(case: Case, rng: random.Random) -> list[int]:
    """One row of ids, in no order."""
    length = case.length
    if case.documents == "none":
        return [0] * length
    if case.documents == "padded":
        padding = [-1] * rng.randint(0, length - 1)
        document = [rng.randrange(9)] * (length - len(padding))
        return rng.choice((document + padding, padding + document))
    ids: list[int] = []
    names = rng.sample(range(10 * length), length)
    while len(ids) < length:
        name = -1 if case.documents == "gaps" and rng.random() < 0.3 else names.pop()
        ids += [name] * int(length ** rng.random())
    return ids[:length]


def _positions(case: Case, rng: random.Random, documents: list[int]) -> list[int]:
    every = range(case.length)
    if case.queries in ("all", "listed"):
        return [*every]
    if case.queries == "none":
        return []
    if case.queries == "one":
        return [rng.choice(every)]
    if case.queries == "all but a document":
        left_out = rng.choice(documents)
        return [row for row in every if documents[row] != left_out]
    if case.queries == "turns":
        turn = rng.randint(1, max(1, case.length // 8))
        return [row for row in every if row // turn % 4 == 1]
    chosen = sorted(rng.sample(every, rng.randint(1, case.length)))
    return [-1 if case.queries == "holes" and rng.random() < 0.3 else row for row in chosen]


# Running and judging


def attend(inputs: Sequence[Tensor], *, sinks: bool = False, **options: Any) -> Tensor:
    query, key, value, *rest = inputs
    sink = rest.pop() if sinks else None
    half = len(rest) // 2
    return block_sparse_flash_attention(query, key, value, rest[:half], rest[half:], sinks=sink, **options)


def run(problem: Problem, inputs: Sequence[Tensor], implementation: str | None) -> list[Tensor]:
    """The output, and the gradient of every input that needs one."""
    case = problem.case
    leaves = [
        tensor.detach().requires_grad_(needed) for tensor, needed in zip(inputs, problem.needs_grad, strict=True)
    ]
    out = attend(
        leaves, sinks=case.sinks, document_ids=problem.document_ids, query_positions=problem.query_positions,
        sliding_window=case.window, scale=case.scale, implementation=implementation,
    )  # fmt: skip
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    gradients = torch.autograd.grad(out, wanted, problem.grad_out.to(out.dtype)) if wanted else ()
    return [out.detach(), *gradients]


@dataclass(frozen=True)
class Error:
    bound: float  # of the allowed error, see `error_ratio`
    ratio: float  # error(ours) / error(dense), where a dense error below one rounding counts as one


def errors(case: Case, implementation: str, device: str = "cpu") -> dict[str, Error]:
    """An engine against dense attention in the same dtype, both against fp64 from the same rounded inputs, by tensor.

    Raises AssertionError where exactness is due: padding rows give 0, nothing else than numbers comes out.
    """
    problem = make_problem(case, device)
    ours = run(problem, problem.inputs(case.padding), implementation)
    inputs = problem.inputs(0.0)
    dense = run(problem, inputs, "reference")
    truth = run(problem, [tensor.double() for tensor in inputs], "reference")
    names = ["out", *(name for name, needed in zip(problem.names, problem.needs_grad, strict=True) if needed)]
    terms = cancelling_terms(problem, inputs)
    worst: dict[str, Error] = {}
    for name, *tensors in zip(names, ours, dense, truth, strict=True):
        tensor = tensors[0]
        assert tensor.dtype == tensors[1].dtype and tensor.shape == tensors[1].shape, name
        assert tensor.isfinite().all(), f"{name} is not finite"
        if name != "sinks":
            padding = problem.padding[name]
            assert (tensor.transpose(1, 2)[padding] == 0).all(), f"{name} is not 0 in padding rows"
        error = _error(*tensors, case.dtype, terms)
        worst[name] = max(worst.get(name, error), error, key=lambda error: error.bound)
    return worst


def _error(ours: Tensor, dense: Tensor, truth: Tensor, dtype: torch.dtype, terms: float) -> Error:
    bound = error_ratio(ours, dense, truth, dtype, terms / max(truth.numel(), 1) ** 0.5)
    error, dense_error = ((tensor.double() - truth).norm().item() for tensor in (ours, dense))
    rounding = torch.finfo(dtype).eps / 2 * max(truth.norm().item(), terms)
    return Error(bound, error / max(dense_error, rounding, 1e-30))


def check(case: Case, implementation: str) -> None:
    for name, error in errors(case, implementation).items():
        assert error.bound <= 1, f"{name}: {error.bound:.2f} of the allowed error"


def cancelling_terms(problem: Problem, inputs: Sequence[Tensor]) -> float:
    """The norm of delta's part in a gradient, from p_j * (dO.v_j - delta), the gradient of score j.

    Where one key takes a query's whole weight the two terms cancel: exactly in dense attention, up to the rounding of
    delta (a sum over the stored output) in any flash attention. Where n keys share the weight, delta's part is 1 / n.
    """
    case = problem.case
    query, key, *_ = inputs = [tensor.double() for tensor in inputs]
    group = case.heads[0] // case.heads[1]
    scores = (query @ key.repeat_interleave(group, 1).mT).masked_fill(~problem.visible[:, None], -INFINITY)
    columns = [scores]
    for keys in inputs[3 : 3 + case.diagonals]:
        columns.append((query * keys.repeat_interleave(group, 1)).sum(-1, keepdim=True))
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    scores = torch.cat(columns, -1) * scale
    total = scores.logsumexp(-1)
    if case.sinks:
        total = total.logaddexp(inputs[-1][:, None])
    weights = (scores - total[..., None]).exp().nan_to_num(0.0)
    concentration = weights.square().sum(-1)  # [B, Hq, Q], 1 for a single key
    return scale * case.head_dim * concentration.norm().item()

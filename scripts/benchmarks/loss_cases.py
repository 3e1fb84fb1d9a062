"""The shapes and objectives that the losses are measured on, and random inputs for them."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


TOKENS = 8192
CONFIDENCE = {"target": 10.0, "draft": 8.0}  # of their logits over noise of deviation 1: p about 0.1 and 0.01
IN_VOCABULARY = 0.95  # of the target's argmaxes, as with real draft vocabularies


@dataclass(frozen=True)
class Case:
    """A head [vocabulary or draft_vocabulary, hidden] over `rows` tokens."""

    name: str
    hidden: int
    vocabulary: int
    rows: int = TOKENS
    steps: int = 0  # of the draft's unroll, compared with a teacher; 0: hard labels
    objective: str = "ce"
    draft_vocabulary: int | None = None
    chunks: tuple[int, ...] = ()  # of tokens, with a teacher of its rows, each of which brings `steps` draft rows
    peers: tuple[str, ...] = ()
    checked_rows: int | None = None  # None: all, and with them the head's gradient

    @property
    def head_size(self) -> int:
        return self.draft_vocabulary or self.vocabulary

    @property
    def rows_per_step(self) -> list[int]:
        """|R_k|: one row less at every step, as in one document."""
        return [self.rows - k for k in range(max(1, self.steps))]

    @property
    def gemm_flops(self) -> int:
        """Logits, gradient of the states and of the head; with a teacher, its logits."""
        draft = 3 * self.head_size * sum(self.rows_per_step)
        return 2 * self.hidden * (draft + (self.vocabulary * self.rows if self.steps else 0))

    def shrunk(self, factor: int) -> "Case":
        smaller = {"rows": max(12, 4 * self.rows // factor), "hidden": max(8, self.hidden // factor)}
        smaller["vocabulary"] = self.vocabulary // factor + 1
        if self.draft_vocabulary:
            smaller["draft_vocabulary"] = self.draft_vocabulary // factor
        return replace(self, **smaller, chunks=tuple(max(1, 4 * chunk // factor) for chunk in self.chunks))


@dataclass
class Inputs:
    case: Case
    states: list[Tensor]  # max(1, K) x [N - k, H]
    weight: Tensor  # [D, H]
    labels: Tensor  # [N], target ids
    row_sets: list[Tensor]  # K x [N - k], on the CPU
    teacher_states: Tensor | None  # [N, H]
    teacher_weight: Tensor | None  # [V, H]
    t2d: Tensor | None  # [V] bool

    @property
    def leaves(self) -> list[Tensor]:
        """All that receive gradients."""
        return [*self.states, self.weight]


def make_inputs(case: Case, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Labels stand out of the noise: no two tokens are nearly as likely, so rounding does not change an argmax."""
    options = {"device": device, "dtype": dtype}

    def head(rows: int) -> Tensor:
        return torch.randn(rows, case.hidden, **options).mul_(case.hidden**-0.5)

    def states(weight: Tensor, ids: Tensor, confidence: float) -> Tensor:
        return torch.randn(len(ids), case.hidden, **options).add_(weight[ids], alpha=confidence)

    t2d, labels = None, torch.randint(case.vocabulary, (case.rows,), device=device)
    draft_ids = labels
    if case.draft_vocabulary:
        ids = torch.randperm(case.vocabulary, device=device)[: case.draft_vocabulary].sort().values
        t2d = torch.zeros(case.vocabulary, dtype=torch.bool, device=device).index_fill_(0, ids, True)
        draft_ids = torch.randint(case.draft_vocabulary, (case.rows,), device=device)
        labels = torch.where(torch.rand(case.rows, device=device) < IN_VOCABULARY, ids[draft_ids], labels)
    weight, teacher_states, teacher_weight = head(case.head_size), None, None
    if case.steps:
        teacher_weight = head(case.vocabulary)
        teacher_states = states(teacher_weight, labels, CONFIDENCE["target"])
    return Inputs(
        case=case,
        states=[
            states(weight, draft_ids[case.rows - rows :], CONFIDENCE["draft"]).requires_grad_()
            for rows in case.rows_per_step
        ],
        weight=weight.requires_grad_(),
        labels=labels,
        row_sets=[torch.arange(rows) for rows in case.rows_per_step],
        teacher_states=teacher_states,
        teacher_weight=teacher_weight,
        t2d=t2d,
    )


HARD_CHUNKS = (512, 1024, 2048, 4096, 8192)
HARD_PEERS = (
    "eager", "compiled", "liger", "liger x16",
    "liger fp32", "liger fp32 x16", "liger fp32 x32", "cce",
)  # fmt: skip
SHAPES = [(4096, 128256), (2880, 201088), (4096, 32000), (4096, 262144)]
HARD_CASES = [
    Case(f"H {hidden}, V {size}", hidden, size, chunks=HARD_CHUNKS, peers=HARD_PEERS) for hidden, size in SHAPES
]
SOFT_CHUNKS = {1: (1024, 4096), 3: (512, 1024, 2048), 7: (256, 512, 1024)}
SOFT_PEERS = {
    1: ("eager", "compiled", "liger-jsd", "liger-jsd fp32", "liger-kl fp32", "liger-chunked-jsd"),
    3: ("eager", "liger-kl fp32"),
    7: ("eager", "liger-jsd fp32", "liger-kl fp32"),
}


def _soft(steps: int, objective: str = "kl", draft_vocabulary: int | None = None) -> Case:
    name = f"{objective}, K {steps}" + (f", draft vocabulary {draft_vocabulary}" if draft_vocabulary else "")
    chunks = SOFT_CHUNKS[steps] if objective == "kl" else (1024,)
    whole = objective == "kl" and not draft_vocabulary  # what Liger offers
    peers = SOFT_PEERS[steps] if whole else ("eager",)
    return Case(name, 4096, 128256, TOKENS, steps, objective, draft_vocabulary, chunks, peers)


SOFT_CASES = [_soft(steps) for steps in (7, 1, 3)]
SOFT_CASES += [_soft(steps, draft_vocabulary=32000) for steps in (7, 1, 3)]
SOFT_CASES += [_soft(3, objective) for objective in ("tv", "lk_lambda")]
# The same chunks over 16 times the rows: their logits must take the same memory.
LONG_CASES = [
    Case(f"{rows} rows, V 201088", 2880, 201088, rows, chunks=(1024, 4096), checked_rows=64)
    for rows in (TOKENS, 16 * TOKENS)
]
CASES = [*HARD_CASES[:2], *SOFT_CASES[:1], *HARD_CASES[2:], *LONG_CASES, *SOFT_CASES[1:]]  # what matters most, first
QUICK_CASES = [*HARD_CASES[:2], SOFT_CASES[0], SOFT_CASES[3]]
QUICK_PEERS = ("liger", "liger fp32 x16")

"""What the draft's rows are compared with: hard labels, or the target model's distributions."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..precision import matmul_dtype
from .dispatch import row_functions
from .head import LinearHead
from .rows import DraftVocabulary, RowLosses
from .validation import check_labels


class Targets(Protocol):
    def losses(
        self, logits: Tensor, chunk: slice, entries: Tensor, students: Tensor, coefficient: Tensor | None
    ) -> RowLosses:
        """Losses of one chunk's draft `logits`, overwritten with the gradient if `coefficient` is given.

        `chunk` are the teacher's entries, `entries` [n] the one of each row of `logits`, and `students` [C, K] the row
        of `logits` of each of those entries and step, -1 where there is none.
        """


class LabelTargets(NamedTuple):
    labels: Tensor  # [|R_0|], draft ids, -1 outside the draft vocabulary

    def losses(
        self, logits: Tensor, chunk: slice, entries: Tensor, students: Tensor, coefficient: Tensor | None
    ) -> RowLosses:
        labels = self.labels[entries]
        inside = labels >= 0
        factor = None if coefficient is None else coefficient * inside
        result = row_functions(logits).cross_entropy_rows(logits, labels.clamp(min=0), factor)
        return RowLosses(result.loss * inside, result.hit & inside, None)


class TeacherTargets(NamedTuple):
    head: LinearHead
    states: Tensor  # [|R_0|, Ht]
    objective: str
    vocabulary: DraftVocabulary | None
    softcap: float | None

    def losses(
        self, logits: Tensor, chunk: slice, entries: Tensor, students: Tensor, coefficient: Tensor | None
    ) -> RowLosses:
        teacher_logits = self.head.logits(self.states[chunk].to(self.head.weight.dtype))
        return row_functions(logits).teacher_rows(
            logits, teacher_logits, students, coefficient, objective=self.objective,
            vocabulary=self.vocabulary, teacher_softcap=self.softcap,
        )  # fmt: skip


def label_targets(labels: Tensor, t2d: Tensor | None, *, draft_size: int) -> LabelTargets:
    check_labels(labels, draft_size if t2d is None else len(t2d))
    return LabelTargets(labels if t2d is None else draft_vocabulary(t2d, draft_size, len(t2d)).draft_ids[labels])


def teacher_targets(
    states: Tensor, weight: Tensor, bias: Tensor | None, t2d: Tensor | None,
    *, objective: str, softcap: float | None, draft_size: int, capacity: int,
) -> TeacherTargets:  # fmt: skip
    if t2d is None and len(weight) != draft_size:
        raise ValueError(f"`t2d` is needed: `weight` has {draft_size} rows and `teacher_weight` {len(weight)}")
    vocabulary = None if t2d is None else draft_vocabulary(t2d, draft_size, len(weight))
    head = LinearHead(weight, bias, dtype=matmul_dtype(states.dtype, states.device), capacity=capacity)
    return TeacherTargets(head, states.detach(), objective, vocabulary, softcap)


def draft_vocabulary(t2d: Tensor, draft_size: int, target_size: int) -> DraftVocabulary:
    """Ids of a map that may be longer (padded embedding) or shorter than the target's head."""
    ids = torch.nonzero_static(t2d, size=draft_size)[:, 0]
    if not t2d.is_cuda:
        if int(t2d.sum()) != draft_size:
            raise ValueError(f"`t2d` marks {int(t2d.sum())} ids, but `weight` has {draft_size} rows")
        if int(ids.max()) >= target_size:
            raise ValueError(f"`t2d` marks id {int(ids.max())}, but `teacher_weight` has {target_size} rows")
    index = torch.where(t2d, t2d.cumsum(0) - 1, -1)
    return DraftVocabulary(ids, pad(index, (0, max(0, target_size - len(t2d))), value=-1))

"""Whoever computes a loss here: ours, torch, Liger and CCE where installed, and the bare matrix products."""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from draftsmith.ops import streaming_cross_entropy, streaming_draft_loss
from draftsmith.ops.streaming_loss import chunking, draft_loss
from draftsmith.ops.streaming_loss import cross_entropy as cross_entropy_module

from .common import Refused
from .loss_cases import Case, Inputs
from .loss_check import add_product, row_losses


class Contender:
    """A loss of `Inputs`: with a teacher, sum_k of the mean over R_k."""

    is_kept = True  # for later rounds; not where another contender makes it compile again

    def __init__(self, inputs: Inputs):
        self.inputs = inputs

    def loss(self) -> Tensor:
        raise NotImplementedError

    def run(self) -> list[Tensor]:
        """The loss and the gradients of `Inputs.leaves`."""
        loss = self.loss()
        return [loss, *torch.autograd.grad(loss, self.inputs.leaves)]

    @property
    def chunk(self) -> int | None:
        """Tokens, or a teacher's rows, whose logits exist at a time; None: all."""
        return None


class Ours(Contender):
    def __init__(self, inputs: Inputs, chunk_size: int | None):
        super().__init__(inputs)
        self.chunk_size = chunk_size

    def loss(self) -> Tensor:
        inputs, case = self.inputs, self.inputs.case
        if not case.steps:
            return streaming_cross_entropy(inputs.states[0], inputs.weight, inputs.labels, chunk_size=self.chunk_size)
        return streaming_draft_loss(
            inputs.states, inputs.weight, inputs.teacher_states, inputs.teacher_weight, inputs.row_sets,
            t2d=inputs.t2d, objective=case.objective, step_weights=[case.rows / rows for rows in case.rows_per_step],
            num_items=case.rows, chunk_size=self.chunk_size,
        )[0]  # fmt: skip

    @property
    def chunk(self) -> int | None:
        if self.chunk_size is not None:
            return self.chunk_size
        with recorded_choices() as choices:
            self.loss()
        return choices[-1]


@contextlib.contextmanager
def recorded_choices() -> Iterator[list[int]]:
    """The chunk sizes that the losses choose meanwhile."""
    choices: list[int] = []

    def choose(*args: Any, **options: Any) -> int:
        choices.append(chunking_choice(*args, **options))
        return choices[-1]

    chunking_choice = chunking.choose_chunk_size
    with contextlib.ExitStack() as stack:
        for module in (cross_entropy_module, draft_loss):
            stack.enter_context(mock.patch.object(module, "choose_chunk_size", choose))
        yield choices


class Dense(Contender):
    """As it is usually written: logits, to fp32, the loss; all steps in one graph."""

    def loss(self) -> Tensor:
        inputs, case = self.inputs, self.inputs.case
        if not case.steps:
            return self.hard_loss(inputs.states[0], inputs.weight, inputs.labels)
        teacher_logits = linear(inputs.teacher_states, inputs.teacher_weight).float()
        losses = [
            self.soft_loss(states, inputs.weight, teacher_logits[step:], inputs.t2d, case.objective)
            for step, states in enumerate(inputs.states)
        ]
        return torch.stack(losses).sum()

    @staticmethod
    def hard_loss(states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(linear(states, weight).float(), labels)

    @staticmethod
    def soft_loss(
        states: Tensor, weight: Tensor, teacher_logits: Tensor, t2d: Tensor | None, objective: str
    ) -> Tensor:
        logits = linear(states, weight).float()
        return row_losses(logits, None, teacher_logits, t2d, objective).mean()


class Compiled(Dense):
    is_kept = False

    def __init__(self, inputs: Inputs):
        super().__init__(inputs)
        torch._dynamo.reset()  # one graph per case: another would be compiled for shapes of both
        self.hard_loss = torch.compile(Dense.hard_loss, dynamic=False)  # type: ignore[method-assign]
        self.soft_loss = torch.compile(Dense.soft_loss, dynamic=False)  # type: ignore[method-assign]


def peer(module: str) -> ModuleType:
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise Refused("not installed") from None


def liger_chunk(case: Case, multiple: int) -> int:
    """By its rule: logits as large as `multiple` times the states, rounded up to a power of 2."""
    parts = -(-case.vocabulary // (multiple * case.hidden))
    return min(case.rows, 1 << (-(-case.rows // parts) - 1).bit_length())


class Liger(Contender):
    """Sums the head's gradient in its own dtype, unless told otherwise; `multiple` widens its chunks."""

    def __init__(self, inputs: Inputs, accum_dtype: torch.dtype | None = None, multiple: int = 1):
        super().__init__(inputs)
        function = peer("liger_kernel.ops.fused_linear_cross_entropy").LigerFusedLinearCrossEntropyFunction
        self.multiple = multiple
        unused = (None, None, -100, 0.0, 0.0, "mean", None, False)  # bias .. return_z_loss
        self.apply = lambda *tensors: function.apply(
            *tensors, *unused, accum_dtype, False, False, False, None, None, multiple
        )

    def loss(self) -> Tensor:
        inputs = self.inputs
        return self.apply(inputs.states[0], inputs.weight, inputs.labels)[0]

    @property
    def chunk(self) -> int:
        return liger_chunk(self.inputs.case, self.multiple)


class PerStep(Contender):
    """A distillation loss of one student: a call per step, each with its own teacher logits."""

    def loss(self) -> Tensor:
        losses = [self.step_loss(step, states) for step, states in enumerate(self.inputs.states)]
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def step_loss(self, step: int, states: Tensor) -> Tensor:
        raise NotImplementedError


class LigerJSD(PerStep):
    """Forward KL, as its JSD at beta 0."""

    def __init__(self, inputs: Inputs, accum_dtype: torch.dtype | None = None):
        super().__init__(inputs)
        self.function = peer("liger_kernel.ops.fused_linear_jsd").LigerFusedLinearJSDFunction
        self.accum_dtype = accum_dtype

    def step_loss(self, step: int, states: Tensor) -> Tensor:
        inputs = self.inputs
        teacher = (inputs.teacher_states[step:], inputs.teacher_weight)
        return self.function.apply(states, inputs.weight, *teacher, None, 0.0, -100, 1.0, self.accum_dtype)

    @property
    def chunk(self) -> int:
        return liger_chunk(self.inputs.case, 1)


class LigerKL(PerStep):
    """Wants the teacher's probabilities whole."""

    def __init__(self, inputs: Inputs, accum_dtype: torch.dtype | None = None):
        super().__init__(inputs)
        self.function = peer("liger_kernel.ops.fused_linear_kl_div").LigerFusedLinearKLDivFunction
        self.accum_dtype = accum_dtype

    def loss(self) -> Tensor:
        self.probabilities = linear(self.inputs.teacher_states, self.inputs.teacher_weight).softmax(-1)
        loss = super().loss()
        del self.probabilities
        return loss

    def step_loss(self, step: int, states: Tensor) -> Tensor:
        options = (None, "batchmean", -100, 1.0, 1e-10, self.accum_dtype)
        return self.function.apply(states, self.inputs.weight, self.probabilities[step:], *options)

    @property
    def chunk(self) -> int:
        return liger_chunk(self.inputs.case, 16)


class LigerChunkedJSD(PerStep):
    """Its compiled distillation losses, softmax in the logits' dtype, 1024 tokens at a time."""

    is_kept = False

    def __init__(self, inputs: Inputs):
        super().__init__(inputs)
        self.function = peer("liger_kernel.chunked_loss.jsd_loss").LigerFusedLinearJSDFunction
        torch._dynamo.reset()

    def step_loss(self, step: int, states: Tensor) -> Tensor:
        inputs = self.inputs
        teacher = (inputs.teacher_states[step:], inputs.teacher_weight)
        options = (None, None, 0.0, 1.0, 0.0, -100, 1.0, True, self.chunk, False)  # biases .. return_soft_hard_loss
        return self.function.apply(states, inputs.weight, *teacher, inputs.labels[step:], *options)

    @property
    def chunk(self) -> int:
        return 1024


class CutCrossEntropy(Contender):
    def __init__(self, inputs: Inputs):
        super().__init__(inputs)
        self.function = peer("cut_cross_entropy").linear_cross_entropy

    def loss(self) -> Tensor:
        return self.function(self.inputs.states[0], self.inputs.weight, self.inputs.labels)


class Gemms(Contender):
    """What every loss must multiply, and nothing else: the logits stand in for their own gradient."""

    def __init__(self, inputs: Inputs, chunk_size: int | None = None):
        super().__init__(inputs)
        self.chunk_size = chunk_size or inputs.case.rows

    @property
    def chunk(self) -> int | None:
        return self.chunk_size

    @torch.no_grad()
    def run(self) -> list[Tensor]:
        inputs, weight = self.inputs, self.inputs.weight
        grads, weight_grad = [], None
        for start in range(0, inputs.case.rows, self.chunk_size):
            chunk = slice(start, start + self.chunk_size)
            if inputs.teacher_weight is not None:
                inputs.teacher_states[chunk] @ inputs.teacher_weight.T
            rows = inputs.states[0][chunk]
            if len(inputs.states) > 1:
                rows = torch.cat([states[chunk] for states in inputs.states])
            logits = rows @ weight.T
            grads.append(logits @ weight)
            weight_grad = add_product(weight_grad, logits.T, rows)
        return [*grads, weight_grad]


GEMMS: dict[str, Callable[[Inputs], Contender]] = {"gemms": Gemms, "gemms 4096": partial(Gemms, chunk_size=4096)}
PEERS: dict[str, Callable[[Inputs], Contender]] = {
    "eager": Dense,
    "compiled": Compiled,
    "liger": Liger,
    "liger x16": partial(Liger, multiple=16),
    "liger fp32": partial(Liger, accum_dtype=torch.float32),
    "liger fp32 x16": partial(Liger, accum_dtype=torch.float32, multiple=16),
    "liger fp32 x32": partial(Liger, accum_dtype=torch.float32, multiple=32),
    "cce": CutCrossEntropy,
    "liger-jsd": LigerJSD,
    "liger-jsd fp32": partial(LigerJSD, accum_dtype=torch.float32),
    "liger-kl fp32": partial(LigerKL, accum_dtype=torch.float32),
    "liger-chunked-jsd": LigerChunkedJSD,
}


def ours(case: Case) -> dict[str, Callable[[Inputs], Contender]]:
    named: dict[str, int | None] = {f"ours {chunk}": chunk for chunk in case.chunks}
    if not case.checked_rows:  # there, the same chunk is asked about
        named["ours auto"] = None
    return {name: partial(Ours, chunk_size=chunk) for name, chunk in named.items()}

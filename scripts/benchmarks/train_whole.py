"""The whole step: forward of a target of random weights, draft step, optimizer; and its parts alone.

Draft weights, gradients and both moments of a fused AdamW are in the benchmark's dtype, bf16: what is beside the
target takes 8 bytes per trained weight. Masters in fp32 would add 8 more and the time to read them.
"""

from collections.abc import Callable, Iterator
from functools import cached_property, partial

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftsmith import Eagle3DraftModel
from draftsmith.ops import block_sparse_flash_attention
from draftsmith.target import FrozenTarget
from draftsmith.transformers_hooks import ATTENTION_NAME

from .train_cases import Batch, Case, make_batch
from .train_contenders import Contender


ROWS = 4096  # of logits at a time
POOL = 8192  # distinct tokens, so that what the target predicts after the first
PROBE = 32768  # tokens of a long row is what it mostly predicts after the others


class Step:
    """Target, draft head and optimizer, which the whole step and its parts share."""

    def __init__(self, case: Case, device: torch.device, dtype: torch.dtype, target: PreTrainedModel | None = None):
        """`target` has random weights unless it is given."""
        config, draft_config = case.target_config, case.draft_config
        if target is None:
            with device:
                target = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
        self.target = FrozenTarget(target, draft_config.eagle_aux_hidden_state_layer_ids)
        pool = torch.randperm(config.vocab_size, device=device)[:POOL]
        self.batch: Batch = make_batch(case, pool[torch.randint(len(pool), (case.length,), device=device)])
        d2t = None
        if case.draft_vocabulary:
            ids = predicted_ids(self.target, self.batch, case.draft_vocabulary)
            d2t = ids - torch.arange(len(ids), device=device)
        with device:
            draft = Eagle3DraftModel.from_target(target, draft_vocab_size=case.draft_vocabulary, d2t=d2t)
        self.case, self.draft = case, draft.to(dtype).train()
        self.optimizer = torch.optim.AdamW(self.draft.parameters(), lr=1e-6, fused=True)
        for parameter in self.draft.parameters():  # so that its state exists, and counts as such
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @cached_property
    def compiled_target(self) -> FrozenTarget:
        """The same layers, compiled while they run through this one."""
        target = FrozenTarget(self.target.model, self.target.aux_layer_ids)
        target.compile_layers()
        return target

    @cached_property
    def captured_target(self) -> FrozenTarget:
        """The same layers as a CUDA graph."""
        target = FrozenTarget(self.target.model, self.target.aux_layer_ids)
        target.capture_forward()
        return target


@torch.no_grad()
def predicted_ids(target: FrozenTarget, batch: Batch, size: int) -> Tensor:
    """The draft vocabulary, ascending: what this target predicts most, as with real ones."""
    documents = batch.tensors["document_ids"][:, :PROBE]
    states = target(batch.input_ids[:, :PROBE], document_ids=documents).last_hidden_state[0]
    best = torch.cat([(rows @ target.head_weight.T).argmax(-1) for rows in states.split(ROWS)])
    counts = torch.bincount(best, minlength=len(target.head_weight))
    return counts.argsort(descending=True, stable=True)[:size].sort().values


class Whole(Contender):
    """As `Eagle3Trainer` does it for one micro-batch."""

    def __init__(self, step: Step, recompute: bool = False, target: str = "target"):
        self.step, self.model, self.recompute = step, step.draft, recompute
        self.target = getattr(step, target)

    def run(self) -> list[Tensor]:
        step = self.step
        if self.recompute:
            step.draft.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            step.draft.gradient_checkpointing_disable()
        states = self.target(step.batch.input_ids, document_ids=step.batch.tensors["document_ids"])
        aux, last = states.aux_hidden_states, states.last_hidden_state
        step.batch.step(step.draft, aux, last, step.target.head_weight).backward()
        step.optimizer.step()
        step.optimizer.zero_grad()
        return []


class TargetAlone(Contender):
    def __init__(self, step: Step, target: str = "target"):
        self.step, self.model = step, step.draft
        self.target = getattr(step, target)

    def run(self) -> list[Tensor]:
        self.target(self.step.batch.input_ids, document_ids=self.step.batch.tensors["document_ids"])
        return []


class OptimizerAlone(Contender):
    def __init__(self, step: Step):
        self.step, self.model = step, step.draft

    def run(self) -> list[Tensor]:
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.randn_like(parameter)
        self.step.optimizer.step()
        return []


class AttentionAlone(Contender):
    """Forward and backward of every unroll step's attention, by the op's own choice of engine."""

    def __init__(self, step: Step):
        self.model = step.draft
        config, row_sets = step.draft.config, step.batch.tensors["row_sets"]
        self.documents = step.batch.tensors["document_ids"]
        options = {"device": self.documents.device, "dtype": step.draft.dtype, "requires_grad": True}

        def states(heads: int, rows: int) -> Tensor:  # [1, heads, rows, d], as projections leave them
            return torch.randn(1, rows, heads, config.head_dim, **options).transpose(1, 2)

        keys = partial(states, config.num_key_value_heads)
        self.key, self.value = keys(step.case.length), keys(step.case.length)
        self.calls = [
            (states(config.num_attention_heads, len(rows)), [[keys(len(rows)) for _ in range(k)] for _ in range(2)],
             rows[None].to(self.documents.device))
            for k, rows in enumerate(row_sets)
        ]  # fmt: skip

    def run(self) -> list[Tensor]:
        for query, (keys, values), rows in self.calls:
            out = block_sparse_flash_attention(
                query, self.key, self.value, keys, values, document_ids=self.documents, query_positions=rows
            )
            torch.autograd.grad(out, [query, self.key, self.value, *keys, *values], query.detach())
        return []


def products(case: Case, row_sets: list[Tensor]) -> Iterator[tuple[int, int, int, int]]:
    """(rows, inputs, outputs, matrix products) of everything that the draft step must multiply.

    Three products per trained matrix: forward, gradient of the inputs, gradient of the weights. The fused states get
    no gradient, and the teacher's logits none at all.
    """
    config, first = case.draft_config, len(row_sets[0])
    width, mlp = config.hidden_size, config.intermediate_size
    queries, keys = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    yield case.length, config.num_aux_hidden_states * width, width, 2
    yield first, width, queries, 3  # of the embeddings, once for all steps
    yield from [(case.length, width, keys, 3)] * 2
    for step, rows in enumerate(map(len, row_sets)):
        yield rows, width, queries, 3
        yield from [(case.length if step == 0 else rows, width, keys, 3)] * 2
        yield rows, queries, width, 3
        yield from [(rows, width, mlp, 3)] * 2
        yield rows, mlp, width, 3
    for rows, outputs, count in ((first, config.vocab_size, 1), (sum(map(len, row_sets)), config.draft_vocab_size, 3)):
        yield from [(ROWS, width, outputs, count)] * (rows // ROWS)
        if rows % ROWS:
            yield rows % ROWS, width, outputs, count


class GemmsAlone(Contender):
    def __init__(self, step: Step):
        self.model = step.draft
        self.products = list(products(step.case, step.batch.tensors["row_sets"]))
        sizes = [(rows * inputs, outputs * inputs, rows * outputs) for rows, inputs, outputs, _ in self.products]
        options = {"device": step.batch.input_ids.device, "dtype": step.draft.dtype}
        self.pools = [torch.randn(max(column), **options) for column in zip(*sizes, strict=True)]

    @torch.no_grad()
    def run(self) -> list[Tensor]:
        for rows, inputs, outputs, count in self.products:
            shapes = ((rows, inputs), (outputs, inputs), (rows, outputs))
            x, weight, grad = (
                pool[: one * other].view(one, other) for pool, (one, other) in zip(self.pools, shapes, strict=True)
            )
            x @ weight.T
            if count > 1:
                grad.T @ x
            if count > 2:
                grad @ weight
        return []

    @property
    def flops(self) -> int:
        return sum(2 * rows * inputs * outputs * count for rows, inputs, outputs, count in self.products)


PARTS = ("target", "attention", "gemms")  # whose times add up to the bar
WHOLE_CONTENDERS: dict[str, Callable[[Step], Contender]] = {
    "ours": Whole,
    "ours recompute": partial(Whole, recompute=True),
    "ours compiled": partial(Whole, target="compiled_target"),
    "ours captured": partial(Whole, target="captured_target"),
    "target": TargetAlone,
    "target compiled": partial(TargetAlone, target="compiled_target"),
    "target captured": partial(TargetAlone, target="captured_target"),
    "attention": AttentionAlone,
    "gemms": GemmsAlone,
    "optimizer": OptimizerAlone,
}

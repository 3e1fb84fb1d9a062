"""The acceptance length of a few prompts during training: what a server would make of the head as it is."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from operator import add
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.integrations import is_deepspeed_zero3_enabled

from ..models.eagle3 import Eagle3DraftModel
from ..models.eagle3.adapters_eagle3 import merged
from ..speculative import Acceptance, measure_acceptance
from ..target import FrozenTarget, deepspeed_init_suspended
from .adapters import is_adapted, with_adapter_of


class DecodedAcceptance:
    """Greedy decoding of always the same prompts, which ranks share; those that hold a target together decode as one.

    Args:
        prompts: token ids, not empty, as a server renders them.
        batch_size: prompts decoded together on a rank.
    """

    def __init__(
        self,
        prompts: Sequence[list[int]],
        *,
        num_draft_tokens: int,
        max_new_tokens: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
    ):
        self.prompts, self.batch_size = prompts, batch_size
        self.num_draft_tokens, self.max_new_tokens = num_draft_tokens, max_new_tokens
        self.rank, self.world_size = rank, world_size

    def measure(self, model: Any, target: FrozenTarget) -> Acceptance:
        """Counts of all ranks, on all of them; every rank must call this."""
        own = self.prompts[self.rank // target.tp_size :: self.world_size // target.tp_size]
        head = served_head(model, target)
        counts, _ = measure_acceptance(
            target.model,
            head,
            self._batches(own),
            num_draft_tokens=self.num_draft_tokens,
            max_new_tokens=self.max_new_tokens,
        )
        if self.world_size == 1:
            return counts
        return reduce(add, gather_object([counts])[:: target.tp_size])

    def _batches(self, prompts: Sequence[list[int]]) -> Iterator[dict[str, Tensor]]:
        for first in range(0, len(prompts), self.batch_size):
            rows = [torch.tensor(ids) for ids in prompts[first : first + self.batch_size]]
            masks = [torch.ones_like(ids) for ids in rows]
            columns = {"input_ids": rows, "attention_mask": masks}
            yield {
                name: pad_sequence(column, batch_first=True, padding_side="left") for name, column in columns.items()
            }


def served_head(model: Any, target: FrozenTarget) -> Eagle3DraftModel:
    """A copy in the target's dtype, as it would be served; ZeRO-3's parameters are gathered for it, on all ranks."""
    device = target.embedding_weight.device
    rng_devices = [device] if device.type == "cuda" else []
    # Its initialisation must not move the random numbers of training, or the run would differ from one without.
    with torch.random.fork_rng(rng_devices), deepspeed_init_suspended(), device:
        head: Any = Eagle3DraftModel(copy.deepcopy(model.config))
        if is_adapted(model):
            head = with_adapter_of(model, head)
        else:
            head.to(target.model.dtype)
    with _gathered(model):
        head.load_state_dict(model.state_dict())
    if is_adapted(model):
        head = merged(head).to(target.model.dtype)
    head.fit_to_target(target.model)
    return head.eval()


def _gathered(model: Any) -> AbstractContextManager:
    if not is_deepspeed_zero3_enabled():
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(model.parameters()))

"""Rounds whose shapes never change, captured as one CUDA graph: at small batches launching a round costs more than it.

Both caches have a fixed size, and a token's column is its position: a rejected one is overwritten by the next round,
and until then no query sees it, since it stands behind them all. Rows that are finished stay in the batch.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, get_layer_types_and_kwargs

from ..cuda_graphs import capture
from ..models.eagle3 import Eagle3DraftModel
from ..transformers_hooks import ATTENTION_NAME, BlockSparseMask
from .rounds import Drafter, Verifier, speculative_round
from .rows import Continuation, RightAlignedCache, Rows


logger = logging.getLogger(__name__)

ATTENTION_IMPLEMENTATIONS = {ATTENTION_NAME, "sdpa", "eager"}  # those that take a mask of any pattern
LAYER_TYPES = {"full_attention", "sliding_attention"}


def static_rounds_serve(target: PreTrainedModel, draft: Eagle3DraftModel) -> bool:
    """Whether both models are whole on one GPU, and the target takes masks that are made for it."""
    tensors = [*target.parameters(), *draft.parameters()]
    if any(hasattr(tensor, "ds_id") or type(tensor.data) is not Tensor for tensor in tensors):
        return False  # parts of weights, which are gathered in a forward pass
    config = target.config.get_text_config(decoder=True)
    return (
        {tensor.device.type for tensor in tensors} == {"cuda"}
        and len({tensor.device for tensor in tensors}) == 1
        and config is target.config
        and target._can_compile_fullgraph  # transformers' mark of models that read fixed caches by positions alone
        and config._attn_implementation in ATTENTION_IMPLEMENTATIONS
        and _layer_types(config) <= LAYER_TYPES
    )


def _layer_types(config: PreTrainedConfig) -> set[str]:
    return set(get_layer_types_and_kwargs(config)[0])


class SlotCache(Cache):
    """Keys and values [b, heads, capacity, d]; `columns` [b, S] are those of the tokens that come next."""

    columns: Tensor

    def __init__(self, filled: RightAlignedCache, rows: Rows, capacity: int, make_mask: Callable[[Tensor], Any]):
        super().__init__(layers=[_SlotLayer(self, layer, rows, capacity) for layer in filled.layers])
        self.make_mask = make_mask

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """What comes next overwrites it."""


class _SlotLayer(CacheLayerMixin):
    keys: Any
    values: Any

    def __init__(self, cache: SlotCache, filled: Any, rows: Rows, capacity: int):
        super().__init__()
        self.cache, self.capacity = cache, capacity
        if filled.keys is not None:  # a layer that shares another one's keys has none of its own
            self.keys, self.values = (_slots(states, rows, capacity) for states in (filled.keys, filled.values))
            self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        for slots, states in ((self.keys, key_states), (self.values, value_states)):
            slots.scatter_(2, self.cache.columns[:, None, :, None].expand_as(states), states)
        return self.keys, self.values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise RuntimeError("slots are filled when they are made")

    def get_seq_length(self) -> int:
        return self.capacity

    def get_max_length(self) -> int:
        return self.capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.capacity, 0


def _slots(states: Tensor, rows: Rows, capacity: int) -> Tensor:
    """[b, heads, width, d], right-aligned -> [b, heads, capacity, d], a row's first token at column 0."""
    columns = (rows.width - rows.lengths[:, None] + torch.arange(rows.width)).clamp(max=rows.width - 1)
    columns = columns.to(states.device)[:, None, :, None].expand_as(states)
    slots = states.new_zeros(*states.shape[:2], capacity, states.shape[3])
    slots[:, :, : rows.width] = states.gather(2, columns)
    return slots


@dataclass(frozen=True)
class SlotRows:
    """The rows of a batch, whose new columns stand behind their `lengths` [b]."""

    lengths: Tensor

    def inputs(self, cache: SlotCache, start: int, stop: int) -> dict[str, Any]:
        """What a model is given for new columns `start..stop-1`; tells `cache` where they go."""
        cache.columns = self.lengths[:, None] + torch.arange(start, stop, device=self.lengths.device)
        return {"position_ids": cache.columns, "attention_mask": cache.make_mask(cache.columns)}


def target_masks(target: PreTrainedModel, capacity: int, columns: Tensor) -> Any:
    """What transformers' models take as a prepared mask: one, or one for each kind of layer where they differ.

    A query at column c sees the columns up to c, and in a windowed layer no earlier one than c - window + 1.
    """
    config = target.config
    windows = {kind: config.sliding_window if kind == "sliding_attention" else None for kind in _layer_types(config)}
    make = _block_sparse_mask if config._attn_implementation == ATTENTION_NAME else _dense_mask
    masks = {kind: make(columns, capacity, window, target.dtype) for kind, window in windows.items()}
    return masks if len(masks) > 1 else next(iter(masks.values()))


def _block_sparse_mask(columns: Tensor, capacity: int, window: int | None, dtype: torch.dtype) -> BlockSparseMask:
    size = (len(columns), 1, columns.shape[1], capacity)
    return BlockSparseMask(None, columns, window, size, positions_read=True)


def _dense_mask(columns: Tensor, capacity: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """[b, 1, S, capacity], additive: `eager` takes no other."""
    keys, queries = torch.arange(capacity, device=columns.device), columns[:, None, :, None]
    hidden = keys > queries
    if window is not None:
        hidden |= queries - keys >= window
    return torch.zeros(hidden.shape, dtype=dtype, device=columns.device).masked_fill(hidden, torch.finfo(dtype).min)


class StaticRounds:
    """Takes over from rounds that grow their caches, to the end of all rows."""

    def __init__(self, verifier: Verifier, drafter: Drafter, rows: Rows, max_new_tokens: int):
        self.verifier, self.drafter, self.index = verifier, drafter, rows.index
        self.rows = SlotRows(rows.lengths.to(rows.device))
        self.active = torch.ones_like(self.rows.lengths)
        self.standing = drafter.last_tokens, drafter.states, drafter.logits
        self.grown: tuple | None = (verifier.cache, drafter.cache)
        capacity = int(rows.lengths.max()) + max_new_tokens + drafter.num_draft_tokens
        exists = torch.ones(len(rows.index), capacity, dtype=torch.long, device=rows.device)
        masks = partial(target_masks, verifier.target, capacity)
        verifier.cache = SlotCache(verifier.cache, rows, capacity, masks)
        drafter.cache = SlotCache(drafter.cache, rows, capacity, lambda columns: exists)

    def finish(self, continuation: Continuation) -> bool:
        """Decode until every row has met EOS or the limit.

        False, with everything as it was, where the target does not take such caches: it may read more of a mask than
        what it hides, or more of a cache than its keys.
        """
        with torch.cuda.device_of(self.active):  # graphs are captured on the current device
            try:
                outcome = self._round()
            except Exception as error:
                self._give_back(error)
                return False
            self.grown = None
            going = self._append(torch.arange(len(self.index)), outcome, continuation)
            run = self._captured() if len(going) and self.active.is_cuda else self._round
            while len(going):
                going = self._append(going, run(), continuation)
        return True

    def _give_back(self, error: Exception) -> None:
        self.verifier.cache, self.drafter.cache = self.grown  # type: ignore[misc]
        self.drafter.last_tokens, self.drafter.states, self.drafter.logits = self.standing
        name = self.verifier.target.config.model_type
        logger.warning("Decoding `%s` with growing caches, since fixed ones failed: %r", name, error)

    def _append(self, going: Tensor, outcome: Tensor, continuation: Continuation) -> Tensor:
        """Take what a round brought to batch rows `going`; returns those that go on."""
        outcome = outcome.cpu()[going]
        going = going[continuation.append_round(self.index[going], outcome[:, :-1], outcome[:, -1])]
        self.active.copy_(torch.isin(torch.arange(len(self.index)), going))
        self.rows.lengths.mul_(self.active)  # finished rows take part at columns that every model has
        return going

    def _round(self) -> Tensor:
        """[b, K + 2]: the tokens of a round, and how many of them are verified. Changes what is kept in place."""
        drafter = self.drafter
        drafter.last_tokens, drafter.states, drafter.logits = self.standing
        following, accepted, features = speculative_round(self.verifier, drafter, self.rows)
        drafter.read(features, following, self.rows)
        drafter.stand_at(torch.arange(len(following), device=following.device), accepted)
        for kept, new in zip(self.standing, (drafter.last_tokens, drafter.states, drafter.logits), strict=True):
            kept.copy_(new)
        self.rows.lengths.add_((accepted + 1) * self.active)
        return torch.cat([following, accepted[:, None] + 1], dim=1)

    def _captured(self) -> Callable[[], Tensor]:
        """A round as a graph, after one that compiled what there is to compile; else as it is, and a warning."""
        try:
            return capture(self._round, self.active.device)
        except RuntimeError as error:
            name, reason = self.verifier.target.config.model_type, str(error).partition("\n")[0]
            logger.warning("Decoding `%s` without a CUDA graph, since capturing it failed: %s", name, reason)
            return self._round

"""Where the rows of a batch stand: their columns in the KV caches, and the tokens that they have produced.

`Rows` keep a row's tokens contiguous and right-aligned in both caches: rejected columns are dropped row by row, so the
rows of a batch accept at different speeds while the distance between columns stays the distance between positions,
which is what sliding-window masks count. Bookkeeping lives on the CPU: a round brings its outcome there once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer


class RightAlignedCache(DynamicCache):
    """Plain keys and values in every layer, windowed ones too: what a window forgets, a rejection would need again."""

    columns: Tensor | None = None  # of new tokens: behind those that it holds

    def realign(self, going: Tensor, ends: Tensor, width: int) -> None:
        """Keep batch rows `going` [b], and of each the `width` columns before column `ends` [b]."""
        columns = (ends[:, None] - width + torch.arange(width)).clamp(min=0)  # [b, width]; clamped ones are padding
        level = bool((ends == ends[0]).all())

        def kept(states: Tensor) -> Tensor:  # [B, heads, S, d] -> [b, heads, width, d]
            if level and len(going) == len(states):
                return states[:, :, ends[0] - width : ends[0]]
            at = going[:, None].to(states.device), columns.to(states.device)
            return states.transpose(1, 2)[at].transpose(1, 2)

        for layer in self.layers:
            # A layer that shares another one's keys has none of its own.
            if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
                layer.keys, layer.values = kept(layer.keys), kept(layer.values)


@dataclass(frozen=True)
class Rows:
    """The unfinished rows: row r occupies the last `lengths[r]` of `width` columns in both caches."""

    index: Tensor  # [b] int64 rows of the prompts
    lengths: Tensor  # [b] int64; before the prompt is cached, minus its padding
    width: int
    device: torch.device  # of the tensors that the models are given

    @classmethod
    def of_prompts(cls, input_ids: Tensor, attention_mask: Tensor | None) -> "Rows":
        visible = (torch.ones_like(input_ids) if attention_mask is None else attention_mask).bool().cpu()
        shape = list(input_ids.shape)
        if list(visible.shape) != shape or not visible[:, -1].all() or (visible[:, :-1] > visible[:, 1:]).any():
            raise ValueError(
                f"`attention_mask` {list(visible.shape)} must have the shape of `input_ids` {shape} and hide leading "
                "columns only: pad the prompts on the left."
            )
        return cls(torch.arange(len(visible)), -(~visible).sum(dim=1), 0, input_ids.device)

    def advance(self, going: Tensor, kept: Tensor, caches: Sequence[RightAlignedCache]) -> "Rows":
        """Rows `going` keep their first `kept[r]` new columns; other new columns and rows leave the caches."""
        lengths = (self.lengths + kept)[going]
        width = int(lengths.max())
        for cache in caches:
            cache.realign(going, self.width + kept[going], width)
        return Rows(self.index[going], lengths, width, self.device)

    def inputs(self, cache: RightAlignedCache, start: int, stop: int) -> dict[str, Tensor]:
        """What a model is given for new columns `start..stop-1`, the last ones of `cache` when it has read them.

        `position_ids` [b, stop - start], and `attention_mask` [b, width + stop] int64, 0 on the padding at the left.
        """
        positions = (self.lengths[:, None] + torch.arange(start, stop)).clamp(min=0)
        mask = (torch.arange(self.width + stop) >= self.width - self.lengths[:, None]).long()
        return {"position_ids": positions.to(self.device), "attention_mask": mask.to(self.device)}


class Continuation:
    """The new tokens of every prompt, and the counts of drafted and accepted ones."""

    def __init__(self, batch: int, num_draft_tokens: int, max_new_tokens: int, eos_ids: Tensor, pad_id: int):
        self.num_draft_tokens, self.max_new_tokens = num_draft_tokens, max_new_tokens
        self.eos_ids, self.pad_id = eos_ids, pad_id
        # A round is written whole and cut by the padding after it, hence the slack.
        self.tokens = torch.full((batch, max_new_tokens + num_draft_tokens), pad_id)
        self.lengths = torch.zeros(batch, dtype=torch.long)
        self.drafted = torch.zeros(batch, dtype=torch.long)
        self.accepted_per_position = torch.zeros(num_draft_tokens, dtype=torch.long)

    def append(self, index: Tensor, tokens: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Add the first `kept[r]` of `tokens` [b, S] to prompts `index`, up to EOS or the limit.

        Returns the numbers of tokens added [b] and which of the b rows go on, ascending.
        """
        tokens = tokens.cpu()
        before_eos = tokens_before_eos(tokens, self.eos_ids)
        room = self.max_new_tokens - self.lengths[index]
        added = torch.minimum(torch.minimum(kept, before_eos + 1), room)
        columns = torch.arange(tokens.shape[1])
        written = torch.where(columns < added[:, None], tokens, self.pad_id)
        self.tokens[index[:, None], self.lengths[index][:, None] + columns] = written
        self.lengths[index] += added
        return added, ((added <= before_eos) & (added < room)).nonzero().flatten()

    def append_round(self, index: Tensor, tokens: Tensor, kept: Tensor) -> Tensor:
        """`append` the outcome of a verification and count it; returns the rows that go on."""
        added, going = self.append(index, tokens, kept)
        self.drafted[index] += self.num_draft_tokens
        self.accepted_per_position += (torch.arange(self.num_draft_tokens) < added[:, None] - 1).sum(dim=0)
        return going

    def sequences(self, input_ids: Tensor) -> Tensor:
        """[B, T + N] prompts and continuations, cut to the longest one."""
        return torch.cat([input_ids, self.tokens[:, : int(self.lengths.max())].to(input_ids.device)], dim=1)


def tokens_before_eos(tokens: Tensor, eos_ids: Tensor) -> Tensor:
    """[b], how many of each row of `tokens` [b, S] come before its first EOS: S without one."""
    return (torch.isin(tokens, eos_ids).cumsum(dim=1) == 0).sum(dim=1)


def stop_and_pad_ids(
    eos_token_id: int | Sequence[int] | None, generation_config: GenerationConfig
) -> tuple[Tensor, int]:
    """EOS ids [E] (the argument, else the config's) and the padding id (the config's, else the first EOS id)."""
    chosen = generation_config.eos_token_id if eos_token_id is None else eos_token_id
    eos_ids = torch.as_tensor([] if chosen is None else chosen, dtype=torch.long).reshape(-1)
    if generation_config.pad_token_id is not None:
        return eos_ids, generation_config.pad_token_id
    return eos_ids, int(eos_ids[0]) if len(eos_ids) else 0

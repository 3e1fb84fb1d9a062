"""The layers of a draft head: norm, rotary embedding, attention, decoder layer, output head.

Shapes: B batch, S rows, Q querying rows, H draft width, Hq / Hkv query / key heads, d head width.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Cache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    eager_attention_forward,
)

from ...ops import KeptResult, made_again, rms_norm, rotated, select_rows, share_keys, swiglu


# Rotated keys and values of one step, each [B, Hkv, S, d]; of step 0 `SharedKeys`, where our attention reads them.
StepKeys = tuple[torch.Tensor, ...]


class Eagle3RMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor | None = None):
        """The normed states; with a `residual`, the sum of both, and this normed."""
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, residual)


class Eagle3MLP(LlamaMLP):
    def __init__(self, config: Any):
        super().__init__(config)
        self.gradient_checkpointing = False  # transformers sets it

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.config.hidden_act != "silu":
            return super().forward(hidden_states)
        gate, up = self.gate_proj(hidden_states), self.up_proj(hidden_states)
        product = swiglu(gate, up)
        with made_again(
            product,
            lambda: swiglu(gate, up),
            parameters=self.down_proj.parameters(),
            enabled=not self.gradient_checkpointing,
        ):
            return self.down_proj(product)


class Eagle3RotaryEmbedding(LlamaRotaryEmbedding):
    """The target's rotary frequencies, always fp32 and never recomputed from a batch.

    `dynamic` and `longrope` depend on the sequence length in transformers, which would make packed documents differ
    from separate ones; they are frozen at what servers use for `max_position_embeddings`.
    """

    # Without the wrapper that recomputes the frequencies from the positions of the batch.
    forward = inspect.unwrap(LlamaRotaryEmbedding.forward)

    def __init__(self, config: Any):
        super().__init__(config)
        self.reset_frequencies()

    def reset_frequencies(self) -> None:
        inv_freq, self.attention_scaling = served_rope_frequencies(self.config)
        self.inv_freq.data = inv_freq.to(self.inv_freq.device)
        self.original_inv_freq.data = self.inv_freq.data.clone()

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        if self.inv_freq.device.type != "meta":
            self.reset_frequencies()  # `.to(bfloat16)` would round them
        return self


def served_rope_frequencies(config: Any) -> tuple[torch.Tensor, float]:
    """Inverse frequencies fp32 `[d / 2]` and the attention scaling that vLLM and SGLang use for this config."""
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    served_length = None
    if rope["rope_type"] == "longrope":
        served_length = config.max_position_embeddings
    elif rope["rope_type"] == "dynamic":  # servers build their table for the extended length
        served_length = int(config.max_position_embeddings * rope["factor"])
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, seq_len=served_length)


class Eagle3InputLinear(nn.Linear):
    """A projection of `[embedding ; recurrent state]`, of both at once or of one after the other."""

    def forward(self, inputs: torch.Tensor, embedded: torch.Tensor | None = None) -> torch.Tensor:
        """Of both, `[..., 2H]`; of embeddings `[..., H]` alone; or of states `[..., H]`, added in place to theirs."""
        if inputs.shape[-1] == self.in_features:
            return super().forward(inputs)
        of_embeddings, of_states = self.weight.chunk(2, dim=1)
        if embedded is None:
            return F.linear(inputs, of_embeddings, self.bias)
        rows = inputs.flatten(0, -2).to(embedded.dtype)  # autocast knows nothing of products in place
        total = embedded.flatten(0, -2).addmm_(rows, of_states.to(embedded.dtype).t())
        return total.view(*inputs.shape[:-1], self.out_features)


class Eagle3Attention(nn.Module):
    """Attention over `[embedding ; recurrent state]`: causal on step-0 keys, one key per row of every later step."""

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = True
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = Eagle3InputLinear(2 * width, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = Eagle3InputLinear(2 * width, config.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = Eagle3InputLinear(2 * width, config.num_key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, width, bias=bias)

    def embedded(self, embeddings: torch.Tensor, query_rows: torch.Tensor | None) -> list[torch.Tensor]:
        """What normed embeddings `[..., S, H]` add to queries `[..., Q, Hq * d]`, keys and values `[..., S, Hkv * d]`.

        A projection that is not ours, such as one with an adapter, needs both inputs at once: for it, themselves.
        """
        of_queries = embeddings if query_rows is None else select_rows(embeddings, query_rows, dim=-2)
        return [
            projection(states) if isinstance(projection, Eagle3InputLinear) else states
            for projection, states in (
                (self.q_proj, of_queries),
                (self.k_proj, embeddings),
                (self.v_proj, embeddings),
            )
        ]

    def forward(
        self,
        embedded: list[torch.Tensor],  # of query, key and value; overwritten
        hidden_states: torch.Tensor,  # [B, S, H]
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        query_rows: torch.Tensor | None,
        earlier_keys: list[StepKeys],
        cache: Cache | None,
        visibility: dict[str, Any],
        kept_result: KeptResult | None,
    ) -> tuple[torch.Tensor, StepKeys]:
        """Attended rows `[B, Q, Hq * d]`, before the output projection, and this step's keys and values."""
        query_states = hidden_states if query_rows is None else select_rows(hidden_states, query_rows, dim=1)
        query, key, value = (
            _projected(*part).unflatten(-1, (-1, self.head_dim))  # [B, S, heads, d]
            for part in zip(
                (self.q_proj, self.k_proj, self.v_proj),
                (query_states, hidden_states, hidden_states),
                embedded,
                strict=True,
            )
        )
        cos, sin = position_embeddings
        key = rotated(key, cos, sin)
        if query_rows is not None:
            cos, sin = cos[:, query_rows], sin[:, query_rows]
        query = rotated(query, cos, sin)
        query, key, value = (states.transpose(1, 2) for states in (query, key, value))
        own_keys: StepKeys = (key, value)
        if cache is not None:
            own_keys = cache.update(key, value, 0)
        elif not earlier_keys and self.config._attn_implementation == "block_sparse_flash":
            own_keys = share_keys(key, value)  # every later step adds to their gradients
        attended = self._attend(query, [*earlier_keys, own_keys], visibility, kept_result)  # [B, Q, Hq, d]
        return attended.flatten(2), own_keys

    def _attend(self, query, step_keys, visibility, kept_result) -> torch.Tensor:
        (key, value, *key_sums), *diagonals = step_keys
        attend = partial(
            ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward),
            self,
            query,
            scaling=self.scaling,
            dropout=0.0,
        )
        if self.config._attn_implementation == "block_sparse_flash":
            keys, values = [k for k, _ in diagonals], [v for _, v in diagonals]
            shared = {"key_gradients": tuple(key_sums) or None, "kept_result": kept_result}
            return attend(key, value, None, diagonal_keys=keys, diagonal_values=values, **shared, **visibility)[0]
        if query.shape[2] == 0:  # transformers' sdpa cannot reshape an empty step
            return query.transpose(1, 2)
        mask = banded_mask(num_diagonals=len(diagonals), dtype=query.dtype, **visibility)
        key, value = (torch.cat(states, dim=2) for states in zip(*step_keys, strict=True))
        return attend(key, value, mask)[0]


def _projected(projection: nn.Module, states: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
    if isinstance(projection, Eagle3InputLinear):
        return projection(states, embedded)
    return projection(torch.cat([embedded.view_as(states), states], dim=-1))


class Eagle3DecoderLayer(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = Eagle3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = Eagle3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Eagle3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Eagle3Attention(config)
        self.mlp = Eagle3MLP(config)
        self.gradient_checkpointing = False  # transformers sets it

    def forward(
        self,
        embed: Callable[[], torch.Tensor],
        hidden_states: torch.Tensor,
        *args: Any,
        norm: Eagle3RMSNorm,
        **kwargs: Any,
    ):
        """Output `[B, S, H]`, that normed, and `StepKeys` of all rows; arguments as of the three parts below."""
        attended, *own_keys = self.attend(self.embedded(embed), hidden_states, *args, **kwargs)
        return *self.finish(hidden_states, attended, norm), *own_keys

    def embedded(
        self,
        embed: Callable[[], torch.Tensor],  # makes [..., S, H], now and again in backward: cheaper than keeping them
        query_rows: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """What the embeddings add to queries, keys and values."""
        embeddings = embed()
        with made_again(embeddings, embed, enabled=not self.gradient_checkpointing):
            normed = self.input_layernorm(embeddings)
        return self.self_attn.embedded(normed, query_rows)

    def attend(
        self,
        embedded: list[torch.Tensor],  # as `embedded` returns it; overwritten
        hidden_states: torch.Tensor,  # [B, S, H]
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        query_rows: torch.Tensor | None = None,
        earlier_keys: list[StepKeys] = (),  # type: ignore[assignment]
        cache: Cache | None = None,
        visibility: dict[str, Any] | None = None,
        kept_result: KeptResult | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """The layer up to attention: attended rows `[B, Q, Hq * d]`, and the `StepKeys` of all rows."""
        attended, own_keys = self.self_attn(
            embedded, self.hidden_norm(hidden_states), position_embeddings, query_rows, list(earlier_keys), cache,
            visibility or {}, kept_result,
        )  # fmt: skip
        return attended, *own_keys

    def finish(
        self,
        hidden_states: torch.Tensor,  # the querying rows of `attend`'s input
        attended: torch.Tensor,
        norm: Eagle3RMSNorm,  # the model's last
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rest, row by row: the layer's output `[B, Q, H]`, and that normed."""
        residual = self.hidden_norm(hidden_states) if self.norm_before_residual else hidden_states
        hidden_states, normed = self.post_attention_layernorm(self.self_attn.o_proj(attended), residual)
        return norm(self.mlp(normed), hidden_states)


class Eagle3Head(nn.Linear):
    def forward(self, hidden_states, loss=None):
        # Under ZeRO-3 a weight is whole only inside its own module's forward, so the streamed loss runs in here.
        return super().forward(hidden_states) if loss is None else loss(hidden_states, self.weight)


def banded_mask(
    document_ids: torch.Tensor,
    query_positions: torch.Tensor,
    sliding_window: int | None,
    num_diagonals: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The dense additive mask `[B, 1, Q, T + J * Q]` of the banded diagonal, for `eager` and `sdpa`."""
    rows = query_positions[:, :, None]  # [B, Q, 1]
    columns = torch.arange(document_ids.shape[1], device=document_ids.device)  # [T]
    query_documents = document_ids.gather(1, query_positions.clamp(min=0))[:, :, None]
    visible = (columns <= rows) & (document_ids[:, None] == query_documents) & (query_documents >= 0)  # [B, Q, T]
    if sliding_window is not None:
        visible &= rows - columns < sliding_window
    diagonal = torch.eye(rows.shape[1], dtype=torch.bool, device=visible.device).expand(len(visible), -1, -1)
    visible = torch.cat([visible, *[diagonal] * num_diagonals], dim=-1)
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)[:, None]

"""The one module that hooks transformers.

`attn_implementation="block_sparse_flash"` is a public name, but transformers sends every name containing "flash" to
the flash-attention import and refuses it. `register_attention` registers the attention and the mask function, then
lets the name through the two checks of `PreTrainedModel`. Any other name keeps transformers' own code.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AutoConfig, AutoModel, LlamaConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, find_packed_sequence_indices, sdpa_mask

from draftsmith.ops import block_sparse_flash_attention


ATTENTION_NAME = "block_sparse_flash"
# Arguments with which some families change what attention computes, and config fields that announce them.
_REFUSED_ARGUMENTS = ("softcap", "position_bias", "indices", "block_indices", "sinks")
_REFUSED_CONFIG_FIELDS = {
    "attn_logit_softcapping": "`softcap`",  # Gemma 2
    "attention_chunk_size": "a chunked attention mask",  # Llama 4
    "index_topk": "`indices`",  # DeepSeek V3.2
    "keep_window_size": "a mask of its values",  # Doge, which would take ours for one that it has added its own to
}
# Primitive mask predicates of transformers whose conjunction the op computes; each is read from its closure.
_SUPPORTED_PREDICATES = {"causal_mask_function", "sliding_window_overlay", "packed_sequence_mask_function"}


class UnsupportedAttentionError(ValueError):
    """The model needs an attention that `block_sparse_flash` does not compute."""

    def __init__(self, model: str, reason: str):
        super().__init__(
            f'`attn_implementation="{ATTENTION_NAME}"` cannot be used with {model}: it needs {reason}. '
            'Load the model with `attn_implementation="sdpa"` or "eager".'
        )


@dataclass(eq=False)
class BlockSparseMask(BlockMask):
    """What a causal mask says beyond causality, in O(T) memory. Layers hand it on, unread, as `attention_mask`.

    A `BlockMask` only by name: transformers passes that type through wherever a model receives a prepared mask.
    """

    document_ids: torch.Tensor | None  # [B, T], -1 = padding; None = one document
    query_positions: torch.Tensor | None  # [Q], row of each query on the T axis; None when Q == T
    sliding_window: int | None
    size: tuple[int, int, int, int]  # B, 1, Q, T
    padding: torch.Tensor | None = None  # [B, T] bool; None where there is none
    positions_read: bool = False  # whether packed `position_ids` have been looked for

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.size

    def to(self, *args: Any, **kwargs: Any) -> "BlockSparseMask":
        """Follow the layers of a target that is spread over devices."""
        tensors = {"document_ids": self.document_ids, "query_positions": self.query_positions, "padding": self.padding}
        moved: dict[str, Any] = {name: t.to(*args, **kwargs) for name, t in tensors.items() if t is not None}
        return replace(self, **moved)


def _predicates(mask_function: Callable) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, closure variables) of the predicates whose conjunction transformers' `mask_function` is."""
    name = mask_function.__qualname__.split(".")[0]
    variables = dict(inspect.getclosurevars(mask_function).nonlocals)
    if name == "and_masks":
        for part in variables["mask_functions"]:
            yield from _predicates(part)
    elif name == "remap_positions_for_packed_sequence":
        # Positions rise by one inside a document, so distances, all that the other predicates read, stay the same.
        yield from _predicates(variables["mask_function"])
    else:
        yield name, variables


def block_sparse_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any,  # int, or a tensor where the cache is static
    kv_offset: int,
    mask_function: Callable,
    attention_mask: torch.Tensor | None,
    *,
    config: Any,
    device: torch.device,
    **kwargs: Any,
) -> BlockSparseMask | torch.Tensor | None:
    """Mask function of `block_sparse_flash`, called by transformers once per forward and kind of layer.

    Returns a `BlockSparseMask`, or transformers' own dense boolean mask [B, 1, Q, T] where attention is bidirectional
    or a decoding step meets padding between tokens. Raises `UnsupportedAttentionError` for any other pattern.
    """
    sizes = (batch_size, q_length, kv_length, q_offset, kv_offset)
    never_skipped = {**kwargs, "device": device, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    dense_mask = functools.partial(sdpa_mask, *sizes, mask_function, attention_mask, **never_skipped)
    predicates = dict(_predicates(mask_function))
    if "bidirectional_mask_function" in predicates:
        return dense_mask()
    if unsupported := predicates.keys() - _SUPPORTED_PREDICATES:
        raise UnsupportedAttentionError(f"`{config.model_type}`", f"the mask function {sorted(unsupported)}")

    document_ids = predicates.get("packed_sequence_mask_function", {}).get("packed_sequence_mask")
    padding = None
    if attention_mask is not None:
        visible = F.pad(attention_mask, (0, max(0, kv_offset + kv_length - attention_mask.shape[1])))
        visible = visible[:, kv_offset : kv_offset + kv_length]  # [B, T]
        run_starts = visible & ~F.pad(visible, (1, 0))[:, :-1]
        if bool((run_starts.sum(-1) > 1).any()):  # a row holds several runs of tokens
            if q_length == kv_length:
                raise UnsupportedAttentionError(f"`{config.model_type}`", "padding between tokens (`attention_mask`)")
            return dense_mask()
        if not bool(visible.all()):  # hiding nothing says nothing
            document_ids, padding = visible.long() - 1, ~visible
    aligned = q_length == kv_length and isinstance(q_offset, int) and q_offset == kv_offset
    return BlockSparseMask(
        document_ids=document_ids,
        query_positions=None if aligned else torch.arange(q_length, device=device) + q_offset - kv_offset,
        sliding_window=predicates.get("sliding_window_overlay", {}).get("sliding_window"),
        size=(batch_size, 1, q_length, kv_length),
        padding=padding,
    )


def block_sparse_flash_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: BlockSparseMask | torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    document_ids: torch.Tensor | None = None,
    query_positions: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    diagonal_keys: tuple[torch.Tensor, ...] = (),
    diagonal_values: tuple[torch.Tensor, ...] = (),
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function of `block_sparse_flash`, with the signature of every transformers attention function.

    `query` [B, Hq, Q, D], `key` [B, Hkv, T, D], `value` [B, Hkv, T, Dv] -> [B, Q, Hq, Dv] and no weights. Attention is
    causal without a mask; a `BlockSparseMask` overrides `sliding_window`. Packed documents: `document_ids` [B, T]
    (-1 = padding), `cu_seq_lens_q` [documents + 1] at batch size one, or `position_ids` [B, T] that restart. Modules
    that are not causal, and 4-D masks, go to transformers' `sdpa`. The draft model adds `query_positions` and the
    diagonals of `block_sparse_flash_attention`. Raises `UnsupportedAttentionError` for dropout and for any other
    argument that would change the result.
    """
    _refuse(module, {name: kwargs.get(name) for name in _REFUSED_ARGUMENTS} | {"dropout": dropout or None})
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    mask = attention_mask
    if not isinstance(mask, BlockSparseMask):
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        if mask is not None or not causal:
            offsets = None if mask is None else cu_seq_lens_q
            _refuse(
                module, {"s_aux": s_aux, "document_ids": document_ids, "cu_seq_lens_q": offsets}, " with a dense mask"
            )
            return _sdpa(module, query, key, value, mask=mask, scaling=scaling, offsets=cu_seq_lens_q)
        size = (query.shape[0], 1, query.shape[2], key.shape[2])
        mask = BlockSparseMask(None, None, sliding_window, size, positions_read=True)

    if cu_seq_lens_q is not None:
        document_ids = _documents_between(cu_seq_lens_q, cu_seq_lens_k, key)
    if query_positions is None and mask.query_positions is not None:
        query_positions = mask.query_positions.expand(query.shape[0], -1)
    value_dim = value.shape[-1]
    width = max(query.shape[-1], value_dim)  # the op takes one width; zeros change neither scores nor the columns kept
    output = block_sparse_flash_attention(
        _widened(query, width),
        _widened(key, width),
        _widened(value, width),
        diagonal_keys,
        diagonal_values,
        document_ids=_documents(mask, document_ids, kwargs.get("position_ids")),
        query_positions=query_positions,
        sliding_window=mask.sliding_window,
        sinks=s_aux,
        scale=scaling,
        **{name: kwargs.get(name) for name in ("key_gradients", "kept_result")},
    )
    return output[..., :value_dim].transpose(1, 2).contiguous(), None


def _refuse(module: nn.Module, arguments: dict[str, Any], where: str = "") -> None:
    for name, value in arguments.items():
        if value is not None:
            raise UnsupportedAttentionError(type(module).__name__, f"`{name}`{where}")


def _widened(states: torch.Tensor, width: int) -> torch.Tensor:
    missing = width - states.shape[-1]
    return F.pad(states, (0, missing)) if missing else states


def _documents(
    mask: BlockSparseMask, document_ids: torch.Tensor | None, position_ids: torch.Tensor | None
) -> torch.Tensor | None:
    """[B, T] documents of the caller, with the padding of the 2-D mask; without any those of the mask or positions."""
    if document_ids is not None:
        # Itself where it will do, since what is kept with a tensor serves all layers.
        return document_ids if mask.padding is None else document_ids.masked_fill(mask.padding, -1)
    if mask.document_ids is None and mask.query_positions is None and not mask.positions_read:
        # Some families (gpt-oss) build their masks without `position_ids` and hand these to the layers alone.
        mask.positions_read = True
        if position_ids is not None and position_ids.dim() == 2:
            mask.document_ids = find_packed_sequence_indices(position_ids.expand(mask.shape[0], -1))
    return mask.document_ids


def _documents_between(offsets: torch.Tensor, key_offsets: torch.Tensor | None, key: torch.Tensor) -> torch.Tensor:
    """[documents + 1] offsets as `flash_attn_varlen` takes them -> [1, T] document ids."""
    if key.shape[0] != 1:
        raise ValueError(f"`cu_seq_lens_q` needs batch size 1, got {key.shape[0]}: pass `document_ids` [B, T].")
    if key_offsets is not None and key_offsets is not offsets and not torch.equal(key_offsets, offsets):
        raise ValueError("`cu_seq_lens_q` and `cu_seq_lens_k` differ: packing with cached keys is not supported.")
    rows = torch.arange(key.shape[2], device=offsets.device)
    return torch.searchsorted(offsets[1:].contiguous(), rows, right=True)[None]


def _sdpa(
    module: nn.Module, *states: torch.Tensor, mask: torch.Tensor | None, scaling: float, offsets: torch.Tensor | None
) -> tuple[torch.Tensor, None]:
    """Dense or bidirectional attention by transformers; `offsets` [sequences + 1] keep packed images apart."""
    attend: Any = functools.partial(sdpa_attention_forward, module, scaling=scaling, is_causal=False)
    if offsets is None or mask is not None:
        return attend(*states, mask)
    lengths = offsets.diff().tolist()
    sequences = zip(*(tensor.split(lengths, dim=2) for tensor in states), strict=True)
    return torch.cat([attend(*sequence, None)[0] for sequence in sequences], dim=1), None


def register_attention() -> None:
    """Make `block_sparse_flash` a valid `attn_implementation` of every model that looks its attention up."""
    AttentionInterface.register(ATTENTION_NAME, block_sparse_flash_attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, block_sparse_mask)
    check = PreTrainedModel._check_and_adjust_attn_implementation
    resolve = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(check)
    def check_implementation(self: PreTrainedModel, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        if attn_implementation == ATTENTION_NAME:
            return self.get_correct_attn_implementation(attn_implementation)
        return check(self, attn_implementation, *args, **kwargs)

    @functools.wraps(resolve)
    def resolve_implementation(self: PreTrainedModel, requested: str | None, *args: Any, **kwargs: Any) -> str:
        if requested != ATTENTION_NAME:
            return resolve(self, requested, *args, **kwargs)
        if "text" not in self.input_modalities:
            return resolve(self, None, *args, **kwargs)  # vision and audio towers of a multimodal target
        if not self._can_set_attn_implementation():
            raise UnsupportedAttentionError(type(self).__name__, "attention that it does not look up by name")
        text_config = vars(self.config.get_text_config())
        for field, argument in _REFUSED_CONFIG_FIELDS.items():
            if text_config.get(field) is not None:
                raise UnsupportedAttentionError(type(self).__name__, f"{argument} (`{field}={text_config[field]}`)")
        return ATTENTION_NAME

    PreTrainedModel._check_and_adjust_attn_implementation = check_implementation  # type: ignore[method-assign, assignment]
    PreTrainedModel.get_correct_attn_implementation = resolve_implementation  # type: ignore[method-assign, assignment]


def register_models() -> None:
    """Let `AutoConfig` and `AutoModel` return ours for a saved head, whose config is a Llama one for the servers."""
    from draftsmith.models.eagle3 import SERVED_ARCHITECTURE, Eagle3DraftConfig, Eagle3DraftModel

    AutoConfig.register(Eagle3DraftConfig.model_type, Eagle3DraftConfig)
    AutoModel.register(Eagle3DraftConfig, Eagle3DraftModel)
    load = AutoConfig.from_pretrained

    @functools.wraps(load)
    def from_pretrained(pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        loaded = load(pretrained_model_name_or_path, **kwargs)
        config = loaded[0] if isinstance(loaded, tuple) else loaded
        if type(config) is LlamaConfig and SERVED_ARCHITECTURE in (config.architectures or ()):
            of_stock_configs = ("trust_remote_code", "code_revision")
            kwargs = {name: value for name, value in kwargs.items() if name not in of_stock_configs}
            return Eagle3DraftConfig.from_pretrained(pretrained_model_name_or_path, **kwargs)
        return loaded

    AutoConfig.from_pretrained = from_pretrained  # type: ignore[method-assign]

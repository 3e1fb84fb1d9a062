"""Shape and dtype checks of `block_sparse_flash_attention`; none of them reads a device value."""

from collections.abc import Sequence

from torch import Tensor


def check_tensors(
    query: Tensor, key: Tensor, value: Tensor, diagonal_keys: Sequence[Tensor], diagonal_values: Sequence[Tensor]
) -> None:
    if query.dim() != 4 or key.dim() != 4:
        raise ValueError(
            f"`query` and `key` must be [batch, heads, length, head_dim]; got {[*query.shape]}, {[*key.shape]}"
        )
    batch, heads, queries, head_dim = query.shape
    kv_heads = key.shape[1]
    if key.shape[0] != batch or key.shape[3] != head_dim:
        raise ValueError(f"`key` {[*key.shape]} must share batch and head_dim with `query` {[*query.shape]}")
    if 0 in (heads, head_dim, key.shape[2]):
        raise ValueError(
            f"attention needs heads, head dims and keys; `query` is {[*query.shape]}, `key` {[*key.shape]}"
        )
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"`query` has {heads} heads, which is not a multiple of `key`'s {kv_heads}")
    _check_like("value", value, [*key.shape], query)
    if len(diagonal_keys) != len(diagonal_values):
        raise ValueError(
            f"`diagonal_keys` and `diagonal_values` must pair up; got {len(diagonal_keys)} and {len(diagonal_values)}"
        )
    _check_like("key", key, [*key.shape], query)
    for name, tensors in (("diagonal_keys", diagonal_keys), ("diagonal_values", diagonal_values)):
        for index, tensor in enumerate(tensors):
            _check_like(f"{name}[{index}]", tensor, [batch, kv_heads, queries, head_dim], query)


def _check_like(name: str, tensor: Tensor, shape: list[int], query: Tensor) -> None:
    if [*tensor.shape] != shape:
        raise ValueError(f"`{name}` must be {shape}; got {[*tensor.shape]}")
    if tensor.dtype != query.dtype or tensor.device != query.device:
        raise ValueError(
            f"`{name}` is {tensor.dtype} on {tensor.device}, but `query` is {query.dtype} on {query.device}: cast one"
        )


def check_key_gradients(key_gradients: tuple[Tensor, Tensor] | None, key: Tensor) -> None:
    if key_gradients is None:
        return
    if not isinstance(key_gradients, tuple) or [stand_in.shape for stand_in in key_gradients] != [key.shape] * 2:
        raise ValueError("`key_gradients` must be `(shared.key_sum, shared.value_sum)` of `shared = share_keys(..)`")


def check_masks(
    query: Tensor, key: Tensor, document_ids: Tensor | None, query_positions: Tensor | None, sinks: Tensor | None
) -> None:
    batch, heads, queries, _ = query.shape
    length = key.shape[2]
    if query_positions is None and queries != length:
        raise ValueError(
            f"`query_positions` (the key row of each query) is needed: `query` has {queries} rows and `key` {length}"
        )
    for name, ids, shape in (
        ("document_ids", document_ids, [batch, length]),
        ("query_positions", query_positions, [batch, queries]),
    ):
        if ids is None:
            continue
        if [*ids.shape] != shape or ids.is_floating_point():
            raise ValueError(f"`{name}` must be integers {shape}; got {ids.dtype} {[*ids.shape]}")
        if ids.device != query.device:
            raise ValueError(f"`{name}` is on {ids.device}, but `query` is on {query.device}")
    if sinks is None:
        return
    if [*sinks.shape] != [heads] or not sinks.is_floating_point():
        raise ValueError(f"`sinks` must hold one logit per query head, [{heads}]; got {sinks.dtype} {[*sinks.shape]}")
    if sinks.device != query.device:
        raise ValueError(f"`sinks` is on {sinks.device}, but `query` is on {query.device}")

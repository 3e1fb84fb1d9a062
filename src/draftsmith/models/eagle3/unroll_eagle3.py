"""The training-time-test unroll: K steps of one decoder layer over the rows that are supervised.

Shapes: T tokens of all documents in one row, N of them, H draft width, R_k the supervised rows of step k, Hkv key
heads, d head width.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...ops import KeptResult, select_rows
from .layers_eagle3 import StepKeys


SomeRows = tuple[Tensor, Tensor]  # a tensor, and the rows of it that are wanted
EarlierKeys = tuple[StepKeys, Tensor | None]  # of a step, and which of its rows are wanted: None for all

RECOMPUTED_ROWS = 8192  # of the MLP at a time: its activations are five times as wide as the layer's


def unroll(
    model: Any,  # an Eagle3DraftModel
    tokens: Tensor,  # [N]
    aux_hidden_states: Tensor,  # [N, n * Ht]
    documents: Tensor,  # [1, N], distinct ids, -1 = padding
    positions: Tensor,  # [N]
    row_sets: list[Tensor],  # K x [|R_k|]
) -> list[Tensor]:
    """Normed outputs `[|R_k|, H]` of the K steps.

    At step 0 every row gives a key and a value, but only R_0 queries. Later a row sees nothing but its document's
    step-0 keys and its own later keys, so step k computes R_k alone. Row t of step k reads the embedding that row
    t + k reads at step 0, so each embedding is projected once for all steps.
    """
    config = model.config
    window = config.sliding_window
    hidden_states = model.fuse(aux_hidden_states)[None]  # [1, N, H]
    computed_rows = torch.arange(len(tokens), device=tokens.device)
    next_tokens = tokens[(computed_rows + 1).clamp(max=len(tokens) - 1)]
    embedded = _runner(model)(model.midlayer.embedded, partial(model.embed, next_tokens), row_sets[0])
    step_keys: list[StepKeys] = []
    normed_outputs: list[Tensor] = []
    for step, rows in enumerate(row_sets):
        if step > 0:
            hidden_states = select_rows(hidden_states, torch.searchsorted(row_sets[step - 1], rows), dim=1)
            computed_rows = rows
        read_rows = (computed_rows + step).clamp(max=len(tokens) - 1)
        queried = torch.searchsorted(row_sets[0], rows + step).clamp(max=len(row_sets[0]) - 1)
        hidden_states, normed, *own_keys = _layer(
            model,
            list(zip(embedded, (queried, read_rows, read_rows), strict=True)),
            hidden_states,
            positions[None, computed_rows] + step,
            rows if step == 0 else None,
            _visible_keys(step_keys, row_sets, step, window),
            {
                "document_ids": documents,
                "query_positions": rows[None],
                "sliding_window": None if window is None else window - step,  # it counts from the query's own position
            },
        )
        step_keys.append(tuple(own_keys))
        normed_outputs.append(normed[0])
        if config.norm_output:
            hidden_states = normed
    return normed_outputs


def _visible_keys(
    step_keys: list[StepKeys], row_sets: list[Tensor], step: int, window: int | None
) -> list[EarlierKeys]:
    """Step-0 keys, then those of later steps with this step's rows among theirs; what no window reaches is dropped."""
    visible: list[EarlierKeys] = [(keys, None) for keys in step_keys[:1]]
    for earlier in range(1, step):
        if window is None or step - earlier < window:
            visible.append((step_keys[earlier], torch.searchsorted(row_sets[earlier], row_sets[step])))
    return visible


def _layer(
    model: Any, embedded: list[SomeRows], hidden_states: Tensor, positions: Tensor, query_rows: Tensor | None,
    *args: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The decoder layer's output, that normed, and the `StepKeys`; arguments as of `_attend`.

    With gradient checkpointing a step keeps its input, its keys, its normed output and attention's result, so that
    attention is not computed again.
    """
    recomputed, run = _is_recomputed(model), _runner(model)
    kept_result = KeptResult() if recomputed else None
    attended, *own_keys = run(_attend, model, embedded, hidden_states, positions, query_rows, *args, kept_result)
    if query_rows is not None:
        hidden_states = select_rows(hidden_states, query_rows, dim=1)
    if not recomputed:
        return *model.midlayer.finish(hidden_states, attended, model.norm), *own_keys
    parts = zip(hidden_states.split(RECOMPUTED_ROWS, dim=1), attended.split(RECOMPUTED_ROWS, dim=1), strict=True)
    outputs = zip(*(run(model.midlayer.finish, *part, model.norm) for part in parts), strict=True)
    return *(torch.cat(pieces, dim=1) for pieces in outputs), *own_keys


def _is_recomputed(model: Any) -> bool:
    return model.gradient_checkpointing and model.training


def _runner(model: Any) -> Callable:
    """What calls a function, and in a backward pass once more where that spares memory."""
    return model._gradient_checkpointing_func if _is_recomputed(model) else _call


def _call(function: Callable, *args: Any) -> Any:
    return function(*args)


def _attend(
    model: Any,
    embedded: list[SomeRows],  # of query, key and value
    hidden_states: Tensor,  # [1, S, H]
    positions: Tensor,  # [1, S]
    query_rows: Tensor | None,
    earlier_keys: list[EarlierKeys],
    visibility: dict[str, Any],
    kept_result: KeptResult | None,
) -> tuple[Tensor, ...]:
    return model.midlayer.attend(
        [select_rows(part, rows, dim=0) for part, rows in embedded],
        hidden_states,
        model.rotary_emb(hidden_states, positions),
        query_rows,
        [_selected(*keys) for keys in earlier_keys],
        None,
        visibility,
        kept_result,
    )


def _selected(step_keys: StepKeys, rows: Tensor | None) -> StepKeys:
    """Some rows of each `[1, Hkv, S, d]`, heads side by side in memory as projections leave them."""
    if rows is None:
        return step_keys
    return tuple(select_rows(states.transpose(1, 2), rows, dim=1).transpose(1, 2) for states in step_keys)

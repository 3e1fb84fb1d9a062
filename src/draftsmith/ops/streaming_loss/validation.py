"""Argument checks of the streaming losses; on CUDA none of them reads a device value on the host."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .rows import OBJECTIVES


def check_chunk_size(chunk_size: int | None) -> None:
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"`chunk_size` must be at least 1, or None to choose it; got {chunk_size}")


def check_labels(labels: Tensor, vocab_size: int) -> None:
    """ValueError on CPU, a device-side assertion on CUDA, for a label outside [0, vocab_size)."""
    inside = ((labels >= 0) & (labels < vocab_size)).all()
    if labels.is_cuda:
        torch._assert_async(inside, "a label is outside the vocabulary")
    elif not inside:
        raise ValueError(f"`labels` must be in [0, {vocab_size}); got {int(labels.min())}..{int(labels.max())}")


def check_cross_entropy_inputs(
    hidden_states: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, token_weights: Tensor | None,
    *, reduction: str, chunk_size: int | None,
) -> None:  # fmt: skip
    _check_head("weight", weight, "hidden_states", hidden_states)
    shape = hidden_states.shape[:-1]
    for name, tensor in (("labels", labels), ("token_weights", token_weights)):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"`{name}` must be {[*shape]}, like `hidden_states`; got {[*tensor.shape]}")
    if token_weights is not None and token_weights.requires_grad:
        raise ValueError("`token_weights` gets no gradient: detach it")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"`bias` must be [{len(weight)}]; got {[*bias.shape]}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"`reduction` must be 'mean', 'sum' or 'none'; got {reduction!r}")
    check_chunk_size(chunk_size)


def check_draft_inputs(
    states: Sequence[Tensor], weight: Tensor, teacher_states: Tensor | None, teacher_weight: Tensor | None,
    row_sets: Sequence[Tensor], *, labels: Tensor | None, step_weights: Tensor | Sequence[float] | None,
    row_weights: Tensor | None, objective: str, chunk_size: int | None,
) -> None:  # fmt: skip
    if not row_sets or len(states) != len(row_sets):
        raise ValueError(f"`states` and `row_sets` need one tensor per step; got {len(states)} and {len(row_sets)}")
    for step, (state, rows) in enumerate(zip(states, row_sets, strict=True)):
        _check_head("weight", weight, f"states[{step}]", state)
        if state.dim() != 2 or len(state) != len(rows) or state.dtype != states[0].dtype:
            raise ValueError(
                f"`states[{step}]` must be {states[0].dtype} [{len(rows)}, H], a row per entry of `row_sets[{step}]`; "
                f"got {state.dtype} {[*state.shape]}"
            )
    if objective not in OBJECTIVES:
        raise ValueError(f"`objective` must be one of {', '.join(OBJECTIVES)}; got {objective!r}")
    if step_weights is not None and len(step_weights) != len(states):
        raise ValueError(f"`step_weights` must hold {len(states)} factors, one per step; got {len(step_weights)}")
    check_chunk_size(chunk_size)
    needed = {"labels": labels} if objective == "ce" else {"teacher_states": teacher_states}
    for name, tensor in {**needed, "row_weights": row_weights}.items():
        if tensor is not None and len(tensor) != len(row_sets[0]):
            raise ValueError(
                f"`{name}` must have a row per entry of `row_sets[0]`, {len(row_sets[0])}; got {len(tensor)}"
            )


def require(tensor: Tensor | None, name: str, objective: str) -> Tensor:
    if tensor is None:
        raise ValueError(f"`{name}` is needed by `objective={objective!r}`")
    return tensor


def _check_head(name: str, weight: Tensor, states_name: str, states: Tensor) -> None:
    if weight.dim() != 2 or weight.shape[1] != states.shape[-1]:
        raise ValueError(
            f"`{name}` must be [V, {states.shape[-1]}], like `{states_name}` {[*states.shape]}; got {[*weight.shape]}"
        )

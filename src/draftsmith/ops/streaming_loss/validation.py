"""Argument checks of the streaming losses; on CUDA none of them reads a device value on the host."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .rows import OBJECTIVES


def check_chunk_size(chunk_size: int | None) -> None:
    if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
        raise ValueError(f"`chunk_size` must be an integer of at least 1, or None to choose it; got {chunk_size!r}")


def _check_softcap(name: str, softcap: float | None) -> None:
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"`{name}` must be positive and finite, or None for no cap; got {softcap}")


def _check_shape(name: str, tensor: Tensor | None, shape: tuple[int, ...], like: str) -> None:
    if tensor is not None and tuple(tensor.shape) != shape:
        raise ValueError(f"`{name}` must be {[*shape]}, {like}; got {[*tensor.shape]}")


def _check_integers(name: str, tensor: Tensor | None) -> None:
    if tensor is not None and tensor.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"`{name}` must be int64 or int32; got {tensor.dtype}")


def _check_num_items(num_items: int | Tensor | None) -> None:
    if isinstance(num_items, Tensor) and num_items.numel() != 1:
        raise ValueError(f"`num_items` must be one number; got {[*num_items.shape]}")


def check_labels(labels: Tensor, vocab_size: int) -> None:
    """ValueError on CPU, a device-side assertion on CUDA, for a label outside [0, vocab_size)."""
    inside = ((labels >= 0) & (labels < vocab_size)).all()
    if labels.is_cuda:
        torch._assert_async(inside, "a label is outside the vocabulary")
    elif not inside:
        raise ValueError(f"`labels` must be in [0, {vocab_size}); got {int(labels.min())}..{int(labels.max())}")


def check_cross_entropy_inputs(
    hidden_states: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, token_weights: Tensor | None,
    *, softcap: float | None, num_items: int | Tensor | None, reduction: str, chunk_size: int | None,
) -> None:  # fmt: skip
    _check_head("weight", weight, "hidden_states", hidden_states)
    for name, tensor in (("labels", labels), ("token_weights", token_weights)):
        _check_shape(name, tensor, tuple(hidden_states.shape[:-1]), "like `hidden_states`")
    _check_integers("labels", labels)
    _check_softcap("logit_softcap", softcap)
    _check_num_items(num_items)
    if token_weights is not None and token_weights.requires_grad:
        raise ValueError("`token_weights` gets no gradient: detach it")
    _check_shape("bias", bias, (len(weight),), "a value per row of `weight`")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"`reduction` must be 'mean', 'sum' or 'none'; got {reduction!r}")
    check_chunk_size(chunk_size)


def check_draft_inputs(
    states: Sequence[Tensor], weight: Tensor, teacher_states: Tensor | None, teacher_weight: Tensor | None,
    row_sets: Sequence[Tensor], *, labels: Tensor | None, t2d: Tensor | None,
    step_weights: Tensor | Sequence[float] | None, row_weights: Tensor | None, num_items: int | Tensor | None,
    teacher_bias: Tensor | None, teacher_softcap: float | None, objective: str, chunk_size: int | None,
) -> None:  # fmt: skip
    if not row_sets or len(states) != len(row_sets):
        raise ValueError(f"`states` and `row_sets` need one tensor per step; got {len(states)} and {len(row_sets)}")
    for step, (state, rows) in enumerate(zip(states, row_sets, strict=True)):
        _check_head("weight", weight, f"states[{step}]", state)
        _check_integers(f"row_sets[{step}]", rows)
        if state.dim() != 2 or len(state) != len(rows) or state.dtype != states[0].dtype:
            raise ValueError(
                f"`states[{step}]` must be {states[0].dtype} [{len(rows)}, H], a row per entry of `row_sets[{step}]`; "
                f"got {state.dtype} {[*state.shape]}"
            )
    if objective not in OBJECTIVES:
        raise ValueError(f"`objective` must be one of {', '.join(OBJECTIVES)}; got {objective!r}")
    if step_weights is not None and (given := torch.as_tensor(step_weights).shape) != (len(states),):
        raise ValueError(f"`step_weights` must hold {len(states)} factors, one per step; got {[*given]}")
    check_chunk_size(chunk_size)
    _check_softcap("teacher_softcap", teacher_softcap)
    _check_num_items(num_items)
    if t2d is not None and t2d.dtype != torch.bool:
        raise ValueError(f"`t2d` must be bool, true for the ids of the draft vocabulary; got {t2d.dtype}")
    _check_integers("labels", labels)
    if teacher_states is not None and teacher_weight is not None and objective != "ce":
        _check_head("teacher_weight", teacher_weight, "teacher_states", teacher_states)
        _check_shape("teacher_bias", teacher_bias, (len(teacher_weight),), "a value per row of `teacher_weight`")
    needed = {"labels": labels} if objective == "ce" else {"teacher_states": teacher_states}
    for name, tensor in {**needed, "row_weights": row_weights}.items():
        if tensor is not None and (len(tensor) != len(row_sets[0]) or tensor.dim() > 1 + (name == "teacher_states")):
            raise ValueError(
                f"`{name}` must have a row per entry of `row_sets[0]`, {len(row_sets[0])}; got {[*tensor.shape]}"
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

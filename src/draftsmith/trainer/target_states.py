"""Where the states come from that a batch is trained on: the batch itself, an earlier epoch, or the target."""

from typing import Any

from torch import Tensor

from ..cached_target import CachedTarget
from ..data import STATE_COLUMNS
from ..data.hidden_states import HiddenStateRows
from ..ops.transfer import to_device
from ..target import FrozenTarget
from .arguments import Eagle3TrainingArguments


OF_THE_FORWARD = ("compile_target", "capture_target", "keep_target_states")  # options, all False if left out


class TargetStateSource:
    """Of each batch the auxiliary states `[B, T, n * Ht]`, and the teacher's `[|R_0|, Ht]`."""

    def __init__(self, target: FrozenTarget | CachedTarget):
        self.target: Any = target
        self._kept: dict[tuple[bytes, ...], tuple[Tensor, Tensor]] = {}

    def __call__(self, batch: dict[str, Any], *, keep: bool) -> tuple[Tensor, Tensor]:
        """`keep`: remember the states of this batch in host memory, for when it comes again."""
        if "aux_hidden_states" in batch:
            aux, teacher = (to_device(batch[name].tensor, batch["input_ids"].device) for name in STATE_COLUMNS)
            return aux, teacher
        if not isinstance(self.target, FrozenTarget):
            raise ValueError(
                "The target is that of a cache, but these rows bring no states: pass the cache's own rows."
            )
        if not keep:
            return _computed(self.target, batch)
        given = [batch[name] for name in ("input_ids", "position_ids", "document_ids")] + [batch["row_sets"][0]]
        key = tuple(tensor.cpu().numpy().tobytes() for tensor in given)
        if key in self._kept:
            self.target.take_part()
        else:
            aux, teacher = _computed(self.target, batch)
            self._kept[key] = aux.cpu(), teacher.cpu()
        aux, teacher = self._kept[key]
        return aux.to(given[0].device), teacher.to(given[0].device)


def refuse_without_layers(args: Eagle3TrainingArguments, target: Any) -> None:
    """Options that run the target, where it has no layers to run."""
    needing = ("eval_prompts", *OF_THE_FORWARD)
    if isinstance(target, CachedTarget) and (given := [f"`{name}`" for name in needing if getattr(args, name)]):
        raise ValueError(f"{', '.join(given)}: the target of a cache has no layers: pass the whole target.")


def refuse_states_of_other_layers(rows: Any, aux_layer_ids: list[int]) -> None:
    """Rows of a cache whose states are not those that a head fuses."""
    if (cached := getattr(rows, "aux_layer_ids", aux_layer_ids)) != aux_layer_ids:
        raise ValueError(
            f"The head fuses the states of layers {aux_layer_ids}, but the rows of the cache have those of {cached}: "
            f"write one with `--aux_layer_ids {' '.join(map(str, aux_layer_ids))}`."
        )


def verification_of(rows: Any) -> str:
    """What to say of states that are not finite: a cache's are not compared with their checksums in training."""
    if not isinstance(rows, HiddenStateRows):
        return ""
    return f" The cache may be damaged: `draftsmith cache --verify true --output_dir {rows.directory}` tells."


def _computed(target: FrozenTarget, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    states = target(**{name: batch[name] for name in ("input_ids", "position_ids", "document_ids")})
    teacher_rows = to_device(batch["row_sets"][0], states.last_hidden_state.device) + 1
    return states.aux_hidden_states, states.last_hidden_state.flatten(0, 1)[teacher_rows]

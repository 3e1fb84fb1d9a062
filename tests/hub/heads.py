"""Small heads to push, and what to compare."""

import hashlib
from pathlib import Path

import torch

from draftsmith import Eagle3DraftModel

from ..tiny_models import tiny_model


DRAFT_IDS = torch.arange(5, 85, 2)  # target ids of the draft vocabulary


def make_head(seed: int = 0) -> Eagle3DraftModel:
    """A random head with a reduced vocabulary for `make_target()`."""
    target, d2t = make_target(), DRAFT_IDS - torch.arange(len(DRAFT_IDS))
    torch.manual_seed(seed)
    return Eagle3DraftModel.from_target(target, d2t=d2t, aux_layer_ids=[1, 2, 3])


def make_target():
    return tiny_model("llama")


def equal(head: Eagle3DraftModel, other: Eagle3DraftModel) -> bool:
    """Whether all weights and the vocabulary map are bit-equal, dtypes included."""
    state, other_state = head.state_dict(), other.state_dict()
    return state.keys() == other_state.keys() and all(
        state[name].dtype == other_state[name].dtype and torch.equal(state[name], other_state[name]) for name in state
    )


def digests(directory: Path) -> dict[str, str]:
    """What every file below holds."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

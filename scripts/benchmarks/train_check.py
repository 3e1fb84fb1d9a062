"""What a draft step must compute before it is timed: fp64 mathematics, within twice the error of a dense step."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from draftsmith.ops.streaming_loss.reference import reference_draft_loss

from .common import ALLOWED, Refused, allowed_error
from .loss_check import SAME_GRADIENT
from .train_cases import Case, Inputs, make_inputs
from .train_contenders import Contender, Dense


SAME_LOSS = 0.005  # relative: of hundreds of rounded logits' losses the mean is far nearer


class Reference:
    """The truth about a small version of `case`, and the error that everything dense makes in the same dtype."""

    def __init__(self, case: Case, device: torch.device, dtype: torch.dtype):
        self.inputs = inputs = make_inputs(case.small() if not case.sizes else case, device, dtype)
        self.truth = Dense(inputs, torch.float64, reference_draft_loss).results()
        plain = Dense(inputs).results()
        self.allowed = {name: allowed_error(plain[name], truth, dtype) for name, truth in self.truth.items()}

    def check(self, build: Callable[[Inputs], Contender]) -> float:
        """The largest error over the gradients, in errors of the dense step. Raises `Refused` if it is over 2."""
        results = build(self.inputs).results()
        if results.keys() != self.truth.keys():
            raise Refused(f"wrong: gradients of {sorted(results.keys() ^ self.truth.keys())} are missing or too many")
        loss_error = _relative(results.pop("loss"), self.truth["loss"])
        if not loss_error <= SAME_LOSS:
            raise Refused(f"wrong: the loss is off by {loss_error:.2%}")
        errors = {
            name: ALLOWED * ((result.double() - self.truth[name]).norm() / self.allowed[name]).item()
            for name, result in results.items()
        }
        worst = max(errors, key=lambda name: float("inf") if errors[name] != errors[name] else errors[name])
        if not errors[worst] <= ALLOWED:
            raise Refused(f"wrong: `{worst}` has {errors[worst]:.2f} times the error of the dense step")
        return errors[worst]


class PeerReference(Reference):
    """Of one document, all supervised: there, SpecForge's pairs are ours."""

    def __init__(self, case: Case, device: torch.device, dtype: torch.dtype):
        super().__init__(replace(case, share=100, documents=1), device, dtype)

    def check(self, build: Callable[[Inputs], Contender]) -> float:
        """The smallest cosine of a gradient with the truth. A peer's precision is its own choice."""
        results = build(self.inputs).results()
        del results["loss"]  # a cross-entropy, over the KL by the teacher's entropy
        cosines = {name: _cosine(result, self.truth[name]) for name, result in results.items()}
        lengths = {name: (result.norm() / self.truth[name].norm()).item() for name, result in results.items()}
        worst = min(cosines, key=lambda name: float("-inf") if cosines[name] != cosines[name] else cosines[name])
        alike = all(abs(length - 1) <= 1 - SAME_GRADIENT for length in lengths.values())
        if not (alike and cosines[worst] >= SAME_GRADIENT):
            raise Refused(f"another step: `{worst}` has a cosine of {cosines[worst]:.4f}, lengths {lengths}")
        return cosines[worst]


def _relative(result: Tensor, truth: Tensor) -> float:
    return ((result.double() - truth).abs() / truth.abs()).item()


def _cosine(one: Tensor, other: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(one.double().flatten(), other.flatten(), dim=0).item()

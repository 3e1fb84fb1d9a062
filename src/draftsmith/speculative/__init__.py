"""Lossless speculative decoding with a trained EAGLE-3 head, for evaluation and demonstration."""

from .evaluation import Acceptance, measure_acceptance, measure_plain
from .generation import acceptance_length, speculative_generate


__all__ = ["Acceptance", "acceptance_length", "measure_acceptance", "measure_plain", "speculative_generate"]

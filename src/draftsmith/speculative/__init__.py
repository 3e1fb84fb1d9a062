"""Lossless speculative decoding with a trained EAGLE-3 head, for evaluation and demonstration."""

from .generation import acceptance_length, speculative_generate


__all__ = ["acceptance_length", "speculative_generate"]

"""Model cards: what a run records, how that becomes a card, and what the Hub takes as one."""

from .metadata import LICENSES, License, check_card
from .rendering import Serving, render_adapter_card, render_card
from .run_record import RUN_FILE, RunRecord, Source, device_counts, library_versions, training_recipe


__all__ = [
    "LICENSES",
    "RUN_FILE",
    "License",
    "RunRecord",
    "Serving",
    "Source",
    "check_card",
    "device_counts",
    "library_versions",
    "render_adapter_card",
    "render_card",
    "training_recipe",
]

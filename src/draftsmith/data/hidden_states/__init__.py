"""Hidden states of a target on disk: written once, read in training instead of running it."""

from .manifest import Manifest
from .reader import DamagedShard, HiddenStateCache, HiddenStateRows
from .writer import CacheWriter, NeededRows, plan_split, refuse_another_run, stored_size


__all__ = [
    "CacheWriter",
    "DamagedShard",
    "HiddenStateCache",
    "HiddenStateRows",
    "Manifest",
    "NeededRows",
    "plan_split",
    "refuse_another_run",
    "stored_size",
]

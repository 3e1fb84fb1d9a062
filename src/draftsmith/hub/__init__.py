"""The Hugging Face Hub: what a repository of a head holds, its card, and how it gets there."""

from .card import keeps_edited_card, make_card, read_config
from .failures import HubError
from .files import CARD, LEFT_BY_TRAINING, SETTINGS, STATE
from .upload import check_push, full_name, hub_id, is_same_repository, open_repository, push


__all__ = [
    "CARD", "LEFT_BY_TRAINING", "SETTINGS", "STATE", "HubError", "check_push", "full_name", "hub_id",
    "is_same_repository", "keeps_edited_card", "make_card", "open_repository", "push", "read_config",
]  # fmt: skip

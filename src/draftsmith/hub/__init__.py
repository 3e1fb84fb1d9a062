"""The Hugging Face Hub: what a repository of a head holds, its card, and how it gets there."""

from .account import full_name
from .card import make_card
from .upload import CARD, LEFT_BY_TRAINING, HubError, check_push, hub_id, push


__all__ = ["CARD", "LEFT_BY_TRAINING", "HubError", "check_push", "full_name", "hub_id", "make_card", "push"]

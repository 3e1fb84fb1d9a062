"""Answers that a target writes to the prompts of a dataset, as a dataset to train on."""

from .conversations import Answered, answer_all
from .journal import DECIDED_LAST, Journal, refuse_other_settings
from .local import local_engine
from .output import DATA_FILE, JOURNAL_FILE, PROVENANCE_FILE, Counts, write_dataset
from .reasoning import AnswerReader
from .requests import Engine, Sampling
from .server import ServerEngine


__all__ = [
    "DATA_FILE",
    "DECIDED_LAST",
    "JOURNAL_FILE",
    "PROVENANCE_FILE",
    "AnswerReader",
    "Answered",
    "Counts",
    "Engine",
    "Journal",
    "Sampling",
    "ServerEngine",
    "answer_all",
    "local_engine",
    "refuse_other_settings",
    "write_dataset",
]

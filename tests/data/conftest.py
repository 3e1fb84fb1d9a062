import json

import pytest

from draftsmith.data import DataArguments, prepare_datasets
from tests.data.common import CHATML, build_tokenizer


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer(CHATML)


@pytest.fixture
def write_jsonl(tmp_path):
    """Write rows (objects, or raw lines) to a JSON Lines file and return its name."""

    def write(rows, name="train.jsonl"):
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path = tmp_path / name
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def prepare(tmp_path):
    """`prepare_datasets` with a cache of its own."""

    def run(dataset, tokenizer, **options):
        names = dataset if isinstance(dataset, list) else [dataset]
        arguments = DataArguments(dataset=names, cache_dir=str(tmp_path / "cache"), **options)
        return prepare_datasets(arguments, tokenizer)

    return run

import json

import pytest

from draftsmith.commands import generate
from tests.commands.conftest import target_dir
from tests.generation.chat_server import chat_server


__all__ = ["target_dir"]  # a fixture


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def server():
    with chat_server() as found:
        yield found


@pytest.fixture(autouse=True)
def short_delays(monkeypatch):
    monkeypatch.setattr("draftsmith.generation.server.FIRST_DELAY", 0.01)


@pytest.fixture
def write_prompts(tmp_path):
    def write(rows, name="prompts.jsonl"):
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(tmp_path / name)

    return write


@pytest.fixture
def run(tmp_path, target_dir, write_prompts):
    """`draftsmith generate` on rows, or on a file, into `tmp_path/out`."""

    def run(rows, *flags):
        dataset = rows if isinstance(rows, str) else write_prompts(rows)
        output = str(tmp_path / "out")
        return generate.main(["--target", str(target_dir), "--dataset", dataset, "--output_dir", output, *flags])

    return run

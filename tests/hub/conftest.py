"""The test Hub, and every client of this process talking to it."""

from pathlib import Path

import datasets
import huggingface_hub
import pytest
from huggingface_hub import constants, hf_api
from huggingface_hub.utils import _http

from .heads import make_head
from .hub_server import OWNER_TOKEN, HubServer


class InstantClock:
    """For the client's waits between attempts; `waits` is what it would have slept."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)


@pytest.fixture
def clock(monkeypatch):
    clock = InstantClock()
    monkeypatch.setattr(_http, "time", clock)
    return clock


@pytest.fixture
def hub(monkeypatch, tmp_path_factory, clock):
    """A running Hub with an account `user`, which is logged in."""
    with HubServer() as server:
        point_clients_at(server.endpoint, tmp_path_factory.mktemp("hf_home"), monkeypatch)
        monkeypatch.setenv("HF_TOKEN", OWNER_TOKEN)
        yield server
        huggingface_hub.close_session()  # its connections lead to a server that is gone


@pytest.fixture
def head():
    return make_head()


def point_clients_at(endpoint: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment for child processes; and, as libraries read it at import, what they have made of it since."""
    for name, value in {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(name, raising=False)
    made = {
        "ENDPOINT": endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_STORED_TOKENS_PATH": str(home / "stored_tokens"),
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_OFFLINE": False,
    }
    for name, value in made.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(hf_api.api, "endpoint", endpoint)  # whose methods are huggingface_hub's functions
    monkeypatch.setattr("transformers.utils.hub._hf_api", None)  # made anew at the next call
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", endpoint)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", home / "datasets")

import logging
from types import SimpleNamespace

import pytest
import torch

from draftsmith.ops.block_sparse_attention import cudnn, engines
from draftsmith.ops.block_sparse_attention.layout import Layout


LAYOUT = Layout(None, None, 1, 4096)
ON_CUDA = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, shape=torch.Size([1, 8, 4096, 128]))
ON_CPU = torch.zeros(1, 8, 4, 16)


@pytest.fixture
def refusing(monkeypatch):
    """Sets which engines refuse; the others serve everything."""

    def refuse(**reasons):
        monkeypatch.setattr(engines, "refusal", lambda name, *call: reasons.get(name))

    engines._log_choice.cache_clear()
    monkeypatch.setattr(cudnn, "_calls", cudnn.Counter())
    return refuse


@pytest.mark.parametrize(
    ("reasons", "chosen"),
    [
        ({}, "fa4"),
        ({"fa4": "not installed", "cudnn": "documents"}, "triton"),
        ({"fa4": "not installed", "cudnn": "documents", "triton": "float64"}, "reference"),
    ],
)
def test_the_first_that_does_not_refuse_serves(reasons, chosen, refusing):
    refusing(**reasons)
    assert engines.choose(None, ON_CUDA, LAYOUT, None) == chosen


@pytest.mark.parametrize(("queries", "chosen"), [(4096, "fa4"), (3500, "fa4"), (3000, "triton")])
def test_few_queries_are_left_to_triton(queries, chosen, refusing):
    refusing(cudnn="not installed")
    query = SimpleNamespace(**vars(ON_CUDA) | {"shape": torch.Size([1, 8, queries, 128])})
    assert engines.choose(None, query, LAYOUT, None) == chosen


def test_cudnn_serves_shapes_that_keep_coming(refusing):
    refusing(fa4="not installed")
    names = [engines.choose(None, ON_CUDA, LAYOUT, None) for _ in range(cudnn.CALLS_BEFORE_PLAN + 2)]
    assert names == ["triton"] * cudnn.CALLS_BEFORE_PLAN + ["cudnn"] * 2


def test_deterministic_algorithms_choose_triton(refusing):
    refusing()
    torch.use_deterministic_algorithms(True)
    try:
        assert engines.choose(None, ON_CUDA, LAYOUT, None) == "triton"
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_choice_is_logged_once_with_the_reasons(refusing, caplog):
    refusing(fa4="not installed", cudnn="it takes no `document_ids`")
    with caplog.at_level(logging.INFO, engines.logger.name):
        for _ in range(3):
            engines.choose(None, ON_CUDA, LAYOUT, None)
    (message,) = caplog.messages
    assert "`triton`" in message and "`fa4` not: not installed" in message and "`document_ids`" in message


def test_a_forced_engine_says_why_it_cannot_serve(refusing):
    refusing(fa4="`query` is float32")
    with pytest.raises(ValueError, match="'fa4' cannot serve this call: `query` is float32"):
        engines.choose("fa4", ON_CUDA, LAYOUT, None)
    assert engines.choose("triton", ON_CUDA, LAYOUT, None) == "triton"


def test_without_triton_no_engine_that_needs_it_is_loaded(monkeypatch):
    monkeypatch.setattr(engines, "_is_installed", lambda name: False)
    for name in ("triton", "fa4", "cudnn"):
        assert engines.refusal(name, ON_CPU, LAYOUT, None) == "triton is not installed"
    assert engines.choose(None, ON_CPU, LAYOUT, None) == "sdpa"

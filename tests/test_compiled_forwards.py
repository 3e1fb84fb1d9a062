"""The target's compiled layers: same states, and nothing compiled anew for another length."""

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from draftsmith.target import FrozenTarget
from draftsmith.transformers_hooks import ATTENTION_NAME
from tests.tiny_models import random_tokens, tiny_model


@pytest.fixture
def quick_compiler(monkeypatch):
    """Traces and guards as always, but generates no code."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    yield
    torch._dynamo.reset()


def random_batch(length, documents):
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(documents, (1, length), generator=generator).sort().values
    return random_tokens(1, length), ids


@pytest.mark.parametrize("attention", [ATTENTION_NAME, "sdpa"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_oss", "gemma3"])
def test_states_are_the_same_and_lengths_compile_nothing_new(family, attention, quick_compiler):
    if (family, attention) == ("gpt_oss", "sdpa"):
        pytest.skip("transformers has no sdpa with sinks")
    target = FrozenTarget(tiny_model(family, attn_implementation=attention), (1, 2, 3))
    batches = [random_batch(length, documents) for length, documents in ((24, 1), (33, 3), (17, 2), (64, 5), (9, 4))]
    expected = [target(ids, document_ids=documents) for ids, documents in batches]
    target.compile_layers()
    graphs = []
    for (ids, documents), plain in zip(batches, expected, strict=True):
        states = target(ids, document_ids=documents)
        torch.testing.assert_close(states.aux_hidden_states, plain.aux_hidden_states, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(states.last_hidden_state, plain.last_hidden_state, rtol=1e-5, atol=1e-5)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert graphs[1] == graphs[-1]  # the first batch may be of one document


def test_layers_are_themselves_again_outside(quick_compiler):
    target = FrozenTarget(tiny_model("llama", attn_implementation=ATTENTION_NAME), (1, 2, 3))
    target.layers[0].forward = original = target.layers[0].forward  # as accelerate leaves it
    target.compile_layers()
    target(random_tokens(1, 8))
    assert vars(target.layers[0])["forward"] is original
    assert all("forward" not in vars(layer) for layer in target.layers[1:])

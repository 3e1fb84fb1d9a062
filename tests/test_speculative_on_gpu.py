"""Rounds that a GPU runs as a graph: the same tokens and counts, launched once a round.

python -m pytest -m gpu tests/test_speculative_on_gpu.py
"""

import logging

import pytest
import torch

from draftsmith.speculative import acceptance_length, generation, speculative_generate

from .test_speculative import FAMILIES, generate_alone, guide, make_draft, make_prompts, make_target


pytestmark = pytest.mark.gpu
CAPTURED = [family for family in FAMILIES if family != "gpt_oss"]  # transformers' experts ask the host where to go


def case(family, lengths=(5, 11, 8), new_tokens=64, implementation="sdpa", dtype=torch.float32, **options):
    target = make_target(family).to("cuda", dtype)
    target.set_attn_implementation(implementation)
    prompts, mask = (tensor.cuda() for tensor in make_prompts(lengths))
    draft = make_draft(target, **options).cuda()
    return target, draft, prompts, mask, generate_alone(target, prompts, mask, new_tokens)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "block_sparse_flash"])
@pytest.mark.parametrize("family", CAPTURED)
def test_greedy_output_is_the_targets_own(monkeypatch, replays, family, implementation):
    target, draft, prompts, mask, expected = case(family, implementation=implementation, draft_vocab_size=60)
    guide(monkeypatch, draft, prompts, mask, expected)
    options = {"attention_mask": mask, "num_draft_tokens": 4, "max_new_tokens": 64}
    sequences, drafted, accepted = speculative_generate(target, draft, prompts, **options)
    assert sequences[:, 11:].tolist() == torch.stack(expected).tolist()
    assert len(replays) >= int(drafted.max()) // 4 - 1 > 5 and len(set(replays)) == 1

    monkeypatch.setattr(generation, "static_rounds_serve", lambda target, draft: False)
    growing = speculative_generate(target, draft, prompts, **options)
    assert drafted.tolist() == growing[1].tolist() and accepted.tolist() == growing[2].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_draft_tokens", [1, 7])
def test_one_prompt_with_an_unguided_head(replays, num_draft_tokens, dtype):
    target, draft, prompts, _, expected = case("qwen3", (9,), 40, dtype=dtype)
    sequences, _, _ = speculative_generate(
        target, draft, prompts, num_draft_tokens=num_draft_tokens, max_new_tokens=40
    )
    assert replays
    if dtype == torch.float32:  # in bf16 a forward of K + 1 rows may break ties in another way
        assert sequences[0, 9:].tolist() == expected[0].tolist()


def test_what_a_graph_cannot_hold_is_decoded_without_one(monkeypatch, replays, caplog):
    target, draft, prompts, mask, expected = case("gpt_oss", implementation="eager", new_tokens=24)
    guide(monkeypatch, draft, prompts, mask, expected)
    with caplog.at_level(logging.WARNING):
        sequences, _, _ = speculative_generate(target, draft, prompts, attention_mask=mask, max_new_tokens=24)
    assert sequences[:, 11:].tolist() == torch.stack(expected).tolist()
    assert bool(replays) != ("without a CUDA graph" in caplog.text)


def test_sampled_rounds_differ_and_follow_the_seed():
    target, draft, prompts, mask, _ = case("llama", new_tokens=1)
    options = {"attention_mask": mask, "max_new_tokens": 60, "temperature": 1.0}

    def sample(seed):
        torch.manual_seed(seed)
        return speculative_generate(target, draft, prompts, **options)[0].tolist()

    assert sample(1) == sample(1) != sample(2)


def test_eos_ends_rows_while_others_go_on(monkeypatch):
    target, draft, prompts, mask, expected = case("llama")
    guide(monkeypatch, draft, prompts, mask, expected)
    eos = int(expected[0][20])
    sequences, drafted, accepted = speculative_generate(
        target, draft, prompts, attention_mask=mask, max_new_tokens=64, eos_token_id=eos
    )
    lengths = [row.tolist().index(eos) + 1 if eos in row else 64 for row in expected]
    for row, continuation, length in zip(sequences[:, 11:], expected, lengths, strict=True):
        assert row[:length].tolist() == continuation[:length].tolist() and not row[length:].any()
    rounds = int(drafted.sum()) // 5
    assert acceptance_length(drafted, accepted) == pytest.approx((sum(lengths) - 3) / rounds)


def test_random_numbers_go_on_after_a_capture_that_failed(monkeypatch):
    """As where a target asks the host in its forward; sampling, and training, need them afterwards."""
    target, draft, prompts, mask, _ = case("llama", new_tokens=1)
    decoder_layer, forward = target.model.layers[1], target.model.layers[1].forward

    def asks_the_host(*args, **kwargs):
        output = forward(*args, **kwargs)
        (output[0] if isinstance(output, tuple) else output).sum().item()
        return output

    monkeypatch.setattr(decoder_layer, "forward", asks_the_host)
    sequences, _, _ = speculative_generate(
        target, draft, prompts, attention_mask=mask, max_new_tokens=20, temperature=1.0
    )
    assert sequences.shape == (3, 31)
    assert torch.rand(4, device="cuda").isfinite().all()

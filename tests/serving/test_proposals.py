"""vLLM serves what `save_pretrained` wrote, and drafts what we draft: token by token, in every round."""

import copy

import pytest
import torch

from .random_models import overfit, random_head, random_prompts, random_target
from .rounds import decoded_by_us, decoded_by_vllm, draft_logits, verified_before_rounds


pytestmark = pytest.mark.serving

LENGTHS = {"num_draft_tokens": 4, "max_new_tokens": 32}
PROMPTS = random_prompts(3, 17, 40)
# vLLM makes tables for `factor` times the original positions, so that product is the target's 256.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 5e5,
}  # fmt: skip
# transformers recomputes these two from the batch, so the target keeps another rope: only the head is compared.
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [1.0 + 0.5 * i for i in range(16)],
    "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4,
}  # fmt: skip
# Name -> (fields of the target, options of the head).
VARIANTS = {
    "llama": ({}, {}),
    "qwen3": ({"family": "qwen3"}, {}),
    "tied_embeddings": ({"tie_word_embeddings": True}, {}),
    "three_other_layers": ({}, {"aux_layer_ids": [1, 3, 7]}),
    "four_layers": ({}, {"aux_layer_ids": [1, 3, 5, 7]}),
    "reduced_vocabulary": ({}, {"draft_vocab_size": 40}),
    "fc_norm": ({}, {"fc_norm": True}),
    "norm_before_fc": ({}, {"norm_before_fc": True}),
    "norm_output": ({}, {"norm_output": True}),
    "norm_before_residual": ({}, {"norm_before_residual": True}),
    "all_norms_four_layers_reduced_qwen3": (
        {"family": "qwen3"},
        {"fc_norm": True, "norm_before_fc": True, "norm_output": True, "norm_before_residual": True}
        | {"draft_vocab_size": 40, "aux_layer_ids": [1, 3, 5, 7]},
    ),
    "yarn": ({"rope_parameters": YARN}, {}),
    "yarn_as_gpt_oss_has_it": ({"rope_parameters": {**YARN, "truncate": False}}, {}),
    "llama3": ({"rope_parameters": LLAMA3}, {}),
    "linear": ({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, {}),
    "longrope": ({}, {"rope_parameters": LONGROPE}),
    "sliding_window": ({}, {"sliding_window": 6}),
    "biases": ({}, {"attention_bias": True, "mlp_bias": True}),
    "narrower_than_the_target": ({}, {"hidden_size": 32, "num_attention_heads": 2, "head_dim": 32}),
    "wider_than_the_target": (
        {},
        {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32},
    ),
    "gpt_oss": (
        {"family": "gpt_oss", "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
        {},
    ),
    "scaled_embedding_of_granite": ({"family": "granite", "logits_scaling": 2.0, "embedding_multiplier": 3.0}, {}),
}


def saved(model, directory):
    model.save_pretrained(directory)
    return directory


def served_and_own(directory, target, draft):
    """What vLLM and we decode for every prompt."""
    served = decoded_by_vllm(saved(target, directory / "target"), saved(draft, directory / "head"), PROMPTS, **LENGTHS)
    return served, [decoded_by_us(target, draft, prompt, **LENGTHS) for prompt in PROMPTS]


def assert_same(served, ours):
    for its, own in zip(served, ours, strict=True):
        assert its.tokens == own.tokens
        assert its.rounds[: len(own.rounds)] == own.rounds


@pytest.mark.parametrize(("fields", "options"), VARIANTS.values(), ids=VARIANTS.keys())
def test_vllm_drafts_what_we_draft(tmp_path, fields, options):
    target = random_target(**fields)
    served, ours = served_and_own(tmp_path, target, random_head(target, **options))
    chains = [round_[1:] for own in ours for round_ in own.rounds]
    assert len(chains) > 60 and sum(len(set(chain)) > 1 for chain in chains) > len(chains) / 2, "too uniform a head"
    assert_same(served, ours)


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="vLLM 0.32 leaves its base as it is")
def test_dynamic_rope_is_known_to_differ(tmp_path):
    """Which is why `serving/compatibility.py` refuses it for vLLM."""
    target = random_target()
    assert_same(*served_and_own(tmp_path, target, random_head(target, rope_parameters=DYNAMIC)))


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({}, {"hidden_act": "gelu"}, "Unsupported activation: gelu"),
        ({"family": "gemma3_text", "sliding_window": 8}, {}, "does not support EAGLE3"),
        ({"family": "cohere"}, {}, "does not support EAGLE3"),
    ],
    ids=["activation", "gemma3", "cohere"],
)
def test_vllm_refuses_by_name(tmp_path, fields, options, message):
    target = random_target(**fields)
    with pytest.raises((ValueError, RuntimeError), match=message):
        served_and_own(tmp_path, target, random_head(target, **options))


def test_rounds_after_accepted_drafts(tmp_path):
    """A head that knows some of what comes: accepted rows are read again with the target's states."""
    target = random_target()
    draft = random_head(target)
    answers = [target.generate(torch.tensor([prompt]), max_new_tokens=32, do_sample=False) for prompt in PROMPTS]
    overfit(draft, target, answers)
    served, ours = served_and_own(tmp_path, target, draft)
    assert all(2 <= len(own.rounds) < 31 for own in ours), "nothing was accepted, or everything"
    assert_same(served, ours)


def test_layer_ids_off_by_one_give_other_drafts(tmp_path):
    """The comparison can fail: the same weights, told to read the layers above."""
    target = random_target()
    draft = random_head(target)
    ours = [decoded_by_us(target, draft, prompt, **LENGTHS) for prompt in PROMPTS]
    draft.config.eagle_aux_hidden_state_layer_ids = [i + 1 for i in draft.config.eagle_aux_hidden_state_layer_ids]
    served, shifted = served_and_own(tmp_path, target, draft)
    assert_same(served, shifted)
    for its, own in zip(served, ours, strict=True):
        assert its.tokens == own.tokens
        other = [mine != yours for mine, yours in zip(own.rounds, its.rounds, strict=False)]
        assert sum(other) > 0.9 * len(other)


def test_bf16_is_as_near_to_fp32_as_ours(tmp_path):
    """Rounding decides some drafts, so they are held against fp32 mathematics with the same weights."""
    target = random_target(dtype=torch.bfloat16)
    draft = random_head(target)
    directories = saved(target, tmp_path / "target"), saved(draft, tmp_path / "head")
    served = decoded_by_vllm(*directories, PROMPTS, **LENGTHS, dtype="bfloat16")
    exact, wrong = ([copy.deepcopy(model).float() for model in (target, draft)] for _ in range(2))
    wrong[1].config.eagle_aux_hidden_state_layer_ids = [i + 1 for i in draft.config.eagle_aux_hidden_state_layer_ids]
    losses = [
        (lost(exact, verified, drafts, its), lost(exact, verified, drafts, ours), lost(wrong, verified, drafts, its))
        for prompt, decoded in zip(PROMPTS, served, strict=True)
        for verified, (_, *drafts) in zip(verified_before_rounds(prompt, decoded), decoded.rounds, strict=False)
        for its, ours in [(drafts, draft_logits(target, draft, verified, drafts).argmax(-1).tolist())]
    ]
    vllm, own, off_by_one = torch.tensor(losses).mean(dim=0).tolist()
    assert vllm < 1.5 * own < 0.3 < 0.7 < off_by_one


def lost(models, verified, drafts, choices):
    """How far the logits of `choices` are below the best ones, in standard deviations: the mean over a chain."""
    logits = draft_logits(*models, verified, drafts)
    chosen = logits.gather(1, torch.tensor(choices)[:, None]).squeeze(1)
    return float(((logits.max(dim=-1).values - chosen) / logits.std(dim=-1)).mean())

"""Lossless speculative decoding: the target's own tokens, honest counts, serving-exact drafts."""

import functools
import itertools
import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from draftsmith.models.eagle3 import Eagle3DraftModel
from draftsmith.speculative import acceptance_length, generation, speculative_generate, static_rounds
from draftsmith.speculative.rows import RightAlignedCache
from draftsmith.speculative.verification import Proposal, verify


VOCAB = 97
AUX_LAYER_IDS = [1, 2, 3]
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # far from uniform outputs: no near-ties, no short loops
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL)),
    "mistral_window_8": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=8)),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(**SMALL, sliding_window=8, num_local_experts=4, num_experts_per_tok=2, rope_parameters=None)
    ),
}


@pytest.fixture(params=["growing", "static"])
def rounds(request, monkeypatch):
    """Rounds whose caches grow, and those of fixed shapes, which a GPU runs as a graph."""
    monkeypatch.setattr(generation, "static_rounds_serve", lambda target, draft: request.param == "static")


through_both = pytest.mark.usefixtures("rounds")


def make_target(family="llama"):
    torch.manual_seed(0)
    return FAMILIES[family]().eval()


def make_draft(target, draft_vocab_size=None, **options):
    torch.manual_seed(1)
    offsets = None
    if draft_vocab_size is not None:
        offsets = torch.randperm(VOCAB)[:draft_vocab_size].sort().values - torch.arange(draft_vocab_size)
    options = {"draft_vocab_size": draft_vocab_size, "d2t": offsets, "aux_layer_ids": AUX_LAYER_IDS, **options}
    return Eagle3DraftModel.from_target(target, **options).eval()


def make_prompts(lengths, seed=2):
    """[B, T] left-padded prompts and their mask."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    return torch.randint(3, VOCAB, mask.shape, generator=generator).where(mask, 0), mask.long()


def generate_alone(target, input_ids, mask, max_new_tokens, **options):
    """The target's own greedy continuation of every row, each generated without the others and without padding."""
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, **options}
    continuations = []
    for row, visible in zip(input_ids, mask.bool(), strict=True):
        prompt = row[visible][None]
        generated = target.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        continuations.append(generated[0, prompt.shape[1] :])
    return continuations


def sometimes(position, token):
    """In about two of five places, other ones in every row."""
    return (3 * position + token) % 5 < 2


def never(position, token):
    return False


def always(position, token):
    return True


def guide(monkeypatch, draft, prompts, mask, continuations, wrong=sometimes):
    """Let the head draft the recorded continuations, except where it reads `token` at a `position` that is `wrong`.

    The head itself still runs, with its cache and masks; only its logits are replaced.
    """
    table = torch.zeros(256, VOCAB, dtype=torch.long, device=prompts.device)
    for prompt, visible, continuation in zip(prompts, mask.bool(), continuations, strict=True):
        tokens = torch.cat([prompt[visible], continuation])
        for position in range(len(tokens) - 2):
            token, right = int(tokens[position + 1]), int(tokens[position + 2])
            table[position, token] = (right + 1) % VOCAB if wrong(position, token) else right
    draft_step = draft.draft_step

    def guided_step(input_ids, hidden_states, position_ids, **options):
        logits, states = draft_step(input_ids, hidden_states, position_ids, **options)
        target_ids = draft.to_target_ids(torch.arange(logits.shape[-1], device=logits.device))
        guided = 10.0 * (table[position_ids, input_ids][..., None] == target_ids)
        return guided, states

    monkeypatch.setattr(draft, "draft_step", guided_step)


def spy_on_forwards(target):
    """The arguments of every forward of the target."""
    calls = []
    target.register_forward_pre_hook(lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True)
    return calls


@functools.cache
def greedy_case(family):
    target = make_target(family)
    prompts, mask = make_prompts([5, 11, 8])
    return target, prompts, mask, generate_alone(target, prompts, mask, 64)


@through_both
@pytest.mark.parametrize(("num_draft_tokens", "draft_vocab_size"), [(1, None), (4, 60), (7, None)])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_batch_of_three_with_uneven_acceptance_equals_plain_greedy(
    monkeypatch, family, num_draft_tokens, draft_vocab_size
):
    """CASES: windowed target (window 8), 64 new tokens, batch 3, uneven acceptance."""
    target, prompts, mask, expected = greedy_case(family)
    draft = make_draft(target, draft_vocab_size)
    guide(monkeypatch, draft, prompts, mask, expected)

    sequences, drafted, accepted = speculative_generate(
        target, draft, prompts, attention_mask=mask, num_draft_tokens=num_draft_tokens, max_new_tokens=64
    )

    assert sequences.tolist() == torch.cat([prompts, torch.stack(expected)], dim=1).tolist()
    assert len(drafted.unique()) > 1, "the rows accepted evenly: nothing was tested"
    assert 1.0 < acceptance_length(drafted, accepted) < num_draft_tokens + 1


@through_both
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_single_prompt_equals_generate(family):
    target = make_target(family)
    prompt, _ = make_prompts([9])
    sequences, _, _ = speculative_generate(target, make_draft(target), prompt, max_new_tokens=40)
    assert sequences.tolist() == target.generate(prompt, max_new_tokens=40, do_sample=False).tolist()


@through_both
@pytest.mark.parametrize("implementation", ["eager", "block_sparse_flash"])
@pytest.mark.parametrize("family", ["mistral_window_8", "gpt_oss"])
def test_greedy_is_the_targets_own_under_other_attention_implementations(monkeypatch, family, implementation):
    target = make_target(family)
    target.set_attn_implementation(implementation)
    prompts, mask = make_prompts([4, 10, 7])
    expected = generate_alone(target, prompts, mask, 24)
    draft = make_draft(target)
    guide(monkeypatch, draft, prompts, mask, expected)
    sequences, _, _ = speculative_generate(target, draft, prompts, attention_mask=mask, max_new_tokens=24)
    assert sequences[:, 10:].tolist() == torch.stack(expected).tolist()


def test_a_target_that_does_not_take_fixed_caches_is_decoded_with_growing_ones(monkeypatch, caplog):
    target, prompts, mask, expected = greedy_case("llama")
    draft = make_draft(target)
    guide(monkeypatch, draft, prompts, mask, expected)
    options = {"attention_mask": mask, "num_draft_tokens": 4, "max_new_tokens": 64}
    growing = speculative_generate(target, draft, prompts, **options)
    monkeypatch.setattr(generation, "static_rounds_serve", lambda target, draft: True)

    def refuse(target, capacity, columns):
        raise TypeError("this target builds biases from a mask of its own")

    monkeypatch.setattr(static_rounds, "target_masks", refuse)
    ours = speculative_generate(target, draft, prompts, **options)
    assert [tensor.tolist() for tensor in ours] == [tensor.tolist() for tensor in growing]
    assert "biases from a mask of its own" in caplog.text


def test_fixed_caches_are_for_targets_that_read_them_by_position_alone(monkeypatch):
    """GPT-Neo takes its local band from the end of the cache."""
    on_gpu = torch.device("cuda")
    local = GPTNeoConfig(
        vocab_size=VOCAB, hidden_size=32, num_layers=4, num_heads=4, attention_types=[[["global", "local"], 2]]
    )
    for target, served in ((GPTNeoForCausalLM(local), False), (make_target("qwen3"), True)):
        monkeypatch.setattr(target, "parameters", lambda: [])
        draft = SimpleNamespace(parameters=lambda: [FakeTensor(on_gpu)])
        assert static_rounds.static_rounds_serve(target, draft) == served


@dataclass
class FakeTensor:
    device: torch.device
    data = torch.zeros(0)


@through_both
def test_finished_rows_stay_within_the_positions_of_the_target(monkeypatch):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_head": 4, "n_layer": 4, "initializer_range": 0.3}
    target = GPT2LMHeadModel(GPT2Config(**sizes, n_positions=36, attn_implementation="sdpa")).eval()
    prompts, mask = make_prompts([4, 11])
    draft = make_draft(target)
    expected = generate_alone(target, prompts, mask, 20, eos_token_id=None, pad_token_id=0)
    guide(monkeypatch, draft, prompts, mask, expected)
    sequences, _, _ = speculative_generate(
        target, draft, prompts, attention_mask=mask, num_draft_tokens=5, max_new_tokens=20, eos_token_id=[]
    )
    assert sequences[:, 11:].tolist() == torch.stack(expected).tolist()


@through_both
@pytest.mark.parametrize("wrong", [never, sometimes])
def test_rows_of_a_batch_equal_rows_alone_counts_included(monkeypatch, wrong):
    target = make_target("mistral_window_8")
    prompts, mask = make_prompts([4, 12, 7])
    draft = make_draft(target, sliding_window=6)
    guide(monkeypatch, draft, prompts, mask, generate_alone(target, prompts, mask, 30), wrong)
    options = {"num_draft_tokens": 4, "max_new_tokens": 30}
    sequences, drafted, accepted = speculative_generate(target, draft, prompts, attention_mask=mask, **options)
    alone = [
        speculative_generate(target, draft, row[m][None], **options)
        for row, m in zip(prompts, mask.bool(), strict=True)
    ]
    assert [row[12:].tolist() for row in sequences] == [one[0][0, -30:].tolist() for one in alone]
    assert drafted.tolist() == [int(one[1]) for one in alone]
    assert accepted.tolist() == sum(one[2] for one in alone).tolist()


@through_both
@pytest.mark.parametrize("num_draft_tokens", [1, 3, 5])
def test_perfect_head_accepts_everything(monkeypatch, num_draft_tokens):
    target, (prompt, mask) = make_target(), make_prompts([6])
    new_tokens = 1 + 4 * (num_draft_tokens + 1)
    draft = make_draft(target)
    guide(monkeypatch, draft, prompt, mask, generate_alone(target, prompt, mask, new_tokens + 1), never)
    _, drafted, accepted = speculative_generate(
        target, draft, prompt, num_draft_tokens=num_draft_tokens, max_new_tokens=new_tokens
    )
    assert drafted.tolist() == [4 * num_draft_tokens]
    assert accepted.tolist() == [4] * num_draft_tokens
    assert acceptance_length(drafted, accepted) == num_draft_tokens + 1


@through_both
def test_useless_head_scores_one(monkeypatch):
    target, (prompts, mask) = make_target(), make_prompts([6, 9])
    draft = make_draft(target)
    guide(monkeypatch, draft, prompts, mask, generate_alone(target, prompts, mask, 20), always)
    _, drafted, accepted = speculative_generate(target, draft, prompts, attention_mask=mask, max_new_tokens=20)
    assert drafted.tolist() == [19 * 5] * 2
    assert acceptance_length(drafted, accepted) == 1.0


@pytest.mark.parametrize("max_new_tokens", [1, 2, 17, 30])
@pytest.mark.parametrize("lengths", [[7], [5, 9, 6]])
def test_acceptance_length_is_tokens_per_row_that_the_target_verified(monkeypatch, lengths, max_new_tokens):
    target, (prompts, mask) = make_target(), make_prompts(lengths)
    draft = make_draft(target)
    guide(monkeypatch, draft, prompts, mask, generate_alone(target, prompts, mask, max_new_tokens + 8))
    forwards = spy_on_forwards(target)
    sequences, drafted, accepted = speculative_generate(
        target, draft, prompts, attention_mask=mask, num_draft_tokens=4, max_new_tokens=max_new_tokens
    )
    verified = [call["input_ids"] for call in forwards[1:]]
    rounds = sum(len(ids) for ids in verified)
    assert all(ids.shape[1] == 5 for ids in verified)
    assert sequences.shape[1] == prompts.shape[1] + max_new_tokens
    assert int(drafted.sum()) == 4 * rounds
    if rounds:
        assert acceptance_length(drafted, accepted) == pytest.approx(len(lengths) * (max_new_tokens - 1) / rounds)
    else:
        assert acceptance_length(drafted, accepted) == 1.0


def test_caches_hold_verified_tokens_only(monkeypatch):
    target, (prompts, mask) = make_target("mistral_window_8"), make_prompts([5, 9, 6])
    draft = make_draft(target)
    guide(monkeypatch, draft, prompts, mask, generate_alone(target, prompts, mask, 30))
    forwards = spy_on_forwards(target)
    speculative_generate(target, draft, prompts, attention_mask=mask, num_draft_tokens=4, max_new_tokens=30)
    for call in forwards:
        positions, visible = call["position_ids"], call["attention_mask"]
        assert visible.sum(dim=1).tolist() == (positions[:, -1] + 1).tolist()
        assert visible.shape[1] == int(positions.max()) + 1


@through_both
@pytest.mark.parametrize("options", [{}, {"sliding_window": 4}, {"draft_vocab_size": 50}, {"norm_output": True}])
def test_drafts_equal_serial_drafting_from_scratch(monkeypatch, options):
    """Accepted positions are re-run with the target's features; recurrent keys never stay."""
    target, (prompts, mask) = make_target(), make_prompts([4, 10, 7])
    draft = make_draft(target, **options)
    expected = generate_alone(target, prompts, mask, 24)
    rows = [torch.cat([row[m], new]) for row, m, new in zip(prompts, mask.bool(), expected, strict=True)]
    forwards = spy_on_forwards(target)
    speculative_generate(target, draft, prompts, attention_mask=mask, num_draft_tokens=4, max_new_tokens=24)
    checked = 0
    for call in forwards[1:]:
        for ids, positions in zip(call["input_ids"], call["position_ids"], strict=True):
            length = int(positions[0]) + 1
            if length == 1:
                continue  # a finished row, in rounds of fixed shapes
            candidates = [row[:length] for row in rows if len(row) >= length and row[length - 1] == ids[0]]
            assert ids[1:].tolist() in [draft_from_scratch(target, draft, prefix, 4) for prefix in candidates]
            checked += 1
    assert checked >= 3 * 5


@torch.no_grad()
def draft_from_scratch(target, draft, tokens, num_draft_tokens):
    """The chain after `tokens` [n]: one pass over every row with the target's features, then recurrent steps."""
    hidden_states = target.model(tokens[None], output_hidden_states=True).hidden_states
    features = torch.cat([hidden_states[i] for i in AUX_LAYER_IDS], dim=-1)[:, :-1]
    cache, rows = DynamicCache(), len(tokens) - 1
    mask = torch.ones(1, rows + num_draft_tokens, dtype=torch.long)
    ids, states, positions = tokens[None, 1:], draft.fuse(features), torch.arange(rows)[None]
    chain = []
    for step in range(num_draft_tokens):
        logits, states = draft.draft_step(ids, states, positions, cache, mask[:, : rows + step])
        ids, states, positions = draft.to_target_ids(logits[:, -1:].argmax(-1)), states[:, -1:], positions[:, -1:] + 1
        chain.append(int(ids))
    return chain


def stop_tokens(continuations):
    """A token that ends the first row early and the second later."""
    first, second = continuations[0].tolist(), continuations[1].tolist()
    return [next(t for t in first[6:] if t not in first[:6]), next(t for t in second[12:] if t not in second[:12])]


@pytest.mark.parametrize("num_draft_tokens", [2, 5])
@pytest.mark.parametrize("wrong", [never, sometimes])
def test_eos_ends_each_row_and_pads_it_as_generate_does(monkeypatch, num_draft_tokens, wrong):
    target, (prompts, mask) = make_target(), make_prompts([5, 9, 6])
    expected = generate_alone(target, prompts, mask, 40)
    eos = stop_tokens(expected)
    draft = make_draft(target)
    guide(monkeypatch, draft, prompts, mask, expected, wrong)
    forwards = spy_on_forwards(target)
    options = {"attention_mask": mask, "max_new_tokens": 30, "eos_token_id": eos}
    sequences, drafted, accepted = speculative_generate(
        target, draft, prompts, num_draft_tokens=num_draft_tokens, **options
    )
    rounds = sum(len(call["input_ids"]) for call in forwards[1:])
    assert sequences.tolist() == target.generate(prompts, do_sample=False, pad_token_id=0, **options).tolist()
    lengths = [next((i + 1 for i, token in enumerate(row[:30].tolist()) if token in eos), 30) for row in expected]
    assert max(lengths[:2]) < 30
    assert int(drafted.sum()) == num_draft_tokens * rounds
    assert acceptance_length(drafted, accepted) == pytest.approx((sum(lengths) - 3) / rounds)


@through_both
def test_eos_defaults_to_the_generation_config_and_pads_with_it():
    target, (prompts, mask) = make_target(), make_prompts([5, 9])
    expected = generate_alone(target, prompts, mask, 30)
    target.generation_config.eos_token_id = stop_tokens(expected)[0]
    target.generation_config.pad_token_id = None
    draft = make_draft(target)
    options = {"attention_mask": mask, "max_new_tokens": 30}
    sequences, _, _ = speculative_generate(target, draft, prompts, **options)
    assert sequences.tolist() == target.generate(prompts, do_sample=False, **options).tolist()
    unstopped, _, _ = speculative_generate(target, draft, prompts, eos_token_id=[], **options)
    assert unstopped[:, 9:].tolist() == torch.stack(expected).tolist()


@through_both
@pytest.mark.parametrize("logits", ["random", "huge", "uniform", "hopeless"])
def test_greedy_is_lossless_whatever_the_head_says(monkeypatch, logits):
    target, (prompts, mask) = make_target(), make_prompts([5, 8])
    draft = make_draft(target, draft_vocab_size=40)
    strange = {
        "random": lambda x: torch.randn_like(x),
        "huge": lambda x: 1e30 * torch.randn_like(x),
        "uniform": torch.zeros_like,
        "hopeless": lambda x: torch.full_like(x, -torch.inf),
    }[logits]
    draft_step = draft.draft_step

    def strange_step(*args, **options):
        head_logits, states = draft_step(*args, **options)
        return strange(head_logits), states

    monkeypatch.setattr(draft, "draft_step", strange_step)
    sequences, _, _ = speculative_generate(target, draft, prompts, attention_mask=mask, max_new_tokens=20)
    assert sequences[:, 8:].tolist() == torch.stack(generate_alone(target, prompts, mask, 20)).tolist()


@torch.no_grad()
def exact_distribution(target, prompt, depth, temperature):
    """[V ** depth] probabilities of every continuation of `prompt`, in lexicographic order."""
    vocab = target.config.vocab_size
    continuations = torch.tensor(list(itertools.product(range(vocab), repeat=depth)))
    ids = torch.cat([prompt.expand(len(continuations), -1), continuations], dim=1)
    log_p = (target(ids).logits[:, prompt.shape[1] - 1 : -1].double() / temperature).log_softmax(dim=-1)
    return log_p.gather(-1, continuations[..., None]).sum(dim=(1, 2)).exp()


def chi_square_z(counts, probabilities):
    """The chi-square statistic in normal standard deviations (Wilson-Hilferty); rare cells are pooled."""
    expected = probabilities * counts.sum()
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]]).clamp(min=1e-9)
    freedom = len(observed) - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


@through_both
@pytest.mark.parametrize(
    ("num_draft_tokens", "scale", "draft_vocab"),
    [(1, 1.0, None), (2, 0.3, [1, 2, 4]), (3, 1.0, [0, 1, 3]), (4, 30.0, None)],
)
def test_sampled_output_follows_the_targets_distribution(monkeypatch, num_draft_tokens, scale, draft_vocab):
    torch.manual_seed(0)
    target = LlamaForCausalLM(LlamaConfig(**{**SMALL, "vocab_size": 5, "initializer_range": 0.1})).eval()
    offsets = None if draft_vocab is None else torch.tensor(draft_vocab) - torch.arange(len(draft_vocab))
    draft = make_draft(target, draft_vocab_size=draft_vocab and len(draft_vocab), d2t=offsets)
    draft.set_attn_implementation("sdpa")  # one call for thousands of rows
    draft_step = draft.draft_step

    def scaled_step(*args, **options):
        logits, states = draft_step(*args, **options)
        return scale * logits, states

    monkeypatch.setattr(draft, "draft_step", scaled_step)
    prompt, samples, depth = torch.tensor([[1, 4, 2]]), 3000, 3
    torch.manual_seed(3)
    prompts, options = prompt.expand(samples, -1), {"max_new_tokens": depth, "temperature": 0.7}
    sequences, drafted, accepted = speculative_generate(
        target, draft, prompts, num_draft_tokens=num_draft_tokens, **options
    )
    cells = (sequences[:, 3:] * 5 ** torch.arange(depth - 1, -1, -1)).sum(dim=1)
    counts = torch.bincount(cells, minlength=5**depth).double()
    assert abs(chi_square_z(counts, exact_distribution(target, prompt, depth, 0.7))) < 3.5
    assert 0 < int(accepted.sum()) < int(drafted.sum()), "everything or nothing was accepted: nothing was tested"


def test_sampling_accepts_all_drafts_of_the_targets_own_distribution():
    torch.manual_seed(0)
    logits = torch.randn(50, 4, 11)
    probabilities = (logits[:, :-1] / 0.5).softmax(dim=-1)
    ids = torch.multinomial(probabilities.flatten(0, 1), 1).view(50, 3)
    accepted, token = verify(logits, Proposal(ids, ids, torch.arange(11), probabilities), temperature=0.5)
    assert accepted.tolist() == [3] * 50
    assert token.min() >= 0


def test_sampling_never_emits_what_the_target_excludes():
    torch.manual_seed(0)
    logits = torch.full((200, 3, 5), -torch.inf)
    logits[:, :, [1, 3]] = 0.0
    probabilities = torch.full((200, 2, 5), 0.2)
    ids = torch.randint(5, (200, 2))
    accepted, token = verify(logits, Proposal(ids, ids, torch.arange(5), probabilities), temperature=1.0)
    kept = ids[torch.arange(2) < accepted[:, None]]
    assert set(kept.tolist()) | set(token.tolist()) == {1, 3}


def test_realign_keeps_the_right_columns_of_each_row():
    cache = RightAlignedCache()
    states = torch.arange(2 * 3 * 6).view(3, 1, 6, 2).float()
    cache.update(states, -states, 0)
    cache.realign(torch.tensor([0, 2]), torch.tensor([4, 6]), 4)
    kept = cache.layers[0].keys
    assert kept.tolist() == torch.stack([states[0, :, 0:4], states[2, :, 2:6]]).tolist()
    assert cache.layers[0].values.tolist() == (-kept).tolist()


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"num_draft_tokens": 0}, "num_draft_tokens"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"attention_mask": torch.tensor([[1, 1, 0]])}, "attention_mask"),
        ({"attention_mask": torch.tensor([[1, 0, 1]])}, "attention_mask"),
        ({"attention_mask": torch.ones(1, 4)}, "attention_mask"),
    ],
)
def test_bad_arguments_are_named(options, argument):
    target = make_target()
    with pytest.raises(ValueError, match=f"`{argument}`"):
        speculative_generate(target, make_draft(target), torch.tensor([[5, 6, 7]]), **options)


def test_linear_attention_target_is_refused_by_layer_type():
    config = Qwen3NextConfig(**SMALL, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16)
    target = Qwen3NextForCausalLM(config)
    with pytest.raises(ValueError, match="linear_attention"):
        speculative_generate(target, make_draft(make_target()), torch.tensor([[5, 6, 7]]))

"""The demo's trained head on its real target, in fp32: what is decoded with it is the target's own.

`make test-slow` trains the head first, as `make demo` does, unless it is there.
"""

import gzip
import json
import sys
from pathlib import Path

import pytest
import torch

from draftsmith import Eagle3DraftModel
from draftsmith.data import pad_prompts, prompt_ids
from draftsmith.speculative import acceptance_length, speculative_generate
from draftsmith.target import load_target


pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[1]
HEAD = ROOT / "runs" / "demo" / "head"
sys.path.insert(0, str(ROOT / "scripts"))


@pytest.fixture(scope="module")
def target():
    from demo import GGUF, fetch_default_target

    return load_target(fetch_default_target()[1], gguf_file=GGUF, dtype=torch.float32, attn_implementation="sdpa")


@pytest.fixture(scope="module")
def draft(target):
    return Eagle3DraftModel.from_pretrained(HEAD, target=target, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    from demo import GGUF, fetch_default_target

    return AutoTokenizer.from_pretrained(fetch_default_target()[1], gguf_file=GGUF)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    """First questions of conversations that the head was not trained on."""
    from make_demo_data import split

    with gzip.open(ROOT / "demo" / "conversations.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    held_out = sorted((row for row in rows if split(row["id"]) == "held_out"), key=lambda row: row["id"])
    return [prompt_ids(tokenizer, row["messages"][:1], {}) for row in held_out]


def test_greedy_output_of_a_hundred_prompts_is_the_targets_own(target, draft, tokenizer, prompts):
    prompts, drafted, accepted = prompts[:100], 0, 0
    assert len(prompts) == 100
    for start in range(0, 100, 25):
        batch = pad_prompts(tokenizer, prompts[start : start + 25])
        sequences, drafts, per_position = speculative_generate(
            target, draft, **batch, num_draft_tokens=4, max_new_tokens=128
        )
        plain = target.generate(**batch, do_sample=False, max_new_tokens=128)
        assert sequences.tolist() == plain.tolist()
        drafted, accepted = drafted + drafts, accepted + per_position
    print(f"acceptance length {acceptance_length(drafted, accepted):.3f}")
    assert acceptance_length(drafted, accepted) > 1.2


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampled_output_is_distributed_as_plain_sampling(target, draft, prompts, temperature):
    """Two samples of the first four tokens: any of them that either draws often, and all others together."""
    samples, depth = 1500, 4
    batch = torch.tensor([prompts[0]]).expand(samples, -1)
    torch.manual_seed(0)
    sequences, drafted, accepted = speculative_generate(
        target, draft, batch, num_draft_tokens=4, max_new_tokens=depth, temperature=temperature, eos_token_id=[]
    )
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0, "eos_token_id": None}
    plain = target.generate(batch, attention_mask=torch.ones_like(batch), max_new_tokens=depth, **sampling)
    assert 0 < int(accepted.sum()) < int(drafted.sum()), "everything or nothing was accepted: nothing was tested"
    for length in range(1, depth + 1):
        ours, theirs = (continuations(ids[:, batch.shape[1] :][:, :length]) for ids in (sequences, plain))
        assert two_sample_z(ours, theirs) < 4, f"the first {length} tokens"


def continuations(ids):
    """How often each row of `ids` [N, n] occurs."""
    rows, counts = ids.unique(dim=0, return_counts=True)
    return {tuple(row): count for row, count in zip(rows.tolist(), counts.tolist(), strict=True)}


def two_sample_z(ours, theirs, least=20):
    """Chi-square of two equally large samples as a normal deviate (Wilson and Hilferty, 1931)."""
    pairs = [(ours.get(key, 0), theirs.get(key, 0)) for key in ours.keys() | theirs.keys()]
    common = [pair for pair in pairs if sum(pair) >= least]
    rest = [pair for pair in pairs if sum(pair) < least]
    cells = [*common, *([tuple(map(sum, zip(*rest, strict=True)))] if rest else [])]
    square, freedom = sum((a - b) ** 2 / (a + b) for a, b in cells), len(cells) - 1
    if freedom == 0:
        return 0.0
    return ((square / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / (2 / (9 * freedom)) ** 0.5

"""A target and its head behind vLLM's OpenAI-compatible server: the target's own text, and our counts."""

import pytest
import torch

from .random_models import overfit, random_head, random_prompts, random_target, word_tokenizer
from .rounds import decoded_in_whole_rounds
from .server import running_server


pytestmark = pytest.mark.serving

NUM_DRAFT_TOKENS, MAX_NEW_TOKENS = 4, 32
PROMPTS = random_prompts(5, 17, 40, 9)


def test_server_writes_the_targets_text_and_counts_what_we_count(tmp_path):
    target, tokenizer = random_target(), word_tokenizer()
    draft = random_head(target, draft_vocab_size=48)
    prompts = [torch.tensor([prompt]) for prompt in PROMPTS]
    answers = [target.generate(prompt, max_new_tokens=MAX_NEW_TOKENS, do_sample=False) for prompt in prompts]
    overfit(draft, target, answers)
    for name, part in {"target": target, "head": draft}.items():
        part.save_pretrained(tmp_path / name)
    tokenizer.save_pretrained(tmp_path / "target")

    rounds = {"num_draft_tokens": NUM_DRAFT_TOKENS, "max_new_tokens": MAX_NEW_TOKENS}
    limits, ours = decoded_in_whole_rounds(target, draft, PROMPTS, **rounds)
    engine = {"dtype": "float32", "max_model_len": 128, "enforce_eager": True}
    with running_server(
        tmp_path / "target", tmp_path / "head", NUM_DRAFT_TOKENS, served_model_name="target", **engine
    ) as server:
        texts = [
            server.post(
                "/v1/completions",
                model="target",
                prompt=tokenizer.decode(prompt),
                max_tokens=limit,
                temperature=0,
                ignore_eos=True,
                skip_special_tokens=False,  # `w0`, the unknown word, is one
            )["choices"][0]["text"]
            for prompt, limit in zip(PROMPTS, limits, strict=True)
        ]
        counters = server.counters()

    for prompt, limit, answer, text in zip(PROMPTS, limits, answers, texts, strict=True):
        assert text.split() == tokenizer.decode(answer[0, len(prompt) :][:limit]).split()
    drafted = sum(int(counts.sum()) for _, counts, _ in ours)
    accepted = sum(counts for _, _, counts in ours)
    assert 0 < accepted.sum() < drafted
    assert counters == {
        "num_drafts": drafted // NUM_DRAFT_TOKENS,
        "num_draft_tokens": drafted,
        "num_accepted_tokens": int(accepted.sum()),
        **{f"num_accepted_tokens_per_pos[{i}]": int(count) for i, count in enumerate(accepted)},
    }

"""The whole circle: trained, pushed, loaded by id, adapted, merged, pushed again, and served from the Hub by vLLM."""

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from draftsmith import Eagle3DraftModel, Eagle3Trainer, Eagle3TrainingArguments
from draftsmith import hub as hub_client
from draftsmith.commands import export
from draftsmith.speculative import speculative_generate
from tests.hub.conftest import clock, hub

from .random_models import random_head, random_prompts, random_target, word_tokenizer
from .rounds import decoded_in_whole_rounds
from .server import running_server


__all__ = ["clock", "hub"]  # fixtures
pytestmark = pytest.mark.serving

NUM_DRAFT_TOKENS, MAX_NEW_TOKENS = 4, 32
PROMPTS = random_prompts(5, 17, 40, 9)
OTHER_PROMPTS = random_prompts(13, 22, 8, 31, 6)[1:]


@pytest.fixture
def target(tmp_path):
    random_target().save_pretrained(tmp_path / "target")
    word_tokenizer().save_pretrained(tmp_path / "target")
    return AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32)


def answers_of(target, prompts):
    """Rows to train on: what the target itself says."""
    for prompt in prompts:
        ids = target.generate(torch.tensor([prompt]), max_new_tokens=MAX_NEW_TOKENS, do_sample=False)[0].tolist()
        yield {"input_ids": ids, "loss_mask": [0] * len(prompt) + [1] * (len(ids) - len(prompt))}


def trained(head, target, prompts, directory, **options):
    config = options.pop("peft_config", None)
    args = Eagle3TrainingArguments(
        str(directory), ttt_steps=NUM_DRAFT_TOKENS, max_steps=40, learning_rate=3e-3, per_device_train_batch_size=4,
        lr_scheduler_type="constant", save_strategy="no", report_to="none", disable_tqdm=True, **options,
    )  # fmt: skip
    rows = list(answers_of(target, prompts))
    trainer = Eagle3Trainer(head, target, args, train_dataset=rows, peft_config=config)
    trainer.train()
    return trainer


def counts(target, head, prompts):
    """Drafted and accepted tokens of each prompt."""
    options = {"num_draft_tokens": NUM_DRAFT_TOKENS, "max_new_tokens": MAX_NEW_TOKENS}
    decoded = [speculative_generate(target, head.eval(), torch.tensor([prompt]), **options) for prompt in prompts]
    return [(int(drafted.sum()), int(accepted.sum())) for _, drafted, accepted in decoded]


def acceptance(results):
    drafted, accepted = map(sum, zip(*results, strict=True))
    return 1 + accepted * NUM_DRAFT_TOKENS / drafted


def test_train_push_adapt_merge_push_serve(hub, target, tmp_path):
    # Train and push; elsewhere it is loaded by its id, and accepts the same.
    trainer = trained(
        random_head(target, draft_vocab_size=48), target, PROMPTS, tmp_path / "run", push_to_hub=True,
        hub_model_id="user/head", hub_license="apache-2.0", hub_private_repo=True,
    )  # fmt: skip
    trainer.push_to_hub()
    head = Eagle3DraftModel.from_pretrained("user/head", target=target)
    first = counts(target, head, PROMPTS)
    assert first == counts(target, trainer.model, PROMPTS) and acceptance(first) > 1.5
    unadapted = acceptance(counts(target, head, OTHER_PROMPTS))

    # Adapt it to other data, merge the adapter, push, and load again.
    lora = LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        modules_to_save=["lm_head"],
    )  # fmt: skip
    adapted = trained(head, target, OTHER_PROMPTS, tmp_path / "adapter", peft_config=lora)
    adapted.save_model()
    merged = tmp_path / "merged"
    export.main(["--draft", str(tmp_path / "adapter"), "--merge", "true", "--output", str(merged)])
    hub_client.push(merged, "user/adapted")
    again = Eagle3DraftModel.from_pretrained("user/adapted", target=target)
    live = adapted.model.get_base_model()
    second = counts(target, again, OTHER_PROMPTS)
    assert second == counts(target, live, OTHER_PROMPTS) and acceptance(second) > unadapted + 0.3

    # Served from the Hub, it writes the target's text and accepts what we accept, in whole rounds.
    rounds = {"num_draft_tokens": NUM_DRAFT_TOKENS, "max_new_tokens": MAX_NEW_TOKENS}
    limits, ours = decoded_in_whole_rounds(target, again, OTHER_PROMPTS, **rounds)
    options = {"served_model_name": "target", "dtype": "float32", "max_model_len": 128, "enforce_eager": True}
    with running_server(tmp_path / "target", "user/adapted", NUM_DRAFT_TOKENS, **options) as server:
        for prompt, limit, (sequences, _, _) in zip(OTHER_PROMPTS, limits, ours, strict=True):
            body = {"model": "target", "prompt": prompt, "max_tokens": limit, "temperature": 0, "ignore_eos": True}
            text = server.post("/v1/completions", **body, skip_special_tokens=False)["choices"][0]["text"]
            assert text.split() == [f"w{token}" for token in sequences[0, len(prompt) :].tolist()]
        served = server.counters()
    assert served["num_drafts"] == sum(int(drafted.sum()) for _, drafted, _ in ours) // NUM_DRAFT_TOKENS
    assert served["num_accepted_tokens"] == sum(int(accepted.sum()) for _, _, accepted in ours)

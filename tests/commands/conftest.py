"""A tiny target on disk, and the flags of a short training run for it."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.data.common import CHATML, build_tokenizer, chat


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("target")
    tokenizer = build_tokenizer(CHATML)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 5,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=8,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def flags(tmp_path, target_dir):
    rows = [{"messages": chat(f"What is {n}?", f"It is {n} and then {n * n}, what else?")} for n in range(24)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tmp_path / "train.yaml"
    config.write_text(
        f"target: {target_dir}\ncache_dir: {tmp_path / 'cache'}\nmax_length: 64\npacking: true\nrow_length: 128\n"
        "ttt_steps: 3\ndraft_vocab_size: 100\nper_device_train_batch_size: 1\nmax_steps: 8\nsave_steps: 1\n"
        "learning_rate: 1e-2\nreport_to: none\nuse_cpu: true\ndisable_tqdm: true\neval_fraction: 0.2\n"
        "logging_steps: 1\n"
    )
    return ["--config", str(config), "--dataset", str(tmp_path / "chats.jsonl")]

"""The demo's trained head in a server that `draftsmith evaluate` launches, against our own decoding of the prompts."""

import json
import socket
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from draftsmith.commands import evaluate
from draftsmith.target import load_target


pytestmark = pytest.mark.serving
ROOT = Path(__file__).parents[2]
HEAD, HELD_OUT = ROOT / "runs" / "demo" / "head", ROOT / "runs" / "demo" / "held_out.jsonl"
NUM_DRAFT_TOKENS, PROMPTS, MAX_NEW_TOKENS = 4, 10, 64


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """SmolLM2-135M-Instruct in fp32, as the server reads it."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from demo import GGUF, fetch_default_target

    source, path = fetch_default_target()[1], tmp_path_factory.mktemp("demo") / "target"
    load_target(source, gguf_file=GGUF, dtype=torch.float32).save_pretrained(path)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(path)
    return path


def test_a_launched_server_accepts_what_we_accept(target, tmp_path):
    flags = ["--target", str(target), "--target_dtype", "float32", "--draft", str(HEAD), "--prompts", str(HELD_OUT)]
    flags += ["--num_draft_tokens", str(NUM_DRAFT_TOKENS), "--max_new_tokens", str(MAX_NEW_TOKENS)]
    flags += ["--num_prompts", str(PROMPTS), "--batch_size", str(PROMPTS)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    server_flags = "--dtype float32 --max-model-len 1024 --enforce-eager"
    launch = ["--engine", "vllm", "--launch", "--base_url", address, f"--server_flags={server_flags}"]
    ours = evaluate.main([*flags, "--output", str(tmp_path / "ours.json")]).results[0].total
    theirs = evaluate.main([*flags, *launch, "--output", str(tmp_path / "vllm.json")]).results[0].total

    assert json.loads((tmp_path / "vllm.json").read_text())["settings"]["engine"] == "vllm"
    assert (theirs.prompts, theirs.new_tokens, sum(theirs.rounds)) == (PROMPTS, ours.new_tokens, sum(ours.rounds))
    # Of a round that EOS or the limit cuts, vLLM counts also the accepted drafts that are cut off.
    cut = sum(theirs.accepted) - sum(ours.accepted)
    assert 0 <= cut <= PROMPTS * NUM_DRAFT_TOKENS
    assert ours.acceptance_length > 1.2

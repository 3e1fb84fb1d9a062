"""`draftsmith generate` against the real vLLM: killed five times, it ends with every conversation once, in order."""

import json
import random
import signal
import subprocess
import sys
import time

import pytest
from datasets import load_dataset

from .random_models import random_prompts, random_target, word_tokenizer
from .server import running_server


pytestmark = pytest.mark.serving

STOP_WORDS = range(50, 53)  # some answers end by themselves, some at the limit
CHAT = (
    "{% for m in messages %}{{ 'w61 ' if m.role == 'user' else 'w62 ' }}{{ m.content }} w50 {% endfor %}"
    "{% if add_generation_prompt %}w62 {% endif %}"
)
KILLS, CONVERSATIONS = 5, 60
COMMAND = "from draftsmith.commands import main; main()"


@pytest.fixture
def target(tmp_path):
    model, tokenizer = random_target(), word_tokenizer()
    model.generation_config.eos_token_id = list(STOP_WORDS)
    model.save_pretrained(tmp_path / "target")
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def prompts(tmp_path):
    said = [
        " ".join(f"w{token}" for token in ids) for ids in random_prompts(*(3 + n % 9 for n in range(CONVERSATIONS)))
    ]
    rows = [{"turns": [text, said[-n]]} if n % 3 == 0 else {"prompt": text} for n, text in enumerate(said)]
    rows[7:9] = [rows[5], rows[5]]  # the same prompt again
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows, tmp_path / "prompts.jsonl"


def command(target, dataset, output, *flags):
    shared = ["--max_new_tokens", "24", "--cut_answers", "keep", "--on_bad_row", "skip", "--target_dtype", "float32"]
    paths = ["--target", str(target), "--dataset", str(dataset), "--output_dir", str(output)]
    return [sys.executable, "-c", COMMAND, "generate", *paths, *shared, *flags]


def lines(output):
    journal = output / ".journal.jsonl"
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def kill_midway(arguments, output, chance):
    """Start, wait until some more conversations are done, and kill; how many are."""
    more = lines(output) + chance.randint(1, 7)
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while lines(output) <= more:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    time.sleep(chance.uniform(0, 0.1))
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    return lines(output) - 1


def test_killed_five_times_it_ends_complete(target, prompts, tmp_path):
    rows, dataset = prompts
    output, whole, local = tmp_path / "out", tmp_path / "whole", tmp_path / "local"
    chance = random.Random(0)
    with running_server(target, None, 0, dtype="float32", max_model_len=128, enforce_eager=True) as server:
        ask = ["--engine", "openai", "--base_url", server.url, "--concurrency", "4"]
        killed = command(target, dataset, output, *ask, "--requests_per_minute", "900")
        done = [kill_midway(killed, output, chance) for _ in range(KILLS)]
        subprocess.run(killed, check=True, timeout=200)
        subprocess.run(command(target, dataset, whole, *ask), check=True, timeout=200)
    subprocess.run(command(target, dataset, local, "--engine", "hf"), check=True, timeout=200)
    print(f"conversations done at the kills: {done} of {CONVERSATIONS}")

    found, truth, ours = (list(load_dataset(str(path), split="train")) for path in (output, whole, local))
    asked = iter(row.get("prompt") or row["turns"][0] for row in rows)
    assert all(row["messages"][0]["content"] in asked for row in found)  # each in its order
    assert found == truth  # greedy: what a run that nobody killed writes
    assert [without_unknown(row) for row in found] == [said for row in ours if all((said := without_unknown(row))[1])]
    assert 5 < sum(row["finished"] for row in found) < len(found) - 5
    assert CONVERSATIONS - 10 < len(found) <= CONVERSATIONS  # a random target ends some answers before they begin
    assert 0 < done[0] and sorted(set(done)) == done and done[-1] < CONVERSATIONS
    kept = [".journal.jsonl", "provenance.json", "train.parquet"]  # the first for the other value of `cut_answers`
    assert [path.name for path in sorted(output.iterdir())] == kept


def without_unknown(row):
    """vLLM leaves special tokens out of what it says, and `w0` is one."""
    contents = [" ".join(word for word in message["content"].split() if word != "w0") for message in row["messages"]]
    return row["finished"], contents

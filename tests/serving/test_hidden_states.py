"""Hidden states from the real vLLM: those of the same target in transformers, and a cache and training from them."""

import copy
import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from draftsmith.commands import cache, train
from draftsmith.data.hidden_states import HiddenStateCache
from draftsmith.served_target import ServedTarget
from draftsmith.serving.hidden_states import extraction_command, served_name
from draftsmith.serving.launching import launched
from draftsmith.serving.servers import ServerError
from draftsmith.target import FrozenTarget

from .random_models import random_prompts, random_target, word_tokenizer
from .server import free_port


pytestmark = pytest.mark.serving

AUX, DEPTH = [2, 4, 5], 8
# steps shorter than a document, and blocks short enough for a document to find its beginning cached
FLAGS = ["--host", "127.0.0.1", "--enforce-eager", "--max-model-len", "128", "--max-num-batched-tokens", "64"]
FLAGS += ["--block-size", "32"]


def cpu_connector(directory: Path) -> list[str]:
    """Flags that name the connector for the CPU; they win over those before them."""
    connector = {"kv_connector": "CpuHiddenStatesConnector", "kv_connector_module_path": "tests.serving.cpu_connector"}
    transfer = {**connector, "kv_role": "kv_producer"}
    transfer["kv_connector_extra_config"] = {"shared_storage_path": str(directory)}
    return ["--kv-transfer-config", json.dumps(transfer)]


@pytest.fixture(autouse=True)
def importable_connector(monkeypatch):
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])))


@contextmanager
def extracting(target, tmp_path, *, layer_ids=(*AUX, DEPTH), name=None, prefix_caching=False):
    target.save_pretrained(tmp_path / "target")
    word_tokenizer().save_pretrained(tmp_path / "target")
    port = free_port()
    flags = [*FLAGS, *cpu_connector(tmp_path / "exchange")]
    flags += ["--served-model-name", name] if name else []
    flags += ["--enable-prefix-caching"] if prefix_caching else []
    dtype = str(target.dtype).removeprefix("torch.")
    options = {"dtype": dtype, "port": port, "flags": flags, "python": sys.executable}
    with launched(
        extraction_command(str(tmp_path / "target"), layer_ids, "unused", **options), f"http://127.0.0.1:{port}"
    ):
        yield ServedTarget(str(tmp_path / "target"), AUX, f"http://127.0.0.1:{port}")


def packed_batch():
    """Two rows of several documents, one of them padded, one document longer than a step of the server."""
    rows = [random_prompts(90, 1, 30), random_prompts(2, 47, 17, 40)]
    input_ids, document_ids = torch.zeros(2, 121, dtype=torch.long), torch.full((2, 121), -1)
    for row, documents in enumerate(rows):
        ids = [token for document in documents for token in document]
        input_ids[row, : len(ids)] = torch.tensor(ids)
        numbers = torch.arange(len(documents)).repeat_interleave(torch.tensor([len(ids) for ids in documents]))
        document_ids[row, : len(ids)] = numbers
    ends = torch.nn.functional.pad(document_ids.diff() != 0, (0, 1), value=True)
    return input_ids, document_ids, (document_ids >= 0) & ~ends


def errors(ours, theirs):
    """Of each token's states, in units of their size."""
    return (ours.double() - theirs.double()).norm(dim=-1) / theirs.double().norm(dim=-1)


@pytest.mark.parametrize(
    ("family", "dtype", "fields", "prefix_caching"),
    [
        ("llama", torch.bfloat16, {}, False),
        ("qwen3", torch.float32, {}, False),
        ("llama", torch.float32, {"tie_word_embeddings": True}, True),
    ],
)
def test_states_are_those_of_transformers(family, dtype, fields, prefix_caching, tmp_path):
    model = random_target(family, dtype, **fields)
    input_ids, document_ids, known = packed_batch()
    with extracting(model, tmp_path, prefix_caching=prefix_caching) as served:
        served.verify(random_prompts(20)[0], 128)
        states = served(input_ids, document_ids=document_ids)
        again = served(input_ids, document_ids=document_ids)
        with pytest.raises(ServerError, match="has 129 tokens, but .* takes 128"):
            served.verify(random_prompts(20)[0], 129)
        norm, served._norm = served._norm, torch.nn.Identity()
        with pytest.raises(ServerError, match="follows from its last hidden state"):
            served.verify(random_prompts(20)[0], 128)
        served._norm = norm
    assert not list((tmp_path / "exchange").iterdir())
    here = FrozenTarget(model, AUX)(input_ids, document_ids=document_ids)
    exact_model = copy.deepcopy(model).double()
    exact = FrozenTarget(exact_model, AUX)(input_ids, document_ids=document_ids)
    for name in ("aux_hidden_states", "last_hidden_state"):
        ours, repeated, theirs, truth = (getattr(each, name) for each in (states, again, here, exact))
        assert ours.dtype == theirs.dtype
        assert not ours[~known].any()
        rounding = errors(theirs[known], truth[known])
        for served_states in (ours, repeated):
            found = errors(served_states[known], truth[known])
            assert found.median() < 1.5 * rounding.median()
            assert found.max() < 3 * rounding.max()
    for shift in (-1, 1):
        other = FrozenTarget(exact_model, [i + shift for i in AUX])(input_ids, document_ids=document_ids)
        off = errors(states.aux_hidden_states[known], other.aux_hidden_states[known])
        assert off.median() > 5 * rounding.median()
    assert served.precision == str(dtype).removeprefix("torch.")
    assert torch.equal(served.head_weight, model.get_output_embeddings().weight)


def test_another_last_layer_is_found(tmp_path):
    """A server that says that it extracts layer 8, the last, but gives layer 7."""
    name = served_name([*AUX, DEPTH])
    with extracting(random_target(), tmp_path, layer_ids=[*AUX, DEPTH - 1], name=name) as served:
        with pytest.raises(ServerError, match="the last of its layers is not 8"):
            served.verify(random_prompts(20)[0], 128)


def test_cache_and_training_from_a_launched_server(tmp_path):
    model = random_target()
    model.save_pretrained(tmp_path / "target")
    word_tokenizer().save_pretrained(tmp_path / "target")
    rows = [{"input_ids": ids, "loss_mask": [0] * 5 + [1] * (len(ids) - 5)} for ids in random_prompts(*range(8, 60))]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["--dataset", str(tmp_path / "rows.jsonl"), "--cache_dir", str(tmp_path / "cache"), "--packing", "true"]
    data += ["--row_length", "128", "--max_length", "128", "--eval_fraction", "0.2"]
    base = ["--target", str(tmp_path / "target"), "--aux_layer_ids", *map(str, AUX), *data, "--batch_size", "4"]
    flags = ["--engine", "vllm", "--launch", "true", "--base_url", f"http://127.0.0.1:{free_port()}"]
    quoted = " ".join(f"'{flag}'" for flag in [*FLAGS, *cpu_connector(tmp_path / "exchange")])
    cache.main([*base, *flags, f"--server_flags={quoted}", "--output_dir", str(tmp_path / "served")])
    cache.main([*base, "--output_dir", str(tmp_path / "here")])
    caches = {name: HiddenStateCache(tmp_path / name) for name in ("served", "here")}
    for split in ("train", "evaluation"):
        ours, theirs = caches["served"].rows(split), caches["here"].rows(split)
        assert len(ours) == len(theirs) > 1
        for ours_row, theirs_row in zip(ours, theirs, strict=True):
            assert ours_row["input_ids"] == theirs_row["input_ids"]
            for name in ("aux_hidden_states", "teacher_hidden_states"):
                assert errors(ours_row[name], theirs_row[name]).max() < 2**-8  # both rounded to bfloat16
    run = ["--ttt_steps", "3", "--max_steps", "6", "--learning_rate", "1e-2", "--report_to", "none"]
    run += ["--use_cpu", "true", "--disable_tqdm", "true", "--logging_steps", "1", "--save_strategy", "no"]
    losses = [
        [
            entry["loss"]
            for entry in train.main(
                ["--hidden_states", str(tmp_path / name), *run, "--output_dir", str(tmp_path / f"head-{name}")]
            ).state.log_history
            if "loss" in entry
        ]
        for name in caches
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0][-1] < losses[0][0]

"""`draftsmith cache` and training from it: as beside the target, resumable, and refused where it is of others."""

import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith import Eagle3DraftModel, Eagle3Trainer, Eagle3TrainingArguments
from draftsmith.cached_target import CachedTarget
from draftsmith.commands import cache, main, train
from draftsmith.commands.arguments import DraftArguments, TargetArguments
from draftsmith.commands.cached_sources import refuse_other_sources
from draftsmith.commands.parsing import UsageError
from draftsmith.data.hidden_states import CacheWriter, DamagedShard, HiddenStateCache, HiddenStateRows, Manifest
from tests.data.common import CHATML, build_tokenizer, chat
from tests.trainer.common import logged
from tests.trainer.ranks import TORCHRUN, launch


PACKED = ["--packing", "true", "--row_length", "128"]
RUN = [
    *("--ttt_steps", "3", "--max_steps", "6", "--learning_rate", "1e-2", "--report_to", "none", "--use_cpu", "true"),
    *("--disable_tqdm", "true", "--logging_steps", "1", "--save_strategy", "no", "--per_device_train_batch_size", "1"),
]


@pytest.fixture(scope="module")
def bf16_target(target_dir, tmp_path_factory):
    """The target in bfloat16, in which nothing is lost on the way to the disk."""
    directory = tmp_path_factory.mktemp("bf16") / "target"
    model = LlamaForCausalLM.from_pretrained(target_dir)
    model.bfloat16().save_pretrained(directory)
    build_tokenizer(CHATML).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    rows = [{"messages": chat(f"What is {n}?", f"It is {n} and then {n * n}, what else?")} for n in range(24)]
    (directory / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--dataset", str(directory / "chats.jsonl"), "--cache_dir", str(directory / "cache")]
    return [*flags, "--max_length", "64", "--eval_fraction", "0.2"]


@pytest.fixture(scope="module")
def states(bf16_target, data, tmp_path_factory):
    """Caches of the same data, by name; never changed by a test."""
    directory = tmp_path_factory.mktemp("states")
    for name, flags in (("packed", PACKED), ("plain", []), ("float8", [*PACKED, "--storage", "float8"])):
        cache.main(["--target", str(bf16_target), *data, *flags, "--output_dir", str(directory / name)])
    return directory


def weights(directory):
    return load_file(directory / "model.safetensors")


def assert_same_training(ours, truth, directory):
    for name in ("loss", "grad_norm", "acceptance_length", "eval_loss", "eval_acceptance_length"):
        assert logged(ours, name) == logged(truth, name)
    assert len(logged(ours, "loss")) == 6
    loaded = {name: weights(directory / name) for name in ("cached", "online")}
    assert loaded["cached"].keys() == loaded["online"].keys()
    assert all(torch.equal(value, loaded["online"][name]) for name, value in loaded["cached"].items())


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("packed", ["--draft_vocab_size", "100", "--dataloader_num_workers", "2"]),
        ("packed", ["--gradient_accumulation_steps", "2", "--loss_normalization", "sequence"]),
        ("plain", ["--bf16", "true", "--norm_output", "true", "--per_device_eval_batch_size", "1"]),
    ],
)
def test_training_from_a_cache_is_training_beside_the_target_bit_by_bit(
    name, flags, tmp_path, states, bf16_target, data
):
    flags = [*RUN, *flags, "--per_device_eval_batch_size", "1"]
    packing = PACKED if name == "packed" else []
    online = train.main(
        ["--target", str(bf16_target), *data, *packing, *flags, "--output_dir", str(tmp_path / "online")]
    )
    # without a target
    cached = train.main(["--hidden_states", str(states / name), *flags, "--output_dir", str(tmp_path / "cached")])
    assert_same_training(cached, online, tmp_path)
    assert isinstance(cached.target, CachedTarget)
    records = [json.loads((tmp_path / run / "run.json").read_text()) for run in ("cached", "online")]
    assert records[0]["recipe"].pop("hidden_states") == "bfloat16"
    for key in ("target", "target_precision", "datasets", "coverage", "recipe"):
        assert records[0].get(key) == records[1].get(key)
    prepared = HiddenStateCache(states / name).prepared_data().statistics["train"]
    assert records[0]["datasets"][0]["rows"] == prepared.documents >= prepared.rows
    assert (prepared.documents > prepared.rows) == (name == "packed")
    head = Eagle3DraftModel.from_pretrained(tmp_path / "cached", target=LlamaForCausalLM.from_pretrained(bf16_target))
    assert head.fc.weight.dtype == torch.bfloat16 or head.dtype == torch.bfloat16


def test_batches_of_two_differ_by_rounding_of_the_target_alone(tmp_path, states, bf16_target, data):
    """Padding changes the shapes of the target's products, and so perhaps their bits."""
    flags = [*RUN, "--per_device_train_batch_size", "2", "--per_device_eval_batch_size", "2"]
    online = train.main(["--target", str(bf16_target), *data, *flags, "--output_dir", str(tmp_path / "online")])
    cached = train.main(["--hidden_states", str(states / "plain"), *flags, "--output_dir", str(tmp_path / "cached")])
    assert logged(cached, "loss") == pytest.approx(logged(online, "loss"), rel=0.02)
    assert logged(cached, "num_tokens") == logged(online, "num_tokens")


def test_float8_trains_nearly_the_same(tmp_path, states):
    runs = [
        train.main(["--hidden_states", str(states / name), *RUN, "--output_dir", str(tmp_path / name)])
        for name in ("packed", "float8")
    ]
    assert logged(runs[1], "loss") == pytest.approx(logged(runs[0], "loss"), rel=0.05)
    assert logged(runs[1], "loss") != logged(runs[0], "loss")
    sizes = [sum(path.stat().st_size for path in (states / name).glob("train-*")) for name in ("packed", "float8")]
    assert sizes[1] < 0.7 * sizes[0]


def test_an_interrupted_run_resumes_from_the_cache(tmp_path, states):
    flags = ["--hidden_states", str(states / "packed"), *RUN, "--save_strategy", "steps", "--save_steps", "3"]
    train.main([*flags, "--output_dir", str(tmp_path / "whole")])
    shutil.copytree(tmp_path / "whole" / "checkpoint-3", tmp_path / "part" / "checkpoint-3")
    train.main([*flags, "--output_dir", str(tmp_path / "part"), "--resume_from_checkpoint", "auto"])
    truth = weights(tmp_path / "whole")
    assert all(torch.equal(value, truth[name]) for name, value in weights(tmp_path / "part").items())


def test_what_needs_layers_takes_them_from_the_target(tmp_path, states, bf16_target, data):
    flags = [*RUN, "--init_from_layer", "-1", "--per_device_eval_batch_size", "1"]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"messages": chat("What is 3?")}) + "\n")
    decode = ["--eval_prompts", str(prompts), "--eval_max_new_tokens", "8"]
    cached = ["--hidden_states", str(states / "packed"), *flags]
    with pytest.raises(UsageError, match="`eval_prompts`, `init_from_layer`: the target's layers.*name `target`"):
        train.main([*cached, *decode, "--output_dir", str(tmp_path / "x")])
    target = ["--target", str(bf16_target)]
    online = train.main([*target, *data, *PACKED, *flags, "--output_dir", str(tmp_path / "online")])
    ours = train.main([*target, *cached, "--output_dir", str(tmp_path / "cached")])
    assert_same_training(ours, online, tmp_path)
    assert isinstance(ours.target, CachedTarget)  # the layers were needed for the start alone
    decoded = train.main([*target, *cached, *decode, "--output_dir", str(tmp_path / "decoded")])
    assert logged(decoded, "eval_decoded_acceptance_length")[0] >= 1
    assert logged(decoded, "loss") == logged(online, "loss")


def test_warm_start_from_a_cache(tmp_path, states):
    flags = ["--hidden_states", str(states / "packed"), *RUN]
    train.main([*flags, "--draft_vocab_size", "100", "--output_dir", str(tmp_path / "first")])
    train.main([*flags, "--draft", str(tmp_path / "first"), "--output_dir", str(tmp_path / "second")])
    assert torch.equal(weights(tmp_path / "first")["d2t"], weights(tmp_path / "second")["d2t"])
    config = json.loads((tmp_path / "first" / "config.json").read_text())
    config |= {"eagle_aux_hidden_state_layer_ids": [1, 4, 5], "eagle_config": {}}
    (tmp_path / "first" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"The head fuses the states of layers \[1, 4, 5\].*\[2, 4, 5\]"):
        train.main([*flags, "--draft", str(tmp_path / "first"), "--output_dir", str(tmp_path / "third")])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dataset", "x.jsonl"], "leave out `dataset`"),
        (["--aux_layer_ids", "1", "4", "5"], r"`aux_layer_ids` is \[1, 4, 5\], the cache's are \[2, 4, 5\]"),
        (["--max_length", "64", "--deduplicate", "false"], "leave out `max_length`, `deduplicate`"),
        (["--dataset_weights", "1"], "leave out `dataset_weights`"),
        (["--chat_template_kwargs", '{"enable_thinking": false}'], "leave out `chat_template_kwargs`"),
        (["--packing=false"], "leave out `packing`"),
        (["--target_dtype", "float32"], "`target_dtype` needs `target`"),
        (["--keep_target_states", "true"], "`keep_target_states` is of no use"),
        (["--compile_target", "true"], "`compile_target` is of no use"),
        (["--capture_target", "true"], "`capture_target` is of no use"),
    ],
)
def test_other_arguments_than_the_caches_are_refused(flags, message, tmp_path, states):
    with pytest.raises(UsageError, match=message):
        train.main(["--hidden_states", str(states / "packed"), *RUN, *flags, "--output_dir", str(tmp_path)])


def test_another_target_or_tokenizer_is_refused(tmp_path, states, bf16_target):
    same, other = tmp_path / "same", tmp_path / "target"
    shutil.copytree(bf16_target, same)
    flags = ["--hidden_states", str(states / "packed"), *RUN, "--output_dir", str(tmp_path / "head")]
    train.main([*flags, "--target", str(same)])  # the same weights, wherever they lie
    model = LlamaForCausalLM.from_pretrained(bf16_target)
    model.model.layers[3].mlp.up_proj.weight.data += 0.1
    model.save_pretrained(other)
    build_tokenizer(CHATML).save_pretrained(other)
    with pytest.raises(UsageError, match="`target` target has other weights"):
        train.main([*flags, "--target", str(other)])
    with pytest.raises(UsageError, match="`target_dtype` is float32, the cache's bfloat16"):
        train.main([*flags, "--target", str(same), "--target_dtype", "float32"])
    build_tokenizer(CHATML + " ").save_pretrained(same)
    with pytest.raises(UsageError, match="tokenizer or chat template of `target` same"):
        train.main([*flags, "--target", str(same)])


def test_a_target_of_the_hub_is_known_by_its_name_and_commit(states, monkeypatch):
    cached = HiddenStateCache(states / "packed").manifest
    of_hub = {"name": "user/target", "kind": "hub", "revision": "a" * 40, "fingerprint": None}
    cached = replace(cached, target={**cached.target, **of_hub})
    monkeypatch.setattr(TargetArguments, "load_tokenizer", lambda self: build_tokenizer(CHATML))

    def check(name, commit):
        config = LlamaConfig()
        config._commit_hash = commit
        monkeypatch.setattr(TargetArguments, "config", lambda self: config)
        refuse_other_sources(cached, TargetArguments(name), DraftArguments())

    check("user/target", "a" * 40)
    check("user/target", None)  # not known
    with pytest.raises(ValueError, match="`target` user/target is at revision b+, the cache's at a+"):
        check("user/target", "b" * 40)
    with pytest.raises(ValueError, match="`target` is user/tuned, the cache's user/target"):
        check("user/tuned", "a" * 40)


def test_an_adapter_of_the_hub_is_known_by_its_name_and_commit(states, monkeypatch):
    adapter = {"name": "user/adapter", "kind": "hub", "revision": "a" * 40, "split": None, "rows": None}
    cached = HiddenStateCache(states / "packed").manifest
    of_hub = {"name": "user/target", "kind": "hub", "revision": None, "fingerprint": None, "adapter": adapter}
    cached = replace(cached, target={**cached.target, **of_hub})
    monkeypatch.setattr(TargetArguments, "load_tokenizer", lambda self: build_tokenizer(CHATML))
    monkeypatch.setattr(TargetArguments, "config", lambda self: LlamaConfig())

    def check(name, commit):
        monkeypatch.setattr("draftsmith.commands.cached_sources.cached_commit", lambda name: commit)
        target = TargetArguments("user/target", target_adapter=name)
        refuse_other_sources(cached, target, DraftArguments())

    check("user/adapter", "a" * 40)
    check("user/adapter", None)  # not known
    for name, commit in (("user/adapter", "b" * 40), ("user/other", "a" * 40), (None, None)):
        with pytest.raises(ValueError, match="`target_adapter`"):
            check(name, commit)


def test_the_record_says_how_cached_rows_were_chosen(tmp_path, bf16_target, data):
    chosen = ["--dataset_weights", "1", "--deduplicate", "true", "--max_rows", "20", "--split_long_documents", "true"]
    flags = ["--target", str(bf16_target), *data, *chosen]
    cache.main([*flags, "--output_dir", str(tmp_path / "states")])
    recipes = []
    for given in (flags, ["--hidden_states", str(tmp_path / "states")]):
        train.main([*given, *RUN, "--max_steps", "1", "--output_dir", str(tmp_path / f"head-{len(recipes)}")])
        recipes.append(json.loads((tmp_path / f"head-{len(recipes)}" / "run.json").read_text())["recipe"])
    assert recipes[1] == {**recipes[0], "hidden_states": "bfloat16"}
    assert recipes[1]["dataset_weights"] == [1.0] and recipes[1]["max_rows"] == 20
    assert recipes[1]["deduplicate"] and recipes[1]["split_long_documents"]


def test_the_last_word_names_the_target_of_the_hub(copied, capsys):
    manifest = HiddenStateCache(copied).manifest
    of_hub = {"name": "user/target", "kind": "hub", "revision": None}
    replace(manifest, target={**manifest.target, **of_hub}).save(copied, "index.json")
    train.main(["--hidden_states", str(copied), *RUN, "--max_steps", "1", "--output_dir", str(copied.parent / "head")])
    assert "draftsmith evaluate --target user/target --draft" in capsys.readouterr().out


@pytest.fixture
def copied(tmp_path, states):
    shutil.copytree(states / "packed", tmp_path / "packed")
    return tmp_path / "packed"


def refused(directory, message):
    with pytest.raises(UsageError, match=message):
        train.main(["--hidden_states", str(directory), *RUN, "--output_dir", str(directory.parent / "head")])


def shard_of(directory) -> Path:
    return next(directory.glob("train-*.safetensors"))


def contents(directory):
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def flipped(content):
    return content[:-20] + bytes([content[-20] ^ 1]) + content[-19:]


DAMAGES = {
    "flipped": lambda path: path.write_bytes(flipped(path.read_bytes())),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-8]),
    "deleted": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("is_finished", [True, False])
def test_run_again_a_cache_is_as_it_was_written(damage, is_finished, copied, states, bf16_target, data, capsys):
    again = ["--target", str(bf16_target), *data, *PACKED, "--output_dir", str(copied)]
    files = ("train.arrow", "target/embedding_and_head.safetensors", "target/tokenizer.json", shard_of(copied).name)
    for name in files:
        DAMAGES[damage](copied / name)
    with pytest.raises((SystemExit, UsageError)) as error:
        cache.main(["--verify", "true", "--output_dir", str(copied)])
    assert all(name in str(error.value) for name in files)
    if not is_finished:
        (copied / "index.json").rename(copied / "unfinished.json")
    kept = {name: (copied / name).stat().st_mtime_ns for name in ("evaluation.arrow",)}
    cache.main(again)
    assert contents(copied) == contents(states / "packed")
    assert kept == {name: (copied / name).stat().st_mtime_ns for name in kept}
    cache.main(["--verify", "true", "--output_dir", str(copied)])
    assert "all of its 9 files as written" in capsys.readouterr().out


def test_run_again_with_nothing_to_do_it_says_so(copied, bf16_target, data, capsys):
    again = ["--target", str(bf16_target), *data, *PACKED, "--output_dir", str(copied)]
    cache.main(again)
    said = capsys.readouterr().out
    assert f"{copied} holds all of it already: 0.00" in said and "Predicted" not in said and "ritten" not in said
    shard_of(copied).unlink()
    cache.main(again)
    said = capsys.readouterr().out
    assert "Predicted: " in said and "Written: 0.00" in said and "already" not in said
    shard_of(copied).write_bytes(flipped(shard_of(copied).read_bytes()))
    with pytest.raises(SystemExit, match="the content of 1 file is not what was written"):
        cache.main(["--verify", "true", "--output_dir", str(copied)])


def test_an_interrupt_says_how_far_the_cache_came(copied, bf16_target, data, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    shard_of(copied).unlink()
    monkeypatch.setattr(CacheWriter, "write", interrupted)
    with pytest.raises(SystemExit, match="130"):
        main(["cache", "--target", str(bf16_target), *data, *PACKED, "--output_dir", str(copied)])
    expected = "interrupted after 0 of 1 shard to write: the same command goes on\n"
    assert capsys.readouterr().err.endswith(expected)


def test_states_that_are_not_finite_name_the_check_of_the_cache(copied, tmp_path, monkeypatch, caplog):
    states = HiddenStateRows._states
    monkeypatch.setattr(HiddenStateRows, "_states", lambda *given: states(*given) * torch.nan)
    flags = ["--hidden_states", str(copied), *RUN, "--output_dir", str(tmp_path / "head")]
    train.main([*flags, "--max_steps", "1"])
    assert f"`draftsmith cache --verify true --output_dir {copied}` tells" in caplog.text


def test_of_two_shards_for_the_same_rows_neither_is_trusted(copied, states, bf16_target, data):
    shard, other = shard_of(copied), shard_of(states / "float8")
    shutil.copy(other, copied / other.name)
    rows = HiddenStateCache(copied).rows("train")
    assert rows._files == [shard.name]  # by the index
    cache.main(["--target", str(bf16_target), *data, *PACKED, "--output_dir", str(copied)])
    assert contents(copied) == contents(states / "packed")


def test_damaged_and_unfinished_caches_are_refused(copied, tmp_path, capsys):
    shard, content = shard_of(copied), shard_of(copied).read_bytes()
    shard.write_bytes(content[:-8])
    refused(copied, f"{shard.name} has {len(content) - 8:,} bytes instead of {len(content):,}")
    shard.unlink()
    refused(copied, f"{shard.name} is missing.*run `draftsmith cache` as it was run before")
    shard.write_bytes(content[:50] + bytes(1000) + content[1050:])
    with pytest.raises(DamagedShard, match=f"{shard.name}: row 2 cannot be read.*run `draftsmith cache` as"):
        HiddenStateCache(copied).rows("train")[2]
    index = json.loads((copied / "index.json").read_text())
    (copied / "index.json").write_text(json.dumps({**index, "format": 3}))
    refused(copied, "is of format 3, but this version of draftsmith reads format 2")
    for change in ({"aux_layer_ids": [1, 4, 5]}, {"splits": {"train": {"shards": [[0, 1]]}}}, {"data": 3}):
        (copied / "index.json").write_text(json.dumps({**index, **change}))
        refused(copied, "index.json is damaged .its checksum")
    for text in ("{", "[]", "3", "null", '{"format": 2}', "\xff"):
        (copied / "index.json").write_text(text, encoding="latin-1")
        refused(copied, "index.json is damaged")
    (copied / "index.json").rename(copied / "unfinished.json")
    refused(copied, "is unfinished: run `draftsmith cache` again")
    refused(tmp_path / "nowhere", "holds no cache")


@pytest.mark.parametrize("name", ["train.arrow", "target/tokenizer.json", "target/embedding_and_head.safetensors"])
def test_damage_beside_the_states_is_found_before_training(name, copied):
    content = (copied / name).read_bytes()
    (copied / name).write_bytes(content[:-100] + bytes(100))
    with pytest.raises(UsageError, match=f"{copied}: the content of {name} is not what was written: run `draftsmith"):
        train.main(["--hidden_states", str(copied), *RUN, "--output_dir", str(copied.parent / "head")])


def test_a_damage_found_in_training_ends_it_with_a_message(copied):
    """Sizes are checked when a cache is opened, contents when they are read, here by a worker and by the trainer."""
    content = shard_of(copied).read_bytes()
    shard_of(copied).write_bytes(content[:50] + bytes(1000) + content[1050:])
    for workers in ("0", "2"):
        flags = [*RUN, "--dataloader_num_workers", workers, "--output_dir", str(copied.parent / "head")]
        with pytest.raises(SystemExit) as error:
            train.main(["--hidden_states", str(copied), *flags])
        assert str(error.value).startswith(f"error: `hidden_states`: {shard_of(copied)}: row ")
    shard_of(copied).write_bytes(content)
    shard = next(copied.glob("evaluation-*.safetensors"))
    shard.write_bytes(bytes(100) + shard.read_bytes()[100:])
    with pytest.raises(SystemExit, match=f"error: `hidden_states`: {shard}"):
        train.main(["--hidden_states", str(copied), *RUN, "--output_dir", str(copied.parent / "head")])
    assert (copied.parent / "head" / "model.safetensors").is_file()


def test_a_second_run_in_the_same_directory_is_refused(copied, bf16_target, data):
    before = contents(copied)
    with open(copied / ".lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match=f"`output_dir`: another run writes to {copied}: let it end"):
            cache.main(["--target", str(bf16_target), *data, *PACKED, "--output_dir", str(copied)])
        assert contents(copied) == before
        writer = CacheWriter(copied, HiddenStateCache(copied).manifest)  # one that came as late as that
        with pytest.raises(ValueError, match="another run writes to"):
            writer.begin()
    assert contents(copied) == before
    cache.main(["--target", str(bf16_target), *data, *PACKED, "--output_dir", str(copied)])


@pytest.mark.parametrize(("limit", "name"), [(5_000, "train.arrow"), (15_000, "target")])
def test_a_disk_that_fills_at_the_start_is_explained(limit, name, states, tmp_path, bf16_target, data):
    flags = ["--target", str(bf16_target), *data, *PACKED, "--output_dir", str(tmp_path / "states")]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(UsageError, match=f"{name} could not be written.*make room and run the same") as error:
            cache.main(flags)
        assert str(error.value).count("written") == str(error.value).count("make room") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list((tmp_path / "states").glob(".part-*"))
    cache.main(flags)
    assert contents(tmp_path / "states") == contents(states / "packed")


def test_a_cache_that_counted_packed_rows_goes_on_and_its_documents_are_told(copied, bf16_target, data, tmp_path):
    """As they were written before documents were counted."""
    written = contents(copied)
    index = Manifest.load(copied / "index.json")
    documents = index.data["sources"][0]["rows"]
    index.data["sources"][0]["rows"] = index.splits["train"].rows
    assert index.splits["train"].rows < documents
    index.save(copied, "index.json")
    train.main(["--hidden_states", str(copied), *RUN, "--output_dir", str(tmp_path / "head")])
    assert json.loads((tmp_path / "head" / "run.json").read_text())["datasets"][0]["rows"] == documents
    next(copied.glob("train-00000*")).unlink()
    cache.main(["--target", str(bf16_target), *data, *PACKED, "--output_dir", str(copied)])
    assert contents(copied) == written


def test_a_cache_goes_on_only_as_it_was_begun(copied, bf16_target, data, tmp_path):
    flags = ["--target", str(bf16_target), *data, *PACKED]
    with pytest.raises(UsageError, match="begun otherwise: storage: 'bfloat16', not 'float8'"):
        cache.main([*flags, "--storage", "float8", "--output_dir", str(copied)])
    with pytest.raises(UsageError, match="data.arguments.max_length: 64, not 32"):
        cache.main([*flags, "--max_length", "32", "--output_dir", str(copied)])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="is not empty and holds no cache"):
        cache.main([*flags, "--output_dir", str(tmp_path / "full")])
    with pytest.raises(UsageError, match="`target` is required"):
        cache.main(["--output_dir", str(tmp_path / "new")])
    with pytest.raises(UsageError, match="`aux_layer_ids`|aux"):
        cache.main([*flags, "--aux_layer_ids", "2", "9", "--output_dir", str(tmp_path / "new")])


def test_size_is_predicted_and_refused_where_it_does_not_fit(tmp_path, bf16_target, data, monkeypatch, capsys):
    flags = ["--target", str(bf16_target), *data, "--output_dir", str(tmp_path / "states")]
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10_000))
    with pytest.raises(UsageError, match="the cache needs .* GiB more, but 9.313e-06 GiB are free"):
        cache.main(flags)
    assert [path.name for path in (tmp_path / "states").iterdir()] == [".lock"]
    monkeypatch.undo()
    cache.main(flags)
    predicted = float(capsys.readouterr().out.split("Predicted: ")[-1].split(" GiB")[0]) * 2**30
    small = ("index.json", "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    files = [path for path in (tmp_path / "states").rglob("*") if path.is_file() and path.name not in small]
    assert predicted == pytest.approx(sum(path.stat().st_size for path in files), rel=0.03)
    (tmp_path / "states" / "target" / "config.json").write_text("{")
    cache.main(flags)
    predicted = float(capsys.readouterr().out.split("Predicted: ")[-1].split(" GiB")[0]) * 2**30
    of_target = [path for path in files if path.parent.name == "target"]
    assert predicted == pytest.approx(sum(path.stat().st_size for path in of_target), rel=0.03)


def test_a_killed_run_goes_on_where_it_was(tmp_path, bf16_target):
    generator = torch.Generator().manual_seed(0)
    rows = [
        {"input_ids": torch.randint(3, 90, (100,), generator=generator).tolist(), "loss_mask": [0] * 40 + [1] * 60}
        for _ in range(140)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--target", str(bf16_target), "--dataset", str(tmp_path / "rows.jsonl"), "--shard_mib", "1"]
    flags += ["--cache_dir", str(tmp_path / "cache"), "--batch_size", "4"]
    cache.main([*flags, "--output_dir", str(tmp_path / "whole")])
    part = tmp_path / "part"
    code = f"from draftsmith.commands import main; main({['cache', *flags, '--output_dir', str(part)]})"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        deadline = time.monotonic() + 120
        while len(shards := list(part.glob("*.safetensors"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.002)
        os.kill(run.pid, signal.SIGKILL)
    names = {path.name for path in (tmp_path / "whole").iterdir()}
    assert 2 <= len(shards) < len(list((tmp_path / "whole").glob("*.safetensors")))
    assert not (part / "index.json").exists()
    kept = {path.name: path.stat().st_mtime_ns for path in part.glob("*.safetensors")}
    (part / ".part-train-00003-of-00004").write_bytes(b"half a shard")
    cache.main([*flags, "--output_dir", str(part)])
    assert {path.name for path in part.iterdir()} == names
    assert all((part / name).stat().st_mtime_ns == written for name, written in kept.items())
    for path in (tmp_path / "whole").rglob("*"):
        if path.is_file():
            assert (part / path.relative_to(tmp_path / "whole")).read_bytes() == path.read_bytes(), path


def test_the_trainer_alone_takes_a_cache(tmp_path, states):
    opened = HiddenStateCache(states / "packed")
    target = CachedTarget(opened.target_dir, precision="bfloat16")
    draft = Eagle3DraftModel.from_target(target.model, aux_layer_ids=opened.manifest.aux_layer_ids)
    options = {"report_to": "none", "use_cpu": True, "max_steps": 1, "disable_tqdm": True, "save_strategy": "no"}
    args = Eagle3TrainingArguments(str(tmp_path), ttt_steps=2, **options)
    trainer = Eagle3Trainer(draft, target, args, train_dataset=opened.rows("train"))
    assert trainer.train().training_loss > 0
    without_states = Eagle3Trainer(draft, target, args, train_dataset=opened.prepared_data().train)
    with pytest.raises(ValueError, match="these rows bring no states"):
        without_states.train()
    other = Eagle3DraftModel.from_target(target.model, aux_layer_ids=[1, 4, 5])
    with pytest.raises(ValueError, match=r"layers \[1, 4, 5\], but the rows of the cache have those of \[2, 4, 5\]"):
        Eagle3Trainer(other, target, args, train_dataset=opened.rows("train"))
    keeping = Eagle3TrainingArguments(str(tmp_path), per_device_train_batch_size=1, keep_target_states=True, **options)
    with pytest.raises(ValueError, match="`keep_target_states`: the target of a cache has no layers"):
        Eagle3Trainer(draft, target, keeping, train_dataset=opened.rows("train"))


def test_two_ranks_write_the_same_cache_and_train_on_it(tmp_path, states, bf16_target, data):
    """Each rank writes some of the shards; two ranks train as one with twice the accumulation does."""
    directory = tmp_path / "packed"
    launch(
        [*TORCHRUN, "scripts/cache.py", "--target", str(bf16_target), *data, *PACKED, "--output_dir", str(directory)]
    )
    for path in (states / "packed").rglob("*"):
        if path.is_file():
            assert (directory / path.relative_to(states / "packed")).read_bytes() == path.read_bytes()
    run = ["--hidden_states", str(directory), *RUN, "--optim", "sgd", "--max_steps", "3"]
    launch([*TORCHRUN, "scripts/train.py", *run, "--output_dir", str(tmp_path / "two")])
    train.main([*run, "--gradient_accumulation_steps", "2", "--output_dir", str(tmp_path / "one")])
    metrics = [json.loads((tmp_path / name / "eval_results.json").read_text()) for name in ("two", "one")]
    assert metrics[0]["eval_loss"] == pytest.approx(metrics[1]["eval_loss"], rel=1e-4)
    truth = weights(tmp_path / "one")
    for name, value in weights(tmp_path / "two").items():
        torch.testing.assert_close(value, truth[name], rtol=1e-2, atol=1e-4, msg=name)  # saved in bfloat16

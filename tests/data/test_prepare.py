"""The pipeline: cache, processes, truncation, splits, packing, statistics."""

import errno
import os
import resource
import signal
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from datasets.exceptions import DatasetGenerationError
from transformers import AutoTokenizer, HfArgumentParser

from draftsmith.commands import prepare as prepare_command
from draftsmith.commands.parsing import UsageError
from draftsmith.data import DataArguments, DraftCollator, loading, prepare_datasets
from draftsmith.data.entries import cached_dataset
from draftsmith.data.files import written_whole
from draftsmith.data.scratch import make_scratch
from tests.data.common import CHATML, answers, build_tokenizer, chat


def conversations(count):
    return [{"messages": chat(f"Hello {index}", "it is what it is " * (1 + index % 7))} for index in range(count)]


def entries(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache/draftsmith").iterdir())


def test_second_run_hits_the_cache_and_every_change_misses(prepare, write_jsonl, tmp_path, monkeypatch):
    """Case: run twice -> hit; change tokenizer, template or max_length -> miss each time."""
    name = write_jsonl(conversations(5))
    tokenizer = build_tokenizer(CHATML)
    first = prepare(name, tokenizer)
    assert len(entries(tmp_path)) == 1
    with monkeypatch.context() as patch:
        patch.setattr("draftsmith.data.prepare.RowEncoder.__call__", None)
        tokenizer(["Hello"] * 2, padding=True, truncation=True, max_length=2)  # use changes the tokenizer's state
        assert list(prepare(name, tokenizer).train) == list(first.train)
        assert list(prepare(name, build_tokenizer(CHATML)).train) == list(first.train)
    changes = [
        (build_tokenizer(CHATML, vocab_size=290), {}),
        (build_tokenizer(CHATML, eos_token="</s>"), {}),
        (build_tokenizer(CHATML.replace("\n", " ")), {}),
        (tokenizer, {"chat_template": CHATML.replace("\n", "  ")}),
        (tokenizer, {"chat_template_kwargs": {"a": 1}}),
        (tokenizer, {"max_length": 20}),
        (tokenizer, {"messages_column": "messages"}),
    ]
    for number, (changed, options) in enumerate(changes, start=2):
        prepare(name, changed, **options)
        assert len(entries(tmp_path)) == number
    write_jsonl(conversations(6))
    assert len(prepare(name, tokenizer).train) == 6


def test_options_that_do_not_change_rows_share_the_cache(prepare, write_jsonl, tmp_path):
    name = write_jsonl(conversations(20))
    prepare(name, build_tokenizer(CHATML))
    prepare(name, build_tokenizer(CHATML), num_proc=1, eval_fraction=0.5, on_bad_row="skip", draft_vocab_size=5)
    assert len(entries(tmp_path)) == 1


@pytest.mark.timeout(60)
def test_processes_give_the_same_rows_in_the_same_order(write_jsonl, tmp_path):
    """Case: `num_proc` 1 and 4; the parent has used the tokenizer's threads before it forks."""
    tokenizer = build_tokenizer(CHATML)
    tokenizer(["Hello"] * 100)
    name = write_jsonl([*conversations(40), "{", *conversations(3)])
    runs = {}
    for num_proc in (1, 4):
        options = {"cache_dir": str(tmp_path / f"cache{num_proc}"), "num_proc": num_proc, "on_bad_row": "skip"}
        runs[num_proc] = prepare_datasets(DataArguments(dataset=[name], **options), tokenizer)
    assert list(runs[1].train) == list(runs[4].train) and len(runs[1].train) == 43
    assert runs[1].reports == runs[4].reports and "line 41" in runs[4].reports["train"].errors[0]


def test_killed_run_leaves_no_half_entry(tmp_path):
    def build_and_die(scratch):
        (scratch / "map.arrow").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        cached_dataset(tmp_path / "key", build_and_die)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert [path.name.startswith(".unfinished-") for path in tmp_path.iterdir()] == [True]
    assert cached_dataset(tmp_path / "key", lambda _: Dataset.from_dict({"a": [1]}))["a"][:] == [1]


def test_failing_and_concurrent_builds(tmp_path):
    def fail(scratch):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        cached_dataset(tmp_path / "key", fail)
    assert list(tmp_path.iterdir()) == []

    def build(scratch):  # another process finishes first
        cached_dataset(tmp_path / "key", lambda _: Dataset.from_dict({"a": [1]}))
        return Dataset.from_dict({"a": [2]})

    assert cached_dataset(tmp_path / "key", build)["a"][:] == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "no rows of it", "not checked"])
def test_damaged_entry_is_made_anew(damage, prepare, write_jsonl, tokenizer, tmp_path, caplog):
    name = write_jsonl(conversations(5))
    rows = list(prepare(name, tokenizer).train)
    (entry,) = (tmp_path / "cache/draftsmith").iterdir()
    (data,) = entry.glob("*.arrow")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    changed = {"truncated": content[:100], "empty": b"", "flipped": content}
    if damage in changed:
        data.write_bytes(changed[damage])
    else:
        (data if damage == "no rows of it" else entry / "checksums.json").unlink()
    assert list(prepare(name, tokenizer).train) == rows and f"{entry} is damaged" in caplog.text
    caplog.clear()
    assert list(prepare(name, tokenizer).train) == rows and "damaged" not in caplog.text
    assert entries(tmp_path) == [entry.name]


def test_scratch_of_killed_runs_is_removed_and_of_running_ones_kept(tmp_path):
    running, discard = make_scratch(tmp_path)
    killed, recent = tmp_path / ".unfinished-killed", tmp_path / ".unfinished-recent"
    for path in (killed, recent):
        path.mkdir()
        (path / "rows.arrow").write_bytes(b"half")
    for path in (running, killed):
        os.utime(path, (0, 0))
    make_scratch(tmp_path)[1]()
    assert sorted(tmp_path.iterdir()) == sorted([running, recent])
    discard()
    assert list(tmp_path.iterdir()) == [recent]


def test_limits_of_files_are_named(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError, match="a can't be written, it is larger than a file may be .*make room there, or"):
            with written_whole(tmp_path / "a") as unfinished:
                unfinished.write_bytes(bytes(1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_is_named(tmp_path):
    def fill(scratch):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=f"{tmp_path} can't be written, the disk is full: make room"):
        cached_dataset(tmp_path / "key", fill)
    with pytest.raises(OSError, match="train.parquet can't be written"), written_whole(tmp_path / "train.parquet"):
        fill(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("streaming", [True, False])
def test_disk_that_fills_while_a_file_is_read_is_no_fault_of_the_file(
    streaming, tmp_path, write_jsonl, prepare, tokenizer, monkeypatch
):
    def fill(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    def load(*arguments, **options):
        try:
            fill()
        except OSError as error:
            raise DatasetGenerationError("An error occurred while generating the dataset") from error

    rows = write_jsonl(conversations(3))
    monkeypatch.setattr("draftsmith.data.streams._written", fill)
    monkeypatch.setattr("draftsmith.data.loading.load_dataset", loading.load_dataset if streaming else load)
    with pytest.raises(OSError, match=f"^{tmp_path}/cache.* can't be written, the disk is full"):
        prepare(rows, tokenizer, streaming=streaming)


def command(tmp_path, *flags):
    """Run `draftsmith prepare` into the directory `out`."""
    common = ["--target", f"{tmp_path}/target", "--cache_dir", f"{tmp_path}/cache", "--output_dir", f"{tmp_path}/out"]
    prepare_command.main([*common, *flags])


def test_full_disk_is_a_usage_error(tmp_path, write_jsonl, tokenizer, monkeypatch):
    def fill(writer, table):
        raise OSError(errno.ENOSPC, "No space left on device")

    tokenizer.save_pretrained(tmp_path / "target")
    monkeypatch.setattr(pq.ParquetWriter, "write_table", fill)
    with pytest.raises(UsageError, match="out/train.parquet can't be written, the disk is full"):
        command(tmp_path, "--dataset", write_jsonl(conversations(3)))
    assert list((tmp_path / "out").iterdir()) == []


def test_prepared_directory_has_the_parts_of_its_last_run(tmp_path, write_jsonl, prepare, tokenizer):
    tokenizer.save_pretrained(tmp_path / "target")
    name, out = write_jsonl(conversations(40)), str(tmp_path / "out")
    command(tmp_path, "--dataset", name, "--eval_fraction", "0.3", "--inspect", "1")
    result = prepare(out, tokenizer, eval_dataset=[out])
    sizes = len(result.train), len(result.evaluation)
    assert sum(sizes) == 40 and min(sizes) > 3
    ids = [{tuple(row["input_ids"]) for row in part} for part in (result.train, result.evaluation)]
    assert not ids[0] & ids[1]
    assert len(prepare(out, tokenizer).train) == sizes[0]
    command(tmp_path, "--dataset", name)
    assert sorted(path.name for path in Path(out).iterdir()) == ["statistics.json", "train.parquet"]
    assert len(prepare(out, tokenizer).train) == 40
    with pytest.raises(FileNotFoundError, match="`eval_dataset`: .*out was prepared without evaluation data"):
        prepare(out, tokenizer, eval_dataset=[out])


def test_data_prepared_with_another_tokenizer_is_refused(tmp_path, write_jsonl, prepare, tokenizer, monkeypatch):
    """However it is named; files of other tools are taken as they are."""
    tokenizer.save_pretrained(tmp_path / "target")
    raw, out = write_jsonl(conversations(20)), tmp_path / "out"
    command(tmp_path, "--dataset", raw, "--eval_fraction", "0.3")
    again = AutoTokenizer.from_pretrained(tmp_path / "target")
    again.pad_token = "</s>"  # which decides nothing here
    again(["Hello"] * 2, padding=True, truncation=True, max_length=2)
    names = [str(out), f"{out}/train.parquet", f"{out}/*.parquet"]
    same = build_tokenizer(CHATML.replace("\n", " "))
    for name in names:
        for options in ({}, {"streaming": True}, {"eval_dataset": [str(out)]}):
            assert prepare(name, again, **options).train
            assert prepare(name, same, chat_template=CHATML, **options).train
    others = [
        (build_tokenizer(CHATML, vocab_size=290), {}),
        (build_tokenizer(CHATML, eos_token="</s>"), {}),
        (same, {}),
        (tokenizer, {"chat_template": CHATML.replace("\n", " ")}),
    ]
    monkeypatch.setattr("draftsmith.data.prepare.RowEncoder.__call__", None)  # refused before any work
    for other, options in others:
        for dataset, eval_dataset in [*(([raw, name], []) for name in names), ([raw], [str(out)])]:
            for streaming in (False, True):
                with pytest.raises(ValueError, match=r"dataset`: \S*/out/\w+.parquet was prepared with another tok"):
                    prepare(dataset, other, eval_dataset=eval_dataset, streaming=streaming, **options)


def test_prepared_parquet_is_that_of_datasets_but_for_its_fingerprint(tmp_path, write_jsonl, prepare, tokenizer):
    tokenizer.save_pretrained(tmp_path / "target")
    command(tmp_path, "--dataset", write_jsonl(conversations(2500)))
    rows = Dataset.from_parquet(f"{tmp_path}/out/train.parquet", cache_dir=f"{tmp_path}/cache")
    rows.to_parquet(tmp_path / "plain.parquet")
    schemas = [pq.read_schema(tmp_path / name) for name in ("out/train.parquet", "plain.parquet")]
    assert schemas[0].equals(schemas[1]) and schemas[0].metadata[b"huggingface"] == schemas[1].metadata[b"huggingface"]
    with pytest.raises(ValueError, match="was prepared with another tokenizer"):
        prepare(f"{tmp_path}/out/train.parquet", build_tokenizer(CHATML, vocab_size=290))
    assert len(prepare(f"{tmp_path}/plain.parquet", build_tokenizer(CHATML, vocab_size=310)).train) == 2500


@pytest.mark.parametrize("files", [1, 2, 3])
def test_killed_between_its_files_it_leaves_no_evaluation_data_to_train_on(
    files, tmp_path, write_jsonl, prepare, tokenizer, monkeypatch
):
    tokenizer.save_pretrained(tmp_path / "target")
    flags, out = ["--dataset", write_jsonl(conversations(40)), "--eval_fraction", "0.3"], tmp_path / "out"
    command(tmp_path, *flags)
    expected = list(prepare(str(out), tokenizer).train)
    for path in out.iterdir():
        path.unlink()

    def synchronize(path):
        if path.parent == out and len([path for path in out.iterdir() if path.name[0] != "."]) == files:
            raise KeyboardInterrupt

    monkeypatch.setattr("draftsmith.data.files.synchronize", synchronize)
    with suppress(KeyboardInterrupt):
        command(tmp_path, *flags)
    assert len(list(out.iterdir())) == files
    assert list(prepare(str(out), tokenizer).train) == expected


@pytest.mark.parametrize("content", ["\n\n  \n", ""])
def test_files_without_rows(content, tmp_path, write_jsonl, prepare, tokenizer):
    (tmp_path / "blank.jsonl").write_text(content)
    table = pa.table({"messages": pa.array([], pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})))})
    pq.write_table(table, tmp_path / "none.parquet")
    names = [f"{tmp_path}/blank.jsonl", f"{tmp_path}/none.parquet"]
    for _ in range(2):
        for streaming in (False, True):
            assert len(prepare([*names, write_jsonl(conversations(3))], tokenizer, streaming=streaming).train) == 3
            with pytest.raises(ValueError, match=r"no rows in .*none\.parquet"):
                prepare(names[1], tokenizer, streaming=streaming)
            with pytest.raises(
                ValueError, match="no rows in .*blank" if not content else "zero tokens are supervised"
            ):
                prepare(names[0], tokenizer, streaming=streaming)


def test_parquet_whose_first_row_group_is_empty(tmp_path, prepare, tokenizer):
    rows = pa.Table.from_pylist(conversations(3))
    with pq.ParquetWriter(tmp_path / "a.parquet", rows.schema) as writer:
        for part in (rows[:0], rows):
            writer.write_table(part)
    assert len(prepare(f"{tmp_path}/a.parquet", tokenizer).train) == 3


def test_truncation_that_removes_every_answer(prepare, tokenizer, write_jsonl, caplog):
    """Case: a warning with the row's number; the other three rows are as without it."""
    rows = conversations(4)
    rows[2]["messages"][0]["content"] = "Hello " * 100
    result = prepare(write_jsonl(rows), tokenizer, max_length=60)
    assert "train.jsonl, line 3" in caplog.text and "Left out 1 row without" in caplog.text
    assert result.reports["train"].truncated == sum(length == 60 for length in result.train["length"])
    del rows[2]
    assert list(result.train) == list(prepare(write_jsonl(rows, "three.jsonl"), tokenizer, max_length=60).train)
    caplog.clear()
    rows.insert(2, {"messages": chat("Hello " * 100, "it")})
    prepare(write_jsonl(rows), tokenizer, max_length=60)  # what is left out is told again when it comes from the cache
    assert "line 3" in caplog.text
    with pytest.raises(ValueError, match="zero tokens are supervised.*`max_length`"):
        prepare(write_jsonl(rows), tokenizer, max_length=3)


def test_evaluation_split_by_conversation(prepare, tokenizer, write_jsonl):
    rows = conversations(200)
    result = prepare(write_jsonl(rows), tokenizer, eval_fraction=0.25)
    train, held_out = ({tuple(row["input_ids"]) for row in part} for part in (result.train, result.evaluation))
    assert len(train) + len(held_out) == 200 and 30 <= len(held_out) <= 70
    assert result.train.column_names == ["input_ids", "loss_mask", "turn_ids", "length"]
    grown = prepare(
        write_jsonl([{"messages": chat("What", "one")}] + rows[::-1], "grown.jsonl"), tokenizer, eval_fraction=0.25
    )
    assert {tuple(row["input_ids"]) for row in grown.evaluation} >= held_out
    held_out_rows = [row for row, ids in zip(rows, prepare(write_jsonl(rows), tokenizer).train, strict=True)
                     if tuple(ids["input_ids"]) in held_out]  # fmt: skip
    for again, empty in ((held_out_rows, "train"), ([row for row in rows if row not in held_out_rows], "evaluation")):
        reason = f"leaves the {empty} data empty: .*split by `eval_fraction` before.*`eval_dataset`"
        with pytest.raises(ValueError, match=reason):
            prepare(write_jsonl(again, "again.jsonl"), tokenizer, eval_fraction=0.25)
    with pytest.raises(ValueError, match="`eval_fraction`.*empty"):
        prepare(write_jsonl(rows[:1]), tokenizer, eval_fraction=0.25)


def test_packed_data(prepare, tokenizer, write_jsonl, tmp_path):
    name = write_jsonl(conversations(50))
    apart = prepare(name, tokenizer, max_length=100)
    packed = prepare(name, tokenizer, max_length=100, packing=True, row_length=256, eval_fraction=0.3)
    statistics = packed.statistics["train"], packed.statistics["evaluation"]
    for field in ("documents", "tokens", "supervised_tokens"):
        assert sum(getattr(entry, field) for entry in statistics) == getattr(apart.statistics["train"], field)
    assert statistics[0].rows == len(packed.train) < statistics[0].documents
    found = [answer for row in packed.train for answer in split_answers(row, tokenizer)]
    found += [answer for row in packed.evaluation for answer in split_answers(row, tokenizer)]
    assert sorted(found) == sorted(answer for row in apart.train for answer in answers(row, tokenizer))
    before = entries(tmp_path)
    again = prepare(name, tokenizer, max_length=100, packing=True, row_length=256, eval_fraction=0.3)
    assert list(again.train) == list(packed.train) and entries(tmp_path) == before
    DraftCollator(ttt_steps=2)(list(packed.train))
    options = {"max_length": 100, "packing": True, "row_length": 256, "eval_fraction": 0.3}
    unsplit = prepare(name, tokenizer, eval_dataset=[name], **options)  # nothing is held out of the training data now
    assert unsplit.statistics["train"].documents == unsplit.statistics["evaluation"].documents == 50


def split_answers(row, tokenizer):
    start, found = 0, []
    for length in row["document_lengths"]:
        part = {name: row[name][start : start + length] for name in ("input_ids", "turn_ids")}
        found += answers(part, tokenizer)
        start += length
    return found


def test_statistics_are_logged(prepare, tokenizer, write_jsonl, caplog):
    caplog.set_level("INFO", logger="draftsmith")
    result = prepare(write_jsonl(conversations(3)), tokenizer)
    tokens = sum(row["length"] for row in result.train)
    supervised = sum(sum(row["loss_mask"]) for row in result.train)
    assert result.statistics["train"].tokens == tokens and result.statistics["train"].supervised_tokens == supervised
    assert f"3 documents in 3 rows, {tokens} tokens, {100 * supervised / tokens:.1f}% supervised" in caplog.text


def test_arguments_from_the_command_line():
    line = (
        """--dataset a.jsonl b/*.parquet --chat_template_kwargs {"enable_thinking":false} --packing --max_length 64"""
    )
    (arguments,) = HfArgumentParser(DataArguments).parse_args_into_dataclasses(line.split())
    assert arguments.dataset == ["a.jsonl", "b/*.parquet"] and arguments.row_length == 64
    assert arguments.chat_template_kwargs == {"enable_thinking": False}
    assert all(field.metadata["help"] for field in DataArguments.__dataclass_fields__.values())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"eval_fraction": 1.0}, "`eval_fraction`"),
        ({"on_bad_row": "ignore"}, "`on_bad_row`"),
        ({"packing": True, "row_length": 10}, "`max_length`=4096 is more than `row_length`=10"),
        ({"packing": True, "max_length": None}, "`packing` needs"),
        ({"max_length": 2}, "`max_length` must be at least 3"),
        ({"chat_template_kwargs": "{"}, "`chat_template_kwargs` is not a JSON object"),
        ({"chat_template_kwargs": "[1]"}, "`chat_template_kwargs` is not a JSON object"),
    ],
)
def test_arguments_that_contradict_each_other(options, reason):
    with pytest.raises(ValueError, match=reason):
        DataArguments(**options)

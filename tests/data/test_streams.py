"""Data too large for memory, or too far away to fetch whole: read in order, kept on disk, flat in memory."""

import gzip
import io
import json
import os
import subprocess
import sys
from itertools import count, islice

import pyarrow as pa
import pytest
from datasets import Dataset

from draftsmith.data import DataArguments
from draftsmith.data.streams import array_items, rows_on_disk
from tests.data.common import answers, chat


def rows(number, start=0):
    return [{"messages": chat("Hello", f"it is {index} ")} for index in range(start, start + number)]


def texts(dataset, tokenizer):
    return [answer.removesuffix("<|im_end|>") for row in dataset for answer in answers(row, tokenizer)]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "parquet"])
@pytest.mark.parametrize("streaming", [False, True])
def test_as_far_as_max_rows(kind, streaming, prepare, tokenizer, tmp_path):
    path = str(tmp_path / f"rows.{kind}")
    text = json.dumps(rows(30)) if kind == "json" else "\n".join(map(json.dumps, rows(30)))
    if kind == "parquet":
        Dataset.from_list(rows(30)).to_parquet(path)
    else:
        with gzip.open(path, "wt") if kind.endswith("gz") else open(path, "w") as file:
            file.write(text)
    whole = prepare(path, tokenizer, streaming=streaming)
    assert texts(whole.train, tokenizer) == [f"it is {index} " for index in range(30)]
    part = prepare(path, tokenizer, streaming=streaming, max_rows=7)
    assert list(part.train) == list(whole.train)[:7] and part.reports["train"].rows == 7
    assert not list((tmp_path / "cache/draftsmith").glob(".unfinished-*"))  # what was streamed is gone


def test_max_rows_counts_over_the_files_of_a_dataset(write_jsonl, prepare, tokenizer, tmp_path):
    (tmp_path / "d").mkdir()
    for number in range(3):
        write_jsonl(rows(4, 4 * number), f"d/{number}.jsonl")
    (tmp_path / "d/9.jsonl").write_text("{")  # never opened
    result = prepare([str(tmp_path / "d"), write_jsonl(rows(9, 50))], tokenizer, max_rows=6)
    assert texts(result.train, tokenizer) == [f"it is {index} " for index in [*range(6), *range(50, 56)]]
    with pytest.raises(ValueError, match="`max_rows`=0 is not positive"):
        DataArguments(max_rows=0)


def test_a_remote_dataset_is_read_only_as_far_as_needed(prepare, tokenizer, monkeypatch):
    from datasets import IterableDataset

    taken = []

    def generate():
        for index in count():
            taken.append(index)
            yield from rows(1, index)

    def load(name, config=None, *, split, streaming, **_):
        assert streaming
        return IterableDataset.from_generator(generate)

    monkeypatch.setattr("draftsmith.data.loading.load_dataset", load)
    result = prepare(["org/chats"], tokenizer, streaming=True, max_rows=50)
    assert len(result.train) == 50 and len(taken) <= 1100  # a batch is read ahead


ITEMS = ['{"a": [1, {"b": "]},["}]}', "12", '"x\\ud83dy"', "null", "[]", '{"long": "' + "x" * 5000 + '"}', "-1.5e3"]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 100, 2**20])
@pytest.mark.parametrize("space", ["", " ", "\n\t "])
def test_items_of_an_array_as_they_stand_in_the_file(chunk, space, monkeypatch):
    monkeypatch.setattr("draftsmith.data.streams.CHUNK", chunk)
    text = space + f"{space},{space}".join(ITEMS) + space + "]" + space
    assert list(array_items(io.StringIO(text))) == ITEMS
    assert list(array_items(io.StringIO(f"{space}]{space}"))) == []


def test_an_array_is_read_as_far_as_it_is_used(monkeypatch):
    monkeypatch.setattr("draftsmith.data.streams.CHUNK", 100)
    file = io.StringIO(",".join(['{"a": "xxxxxxxxxx"}'] * 10_000) + "]")
    assert len(list(islice(array_items(file), 50))) == 50 and file.tell() < 1300


@pytest.mark.parametrize("text", ["", "1", "1,", "1,]", ",1]", "1 2]", "1]]", "1] x", '{"a": ]', "{]", '"a', "12"])
def test_broken_arrays(text):
    with pytest.raises(json.JSONDecodeError):
        list(array_items(io.StringIO(text)))


def test_interrupted_streams_leave_nothing(tmp_path):
    def tables():
        yield pa.table({"a": [1]})
        raise OSError("connection lost")

    with pytest.raises(OSError, match="connection lost"):
        rows_on_disk(tables(), str(tmp_path))
    assert list((tmp_path / "draftsmith").iterdir()) == []
    found = rows_on_disk(iter([pa.table({"a": [1]}), pa.table({"a": [2, 3]})]), str(tmp_path))
    assert found["a"][:] == [1, 2, 3]
    del found


PEAKS = """
import json, sys, threading, time
from draftsmith.data import DataArguments, prepare_datasets
from tests.data.common import CHATML, build_tokenizer

def private():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) / 1024

def watch():
    while True:
        peaks[-1] = max(peaks[-1], private())
        time.sleep(0.005)

peaks = [0.0]
threading.Thread(target=watch, daemon=True).start()
tokenizer = build_tokenizer(CHATML)
for path in sys.argv[2:]:
    peaks.append(0.0)
    options = {"packing": True, "eval_fraction": 0.1, "deduplicate": True}
    prepare_datasets(DataArguments(dataset=[path], cache_dir=sys.argv[1], **options), tokenizer)
print(json.dumps(peaks[1:]))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")
def test_memory_is_flat_in_the_size_of_the_data(tmp_path):
    """Peak of the memory that a process has to itself: 120 MB more of data must not show.

    Most of it is in a column that nobody asked for, which is read but costs no time.
    """
    paths = []
    for times in (3, 9):
        lines = [json.dumps({**row, "meta": "x" * 40_000}) for row in rows(times * 500)]
        paths.append(tmp_path / f"{times}.jsonl")
        paths[-1].write_text("\n".join(lines))
    command = [sys.executable, "-c", PEAKS, str(tmp_path / "cache"), *map(str, paths)]
    # Arrow's own allocator keeps what is freed for later, at its leisure
    environment = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system"}
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    small, large = json.loads(run.stdout)
    assert large < small + 60

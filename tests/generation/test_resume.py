"""Runs that end early, in any way, and go on: nothing twice, nothing lost, the same order."""

import json
import multiprocessing
import os
import random
import signal
import time

import pytest
from datasets import load_dataset

from draftsmith.commands import main
from draftsmith.commands.parsing import UsageError
from draftsmith.generation import Answered, Journal, answer_all
from tests.generation.chat_server import answer_to


ROWS = [{"turns": [f"{n}", f"more {n}"]} if n % 3 == 0 else {"prompt": f"{n % 50}"} for n in range(120)]


def flags(server, *others):
    return ["--engine", "openai", "--base_url", server[0], "--concurrency", "8", *others]


def expected(row):
    messages = []
    for said in row.get("turns") or [row["prompt"]]:
        messages.append({"role": "user", "content": said})
        messages.append({"role": "assistant", "content": answer_to(messages)})
    return messages


def journal_of(tmp_path):
    return tmp_path / "out" / ".journal.jsonl"


def keys(tmp_path):
    lines = journal_of(tmp_path).read_bytes().split(b"\n")[:-1] if journal_of(tmp_path).exists() else []
    return [json.loads(line)["key"] for line in lines[1:]]


def interruptible_main(argv):
    """Also where the tests run in the background of a shell, which ignores Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(argv)


def start(dataset, server, target_dir, tmp_path):
    """`draftsmith generate` in a process of its own, which a server forks that has imported it: it takes no time to
    begin, and shares no lock with this process, where it would stay held when it is killed."""
    command = ["generate", "--target", str(target_dir), "--dataset", dataset, "--output_dir", str(tmp_path / "out")]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["draftsmith.commands.generate"])
    process = context.Process(target=interruptible_main, args=([*command, *flags(server)],))
    process.start()
    return process


@pytest.mark.parametrize("seed", [0, 1])
def test_killed_five_times_it_ends_complete(seed, run, server, write_prompts, tmp_path, target_dir):
    chance, dataset, answered = random.Random(seed), write_prompts(ROWS), []
    server[1].seconds = 0.2  # four seconds in all, within which a busy machine finds the time to kill
    for _ in range(5):
        before = len(answered)
        process = start(dataset, server, target_dir, tmp_path)
        while len(keys(tmp_path)) < before + chance.randint(1, 15):
            assert process.is_alive()
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.05))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        answered = keys(tmp_path)
        assert before < len(answered) < len(ROWS)
    server[1].seconds, earlier = 0.0, server[1].asked()
    counts = run(dataset, *flags(server))
    assert (counts.rows, counts.written) == (120, 120)
    found = load_dataset(str(tmp_path / "out"), split="train")["messages"]
    assert list(found) == [expected(row) for row in ROWS]
    # each run may have asked in vain for what was under way when it was killed, and for nothing else
    requests = sum(len(row.get("turns", "1")) for row in ROWS)
    assert requests <= len(server[1].requests) <= requests + 5 * 8 * 2
    assert sum((server[1].asked() - earlier).values()) == len(server[1].requests) - sum(earlier.values())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["provenance.json", "train.parquet"]


def test_sigterm_and_ctrl_c_leave_at_once_and_keep_what_is_answered(run, server, write_prompts, tmp_path, target_dir):
    server[1].seconds = 0.5  # ten seconds in all, within which a busy machine finds the time to send a signal
    dataset = write_prompts(ROWS)
    for number in (signal.SIGTERM, signal.SIGINT):
        before = len(keys(tmp_path))
        process = start(dataset, server, target_dir, tmp_path)
        while len(keys(tmp_path)) < before + 5:
            assert process.is_alive()
            time.sleep(0.001)
        os.kill(process.pid, number)
        process.join(timeout=30)
        assert process.exitcode == 128 + number
    server[1].seconds = 0.0
    assert run(dataset, *flags(server)).written == len(ROWS)


def test_a_torn_last_line_is_dropped_at_any_byte(tmp_path):
    path = tmp_path / "journal"
    with Journal(path, {"a": 1}) as journal:
        for key in ("x-0", "y-0"):
            journal.add(Answered(key, [{"role": "assistant", "content": "ü"}], True, 3, 2, 0.5))
    whole = path.read_bytes()
    ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        with Journal(path, {"a": 1}) as journal:
            assert len(journal.places) == max(sum(end <= size for end in ends) - 1, 0)
            journal.add(Answered("z-0"))
            assert journal.read("z-0").key == "z-0"
            assert all(journal.read(key).new_tokens == 2 for key in journal.places if key != "z-0")
        with Journal(path, {"a": 1}) as journal:  # what was written after the torn line is whole
            assert "z-0" in journal.places


def test_a_full_disk_is_named(tmp_path):
    with pytest.raises(OSError, match=f"^{tmp_path}/journal can't be written, the disk is full: make room"):
        with Journal(tmp_path / "journal", {}) as journal, open("/dev/full", "wb") as full:
            os.dup2(full.fileno(), journal._file.fileno())
            journal.add(Answered("x-0"))


def test_two_runs_at_once_are_refused(tmp_path):
    with Journal(tmp_path / "journal", {}), pytest.raises(ValueError, match="another run writes to"):
        Journal(tmp_path / "journal", {})


@pytest.mark.parametrize("first", ["null", '{"settings": null}', '{"settings": "a"}', "[]", "\\", "[" * 9999])
def test_a_journal_without_settings_is_named(first, tmp_path):
    (tmp_path / "journal").write_text(f"{first}\n")
    with pytest.raises(ValueError, match=r"the first line of .*journal is damaged: remove it to begin anew"):
        Journal(tmp_path / "journal", {})


def test_a_journal_that_lost_its_first_line_is_named(tmp_path):
    with Journal(tmp_path / "journal", {}) as journal:
        journal.add(Answered("x-0"))
    settings, line = (tmp_path / "journal").read_bytes().splitlines(keepends=True)
    (tmp_path / "journal").write_bytes(line)
    with pytest.raises(ValueError, match=r"the first line of .*journal is damaged: remove it to begin anew"):
        Journal(tmp_path / "journal", {})
    (tmp_path / "journal").write_bytes(settings + settings + line)
    with Journal(tmp_path / "journal", {}) as journal:
        assert list(journal.places) == ["x-0"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: b"nonsense\n",
        lambda line: b"null\n",
        lambda line: line.replace(b"It is", b"It \xffs"),
        lambda line: line.replace(b'"key": "', b'"key": "0'),
        lambda line: json.dumps(json.loads(line) | {"messages": []}).encode() + b"\n",
        lambda line: json.dumps(json.loads(line) | {"messages": "x"}).encode() + b"\n",
        lambda line: line.replace(b'"finished": true', b'"finished": false'),
    ],
)
def test_a_damaged_line_costs_its_conversation(damage, run, server, tmp_path, caplog):
    server[1].faults = {"2": [400]}
    rows = [{"prompt": str(n)} for n in range(3)]
    with pytest.raises(UsageError, match="1 row got no answer"):
        run(rows, *flags(server))
    lines = journal_of(tmp_path).read_bytes().splitlines(keepends=True)
    damaged = damage(lines[1])
    assert damaged != lines[1]
    journal_of(tmp_path).write_bytes(lines[0] + damaged + b"".join(lines[2:]))
    assert run(rows, *flags(server)).written == 3
    assert f"Damaged: 1 line of {journal_of(tmp_path)}, the first at byte {len(lines[0])}." in caplog.text
    assert list(load_dataset(str(tmp_path / "out"), split="train")["messages"]) == [expected(row) for row in rows]
    assert len(server[1].requests) == 3 + 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: bytes(100) + data[100:],
        lambda data: data[:-20] + data[-8:],
    ],
)
def test_a_finished_directory_whose_data_is_damaged_is_named(damage, run, server, tmp_path):
    rows, path = [{"prompt": "a"}, {"prompt": "b"}], tmp_path / "out" / "train.parquet"
    run(rows, *flags(server))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UsageError, match=f"{path} is damaged or changed, it is not what provenance.json tells of"):
        run(rows, *flags(server))


@pytest.mark.parametrize("finished", [True, False])
def test_other_weights_are_another_target(finished, run, server, tmp_path, target_dir):
    server[1].faults = {} if finished else {"a": [400]}
    rows = [{"prompt": "a"}]
    if finished:
        run(rows, *flags(server))
    else:
        with pytest.raises(UsageError, match="1 row got no answer"):
            run(rows, *flags(server))
    weights = target_dir / "model.safetensors"
    before = weights.read_bytes()
    try:
        weights.write_bytes(before[:-4000] + bytes(4000))
        with pytest.raises(UsageError, match=r"of other settings: `target.fingerprint` was '\w+' and is '\w+'\. Go"):
            run(rows, *flags(server))
    finally:
        weights.write_bytes(before)
    run(rows, *flags(server))


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        (["--temperature", "0.7"], "`sampling.temperature` was 0.0 and is 0.7\\. Go"),
        (["--max_new_tokens", "7"], "`sampling.max_new_tokens` was 2048 and is 7\\. Go"),
        (["--chat_template_kwargs", '{"a": 1}'], "`chat_template_kwargs` was {} and is {'a': 1}"),
        (["--served_model", "other"], "`served_model` was 'served' and is 'other'"),
        (["--target_revision", "v2"], "`target.revision` was None and is 'v2'\\. Go"),
    ],
)
@pytest.mark.parametrize("finished", [True, False])
def test_other_settings_are_refused_by_name(finished, changed, name, run, server, tmp_path, monkeypatch):
    if changed[0] == "--target_revision":
        monkeypatch.setattr("draftsmith.model_card.Source.of", source_with_revision)
    server[1].faults = {} if finished else {"2": [400]}
    rows = [{"prompt": str(n)} for n in range(3)]
    if finished:
        run(rows, *flags(server))
    else:
        with pytest.raises(UsageError):
            run(rows, *flags(server))
    with pytest.raises(UsageError, match=f"holds answers of other settings: .*{name}"):
        run(rows, *flags(server), *changed)
    run(rows, *flags(server))
    assert len(server[1].requests) == 3 + (not finished)


def source_with_revision(value, *, revision=None, **_):
    from draftsmith.model_card import Source

    return Source(str(value).rpartition("/")[2], revision=revision)


def test_a_finished_directory_is_left_alone(run, server, tmp_path, capsys):
    rows = [{"prompt": "a"}]
    run(rows, *flags(server))
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    journal_of(tmp_path).write_text("")  # killed after its last file, before the journal went
    assert run(rows, *flags(server)) is None and "is finished already" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    with pytest.raises(UsageError, match="`dataset` was"):
        run([*rows, {"prompt": "b"}], *flags(server))


def test_data_may_grow_but_not_change_under_an_unfinished_run(run, server, write_prompts):
    server[1].faults = {"b": [400]}
    with pytest.raises(UsageError, match="1 row got no answer"):
        run([{"prompt": "a"}, {"prompt": "b"}], *flags(server))
    with pytest.raises(UsageError, match="`dataset` lacks 1 conversation answered in "):
        run([{"prompt": "b"}], *flags(server))
    assert run([{"prompt": "new"}, {"prompt": "a"}, {"prompt": "b"}], *flags(server)).written == 3
    assert sorted(server[1].asked().values()) == [1, 1, 2]


def test_other_data_is_not_overwritten(run, server, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train.parquet").write_bytes(b"precious")
    with pytest.raises(UsageError, match="holds a train.parquet of something else"):
        run([{"prompt": "a"}], *flags(server))
    assert (tmp_path / "out" / "train.parquet").read_bytes() == b"precious"


def test_bad_rows_stop_before_anything_is_asked_or_are_skipped(run, server):
    rows = [{"prompt": "a"}, "{", {"x": 1}]
    with pytest.raises(
        UsageError, match=r"2 rows can't be used(.|\n)*line 2: `line` is broken JSON(.|\n)*line 3: `prompt`"
    ):
        run(rows, *flags(server))
    assert not server[1].requests
    assert run(rows, *flags(server), "--on_bad_row", "skip").written == 1


def test_an_interrupt_says_how_far_the_run_came(server, write_prompts, tmp_path, target_dir, monkeypatch, capsys):
    def interrupted(questions, indices, engine):
        found = answer_all(questions, indices, engine)
        yield from (next(found) for _ in range(3))
        raise KeyboardInterrupt

    command = ["generate", "--target", str(target_dir), "--dataset", write_prompts(ROWS[:20])]
    command += ["--output_dir", str(tmp_path / "out"), *flags(server)]
    with monkeypatch.context() as patched:
        patched.setattr("draftsmith.commands.generate.answer_all", interrupted)
        with pytest.raises(SystemExit, match="130"):
            main(command)
    assert capsys.readouterr().err.endswith("interrupted after 3 of 20 conversations: the same command goes on\n")
    main(command)
    assert "20 of 20 conversations" in capsys.readouterr().out

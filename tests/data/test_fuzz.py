"""Malformed files, by a seeded generator: no good row is lost, and every bad one is named by file and row."""

import gzip
import json
import random
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftsmith.data import DataArguments
from draftsmith.data.prepare import BadRowsError
from tests.data.common import answers, chat


def good_row(generator, index):
    """One of the formats of rows with messages, and its answer."""
    answer = generator.choice(["one", "it is", "ünï 你 🙂", "a\u2028b", "tab\t", "\x85\x0b\x0c\x1c"]) + f" {index}"
    question = generator.choice(["Hello", "", "\u2029", "What\r\nis", "\ufeff"])
    row = {
        0: {"messages": chat(question, answer)},
        1: {"messages": [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in
                         (("user", question), ("assistant", answer))]},
        2: {"messages": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]},
        3: {"messages": [*chat(question, answer), {"role": "user", "content": "and?"}]},
    }[generator.randrange(4)]  # fmt: skip
    extra = generator.choice(
        [{}, {"id": index}, {"id": str(index)}, {"id": None}, {"score": float("nan")}, {"x": [[[]]]}]
    )
    return {**extra, **row}, answer


def bad_value(generator):
    return generator.choice(
        [None, 5, -1.5, 10**400, True, "", "text", [], [[]], [[[{}]]], {}, {"role": 1}, [None], [1, "a"], ["x" * 1000],
         [{"role": "user"}], [{"role": "assistant", "content": 7}], [{"content": "x"}], [[{"role": "user"}]],
         [{"role": None, "content": None}], [{"from": ["human"], "value": "x"}], [{"from": "human", "value": {}}],
         [{"role": "user", "content": [{"type": "image"}]}], [{"role": "user", "content": [["x"]]}],
         [{"role": "user", "content": "x"}, {"role": "assistant", "content": None}],
         [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": "x"}],
         [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x", "tool_calls": [{"function": 1}]}],
         [{"role": "assistant", "content": "nobody asked"}], "\ud800"]
    )  # fmt: skip


def bad_line(generator, line):
    """Bytes that are no usable row, without a line end in them."""
    kind = generator.randrange(9)
    if kind == 0:
        return line[: generator.randrange(1, len(line) - 1)]
    if kind == 1:
        return line + generator.choice([b"}", b"x", b",", b"{}"])
    if kind == 2:
        return json.dumps({"messages": bad_value(generator)}).encode()
    if kind == 3:
        return json.dumps(generator.choice([[], 5, "x", None, True, [{}], {}, {"other": 1}])).encode()
    if kind == 4:
        return line.replace(b'"messages"', generator.choice([b'"message"', b'"MESSAGES"', b"messages", b"'messages'"]))
    if kind == 5:
        return b"[" * generator.choice([1, 1000, 100_000])
    if kind == 6:
        return b'{"messages": ' + b"9" * 5000 + b"}"
    if kind == 7:
        place = line.index(b"content") if b"content" in line else line.index(b"value")
        return line[:place] + generator.choice([b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\x80"]) + line[place:]
    return line.decode().encode(generator.choice(["utf-16", "utf-32"])).replace(b"\n", b"").replace(b"\r", b"")


def blank(generator):
    return generator.choice([b"", b" ", b"\t", b"   "])


@pytest.mark.parametrize("seed", range(12))
def test_json_lines(seed, prepare, tokenizer, tmp_path):
    generator = random.Random(seed)
    names, expected, bad = [], [], set()
    for number in range(3):
        suffix = generator.choice(["jsonl", "ndjson", "json", "jsonl.gz"])
        path = tmp_path / f"{number}.{suffix}"
        lines = []
        for index in range(generator.randrange(5, 40)):
            row, answer = good_row(generator, f"{number}-{index}")
            line = json.dumps(row, ensure_ascii=generator.random() < 0.5).encode()
            chance = generator.random()
            if chance < 0.4 and index:  # the first one says which format the file is
                line = bad_line(generator, line)
                bad.add(f"{path}, line {len(lines) + 1}")
            elif chance < 0.5 and index:
                line = blank(generator)
            else:
                expected.append(answer)
            lines.append(line)
        text = generator.choice([b"", b"\xef\xbb\xbf"]) + generator.choice([b"\n", b"\r\n"]).join(lines)
        text += generator.choice([b"", b"\n", b"\n\n"])
        path.write_bytes(gzip.compress(text) if suffix.endswith("gz") else text)
        names.append(str(path))
    generator.random() < 0.5 and names.insert(1, empty(tmp_path))
    result = prepare(names, tokenizer, on_bad_row="skip")
    found = [answer.removesuffix("<|im_end|>") for row in result.train for answer in answers(row, tokenizer)]
    assert found == expected
    assert {entry.split(": `")[0] for entry in result.reports["train"].errors} == bad
    assert all(re.fullmatch(r".*, line \d+: `[^`]+` .*", entry) for entry in result.reports["train"].errors)
    if bad:
        with pytest.raises(BadRowsError) as error:
            prepare(names, tokenizer)
        assert len(error.value.rows) == len(bad)


def empty(tmp_path):
    path = tmp_path / "empty.jsonl.gz"
    path.write_bytes(gzip.compress(b""))
    return str(path)


@pytest.mark.parametrize("seed", range(6))
def test_json_arrays(seed, prepare, tokenizer, tmp_path):
    """Any JSON value may stand in an array; the rows between come out."""
    generator = random.Random(seed)
    items, expected, bad = [], [], set()
    for index in range(40):
        row, answer = good_row(generator, index)
        if generator.random() < 0.4 and index:
            items.append(generator.choice([bad_value(generator), {"messages": bad_value(generator)}, {"message": 1}]))
            bad.add(index + 1)
        else:
            items.append(row)
            expected.append(answer)
    path = tmp_path / "rows.json"
    path.write_text(
        json.dumps(items, indent=generator.choice([None, 2])), encoding=generator.choice(["utf-8", "utf-8-sig"])
    )
    result = prepare(str(path), tokenizer, on_bad_row="skip")
    found = [answer.removesuffix("<|im_end|>") for row in result.train for answer in answers(row, tokenizer)]
    assert found == expected
    assert {int(re.search(r", line (\d+): ", entry)[1]) for entry in result.reports["train"].errors} == bad


@pytest.mark.parametrize("seed", range(4))
def test_parquet(seed, prepare, tokenizer, tmp_path):
    """Columns have one type, but rows may be null, empty or half filled, and other columns anything."""
    generator = random.Random(seed)
    rows, expected, bad = [], [], set()
    for index in range(40):
        kind = generator.randrange(6) if index else 5
        broken = [None, [], [None], chat("Hello"), chat("Hello", None), [{"role": None, "content": "x"}]][:5]
        if kind < 5:
            rows.append(broken[kind])
            bad.add(index + 1)
        else:
            rows.append(chat("Hello", f"one {index}"))
            expected.append(f"one {index}")
    message = pa.struct([("role", pa.string()), ("content", pa.string()), ("weight", pa.float64())])
    table = pa.table(
        {
            "messages": pa.array(rows, generator.choice([pa.list_, pa.large_list])(message)),
            "blob": pa.array([b"\xff"] * 40, pa.binary()),
            "deep": pa.array([[[1], []]] * 40),
            "nothing": pa.nulls(40),
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=7)
    result = prepare(str(tmp_path / "rows.parquet"), tokenizer, on_bad_row="skip")
    found = [answer.removesuffix("<|im_end|>") for row in result.train for answer in answers(row, tokenizer)]
    assert found == expected
    assert {int(re.search(r", row (\d+): ", entry)[1]) for entry in result.reports["train"].errors} == bad


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cut.jsonl.gz", gzip.compress(b'{"messages": []}\n' * 1000, mtime=0)[:60]),
        ("none.jsonl.gz", b"no gzip at all"),
        ("none.json.gz", b"no gzip at all"),
        ("none.parquet", b"PAR1 but nothing else PAR1"),
        ("none.parquet", b""),
        ("array.json", b'[{"messages": []}, '),
        ("array.json", b"[" * 100_000),
        ("array.json", b'[{"messages": []}] and more'),
    ],
)
def test_file_that_is_not_what_its_name_says_is_named(name, content, prepare, tokenizer, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / name))):
        prepare(str(tmp_path / name), tokenizer)


def test_errors_are_safe_to_print(prepare, tokenizer, write_jsonl):
    """What a row holds is quoted in errors; a terminal must not obey it."""
    rows = [
        {"messages": chat("Hello", "one")},
        {"\x1b[2Jmes\nsages": 1},
        {"messages": [{"from": "\x1b]0;x\x07", "value": ""}]},
    ]
    with pytest.raises(BadRowsError) as error:
        prepare(write_jsonl(rows), tokenizer)
    assert len(error.value.rows) == 2 and all(entry.isprintable() for entry in error.value.rows)


DEEP = "[" * 900 + "]" * 900


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            f'{{"messages": [{{"role": "user", "content": "Hello", "extra": {DEEP}}}, '
            '{"role": "assistant", "content": "it is"}]}',
            "nested too deeply",
        ),
        *(
            ({"messages": chat("Hello", "it is"), "chat_template_kwargs": {name: value}}, f"holds `{name}`")
            for name, value in {
                "add_generation_prompt": False, "chat_template": "x", "return_dict": True, "tokenize": True,
                "tools": [], "messages": [], "conversation": [], "continue_final_message": True, "padding": True,
            }.items()
        ),
        *(
            ({"messages": chat("Hello", "it is"), "finished": value}, "`finished` is .*, not true or false")
            for value in ("false", 0, 1, [], "True")
        ),
    ],
)  # fmt: skip
def test_rows_that_would_mislead_or_stop_the_others(row, reason, write_jsonl, prepare, tokenizer):
    name = write_jsonl([{"messages": chat("Hello", "one two"), "finished": None}, row])
    result = prepare(name, tokenizer, on_bad_row="skip")
    (error,) = result.reports["train"].errors
    assert len(result.train) == 1 and "line 2" in error and re.search(reason, error)


def test_template_arguments_that_preparation_sets():
    with pytest.raises(ValueError, match="`chat_template_kwargs` holds `tokenize`"):
        DataArguments(chat_template_kwargs={"tokenize": True})


OTHERS = ("c-17", [1], {"a": 1}, -1, 2**80, True, 1.5)


@pytest.mark.parametrize(
    "extra",
    [
        {"turn_ids": [2**40, -(2**70), 0, 0, 0]},
        *({"conversation": value, "key": value, "piece": value} for value in OTHERS),
    ],
)
def test_columns_of_no_account_do_not_spoil_token_rows(extra, write_jsonl, prepare, tokenizer):
    row = {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 1, 1, 1], **extra}
    result = prepare(write_jsonl([row]), tokenizer)
    assert result.train[0]["turn_ids"] == [-1, -1, 0, 0, 0]

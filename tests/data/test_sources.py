"""Formats, files, and rows that can't be used."""

import gzip
import json
import random

import pytest
from datasets import Dataset, Features, List, Value

from draftsmith.data import DataArguments, prepare_datasets, prompt_ids
from draftsmith.data.prepare import BadRowsError
from tests.data.common import CHATML, answers, build_tokenizer, chat


SHAREGPT = {"human": "Hello", "gpt": "one", "tool": "it is", "system": "What"}


def row_of(answer):
    return {"messages": chat("Hello", answer)}


def texts(dataset, tokenizer):
    return [answer.removesuffix("<|im_end|>") for row in dataset for answer in answers(row, tokenizer)]


CONTENTS = ("Hello", "one", "What", "two")
SPEAKERS = ("human", "gpt", "human", "gpt")


@pytest.mark.parametrize(
    "row",
    [
        {"messages": chat(*CONTENTS)},
        {"conversations": [{"from": s, "value": c} for s, c in zip(SPEAKERS, CONTENTS, strict=True)]},
        {"conversations": chat(*CONTENTS)},
        {"prompt": chat("Hello"), "completion": chat(*CONTENTS)[1:]},
        {"messages": chat(*([{"type": "text", "text": content}] for content in CONTENTS))},
    ],
)
def test_chat_formats_give_the_same_tokens(row, prepare, tokenizer, write_jsonl):
    (found,) = prepare(write_jsonl([row]), tokenizer).train
    (expected,) = prepare(Dataset.from_list([{"messages": chat(*CONTENTS)}]), tokenizer).train
    assert found == expected and answers(found, tokenizer) == ["one<|im_end|>", "two<|im_end|>"]


def test_sharegpt_speakers(prepare, tokenizer, write_jsonl):
    speakers = ("system", "human", "tool", "gpt")
    row = {"conversations": [{"from": speaker, "value": SHAREGPT[speaker]} for speaker in speakers]}
    (found,) = prepare(write_jsonl([row]), tokenizer).train
    roles = ["system", "user", "tool", "assistant"]
    text = "".join(f"<|im_start|>{r}\n{SHAREGPT[s]}<|im_end|>\n" for r, s in zip(roles, speakers, strict=True))
    assert tokenizer.decode(found["input_ids"]) == text


def test_completion_supervises_only_the_completion(prepare, tokenizer):
    history = chat("Hello", "one", "What")
    rows = [{"prompt": history, "completion": [{"role": "assistant", "content": "two"}]}]
    (row,) = prepare(Dataset.from_list(rows), tokenizer).train
    assert answers(row, tokenizer) == ["two<|im_end|>"]


@pytest.mark.parametrize("completion", [" it is", "it is", "\n\nit is", " it is<|im_end|>"])
def test_plain_prompt_and_completion(completion, prepare):
    """As a completions endpoint serves them: the prompt's ids as they are alone, no template, EOS once."""
    tokenizer = build_tokenizer()
    (row,) = prepare(Dataset.from_list([{"prompt": "What\n", "completion": completion}]), tokenizer).train
    prompt = tokenizer("What\n")["input_ids"]
    assert row["input_ids"][: len(prompt)] == prompt and row["turn_ids"][: len(prompt)] == [-1] * len(prompt)
    assert answers(row, tokenizer) == [completion.removesuffix("<|im_end|>") + "<|im_end|>"]


def test_tokens_with_and_without_turn_ids(prepare, tokenizer):
    rows = [
        {"input_ids": [5, 6, 7, 8, 9, 10], "loss_mask": [0, 1, 1, 0, 1, 1]},
        {"input_ids": [5, 6, 7, 8, 9, 10], "loss_mask": [0, 1, 1, 1, 1, 0], "turn_ids": [0, 0, 0, 1, 1, 1]},
    ]
    first, second = prepare([Dataset.from_list([row]) for row in rows], tokenizer).train
    assert first["turn_ids"] == [-1, 0, 0, -1, 1, 1]
    assert second["turn_ids"] == [-1, 0, 0, 1, 1, -1]


MARKERS = {"assistant_marker": "<|im_start|>assistant\n", "user_marker": "<|im_start|>user\n"}


def test_rendered_text_equals_messages(prepare, tokenizer):
    messages = [*chat("Hello", " one", "What", "two"), {"role": "tool", "content": "it"}, *chat("", "three")[1:]]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    (found,) = prepare(Dataset.from_list([{"text": text}]), tokenizer, **MARKERS).train
    (expected,) = prepare(Dataset.from_list([{"messages": messages}]), tokenizer).train
    assert found == expected


def test_rendered_text_without_control_tokens(prepare):
    tokenizer = build_tokenizer(eos_token="</s>")
    text = "USER: Hello ASSISTANT: one two USER: What ASSISTANT: three"
    options = {"assistant_marker": "ASSISTANT: ", "user_marker": "USER: "}
    (row,) = prepare(Dataset.from_list([{"text": text}]), tokenizer, **options).train
    assert [answer.strip() for answer in answers(row, tokenizer)] == ["one two", "three"]


def test_markers_that_do_not_match_the_text(prepare, tokenizer):
    """Case: fails before step 1, saying that zero tokens are supervised."""
    rows = Dataset.from_list([{"text": tokenizer.apply_chat_template(chat("Hello", "one"), tokenize=False)}])
    with pytest.raises(ValueError, match="zero tokens are supervised.*`assistant_marker`='### Assistant:'"):
        prepare(rows, tokenizer, assistant_marker="### Assistant:")
    with pytest.raises(ValueError, match="`assistant_marker` must say"):
        prepare(rows, tokenizer)


def test_named_columns(prepare, tokenizer, write_jsonl):
    (row,) = prepare(
        write_jsonl([{"chat": chat("Hello", "one"), "text": "no"}]), tokenizer, messages_column="chat"
    ).train
    assert answers(row, tokenizer) == ["one<|im_end|>"]
    with pytest.raises(BadRowsError, match="`talk` is missing; the row has chat"):
        prepare(write_jsonl([{"chat": chat("Hello", "one")}]), tokenizer, messages_column="talk")
    text = tokenizer.apply_chat_template(chat("Hello", "one"), tokenize=False)
    dataset = Dataset.from_dict({"rendered": [text], "messages": [[]]})
    assert list(prepare(dataset, tokenizer, text_column="rendered", **MARKERS).train) == [row]


def test_files_globs_directories_and_their_order(prepare, tokenizer, write_jsonl, tmp_path):
    (tmp_path / "b").mkdir()
    write_jsonl([row_of("one"), "", row_of("two")], "b/1.jsonl")
    (tmp_path / "b/2.json").write_text(json.dumps([row_of("three")]))
    Dataset.from_list([row_of("four")]).to_parquet(tmp_path / "b/3.parquet")
    with gzip.open(tmp_path / "b/4.jsonl.gz", "wt") as file:
        file.write(json.dumps(row_of("five")))
    Dataset.from_list([row_of("six")]).save_to_disk(tmp_path / "saved")
    names = [
        str(tmp_path / "b"),
        str(tmp_path / "b/*.jso*"),
        str(tmp_path / "saved"),
        Dataset.from_list([row_of("seven")]),
    ]
    expected = ["one", "two", "three", "four", "five", "one", "two", "three", "five", "six", "seven"]
    assert texts(prepare(names, tokenizer).train, tokenizer) == expected


def test_hub_id(prepare, tokenizer, monkeypatch):
    calls = []

    def load(name, config=None, *, split, **_):
        calls.append((name, config, split))
        return Dataset.from_list([row_of(split)])

    monkeypatch.setattr("draftsmith.data.loading.load_dataset", load)
    result = prepare(
        ["org/chats"], tokenizer, dataset_config="en", eval_dataset=["org/chats"], split="one", eval_split="two"
    )
    assert calls == [("org/chats", "en", "one"), ("org/chats", "en", "two")]
    assert texts(result.train, tokenizer) == ["one"] and texts(result.evaluation, tokenizer) == ["two"]


@pytest.mark.parametrize("name", ["./missing.jsonl", "missing.parquet", "missing/*.jsonl", "/missing"])
def test_missing_files(name, prepare, tokenizer):
    with pytest.raises(FileNotFoundError, match="`dataset`.*missing"):
        prepare(name, tokenizer)
    with pytest.raises(FileNotFoundError, match="^`eval_dataset`.*missing"):
        prepare(Dataset.from_list([{"messages": chat("Hello", "one")}]), tokenizer, eval_dataset=[name])


def test_unreadable_files(prepare, tokenizer, tmp_path):
    for name, content, reason in (
        ("rows.csv", "a,b", "is not one of"),
        ("rows.parquet", "no", "can't be read: Parquet"),
        ("rows.json", '[{"messages": [}]', "rows.json is not a JSON array.*line 1"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=reason):
            prepare(str(tmp_path / name), tokenizer)


BAD_ROWS = [
    ({"messages": []}, "`messages` is empty"),
    ({"messages": chat("Hello", 5)}, "`messages[1].content` is int, not a string"),
    ({"messages": chat("Hello", None)}, "`messages[1].content` is missing"),
    ({"other": 1}, "`messages` is missing; the row has other"),
    ({"messages": None, "a": 1}, "`messages` is missing; the row has a, messages"),
    ('{"messages": [{"role": "user"', "`line` is broken JSON: "),
    ("[1]", "`line` is a JSON list, not an object"),
    ({"messages": "Hello"}, "`messages` is str, not a list of messages"),
    ({"messages": ["Hello"]}, "`messages[0]` is str, not an object"),
    ({"messages": [{"content": "Hello"}]}, "`messages[0].role` is null, not a string"),
    ({"messages": [{"from": "bing", "value": "Hello"}]}, "`messages[0].from` is 'bing', not one of system, human"),
    ({"messages": [{"role": "human", "content": "Hello"}, *chat("", "one")[1:]]},
     "`messages[0].role` is 'human': did you mean `user`?"),
    ({"messages": [*chat("Hello", "one"), {"role": "gpt", "content": "one"}]},
     "`messages[2].role` is 'gpt': did you mean `assistant`?"),
    ({"messages": [{"role": "System ", "content": "Hello"}, *chat("Hello", "one")]},
     "`messages[0].role` is 'System ': did you mean `system`?"),
    ({"messages": [{"role": "narrator", "content": "Hello"}, *chat("Hello", "one")]},
     "`messages[0].role` is 'narrator', not one of system, developer, user, assistant, tool, and the chat template"),
    ({"messages": chat("Hello")}, "`messages` has no assistant turn after another message"),
    ({"messages": chat("Hello", "one")[1:]}, "`messages` has no assistant turn after another message"),
    ({"messages": chat("Hello", [{"type": "image"}])}, "`messages[1].content[0]` is image, but only text"),
    ({"messages": chat("Hello", "one"), "images": ["x.png"]}, "`images` holds media, but only text"),
    ({"messages": chat("Hello", "one"), "tools": "{"}, "`tools` is not JSON"),
    (json.dumps({"messages": chat("Hello", "half \ud800")}), "`messages` holds '\\ud800', half a character"),
    ("[" * 100_000, "`line` is broken JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS)
def test_bad_row_is_named_and_the_good_ones_are_kept(row, reason, prepare, tokenizer, write_jsonl, caplog):
    """Case: an error with file, row and field; the good rows are not lost. Here it is in line 7."""
    rows = [row_of("one")] * 5 + [""] + [row] + [row_of("two")]
    name = write_jsonl(rows)
    with pytest.raises(BadRowsError) as error:
        prepare(name, tokenizer)
    assert f"{name}, line 7: " in str(error.value) and reason in str(error.value)
    assert "1 row can't be used (6 documents can" in str(error.value)
    result = prepare(name, tokenizer, on_bad_row="skip")
    assert texts(result.train, tokenizer) == ["one"] * 5 + ["two"]
    assert [entry for entry in result.reports["train"].errors if reason in entry]
    assert "Skipped 1 row " in caplog.text


@pytest.mark.parametrize("role", ["developer", "tool"])
def test_roles_of_the_protocol_need_no_mention_in_the_template(role, prepare, tokenizer, write_jsonl):
    rows = [{"messages": [{"role": role, "content": "Hello"}, *chat("Hello", "one")]}]
    assert texts(prepare(write_jsonl(rows), tokenizer).train, tokenizer) == ["one"]


@pytest.mark.parametrize("quote", ["'", '"'])
def test_roles_that_the_template_names(quote, prepare, write_jsonl):
    """Case: a role of the template's own; whether it is the tokenizer's or `chat_template` decides."""
    named = CHATML.replace(
        "{{ message.role }}", f"{{{{ 'tool' if message.role == {quote}human{quote} else message.role }}}}"
    )
    name = write_jsonl([{"messages": [{"role": "human", "content": "Hello"}, *chat("Hello", "one")]}])
    for tokenizer, options in ((build_tokenizer(named), {}), (build_tokenizer(CHATML), {"chat_template": named})):
        assert texts(prepare(name, tokenizer, **options).train, tokenizer) == ["one"]
    with pytest.raises(BadRowsError, match="line 1: `messages.0..role` is 'human': did you mean `user`"):
        prepare(name, build_tokenizer(named), chat_template=CHATML)
    prompt = [{"role": "human", "content": "Hello"}]
    assert prompt_ids(build_tokenizer(named), prompt, {})
    with pytest.raises(ValueError, match="`messages.0..role` is 'human': did you mean `user`"):
        prompt_ids(build_tokenizer(CHATML), prompt, {})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"input_ids": [1, 2], "loss_mask": [1]}, "`loss_mask` has 1 entries for 2 `input_ids`"),
        ({"input_ids": [1, -2], "loss_mask": [1, 1]}, "`input_ids` holds a negative id"),
        ({"input_ids": [1, 9999], "loss_mask": [1, 1]}, "`input_ids` holds 9999, but the tokenizer ends at"),
        ({"input_ids": [1, 2**70], "loss_mask": [1, 1]}, "`input_ids` holds 1180591620717411303424"),
        ({"input_ids": [1, 2], "loss_mask": [2, 1]}, "`loss_mask` holds something other than 0 and 1"),
        ({"input_ids": [1, 2.5], "loss_mask": [1, 1]}, "`input_ids` is not a list of integers"),
        ({"input_ids": [1, 2], "loss_mask": [1, 1], "turn_ids": [0, -1]}, "`turn_ids` is not in 0..1"),
        ({"input_ids": [1, 2], "loss_mask": [1, 1], "turn_ids": [0, 2**40]}, "`turn_ids` is not in 0..1"),
        ({"input_ids": [1, 2]}, "`loss_mask` is missing"),
    ],
)
def test_bad_tokens(row, reason, prepare, tokenizer, write_jsonl):
    good = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}
    with pytest.raises(BadRowsError) as error:
        prepare(write_jsonl([good, row]), tokenizer)
    assert "line 2: " + reason in str(error.value)


def test_broken_text_encoding_costs_one_line(prepare, tokenizer, tmp_path):
    good = json.dumps(row_of("one")).encode()
    (tmp_path / "rows.jsonl").write_bytes(
        b"\xef\xbb\xbf" + good + b"\r\n" + good.replace(b"one", b"\xff\xfe") + b"\n" + good
    )
    with pytest.raises(BadRowsError, match="line 2: `line` is broken JSON"):
        prepare(str(tmp_path / "rows.jsonl"), tokenizer)
    result = prepare(str(tmp_path / "rows.jsonl"), tokenizer, on_bad_row="skip")
    assert texts(result.train, tokenizer) == ["one", "one"]


def test_every_bad_row_of_every_file_is_counted(prepare, tokenizer, write_jsonl):
    names = [write_jsonl([row_of("one")] + ["{"] * 15, "a.jsonl"), write_jsonl(["{"] * 15, "b.jsonl")]
    with pytest.raises(BadRowsError, match="30 rows can't be used") as error:
        prepare(names, tokenizer)
    assert len(error.value.rows) == 30 and str(error.value).endswith("and 10 more")
    with pytest.raises(ValueError, match="zero tokens are supervised in 15 rows"):
        prepare(names[1], tokenizer, on_bad_row="skip")


def test_arrow_rows_are_checked_too(prepare, tokenizer, tmp_path):
    """Arrow gives all messages the same keys: those that are null were never there."""
    features = Features(
        {"messages": List({"role": Value("string"), "content": Value("string"), "name": Value("string")})}
    )
    rows = [row_of("one"), {"messages": []}, row_of(None), {"messages": None}]
    Dataset.from_list(rows, features=features).to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(BadRowsError) as error:
        prepare(str(tmp_path / "rows.parquet"), tokenizer)
    assert [entry.split(", ")[-1] for entry in error.value.rows] == [
        "row 2: `messages` is empty",
        "row 3: `messages[1].content` is missing",
        "row 4: `messages` is missing; the row has nothing",
    ]


def test_unknown_columns_and_empty_data(prepare, tokenizer, tmp_path):
    with pytest.raises(ValueError, match="in-memory dataset 1: none of the columns question, answer"):
        prepare(Dataset.from_dict({"question": ["Hello"], "answer": ["one"]}), tokenizer)
    (tmp_path / "empty.jsonl").touch()
    for dataset in (str(tmp_path / "empty.jsonl"), Dataset.from_dict({"messages": []})):
        with pytest.raises(ValueError, match="`dataset`: no rows in"):
            prepare(dataset, tokenizer)
    with pytest.raises(ValueError, match="`dataset` is empty"):
        prepare_datasets(DataArguments(), tokenizer)
    with pytest.raises(TypeError, match="`dataset` takes names"):
        prepare([{"train": 1}], tokenizer)


@pytest.mark.parametrize("seed", range(3))
def test_fuzzed_files_never_crash_and_never_lose_good_rows(seed, prepare, tokenizer, tmp_path):
    """Bytes of every second row are damaged; whatever it then holds, the rows between come out unchanged."""
    generator = random.Random(seed)
    lines, answers_expected = [], []
    for index in range(60):
        line = bytearray(json.dumps(row_of(f"one {index} ")), "utf-8")
        if index % 2:
            for _ in range(generator.randint(1, 6)):
                place = generator.randrange(len(line))
                line[place : place + generator.randint(0, 4)] = generator.randbytes(generator.randint(0, 4))
            line = line.replace(b"\n", b" ").replace(b"\r", b" ")
        else:
            answers_expected.append(f"one {index} ")
        lines.append(bytes(line))
    path = tmp_path / "fuzz.jsonl"
    path.write_bytes(b"\n".join(lines))
    result = prepare(str(path), tokenizer, on_bad_row="skip")
    found = texts(result.train, tokenizer)
    assert [answer for answer in found if answer in answers_expected] == answers_expected
    assert len(found) + len(result.reports["train"].errors) == 60
    assert all("line" in entry for entry in result.reports["train"].errors)

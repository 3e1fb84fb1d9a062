"""What becomes of an answer: reasoning, tool calls, cuts, and how `prepare` reads it."""

import json
from datetime import date

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import load_dataset

from draftsmith.commands.parsing import UsageError
from draftsmith.data import DataArguments, prepare_datasets
from draftsmith.data.formats import RowError
from draftsmith.generation.reasoning import AnswerReader, reasoning_key
from draftsmith.generation.requests import Request
from tests.data.common import CHATML, QWEN3, answers, build_tokenizer, chat


HARMONY = "{% if m.thinking %}{{ m.thinking }}{% endif %}{{ reasoning_effort }}"
THINK_FIRST = (  # the generation prompt begins the reasoning
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
R1 = (  # drops the reasoning from messages, and knows no key for it
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content.split('</think>') | last }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
TOOLS = CHATML.replace(
    "{{ message.content }}",
    "{{ message.content }}{% for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}{% endfor %}",
)
CALL = {"id": "mine", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def flags(server, *others):
    return ["--engine", "openai", "--base_url", server[0], *others]


def rows_of(tmp_path):
    rows = load_dataset(str(tmp_path / "out"), split="train").to_list()
    return [[{k: v for k, v in message.items() if v is not None} for message in row["messages"]] for row in rows]


def prepared(tmp_path, template, **options):
    tokenizer = build_tokenizer(template)
    arguments = DataArguments(dataset=[str(tmp_path / "out")], cache_dir=str(tmp_path / "cache"), **options)
    return [answers(row, tokenizer) for row in prepare_datasets(arguments, tokenizer).train]


@pytest.fixture
def retemplate(target_dir):
    """Give the target another template, for one test."""
    before = build_tokenizer(CHATML)
    yield lambda template: build_tokenizer(template).save_pretrained(target_dir)
    before.save_pretrained(target_dir)


@pytest.mark.parametrize(
    ("template", "key"),
    [
        (QWEN3, "reasoning_content"), (CHATML, None), (HARMONY, "thinking"),
        ("{{ message['reasoning'] }}", "reasoning"), ("{{ enable_thinking }} thinking reasoning", None),
    ],
)  # fmt: skip
def test_reasoning_goes_where_the_template_reads_it(template, key):
    assert reasoning_key(template) == key


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_a_servers_reasoning_is_kept_and_rendered(field, run, server, tmp_path, retemplate):
    retemplate(QWEN3)
    server[1].message = {field: "Hello there"}
    run([{"turns": ["one", "two"]}], *flags(server))
    (messages,) = rows_of(tmp_path)
    assert [message.get("reasoning_content") for message in messages] == [None, "Hello there"] * 2
    assert server[1].requests[1]["messages"][1]["reasoning_content"] == "Hello there"
    (first,), (second,) = prepared(tmp_path, QWEN3)  # a template that rewrites history: a row per turn
    assert first.startswith("<think>\nHello there\n</think>\n\nIt is 1") and second.startswith("<think>\nHello there")


def test_reasoning_that_no_template_reads_ends_the_run(run, server):
    server[1].message = {"reasoning": "Hello there"}
    with pytest.raises(UsageError, match="start the server without `--reasoning-parser`"):
        run([{"prompt": "one"}], *flags(server))


@pytest.mark.parametrize(
    ("template", "kwargs", "written", "message"),
    [
        (
            QWEN3,
            {},
            "<think>\nLet me see.\n</think>\n\nHello",
            {"reasoning_content": "Let me see.", "content": "Hello"},
        ),
        (QWEN3, {"enable_thinking": False}, "Hello", {"content": "Hello"}),
        (THINK_FIRST, {}, "Let me see.\n</think>\n\nHello", {"reasoning_content": "Let me see.", "content": "Hello"}),
        (CHATML, {}, "<think>\nLet me see.\n</think>\n\nHello", None),
        (CHATML, {}, "  Hello there \n", {"content": "  Hello there \n"}),
        (QWEN3, {"enable_thinking": False}, "a</think>b</think>", {"content": "a</think>b</think>"}),
    ],
)
def test_raw_text_is_split_only_if_the_template_renders_it_as_it_was(template, kwargs, written, message):
    reader = AnswerReader(build_tokenizer(template), kwargs)
    request = Request("k-0", 0, chat("What is it?"), None, {})
    expected = {"role": "assistant", **(message or {"content": written})}
    assert reader.message(request, reader.prompt(request), written, finished=True) == expected


def test_what_the_template_renders_otherwise_is_refused():
    reader = AnswerReader(build_tokenizer(QWEN3), {})
    request = Request("k-0", 0, chat("What is it?"), None, {})
    with pytest.raises(RowError, match=r"`messages\[1\]` was answered with 'Hello'.*--engine openai"):
        reader.message(request, reader.prompt(request), "Hello", finished=True)  # without the thought it adds


def test_a_recorded_call_is_known_by_its_text():
    reader = AnswerReader(build_tokenizer(TOOLS), {})
    recorded = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    request = Request("k-0", 0, chat("Add."), None, {}, recorded)
    prompt = reader.prompt(request)
    assert reader.message(request, prompt, '<call>{"name": "add", "arguments": {"a": 1}}', finished=True) == recorded
    other = reader.message(request, prompt, '<call>{"name": "add", "arguments": {"a": 2}}', finished=True)
    assert "tool_calls" not in other


@pytest.mark.parametrize(("arguments", "number"), [('{"a": 1}', 2), ('{"a": 2}', 1)])
def test_tool_results_are_told_to_a_target_that_made_the_call(arguments, number, run, server, tmp_path, retemplate):
    retemplate(TOOLS)
    row = {
        "messages": [
            *chat("Add."), {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "mine", "content": "2"}, {"role": "assistant", "content": "Two."},
        ],
        "tools": [{"type": "function", "function": {"name": "add"}}],
    }  # fmt: skip
    call = {"id": "theirs", "type": "function", "function": {"name": "add", "arguments": arguments}}
    server[1].message = {"content": None, "tool_calls": [call]}
    counts = run([row], *flags(server))
    assert len(server[1].requests) == number == counts.answers and counts.shortened == 2 - number
    (messages,) = rows_of(tmp_path)
    (found,) = json.loads(messages[1]["tool_calls"])
    assert found["function"]["arguments"] == json.loads(arguments) and found["id"] == (
        "mine" if number == 2 else "theirs"
    )
    if number == 2:
        sent = server[1].requests[1]["messages"]
        assert sent[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}' and sent[2]["tool_call_id"] == "mine"
    (supervised,) = prepared(tmp_path, TOOLS)  # JSON text in a column is read as what it holds
    assert len(supervised) == number and supervised[0].startswith('<call>{"name": "add", "arguments": {"a": ')


@pytest.mark.parametrize("reason", ["length", "abort", None])
def test_cut_answers_are_dropped_with_what_follows(reason, run, server, tmp_path):
    cut = {"choices": [{"message": {"content": "It is"}, "finish_reason": reason}]}
    server[1].faults = {"one": [cut]}
    counts = run([{"turns": ["one", "two"]}, {"prompt": "x"}], *flags(server))
    assert (counts.rows, counts.written, counts.cut) == (2, 1, 1) and len(server[1].requests) == 2
    assert [messages[0]["content"] for messages in rows_of(tmp_path)] == ["x"]


def test_a_run_that_leaves_nothing_to_train_on_fails(run, server, tmp_path):
    server[1].finish_reason = "length"
    for _ in range(2):  # the second time without a request
        with pytest.raises(UsageError, match=r"of 2 conversations none is left .* 2 were cut at `max_new_tokens`"):
            run([{"turns": ["one", "two"]}, {"prompt": "x"}], *flags(server))
    assert len(server[1].requests) == 2 and not (tmp_path / "out" / "train.parquet").exists()


def test_answers_that_were_cut_are_dropped_or_kept_later_without_a_request(run, server, tmp_path):
    server[1].finish_reason = "length"
    rows = [{"turns": ["one", "two"]}, {"prompt": "x"}]
    with pytest.raises(UsageError, match="by the same command with `cut_answers=keep`, which asks nothing again"):
        run(rows, *flags(server))
    counts = run(rows, *flags(server), "--cut_answers", "keep")
    assert (counts.written, counts.cut) == (2, 2) and len(server[1].requests) == 2
    kept = rows_of(tmp_path)
    assert run(rows, *flags(server), "--cut_answers", "keep") is None
    with pytest.raises(UsageError, match="none is left"):
        run(rows, *flags(server), "--cut_answers", "drop")
    assert run(rows, *flags(server), "--cut_answers", "keep").written == 2 and rows_of(tmp_path) == kept
    assert len(server[1].requests) == 2
    (tmp_path / "out" / ".journal.jsonl").unlink()
    with pytest.raises(UsageError, match="`cut_answers` was 'keep' and is 'drop'. Go on"):
        run(rows, *flags(server), "--cut_answers", "drop")


def test_a_finished_run_without_cut_answers_is_the_same_with_any(run, server, tmp_path):
    run([{"prompt": "x"}], *flags(server))
    assert not (tmp_path / "out" / ".journal.jsonl").exists()
    assert run([{"prompt": "x"}], *flags(server), "--cut_answers", "keep") is None


@pytest.mark.parametrize(("cut", "says_so"), [(5, True), (4, False)])
def test_a_run_of_mostly_cut_answers_says_so_early(cut, says_so, run, server, monkeypatch, caplog):
    monkeypatch.setattr("draftsmith.commands.generate.EARLY", 8)
    length = {"choices": [{"message": {"content": "It is"}, "finish_reason": "length"}]}
    server[1].faults = {str(number): [length] for number in range(cut)}
    run([{"prompt": str(number)} for number in range(8)], *flags(server))
    assert ("5 of the first 8 conversations were cut at `max_new_tokens` 2048" in caplog.text) == says_so


@pytest.mark.parametrize("given", ["run", "row"])
def test_training_sees_the_prompts_that_were_answered(given, run, server, tmp_path, retemplate):
    retemplate(QWEN3)
    kwargs = {"enable_thinking": False}
    row = {"prompt": "x"} | ({"chat_template_kwargs": kwargs} if given == "row" else {})
    run([row], *flags(server), *(["--chat_template_kwargs", json.dumps(kwargs)] if given == "run" else []))
    assert prepared(tmp_path, QWEN3) == [["It is 1, x<|im_end|>"]]  # the empty thought is the prompt's


@pytest.mark.parametrize(
    ("template", "content", "finish_reason", "expected"),
    [
        (QWEN3, "<think>\nit is what", "length", None),
        (QWEN3, "<think>\nit is what", "stop", "does not render as it was written"),
        (QWEN3, "<think>\nHm\n</think>\n\nIt is", "stop", {"reasoning_content": "Hm", "content": "It is"}),
        (QWEN3, "<think>\nHm\n</think>\n\nIt is", "length", {"reasoning_content": "Hm", "content": "It is"}),
        (THINK_FIRST, "it is what", "length", None),
        (THINK_FIRST, "it is what", "stop", "can't be located"),
        (R1, "it is what", "length", None),
        (R1, "it is what", "stop", "can't be located"),
        (R1, "Hm\n</think>\n\nIt is", "stop", {"content": "Hm\n</think>\n\nIt is"}),
        (CHATML, "use <think> here", "stop", {"content": "use <think> here"}),
        (CHATML, " \n ", "length", None),
    ],
)
def test_a_servers_text_is_kept_only_as_the_template_renders_it(
    template, content, finish_reason, expected, run, server, tmp_path, retemplate
):
    retemplate(template)
    answer = {"choices": [{"message": {"content": content}, "finish_reason": finish_reason}]}
    server[1].faults = {"x": [answer]}
    rows = [{"prompt": "x"}] + [{"prompt": "ok", "chat_template_kwargs": {"enable_thinking": False}}]
    server[1].message = {"content": "Hm\n</think>\n\nok"} if template in (THINK_FIRST, R1) else {}
    if isinstance(expected, str):
        with pytest.raises(UsageError, match=rf"1 row got no answer(.|\n)*line 1: `messages\[1\]` .*{expected}"):
            run(rows, *flags(server))
        return
    counts = run(rows, *flags(server), "--cut_answers", "keep")
    assert (counts.written, counts.cut) == (1 if expected is None else 2, int(finish_reason == "length"))
    if expected:
        assert rows_of(tmp_path)[0][1] == {"role": "assistant", **expected}
    assert len(prepared(tmp_path, template)) == counts.written


@pytest.mark.parametrize(
    ("message", "finish_reason", "reason"),
    [
        ({"content": None}, "stop", "nothing"),
        ({"content": ""}, "stop", "nothing"),
        ({"content": " \n"}, "stop", "nothing"),
        ({"content": None, "refusal": "No."}, "stop", "refused by the server"),
        ({"content": "It"}, "content_filter", "refused by a filter"),
        ({"content": ["It", "is"]}, "stop", r"content\[0\]` is str, but only text"),
        ({"content": 7}, "stop", "content` is int"),
        ({"content": "a\ud800b"}, "stop", "half a character"),
        ({"content": "It", "reasoning": {"a": 1}}, "stop", "reasoning` is dict, not a string"),
        ({"content": "It"}, ["stop"], "`finish_reason` that is a list"),
        ({"content": "It", "tool_calls": "x"}, "tool_calls", "tool_calls` is not JSON"),
        ({"content": "It", "tool_calls": {"a": 1}}, "tool_calls", "tool_calls` is not a list"),
        ({"content": "It", "tool_calls": [None]}, "tool_calls", "tool_calls` is not a list"),
        ({"tool_calls": [{"function": {"name": "add", "arguments": '{"a": '}}]}, "tool_calls", "is not JSON"),
        ({"tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}, "tool_calls", "not rendered in full"),
    ],
)  # fmt: skip
def test_what_no_one_can_train_on_is_named_and_left_out(message, finish_reason, reason, run, server, tmp_path):
    answer = {"choices": [{"message": {"role": "assistant", **message}, "finish_reason": finish_reason}]}
    server[1].faults = {"bad": [answer] * 2}
    rows = [{"turns": ["bad", "and then?"]}, {"prompt": "x"}]
    with pytest.raises(UsageError, match=rf"1 row got no answer(.|\n)*line 1: `messages\[1\].*{reason}"):
        run(rows, *flags(server))
    counts = run(rows, *flags(server), "--on_bad_row", "skip")
    assert (counts.written, counts.unanswered, counts.cut) == (1, 1, 0)
    assert not any(len(request["messages"]) > 1 for request in server[1].requests)
    assert prepared(tmp_path, CHATML) == [["It is 1, x<|im_end|>"]]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "x", "tools": [{"type": "function", "function": {"name": "\ud800"}}]},
        {"prompt": "x", "chat_template_kwargs": {"a": "\ud800"}},
    ],
)
def test_half_characters_outside_the_messages_are_refused_too(row, run, server):
    with pytest.raises(UsageError, match=r"line 2: `(tools|chat_template_kwargs)` holds .*half a character"):
        run([{"prompt": "a"}, row], *flags(server))
    assert not server[1].requests


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"messages": [{"role": "user", "content": "x", "name": b"x"}]}, "messages"),
        ({"prompt": "x", "tools": [{"type": "function", "function": {"since": date(2024, 1, 1)}}]}, "tools"),
        ({"prompt": "x", "chat_template_kwargs": {"date": date(2024, 1, 1)}}, "chat_template_kwargs"),
    ],
)
def test_values_of_parquet_that_json_cannot_hold_cost_their_row(row, name, run, server, tmp_path):
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    with pytest.raises(UsageError, match=f"rows.parquet, row 1: `{name}` can't be written as JSON: .* not JSON seri"):
        run(str(tmp_path / "rows.parquet"), *flags(server))
    assert not server[1].requests


def test_a_cut_answer_that_is_kept_does_not_end_in_training(run, server, tmp_path):
    server[1].finish_reason = "length"
    counts = run([{"turns": ["one", "two"]}, {"prompt": "x"}], *flags(server, "--cut_answers", "keep"))
    assert (counts.written, counts.cut, counts.shortened) == (2, 2, 1)
    rows = load_dataset(str(tmp_path / "out"), split="train")
    assert list(rows["finished"]) == [False, False] and [len(messages) for messages in rows["messages"]] == [2, 2]
    assert prepared(tmp_path, CHATML) == [["It is 1, eno"], ["It is 1, x"]]
    marked = CHATML.replace("{{ message.content }}<|im_end|>\n", "{% generation %}{{ message.content }}<|im_end|>\n"
                            "{% endgeneration %}")  # fmt: skip
    assert prepared(tmp_path, marked) == [["It is 1, eno"], ["It is 1, x"]]


def test_only_the_last_answer_of_a_cut_conversation_stays_open(write_prompts, tmp_path):
    rows = [{"messages": chat("a", "one", "b", " two "), "finished": cut} for cut in (False, True)]
    rows += [{"messages": chat("a", "one", "b", ""), "finished": False}]
    name = write_prompts(rows)
    for template, open_, closed in ((CHATML, " two", " two <|im_end|>"), (QWEN3, None, None)):
        tokenizer = build_tokenizer(template)
        arguments = DataArguments(dataset=[name], cache_dir=str(tmp_path / "cache"), on_bad_row="skip")
        data = prepare_datasets(arguments, tokenizer)
        (error,) = data.reports["train"].errors
        assert "line 3: `messages[3].content` was cut off" in error
        found = [answers(row, tokenizer) for row in data.train]
        if open_:
            assert found == [["one<|im_end|>", open_], ["one<|im_end|>", closed]]
        else:  # a row per turn
            assert [row[0].split("</think>\n\n")[1] for row in found] == [
                "one<|im_end|>", " two", "one<|im_end|>", " two <|im_end|>",
            ]  # fmt: skip


def test_a_cut_inside_the_reasoning_leaves_no_message(run, server, tmp_path, retemplate):
    retemplate(QWEN3)
    server[1].message, server[1].finish_reason = {"reasoning": "Hm", "content": None}, "length"
    with pytest.raises(UsageError, match=r"none is left to train on: 0 got no answer, 1 were cut"):
        run([{"prompt": "x"}], *flags(server, "--cut_answers", "keep"))

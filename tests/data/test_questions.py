"""What rows ask of a target."""

import pytest

from draftsmith.data.formats import RowError
from draftsmith.data.loading import load_sources
from draftsmith.data.prompts import read_prompts
from draftsmith.data.questions import QuestionSet, read_questions
from tests.data.common import chat


SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
RESULT = {"role": "tool", "content": "2"}


def user(text):
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": chat("one", "1", "two", "2")}, [[user("one")], [user("two")]]),
        ({"messages": [SYSTEM, *chat("one", "1", "two")]}, [[SYSTEM, user("one")], [user("two")]]),
        ({"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "1"}]}, [[user("one")]]),
        ({"prompt": "one", "completion": "1"}, [[user("one")]]),
        ({"prompt": chat("one", "1", "two"), "completion": chat("x", "2")[1:]}, [[user("one")], [user("two")]]),
        ({"turns": ["one", "two"]}, [[user("one")], [user("two")]]),
        ({"prompt": ["one", "two"], "category": "a"}, [[user("one")], [user("two")]]),
        ({"messages": [user("one"), CALL, RESULT, *chat("x", "3")[1:]]}, [[user("one")], [RESULT]]),
        (
            {"messages": [{"role": "assistant", "content": "Hi"}, *chat("one", "1")]},  # nobody asked for the first
            [[{"role": "assistant", "content": "Hi"}, user("one")]],
        ),
        ({"messages": [{**user("one"), "id": 3, "name": "Ann"}]}, [[{**user("one"), "name": "Ann"}]]),
    ],
)
def test_every_format_asks_for_each_of_its_answers(row, said):
    assert [turn.said for turn in read_questions(row).turns] == said


def test_a_recorded_call_is_known_and_other_answers_are_not():
    turns = read_questions({"messages": [user("one"), CALL, RESULT, *chat("x", "3", "more", "4")[1:]]}).turns
    assert [turn.recorded for turn in turns] == [CALL, None, None]
    assert [turn.brings_tool_results for turn in turns] == [False, True, False]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"other": 1}, "`prompt` is missing, `messages`, `conversations`, `turns` too; the row has other"),
        ({"messages": []}, "`messages` is empty"),
        ({"messages": chat("Hi", 3)}, r"`messages\[1\].content` is int, not a string"),
        ({"messages": [SYSTEM]}, "`messages` asks nothing"),
        ({"messages": [*chat("one", "1"), SYSTEM, *chat("x", "2")[1:]]}, "`messages` asks nothing"),
        ({"turns": ["one", None]}, r"`turns\[0\]` is str, not an object"),
        ({"prompt": "half \ud83d"}, "half a character"),
        ({"prompt": "a", "tools": "{"}, "`tools` is not JSON"),
        ({"prompt": "a", "image": "x.png"}, "`image` holds media"),
    ],
)
def test_rows_that_ask_nothing_are_refused_by_field(row, message):
    with pytest.raises(RowError, match=message):
        read_questions(row)


def test_bad_rows_are_named_and_equal_rows_are_kept_apart(write_jsonl):
    name = write_jsonl([{"prompt": "a"}, "{", "", {"prompt": "b"}, {"turns": ["a"]}, {"x": 1}])
    questions = QuestionSet(load_sources([name]))
    assert len(questions) == 3 and [questions.read(i).turns[0].said for i in range(3)] == [
        [user("a")], [user("b")], [user("a")],
    ]  # fmt: skip
    first, _, again = questions.keys
    assert first.endswith("-0") and again == first[:-1] + "1"
    assert [error.split(": ")[0] for error in questions.errors] == [f"{name}, line 2", f"{name}, line 6"]
    assert questions.locate(1) == f"{name}, line 4"


def test_what_decides_an_answer_decides_the_key():
    rows = [
        {"prompt": "a"}, {"prompt": "b"}, {"turns": ["a", "b"]}, {"prompt": "a", "tools": [{"name": "x"}]},
        {"prompt": "a", "chat_template_kwargs": {"enable_thinking": False}}, {"messages": [SYSTEM, user("a")]},
    ]  # fmt: skip
    assert len({read_questions(row).digest() for row in rows}) == len(rows)
    assert read_questions({"messages": chat("a", "1")}).digest() == read_questions({"prompt": "a"}).digest()


def test_evaluation_reads_the_first_of_several_turns(write_jsonl):
    (prompt,) = read_prompts([write_jsonl([{"turns": ["one", "two"], "category": "c"}])])
    assert (prompt.content, prompt.category) == ([user("one")], "c")

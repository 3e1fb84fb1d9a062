"""Rendering and masks: what is supervised is exactly what the assistant wrote, in contexts exactly as served."""

import pytest
from datasets import Dataset

from draftsmith.data.prepare import BadRowsError
from tests.data.common import CHATML, QWEN3, TEMPLATES, answers, build_tokenizer, chat


def in_memory(*conversations):
    return Dataset.from_list([{"messages": messages} for messages in conversations])


def assert_consistent(row):
    assert row["length"] == len(row["input_ids"]) == len(row["loss_mask"]) == len(row["turn_ids"]) > 0
    assert [int(turn >= 0) for turn in row["turn_ids"]] == row["loss_mask"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_supervised_tokens_decode_to_the_answers_and_follow_the_served_prompt(name, prepare):
    """Case: a template with or without `{% generation %}` markers, two turns."""
    template, terminator = TEMPLATES[name]
    tokenizer = build_tokenizer(template)
    messages = chat("Hello", "It is what it is.", "What?", "one two")
    rows = list(prepare(in_memory(messages), tokenizer).train)
    expected = [f"{message['content']}{terminator}" for message in messages[1::2]]
    found = [answer for row in rows for answer in answers(row, tokenizer)]
    assert [answer.lstrip(" ") for answer in found] == expected
    prompts = [
        tokenizer.apply_chat_template(messages[:index], add_generation_prompt=True, return_dict=False)
        for index in (1, 3)
    ]
    for row in rows:
        assert_consistent(row)
    for prompt, row in zip(prompts, rows if len(rows) == 2 else rows * 2, strict=True):
        assert row["input_ids"][: len(prompt)] == prompt
        assert row["loss_mask"][len(prompt) - 1 : len(prompt) + 2] == [0, 1, 1]


@pytest.mark.parametrize("name", ["chatml", "chatml_marked"])
@pytest.mark.parametrize(
    "contents",
    [
        ["Hello", "  two leading spaces", "What", " one and a tail  "],
        ["it is", "it is", "it is", "is it"],
        ["Hello", "<|im_start|>", "Hello", "<think>\n</think> two"],
        ["Hello", "ünïcødé 你好 🙂", "assistant\nassistant", "user\nassistant\n"],
        ["Hello", "x", "Hello", "Hello\n"],
    ],
)
def test_leading_spaces_and_repeated_substrings(name, contents, prepare):
    """Case: decoding the supervised tokens gives exactly the assistant strings plus terminator."""
    tokenizer = build_tokenizer(TEMPLATES[name][0])
    (row,) = prepare(in_memory(chat(*contents)), tokenizer).train
    assert answers(row, tokenizer) == [f"{content}<|im_end|>" for content in contents[1::2]]


@pytest.mark.parametrize("name", ["chatml", "chatml_marked"])
def test_answer_that_merges_with_the_prompt_is_encoded_as_served(name, prepare):
    """Two line ends are one token, but a server has already sent the first: each row keeps its prompt's own ids."""
    tokenizer = build_tokenizer(TEMPLATES[name][0])
    assert len(tokenizer.encode("\n\n")) == 1
    messages = chat("Hello", "\n\none", "What", "two")
    rows = list(prepare(in_memory(messages), tokenizer).train)
    assert [answers(row, tokenizer) for row in rows] == [["\n\none<|im_end|>"], ["two<|im_end|>"]]
    for index, row in zip((1, 3), rows, strict=True):
        prompt = tokenizer.apply_chat_template(messages[:index], add_generation_prompt=True, return_dict=False)
        assert row["input_ids"][: len(prompt)] == prompt


def test_template_that_rewrites_history_gives_one_row_per_turn(prepare):
    """Case: drops old reasoning; every row is rendered as serving saw it, and only its last turn is supervised."""
    tokenizer = build_tokenizer(QWEN3)
    messages = chat("Hello", "one", "What", "two")
    messages[1]["reasoning_content"] = "it is"
    messages[3]["reasoning_content"] = "again"
    first, second = prepare(in_memory(messages), tokenizer).train
    assert answers(first, tokenizer) == ["<think>\nit is\n</think>\n\none<|im_end|>"]
    assert answers(second, tokenizer) == ["<think>\nagain\n</think>\n\ntwo<|im_end|>"]
    assert "it is" not in tokenizer.decode(second["input_ids"])


def test_template_arguments_reach_rendering(prepare):
    """Case: thinking on/off; the rendered ids begin with the ids that serving would send."""
    tokenizer = build_tokenizer(QWEN3)
    messages = chat("Hello", "one", "What", "two")
    off, on = {"enable_thinking": False}, {}
    rows = {}
    for name, kwargs in {"off": off, "on": on}.items():
        rows[name] = list(prepare(in_memory(messages), tokenizer, chat_template_kwargs=kwargs).train)
        for index, row in zip((1, 3), rows[name], strict=True):
            prompt = tokenizer.apply_chat_template(
                messages[:index], add_generation_prompt=True, return_dict=False, **kwargs
            )
            assert row["input_ids"][: len(prompt)] == prompt and row["loss_mask"][len(prompt)] == 1
    assert answers(rows["off"][0], tokenizer) == ["one<|im_end|>"]
    assert answers(rows["on"][0], tokenizer) == ["<think>\n\n</think>\n\none<|im_end|>"]


def test_template_arguments_of_a_row_win(prepare, tokenizer):
    template = CHATML.replace("assistant\n{% endif %}", "assistant\n{{ 'A' if mood == 'a' else '' }}{% endif %}")
    rows = [{"messages": chat("Hello", "A is it"), "chat_template_kwargs": {"mood": mood}} for mood in ("a", "b")]
    first, second = prepare(
        Dataset.from_list(rows), tokenizer, chat_template=template, chat_template_kwargs={"mood": "b"}
    ).train
    assert answers(first, tokenizer) == [" is it<|im_end|>"]  # a server prefills the A
    assert answers(second, tokenizer) == ["A is it<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (QWEN3.replace("<think>\n\n</think>", "<think>off</think>"), chat("Hello", "one"), "generation prompt"),
        (CHATML.replace("message.content", "message.content | upper"), chat("Hello", "one"), "not rendered in full"),
        (CHATML, chat("Hello", "one", reasoning_content="it is"), "reasoning_content` is not rendered in full"),
        (CHATML.partition("{% if add")[0], chat("Hello", "one"), "no generation prompt"),
        (CHATML + "{{ raise_exception('roles must alternate') }}", chat("Hello", "one"), "roles must alternate"),
        (
            CHATML.replace("<|im_end|>", "<|im_end|>{% generation %}{% endgeneration %}", 1),
            chat("Hello", "one"),
            "generation markers",
        ),
    ],
)  # fmt: skip
def test_template_without_a_usable_mask_is_an_error_that_names_it(template, messages, reason, prepare):
    """Case: a correct fallback mask, or an error naming the template; never an all-zero mask silently."""
    tokenizer = build_tokenizer(template)
    tokenizer.name_or_path = "some/model"
    with pytest.raises(BadRowsError, match=reason) as error:
        prepare(in_memory(messages), tokenizer, chat_template_kwargs={"enable_thinking": False})
    assert "the chat template of some/model" in str(error.value)


def test_no_chat_template(prepare):
    with pytest.raises(ValueError, match="`tokenizer`.*no chat template.*`chat_template`"):
        prepare(in_memory(chat("Hello", "one")), build_tokenizer())


def test_chat_template_from_a_file(prepare, tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text(CHATML)
    tokenizer = build_tokenizer()
    (row,) = prepare(in_memory(chat("Hello", "one")), tokenizer, chat_template=str(path)).train
    assert answers(row, tokenizer) == ["one<|im_end|>"]


def test_touching_turns_have_different_ids(prepare):
    """Case: two touching assistant turns, here without even a header between them."""
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer = build_tokenizer(template)
    messages = chat("Hello ", "one") + [{"role": "assistant", "content": " two"}]
    (row,) = prepare(in_memory(messages), tokenizer).train
    assert answers(row, tokenizer) == ["one", " two"]
    first = row["turn_ids"].index(0)
    assert -1 not in row["turn_ids"][first:]


def test_opening_answer_is_context_and_closing_question_is_left_out(prepare, tokenizer):
    messages = [{"role": "assistant", "content": "one"}, *chat("Hello", "two", "What")]
    (row,) = prepare(in_memory(messages), tokenizer).train
    assert answers(row, tokenizer) == ["two<|im_end|>"]
    assert "one" in tokenizer.decode(row["input_ids"]) and "What" not in tokenizer.decode(row["input_ids"])


def test_tools_reach_the_template(prepare):
    tokenizer = build_tokenizer("{% if tools %}{{ tools[0].name }}{% endif %}" + CHATML)
    rows = [{"messages": chat("Hello", "one"), "tools": '[{"name": "again"}]'}]
    (row,) = prepare(Dataset.from_list(rows), tokenizer).train
    assert tokenizer.decode(row["input_ids"]).startswith("again<|im_start|>")


@pytest.mark.parametrize("name", ["chatml", "chatml_marked"])
def test_max_length_inside_an_answer(name, prepare):
    """Case: the kept answer tokens stay supervised; ids and mask have equal length with and without markers."""
    tokenizer = build_tokenizer(TEMPLATES[name][0])
    messages = chat("Hello", "one two three", "What", "It is what it is, what it is.")
    (full,) = prepare(in_memory(messages), tokenizer).train
    last_answer = len(full["turn_ids"]) - 1 - full["turn_ids"][::-1].index(1)
    max_length = last_answer - 3
    result = prepare(in_memory(messages), tokenizer, max_length=max_length)
    (cut,) = result.train
    assert_consistent(cut)
    assert cut["length"] == max_length and cut["loss_mask"][-1] == 1
    for column in ("input_ids", "loss_mask", "turn_ids"):
        assert cut[column] == full[column][:max_length]
    assert result.reports["train"].truncated == 1


def test_slow_tokenizer_is_refused(prepare):
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = CHATML
    with pytest.raises(ValueError, match="ByT5Tokenizer.*fast tokenizer"):
        prepare(in_memory(chat("Hello", "one")), tokenizer)


def test_generation_markers_narrow_the_answers(prepare):
    """What the template's author left outside the markers is not supervised, here the terminator."""
    template, _ = TEMPLATES["chatml_marked"]
    tokenizer = build_tokenizer(template.replace("<|im_end|>\n{% endgeneration %}", "{% endgeneration %}<|im_end|>\n"))
    (row,) = prepare(in_memory(chat("Hello", " it is", "What", "one two")), tokenizer).train
    assert answers(row, tokenizer) == [" it is", "one two"]


def cut(tokenizer, prepare, content, question="Hello"):
    rows = [{"messages": chat(question, content), "finished": False}]
    (row,) = prepare(Dataset.from_list(rows), tokenizer).train
    return answers(row, tokenizer)


@pytest.mark.parametrize("name", ["chatml", "chatml_marked"])
@pytest.mark.parametrize(
    "content",
    [
        "\n\nHello there",
        "it is 你",
        "🙂",
        "im it",
        "|im_",
        "<|im_end",
        "it is\n",
        "is it is",
        "it<|im_end|>",
        "\n<|im_end|>",
    ],
)
def test_cut_answer_is_never_ended(name, content, prepare):
    """Not where its first token merges with the prompt, nor where its text is in what the template puts after it."""
    tokenizer = build_tokenizer(TEMPLATES[name][0])
    assert cut(tokenizer, prepare, content, question=content) == [content.rstrip()]


@pytest.mark.parametrize("content", ["🙂", "e\u202e", "你"])
@pytest.mark.parametrize("name", ["plain", "chatml_marked"])
def test_last_character_of_an_answer_may_take_several_tokens(name, content, prepare):
    """Where no control token follows."""
    template = TEMPLATES[name][0].replace("<|im_end|>\n{% endgeneration %}", "{% endgeneration %}<|im_end|>\n")
    tokenizer = build_tokenizer(template)
    (row,) = prepare(in_memory(chat("Hello", content, "What", content)), tokenizer).train
    assert answers(row, tokenizer) == [content, content]


@pytest.mark.parametrize("content", ["e <", "en", "d|", "id>", "eot", "it is"])
def test_cut_answer_after_a_header_that_it_merges_with(content, prepare):
    tokenizer = build_tokenizer(TEMPLATES["llama3"][0])
    assert cut(tokenizer, prepare, content) == [content]


def test_cut_answer_that_the_template_renders_otherwise(prepare):
    for template in (
        CHATML.replace("message.content", "message.content | upper"),
        CHATML.replace("{{ message.content }}", "{{ message.content + message.content }}"),
    ):
        with pytest.raises(BadRowsError, match="content` is not rendered (once and as it is|in full)"):
            cut(build_tokenizer(template), prepare, "it is")


def test_markers_hold_where_the_answer_merges_with_the_prompt(prepare):
    """Case: what is outside the markers is not supervised, in a row whose prompt keeps its own ids, neither."""
    template = CHATML.replace(
        "{{ message.content }}<|im_end|>",
        "{% if message.role == 'assistant' %}{{ message.content[:6] }}{% generation %}{{ message.content[6:] }}"
        "{% endgeneration %}{% else %}{{ message.content }}{% endif %}<|im_end|>",
    )
    tokenizer = build_tokenizer(template)
    (row,) = prepare(in_memory(chat("Hello", "\n\none two")), tokenizer).train
    assert answers(row, tokenizer) == [" two"]
    assert cut(tokenizer, prepare, "\n\none two") == answers(row, tokenizer)

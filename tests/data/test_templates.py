"""The chat templates of real model families: masks, prompts as served, tools, reasoning, and what must be refused.

The files in `templates/` render what the families' own templates render, written anew; `bos_token`, `eos_token` and
control tokens are theirs.
"""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from draftsmith.data.prepare import BadRowsError
from tests.data.common import answers, build_tokenizer, chat


@dataclass
class Family:
    bos: str
    eos: str
    controls: list[str]
    end: str  # what a server stops at, and what ends the last answer
    kwargs: dict = field(default_factory=dict)
    rewrites: bool = False  # the history of a conversation: each turn is a row of its own
    opening: str = ""  # what the model itself generates before its content

    def tokenizer(self, name):
        template = (Path(__file__).parent / "templates" / f"{name}.jinja").read_text()
        return build_tokenizer(
            template, self.eos, controls=[self.bos, self.eos, *self.controls], bos_token=self.bos, words=WORDS
        )


# how the tokenizers of Llama 3, Qwen and gpt-oss cut text: line ends stay with what is before them
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
QWEN3 = [*CHATML, "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
FAMILIES = {
    "chatml": Family("<|endoftext|>", "<|im_end|>", CHATML, "<|im_end|>"),
    "llama3": Family(
        "<|begin_of_text|>", "<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], "<|eot_id|>"
    ),
    "qwen3": Family(
        "<|endoftext|>", "<|im_end|>", QWEN3, "<|im_end|>", rewrites=True, opening="<think>\n\n</think>\n\n"
    ),
    "qwen3_not_thinking": Family(
        "<|endoftext|>", "<|im_end|>", QWEN3, "<|im_end|>", {"enable_thinking": False}, rewrites=True
    ),
    "gpt_oss": Family(
        "<|startoftext|>", "<|return|>",
        ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"], "<|return|>",
        rewrites=True, opening="<|channel|>final<|message|>",
    ),
    "gemma": Family("<bos>", "<eos>", ["<start_of_turn>", "<end_of_turn>"], "<end_of_turn>"),
    "mistral": Family(
        "<s>", "</s>",
        ["[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
         "[/TOOL_RESULTS]"], "</s>",
    ),
}  # fmt: skip
CONTENTS = ("Hello", "It is what it is: ünïcødé 🙂.\n\n1. one\n2. two", "What is it?", "one two\n\nthree")
SYSTEM = {"role": "system", "content": "What it is."}
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "Hello", "parameters": {}}}]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "look_up", "arguments": {"what": 'it "is" ü'}}}
REASONING = "Hello there.\n\nIt is what it is."


@pytest.fixture
def rows_of(prepare, write_jsonl):
    def rows(tokenizer, messages, tools=None, **kwargs):
        row = {"messages": messages} if tools is None else {"messages": messages, "tools": tools}
        return list(prepare(write_jsonl([row]), tokenizer, chat_template_kwargs=kwargs, max_length=None).train)

    return rows


def serve(tokenizer, messages, tools=None, **kwargs):
    """The ids that a server sends to the model."""
    return tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_dict=False, **kwargs
    )


def assert_served(rows, tokenizer, messages, tools=None, **kwargs):
    """Every supervised answer follows exactly the ids that a server would send before it."""
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    starts = [
        (row, position)
        for row in rows
        for position, turn in enumerate(row["turn_ids"])
        if turn >= 0 and turn != row["turn_ids"][position - 1]
    ]
    assert len(starts) == len(turns)
    for index, (row, start) in zip(turns, starts, strict=True):
        assert row["input_ids"][:start] == serve(tokenizer, messages[:index], tools, **kwargs)


@pytest.mark.parametrize("with_system", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_supervised_tokens_are_the_answers_after_served_prompts(name, with_system, rows_of):
    family = FAMILIES[name]
    tokenizer = family.tokenizer(name.removesuffix("_not_thinking"))
    messages = [*[SYSTEM] * with_system, *chat(*CONTENTS)]
    rows = rows_of(tokenizer, messages, **family.kwargs)
    expected = [f"{family.opening}{content}{family.end}" for content in CONTENTS[1::2]]
    assert [answer for row in rows for answer in answers(row, tokenizer)] == expected
    rewrites = family.rewrites or (name == "mistral" and with_system)  # the system prompt moves with the last question
    assert len(rows) == (2 if rewrites else 1)
    assert_served(rows, tokenizer, messages, **family.kwargs)


@pytest.mark.parametrize("name", ["llama3", "qwen3", "qwen3_not_thinking", "gpt_oss", "mistral"])
@pytest.mark.parametrize("as_text", [False, True])
def test_tool_calls_are_supervised_and_tool_results_are_not(name, as_text, rows_of):
    """Arguments as an object or as the JSON text of OpenAI's API, which servers decode before they render it."""
    family = FAMILIES[name]
    tokenizer = family.tokenizer(name.removesuffix("_not_thinking"))
    arguments = '{"what": "it \\"is\\" ü"}'
    call = {**CALL, "function": {"name": "look_up", "arguments": arguments}} if as_text else CALL
    after = [{"role": "tool", "content": "three", "tool_call_id": "abcdefghi"}, chat("", "one two")[1]]
    messages = [*chat("Hello"), {"role": "assistant", "content": "", "tool_calls": [call]}, *after]
    rows = rows_of(tokenizer, messages, TOOLS, **family.kwargs)
    calls = {
        "llama3": '{"name": "look_up", "parameters": ' + arguments + "}<|eot_id|>",
        "qwen3": '<tool_call>\n{"name": "look_up", "arguments": ' + arguments + "}\n</tool_call><|im_end|>",
        "gpt_oss": " to=functions.look_up<|channel|>commentary json<|message|>" + arguments + "<|call|>",
        "mistral": '[TOOL_CALLS][{"name": "look_up", "arguments": ' + arguments + ', "id": "abcdefghi"}]</s>',
    }
    expected = [
        family.opening * name.startswith("qwen") + calls[name.removesuffix("_not_thinking")],
        f"{family.opening}one two{family.end}",
    ]
    assert [answer for row in rows for answer in answers(row, tokenizer)] == expected
    served = [*messages[:1], {**messages[1], "tool_calls": [CALL]}, *after]
    assert_served(rows, tokenizer, served, TOOLS, **family.kwargs)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking", None])
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_reasoning_is_supervised_and_gone_from_history(name, key, rows_of):
    family = FAMILIES[name]
    tokenizer = family.tokenizer(name)
    messages = chat("Hello", "one", "What?", "two")
    for message in messages[1::2]:
        if key:
            message[key] = REASONING
        else:
            message["content"] = f"<think>\n{REASONING}\n</think>\n\n{message['content']}"
    if name == "gpt_oss" and not key:
        return  # harmony has no such tags
    rows = rows_of(tokenizer, messages)
    if name == "qwen3":
        expected = [f"<think>\n{REASONING}\n</think>\n\n{content}<|im_end|>" for content in ("one", "two")]
    else:
        expected = [
            f"<|channel|>analysis<|message|>{REASONING}<|end|>"
            f"<|start|>assistant<|channel|>final<|message|>{content}<|return|>"
            for content in ("one", "two")
        ]
    assert [answers(row, tokenizer) for row in rows] == [[answer] for answer in expected]
    assert_served(rows, tokenizer, messages)
    assert REASONING not in tokenizer.decode(rows[1]["input_ids"][: rows[1]["turn_ids"].index(0)])


def deepseek():
    controls = ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"]
    family = Family("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", controls, "<｜end▁of▁sentence｜>")
    return family.tokenizer("deepseek_r1")


@pytest.mark.parametrize("form", ["inline", "inline without the opening tag", "reasoning_content"])
def test_template_that_drops_all_reasoning_is_rendered_as_generated(form, rows_of):
    """DeepSeek-R1: no message is rendered as the model wrote it, but the served prompt and the answer are known."""
    tokenizer = deepseek()
    messages = [SYSTEM, *chat("Hello", "one", "What?", "two\n")]
    for message in messages[2::2]:
        if form == "reasoning_content":
            message["reasoning_content"] = REASONING
        else:
            opening = "<think>\n" if form == "inline" else ""
            message["content"] = f"{opening}{REASONING}\n</think>\n\n{message['content']}"
    rows = rows_of(tokenizer, messages)
    expected = [f"{REASONING}\n</think>\n\n{content}<｜end▁of▁sentence｜>" for content in ("one", "two\n")]
    assert [answers(row, tokenizer) for row in rows] == [[answer] for answer in expected]
    assert_served(rows, tokenizer, messages)
    assert tokenizer.decode(rows[1]["input_ids"]).count(REASONING) == 1


@pytest.mark.parametrize("content", ["e", "|", "end", "｜>", "User", "Assistant", "one"])
def test_generated_answer_whose_text_the_template_uses_too(content, rows_of, prepare, write_jsonl):
    """What stands after an answer is told by the template, not by looking for the answer's text."""
    tokenizer = deepseek()
    messages = chat("Hello", f"<think>\nit is\n</think>\n\n{content}")
    (row,) = rows_of(tokenizer, messages)
    assert answers(row, tokenizer) == [f"it is\n</think>\n\n{content}<｜end▁of▁sentence｜>"]
    (row,) = prepare(write_jsonl([{"messages": messages, "finished": False}]), tokenizer).train
    assert answers(row, tokenizer) == [f"it is\n</think>\n\n{content}"]


def test_reasoning_model_without_reasoning_in_the_data_is_refused(rows_of):
    with pytest.raises(BadRowsError, match=r"`messages\[1\]` can't be located.*<think>.*`chat_template_kwargs`"):
        rows_of(deepseek(), chat("Hello", "one"))


def test_data_with_reasoning_rendered_with_thinking_off_is_refused(rows_of):
    messages = chat("Hello", "one")
    messages[1]["reasoning_content"] = REASONING
    with pytest.raises(BadRowsError, match=r"`messages\[1\]` can't be located"):
        rows_of(FAMILIES["qwen3"].tokenizer("qwen3"), messages, enable_thinking=False)


@pytest.mark.parametrize("name", ["chatml", "gemma"])
def test_tool_call_that_the_template_leaves_out_is_refused(name, rows_of):
    """ChatML knows no tool calls: it would render, and supervise, an empty answer."""
    messages = [*chat("Hello"), {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    with pytest.raises(BadRowsError, match=r"`messages\[1\].tool_calls\[0\]` is not rendered in full.*'look_up'"):
        rows_of(FAMILIES[name].tokenizer(name), messages)


def test_what_a_family_refuses_is_named(rows_of):
    tokenizer = FAMILIES["gemma"].tokenizer("gemma")
    with pytest.raises(BadRowsError, match="is refused by the chat template.*roles must alternate"):
        rows_of(tokenizer, [*chat("Hello"), *chat("Hello", "one")])
    calls = {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}
    with pytest.raises(BadRowsError, match="single tool-calls"):
        rows_of(FAMILIES["llama3"].tokenizer("llama3"), [*chat("Hello"), calls], TOOLS)


REWRITES = {
    "inner white space": ("message.content", "(message.content | replace('\n\n', ' '))"),
    "upper case": ("message.content", "message.content | upper"),
    "cut": ("message.content", "message.content[:8]"),
    "censored": ("message.content", "message.content | replace('is', '**')"),
}


@pytest.mark.parametrize("kind", REWRITES)
def test_template_that_rewrites_answers_is_found(kind, rows_of):
    tokenizer = FAMILIES["chatml"].tokenizer("chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace(*REWRITES[kind])
    with pytest.raises(BadRowsError, match=r"`messages\[1\].content` is not rendered in full by the chat template"):
        rows_of(tokenizer, chat(*CONTENTS[:2]))


@pytest.mark.parametrize("name", ["llama3", "gemma"])
def test_trimmed_answers_are_supervised_as_rendered(name, rows_of):
    family = FAMILIES[name]
    tokenizer = family.tokenizer(name)
    messages = chat("Hello", "  one two \n", "What?", "\tthree")
    rows = rows_of(tokenizer, messages)
    assert answers(rows[0], tokenizer) == [f"one two{family.end}", f"three{family.end}"]
    assert_served(rows, tokenizer, messages)

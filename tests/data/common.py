"""Tiny tokenizers, chat templates written down as data, and what tests say about rows."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


CONTROL_TOKENS = [
    "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "<think>", "</think>", "<|return|>",
]  # fmt: skip
CORPUS = [
    "system\nuser\nassistant\nmodel\n",
    "Hello there, hello again. What is it? It is what it is.",
    "one two\n\nthree",
    *["three\n\n"] * 3,
]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>"),
    "chatml_marked": (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>\n{% endgeneration %}"
        "{% else %}{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "<|im_end|>",
    ),
    "chatml_default_system": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nHello<|im_end|>\n{% endif %}" + CHATML,
        "<|im_end|>",
    ),
    "llama3": (
        "<s>{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
        "{{ message.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        "<|eot_id|>",
    ),
    "gemma": (
        "<s>{% for message in messages %}<start_of_turn>"
        "{{ 'model' if message.role == 'assistant' else message.role }}\n"
        "{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        "<end_of_turn>",
    ),
    "mistral": (
        "<s>{% for message in messages %}{% if message.role == 'assistant' %} {{ message.content }}</s>"
        "{% else %}[INST] {{ message.content }} [/INST]{% endif %}{% endfor %}",
        "</s>",
    ),
    "gpt_oss_like": (  # the last answer ends in another token than those before it
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
        "{{ '<|return|>' if loop.last and message.role == 'assistant' else '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "<|return|>",
    ),
    "plain": (  # no control token ends an answer
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        "",
    ),
}
# Drops the reasoning of all answers but the last, and has a switch for reasoning, like Qwen3.
QWEN3 = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last %}<think>\n{{ message.reasoning_content or '' }}\n</think>\n\n"
    "{% endif %}{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def build_tokenizer(
    chat_template=None, eos_token="<|im_end|>", vocab_size=300, *, controls=CONTROL_TOKENS, bos_token=None, words=None
):
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if words:
        split = pre_tokenizers.Split(Regex(words), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos_token, eos_token=eos_token, pad_token="<pad>",
        extra_special_tokens=controls,
    )  # fmt: skip
    tokenizer.chat_template = chat_template
    return tokenizer


def chat(*contents, **keys):
    """User and assistant messages in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[index % 2], "content": content, **keys} for index, content in enumerate(contents)]


def answers(row, tokenizer):
    """The decoded supervised tokens of a row, turn by turn."""
    turns = [turn for turn in sorted(set(row["turn_ids"])) if turn >= 0]
    return [
        tokenizer.decode([i for i, found in zip(row["input_ids"], row["turn_ids"], strict=True) if found == turn])
        for turn in turns
    ]

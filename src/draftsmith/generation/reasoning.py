"""From the text that a target wrote to the message that its chat template renders as that text."""

import re
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..data.formats import REASONING_KEYS, RowError
from .requests import Request


OPEN, CLOSE = "<think>", "</think>"


def template_arguments(request: Request, shared: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of the chat template; those of the row win over `shared`."""
    return {"tools": request.tools, **shared, **request.template_kwargs}


def reasoning_key(template: str) -> str | None:
    """The key of a message from which a chat template reads what the model thought; None if it reads none."""
    return next((key for key in REASONING_KEYS if re.search(rf"\.{key}\b|['\"]{key}['\"]", template)), None)


class AnswerReader:
    """Finds the message whose rendering, after the prompt, is what the target wrote.

    Args:
        tokenizer: with a chat template.
        template_kwargs: arguments of the template; those of a row win.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]):
        self.tokenizer, self.template_kwargs = tokenizer, template_kwargs

    def prompt(self, request: Request) -> str:
        """The request as a server renders it.

        Raises:
            RowError: the template refuses the messages.
        """
        return self._render(request, request.messages, add_generation_prompt=True)

    def message(self, request: Request, prompt: str, written: str) -> dict[str, Any]:
        """The message for `written`, which followed `prompt`: the recorded one with its tool calls if it says the
        same, else with the reasoning apart where the template keeps it apart, else all as content.

        Raises:
            RowError: none of these is rendered as it was written (only white space may differ).
        """
        plain = {"role": "assistant", "content": written}
        for message in (request.recorded, self._with_reasoning(request, prompt, written), plain):
            if message is not None and self._says(request, message, prompt + written):
                return message
        raise RowError(
            f"messages[{len(request.messages)}]",
            f"was answered with {written[:80]!r}.., which the chat template does not render as it was written, so "
            "that no one could train on it: let a server answer whose parsers know this template (`--engine openai`)",
        )

    def _with_reasoning(self, request: Request, prompt: str, written: str) -> dict[str, Any] | None:
        key = reasoning_key(self.tokenizer.get_chat_template(tools=request.tools))  # type: ignore[arg-type]
        opened = written.lstrip().startswith(OPEN) or prompt.rstrip().endswith(OPEN)
        if key is None or not opened or written.count(CLOSE) != 1:
            return None
        thought, _, content = written.partition(CLOSE)
        thought = thought.lstrip().removeprefix(OPEN)
        return {"role": "assistant", key: thought.strip("\n"), "content": content.lstrip("\n")}

    def _says(self, request: Request, message: dict[str, Any], text: str) -> bool:
        try:
            rendered = self._render(request, [*request.messages, message])
        except RowError:  # a message that this template does not take
            return False
        return "".join(rendered.split()).startswith("".join(text.split()))

    def _render(self, request: Request, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        kwargs |= template_arguments(request, self.template_kwargs)
        try:
            rendered: Any = self.tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
        except Exception as error:  # templates are programs of their own and raise what they like
            reason = f"is refused by the chat template: {type(error).__name__}: {error}"
            raise RowError("messages", reason) from error
        return rendered

"""From what a target said to a message that its chat template renders so, and that preparation takes."""

import json
import re
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..data.chat import ChatEncoder
from ..data.formats import REASONING_KEYS, Conversation, RowError, read_row
from ..data.text import check_text
from .requests import Answer, Request


OPEN, CLOSE = "<think>", "</think>"


def template_arguments(request: Request, shared: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of the chat template; those of the row win over `shared`."""
    return {"tools": request.tools, **shared, **request.template_kwargs}


def reasoning_key(template: str) -> str | None:
    """The key of a message from which a chat template reads what the model thought; None if it reads none."""
    return next((key for key in REASONING_KEYS if re.search(rf"\.{key}\b|['\"]{key}['\"]", template)), None)


class AnswerReader:
    """Finds the message whose rendering, after the prompt, is what the target wrote; checks it as preparation does.

    Args:
        tokenizer: a fast one, with a chat template.
        template_kwargs: arguments of the template; those of a row win.

    Raises:
        ValueError: the tokenizer is a slow one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]):
        self.tokenizer, self.template_kwargs = tokenizer, template_kwargs
        self._encoder = ChatEncoder(tokenizer)

    def answer(
        self, request: Request, said: str | dict[str, Any], *, finished: bool, prompt_tokens: int, new_tokens: int
    ) -> Answer:
        """The answer that `said` is: a message, or the text of one, after the prompt as the template renders it.

        Raises:
            RowError: the target ended it, but no one could train on it.
        """
        try:
            if isinstance(said, str):
                said = self.message(request, self.prompt(request), said, finished=finished)
            self._refuse_untrainable(request, said, finished)
            return Answer(said, finished, prompt_tokens, new_tokens)
        except RowError:
            if finished:
                raise
            return Answer(None, finished, prompt_tokens, new_tokens)  # cut where no message can hold it

    def prompt(self, request: Request) -> str:
        """The request as a server renders it.

        Raises:
            RowError: the template refuses the messages.
        """
        kwargs = template_arguments(request, self.template_kwargs)
        try:
            rendered: Any = self.tokenizer.apply_chat_template(
                request.messages, tokenize=False, add_generation_prompt=True, **kwargs
            )
        except Exception as error:  # templates are programs of their own and raise what they like
            reason = f"is refused by the chat template: {type(error).__name__}: {error}"
            raise RowError("messages", reason) from error
        return rendered

    def message(self, request: Request, prompt: str, written: str, *, finished: bool) -> dict[str, Any]:
        """The message for `written`, which followed `prompt`: the recorded one with its tool calls if it says the
        same, else with the reasoning apart where the template keeps it apart, else all as content.

        Raises:
            RowError: none of these is rendered as it was written (only white space may differ).
        """
        plain = {"role": "assistant", "content": written}
        for message in (request.recorded, self._with_reasoning(request, prompt, written), plain):
            if message is not None and self._says(request, message, finished, prompt + written):
                return message
        raise RowError(
            f"messages[{len(request.messages)}]",
            f"was answered with {written[:80]!r}.., which the chat template does not render as it was written, so "
            "that no one could train on it: let a server answer whose parsers know this template (`--engine openai`, "
            "of vLLM with `--reasoning-parser` or `--tool-call-parser`)",
        )

    def _with_reasoning(self, request: Request, prompt: str, written: str) -> dict[str, Any] | None:
        key = reasoning_key(self.tokenizer.get_chat_template(tools=request.tools))  # type: ignore[arg-type]
        opened = written.lstrip().startswith(OPEN) or prompt.rstrip().endswith(OPEN)
        if key is None or not opened or written.count(CLOSE) != 1:
            return None
        thought, _, content = written.partition(CLOSE)
        thought = thought.lstrip().removeprefix(OPEN)
        return {"role": "assistant", key: thought.strip("\n"), "content": content.lstrip("\n")}

    def _says(self, request: Request, message: dict[str, Any], finished: bool, text: str) -> bool:
        try:
            (rows,) = self._encoder.render([self._conversation(request, message, finished)])
        except RowError:  # no message at all
            return False
        return isinstance(rows, list) and "".join(rows[-1].text.split()).startswith("".join(text.split()))

    def _refuse_untrainable(self, request: Request, message: dict[str, Any], finished: bool) -> None:
        name = f"messages[{len(request.messages)}]"
        if not message["content"].strip() and not message.get("tool_calls"):
            raise RowError(name, "was answered with nothing")
        check_text(json.dumps(message, ensure_ascii=False), name)
        (documents,) = self._encoder.encode_conversations([self._conversation(request, message, finished)])
        if isinstance(documents, RowError):
            raise documents

    def _conversation(self, request: Request, message: dict[str, Any], finished: bool) -> Conversation:
        """What preparation reads from the row that ends with `message`."""
        kwargs = template_arguments(request, self.template_kwargs)
        row = {"messages": [*request.messages, message], "tools": kwargs.pop("tools"), "finished": finished}
        conversation: Any = read_row(row | {"chat_template_kwargs": kwargs}, "messages")
        return conversation

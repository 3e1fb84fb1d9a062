"""Chat rendering: from messages to token ids, and to the tokens that the assistant generated.

The chat template itself says where an answer begins: the rendering of the messages before it, with the generation
prompt, is what a server sends, and the answer is what follows. That must hold as text and as token ids, or the head
would train on contexts that are never served. A template that rewrites history (drops old reasoning, moves the system
prompt) breaks it for earlier turns; each turn then becomes a row of its own, rendered as it was served.
`{% generation %}` markers, where a template has them, narrow the answers further.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from .answers import as_generated, check_answer, text_after, with_sentinel
from .documents import Document
from .formats import Conversation, RowError
from .messages import check_roles
from .text import EncodedText, TextEncoder, Turn, check_text


GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Rendering:
    """The text of one row and the turns to supervise in it.

    `marks` (bool, for each character) is where the template's generation markers are; None if it has none.
    """

    text: str
    turns: list[Turn]
    conversation: Conversation
    marks: np.ndarray | None = None

    def split(self) -> list["Rendering"]:
        """One rendering per turn, each ending with it."""
        return [replace(self, text=self.text[: turn.end], turns=[turn]) for turn in self.turns]

    def is_marked(self, encoded: EncodedText, start: int = 0) -> np.ndarray:
        """Bool `[T]`: the tokens with a marked character, of the text from character `start` on."""
        if self.marks is None:
            return np.ones(len(encoded.ids), dtype=bool)
        return np.array([self.marks[begin:end].any() for begin, end in _places(encoded.encoding.offsets, start)])


class ChatEncoder(TextEncoder):
    """Renders conversations with a chat template and finds the answers.

    Args:
        tokenizer: a fast tokenizer.
        chat_template: used instead of the tokenizer's own.
        template_kwargs: arguments of the template (`enable_thinking`); those of a row win.

    Raises:
        ValueError: there is no chat template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ):
        super().__init__(tokenizer)
        if not (chat_template or tokenizer.chat_template):
            owner = tokenizer.name_or_path or type(tokenizer).__name__
            raise ValueError(f"`tokenizer`: {owner} has no chat template; pass `chat_template`.")
        self.chat_template = chat_template
        self.template_kwargs = template_kwargs or {}

    @property
    def name(self) -> str:
        owner = self.tokenizer.name_or_path or type(self.tokenizer).__name__
        return "`chat_template`" if self.chat_template else f"the chat template of {owner}"

    def encode_conversations(self, conversations: Sequence[Conversation]) -> list[list[Document] | RowError]:
        """For each conversation its rows, or why there are none."""
        plans = self.render(conversations)
        # one call for the batch lets the tokenizer use all its threads
        encoded = iter(self._encode_all([row for plan in plans if isinstance(plan, list) for row in plan]))
        return [
            attempt(self._documents, plan, [next(encoded) for _ in plan]) if isinstance(plan, list) else plan
            for plan in plans
        ]

    def render(self, conversations: Sequence[Conversation]) -> list[list[Rendering] | RowError]:
        """For each conversation one row with every turn, or one per turn where the template rewrites history.

        A `RowError` stands for one without a turn to supervise, or whose rendering doesn't begin with what is served.
        """
        turns = [attempt(self._turns, conversation) for conversation in conversations]
        usable = [pair for pair in zip(conversations, turns, strict=True) if isinstance(pair[1], list)]
        plain = [pair for pair in usable if not (pair[0].tools or pair[0].template_kwargs)]
        try:
            shared = iter(self._prompts_and_texts(plain))  # one call costs less than many
        except RowError:  # of one of them, so each is rendered by itself
            shared, plain = iter(()), []
        rendered = {id(conversation): next(shared) for conversation, _ in plain}
        return [
            found if isinstance(found, RowError) else attempt(self._rows, conversation, found, rendered)
            for conversation, found in zip(conversations, turns, strict=True)
        ]

    def _turns(self, conversation: Conversation) -> list[int]:
        """The messages to supervise. Nobody asked for an answer that opens the conversation: it is context."""
        check_roles(conversation.messages, lambda: self._template(conversation), self.name)
        turns = [
            index
            for index, message in enumerate(conversation.messages)
            if message["role"] == "assistant" and index >= max(conversation.first_supervised, 1)
        ]
        if not turns:
            raise RowError("messages", "has no assistant turn after another message")
        return turns

    def _prompts_and_texts(
        self, conversations: Sequence[tuple[Conversation, list[int]]]
    ) -> list[tuple[list[str], list[str]]]:
        """What is served before each turn, and the rendering up to and with it; the first's arguments go for all."""
        if not conversations:
            return []
        chats = [conversation.messages[:index] for conversation, turns in conversations for index in turns]
        prompts = iter(self._apply(conversations[0][0], chats, add_generation_prompt=True))
        chats = [conversation.messages[: index + 1] for conversation, turns in conversations for index in turns]
        texts = iter(self._apply(conversations[0][0], chats))
        return [([next(prompts) for _ in turns], [next(texts) for _ in turns]) for _, turns in conversations]

    def _rows(
        self, conversation: Conversation, turns: list[int], rendered: dict[int, tuple[list[str], list[str]]]
    ) -> list[Rendering]:
        prompts, texts = rendered.get(id(conversation)) or self._prompts_and_texts([(conversation, turns)])[0]
        check_text(texts[-1], "messages")
        rows = []
        for index, prompt, text in zip(turns, prompts, texts, strict=True):
            answered = text if text.startswith(prompt) else self._as_generated(conversation, index, prompt, text)
            if not conversation.finished and index == len(conversation.messages) - 1:
                # the answer was cut off: the model generated nothing of what the template puts after it
                answered = answered.removesuffix(self._text_after(conversation, index, text))
            rows.append(Rendering(answered, [Turn(len(prompt), len(answered), index)], conversation))
        whole = rows[-1].text
        if all(map(whole.startswith, prompts)) and all(whole.startswith(row.text) for row in rows):
            rows = [replace(rows[-1], turns=[turn for row in rows for turn in row.turns])]
        return [replace(row, marks=self._marks(row)) for row in rows] if self._has_markers(conversation) else rows

    def _text_after(self, conversation: Conversation, index: int, text: str) -> str:
        """What the template puts after the content of a message, which it renders last."""
        name = f"messages[{index}]"
        chat = [*conversation.messages[:index], with_sentinel(conversation.messages[index], name)]
        return text_after(text, self._apply(conversation, [chat])[0], name)

    def _as_generated(self, conversation: Conversation, index: int, prompt: str, text: str) -> str:
        found = None
        if not self._has_markers(conversation):
            found = as_generated(conversation.messages[index], prompt)
        if found is None:
            raise RowError(
                f"messages[{index}]",
                f"can't be located: {self.name} doesn't render it after its generation prompt {prompt[-40:]!r}; "
                "pass `chat_template_kwargs` that fit the data (reasoning on or off) or another `chat_template`",
            )
        return found + self._text_after(conversation, index, text)

    def _apply(self, conversation: Conversation, chats: list[list[dict[str, Any]]], **kwargs: Any) -> list[str]:
        kwargs |= self._template_arguments(conversation)
        try:
            rendered: Any = self.tokenizer.apply_chat_template(chats, tokenize=False, **kwargs)
        except Exception as error:  # templates are programs of their own and raise what they like
            raise RowError("messages", f"is refused by {self.name}: {type(error).__name__}: {error}") from error
        return rendered

    def _template_arguments(self, conversation: Conversation) -> dict[str, Any]:
        kwargs = self.template_kwargs | conversation.template_kwargs
        return {"chat_template": self.chat_template, "tools": conversation.tools, **kwargs}

    def _template(self, conversation: Conversation) -> str:
        return self.tokenizer.get_chat_template(self.chat_template, conversation.tools)

    def _has_markers(self, conversation: Conversation) -> bool:
        return GENERATION_MARKER.search(self._template(conversation)) is not None

    def _marks(self, rendering: Rendering) -> np.ndarray:
        """Which characters of a rendering are inside generation markers; transformers tells the tokens."""
        output: Any = self.tokenizer.apply_chat_template(
            rendering.conversation.messages[: rendering.turns[-1].position + 1],
            return_dict=True,
            return_assistant_tokens_mask=True,
            **self._template_arguments(rendering.conversation),
        )
        marks = np.zeros(len(rendering.text), dtype=bool)
        for place, marked in zip(_places(output.encodings[0].offsets), output["assistant_masks"], strict=True):
            marks[slice(*place)] |= bool(marked)
        return marks

    def _encode_all(self, renderings: list[Rendering]) -> list[EncodedText]:
        return self.encode([rendering.text for rendering in renderings])

    def _documents(self, renderings: list[Rendering], encoded: list[EncodedText]) -> list[Document]:
        documents = [self._document(*pair) for pair in zip(renderings, encoded, strict=True)]
        if any(document is None for document in documents) and len(renderings[0].turns) > 1:
            rows = renderings[0].split()
            return self._documents(rows, self._encode_all(rows))
        return [document or self._document_in_parts(row) for document, row in zip(documents, renderings, strict=True)]

    def _document(self, rendering: Rendering, encoded: EncodedText) -> Document | None:
        """Ids and turns of a rendering; None if its ids don't begin with those of a served prompt."""
        turn_ids = np.full(len(encoded.ids), -1, dtype=np.int32)
        marked = rendering.is_marked(encoded)
        for number, turn in enumerate(rendering.turns):
            start = self.answer_start(encoded, turn.start)
            if start is None:
                return None
            end, last_character = encoded.answer_end(turn)
            self._check_rendered(rendering, turn, last_character)
            turn_ids[start:end] = self._supervised(rendering, turn, marked[start:end], number)
        return Document(encoded.ids, turn_ids)

    def _supervised(self, rendering: Rendering, turn: Turn, marked: np.ndarray, number: int) -> np.ndarray:
        """Turn ids of an answer: `number` inside the template's generation markers."""
        if rendering.marks is not None and not marked.any():
            raise RowError(f"messages[{turn.position}]", f"is not inside the generation markers of {self.name}")
        return np.where(marked, number, -1)

    def _document_in_parts(self, rendering: Rendering) -> Document:
        """The prompt's ids as serving sends them, then the answer's."""
        (turn,) = rendering.turns
        answer = self.encode_apart(rendering.text[turn.start :])
        end, last_character = answer.answer_end(Turn(0, len(answer.text), turn.position))
        self._check_rendered(rendering, turn, turn.start + last_character)
        prompt_ids = self.ids(rendering.text[: turn.start])
        turn_ids = np.full(len(prompt_ids) + len(answer.ids), -1, dtype=np.int32)
        marked = rendering.is_marked(answer, turn.start)[:end]
        turn_ids[len(prompt_ids) : len(prompt_ids) + end] = self._supervised(rendering, turn, marked, 0)
        return Document(prompt_ids + answer.ids, turn_ids)

    def _check_rendered(self, rendering: Rendering, turn: Turn, end: int) -> None:
        """The answer must hold all that the assistant wrote, and begin where the template says that it does."""
        message = rendering.conversation.messages[turn.position]
        name = f"messages[{turn.position}]"
        check_answer(message, name, rendering.text, turn.start, end, self.name)
        if "add_generation_prompt" not in self._template(rendering.conversation):
            answer = rendering.text[turn.start : end].lstrip()
            if not answer.startswith(message.get("content", "").strip()):
                raise RowError(name, f"is rendered by {self.name} with a header, but it has no generation prompt")


def _places(offsets: Sequence[tuple[int, int]], start: int = 0) -> Iterator[tuple[int, int]]:
    """Where the tokens stand in a text that begins at character `start`; some tokenizers count no white space."""
    return ((start + begin, start + max(end, begin + 1)) for begin, end in offsets)


def attempt(function: Any, *arguments: Any) -> Any:
    """What the function returns, or the `RowError` it raises: one bad row doesn't stop the others."""
    try:
        return function(*arguments)
    except RowError as error:
        return error
    except RecursionError:
        return RowError("row", "is nested too deeply")

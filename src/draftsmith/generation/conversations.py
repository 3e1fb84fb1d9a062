"""Conversations answered turn by turn, as many at once as an engine takes."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..data.formats import RowError
from ..data.questions import Questions, QuestionSet
from .requests import Answer, Engine, Request


@dataclass
class Answered:
    """A conversation's answers, as the journal keeps them.

    Attributes:
        key: of the conversation, `QuestionSet.keys`.
        messages: the answers, in order; the last is None if it was cut where no message can hold it.
        finished: the last answer was ended by the target. Nothing follows one that was cut.
        prompt_tokens, new_tokens: summed over the answers.
        seconds: since the conversation that was done before it.
    """

    key: str
    messages: list[dict[str, Any] | None] = field(default_factory=list)
    finished: bool = True
    prompt_tokens: int = 0
    new_tokens: int = 0
    seconds: float = 0.0


@dataclass
class Going:
    """A conversation that waits for an answer."""

    questions: Questions
    answered: Answered

    def request(self) -> Request:
        turn = len(self.answered.messages)
        messages = self.questions.turns[0].said
        for answer, question in zip(self.answered.messages, self.questions.turns[1:], strict=False):
            assert answer is not None
            messages = [*messages, answer, *question.said]
        following = self.questions.turns[turn + 1 : turn + 2]
        recorded = self.questions.turns[turn].recorded if following and following[0].brings_tool_results else None
        tools, template_kwargs = self.questions.tools, self.questions.template_kwargs
        return Request(self.answered.key, turn, messages, tools, template_kwargs, recorded)

    def take(self, answer: Answer) -> bool:
        """Whether the conversation goes on after `answer`."""
        recorded = self.request().recorded
        self.answered.messages.append(answer.message)
        self.answered.finished = answer.finished
        self.answered.prompt_tokens += answer.prompt_tokens
        self.answered.new_tokens += answer.new_tokens
        if not answer.finished or answer.message is None or len(self.answered.messages) == len(self.questions.turns):
            return False
        # results belong to the calls of the data: the target's own answer must be those calls
        following = self.questions.turns[len(self.answered.messages)]
        return not following.brings_tool_results or (
            recorded is not None and answer.message.get("tool_calls") == recorded["tool_calls"]
        )


def answer_all(
    questions: QuestionSet, indices: Iterator[int], engine: Engine
) -> Iterator[tuple[int, Answered | RowError]]:
    """The conversations of `indices`, each with its index, as they are done; a `RowError` says why one has no answer.

    Raises:
        ServerError: the engine's server answers nothing.
    """
    going: dict[str, tuple[int, Going]] = {}
    before = time.monotonic()
    while True:
        while len(going) < engine.capacity and (index := next(indices, None)) is not None:
            conversation = Going(questions.read(index), Answered(questions.keys[index]))
            going[conversation.answered.key] = index, conversation
            engine.submit(conversation.request())
        if not going:
            return
        key, answer = engine.next()
        index, conversation = going[key]
        if isinstance(answer, Answer) and conversation.take(answer):
            engine.submit(conversation.request())
            continue
        del going[key]
        if isinstance(answer, RowError):
            yield index, answer
            continue
        now = time.monotonic()
        conversation.answered.seconds, before = now - before, now
        yield index, conversation.answered


def whole_messages(questions: Questions, answered: Answered, *, keep_cut: bool) -> list[dict[str, Any]]:
    """The conversation up to its last answer; without a cut one unless `keep_cut`. Empty without any answer."""
    answers = answered.messages
    if not answered.finished and (not keep_cut or answers[-1] is None):
        answers = answers[:-1]
    pairs = zip(questions.turns, answers, strict=False)
    return [message for question, answer in pairs for message in (*question.said, answer) if message is not None]

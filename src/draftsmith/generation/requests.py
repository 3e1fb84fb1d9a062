"""What engines are asked, what they answer, and what the target adds to a conversation."""

from dataclasses import dataclass
from typing import Any, Protocol

from ..data.formats import RowError


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; `temperature` 0 is greedy.

    `top_p` 1 and `top_k` 0 leave all tokens in, as does a `top_k` of None, of which servers are not told. Penalties
    and the like are those of the target's generation config, which transformers and servers both read.
    """

    temperature: float
    top_p: float
    top_k: int | None
    max_new_tokens: int
    seed: int


@dataclass(frozen=True)
class Request:
    """A prompt to answer.

    Attributes:
        key: of its conversation.
        turn: which answer of the conversation this is.
        messages: all before the answer.
        tools, template_kwargs: of the chat template.
        recorded: the answer of the data, if the next message is the result of its tool calls.
    """

    key: str
    turn: int
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any]
    recorded: dict[str, Any] | None = None


@dataclass(frozen=True)
class Answer:
    """What the target said.

    Attributes:
        message: with role, `content`, and maybe reasoning and tool calls; None if it was cut where no message can
            hold it, inside its reasoning.
        finished: the target ended it; False: `max_new_tokens` did.
        prompt_tokens, new_tokens: how many it read and wrote.
    """

    message: dict[str, Any] | None
    finished: bool
    prompt_tokens: int
    new_tokens: int


class Engine(Protocol):
    """Who answers.

    Attributes:
        capacity: how many requests it should have at hand.
    """

    capacity: int

    def submit(self, request: Request) -> None:
        """Take a request; at most one of each key."""
        ...

    def next(self) -> tuple[str, Answer | RowError]:
        """Wait for the next answer, with the key of its request; a `RowError` says why there is none.

        Raises:
            ServerError: the server answers no request.
        """
        ...

    def close(self) -> None:
        """Leave everything that is under way."""
        ...

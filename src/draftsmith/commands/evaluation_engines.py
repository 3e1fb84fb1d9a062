"""Who decodes the prompts of an evaluation: transformers here, or a server."""

import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from tqdm.auto import tqdm
from transformers import BatchEncoding

from ..data import pad_prompts
from ..models.eagle3 import Eagle3DraftModel
from ..serving.servers import Server, ServerError
from ..speculative import Acceptance, measure_acceptance, measure_plain
from .arguments import TargetArguments


class Engine(Protocol):
    def decode(
        self, prompts: Sequence[list[int]], num_draft_tokens: int, temperature: float, name: str
    ) -> Acceptance: ...

    def plain(self, prompts: Sequence[list[int]], temperature: float) -> float:
        """Tokens per second without the head."""
        ...


class TransformersEngine:
    """Our lossless decoding; tokens per second are those of transformers' models in Python."""

    def __init__(self, target: Any, draft: Eagle3DraftModel, tokenizer: Any, args: Any):
        self.target, self.draft, self.tokenizer, self.args = target, draft, tokenizer, args

    @classmethod
    def load(cls, target_args: TargetArguments, args: Any, tokenizer: Any) -> "TransformersEngine":
        target: Any = target_args.load()
        if torch.cuda.is_available() and target.device.type == "cpu":
            target.to("cuda")
        draft = Eagle3DraftModel.from_pretrained(args.draft, target=target, dtype=target.dtype).to(target.device)
        return cls(target, draft, tokenizer, args)

    def decode(self, prompts: Sequence[list[int]], num_draft_tokens: int, temperature: float, name: str) -> Acceptance:
        counts, _ = measure_acceptance(
            self.target,
            self.draft,
            self._batches(prompts, name),
            num_draft_tokens=num_draft_tokens,
            max_new_tokens=self.args.max_new_tokens,
            temperature=temperature,
        )
        return counts

    def plain(self, prompts: Sequence[list[int]], temperature: float) -> float:
        batches = self._batches(prompts, "without the head")
        return measure_plain(self.target, batches, max_new_tokens=self.args.max_new_tokens, temperature=temperature)

    def _batches(self, prompts: Sequence[list[int]], name: str) -> Iterator[BatchEncoding]:
        for batch in _batched(prompts, self.args.batch_size, name):
            yield pad_prompts(self.tokenizer, batch)


class ServerEngine:
    """A server, by its own counts: of each answer where it tells them, else of all that it decodes at once."""

    def __init__(self, server: Server, args: Any):
        self.server, self.args = server, args

    def decode(self, prompts: Sequence[list[int]], num_draft_tokens: int, temperature: float, name: str) -> Acceptance:
        total = Acceptance(num_draft_tokens)
        for batch in _batched(prompts, self.args.batch_size, name):
            total += self._decode(batch, num_draft_tokens, temperature)
        return total

    def _decode(self, batch: Sequence[list[int]], num_draft_tokens: int, temperature: float) -> Acceptance:
        counted = self.server.engine == "vllm"
        before = self.server.counters() if counted else None
        start = time.perf_counter()
        answers = self.server.complete(batch, max_new_tokens=self.args.max_new_tokens, temperature=temperature)
        seconds = time.perf_counter() - start
        tokens = [answer.new_tokens for answer in answers]
        result = Acceptance(num_draft_tokens, prompts=len(batch), new_tokens=sum(tokens), seconds=seconds)
        if before is not None:
            counts = self.server.counters().since(before)
            positions = counts.accepted_per_position or [0] * num_draft_tokens
            if len(positions) != num_draft_tokens:
                raise ServerError(
                    f"The server drafts {len(positions)} tokens per verification, `num_draft_tokens` is "
                    f"{num_draft_tokens}: pass {len(positions)}, or start it for {num_draft_tokens}."
                )
            result.rounds, result.accepted = [counts.rounds], [sum(positions)]
            result.accepted_per_position = positions
        elif all(answer.rounds for answer in answers):  # the first token belongs to no round
            result.rounds = [answer.rounds or 0 for answer in answers]
            result.accepted = [count - 1 - rounds for count, rounds in zip(tokens, result.rounds, strict=True)]
        return result

    def plain(self, prompts: Sequence[list[int]], temperature: float) -> float:
        raise ServerError("a server is timed without its head by starting it without one")


def _batched(prompts: Sequence[list[int]], size: int, name: str) -> Iterator[Sequence[list[int]]]:
    for first in tqdm(range(0, len(prompts), size), desc=name, unit="batch"):
        yield prompts[first : first + size]

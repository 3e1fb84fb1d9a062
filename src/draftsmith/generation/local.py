"""Answers of a target in this process: by continuous batching, or by `generate` on batches that are refilled."""

import logging
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from ..data.chat import attempt
from ..data.formats import RowError
from ..data.prompts import pad_prompts
from .reasoning import AnswerReader
from .requests import Answer, Engine, Request, Sampling


logger = logging.getLogger(__name__)

LOOK_AHEAD = 8  # batches' worth of requests, from which batches of similar lengths are made
CONTINUOUS_CAPACITY = 1024  # requests at hand: transformers fills its memory from them
PROBE_TOKENS, PROBE_SECONDS = 4, 600


@dataclass
class Row:
    """A request as token ids, and what was written so far."""

    request: Request
    ids: list[int]
    room: int  # tokens that may still be written
    written: list[int] = field(default_factory=list)


class LocalEngine:
    """What both ways to decode share: from requests to rows of ids, and from what was written to answers.

    Args:
        model: the target, in evaluation mode.
        tokenizer: the target's, with a chat template.
        sampling: how tokens are chosen; torch's generators are seeded once, so a sampled answer depends on what is
            decoded beside and before it.
        template_kwargs: arguments of the chat template; those of a row win.
    """

    capacity: int

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        template_kwargs: dict[str, Any],
    ):
        self.model, self.tokenizer, self.sampling = model, tokenizer, sampling
        self.reader = AnswerReader(tokenizer, template_kwargs)
        self.generation_config = generation_config(model, tokenizer, sampling)
        self.stop_ids = stop_ids(self.generation_config)
        text_config = model.config.get_text_config(decoder=True)
        self.positions = vars(text_config).get("max_position_embeddings")
        self._done: deque[tuple[str, Answer | RowError]] = deque()
        torch.manual_seed(sampling.seed)

    def submit(self, request: Request) -> None:
        try:
            self._start(self._row(request))
        except RowError as error:
            self._done.append((request.key, error))

    def next(self) -> tuple[str, Answer | RowError]:
        while not self._done:
            self._decode()
        return self._done.popleft()

    def close(self) -> None:
        """Nothing goes on beside the caller."""

    def _start(self, row: Row) -> None:
        raise NotImplementedError

    def _decode(self) -> None:
        """Decode until an answer may be done."""
        raise NotImplementedError

    def _row(self, request: Request) -> Row:
        ids = self.tokenizer(self.reader.prompt(request), add_special_tokens=False)["input_ids"]
        room = self.sampling.max_new_tokens
        if self.positions is not None:
            room = min(room, self.positions - len(ids))
        if room < 1:
            raise RowError("messages", f"fill {len(ids)} tokens, but the target has {self.positions} positions")
        return Row(request, ids, room)

    def _finish(self, row: Row, written: list[int]) -> None:
        end = next((at for at, token in enumerate(written) if token in self.stop_ids), None)
        options: dict[str, Any] = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        text: Any = self.tokenizer.decode(written[:end], **options)
        tokens = {"prompt_tokens": len(row.ids), "new_tokens": len(written)}
        said = self._whole_characters(text, end is not None)
        answer = attempt(partial(self.reader.answer, row.request, said, finished=end is not None, **tokens))
        self._done.append((row.request.key, answer))

    @staticmethod
    def _whole_characters(text: str, finished: bool) -> str:
        """A cut may split a character of several tokens."""
        return text if finished else text.rstrip("\N{REPLACEMENT CHARACTER}")


class GenerateEngine(LocalEngine):
    """`generate` on batches of similar lengths, left as soon as half of a batch is done.

    What is not done then goes on in another batch, full again, with what it has written as part of its prompt: reading
    that once more costs one forward, while rows that wait for the longest would cost one for each of its tokens.

    Args:
        batch_size: rows decoded together.
    """

    def __init__(self, *args: Any, batch_size: int):
        super().__init__(*args)
        self.batch_size, self.capacity = batch_size, batch_size * LOOK_AHEAD
        self._waiting: list[Row] = []

    def _start(self, row: Row) -> None:
        self._waiting.append(row)

    def _decode(self) -> None:
        self._waiting.sort(key=lambda row: len(row.ids) + len(row.written), reverse=True)  # what may fail, fails first
        batch, self._waiting = self._waiting[: self.batch_size], self._waiting[self.batch_size :]
        inputs = pad_prompts(self.tokenizer, [row.ids + row.written for row in batch]).to(self.model.device)
        start = inputs["input_ids"].shape[1]
        self.generation_config.max_new_tokens = min(row.room for row in batch)
        model: Any = self.model
        output = model.generate(
            **inputs,
            generation_config=self.generation_config,
            stopping_criteria=StoppingCriteriaList([HalfDone(self.stop_ids)]),
        )
        for row, new in zip(batch, output[:, start:].tolist(), strict=True):
            end = next((at + 1 for at, token in enumerate(new) if token in self.stop_ids), len(new))
            row.written += new[:end]
            row.room -= end
            if row.written[-1] in self.stop_ids or not row.room:
                self._finish(row, row.written)
            else:
                self._waiting.append(row)


class HalfDone(StoppingCriteria):
    """Ends `generate` once half of the rows have ended."""

    def __init__(self, stop_ids: Sequence[int]):
        self.stop_ids = stop_ids
        self._ended: torch.Tensor | bool = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        last = input_ids[:, -1]  # [B]
        self._ended = torch.isin(last, torch.tensor(self.stop_ids, dtype=last.dtype, device=last.device)) | self._ended
        return (2 * self._ended.sum() >= len(last)).expand(len(last))


class ContinuousEngine(LocalEngine):
    """transformers' continuous batching: a row that ends makes room for the next one at once.

    Raises:
        RuntimeError: it does not serve this target.
    """

    capacity = CONTINUOUS_CAPACITY

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args)
        self._rows: dict[str, Row] = {}
        self._stack = ExitStack()
        try:
            self._use_paged_attention()
            model: Any = self.model
            context = model.continuous_batching_context_manager(
                generation_config=self.generation_config, block=True, timeout=5, **options
            )
            self._manager = self._stack.enter_context(context)
            self._probe()
        except Exception as error:  # of many kinds: attention without pages, caches of another kind, no memory left
            self.close()
            raise RuntimeError(f"continuous batching does not serve this target: {error}") from error

    def close(self) -> None:
        self._stack.close()

    def _use_paged_attention(self) -> None:
        before = self.model.config._attn_implementation
        self._stack.callback(self.model.set_attn_implementation, before)
        if before not in ("sdpa", "eager") and not before.startswith("flash"):
            try:
                self.model.set_attn_implementation("sdpa")
            except ValueError:
                self.model.set_attn_implementation("eager")

    def _probe(self) -> None:
        """A few tokens, since a target that is not served fails with its first request."""
        self._manager.add_request(list(range(PROBE_TOKENS)), request_id="probe", max_new_tokens=2)
        self._wait(PROBE_SECONDS)

    def _start(self, row: Row) -> None:
        self._rows[row.request.key] = row
        self._manager.add_request(row.ids, request_id=row.request.key, max_new_tokens=row.room)

    def _decode(self) -> None:
        key, written = self._wait(None)
        self._finish(self._rows.pop(key), written)

    def _wait(self, seconds: float | None) -> tuple[str, list[int]]:
        while seconds is None or seconds > 0:
            result = self._manager.get_result(timeout=1)
            seconds = None if seconds is None else seconds - 1
            if result is None and not self._manager.is_running():
                raise RuntimeError("its thread has ended")
            if result is not None and result.error is not None:
                raise RuntimeError(result.error)
            if result is not None and result.is_finished():
                return result.request_id, result.generated_tokens
        raise RuntimeError("it does not answer")


def local_engine(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    template_kwargs: dict[str, Any],
    *,
    batch_size: int,
    continuous_batching: bool,
) -> Engine:
    """The engine for a target that is loaded; a warning says why it is not the continuous one that was asked for."""
    shared = (model, tokenizer, sampling, template_kwargs)
    if continuous_batching:
        try:
            return ContinuousEngine(*shared)
        except RuntimeError as error:
            logger.warning("%s. Decoding in batches of %d.", str(error).capitalize(), batch_size)
    return GenerateEngine(*shared, batch_size=batch_size)


def generation_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sampling: Sampling
) -> GenerationConfig:
    """The target's own, with penalties and stop tokens, and our sampling."""
    config = GenerationConfig.from_dict(model.generation_config.to_dict())
    config.do_sample = sampling.temperature > 0
    chosen = (sampling.temperature, sampling.top_p, sampling.top_k or 0) if config.do_sample else (None, None, None)
    config.temperature, config.top_p, config.top_k = chosen
    config.max_new_tokens, config.max_length = sampling.max_new_tokens, None
    if config.eos_token_id is None:
        config.eos_token_id = tokenizer.eos_token_id
    if config.pad_token_id is None:
        config.pad_token_id = (stop_ids(config) or [0])[0]
    return config


def stop_ids(config: GenerationConfig) -> list[int]:
    ids: Any = config.eos_token_id
    return [] if ids is None else ids if isinstance(ids, list) else [ids]

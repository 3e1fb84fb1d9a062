"""What a target accepts of a head's drafts, counted over many prompts."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..models.eagle3 import Eagle3DraftModel
from ..transformers_hooks import ATTENTION_NAME
from .generation import speculative_generate
from .rows import stop_and_pad_ids, tokens_before_eos


CONFIDENCE = 1.96  # standard errors: 95%
FEWEST_CLUSTERS = 10  # below, the scatter of so few says little about itself


@dataclass
class Acceptance:
    """Counts of decoded prompts; sums of several are counts again.

    Attributes:
        num_draft_tokens: K, the drafts of a round.
        rounds, accepted: verifications, and drafts accepted in them, of each cluster: what was counted by itself, a
            prompt or all that a server decoded at once.
        accepted_per_position: [K], rounds that accepted their first j + 1 drafts.
        prompts, new_tokens: of all clusters. A prompt's new tokens are its first one, one per round, and the accepted.
        seconds: of decoding, prompts included.
    """

    num_draft_tokens: int
    rounds: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    prompts: int = 0
    new_tokens: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.accepted_per_position = self.accepted_per_position or [0] * self.num_draft_tokens

    def __add__(self, other: "Acceptance") -> "Acceptance":
        positions = zip(self.accepted_per_position, other.accepted_per_position, strict=True)
        return Acceptance(
            self.num_draft_tokens,
            self.rounds + other.rounds,
            self.accepted + other.accepted,
            [ours + theirs for ours, theirs in positions],
            self.prompts + other.prompts,
            self.new_tokens + other.new_tokens,
            self.seconds + other.seconds,
        )

    @property
    def acceptance_length(self) -> float:
        """Tokens per verification; 1.0 where nothing was drafted."""
        return 1.0 + sum(self.accepted) / max(sum(self.rounds), 1)

    @property
    def interval(self) -> tuple[float, float] | None:
        """95% confidence interval of the acceptance length; None for fewer than `FEWEST_CLUSTERS` with any round.

        Rounds of a prompt are alike, so clusters are what varies: the standard error of a ratio of sums (Cochran,
        Sampling Techniques, 1977, 2.11).
        """
        clusters = sum(map(bool, self.rounds))  # an answer of one token has none, and says nothing
        if clusters < FEWEST_CLUSTERS:
            return None
        mean = self.acceptance_length - 1.0
        squares = sum((a - mean * m) ** 2 for a, m in zip(self.accepted, self.rounds, strict=True))
        error = math.sqrt(squares * clusters / (clusters - 1)) / max(sum(self.rounds), 1)
        return max(1.0, 1.0 + mean - CONFIDENCE * error), 1.0 + mean + CONFIDENCE * error

    @property
    def rates(self) -> list[float]:
        """[K], the share of rounds that accepted their drafts up to each position."""
        return [count / max(sum(self.rounds), 1) for count in self.accepted_per_position]

    @property
    def counts_positions(self) -> bool:
        """Whether the rates are known: nothing may have been drafted, and some servers tell the sum alone."""
        return sum(self.rounds) > 0 and (any(self.accepted_per_position) or not any(self.accepted))

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.seconds if self.seconds else 0.0


def measure_acceptance(
    target: PreTrainedModel,
    draft: Eagle3DraftModel,
    batches: Iterable[Mapping[str, Tensor]],
    *,
    num_draft_tokens: int = 5,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
) -> tuple[Acceptance, list[list[int]]]:
    """Decode prompts, `input_ids` and `attention_mask` [B, T] padded on the left, and count by prompt.

    Returns the counts and each prompt's new ids, padded on the right to those of the longest one of its batch.
    """
    total = Acceptance(num_draft_tokens)
    answers: list[list[int]] = []
    eos_ids, _ = stop_and_pad_ids(None, target.generation_config)
    for batch in batches:
        start = time.perf_counter()
        input_ids = batch["input_ids"].to(target.device)
        sequences, drafted, per_position = speculative_generate(
            target,
            draft,
            input_ids,
            attention_mask=batch["attention_mask"].to(target.device),
            num_draft_tokens=num_draft_tokens,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
        )
        new_ids = sequences[:, input_ids.shape[1] :].cpu()
        lengths, rounds = continuation_lengths(new_ids, eos_ids, max_new_tokens), drafted // num_draft_tokens
        total += Acceptance(
            num_draft_tokens, rounds.tolist(), (lengths - 1 - rounds).tolist(), per_position.tolist(),
            len(lengths), int(lengths.sum()), time.perf_counter() - start,
        )  # fmt: skip
        answers += new_ids.tolist()
    return total, answers


def continuation_lengths(new_ids: Tensor, eos_ids: Tensor, max_new_tokens: int) -> Tensor:
    """[B], the new tokens of each row of `new_ids` [B, N], padded on the right: up to its first EOS, or all."""
    return (tokens_before_eos(new_ids, eos_ids) + 1).clamp(max=min(max_new_tokens, new_ids.shape[1]))


def measure_plain(
    target: PreTrainedModel, batches: Iterable[Mapping[str, Tensor]], *, max_new_tokens: int, temperature: float
) -> float:
    """Tokens per second of the target by itself, in transformers' own decoding loop and with its own attention."""
    tokens, seconds = 0, 0.0
    eos_ids, _ = stop_and_pad_ids(None, target.generation_config)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    for batch in batches:
        start = time.perf_counter()
        inputs = {name: batch[name].to(target.device) for name in ("input_ids", "attention_mask")}
        generate: Any = target.generate
        with transformers_attention(target):
            output = generate(**inputs, max_new_tokens=max_new_tokens, **{"do_sample": False, **sampling})
        new_ids = output[:, inputs["input_ids"].shape[1] :].cpu()
        tokens += int(continuation_lengths(new_ids, eos_ids, max_new_tokens).sum())
        seconds += time.perf_counter() - start
    return tokens / seconds if seconds else 0.0


@contextmanager
def transformers_attention(target: PreTrainedModel) -> Iterator[None]:
    """What users decode with: ours is made for long rows, and a token at a time slows it down."""
    ours = target.config._attn_implementation == ATTENTION_NAME
    if ours:
        target.set_attn_implementation("sdpa" if target._supports_sdpa else "eager")
    try:
        yield
    finally:
        if ours:
            target.set_attn_implementation(ATTENTION_NAME)

"""Token ids of texts, and the exact places of answers in them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from .formats import RowError


SHORT = 64  # characters


@dataclass(frozen=True)
class Turn:
    """An answer in a text, with the template's text after it: characters `start:end`; `position` numbers it."""

    start: int
    end: int
    position: int


@dataclass(frozen=True)
class EncodedText:
    """A text and its token ids.

    Attributes:
        controls: index and last character (exclusive) of every control token, in order.
    """

    text: str
    ids: list[int]
    encoding: Encoding
    controls: list[tuple[int, int]]

    def answer_end(self, turn: Turn) -> tuple[int, int]:
        """Where generation stops, as (token, character), both exclusive.

        It is after the last control token of the turn (`<|im_end|>`), which only white space may follow; without one,
        after the last character that isn't white space.
        """
        token, end = self.last_control(turn.end)
        if end > turn.start and not self.text[end : turn.end].strip():
            return token + 1, end
        end = turn.start + len(self.text[turn.start : turn.end].rstrip())
        last = self.encoding.char_to_token(end - 1) if end > turn.start else None
        if last is None:
            return 0, end
        while (place := self.encoding.token_to_chars(last + 1)) and place[0] < end:
            last += 1  # one character may take several tokens
        return last + 1, end

    def last_control(self, end: int) -> tuple[int, int]:
        """The last entry of `controls` within `text[:end]`; (-1, 0) if there is none."""
        return next((control for control in reversed(self.controls) if control[1] <= end), (-1, 0))


class TextEncoder:
    """Encodes texts as they are, and finds where answers begin.

    Args:
        tokenizer: a fast tokenizer.

    Raises:
        ValueError: the tokenizer can't relate tokens to characters.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        if not tokenizer.is_fast:
            raise ValueError(
                f"`tokenizer`: {type(tokenizer).__name__} ({tokenizer.name_or_path}) can't relate tokens to "
                "characters; use a fast tokenizer, or bring `input_ids` and `loss_mask`."
            )
        self.tokenizer = tokenizer
        # some tokenizers add runs of white space to their vocabulary: those control nothing
        added = {index for index, token in tokenizer.added_tokens_decoder.items() if not token.content.isspace()}
        controls = added | set(tokenizer.all_special_ids)
        self.is_control = np.zeros(max([*tokenizer.get_vocab().values(), *controls]) + 1, dtype=bool)
        self.is_control[list(controls)] = True
        # between a control token and an answer stands nearly always the same: the header of a turn
        self.short_ids = lru_cache(maxsize=1024)(self._encode_short)

    def encode(self, texts: Sequence[str]) -> list[EncodedText]:
        """Encode without automatic special tokens and without truncation."""
        if not texts:
            return []
        batch = self.tokenizer(
            list(texts),
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        encodings = zip(texts, batch["input_ids"], batch.encodings or [], strict=True)
        return [self.encoded(text, ids, encoding) for text, ids, encoding in encodings]

    def encoded(self, text: str, ids: list[int], encoding: Encoding) -> EncodedText:
        indices = np.flatnonzero(self.is_control[np.array(ids, dtype=np.int64)]).tolist()
        places = ((index, encoding.token_to_chars(index)) for index in indices)
        controls = [(index, place[1]) for index, place in places if place]
        return EncodedText(text, ids, encoding, controls)

    def ids(self, text: str) -> list[int]:
        if len(text) <= SHORT:
            return list(self.short_ids(text))
        return self.tokenizer.encode(text, add_special_tokens=False, verbose=False)

    def _encode_short(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def encode_apart(self, answer: str) -> EncodedText:
        """Encode an answer on its own, where encoding it with its prompt would merge tokens across the two.

        Raises:
            RowError: the tokenizer can't encode from the middle of a text.
        """
        (encoded,) = self.encode([answer])
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        if self.tokenizer.decode(encoded.ids, **options) != answer:
            raise RowError(
                "content", f"{answer[:40]!r} merges with its prompt's last token and can't be encoded alone"
            )
        return encoded

    def answer_start(self, encoded: EncodedText, start: int) -> int | None:
        """The first token after `text[:start]`, or None if the ids don't begin with those of `text[:start]` alone."""
        # What follows a control token is encoded independently of what precedes it: this tail nearly always decides.
        control, end = encoded.last_control(start)
        tail = self.ids(encoded.text[end:start])
        first = control + 1 + len(tail)
        if encoded.ids[control + 1 : first] == tail:
            return first
        prompt = self.ids(encoded.text[:start])
        return len(prompt) if encoded.ids[: len(prompt)] == prompt else None


def check_text(text: str, name: str) -> None:
    """Refuse lone surrogates, which JSON can write but no tokenizer can encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(name, f"holds {text[error.start]!r}, half a character") from error

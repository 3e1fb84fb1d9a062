"""Prepared documents as people read them: in the terminal and as an HTML page, what is supervised in colour.

Data is not trusted here: characters that a terminal or a browser would obey, or that nobody sees, become escapes.
"""

import html
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..data.wording import counted


COLOURS = ("\x1b[30;42m", "\x1b[30;46m")  # black on green and on cyan, for turns in turn
PLAIN = "\x1b[0m"
BROKEN = "\ufffd"  # what a part of a character is decoded to
BYTES = 4  # of the longest character
INVISIBLE = {
    "Cc",
    "Cf",
    "Cn",
    "Co",
    "Cs",
    "Zl",
    "Zp",
}  # control, format (direction, zero width), unassigned, separators
STYLE = """
:root { color-scheme: light dark; font: 14px/1.7 system-ui, sans-serif; }
body { max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid #8886; border-radius: 4px; padding: 1rem; }
pre span { border-right: 1px solid #8886; unicode-bidi: isolate; }
.t0 { background: #2da44e55; }
.t1 { background: #0969da55; }
i { opacity: .5; font-style: normal; }
"""


@dataclass(frozen=True)
class Token:
    """A token's id, what it adds to the text, and the turn it is of, -1 outside."""

    id: int
    text: str
    turn: int


def sample(dataset: Dataset, count: int) -> list[int]:
    """Indices of `count` documents, or of all if there are fewer, spread evenly over a prepared dataset."""
    return np.unique(np.linspace(0, len(dataset) - 1, min(count, len(dataset))).round().astype(int)).tolist()


def read_tokens(tokenizer: PreTrainedTokenizerBase, input_ids: Sequence[int], turn_ids: Sequence[int]) -> list[Token]:
    """The tokens of a document.

    A token is decoded with the one before it, since some tokenizers drop a space where a text begins. Where several
    tokens make a character, the last has it as its text. What is no text at all stands as the vocabulary writes it.
    """
    tokens: list[Token] = []
    while (start := len(tokens)) < len(input_ids):
        texts = [_added(tokenizer, input_ids, start, start + size) for size in range(1, BYTES + 1)]
        size = next((size for size, text in enumerate(texts, start=1) if BROKEN not in text), 1)
        text = texts[size - 1]
        ids, turns = input_ids[start : start + size], turn_ids[start : start + size]
        written = [""] * (size - 1) + [text if text and BROKEN not in text else _alone(tokenizer, ids[-1])]
        tokens += map(Token, ids, written, turns)
    return tokens


def _added(tokenizer: PreTrainedTokenizerBase, input_ids: Sequence[int], start: int, end: int) -> str:
    """What tokens `start:end` add to the text of the token before them."""
    before = _decode(tokenizer, input_ids[max(start - 1, 0) : start])
    both = _decode(tokenizer, input_ids[max(start - 1, 0) : end])
    return both.removeprefix(before) if both.startswith(before) else BROKEN


def visible(text: str) -> str:
    """The text with every character that is obeyed or unseen as a backslash escape; line ends and tabs stay."""
    return "".join(
        character
        if character in "\n\t" or unicodedata.category(character) not in INVISIBLE
        else character.encode("unicode_escape", "surrogatepass").decode("ascii")
        for character in text
    )


def to_terminal(name: str, tokens: Sequence[Token], *, colour: bool) -> str:
    """A document for a terminal; without colour, double brackets stand around what is supervised."""
    parts = []
    for turn, run in groupby(tokens, key=lambda token: token.turn):
        text = visible("".join(token.text for token in run))
        if turn < 0:
            parts.append(text)
        elif colour:  # line by line: a terminal would colour the rest of each line, too
            parts.append("\n".join(f"{COLOURS[turn % 2]}{line}{PLAIN}" for line in text.split("\n")))
        else:
            parts.append(f"[[{text}]]")
    return f"── {visible(_summary(name, tokens))}\n{''.join(parts)}\n"


def to_html(title: str, documents: Sequence[tuple[str, Sequence[Token]]]) -> str:
    """A page that needs and loads nothing else: token boundaries as lines, ids where the mouse is."""
    sections = [
        f"<h2>{html.escape(visible(_summary(name, tokens)))}</h2>\n<pre>{''.join(map(_span, tokens))}</pre>"
        for name, tokens in documents
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{html.escape(visible(title))}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(visible(title))}</h1>\n<p>Supervised tokens are coloured, turns in turn; a line ends each "
        "token. Hover for its id.</p>\n" + "\n".join(sections) + "\n</body>\n</html>\n"
    )


def _span(token: Token) -> str:
    kind = f' class="t{token.turn % 2}"' if token.turn >= 0 else ""
    text = html.escape(visible(token.text)).replace("\n", "<i>⏎</i>\n").replace("\t", "<i>⇥</i>\t")
    turn = f", turn {token.turn}" if token.turn >= 0 else ""
    return f'<span{kind} title="{token.id}{turn}: {html.escape(repr(visible(token.text)))}">{text}</span>'


def _summary(name: str, tokens: Sequence[Token]) -> str:
    supervised = [token.turn for token in tokens if token.turn >= 0]
    turns = counted(len(set(supervised)), "turn")
    return f"{name}: {counted(len(tokens), 'token')}, {len(supervised):,} supervised in {turns}"


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    return str(tokenizer.decode(list(ids), **options)) if ids else ""


def _alone(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str:
    text = _decode(tokenizer, [token_id])
    return text if text and BROKEN not in text else f"⟨{tokenizer.convert_ids_to_tokens(token_id)}⟩"

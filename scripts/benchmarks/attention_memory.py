"""Time and memory of attention at step 6 over the length, and where dense attention needs most of a GPU: 2x8192.

Dense attention holds three score matrices of [batch, heads, length, length * (step + 1)]. `reference` is ours and
dense too, with one column per diagonal.
"""

from .attention import make_engine_parser, run
from .attention_cases import Case
from .common import OUTPUT


ENGINES = ("flex", "dense", "reference", "triton", "auto")
LENGTHS = [1024 * 2**power for power in range(8)]
FLEX_LENGTHS = LENGTHS[1::2]  # every length is a compilation
CASES = [Case("2x8192", 2, 8192, steps=(2, 6), flex_steps=(2, 6))]
CASES += [
    Case(f"1x{length}", 1, length, steps=(6,), flex_steps=(6,) if length in FLEX_LENGTHS else ()) for length in LENGTHS
]


def main(arguments: list[str]) -> None:
    parser = make_engine_parser("attention-memory", __doc__, OUTPUT / "attention_memory.json", ENGINES)
    run(CASES, parser.parse_args(arguments))

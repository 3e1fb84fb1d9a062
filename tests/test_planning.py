"""The memory model: what must hold whatever its constants are."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from draftsmith import planning
from draftsmith.commands.plan import chunk_size_for
from draftsmith.models.eagle3 import unroll_eagle3


sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from benchmarks.train_cases import CASES


TARGET = planning.TargetShape(
    hidden_size=4096, vocab_size=128256, aux_states=3, weight_bytes=16 * 10**9, layer_width=55296
)
HEAD = planning.HeadShape(
    hidden_size=4096, intermediate_size=14336, num_heads=32, num_kv_heads=8, head_dim=128, vocab_size=32000,
    trained_parameters=425_000_000,
)  # fmt: skip
SETUP = planning.Setup(tokens=8192)
MEASURED = [
    row for row in json.loads((Path(__file__).parents[1] / "benchmarks/train.json").read_text())["rows"]
    if row["contender"].startswith("ours")
]  # fmt: skip


def peak(**changes):
    return planning.plan(TARGET, HEAD, replace(SETUP, **changes)).peak


def test_more_work_needs_more_and_levers_need_less():
    assert peak(tokens=16384) > peak() > peak(supervised=0.25) > peak(supervised=0.1)
    assert peak(ttt_steps=8) > peak() > peak(ttt_steps=3)
    assert peak(chunk_size=4096) > peak(chunk_size=2048)
    assert peak(recompute=True) < peak()
    assert peak(zero_stage=3, gpus=8) < peak(zero_stage=2, gpus=8) < peak(zero_stage=1, gpus=8) < peak()
    assert peak(zero_stage=2, offload=True) < peak(zero_stage=2)


def test_weights_and_activations_of_a_known_case():
    """Llama-3.1-8B, worked out by hand: fp32 masters and Adam, and 63,488 elements of bf16 per row and step."""
    made = planning.plan(TARGET, HEAD, SETUP)
    assert made.held["optimizer"] == 8 * 425_000_000
    assert made.held["target states"] == 8192 * 4 * 4096 * 2
    rows = 8192 * 7
    kept = 2 * 4096 + 2048 + 4096 + 4 * 4096 + 4096 + 2 * 14336
    earlier_keys = 8192 * 2048 * (1 + 2 + 3 + 4 + 5)
    of_embeddings = 8192 * (2 * 4096 + 4096 + 2048)
    assert made.phases["loss"]["unroll"] == 2 * (rows * kept + earlier_keys + of_embeddings)
    assert made.highest_phase in ("loss", "MLP backward")


@pytest.mark.parametrize("memory", [20, 40, 80, 141])
def test_the_longest_context_fits_and_one_granule_more_does_not(memory):
    setup = replace(SETUP, recompute=True)
    tokens = planning.longest_context(TARGET, HEAD, setup, memory * planning.GIB, lambda setup: 512)

    def fits(count):
        longer = replace(setup, tokens=count, chunk_size=512)
        return planning.plan(TARGET, HEAD, longer).peak <= planning.USABLE * memory * planning.GIB

    assert tokens % planning.GRANULE == 0
    assert (tokens == 0 or fits(tokens)) and not fits(tokens + planning.GRANULE)


def test_levers_are_tried_once_each_and_never_need_more():
    for setup in (SETUP, replace(SETUP, gpus=4), replace(SETUP, gpus=4, zero_stage=3, recompute=True)):
        options = list(planning.levers(setup))
        peaks = [planning.plan(TARGET, HEAD, option).peak for _, option in options]
        assert peaks == sorted(peaks, reverse=True)
        assert len({name for name, _ in options}) == len(options)


def test_the_rows_that_are_recomputed_together_are_the_model_s():
    assert planning.RECOMPUTED_ROWS == unroll_eagle3.RECOMPUTED_ROWS


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row['case']}, {row['contender']}")
def test_measured_peaks_are_within_a_tenth(row):
    """Steps of the benchmark on a GPU, beside bf16 weights and the optimizer; whole ones make the target's states."""
    case = next(case for case in CASES if case.name == row["case"])
    target, head = case.target_config, case.draft_config
    heads, kv_heads, head_dim = head.num_attention_heads, head.num_key_value_heads, head.head_dim
    inputs = head.num_aux_hidden_states * head.hidden_size
    inputs += (3 * heads + 4 * kv_heads) * head_dim + 3 * head.intermediate_size + head.draft_vocab_size
    target_shape = planning.TargetShape(target.hidden_size, target.vocab_size, head.num_aux_hidden_states, 0, 0)
    head_shape = planning.HeadShape(
        head.hidden_size, head.intermediate_size, heads, kv_heads, head_dim, head.draft_vocab_size,
        trained_parameters=inputs * head.hidden_size // 2,  # whose gradients the plan counts in fp32
    )  # fmt: skip
    setup = planning.Setup(case.length, case.steps, case.share / 100, recompute="recompute" in row["contender"])
    setup = replace(setup, chunk_size=chunk_size_for(target_shape, head_shape, setup))
    made = planning.plan(target_shape, head_shape, setup)
    states = made.held["target states"] if case.whole else 0
    predicted = states + max(sum(phase.values()) for phase in made.phases.values())
    assert predicted / planning.GIB == pytest.approx(row["over_gib"], rel=0.1)

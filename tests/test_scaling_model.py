"""The model of scaling: its limits, bytes counted by hand and by DeepSpeed itself, and its command."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import benchmark
from benchmarks.common import GIB, OUTPUT
from benchmarks.scaling_costs import Links, OneGpu, Run, Shape, expected_maximum, predict, traffic
from benchmarks.scaling_model import ALLOWED, GPUS
from benchmarks.scaling_rank import CASES

from benchmarks import scaling_costs

from .trainer.ranks import TORCHRUN, launch


LLAMA = Shape.of(CASES["llama 8k"])
# Fusion, query, keys and values, output, MLP, output head: of Llama-3.1-8B by hand.
MATRICES = 4096 * (3 * 4096 + 2 * 4096 + 2 * 2 * 1024 + 4096 + 3 * 14336 + 32000)
NORMS = 4 * 4096
WEIGHTS = MATRICES + NORMS
ONE = OneGpu(tokens=8192, step_ms=500.0, target_ms=240.0, optimizer_ms=5.0)
FREE = Links(nvlink=math.inf, network=math.inf, base_us=0.0, nvlink_us=0.0, network_us=0.0)


@pytest.fixture
def equal_gpus(monkeypatch):
    monkeypatch.setattr(scaling_costs, "GPU_DEVIATION", 0.0)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_gpu_takes_the_measured_step(stage):
    made = predict(LLAMA, replace(ONE, deviation_ms=9.0), Run(1, stage, row_variation=0.3), Links())
    assert (made.step_ms, made.collectives_ms, made.straggling_ms, made.bytes) == (ONE.step_ms, 0, 0, {})


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("gpus", [2, 8, 32])
def test_links_without_limits_scale_linearly(stage, gpus, equal_gpus):
    """Each rank does its own work, and the optimizer's of its part of the weights."""
    made = predict(LLAMA, ONE, Run(gpus, stage), FREE)
    assert made.step_ms == pytest.approx(ONE.step_ms - ONE.optimizer_ms * (1 - 1 / gpus))
    assert predict(LLAMA, ONE, Run(gpus, stage), Links()).step_ms > made.step_ms


def test_nothing_is_hidden_where_nothing_is_computed():
    empty = replace(ONE, step_ms=0.0, target_ms=0.0, optimizer_ms=0.0)
    for stage in (1, 2, 3):
        made = predict(LLAMA, empty, Run(8, stage), Links())
        assert made.step_ms == pytest.approx(made.exposed_ms) == pytest.approx(made.collectives_ms)


def test_bytes_of_the_stages_by_hand():
    assert (sum(LLAMA.matrices), LLAMA.norms) == (MATRICES, NORMS)
    assert traffic(LLAMA, 1) == traffic(LLAMA, 2) == {"AllReduce": 2 * WEIGHTS, "AllGather": 2 * WEIGHTS}
    assert traffic(LLAMA, 3) == {"ReduceScatter": 2 * WEIGHTS, "AllGather": 2 * WEIGHTS}
    assert traffic(LLAMA, 1, accumulation=4) == traffic(LLAMA, 1)
    assert traffic(LLAMA, 2, accumulation=4) == {"AllReduce": 8 * WEIGHTS, "AllGather": 2 * WEIGHTS}
    assert traffic(LLAMA, 3, accumulation=4) == {"ReduceScatter": 8 * WEIGHTS, "AllGather": 8 * MATRICES + 2 * NORMS}
    with pytest.raises(ValueError, match="more than ZeRO-3 keeps whole"):
        traffic(replace(LLAMA, norms=10**9), 3)


def test_bytes_are_those_of_nccl_on_two_gpus():
    rows = json.loads((OUTPUT / "scaling.json").read_text())["rows"]
    (row,) = (row for row in rows if (row["case"], row["mode"], row["gpus"]) == ("llama 8k", "zero2", 2))
    measured = {kind: figures["gib"] * GIB for kind, figures in row["collectives"].items()}
    assert measured == pytest.approx(traffic(LLAMA, 2), rel=1e-6)  # beside which there are a few scalars


def test_bytes_are_those_that_deepspeed_sends(tmp_path):
    """Two ranks, two micro-batches."""
    launch([*TORCHRUN, "-m", "tests.scaling_traffic", str(tmp_path)])
    rows = [json.loads(line)["counted"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    shape = Shape.of(CASES["llama 8k"].tiny())
    for stage, row in enumerate(rows, start=1):
        assert {kind: 2 * elements for kind, elements in row.items()} == traffic(shape, stage, accumulation=2)
    assert len(rows) == 3


def test_times_of_a_ring():
    links = Links(nvlink=100e9, network=10e9, base_us=0.0, nvlink_us=1.0, network_us=10.0)
    times = {kind: links.collective_ms(kind, 1e9, 8) for kind in ("AllReduce", "ReduceScatter", "AllGather")}
    assert times == pytest.approx({"AllReduce": 17.514, "ReduceScatter": 8.757, "AllGather": 8.757})
    assert links.collective_ms("AllGather", 1e9, 1) == 0
    # Two hosts: eight cards share what one NVLink carries. 15 hops, one through the network.
    assert links.collective_ms("AllGather", 1e9, 16) == pytest.approx(1000 * 15 / 16 / 80 + 0.014 + 0.010)


def test_shards_of_the_target_add_two_reductions_per_layer_and_batch(equal_gpus):
    whole, shards = (predict(LLAMA, ONE, Run(2, 2, target_tp=size), Links()) for size in (1, 2))
    added = 2 * 32 * 2 * Links().collective_ms("AllReduce", 2 * 8192 * 4096, 2)
    assert shards.step_ms - whole.step_ms == pytest.approx(added)
    with pytest.raises(ValueError, match="experts"):
        predict(Shape.of(CASES["gpt-oss 8k, K 3, full"]), ONE, Run(2, 2, target_tp=2), Links())


def test_the_slowest_of_many():
    known = {1: 0.0, 2: 1 / math.sqrt(math.pi), 3: 1.5 / math.sqrt(math.pi), 8: 1.4236, 32: 2.0697}
    assert {count: expected_maximum(count) for count in known} == pytest.approx(known, abs=1e-3)


def test_ranks_meet_once_per_step_under_zero1_only(equal_gpus):
    """Of the draft's part, which follows the supervised rows: 255 of 500 ms."""
    first, second, third = (
        predict(LLAMA, ONE, Run(8, stage, accumulation=4, row_variation=0.1), FREE).straggling_ms
        for stage in (1, 2, 3)
    )
    assert second == third == pytest.approx(4 * 1.4236 * 25.5, rel=1e-3)
    assert first == pytest.approx(second / 2)


def run(tmp_path, *flags: str, **changes: float) -> dict:
    content = json.loads((OUTPUT / "scaling.json").read_text())
    for row in content["rows"]:
        if row["gpus"] == 2:
            row |= changes
    (tmp_path / "scaling.json").write_text(json.dumps(content))
    output = tmp_path / "model.json"
    benchmark.main(["scaling-model", "--measured", str(tmp_path / "scaling.json"), "--output", str(output), *flags])
    return json.loads(output.read_text())


def test_the_command_predicts_and_checks(tmp_path, capsys):
    rows = run(tmp_path)["rows"]
    whole = [row for row in rows if row["case"] == "llama 8k"]
    assert [(row["mode"], row["gpus"]) for row in whole] == [
        (f"zero{stage}", gpus) for stage in (1, 2, 3) for gpus in GPUS
    ]
    (checked,) = (row for row in whole if row["mode"] == "zero2" and row["gpus"] == 2)
    assert abs(checked["difference"]) < ALLOWED
    assert checked["tokens_per_second"] == pytest.approx(
        checked["measured"]["tokens_per_second"] * (1 + checked["difference"])
    )
    text = (tmp_path / "model.md").read_text()
    assert f"{checked['tokens_per_second']:,.0f}" in text and "Held against measured rows" in text
    assert "llama 8k, target_tp 2" in capsys.readouterr().out


def test_a_row_that_is_not_as_predicted_fails_the_command(tmp_path):
    with pytest.raises(SystemExit, match="1 of the measured rows differ by more than 10%"):
        run(tmp_path, tokens_per_second=20_000.0)
    # Other steps than those that `scaling` runs are held against nothing.
    assert not any("measured" in row for row in run(tmp_path, "--accumulation", "4", tokens_per_second=1.0)["rows"])


def test_predictions_read_one_gpu_only(tmp_path):
    """Whatever two GPUs measured."""
    before, after = run(tmp_path), run(tmp_path, tokens_per_second=31_000.0, step_ms=1.0, exposed_ms=9.0)
    for one, other in zip(before["rows"], after["rows"], strict=True):
        assert {k: v for k, v in one.items() if k not in ("measured", "difference")} == {
            k: v for k, v in other.items() if k not in ("measured", "difference")
        }

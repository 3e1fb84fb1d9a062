"""The scaling benchmark on CPU: two ranks dry, ranks that fail, and what is read from traces."""

import json
import sys
from pathlib import Path

import pytest
import torch


sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import benchmark
from benchmarks.scaling_meter import communication, merged
from benchmarks.scaling_rank import CASES, CONFIGS, DEFAULT_CASES, DEFAULT_MODES, Rows

from benchmarks import scaling


def run(*arguments, path):
    steps = ["--warmup", "1", "--steps", "2", "--profiled", "1"]
    benchmark.main(["scaling", "--dry-run", *steps, *arguments, "--output", str(path)])
    return json.loads(path.read_text())


def test_runs_dry(tmp_path):
    content = run("--cases", "llama 8k", "--modes", "zero2", "zero3", path=tmp_path / "scaling.json")
    rows = {(row["gpus"], row["mode"]): row for row in content["rows"]}
    assert list(rows) == [(gpus, mode) for gpus in (1, 2) for mode in ("zero2", "zero3")]
    assert {row["status"] for row in rows.values()} == {"ok"}
    for (gpus, mode), row in rows.items():
        assert len(row["peak_gib"]) == gpus
        assert row["step_ms"] > 0 and row["tokens_per_second"] == pytest.approx(
            gpus * row["tokens_per_second_per_gpu"]
        )
        # Every mode trains the same head on the same rows.
        assert row["loss"] == pytest.approx(rows[gpus, "zero2"]["loss"], rel=1e-4)
        if gpus == 2:
            assert row["speedup"] == pytest.approx(row["tokens_per_second"] / rows[1, mode]["tokens_per_second"])
            assert row["efficiency"] == pytest.approx(row["speedup"] / 2)
    assert content["machine"].keys() >= {"deepspeed", "accelerate", "torch", "gpus"}


def test_a_target_in_shards_runs_dry(tmp_path):
    """On the numbers of GPUs that its groups divide."""
    rows = run("--cases", "llama 8k, target_tp 2", "--modes", "ddp", path=tmp_path / "scaling.json")["rows"]
    assert [(row["gpus"], row["target_tp"], row["status"]) for row in rows] == [(2, 2, "ok")]
    assert rows[0]["step_ms"] > 0 and rows[0]["deviation_ms"] >= 0


def test_a_target_in_shards_is_compared_with_a_whole_one_on_one_gpu():
    figures = {"mode": "zero2", "status": "ok"}
    whole = scaling._names(1, "llama 8k", "zero2") | figures | {"tokens_per_second": 10.0}
    other = scaling._names(1, "llama 32k", "zero2") | figures | {"tokens_per_second": 1.0}
    row = scaling._names(4, "llama 8k, target_tp 2", "zero2") | figures | {"tokens_per_second": 30.0}
    scaling.compare(row, [whole, other])
    assert (row["speedup"], row["efficiency"]) == (3.0, 0.75)


def test_ranks_that_fail_take_one_case_with_them(tmp_path, monkeypatch, capsys):
    """What trains with ZeRO-3 is the last of its launch, and a launch goes on behind what failed."""
    launched = []

    def launch(gpus, plan, deadline):
        launched.append([mode for _, mode in plan.cells])
        for _, mode in plan.cells:
            if mode == "zero1":
                plan.log.write_text("[rank1]: torch.OutOfMemoryError: CUDA out of memory.\nRuntimeError: aborted\n")
                return
            yield {"tokens_per_second": 1.0, "step_ms": 1.0, "tokens_per_second_per_gpu": 1.0, "peak_gib": [None],
                   "collectives_ms": 0.0, "exposed_share": 0.0}  # fmt: skip

    monkeypatch.setattr(scaling, "launch", launch)
    modes = ["zero3", "ddp", "zero1", "zero2"]
    rows = run("--gpus", "1", "--cases", "llama 8k", "--modes", *modes, path=tmp_path / "scaling.json")["rows"]
    assert launched == [["zero3"], ["ddp", "zero1", "zero2"], ["zero2"]]
    assert [(row["mode"], row["status"]) for row in rows] == [
        ("zero3", "ok"), ("ddp", "ok"), ("zero1", "failed"), ("zero2", "ok"),
    ]  # fmt: skip
    assert rows[2]["reason"] == "torch.OutOfMemoryError: CUDA out of memory."
    assert "aborted" in capsys.readouterr().out

    rows = run("--time-limit", "0", path=tmp_path / "scaling.json")["rows"]
    assert len(rows) == 2 * len(DEFAULT_CASES) * len(DEFAULT_MODES)
    assert {row["reason"] for row in rows} == {"out of time"}


def test_more_gpus_than_there_are_is_an_error(capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["scaling", "--gpus", "1", "99"])
    assert "`--gpus` 99" in capsys.readouterr().err


def test_ranks_out_of_time_are_ended(tmp_path):
    """While they start, in the middle of their imports."""
    rows = run("--time-limit", "2", "--gpus", "2", "--modes", "ddp", path=tmp_path / "scaling.json")["rows"]
    assert {row["reason"] for row in rows} == {"out of time"}


def kernel(start, end, name="gemm", category="kernel", **args):
    return {"cat": category, "name": name, "ts": 1000 * start, "dur": 1000 * (end - start), "args": args}


def test_communication_is_what_no_other_kernel_covers():
    reduce = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    gather = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    message = {"In msg nelems": 2**30, "Out msg nelems": 2**29, "dtype": "BFloat16"}
    figures = communication(
        [
            kernel(0, 40),
            kernel(30, 60, reduce, **message),  # 20 exposed
            kernel(50, 55, "Memcpy DtoD", "gpu_memcpy"),  # 5 of them are not
            kernel(70, 80, gather),  # exposed
            kernel(70, 80, "nccl:all_gather", "gpu_user_annotation"),
            kernel(0, 500, "aten::mm", "cpu_op"),
            kernel(95, 100),
            {"name": "process_name", "ph": "M"},
        ],
        steps=2,
    )
    by_kind = figures.pop("collectives")
    assert figures == pytest.approx(
        {"profiled_step_ms": 50, "collectives_ms": 20, "exposed_ms": 12.5, "exposed_share": 0.25, "idle_ms": 12.5}
    )
    assert by_kind == {
        "ReduceScatter": pytest.approx({"kernels": 0.5, "ms": 15, "gib": 1}),
        "AllGather": pytest.approx({"kernels": 0.5, "ms": 5, "gib": 0}),
    }
    assert communication([], steps=1)["exposed_share"] == 0


def test_intervals_are_merged():
    assert merged([(5, 6), (0, 2), (1, 3), (3, 4), (0, 1)]) == [(0, 4), (5, 6)]
    assert merged([]) == []


@pytest.mark.parametrize("name", CASES)
def test_rows_are_whole_and_differ(name):
    case = CASES[name]
    rows = Rows(case, torch.arange(100, 200), 2)
    ids, others = rows[0]["input_ids"], rows[1]["input_ids"]
    assert len(rows) == 2 and len(ids) == case.length and rows[0]["loss_mask"].all()
    assert not torch.equal(ids, others) and torch.equal(ids, rows[0]["input_ids"])


def test_modes_are_the_configs_that_ship():
    assert set(DEFAULT_MODES) <= CONFIGS.keys()

"""The benchmarks on CPU: their dry runs, what they check before they time, and what they count."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch


sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import benchmark
from benchmarks.attention_cases import CASES, Case, make_inputs
from benchmarks.attention_check import Reference, visible_keys
from benchmarks.attention_contenders import Flex, Ours
from benchmarks.targets import ATTENTION_NAME, TARGETS

from benchmarks import attention, attention_contenders, attention_memory, common


CPU = torch.device("cpu")
MIXED = Case("mixed", 2, 40, heads=(4, 2), head_dim=16, documents=(17, 3, 20), window=6, sinks=True)


def dense_flex(query, key, value, *, block_mask, enable_gqa, return_aux=None):
    """What flex_attention computes; the real one has no backward on CPU."""
    rows, columns = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])
    visible = block_mask.mask_mod(None, None, rows, columns)
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    scores = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~visible, float("-inf"))
    out = scores.softmax(-1) @ value
    return out if return_aux is None else (out, SimpleNamespace(lse=scores.logsumexp(-1)))


def test_all_run_dry(tmp_path):
    results, lengths, targets = (tmp_path / f"{name}.json" for name in ("attention", "attention_memory", "targets"))
    shapes = ["1x32768", "packed 2x8x1024", "queries 25% of 1x32768", "gpt-oss 2x8192, window 128, sinks"]
    benchmark.main(["attention", "--dry-run", "--steps", "6", "--shapes", *shapes, "--output", str(results)])
    rows = json.loads(results.read_text())["rows"]
    status = {(row["case"], row["engine"]): row["status"] for row in rows}
    assert list(dict.fromkeys(case for case, _ in status)) == [case.name for case in CASES if case.name in shapes]
    for shape in shapes:
        assert status[shape, "sdpa"] == status[shape, "reference"] == status[shape, "auto"] == "ok"
        assert status[shape, "fa4"] == "refused"
    assert all(row["chosen"] == "sdpa" for row in rows if row["engine"] == "auto")
    assert all(row["error_over_dense"] <= 2 for row in rows if row["engine"] == "sdpa")

    benchmark.main(["attention-memory", "--dry-run", "--engines", "dense", "auto", "--output", str(lengths)])
    assert {row["status"] for row in json.loads(lengths.read_text())["rows"]} == {"ok"}

    benchmark.main(["targets", "--dry-run", "--output", str(targets)])
    rows = json.loads(targets.read_text())["rows"]
    assert {row["attention"] for row in rows if "attention" in row} == {
        "sdpa",
        "eager",
        ATTENTION_NAME,
        f"{ATTENTION_NAME} by sdpa",
    }
    assert {row["target"] for row in rows if "packed" in row} == set(TARGETS)
    assert all(row.get("status", "ok") == "ok" for row in rows)

    files = ["--results", str(results), "--lengths", str(lengths), "--targets", str(targets)]
    benchmark.main(["attention-figures", *files, "--output-dir", str(tmp_path)])
    page = (tmp_path / "attention.md").read_text()
    for cell in ("| packed 2x8x1024 | 6 |", "| 6 | sdpa |", "refused", "| gpt-oss-20b | block_sparse_flash |"):
        assert cell in page
    for figure in ("attention_time.png", "attention_memory.png"):
        assert 5_000 < (tmp_path / figure).stat().st_size < 150_000


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("case", [MIXED, Case("plain", 1, 24, heads=(4, 2), head_dim=16)], ids=["mixed", "plain"])
def test_flex_attention_is_given_the_same_mask_and_its_gradients_are_read_back(case, step, monkeypatch):
    monkeypatch.setattr(attention_contenders, "flex_attention", dense_flex)
    reference = Reference.of(make_inputs(case, step, CPU, torch.float32), rows=9)
    assert len(reference.queries) == 9
    assert Flex(reference.inputs).run(reference.inputs.grad_out)[1].shape == reference.inputs.query.shape
    assert reference.error(Flex(reference.inputs).run) <= 2


@pytest.mark.parametrize("result", range(9))  # the output and eight gradients
def test_a_wrong_result_is_never_timed(result):
    inputs = make_inputs(MIXED, 2, CPU, torch.bfloat16)
    reference = Reference.of(inputs, rows=40)
    ours = Ours(inputs, "sdpa")

    def slightly_wrong(grad_out):
        tensors = ours.run(grad_out)
        tensors[result] = tensors[result] * 1.03
        return tensors

    def with_nan(grad_out):
        tensors = ours.run(grad_out)
        tensors[result].view(-1)[0] = float("nan")
        return tensors

    assert attention.check(ours, reference) <= 2
    for wrong in (slightly_wrong, with_nan):
        with pytest.raises(attention.Refused, match="wrong"):
            attention.check(SimpleNamespace(run=wrong), reference)


@pytest.mark.parametrize("case", [*CASES, *attention_memory.CASES, MIXED], ids=lambda case: case.name)
def test_visible_pairs_are_counted_exactly(case):
    case = case.shrunk(case.length // 64)
    inputs = make_inputs(case, 3, CPU, torch.float32)
    visible = visible_keys(inputs, torch.arange(len(inputs.positions)))
    assert case.visible_pairs(3) == case.batch * int(visible.sum())
    assert (case.turn is None) == (len(inputs.positions) == case.length)


def test_shrinking_keeps_the_kind_of_mask():
    compacted = Case("compacted", 1, 4096, documents=(4000, 3, 93), turn=(256, 1024), window=512)
    small = compacted.shrunk(16)
    assert small.documents == (250, 3, 5) and small.length == 258
    assert small.turn == (16, 64) and small.window == 32
    assert compacted.shrunk(1) is compacted


def test_what_fails_is_recorded_and_the_rest_goes_on(tmp_path, monkeypatch):
    def exhausted(*args):
        raise torch.OutOfMemoryError("of 139 GiB")

    monkeypatch.setattr(attention, "PEERS", {"dense": exhausted})
    monkeypatch.setattr(attention, "LARGEST_DENSE", 0)
    path = tmp_path / "attention.json"
    engines = ["reference", "sdpa"]
    command = ["attention", "--dry-run", "--shapes", "2x8192", "--steps", "0", "--output", str(path)]
    benchmark.main([*command, "--engines", *engines])
    reasons = {row["engine"]: row.get("reason") for row in json.loads(path.read_text())["rows"]}
    assert reasons == {"reference": "needs about 0 GiB", "sdpa": None}
    monkeypatch.setattr(attention, "LARGEST_DENSE", 2**40)
    benchmark.main([*command, "--engines", "dense", "sdpa"])
    rows = json.loads(path.read_text())["rows"]
    assert [(row["status"], row.get("reason")) for row in rows] == [("failed", "out of memory"), ("ok", None)]
    benchmark.main([*command, "--time-limit", "0"])
    assert {row["reason"] for row in json.loads(path.read_text())["rows"]} == {"out of time"}


@pytest.mark.parametrize("name", sorted(benchmark.BENCHMARKS.keys() - {"loss-memory"}))
def test_every_benchmark_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as end:
        benchmark.main([name, "--help"])
    assert end.value.code == 0 and "--output" in capsys.readouterr().out


def test_a_dry_run_leaves_the_kept_results_alone():
    path = common.OUTPUT / "attention.json"
    assert common.Results(path, torch.device("cpu")).path != path


def test_cached_states_of_an_8b_shaped_sample_run_dry(tmp_path):
    benchmark.main(["cache", "--dry-run", "--output", str(tmp_path / "cache.json")])
    result = json.loads((tmp_path / "cache.json").read_text())
    assert {row["storage"] for row in result["sizes"]} == {"bfloat16", "float8"}
    states = 8190 * 3 + 2457  # rows of three layers up to the last pair's, and its teachers
    bits = {(row["states"], row["storage"]): row["bits"] for row in result["states"]}
    for size in result["sizes"]:
        assert size["bytes"] == pytest.approx(states * 4096 * bits[size["like"], size["storage"]] / 8)
    assert "| random, normal | float8 |" in (tmp_path / "cache.md").read_text()

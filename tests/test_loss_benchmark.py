"""The benchmarks of the loss on CPU: their dry runs, what they check before they time, and what they count."""

import json
import sys
from pathlib import Path

import pytest
import torch


sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import benchmark
from benchmarks.common import Refused
from benchmarks.loss_cases import CASES, HARD_CASES, IN_VOCABULARY, SOFT_CASES, Case, make_inputs
from benchmarks.loss_check import Reference, SampledReference, accept, dense_results
from benchmarks.loss_contenders import GEMMS, PEERS, Dense, Ours, liger_chunk, peer

from benchmarks import lm
from draftsmith.ops.streaming_loss.reference import reference_cross_entropy, reference_draft_loss


CPU = torch.device("cpu")
SMALL = {"hidden": 16, "vocabulary": 203, "rows": 37}
SMALL_CASES = [
    Case("hard", **SMALL),
    Case("kl", **SMALL, steps=3, objective="kl"),
    Case("tv", **SMALL, steps=3, objective="tv", draft_vocabulary=50),
    Case("lk_lambda", **SMALL, steps=2, objective="lk_lambda", draft_vocabulary=50),
]
small_cases = pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.name)


def test_all_run_dry(tmp_path):
    losses, models = tmp_path / "loss.json", tmp_path / "lm.json"
    long = [case.name for case in CASES if case.checked_rows]
    names = [HARD_CASES[0].name, SOFT_CASES[3].name, *long]
    benchmark.main(["loss", "--dry-run", "--cases", *names, "--output", str(losses)])
    rows = json.loads(losses.read_text())["rows"]
    assert list(dict.fromkeys(row["case"] for row in rows)) == [case.name for case in CASES if case.name in names]
    ours = [row for row in rows if row["contender"].startswith("ours")]
    assert len(ours) == 6 + 4 + 2 * 2
    assert all(row["status"] == "ok" and row["error_over_dense"] <= 2 and row["chunk"] > 0 for row in ours)
    assert all(row["over_gemms"] > 0 and row["weight_cosine"] > 0.9995 for row in ours if row["case"] not in long)

    benchmark.main(["lm", "--dry-run", "--output", str(models)])
    content = json.loads(models.read_text())
    assert [row["loss"] for row in content["rows"]] == ["dense", "16", "4", "auto"] * 2
    assert all(row["status"] == "ok" and row["tokens_per_second"] > 0 for row in content["rows"])
    assert content["settings"]["head_difference"] < 1e-5

    files = ["--results", str(losses), "--lm", str(models), "--output-dir", str(tmp_path)]
    benchmark.main(["loss-figures", *files])
    page = (tmp_path / "loss.md").read_text()
    for cell in ("| ours auto |", "| gemms 4096 |", "| 48 | auto = ", names[1]):
        assert cell in page
    for figure in ("loss_chunks.png", "lm_chunks.png"):
        assert 5_000 < (tmp_path / figure).stat().st_size < 150_000


@small_cases
def test_the_truth_is_that_of_the_operators(case):
    inputs = make_inputs(case, CPU, torch.float64)
    if case.steps:
        loss, _ = reference_draft_loss(
            inputs.states, inputs.weight, inputs.teacher_states, inputs.teacher_weight, inputs.row_sets,
            t2d=inputs.t2d, objective=case.objective, step_weights=[case.rows / rows for rows in case.rows_per_step],
        )  # fmt: skip
    else:
        loss = reference_cross_entropy(inputs.states[0], inputs.weight, inputs.labels)
    expected = [loss, *torch.autograd.grad(loss, inputs.leaves)]
    torch.testing.assert_close(dense_results(inputs, torch.float64), expected)
    torch.testing.assert_close(Dense(make_inputs(case, CPU, torch.float32)).run()[0].isfinite(), torch.tensor(True))


@small_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ours_and_the_dense_loss_pass(case, dtype):
    inputs = make_inputs(case, CPU, dtype)
    reference = Reference(inputs)
    for contender in (Ours(inputs, 5), Ours(inputs, None), Dense(inputs)):
        accept(reference.compare(contender.run()), ours=True)


@pytest.mark.parametrize("result", range(5))  # the loss, three states' gradients, the head's
def test_a_wrong_result_is_never_timed(result):
    inputs = make_inputs(SMALL_CASES[1], CPU, torch.bfloat16)
    reference, right = Reference(inputs), Ours(inputs, 8).run()
    for wrong in (right[result] * 1.03, right[result] * torch.nan):
        with pytest.raises(Refused, match="wrong"):
            accept(reference.compare([*right[:result], wrong, *right[result + 1 :]]), ours=True)


def test_a_peer_may_be_less_precise_but_must_compute_the_same():
    inputs = make_inputs(SMALL_CASES[1], CPU, torch.bfloat16)
    reference, right = Reference(inputs), Ours(inputs, 8).run()
    noise = right[-1].std() * torch.randn_like(right[-1])
    accept(reference.compare([*right[:-1], right[-1] + 0.1 * noise]), ours=False)
    for another in ([right[0] * 1.5, *right[1:]], [*right[:-1], noise], [right[0] * torch.nan, *right[1:]]):
        with pytest.raises(Refused, match="another loss"):
            accept(reference.compare(another), ours=False)


def test_sampled_rows_reveal_a_wrong_gradient_of_the_states():
    inputs = make_inputs(SMALL_CASES[0], CPU, torch.bfloat16)
    reference, right = SampledReference(inputs, 9), Ours(inputs, 8).run()
    assert len(reference.rows) == 9
    accept(reference.compare(right), ours=True)
    for wrong in (right[1] * 1.03, right[1].roll(1, 0), right[1] * torch.nan):
        with pytest.raises(Refused, match="wrong"):
            accept(reference.compare([right[0], wrong, right[2]]), ours=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_flops_are_those_of_the_products(case):
    rows = 3 * case.steps or 3
    teacher = case.vocabulary if case.steps else 0
    expected = 2 * case.rows * case.hidden * (rows * case.head_size + teacher)
    assert 0.999 * expected < case.gemm_flops <= expected
    assert set(case.peers) <= PEERS.keys()


@pytest.mark.parametrize("name", GEMMS)
def test_bare_products_have_the_shapes_of_the_gradients(name):
    inputs = make_inputs(SMALL_CASES[1], CPU, torch.bfloat16)
    *grads, weight_grad = GEMMS[name](inputs).run()
    assert sum(len(grad) for grad in grads) == sum(SMALL_CASES[1].rows_per_step)
    assert weight_grad.shape == inputs.weight.shape and weight_grad.dtype == torch.float32


def test_the_targets_argmax_is_mostly_in_the_draft_vocabulary():
    case = Case("", 64, 2003, rows=2000, steps=1, objective="kl", draft_vocabulary=500)
    inputs = make_inputs(case, CPU, torch.float32)
    best = (inputs.teacher_states @ inputs.teacher_weight.T).argmax(-1)
    assert (best == inputs.labels).float().mean() > 0.99
    assert abs(inputs.t2d[best].float().mean() - (IN_VOCABULARY + (1 - IN_VOCABULARY) / 4)) < 0.02


def test_peers_that_are_not_installed_are_told_from_broken_ones(tmp_path, monkeypatch):
    with pytest.raises(Refused, match="not installed"):
        peer("no_such_peer.ops")
    (tmp_path / "broken_peer.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        peer("broken_peer")


def test_chunks_of_liger_follow_its_rule():
    llama, gpt_oss, small, _ = HARD_CASES
    assert [liger_chunk(llama, multiple) for multiple in (1, 16, 32)] == [256, 4096, 8192]
    assert [liger_chunk(gpt_oss, multiple) for multiple in (1, 4)] == [128, 512]
    assert liger_chunk(small, 16) == 8192


def test_a_language_model_whose_losses_differ_is_not_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(lm, "DIFFERENCE", -1)
    with pytest.raises(SystemExit, match="differs from the dense one"):
        lm.main(["--dry-run", "--output", str(tmp_path / "lm.json")])
    assert not (tmp_path / "lm.json").exists()

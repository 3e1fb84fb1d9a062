"""The benchmark of trained heads: its arms, its runs on a tiny target, and the figures from their results."""

import json
import math
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from matplotlib.image import imread


sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import benchmark
from benchmarks.heads_arms import ALL_ARMS, ARMS, RECIPE, Arm, check_evaluation, distinct, parsed_arms
from benchmarks.heads_train import AS_IT_IS, VARIANTS, label_row_sets

from benchmarks import heads, heads_figures, heads_plots, heads_runs, heads_train
from draftsmith import commands
from draftsmith.alignment import row_sets
from draftsmith.commands.parsing import UsageError
from tests.commands.conftest import target_dir  # noqa: F401, a fixture
from tests.data.common import chat


TRAIN = {
    "ttt_steps": 3, "draft_vocab_size": 64, "packing": True, "max_length": 64, "row_length": 64, "logging_steps": 1,
    "num_train_epochs": 1, "per_device_train_batch_size": 1, "learning_rate": "1e-3",
}  # fmt: skip
EVALUATE = {"num_draft_tokens": [2], "temperature": [0.0], "num_prompts": 2, "max_new_tokens": 4}


def test_all_arms_are_valid_and_those_like_the_recipe_are_it(tmp_path):
    parsed = parsed_arms(ALL_ARMS, TRAIN, tmp_path)
    assert list(parsed) == list(ARMS) and len(ARMS) == len(ALL_ARMS)
    kept, alike = distinct(ALL_ARMS, parsed)
    assert kept[0] is RECIPE
    assert alike == dict.fromkeys(
        ["rows_target", "layer_none", "objective_kl", "normalized_token", "decay_0.8", "k_3", "norms_none",
         "supervision_served", "rows_packed", "batch_1", "weights_fp32", "rate_1e-3", "epochs_1"], "recipe",
    )  # fmt: skip
    assert {arm.variant for arm in ALL_ARMS} == VARIANTS.keys()
    assert all(arm.variant == AS_IT_IS or not arm.flags for arm in ALL_ARMS)


def test_all_bad_arms_are_named_at_once(tmp_path):
    bad = [Arm("typo", "", "", {"tt_steps": 3}), RECIPE, Arm("objective_mse", "", "", {"objective": "mse"})]
    with pytest.raises(ValueError, match=r"typo: .*`tt_steps`(.|\n)*objective_mse: `objective` is 'mse'"):
        parsed_arms(bad, TRAIN, tmp_path)


def test_a_wrong_evaluation_is_refused_before_anything_is_trained(tmp_path):
    check_evaluation({**EVALUATE, "target": "x/y"}, tmp_path)
    with pytest.raises(ValueError, match="`evaluate` of the recipe: .*`num_draft_token`"):
        check_evaluation({**EVALUATE, "target": "x/y", "num_draft_token": 3}, tmp_path)


def test_jobs_are_dealt_over_gpus():
    assert heads.dealt(5, ["2", "7"]) == ["2", "7", "2", "7", "2"]
    assert heads.dealt(2, [None]) == [None, None]


def test_an_interruption_begins_no_further_training(monkeypatch):
    begun = []

    def row_of(training, gpu):
        begun.append(training)
        if training == 2:
            raise KeyboardInterrupt
        time.sleep(0.02)
        return {"training": training}

    monkeypatch.setattr(heads, "row_of", row_of)
    assert [row["training"] for row in heads.run_all([0, 1], 1, time.monotonic() + 60)] == [0, 1]
    rows = heads.run_all(range(2, 100), 1, time.monotonic() + 60)
    with pytest.raises(KeyboardInterrupt):
        next(rows)
    assert len(begun) < 50


def test_label_positions_hold_what_a_server_drafts():
    """And paths that begin in the prompt; all sets are nested, with a teacher for each pair."""
    mask = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 0, 0]])
    documents = torch.tensor([[0] * 10 + [1] * 4 + [-1] * 2])
    turns = torch.where(mask.bool(), documents, -1)
    wide = label_row_sets(mask, documents, turns, ttt_steps=3)
    served = row_sets(mask, documents, turns, ttt_steps=3)
    assert [rows.tolist() for rows in wide] == [[1, 2, 3, 4, 5, 6, 10, 11], [1, 2, 3, 4, 5, 10], [1, 2, 3, 4]]
    for step, rows in enumerate(wide):
        assert set(served[step].tolist()) <= set(rows.tolist())
        assert set((rows + step).tolist()) <= set(wide[0].tolist())
        assert step == 0 or set(rows.tolist()) <= set(wide[step - 1].tolist())


@pytest.fixture(scope="module")
def experiment(target_dir, tmp_path_factory):  # noqa: F811
    """Flags of the benchmark for a tiny target."""
    directory = tmp_path_factory.mktemp("experiment")
    rows = [{"messages": chat(f"What is {n}?", f"It is {n} and then {n * n}, what else?")} for n in range(12)]
    (directory / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("sums", "letters"):
        text = "".join(json.dumps({"prompt": f"{name} {n}?", "category": f"c{n}"}) + "\n" for n in range(3))
        (directory / f"{name}.jsonl").write_text(text)
    recipe = {"target": "elsewhere", "train": {**TRAIN, "use_cpu": True, "save_steps": 5}, "evaluate": EVALUATE}
    (directory / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return [
        "heads", "--dry-run", "--target", str(target_dir), "--answers", str(directory / "answers.jsonl"),
        "--held-out", str(directory / "sums.jsonl"), str(directory / "letters.jsonl"),
        "--recipe", str(directory / "recipe.yaml"), "--directory", str(directory / "runs"), "--output", "heads.json",
    ]  # fmt: skip


@pytest.fixture
def commands_run_here(monkeypatch):
    """In this process, which has imported all that they need."""

    def run(command, env, stdout, stderr):
        module, *arguments = command[command.index("-m") + 1 :] if "-m" in command else command[3:]
        main = (
            heads_train.main if module == "benchmarks.heads_train" else lambda words: commands.main([module, *words])
        )
        status = 0
        try:
            main(arguments)
        except UsageError as error:
            print("error:", error, file=stdout)
            status = 2
        except SystemExit as error:
            status = error.code
        return SimpleNamespace(returncode=status)

    monkeypatch.setattr(heads_runs.subprocess, "run", run)


@pytest.mark.usefixtures("commands_run_here")
def test_trains_decodes_and_resumes(experiment, tmp_path, capsys):
    directory = Path(experiment[experiment.index("--directory") + 1])
    flags = [*experiment, "--arms", "vocabulary_full", "vocabulary_32768", "k_3"]  # k_3 is the recipe
    benchmark.main([*flags, "--save-points", "2"])
    said = capsys.readouterr().out
    assert "3 of 3 trainings to run" in said and "`draft_vocab_size`=32768 is not in" in said
    content = json.loads((directory / "heads.json").read_text())
    rows = {row["arm"]: row for row in content["rows"]}
    assert {arm: row["status"] for arm, row in rows.items()} == {
        "recipe": "ok", "vocabulary_full": "ok", "vocabulary_32768": "failed",
    }  # fmt: skip
    assert rows["vocabulary_full"]["trained_parameters"] > rows["recipe"]["trained_parameters"]
    for arm in ("recipe", "vocabulary_full"):
        row = rows[arm]
        assert [point["step"] for point in row["curve"]] == [1, 2] and row["steps"] == 2 and row["jobs"] == 1
        assert 0 < row["curve"][0]["tokens"] < row["curve"][1]["tokens"] == row["tokens"]
        assert 0 < row["supervised_tokens"] < row["tokens"]
        assert list(row["sets"]) == ["sums", "letters"]
        for name, counts in row["sets"].items():
            assert counts["prompts"] == len(counts["rounds"]) == 2
            length = 1 + sum(counts["accepted"]) / counts["verifications"]
            assert row["curve"][-1]["sets"][name] == counts["acceptance_length"] == pytest.approx(length)

    before = (directory / "recipe-0" / "trained.json").stat().st_mtime_ns
    benchmark.main([*flags, "--save-points", "2"])  # what has failed is tried again
    assert "1 of 3 trainings to run" in capsys.readouterr().out
    assert (directory / "recipe-0" / "trained.json").stat().st_mtime_ns == before

    decode_as_a_peer(experiment, directory, rows["recipe"], tmp_path)
    benchmark.main(["heads-figures", "--results", str(directory / "heads.json"), "--output-dir", str(tmp_path)])
    page = (tmp_path / "heads.md").read_text()
    for text in (
        "## Draft vocabulary",
        "| vocabulary_full |",
        "Ours and specforge, 0.0001, batch 16",
        "7 s of training, of which 2 compiling",
        "## Not run",
        "+0.000 (+0.000 to",
    ):
        assert text in page
    assert (tmp_path / "heads_by_position.png").exists() and (tmp_path / "heads_learning.png").exists()


@pytest.mark.usefixtures("commands_run_here")
def test_a_head_that_cannot_be_decoded_ends_with_its_log(experiment, tmp_path):
    (tmp_path / "step-1").mkdir()
    with pytest.raises(SystemExit, match="^status 2, decode_only/step-1.log:"):
        benchmark.main([*experiment, "--decode-only", str(tmp_path / "step-1")])


def decode_as_a_peer(experiment, directory, recipe, tmp_path):
    """Our own save points, as if another library had trained them."""
    points = [
        {
            "step": point["step"], "tokens": point["tokens"], "supervised": point["supervised_tokens"],
            "seconds": 7.0, "compile_seconds": 2.0,
        }
        for point in recipe["curve"]
    ]  # fmt: skip
    settings = {"learning_rate": 1e-4, "batch_size": 16}
    (tmp_path / "peer.json").write_text(json.dumps({"settings": settings, "rows": points}))
    places = [str(directory / "recipe-0" / "head" / f"checkpoint-{step}") for step in (1, 2)]
    benchmark.main([*experiment, "--decode-only", *places, "--peer", str(tmp_path / "peer.json")])
    rows = json.loads((directory / "heads.json").read_text())["rows"]
    (peer,) = [row for row in rows if row["axis"] == "peer"]
    assert peer["sets"] == recipe["sets"] and peer["seconds"] == 7 and len(peer["curve"]) == 2


def test_differences_are_of_the_same_prompts():
    rng = np.random.default_rng(1)
    rounds = rng.integers(20, 40, size=60)
    hard = rng.normal(15, 8, size=60)  # prompts differ far more than heads do
    worse = {"a": np.stack([rounds, hard], axis=1)}
    better = {"a": np.stack([rounds, hard + 1 + rng.normal(0, 0.5, size=60)], axis=1)}
    value, low, high = heads_figures.difference(better, worse)
    assert 0 < low < value < high and value == pytest.approx(60 / rounds.sum(), rel=0.2)
    apart = np.quantile(heads_figures.drawn(worse["a"], 0), (0.025, 0.975))
    assert high - low < 0.3 * (apart[1] - apart[0])
    assert heads_figures.verdict(value, low, high) == f"Better by {value:.3f}, outside the interval."
    assert heads_figures.verdict(-0.1, -0.2, 0.0) == "Within the interval."
    assert heads_figures.verdict(-0.2, -0.3, -0.1) == "Worse by 0.200, outside the interval."


def test_what_a_training_logged_is_thinned_and_keeps_its_last_point():
    entries = [{"num_tokens": 10.0 * step, "acceptance_length": 1 + step / 100} for step in range(1, 102)]
    thinned = heads_train.logged([{"eval_loss": 1.0}, *entries, {"train_runtime": 3.0}])
    assert 20 <= len(thinned) <= heads_train.LOGGED and thinned[-1] == {"tokens": 1010, "acceptance_length": 2.01}
    assert np.ptp(np.diff([point["tokens"] for point in thinned])) == 0
    assert [point["tokens"] for point in heads_train.logged(entries[:3])] == [10, 20, 30]
    assert heads_train.logged([]) == []


def test_learning_is_drawn_of_what_there_is(tmp_path):
    sets = {"a": {"acceptance_length": 1.5}}
    curve = [{"tokens": 10, "seconds": 3.0, "sets": {"a": 1.5}}]
    log = [{"tokens": 10, "acceptance_length": 1.2}]
    crowded, alone = ({"sets": sets, "curve": curve, "jobs": jobs, "logged": log} for jobs in (2, 1))
    without = {"sets": sets, "curve": [], "jobs": 1, "logged": log}
    heads_plots.draw_learning({"recipe": [without]}, tmp_path / "none.png")
    widths = []
    for name, rows in {
        "logs": {"recipe": [without], "k_3": [without]},
        "set": {"recipe": [crowded]},
        "set_and_seconds": {"recipe": [alone]},
        "all": {"recipe": [alone], "k_3": [alone]},
    }.items():
        heads_plots.draw_learning(rows, tmp_path / f"{name}.png")
        widths.append(imread(tmp_path / f"{name}.png").shape[1])
    assert widths[0] == widths[1] < widths[2] < widths[3] and not (tmp_path / "none.png").exists()


def test_a_peer_with_another_rate_or_batch_is_another_arm():
    flags = [{"learning_rate": rate, "batch_size": size} for rate, size in ((1e-4, 16), (1e-3, 16), (1e-4, 1))]
    assert len({heads.peer_name(chosen) for chosen in [*flags, {**flags[0], "fc_norm": True}]}) == 4


def test_time_to_the_peers_acceptance():
    curve = [{"seconds": 10, "sets": {"a": 1.2, "b": 1.4}}, {"seconds": 20, "sets": {"a": 1.6, "b": 1.6}}]
    assert heads_figures.seconds_to(curve, 1.3) == pytest.approx(10)
    assert heads_figures.seconds_to(curve, 1.45) == pytest.approx(15)
    assert heads_figures.seconds_to(curve, 1.15) == pytest.approx(5)
    assert heads_figures.seconds_to(curve, 1.7) is None
    assert heads_figures.seconds_to([], 1.1) is None
    assert math.isclose(np.interp(15, *heads_figures.points(curve, "seconds")), 1.45)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--save-points", "1"], "`--save-points` at least 2"),
        (["--peer", "x.json"], "name them"),
        (["--held-out", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--arms", "recipes"], "invalid choice: 'recipes'"),
    ],
)
def test_wrong_flags_are_refused(experiment, flags, message, capsys):
    with pytest.raises(SystemExit):
        benchmark.main([*experiment, *flags])
    assert message in capsys.readouterr().err

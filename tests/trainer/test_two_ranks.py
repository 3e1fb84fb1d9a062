"""Two processes, as DDP and with ZeRO, equal one: uneven ranks, accumulation, recompute, saves and resumed runs."""

import pytest
import torch

from draftsmith import Eagle3DraftModel

from .common import assert_equal_weights, logged, make_target, weights_of
from .ranks import MODES, run_two_ranks
from .two_ranks import CASES, RESUMED_MODES, make_case_trainer, make_resumed_trainer


def assert_equal_one_process(results, output_dir, tolerance, weight_tolerance):
    for case in CASES:
        one = make_case_trainer(output_dir, case)
        one.train()
        metrics = one.evaluate()
        for mode in MODES:
            two = results[mode, case]
            assert two["loss"] == pytest.approx(logged(one, "loss"), rel=tolerance)
            for name in ("eval_loss", "eval_acceptance_length", "eval_decoded_acceptance_length"):
                assert two["metrics"][name] == pytest.approx(metrics[name], rel=tolerance)
            assert_equal_weights(two["weights"], weights_of(one), weight_tolerance)
            assert (two["head_numel"] == 0) == (mode == "zero3")  # empty outside its forward


def assert_resumed_updates_are_identical(results, output_dir):
    """Also where the config leaves `gradient_clipping` out, which DeepSpeed takes for 1."""
    one = make_resumed_trainer(output_dir)
    one.train()
    for mode in RESUMED_MODES:
        whole, resumed = results[mode, "resumed"]["whole"], results[mode, "resumed"]["resumed"]
        assert all(torch.equal(value, whole["weights"][name]) for name, value in resumed["weights"].items())
        assert resumed["log"] == whole["log"]
        weights = {name: value for name, value in whole["weights"].items() if value.is_floating_point()}
        assert_equal_weights(weights, weights_of(one), 1e-4)


def assert_saved_heads_are_whole(results, launch_dir):
    """Also where the config asks ZeRO-3 for shards only; and nothing of the target is saved."""
    target = make_target()
    for mode in RESUMED_MODES:
        weights = results[mode, "resumed"]["whole"]["weights"]
        for saved in (launch_dir / mode, launch_dir / mode / "checkpoint-3"):
            head = Eagle3DraftModel.from_pretrained(saved, target=target)
            assert head.d2t.dtype == torch.int64 and head.t2d.dtype == torch.bool
            assert head.state_dict().keys() == weights.keys()
            assert all(torch.equal(value, weights[name]) for name, value in head.state_dict().items())
        states = list((launch_dir / mode / "checkpoint-3").glob("global_step3/*model_states.pt"))
        assert len(states) == (2 if mode == "zero3" else 1)
        for path in states:
            assert torch.load(path, weights_only=False)["module"].keys() <= weights.keys()


def test_two_ranks_equal_one_process(tmp_path):
    launch_dir, own_dir = tmp_path / "two", tmp_path / "one"
    launch_dir.mkdir()
    results = run_two_ranks("two_ranks", launch_dir)
    assert_equal_one_process(results, own_dir, 2e-6, 2e-5)
    assert_resumed_updates_are_identical(results, own_dir)
    assert_saved_heads_are_whole(results, launch_dir)

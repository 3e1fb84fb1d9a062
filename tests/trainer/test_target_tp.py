"""A target in shards of two ranks gives the states of a whole one and trains the same head, also beside a replica."""

import pytest
import torch

from draftsmith.target import FrozenTarget
from tests.tiny_models import tiny_model

from .common import assert_equal_weights, make_rows, make_target, make_trainer
from .ranks import MODES, run_ranks


@pytest.fixture(scope="module", params=[2, 4], ids=["one group", "two groups"])
def results(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("target_tp")
    for family in ("llama", "qwen3", "gpt_oss"):
        tiny_model(family).save_pretrained(directory / family)
    make_target().save_pretrained(directory / "target")
    return run_ranks(request.param, "target_tp_ranks", directory)


def assert_same_training(ours, truth):
    assert ours["loss"] == pytest.approx(truth["loss"], rel=1e-5)
    for name in ("eval_loss", "eval_acceptance_length"):
        assert ours["metrics"][name] == pytest.approx(truth["metrics"][name], rel=1e-5)
    assert_equal_weights(ours["weights"], truth["weights"], 2e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_oss"])
def test_states_are_those_of_a_whole_target(results, family):
    for rank in results[family]:
        assert max(rank["errors"]) < 3e-6
        assert rank["share"] < 0.6  # of the layers' weights: gpt-oss keeps its attention whole
        assert rank["ends_are_whole"] and rank["same_start"]


def test_training_equals_that_beside_a_whole_target(results):
    for mode in MODES:
        if (mode, 2) in results:
            assert_same_training(results[mode, 2], results["ddp", 1])


def test_ranks_that_kept_their_states_take_part(results):
    assert_same_training(results["kept"], results["not kept"])


def test_resumed_training_is_bit_exact(results):
    if "resumed run" not in results:
        pytest.skip("done with one group")
    whole, resumed = results["whole run"], results["resumed run"]
    assert resumed["loss"] == whole["loss"]
    assert all(torch.equal(value, whole["weights"][name]) for name, value in resumed["weights"].items())


def test_a_target_that_is_not_placed_as_the_arguments_say_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(FrozenTarget, "tp_size", 2)
    with pytest.raises(ValueError, match="`target_tp` is 1, but the target is held by 2 ranks together"):
        make_trainer(tmp_path, make_rows([9]))


def test_ranks_that_form_no_whole_groups_are_refused(tmp_path):
    with pytest.raises(ValueError, match="`target_tp` is 2, which does not divide the 1 processes"):
        make_trainer(tmp_path, make_rows([9]), target_tp=2)

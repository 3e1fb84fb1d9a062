import pytest
import torch

from draftsmith.ops import streaming_draft_loss
from tests.ops.test_streaming_draft_loss import make_inputs, nested_rows


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("`states` and `row_sets`", {"row_sets": nested_rows(((3, 9),), 3)}),
        (r"`states\[0\]`", {"row_sets": nested_rows(((3, 20),), 4)}),
        ("`weight`", {"weight": torch.zeros(25, 15)}),
        ("`objective` must be one of", {"objective": "mse"}),
        ("`labels` is needed", {"objective": "ce", "labels": None}),
        ("`teacher_states` is needed", {"teacher_states": None}),
        ("`teacher_states` must have", {"teacher_states": torch.zeros(3, 24)}),
        ("`row_weights` must have", {"row_weights": torch.ones(3)}),
        ("`step_weights` must hold 4", {"step_weights": [1.0]}),
        ("`t2d` is needed", {"t2d": None}),
        ("`t2d` marks 26 ids", {"t2d": torch.arange(60) < 26}),
        ("`t2d` marks id 64", {"t2d": torch.arange(65) >= 40}),
        (r"`labels` must be in \[0, 65\)", {"objective": "ce", "labels": torch.full((25,), 65)}),
        ("`chunk_size`", {"chunk_size": 0}),
        ("`chunk_size`", {"chunk_size": 2.0}),
        ("`teacher_softcap`", {"teacher_softcap": 0.0}),
        ("`teacher_softcap`", {"teacher_softcap": float("inf")}),
        ("`teacher_weight`", {"teacher_weight": torch.zeros(65, 23)}),
        ("`teacher_bias`", {"teacher_bias": torch.zeros(25)}),
        ("`row_weights` must have", {"row_weights": torch.ones(25, 1)}),
        ("`step_weights` must hold 4", {"step_weights": torch.tensor(1.0)}),
        ("`t2d` must be bool", {"t2d": (torch.arange(65) >= 40).long()}),
        ("`labels` must be int64", {"objective": "ce", "labels": torch.zeros(25)}),
        (r"`row_sets\[0\]` must be int64", {"row_sets": [rows.float() for rows in nested_rows(((3, 30),), 4)]}),
        ("`num_items` must be one number", {"num_items": torch.ones(2)}),
    ],
)
def test_wrong_arguments_are_named(message, changes):
    with pytest.raises(ValueError, match=message):
        streaming_draft_loss(**{**make_inputs(), **changes})


def test_row_sets_that_do_not_nest_are_refused():
    inputs = make_inputs(ttt_steps=2)
    inputs["row_sets"][1] = inputs["row_sets"][1] + 1
    with pytest.raises(ValueError, match=r"`row_sets\[0\]` must hold t and t \+ 1 for every t in `row_sets\[1\]`"):
        streaming_draft_loss(**inputs)
    inputs["row_sets"][1] = inputs["row_sets"][1].flip(0)
    with pytest.raises(ValueError, match=r"`row_sets\[1\]` must ascend"):
        streaming_draft_loss(**inputs)

"""The table of an evaluation: zeros are measured, blanks are not known."""

import pytest

from draftsmith.commands.evaluation_report import Result
from draftsmith.speculative import Acceptance


@pytest.mark.parametrize(
    ("counts", "cells"),
    [
        (Acceptance(2, [3, 4], [0, 0], prompts=2), ["1.000", "0.000", "0.000"]),  # nothing accepted
        (Acceptance(2, [3, 4], [1, 2], [3, 0], 2), ["1.429", "0.429", "0.000"]),
        (Acceptance(2, [3, 4], [1, 2], prompts=2), ["1.429", "", ""]),  # the sums alone are told
        (Acceptance(2, [0], [0], prompts=2), ["not counted", "", ""]),  # a server without a head
        (Acceptance(2, prompts=2), ["not counted", "", ""]),
    ],
)
def test_cells(counts, cells):
    row = Result(2, 0.0, {"chats": counts}, {}, None).table().splitlines()[-1]
    length, _, *rates = [cell.strip() for cell in row.split("|")][3:-2]
    assert [length, *rates] == cells

"""Batches: padding, documents, and row sets that are exactly the pairs of the definition."""

import numpy as np
import pytest
import torch
from accelerate.utils import send_to_device
from torch.utils.data._utils.pin_memory import pin_memory

from draftsmith.data import DraftCollator


def row(mask, **columns):
    return {"input_ids": list(range(1, len(mask) + 1)), "loss_mask": mask, **columns}


def pairs_by_definition(batch, ttt_steps):
    """(t, k) is supervised iff x_{t+1} .. x_{t+2+k} are supervised tokens of one turn, in row t's document."""
    mask, turns, documents = (batch[name] for name in ("loss_mask", "turn_ids", "document_ids"))
    rows, length = mask.shape
    sets = [[] for _ in range(ttt_steps)]
    for b in range(rows):
        for t in range(length):
            for k in range(ttt_steps):
                path = range(t + 1, t + 3 + k)
                if path[-1] >= length:
                    continue
                same = all(turns[b, i] == turns[b, t + 1] and documents[b, i] == documents[b, t] for i in path)
                if same and all(mask[b, i] for i in path):
                    sets[k].append(b * length + t)
    return sets


def assert_row_sets(batch, ttt_steps):
    assert all(found.dtype == torch.int64 for found in batch["row_sets"])
    assert [found.tolist() for found in batch["row_sets"]] == pairs_by_definition(batch, ttt_steps)


def test_one_span_gives_exactly_the_pairs_of_the_definition():
    """Case: one assistant span, tokens 5-8 of 12, K = 3."""
    mask = [int(5 <= index <= 8) for index in range(12)]
    batch = DraftCollator(ttt_steps=3)([row(mask)])
    assert [found.tolist() for found in batch["row_sets"]] == [[4, 5, 6], [4, 5], [4]]
    assert_row_sets(batch, 3)


def test_unpacked_rows_are_padded():
    batch = DraftCollator(ttt_steps=2, pad_to_multiple_of=4)([row([0, 1, 1]), row([0, 1, 1, 1, 0])])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 0, 0, 0]]
    assert batch["loss_mask"].dtype == torch.bool and not batch["loss_mask"][0, 3:].any()
    assert batch["turn_ids"].tolist()[0] == [-1, 0, 0, -1, -1, -1, -1, -1]
    assert batch["position_ids"].tolist()[1] == [0, 1, 2, 3, 4, 0, 0, 0]
    assert batch["document_ids"].tolist()[0] == [0, 0, 0, -1, -1, -1, -1, -1]
    assert {
        name: batch[name].dtype for name in ("input_ids", "turn_ids", "position_ids", "document_ids")
    } == dict.fromkeys(("input_ids", "turn_ids", "position_ids", "document_ids"), torch.int64)
    assert_row_sets(batch, 2)


def test_packed_documents_restart_and_never_touch():
    """Case: documents without BOS and EOS: no label from the next document; runs are turns per document."""
    packed = row([0, 1, 1, 1, 1, 1, 0, 1], document_lengths=[3, 5])
    batch = DraftCollator(ttt_steps=3)([packed, row([1, 1])])
    assert batch["document_ids"].tolist()[0] == [0, 0, 0, 1, 1, 1, 1, 1]
    assert batch["position_ids"].tolist()[0] == [0, 1, 2, 0, 1, 2, 3, 4]
    assert batch["turn_ids"].tolist()[0] == [-1, 0, 0, 0, 0, 0, -1, 1]
    assert [found.tolist() for found in batch["row_sets"]] == [[0, 3], [], []]
    assert_row_sets(batch, 3)


def test_no_pair_crosses_two_touching_turns():
    """Case: two touching assistant turns."""
    batch = DraftCollator(ttt_steps=3)([row([0, 1, 1, 1, 1, 1], turn_ids=[-1, 0, 0, 1, 1, 1])])
    assert [found.tolist() for found in batch["row_sets"]] == [[0, 2, 3], [2], []]
    assert_row_sets(batch, 3)


@pytest.mark.parametrize("seed", range(10))
def test_row_sets_of_random_batches(seed):
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(3):
        lengths = generator.integers(1, 9, size=generator.integers(1, 5))
        mask = generator.integers(0, 4, size=lengths.sum()).clip(max=1)
        turns = np.where(mask, generator.integers(0, 2, size=len(mask)), -1)
        rows.append(
            row(mask.tolist(), document_lengths=lengths.tolist()) | ({"turn_ids": turns.tolist()} if seed % 2 else {})
        )
    assert_row_sets(DraftCollator(ttt_steps=4)(rows), 4)


def test_rows_without_supervision_are_fine():
    batch = DraftCollator(ttt_steps=2)([row([0, 0, 0])])
    assert [found.tolist() for found in batch["row_sets"]] == [[], []] and not batch["loss_mask"].any()


def test_row_sets_stay_as_they_are_on_their_way_to_a_gpu(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, *device: pinned.append(tensor) or tensor.clone())
    batch = DraftCollator(ttt_steps=3)([row([0, 1, 1, 1])])
    arrived = send_to_device(pin_memory(batch), torch.device("meta"))
    assert arrived["input_ids"].is_meta
    assert [rows.tolist() for rows in arrived["row_sets"]] == [rows.tolist() for rows in batch["row_sets"]]
    assert arrived["row_sets"].document_ids is batch["row_sets"].document_ids
    assert len(pinned) == len(batch) - 1 + 3


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_arrays_and_tensors_are_taken(kind):
    expected = DraftCollator(ttt_steps=2)([row([0, 1, 1])])
    found = DraftCollator(ttt_steps=2)([{name: kind(values) for name, values in row([0, 1, 1]).items()}])
    assert found["input_ids"].equal(expected["input_ids"]) and found["row_sets"][0].equal(expected["row_sets"][0])


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"loss_mask": [1, 1]}, "row 1 of the batch: `loss_mask` has 2 entries for 3 `input_ids`"),
        ({"turn_ids": [0]}, "row 1 of the batch: `turn_ids` has 1 entries for 3 `input_ids`"),
        (
            {"document_lengths": [1, 1]},
            r"row 1 of the batch: `document_lengths` \[1, 1\] add up to 2, but the row has 3",
        ),
        ({"document_lengths": [4, -1]}, "row 1 of the batch: `document_lengths`"),
    ],
)
def test_lengths_that_do_not_agree_are_refused(columns, reason):
    with pytest.raises(ValueError, match=reason):
        DraftCollator(ttt_steps=2)([row([0, 1, 1]), row([0, 1, 1]) | columns])


def test_row_sets_stay_on_the_cpu_when_a_batch_moves():
    batch = DraftCollator(ttt_steps=2)([row([0, 1, 1, 1, 0])])
    moved = send_to_device(batch, "meta")
    assert moved["input_ids"].is_meta
    assert [rows.device.type for rows in moved["row_sets"]] == ["cpu", "cpu"]
    assert len(moved["row_sets"]) == 2 and moved["row_sets"][0].tolist() == [0, 1]

import gc
import sys

import pytest
import torch

from draftsmith.ops.block_sparse_attention import layout as layouts
from draftsmith.ops.block_sparse_attention.key_ranges import key_ranges
from draftsmith.ops.block_sparse_attention.layout import Layout
from tests.ops.attention_cases import make_problem, random_cases


CPU = torch.device("cpu")
DOCUMENTS = [[0, 0, 0, 1, 1, 2, 2, -1]]


@pytest.fixture
def computed(monkeypatch):
    """The windows of ranges as they are worked out."""
    module = sys.modules[key_ranges.__module__]  # the package has the function by this name
    windows, compute = [], module._key_ranges
    monkeypatch.setattr(
        module, "_key_ranges", lambda layout, window, device: windows.append(window) or compute(layout, window, device)
    )
    return windows


def ranges_of(ids, window=None, positions=None):
    """Of a call of its own."""
    first, last = key_ranges(Layout(ids, positions, *ids.shape), window, CPU)
    return first.tolist(), last.tolist()


@pytest.mark.parametrize("case", random_cases(200, seed=2, head_dim=(1,)), ids=lambda case: str(case.seed))
def test_ranges_are_the_rows_of_the_mask(case):
    problem = make_problem(case)
    layout = Layout(problem.document_ids, problem.query_positions, case.batch, case.length)
    first, last = key_ranges(layout, case.window, torch.device("cpu"))
    columns = torch.arange(case.length)
    within = (columns >= first[..., None]) & (columns <= last[..., None])  # [B, Q, T]
    assert torch.equal(within, problem.visible)
    assert first.dtype == last.dtype == torch.int32 and first.is_contiguous() and last.is_contiguous()
    assert (last[problem.padding["query"]] == -1).all()
    assert (first >= 0).all() and (first <= case.length).all() and (last < case.length).all()


def test_calls_with_the_same_documents_share_their_ranges(computed):
    ids = torch.tensor(DOCUMENTS)
    whole = ranges_of(ids)
    assert whole == ([[0, 0, 0, 3, 3, 5, 5, 8]], [[0, 1, 2, 3, 4, 5, 6, -1]])
    assert [ranges_of(ids) for _ in range(3)] == [whole] * 3 and computed == [None]
    assert ranges_of(ids, 2)[0] == [[0, 0, 1, 3, 3, 5, 5, 8]]
    ranges_of(ids, 2)
    assert computed == [None, 2]
    assert ranges_of(ids.clone()) == whole and computed == [None, 2, None]


def test_ranges_of_documents_that_change_are_computed_anew(computed):
    ids = torch.tensor(DOCUMENTS)
    ranges_of(ids)
    ids[0, 1:] = 4
    assert ranges_of(ids)[0] == [[0, 1, 1, 1, 1, 1, 1, 1]] == ranges_of(ids)[0]
    assert len(computed) == 2


def test_ranges_of_some_queries_are_their_calls_alone(computed):
    ids, positions = torch.tensor(DOCUMENTS), torch.tensor([[2, 4]])
    layout = Layout(ids, positions, *ids.shape)
    for _ in range(2):  # forward and backward
        assert key_ranges(layout, None, CPU)[0].tolist() == [[0, 3]]
    assert ranges_of(ids, positions=torch.tensor([[2, 5]]))[0] == [[0, 5]]
    assert len(computed) == 2


def test_a_cuda_graph_works_its_own_ranges_out(computed, monkeypatch):
    ids = torch.tensor(DOCUMENTS)
    outside = key_ranges(Layout(ids, None, *ids.shape), None, CPU)
    monkeypatch.setattr(layouts, "being_captured", lambda tensor: True)
    inside = [key_ranges(Layout(ids, None, *ids.shape), None, CPU) for _ in range(3)]
    assert len(computed) == 2 and inside[0] is inside[1] is inside[2] is not outside
    monkeypatch.setattr(layouts, "being_captured", lambda tensor: False)
    assert key_ranges(Layout(ids, None, *ids.shape), None, CPU) is outside


def test_kept_ranges_go_with_their_documents():
    gc.collect()
    before = len(layouts._ranges_of._kept)
    for _ in range(3):
        ids = torch.tensor(DOCUMENTS)
        ranges_of(ids)
        assert len(layouts._ranges_of._kept) == before + 1
        del ids
        assert len(layouts._ranges_of._kept) == before  # at once, not when garbage is collected


def test_documents_of_inference_mode_are_not_kept(computed):
    with torch.inference_mode():
        ids = torch.tensor(DOCUMENTS)
        whole = ranges_of(ids)
        ids[0, 1:] = 4  # which such a tensor does not count
        assert ranges_of(ids) != whole

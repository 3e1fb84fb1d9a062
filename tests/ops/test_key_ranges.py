import pytest
import torch

from draftsmith.ops.block_sparse_attention.key_ranges import key_ranges
from draftsmith.ops.block_sparse_attention.layout import Layout
from tests.ops.attention_cases import make_problem, random_cases


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

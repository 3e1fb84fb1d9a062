import random
import subprocess
import sys
from itertools import pairwise

import pytest
import torch

from draftsmith.ops import streaming_draft_loss
from draftsmith.ops.streaming_loss.draft_loss import DraftLossSums
from draftsmith.ops.streaming_loss.reference import reference_draft_loss
from tests.ops.error_bounds import assert_close_as_dense


OBJECTIVES = ("kl", "ce", "tv", "lk_alpha", "lk_lambda")
SUM_NAMES = ("loss", "hits", "chain", "rows", "alpha")


def nested_rows(spans, ttt_steps):
    """R_k of supervised token spans [start, end): (t, k) needs x_{t+1}..x_{t+2+k} inside one span."""
    return [
        torch.tensor([t for start, end in spans for t in range(start - 1, end - 2 - k)], dtype=torch.long)
        for k in range(ttt_steps)
    ]


def make_inputs(
    *, ttt_steps=4, spans=((3, 9), (12, 31), (33, 36)), hidden=16, teacher_hidden=24, vocab=60, draft_vocab=25, seed=0
):
    """Keyword arguments in fp64; `t2d` is longer than the teacher's head, as a padded embedding is."""
    generator = torch.Generator().manual_seed(seed)
    row_sets = nested_rows(spans, ttt_steps)
    count = len(row_sets[0])
    t2d = None
    if draft_vocab < vocab:
        t2d = torch.zeros(vocab + 5, dtype=torch.bool)
        t2d[torch.randperm(vocab, generator=generator)[:draft_vocab]] = True

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    teacher_weight = normal(vocab, teacher_hidden) / 3
    best = teacher_weight[torch.randint(0, vocab, (count,), generator=generator)]
    # Each row's best token leads clearly: rounding to bf16 must not move pairs in or out of the draft vocabulary.
    teacher_states = normal(count, teacher_hidden) + 8 * best / best.square().sum(-1, keepdim=True)
    return {
        "states": [normal(len(rows), hidden) for rows in row_sets],
        "weight": normal(draft_vocab, hidden),
        "teacher_states": teacher_states,
        "teacher_weight": teacher_weight,
        "row_sets": row_sets,
        "labels": torch.randint(0, vocab, (count,), generator=generator),
        "t2d": t2d,
    }


def cast(inputs, dtype):
    """Every floating-point input in another dtype, as leaves that require gradients where the loss has any."""
    return {
        **inputs,
        "states": [state.to(dtype).requires_grad_() for state in inputs["states"]],
        "weight": inputs["weight"].to(dtype).requires_grad_(),
        "teacher_states": inputs["teacher_states"].to(dtype),
        "teacher_weight": inputs["teacher_weight"].to(dtype),
    }


def run(loss_function, inputs, *, dtype=torch.float64, factor=3.0, **options):
    """[loss, gradients of `factor` times it], sums."""
    leaves = cast(inputs, dtype)
    loss, sums = loss_function(**leaves, **options)
    return [loss.detach(), *torch.autograd.grad(loss * factor, [*leaves["states"], leaves["weight"]])], sums


def assert_sums_close(sums, expected, rtol):
    for name in SUM_NAMES:
        value, other = getattr(sums, name), getattr(expected, name)
        assert (value is None) == (other is None), name
        if value is not None:
            assert not value.requires_grad
            torch.testing.assert_close(value.cpu().double(), other.cpu().double(), rtol=rtol, atol=1e-6, msg=name)


def check(inputs, dtype, chunk_size=None, **options):
    rounded = cast(inputs, dtype)
    rounded = {
        **rounded,
        "states": [state.detach() for state in rounded["states"]],
        "weight": rounded["weight"].detach(),
    }
    truth, true_sums = run(reference_draft_loss, rounded, **options)
    dense, _ = run(reference_draft_loss, rounded, dtype=dtype, **options)
    ours, sums = run(streaming_draft_loss, rounded, dtype=dtype, chunk_size=chunk_size, **options)
    assert_close_as_dense(ours, dense, truth, dtype)
    if dtype in (torch.float32, torch.float64):  # 16-bit logits tie
        assert_sums_close(sums, true_sums, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("seed", range(6))
def test_equals_dense_for_random_options(objective, seed, dtype):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    ttt_steps = (1, 2, 7, 8, 4, 3)[seed]
    vocab = rng.choice((60, 400))
    inputs = make_inputs(ttt_steps=ttt_steps, vocab=vocab, draft_vocab=rng.choice((25, vocab)), seed=seed)
    count = len(inputs["labels"])
    check(
        inputs, dtype, rng.choice((1, 3, 16, None)), objective=objective,
        step_weights=rng.choice((None, [0.8**k for k in range(ttt_steps)])),
        row_weights=rng.choice((None, torch.rand(count))), num_items=rng.choice((None, 3)),
        teacher_bias=rng.choice((None, torch.randn(vocab))), teacher_softcap=rng.choice((None, 30.0)),
    )  # fmt: skip


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_chunk_size_does_not_matter_and_chains_cross_chunks(objective):
    inputs = make_inputs()
    inputs["weight"] = inputs["weight"] * 0.1
    expected, expected_sums = run(streaming_draft_loss, inputs, objective=objective, chunk_size=1000)
    for chunk_size in (1, 2, 7, None):
        result, sums = run(streaming_draft_loss, inputs, objective=objective, chunk_size=chunk_size)
        torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)
        assert_sums_close(sums, expected_sums, rtol=1e-10)


def perfect_inputs(objective="kl"):
    """A draft whose every argmax is the teacher's: one row of the identity per token."""
    inputs = make_inputs(ttt_steps=3, vocab=8, draft_vocab=8, hidden=8, teacher_hidden=8)
    tokens = inputs["labels"]
    inputs["weight"] = inputs["teacher_weight"] = torch.eye(8, dtype=torch.float64) * 9
    inputs["teacher_states"] = torch.eye(8, dtype=torch.float64)[tokens]
    place = {int(row): index for index, row in enumerate(inputs["row_sets"][0])}
    inputs["states"] = [
        torch.stack([inputs["teacher_states"][place[int(row) + step]] for row in rows])
        for step, rows in enumerate(inputs["row_sets"])
    ]
    return inputs


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_perfect_draft_hits_always_and_hits_1_0_1_chain_to_1_0_0(objective):
    inputs = perfect_inputs()
    rows = torch.tensor([len(step_rows) for step_rows in inputs["row_sets"]]).double()
    sums = streaming_draft_loss(**inputs, objective=objective, chunk_size=3)[1]
    assert torch.equal(sums.hits, rows) and torch.equal(sums.chain, rows) and torch.equal(sums.rows, rows)
    inputs["states"][1] = -inputs["states"][1]
    sums = streaming_draft_loss(**inputs, objective=objective, chunk_size=3)[1]
    assert torch.equal(sums.hits, rows * torch.tensor([1, 0, 1]))
    assert torch.equal(sums.chain, rows * torch.tensor([1, 0, 0]))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_out_of_vocabulary_pairs_add_no_loss_miss_and_stay_in_n(objective):
    inputs = perfect_inputs()
    dropped = 2
    t2d = torch.ones(8, dtype=torch.bool)
    t2d[dropped] = False
    inputs.update(t2d=t2d, weight=inputs["weight"][t2d])
    outside = inputs["labels"] == dropped
    assert 0 < outside.sum() < len(outside)
    place = {int(row): index for index, row in enumerate(inputs["row_sets"][0])}
    inside = [sum(not outside[place[int(row) + step]] for row in rows) for step, rows in enumerate(inputs["row_sets"])]
    loss, sums = streaming_draft_loss(**inputs, objective=objective)
    assert sums.hits.tolist() == inside
    assert sums.rows.tolist() == [len(rows) for rows in inputs["row_sets"]]
    torch.testing.assert_close(loss, sums.loss.sum() / len(outside))
    leaves = cast({**inputs, "states": [state / 2 for state in inputs["states"]]}, torch.float64)
    streaming_draft_loss(**leaves, objective=objective)[0].backward()
    assert (leaves["states"][0].grad[outside] == 0).all()
    assert (leaves["states"][0].grad[~outside] != 0).any()


def test_equal_distributions_give_zero_divergence_and_full_overlap():
    inputs = perfect_inputs()
    for objective in ("kl", "tv", "lk_alpha", "lk_lambda"):
        (loss, *gradients), sums = run(streaming_draft_loss, inputs, objective=objective)
        torch.testing.assert_close(sums.alpha, sums.rows)
        assert abs(loss) < 1e-12
        if objective == "kl":  # the overlap has a kink here
            assert all(gradient.abs().max() < 1e-12 for gradient in gradients)


@pytest.mark.parametrize("objective", ["tv", "lk_alpha", "lk_lambda"])
def test_disjoint_distributions_stay_finite(objective):
    inputs = perfect_inputs()
    inputs["states"] = [state.roll(1, -1) * 200 for state in inputs["states"]]
    inputs["teacher_states"] = inputs["teacher_states"] * 200
    result, _ = run(streaming_draft_loss, inputs, dtype=torch.float32, objective=objective)
    assert all(tensor.isfinite().all() for tensor in result)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_all_masked_batch_gives_zero_loss_and_zero_gradients(objective):
    result, sums = run(streaming_draft_loss, make_inputs(spans=()), objective=objective)
    assert all((tensor == 0).all() for tensor in result)
    assert sums.rows.tolist() == [0] * 4 and (sums.chain == 0).all()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_all_masked_steps_change_nothing_else(objective):
    inputs = make_inputs(spans=((3, 6), (8, 11)))  # three supervised tokens: steps 0 and 1 only
    assert [len(rows) for rows in inputs["row_sets"]] == [4, 2, 0, 0]
    check(inputs, torch.float64, 2, objective=objective)


def test_supervised_rows_only_equal_masked_full_rows_in_cross_entropy():
    """Step sums by hand: every (t, k) pair of the definition, one at a time."""
    inputs = make_inputs(draft_vocab=60)
    place = {int(row): index for index, row in enumerate(inputs["row_sets"][0])}
    total = 0.0
    for step, (state, rows) in enumerate(zip(inputs["states"], inputs["row_sets"], strict=True)):
        for index, row in enumerate(rows.tolist()):
            log_q = (state[index] @ inputs["weight"].T).log_softmax(-1)
            total -= 0.5**step * log_q[inputs["labels"][place[row + step]]]
    loss, _ = streaming_draft_loss(**inputs, objective="ce", step_weights=[0.5**k for k in range(4)])
    torch.testing.assert_close(loss, total / len(place))


def test_sequence_normalisation_averages_documents():
    spans = ((3, 9), (12, 31))
    inputs = make_inputs(spans=spans)
    counts = [len(nested_rows((span,), 1)[0]) for span in spans]
    row_weights = torch.cat([torch.full((count,), 1 / count, dtype=torch.float64) for count in counts])
    loss, _ = streaming_draft_loss(**inputs, row_weights=row_weights)
    given, _ = streaming_draft_loss(**inputs, row_weights=row_weights, num_items=torch.tensor(2))
    apart = []
    for index in range(2):
        parts = [
            state.split([len(nested_rows((span,), 4)[k]) for span in spans])
            for k, state in enumerate(inputs["states"])
        ]
        teacher = inputs["teacher_states"].split(counts)[index]
        alone = {
            **inputs, "states": [part[index] for part in parts], "teacher_states": teacher,
            "row_sets": nested_rows((spans[index],), 4), "labels": None,
        }  # fmt: skip
        apart.append(streaming_draft_loss(**alone)[0])
    torch.testing.assert_close(loss, sum(apart) / 2)
    torch.testing.assert_close(given, loss)


def test_second_backward_raises_also_with_a_retained_graph():
    leaves = cast(make_inputs(), torch.float32)
    loss, _ = streaming_draft_loss(**leaves)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward only"):
        loss.backward()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_no_grad_inference_mode_and_frozen_head_give_the_training_value(objective):
    inputs = make_inputs()
    (value, *gradients), sums = run(streaming_draft_loss, inputs, factor=1.0, objective=objective)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            loss, other_sums = streaming_draft_loss(**cast(inputs, torch.float64), objective=objective)
        assert torch.equal(loss, value) and not loss.requires_grad
        assert_sums_close(other_sums, sums, rtol=1e-12)
    leaves = cast(inputs, torch.float64)
    leaves["weight"].requires_grad_(False)
    loss, _ = streaming_draft_loss(**leaves, objective=objective)
    loss.backward()
    assert torch.equal(loss, value) and leaves["weight"].grad is None
    for state, expected in zip(leaves["states"], gradients, strict=False):
        torch.testing.assert_close(state.grad, expected)


def test_the_teacher_gets_no_gradient():
    leaves = cast(make_inputs(), torch.float32)
    leaves["teacher_states"].requires_grad_()
    leaves["teacher_weight"].requires_grad_()
    streaming_draft_loss(**leaves)[0].backward()
    assert leaves["teacher_states"].grad is None and leaves["teacher_weight"].grad is None


def test_fp32_master_head_under_bf16_states_and_autocast():
    inputs = make_inputs()
    leaves = cast(inputs, torch.bfloat16)
    leaves["weight"] = inputs["weight"].float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, sums = streaming_draft_loss(**leaves)
    loss.backward()
    assert (loss.dtype, sums.loss.dtype, leaves["weight"].grad.dtype) == (torch.float32,) * 3
    assert leaves["states"][0].grad.dtype == torch.bfloat16
    torch.testing.assert_close(loss.double(), run(streaming_draft_loss, inputs)[0][0], rtol=2e-2, atol=1e-2)


def test_bf16_weight_gradient_stays_exact_over_many_chunks():
    inputs = make_inputs(spans=((1, 90),), hidden=16, vocab=128 * 1024, draft_vocab=128 * 1024)
    inputs = {
        **inputs,
        **{name: inputs[name].bfloat16().double() for name in ("weight", "teacher_states", "teacher_weight")},
    }
    inputs["states"] = [state.bfloat16().double() for state in inputs["states"]]
    truth = run(reference_draft_loss, inputs)[0][-1]
    for chunk_size in (88, 11, 5):
        grad = run(streaming_draft_loss, inputs, dtype=torch.bfloat16, chunk_size=chunk_size)[0][-1]
        assert torch.cosine_similarity(grad.double().flatten(), truth.flatten(), dim=0) > 0.9995, chunk_size


MEMORY_SCRIPT = """
import torch
from draftsmith.ops import streaming_draft_loss

def kilobytes(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

vocab, resident = 128 * 1024, kilobytes("VmRSS")
weight, teacher_weight = torch.randn(vocab, 8, requires_grad=True), torch.randn(vocab, 8)
for rows in (256, 768):
    states, teacher = [torch.randn(rows, 8, requires_grad=True)], torch.randn(rows, 8)
    streaming_draft_loss(states, weight, teacher, teacher_weight, [torch.arange(rows)], chunk_size=256)[0].backward()
    print((kilobytes("VmHWM") - resident) / 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_that_of_one_chunk_whatever_the_rows():
    output = subprocess.run([sys.executable, "-c", MEMORY_SCRIPT], capture_output=True, check=True, text=True).stdout
    one_chunk, three_chunks = map(float, output.split())
    logits = 2 * 256 * 128 * 1024 * 4 / 2**20  # MiB of teacher and draft logits in a chunk
    assert one_chunk < 1.4 * logits, (one_chunk, logits)
    assert three_chunks < one_chunk + 0.2 * logits, (one_chunk, three_chunks, logits)


def test_sums_are_a_small_dataclass_of_one_number_per_step():
    _, sums = run(streaming_draft_loss, make_inputs())
    assert isinstance(sums, DraftLossSums)
    assert all(getattr(sums, name).shape == (4,) for name in SUM_NAMES)
    assert all(later <= earlier for earlier, later in pairwise(sums.chain.tolist()))


def overwriting(states, weight, **inputs):
    """The loss of states that come out of a product: leaves are not to be overwritten."""
    made = [state * 1 for state in states]
    loss, sums = streaming_draft_loss(made, weight, **inputs, overwrite_states=True)
    return loss, sums


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_gradients_in_the_place_of_states_change_nothing(objective):
    inputs = make_inputs()
    expected, _ = run(streaming_draft_loss, inputs, objective=objective, chunk_size=5)
    results, _ = run(overwriting, inputs, objective=objective, chunk_size=5)
    for tensor, other in zip(results, expected, strict=True):
        assert torch.equal(tensor, other)


def test_states_that_another_backward_needs_are_not_overwritten_unnoticed():
    inputs = cast(make_inputs(), torch.float64)
    states = [state.exp() for state in inputs.pop("states")]  # keeps its result
    loss, _ = streaming_draft_loss(states, **inputs, overwrite_states=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()

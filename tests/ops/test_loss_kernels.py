"""The Triton row functions of the losses against the plain ones, under Triton's interpreter."""

import random

import pytest
import torch

from draftsmith.ops import streaming_draft_loss
from draftsmith.ops.streaming_loss import cross_entropy, rows, targets
from tests.ops import test_streaming_cross_entropy as hard_loss
from tests.ops import test_streaming_draft_loss as draft_loss


pytest.importorskip("triton")

from draftsmith.ops.streaming_loss import triton as kernels


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.usefixtures(*(["round_bf16_as_gpus_do"] if DEVICE == "cpu" else [])),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's: infinities of masked columns are subtracted
]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@pytest.fixture
def through_kernels(monkeypatch):
    """The losses on CPU tensors, through kernels that need several tiles even here."""
    monkeypatch.setattr(kernels, "BLOCK", 256)
    for module in (cross_entropy, targets):
        monkeypatch.setattr(module, "row_functions", lambda logits: kernels)


@pytest.mark.skipif(DEVICE == "cuda", reason="the losses choose these kernels by themselves there")
@pytest.mark.parametrize("objective", draft_loss.OBJECTIVES)
@pytest.mark.parametrize("seed", (0, 1, 3))  # the interpreter is slow
def test_draft_loss_equals_dense(objective, seed, through_kernels):
    draft_loss.test_equals_dense_for_random_options(objective, seed, torch.float32)


@pytest.mark.skipif(DEVICE == "cuda", reason="the losses choose these kernels by themselves there")
@pytest.mark.parametrize("seed", range(8))
def test_cross_entropy_equals_dense(seed, through_kernels):
    hard_loss.test_equals_dense_for_random_options(seed, torch.float32)


def assert_rows_equal(ours, plain, gradient, plain_gradient, dtype):
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(ours.loss, plain.loss, rtol=2e-5, atol=2e-5)
    assert torch.equal(ours.hit, plain.hit)
    if plain.alpha is not None:
        torch.testing.assert_close(ours.alpha, plain.alpha, rtol=2e-5, atol=2e-6)
    assert gradient.dtype == dtype
    torch.testing.assert_close(gradient, plain_gradient, rtol=2 * eps + 1e-5, atol=2 * eps * 1e-2 + 1e-6)


def normal(generator, *shape):
    return torch.randn(shape, generator=generator).mul_(3)


@DTYPES
@pytest.mark.parametrize("vocabulary", [1, 17, 65, 500])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_cross_entropy_rows(vocabulary, softcap, dtype, monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK", 128)
    generator = torch.Generator().manual_seed(vocabulary)
    logits = normal(generator, 9, vocabulary).to(DEVICE, dtype)
    labels = torch.randint(0, vocabulary, (9,), generator=generator).to(DEVICE)
    coefficient = torch.rand(9, generator=generator).to(DEVICE)
    results = []
    for module in (kernels, rows):
        for factor in (None, coefficient):
            gradient = logits.clone()
            results.append((module.cross_entropy_rows(gradient, labels, factor, softcap), gradient))
    (value, untouched), ours, _, plain = results
    assert torch.equal(value.loss, ours[0].loss) and torch.equal(untouched, logits)
    assert_rows_equal(ours[0], plain[0], ours[1], plain[1], dtype)


def random_students(rng, teachers, steps):
    """[C, K] a row for most (teacher row, step) pairs, none for some teacher rows; and the number of rows."""
    students = torch.full((teachers, steps), -1)
    pairs = [(c, k) for c in range(1, teachers) for k in range(steps) if rng.random() < 0.8]
    for row, (entry, step) in enumerate(rng.sample(pairs, len(pairs))):
        students[entry, step] = row
    return students, len(pairs)


@DTYPES
@pytest.mark.parametrize("objective", rows.TEACHER_OBJECTIVES)
@pytest.mark.parametrize("seed", range(4))
def test_teacher_rows(objective, seed, dtype, monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK", 128)
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    students, count = random_students(rng, teachers=6, steps=(1, 3, 7, 8)[seed])
    target_size = (50, 333, 500, 90)[seed]
    draft_size = (50, 100, 257, 90)[seed]
    vocabulary = None
    if draft_size < target_size:
        ids = torch.randperm(target_size, generator=generator)[:draft_size].sort().values
        draft_ids = torch.full((target_size,), -1)
        draft_ids[ids] = torch.arange(draft_size)
        vocabulary = rows.DraftVocabulary(ids.to(DEVICE), draft_ids.to(DEVICE))
    logits = normal(generator, count, draft_size).to(DEVICE, dtype)
    teacher_logits = normal(generator, 6, target_size).to(DEVICE, dtype)
    coefficient = torch.rand(count, generator=generator).to(DEVICE)
    options = {"objective": objective, "vocabulary": vocabulary, "teacher_softcap": (None, 5.0)[seed % 2]}
    results = []
    for module in (kernels, rows):
        for factor in (None, coefficient):
            gradient = logits.clone()
            found = module.teacher_rows(gradient, teacher_logits, students.to(DEVICE), factor, **options)
            results.append((found, gradient))
    (value, untouched), ours, _, plain = results
    assert torch.equal(value.loss, ours[0].loss) and torch.equal(untouched, logits)
    assert_rows_equal(ours[0], plain[0], ours[1], plain[1], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(7,), (130, 9), (0, 4)])
def test_scaled(shape, dtype):
    gradient, scale = torch.randn(shape, device=DEVICE), torch.tensor(0.37, device=DEVICE)
    expected = (gradient * scale).to(dtype)
    out = kernels.scaled(gradient, scale, dtype)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert (out is gradient) == (dtype == torch.float32)


def test_scaled_writes_nothing_beside_a_strided_gradient():
    memory = torch.ones(4, 8, device=DEVICE)
    gradient = memory[:, :4]
    assert (kernels.scaled(gradient, torch.tensor(2.0, device=DEVICE), torch.float32) == 2).all()
    assert (memory[:, 4:] == 1).all()


@pytest.mark.parametrize("through", ["plain", "kernels"])
@pytest.mark.parametrize("gap", [90.0, 95.0, 100.0, 103.0, 110.0])
def test_lk_alpha_of_almost_no_agreement_has_finite_gradients(gap, through, request):
    if through == "kernels":
        request.getfixturevalue("through_kernels")
    weight, state = torch.eye(4, requires_grad=True), torch.tensor([[0.0, gap, 0, 0]], requires_grad=True)
    loss, _ = streaming_draft_loss(
        [state], weight, torch.tensor([[gap, 0.0, 0, 0]]), torch.eye(4), [torch.tensor([0])], objective="lk_alpha"
    )
    gradients = torch.autograd.grad(loss, [state, weight])
    assert loss.isfinite() and all(gradient.isfinite().all() for gradient in gradients)


def test_ties_count_as_torch_counts_them(monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK", 16)
    logits = torch.zeros(3, 40, device=DEVICE)
    logits[:, [5, 20, 39]] = 2.0
    labels = torch.tensor([5, 20, 39], device=DEVICE)
    assert kernels.cross_entropy_rows(logits, labels, None).hit.tolist() == [True, False, False]


@pytest.mark.parametrize("masked", [-float("inf"), torch.finfo(torch.float32).min], ids=["-inf", "lowest"])
@pytest.mark.parametrize("ids", [slice(0, 8), slice(8, 64), slice(56, 70), slice(1, 70)], ids=str)
@pytest.mark.parametrize("objective", rows.TEACHER_OBJECTIVES)
def test_ids_that_a_teacher_masks_have_no_probability(objective, ids, masked, monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK", 32)
    generator = torch.Generator().manual_seed(0)
    logits, teacher_logits = normal(generator, 2, 70).to(DEVICE), normal(generator, 2, 70).to(DEVICE)
    teacher_logits[:, ids] = masked
    students, coefficient = torch.tensor([[0], [1]], device=DEVICE), torch.ones(2, device=DEVICE)
    options = {"objective": objective, "vocabulary": None, "teacher_softcap": None}
    results = []
    for module in (kernels, rows):
        gradient = logits.clone()
        results += [module.teacher_rows(gradient, teacher_logits, students, coefficient, **options), gradient]
    ours, gradient, plain, plain_gradient = results
    assert ours.loss.isfinite().all() and gradient.isfinite().all()
    assert_rows_equal(ours, plain, gradient, plain_gradient, torch.float32)
    kept = torch.ones(70, dtype=torch.bool, device=DEVICE)
    kept[ids] = False
    p = teacher_logits[:, kept].softmax(-1)
    if objective == "kl":
        truth = (p * (p.log() - logits.log_softmax(-1)[:, kept])).sum(-1)
        torch.testing.assert_close(ours.loss, truth, rtol=1e-5, atol=1e-6)


def test_a_draft_vocabulary_without_probability_adds_nothing():
    """Its only id is masked: the teacher's argmax is outside, and p is 0."""
    vocabulary = rows.DraftVocabulary(
        torch.tensor([5], device=DEVICE), torch.full((20,), -1, device=DEVICE).index_fill(0, torch.tensor(5), 0)
    )
    teacher_logits = torch.zeros(1, 20, device=DEVICE)
    teacher_logits[0, 5] = -float("inf")
    for objective in rows.TEACHER_OBJECTIVES:
        options = {"objective": objective, "vocabulary": vocabulary, "teacher_softcap": None}
        for module in (kernels, rows):
            gradient = torch.ones(1, 1, device=DEVICE)
            students, coefficient = torch.zeros(1, 1, dtype=torch.long, device=DEVICE), torch.ones(1, device=DEVICE)
            found = module.teacher_rows(gradient, teacher_logits, students, coefficient, **options)
            assert found.loss.item() == 0 and found.alpha.item() == 0 and gradient.item() == 0


def test_a_row_of_nothing_but_not_a_number_stays_one():
    logits = torch.full((2, 70), float("nan"), device=DEVICE)
    logits[1] = 0
    labels, students = torch.zeros(2, dtype=torch.long, device=DEVICE), torch.tensor([[0], [1]], device=DEVICE)
    loss = kernels.cross_entropy_rows(logits.clone(), labels, None).loss
    assert loss.isnan().tolist() == [True, False]
    vocabulary = rows.DraftVocabulary(
        torch.arange(5, device=DEVICE), torch.arange(70, device=DEVICE).where(torch.arange(70, device=DEVICE) < 5, -1)
    )
    teacher_logits = torch.zeros(2, 70, device=DEVICE)
    teacher_logits[:, 60] = 3.0  # outside
    teacher_logits[0, 2] = float("nan")
    options = {"objective": "kl", "vocabulary": vocabulary, "teacher_softcap": None}
    loss = kernels.teacher_rows(torch.zeros(2, 5, device=DEVICE), teacher_logits, students, None, **options).loss
    assert loss.isnan().tolist() == [True, False]


def test_not_a_number_is_not_hidden():
    logits = torch.zeros(2, 40, device=DEVICE)
    logits[1, 7] = float("nan")
    loss = kernels.cross_entropy_rows(logits.clone(), torch.zeros(2, dtype=torch.long, device=DEVICE), None).loss
    assert loss.isnan().tolist() == [False, True]
    students = torch.tensor([[0], [1]], device=DEVICE)
    options = {"objective": "kl", "vocabulary": None, "teacher_softcap": None}
    teacher_logits = torch.zeros(2, 40, device=DEVICE)
    loss = kernels.teacher_rows(logits, teacher_logits, students, None, **options).loss
    assert loss.isnan().tolist() == [False, True]

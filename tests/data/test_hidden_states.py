"""Hidden states on disk: coding bit by bit, the rows that are needed, and reading from several workers."""

import pickle

import pytest
import torch
from accelerate.utils import send_to_device
from datasets import Dataset
from torch.utils.data import DataLoader

from draftsmith import Eagle3DraftModel, alignment
from draftsmith.data import DraftCollator
from draftsmith.data.hidden_states import CacheWriter, HiddenStateCache, Manifest, NeededRows, plan_split
from draftsmith.data.hidden_states.coding import decode_bfloat16, decode_float8, encode_bfloat16, encode_float8
from draftsmith.target import FrozenTarget
from tests.trainer.common import make_rows, make_target


def bits(states):
    return states.view(torch.int16)


def random_states(rows, channels, seed=0):
    """Normal numbers whose size differs by channel and by row, as a transformer's do."""
    generator = torch.Generator().manual_seed(seed)
    scales = [torch.randn(shape, generator=generator).exp() for shape in ((rows, 1), (1, channels))]
    return (torch.randn(rows, channels, generator=generator) * scales[0] * scales[1]).bfloat16()


SPECIAL = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, -3e-39, 3.3e38, -1e-30, 1.0])


@pytest.mark.parametrize(
    "states",
    [
        torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256),
        torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(-1, 1),
        random_states(300, 64),
        SPECIAL.bfloat16().view(2, 5),
        torch.zeros(7, 3, dtype=torch.bfloat16),
        torch.zeros(0, 6, dtype=torch.bfloat16),
        random_states(1, 7),
        random_states(2500, 96)[::2, 1::3],  # not contiguous, odd, more rows than are sampled
    ],
    ids=["every number", "every number in one channel", "normal", "special", "zero", "empty", "odd", "strided"],
)
def test_every_bit_of_bfloat16_comes_back(states):
    decoded = decode_bfloat16(encode_bfloat16(states), states.shape[1])
    assert decoded.shape == states.shape and torch.equal(bits(decoded), bits(states.contiguous()))


@pytest.mark.parametrize("outlier", [1.0, 3e4])
def test_float8_is_within_its_bound_in_layers_of_any_size(outlier):
    states = torch.cat(
        [random_states(50, 96), 1e-6 * random_states(50, 96), 1e6 * random_states(50, 96)], 1
    ).bfloat16()
    states[3, 5] *= outlier
    arrays = encode_float8(states, layers=3)
    decoded, truth = decode_float8(arrays, 288).double().view(50, 3, 96), states.double().view(50, 3, 96)
    bound = torch.maximum(truth.abs() / 16, truth.abs().mean(-1, keepdim=True) / 20)
    assert ((decoded - truth).abs() <= bound + truth.abs() / 256).all()  # the latter: rounding to bfloat16
    assert (decoded - truth).norm() / truth.norm() < 0.035
    assert not decode_float8(encode_float8(torch.zeros(2, 6), 3), 6).any()
    assert decode_float8(encode_float8(torch.zeros(0, 6), 3), 6).shape == (0, 6)


@pytest.mark.parametrize("size", [1e29, 1e31, 1e37, 3.3e38, torch.finfo(torch.bfloat16).max])
def test_float8_takes_every_finite_number(size):
    states = torch.cat([torch.full((3, 64), size), size * torch.rand(3, 64), size * torch.eye(3, 64)], 1).bfloat16()
    decoded = decode_float8(encode_float8(states, 3), 192)
    decoded, truth = decoded.double().view(3, 3, 64), states.double().view(3, 3, 64)
    bound = torch.maximum(truth / 16, truth.mean(-1, keepdim=True) / 20)
    assert (
        (decoded - truth).abs() <= bound + truth / 256
    ).all()  # the latter: rounding to bfloat16; and all are finite


def test_float8_refuses_what_is_not_finite():
    states = random_states(4, 6)
    states[2, 1] = float("inf")
    with pytest.raises(ValueError, match="not finite"):
        encode_float8(states, 3)


def test_sizes_of_8b_shaped_states_are_within_the_bars():
    """One sample of 8,192 tokens, a prompt and then 30% answer, against 4 x 4096 bfloat16 numbers of every token."""
    context, teacher, plain = 8190 * 3, 2457, 8192 * 4
    for encode, bar in ((encode_bfloat16, 0.55), (lambda states: encode_float8(states, 1), 0.3)):
        states = random_states(256, 4096)
        stored = sum(array.nbytes for array in encode(states).values()) / (2 * states.numel())
        assert stored * (context + teacher) / plain < bar


@pytest.mark.parametrize("damage", [{"codes": 5}, {"rest": 3}, {"escapes": 1}, {"centres": 2}])
def test_damaged_arrays_are_errors(damage):
    arrays = encode_bfloat16(torch.cat([random_states(10, 16), SPECIAL.bfloat16()[:, None]], 1))
    assert len(arrays["escapes"]) > 1
    ((name, kept),) = damage.items()
    with pytest.raises((ValueError, IndexError)):
        decode_bfloat16({**arrays, name: arrays[name][:kept]}, 17)


ROWS = [
    {"input_ids": list(range(20)), "loss_mask": [0] * 6 + [1] * 5 + [0] * 9},
    {
        "input_ids": list(range(30)),
        "loss_mask": [0] * 4 + [1] * 6 + [0] * 2 + [1] * 1 + [0] * 2 + [1] * 6 + [0] * 9,
        "turn_ids": [-1] * 4 + [0] * 3 + [1] * 3 + [-1] * 2 + [2] + [-1] * 2 + [3] * 6 + [-1] * 9,
        "document_lengths": [13, 8, 9],  # the second begins inside a turn, the last has nothing to learn
    },
]


def test_needed_rows_are_those_up_to_the_last_supervised_one():
    first, second = map(NeededRows.of, ROWS)
    assert first.context.tolist() == list(range(9)) and first.teacher.tolist() == [6 + 0, 7, 8, 9]
    assert second.context.tolist() == [*range(8), *range(13, 19)]
    batch = DraftCollator(1)(ROWS)
    documents = alignment.unique_document_ids(batch["document_ids"], batch["input_ids"]).flatten()
    together = alignment.context_rows(batch["row_sets"][0], documents)
    assert together.tolist() == [*first.context.tolist(), *(30 + row for row in second.context.tolist())]
    assert alignment.context_rows(torch.empty(0, dtype=torch.int64), documents).tolist() == []


@pytest.mark.parametrize("options", [{}, {"norm_before_fc": True, "fc_norm": True, "norm_output": True}])
def test_no_other_row_changes_a_bit_of_loss_or_gradients(options):
    target = make_target()
    torch.manual_seed(0)
    draft = Eagle3DraftModel.from_target(target, **options)
    batch = DraftCollator(3)(ROWS)
    states = FrozenTarget(target, draft.config.eagle_aux_hidden_state_layer_ids)(
        batch["input_ids"], document_ids=batch["document_ids"]
    )
    documents = alignment.unique_document_ids(batch["document_ids"], batch["input_ids"]).flatten()
    needed = torch.zeros(60, dtype=torch.bool)
    needed[alignment.context_rows(batch["row_sets"][0], documents)] = True
    results = []
    for others in (None, 0.0, 1e4):
        aux = states.aux_hidden_states.clone().flatten(0, 1)
        if others is not None:
            aux[~needed] = others * torch.randn(int((~needed).sum()), aux.shape[1])
        draft.zero_grad()
        loss = draft(
            batch["input_ids"],
            aux.view_as(states.aux_hidden_states),
            states.last_hidden_state.flatten(0, 1)[batch["row_sets"][0] + 1],
            target.lm_head.weight,
            document_ids=batch["document_ids"],
            row_sets=batch["row_sets"],
            ttt_steps=3,
        ).loss
        loss.backward()
        results.append(
            [loss.detach(), *(weight.grad.clone() for weight in draft.parameters() if weight.requires_grad)]
        )
    for other in results[1:]:
        assert all(torch.equal(ours, truth) for ours, truth in zip(other, results[0], strict=True))
    aux[needed.nonzero()[-1]] += 1.0  # the last one that is needed does count
    changed = draft(
        batch["input_ids"], aux.view_as(states.aux_hidden_states), states.last_hidden_state, target.lm_head.weight,
        batch["loss_mask"], document_ids=batch["document_ids"], turn_ids=batch["turn_ids"], ttt_steps=3,
    ).loss  # fmt: skip
    assert changed != results[0][0]


def write_cache(directory, rows, *, storage="bfloat16", shard_bytes=1500):
    """A cache of random states, and these."""
    dataset = Dataset.from_list(rows)
    split, numbers = plan_split(dataset, layers=2, width=8, shard_bytes=shard_bytes)
    source = {"name": "target", "kind": "local", "revision": None}
    manifest = Manifest(
        target=source, tokenizer="", aux_layer_ids=[1, 2], width=8, storage=storage, batch_size=1, data={},
        splits={"train": split},
    )  # fmt: skip
    writer = CacheWriter(directory, manifest)
    writer.begin()
    writer.write_beside_states({"train": dataset}, lambda target: (target / "config.json").write_text("{}"))
    states = []
    for name, shard in writer.missing():
        arrays = []
        for number in writer.numbers(name, shard):
            needed = NeededRows.of(rows[number])
            states.append((random_states(len(needed.context), 16, number), random_states(len(needed.teacher), 8)))
            assert numbers[number] == 2 * len(needed.context) + len(needed.teacher)
            arrays.append(writer.encoded(number, *states[-1]))
        writer.write(name, shard, arrays)
    writer.finish()
    return states


def test_rows_come_back_shuffled_and_from_several_workers(tmp_path):
    rows = make_rows([9, 30, 14, 22, 41, 12, 17])
    states = write_cache(tmp_path / "states", rows)
    dataset = HiddenStateCache(tmp_path / "states").rows("train")
    assert len(dataset) == 7 and len(dataset._files) == 5
    dataset[3]  # opened here: workers open their own
    assert not pickle.loads(pickle.dumps(dataset))._opened
    loader = DataLoader(
        dataset, 1, shuffle=True, num_workers=2, collate_fn=_only, generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    seen = []
    for row in loader:
        number = next(i for i, other in enumerate(rows) if other["input_ids"] == row["input_ids"])
        seen.append(number)
        for name, truth in zip(("aux_hidden_states", "teacher_hidden_states"), states[number], strict=True):
            assert torch.equal(bits(row[name]), bits(truth))
    assert sorted(seen) == list(range(7)) and seen != sorted(seen)
    assert torch.equal(dataset[-1]["aux_hidden_states"], states[6][0])
    with pytest.raises(IndexError):
        dataset[7]


def _only(rows):
    return rows[0]


def test_collator_puts_states_at_their_places(tmp_path):
    rows = make_rows([9, 30, 14], supervised=[5, 12, 3])
    for row in rows:
        row["loss_mask"] = row["loss_mask"][3:] + [0] * 3
    states = write_cache(tmp_path / "states", rows)
    dataset = HiddenStateCache(tmp_path / "states").rows("train")
    batch = DraftCollator(2, pad_to_multiple_of=16)([dataset[2], dataset[0]])
    aux, teacher = batch["aux_hidden_states"].tensor, batch["teacher_hidden_states"].tensor
    moved = send_to_device(batch, "meta")  # as all micro-batches of a step are, before the first is used
    assert moved["input_ids"].is_meta and moved["aux_hidden_states"].tensor is aux
    assert aux.shape == (2, 16, 16) and aux.dtype == torch.bfloat16
    for place, number in enumerate((2, 0)):
        count = len(states[number][0])
        assert torch.equal(aux[place, :count], states[number][0]) and not aux[place, count:].any()
    assert torch.equal(teacher, torch.cat([states[2][1], states[0][1]])) and len(teacher) == len(batch["row_sets"][0])
    masked = {**dataset[0], "loss_mask": [0] * 9}
    with pytest.raises(ValueError, match="row 1 of the batch: `aux_hidden_states` has the states of 4 rows, but 0"):
        DraftCollator(2)([dataset[2], masked])


def test_shards_stay_within_their_size_and_are_never_empty(tmp_path):
    dataset = Dataset.from_list(make_rows([9, 30, 14, 22, 41, 12, 17]))
    split, numbers = plan_split(dataset, layers=2, width=8, shard_bytes=1500)
    sizes = [sum(16 * count for count in numbers[start:stop]) for start, stop in split.shards]
    assert [start for start, _ in split.shards[1:]] == [stop for _, stop in split.shards[:-1]] and split.rows == 7
    assert all(size <= 1500 or stop - start == 1 for size, (start, stop) in zip(sizes, split.shards, strict=True))

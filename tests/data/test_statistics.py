"""Statistics of prepared data, and documents that are split instead of cut."""

import numpy as np
import pytest
from datasets import Dataset

from draftsmith.data import DataArguments, DraftCollator, count_documents, dataset_statistics, pack_dataset
from draftsmith.data.documents import Document
from tests.data.common import answers, chat


def documents(seed, count=300):
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        length = int(np.clip(generator.lognormal(4, 1), 3, 900))
        turns = np.repeat(generator.integers(-1, 3, length), generator.integers(1, 9, length))[:length]
        rows.append(
            {
                "input_ids": [1] * length,
                "loss_mask": [int(turn >= 0) for turn in turns],
                "turn_ids": turns.tolist(),
                "length": length,
            }
        )
    return rows


@pytest.mark.parametrize("seed", range(3))
def test_statistics_by_definition_packed_or_not(seed):
    rows = documents(seed)
    numbers = dataset_statistics(Dataset.from_list(rows))
    lengths = np.array([row["length"] for row in rows])
    supervised = np.array([sum(row["loss_mask"]) for row in rows])
    turns = np.array(
        [
            sum(t >= 0 and t != before for t, before in zip(row["turn_ids"], [-1, *row["turn_ids"]], strict=False))
            for row in rows
        ]
    )
    assert (numbers.rows, numbers.documents, numbers.tokens) == (300, 300, lengths.sum())
    assert (numbers.supervised_tokens, numbers.turns) == (supervised.sum(), turns.sum())
    assert numbers.supervised_share == pytest.approx(supervised.sum() / lengths.sum())
    for found, values in zip(
        (numbers.lengths, numbers.supervised, numbers.turns_per_document), (lengths, supervised, turns), strict=True
    ):
        assert found.mean == pytest.approx(values.mean())
        assert found.quantiles["min"] == values.min() and found.quantiles["max"] == values.max()
        assert found.quantiles["p50"] == pytest.approx(np.median(values), abs=max(2, 0.05 * np.median(values)))
        assert found.edges[0] <= values.min() and found.edges[-1] > values.max() and sum(found.counts) == 300
        assert found.counts == [
            ((low <= values) & (values < high)).sum() for low, high in zip(found.edges, found.edges[1:], strict=False)
        ]
    packed = dataset_statistics(pack_dataset(Dataset.from_list(rows), 1000))
    assert packed.rows < 300
    packed.rows = 300
    assert packed == numbers or sorted(packed.lengths.counts) == sorted(numbers.lengths.counts)


def test_documents_are_counted_packed_or_not():
    rows = Dataset.from_list(documents(0))
    packed = pack_dataset(rows, 1000)
    assert len(packed) < count_documents(packed) == count_documents(rows) == count_documents(list(rows)) == 300
    some = packed.select([3, 1])
    assert count_documents(some) == len(packed[3]["document_lengths"]) + len(packed[1]["document_lengths"])
    assert count_documents(packed.select([])) == 0 and count_documents(iter(rows)) is None
    assert count_documents(packed.to_iterable_dataset()) is None


def test_one_document():
    row = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "turn_ids": [-1, 0, 0], "length": 3}
    numbers = dataset_statistics(Dataset.from_list([row]))
    assert numbers.lengths.edges == [2, 4] and numbers.lengths.counts == [1]
    assert numbers.turns_per_document.quantiles["p99"] == 1


def test_long_documents_are_split_only_when_told_to(prepare, tokenizer):
    messages = chat("Hello", "one two three " * 20, "What?", "it is what it is " * 20)
    data = Dataset.from_list([{"messages": messages}, {"messages": chat("Hello", "one")}])
    (whole, short) = prepare(data, tokenizer, max_length=None).train
    cut = prepare(data, tokenizer, max_length=100)
    assert cut.train[0]["input_ids"] == whole["input_ids"][:100] and cut.reports["train"].truncated == 1
    split = prepare(data, tokenizer, max_length=100, split_long_documents=True)
    pieces = list(split.train)[:-1]
    assert len(pieces) == -(-whole["length"] // 100) and split.reports["train"].truncated == 0
    assert [token for piece in pieces for token in piece["input_ids"]] == whole["input_ids"]
    assert [mask for piece in pieces for mask in piece["loss_mask"]] == whole["loss_mask"]
    assert split.train[len(pieces)] == short
    joined = [answer for piece in pieces for answer in answers(piece, tokenizer)]
    assert "".join(joined) == "".join(answers(whole, tokenizer))
    with pytest.raises(ValueError, match="`split_long_documents` needs `max_length`"):
        DataArguments(max_length=None, split_long_documents=True)


def test_no_pair_crosses_a_split_and_context_starts_anew(prepare, tokenizer):
    data = Dataset.from_list([{"messages": chat("Hello", "one two three " * 30)}])
    options = {"max_length": 50, "split_long_documents": True, "packing": True, "row_length": 200}
    packed = prepare(data, tokenizer, **options).train
    batch = DraftCollator(ttt_steps=3)(list(packed))
    document_ids, positions = batch["document_ids"].flatten(), batch["position_ids"].flatten()
    for step in range(3):
        rows = batch["row_sets"][step]
        assert len(rows) and (document_ids[rows] == document_ids[rows + 2 + step]).all()
        assert (positions[rows] + 2 + step < 50).all()
    starts = positions[document_ids >= 0] == 0
    assert starts.sum() == len([length for row in packed for length in row["document_lengths"]])


def test_pieces_without_supervision_are_left_out_and_turns_count_anew():
    turn_ids = np.array([-1] * 12 + [4] * 5 + [-1] + [7] * 6, dtype=np.int32)
    pieces = Document(list(range(24)), turn_ids).split(6)
    assert [piece.input_ids for piece in pieces] == [list(range(12, 18)), list(range(18, 24))]
    assert [piece.turn_ids.tolist() for piece in pieces] == [[0, 0, 0, 0, 0, -1], [0] * 6]

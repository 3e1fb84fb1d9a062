"""The draft vocabulary: counts, maps, files."""

import time

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file

from draftsmith.data import (
    DataArguments,
    build_vocabulary_map,
    check_vocabulary_map,
    count_tokens,
    coverage,
    d2t_to_t2d,
    draft_vocabulary_map,
    load_vocabulary_map,
    pack_dataset,
    save_vocabulary_map,
)


def dataset_of(*rows):
    return Dataset.from_list(
        [{"input_ids": ids, "loss_mask": mask, "turn_ids": mask, "length": len(ids)} for ids, mask in rows]
    )


def target_ids(d2t):
    return (torch.arange(len(d2t)) + d2t).tolist()


def test_only_supervised_tokens_count():
    dataset = dataset_of(([1, 2, 2, 3], [0, 1, 1, 0]), ([3, 3, 5], [0, 1, 1]))
    assert count_tokens(dataset, 8).tolist() == [0, 0, 2, 1, 0, 1, 0, 0]
    assert count_tokens(pack_dataset(dataset, 10), 8).equal(count_tokens(dataset, 8))
    assert count_tokens(dataset.select([1]), 8).tolist() == [0, 0, 0, 1, 0, 1, 0, 0]
    with pytest.raises(ValueError, match="token 5 is supervised, but the target's vocabulary has 4"):
        count_tokens(dataset, 4)


def test_ties_and_shortfall_go_to_the_lowest_ids():
    """Case: ties in counts, fewer distinct supervised tokens than D: deterministic, D unique ids."""
    counts = torch.tensor([0, 2, 0, 2, 1, 0, 2, 1])
    assert target_ids(build_vocabulary_map(counts, 2, 8)) == [1, 3]
    assert target_ids(build_vocabulary_map(counts, 4, 8)) == [1, 3, 4, 6]
    assert target_ids(build_vocabulary_map(counts, 7, 8)) == [0, 1, 2, 3, 4, 6, 7]
    assert target_ids(build_vocabulary_map(torch.zeros(8, dtype=torch.int64), 3, 8)) == [0, 1, 2]


def test_full_vocabulary_has_no_map():
    """Case: D = V: identity, no doubled offsets."""
    counts = torch.arange(8)
    assert build_vocabulary_map(counts, 8, 8) is None and build_vocabulary_map(counts, None, 8) is None
    for size in (0, 9, -1):
        with pytest.raises(ValueError, match=f"`draft_vocab_size`={size} is not in 1..8"):
            build_vocabulary_map(counts, size, 8)


@pytest.mark.parametrize("seed", range(5))
def test_maps_agree_with_each_other(seed):
    """Case: `d2t` int64, `t2d` bool, `t2d.sum() == D`, `nonzero(t2d) == arange(D) + d2t`."""
    counts = torch.randint(0, 4, (97,), generator=torch.Generator().manual_seed(seed))
    d2t = build_vocabulary_map(counts, 30 + seed, 128)
    t2d = d2t_to_t2d(d2t, 128)
    assert d2t.dtype == torch.int64 and t2d.dtype == torch.bool
    assert t2d.sum() == len(d2t) == 30 + seed and torch.nonzero(t2d).squeeze(1).tolist() == target_ids(d2t)


def test_padded_embedding():
    """Case: tokenizer 97 entries, embedding padded to 128: `t2d` has length 128; `d2t` pointing at 130 is rejected."""
    d2t = build_vocabulary_map(torch.ones(97, dtype=torch.int64), 100, 128)
    assert d2t_to_t2d(d2t, 128).shape == (128,)
    d2t[-1] = 130 - 99
    with pytest.raises(ValueError, match="`d2t` points at token 130, but the target's embedding has 128 rows"):
        d2t_to_t2d(d2t, 128)


@pytest.mark.parametrize(
    ("d2t", "t2d", "reason"),
    [
        ([0, 0, -1], None, "ascending"),
        ([1, -1, 0], None, "ascending"),
        ([-1, 0, 0], None, "points at token -1"),
        ([1, 2, 3], [0, 1, 0, 1, 0, 0, 0, 1], "`t2d` marks 3 of 8 tokens"),
        ([1, 2, 3], [0, 1, 0, 1, 0, 1], "`t2d` marks 3 of 6 tokens"),
        ([[1]], None, r"but is torch.int64 \[1, 1\]"),
        ([1.0], None, "but is torch.float32"),
        ([], None, "but is"),
        ([0] * 9, None, r"must be \[1..8\] integers"),
    ],
)
def test_bad_maps_are_refused(d2t, t2d, reason):
    with pytest.raises(ValueError, match=reason):
        check_vocabulary_map(torch.tensor(d2t), 8, None if t2d is None else torch.tensor(t2d, dtype=torch.bool))


def test_real_sizes_take_seconds():
    """Case: V = 151,936 and D = 32,000."""
    generator = np.random.default_rng(0)
    ids = (generator.zipf(1.2, size=(200, 5000)) % 151_936).astype(np.int32)
    dataset = Dataset.from_dict({"input_ids": ids, "loss_mask": np.ones_like(ids, dtype=np.uint8)})
    start = time.perf_counter()
    counts = count_tokens(dataset, 151_936)
    d2t = build_vocabulary_map(counts, 32_000, 151_936)
    t2d = d2t_to_t2d(d2t, 151_936)
    assert time.perf_counter() - start < 5
    assert t2d.sum() == 32_000 and 0.9 < coverage(counts, d2t) <= 1.0


def test_coverage():
    counts = torch.tensor([0, 6, 0, 3, 1])
    assert coverage(counts, build_vocabulary_map(counts, 2, 8)) == pytest.approx(0.9)
    assert coverage(counts, None) == 1.0 and coverage(torch.zeros(5), torch.tensor([0])) == 1.0


D2T = torch.tensor([1, 2, 4])  # target ids 1, 3, 6
T2D = torch.tensor([0, 1, 0, 1, 0, 0, 1, 0], dtype=torch.bool)


def write_map(kind, path):
    if kind == "draftsmith":
        save_vocabulary_map(path / "map.safetensors", D2T, 8)
        return path / "map.safetensors"
    if kind == "head":
        save_file({"d2t": D2T, "t2d": T2D, "fc.weight": torch.zeros(2, 2)}, path / "model.safetensors")
        return path / "model.safetensors"
    if kind == "specforge":
        torch.save({"d2t": D2T, "t2d": T2D}, path / "map.pt")
        return path / "map.pt"
    np.save(path / "d2t.npy", D2T.numpy())
    np.save(path / "t2d.npy", T2D.numpy())
    return path if kind == "speculators directory" else path / "d2t.npy"


@pytest.mark.parametrize("kind", ["draftsmith", "head", "specforge", "speculators", "speculators directory"])
def test_map_files_of_others_are_read(kind, tmp_path):
    path = write_map(kind, tmp_path)
    d2t = load_vocabulary_map(path, 8, 3)
    assert d2t.equal(D2T) and d2t.dtype == torch.int64
    with pytest.raises(ValueError, match=f"`vocab_map`: {tmp_path}.*has 3 tokens, but `draft_vocab_size` is 4"):
        load_vocabulary_map(path, 8, 4)
    with pytest.raises(ValueError, match=f"`vocab_map`: {tmp_path}.*"):
        load_vocabulary_map(path, 6)


def test_saved_map(tmp_path):
    save_vocabulary_map(tmp_path / "map.safetensors", D2T, 8)
    tensors = load_file(tmp_path / "map.safetensors")
    assert tensors["d2t"].equal(D2T) and tensors["t2d"].equal(T2D)


def test_files_without_a_map(tmp_path):
    save_file({"fc.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    torch.save([1], tmp_path / "list.pt")
    (tmp_path / "map.json").touch()
    for name in ("model.safetensors", "list.pt"):
        with pytest.raises(ValueError, match=f"{name} holds no tensor `d2t`"):
            load_vocabulary_map(tmp_path / name, 8)
    with pytest.raises(ValueError, match="is not one of"):
        load_vocabulary_map(tmp_path / "map.json", 8)


def test_identity_file_is_no_map(tmp_path):
    torch.save({"d2t": torch.zeros(8, dtype=torch.int64), "t2d": torch.ones(8, dtype=torch.bool)}, tmp_path / "map.pt")
    assert load_vocabulary_map(tmp_path / "map.pt", 8) is None


class Payload:
    def __reduce__(self):
        return print, ("unpickled",)


def test_pickles_are_not_run(tmp_path, capsys):
    torch.save({"d2t": Payload()}, tmp_path / "map.pt")
    with pytest.raises(Exception, match="weights_only|Weights only"):
        load_vocabulary_map(tmp_path / "map.pt", 8)
    assert "unpickled" not in capsys.readouterr().out


def test_map_is_never_stale(tmp_path):
    """Case: D = 2, then D = 3, then no reduction, then other data, with the same folders."""
    dataset = dataset_of(([1, 2, 2, 3], [1, 1, 1, 1]))
    sizes = {2: [1, 2], 3: [1, 2, 3], None: None}
    for size, expected in sizes.items():
        d2t = draft_vocabulary_map(DataArguments(cache_dir=str(tmp_path), draft_vocab_size=size), dataset, 8)
        assert d2t is expected is None or target_ids(d2t) == expected
    other = dataset_of(([5, 6], [1, 1]))
    assert target_ids(draft_vocabulary_map(DataArguments(cache_dir=str(tmp_path), draft_vocab_size=2), other, 8)) == [
        5,
        6,
    ]


def test_map_from_the_arguments_wins_over_the_data(tmp_path):
    path = str(write_map("specforge", tmp_path))
    dataset = dataset_of(([5, 5, 7], [1, 1, 1]))
    assert draft_vocabulary_map(DataArguments(vocab_map=path), dataset, 8).equal(D2T)

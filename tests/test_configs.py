"""The training configs that ship: each is read by `draftsmith train`, and so are the README's launches of them."""

import re
import shlex
from pathlib import Path

import pytest

from draftsmith.commands.arguments import AdapterArguments, DraftArguments, OptionalTargetArguments, StateArguments
from draftsmith.commands.parsing import parse
from draftsmith.data import DataArguments
from draftsmith.trainer import Eagle3TrainingArguments


ROOT = Path(__file__).parents[1]
CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.yaml") if path.stem != "recipe")  # tests/test_recipe.py
EIGHT_GPUS = ("gpt_oss_20b", "llama_3_1_8b")
LAUNCH = re.compile(r"torchrun --nproc_per_node 8 scripts/train\.py (--config configs/(?:[^\n]+\\\n)?[^\n]+)")
OF_THE_LAUNCH = ("--deepspeed", "--target_tp")  # whose value needs the processes


def read(*flags: str):
    classes = (OptionalTargetArguments, StateArguments, DraftArguments, AdapterArguments, DataArguments)
    return parse((*classes, Eagle3TrainingArguments), flags)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_is_read(path, tmp_path):
    *_, data, args = read("--config", str(path), "--output_dir", str(tmp_path))
    assert data.packing and data.row_length == (512 if path.stem == "demo" else 8192)
    if path.stem in EIGHT_GPUS:
        assert args.per_device_train_batch_size * args.gradient_accumulation_steps * 8 == 32
        assert args.bf16 and args.deepspeed is None and args.target_tp == 1


@pytest.mark.parametrize("name", EIGHT_GPUS)
def test_the_launches_of_the_readme_are_read(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    launches = [shlex.split(line.replace("\\\n", " ")) for line in LAUNCH.findall(text)]
    launches = [flags for flags in launches if flags[1] == f"configs/{name}.yaml"]
    assert launches
    for flags in launches:
        for option in OF_THE_LAUNCH:
            if option in flags:
                place = flags.index(option)
                value = flags[place + 1]
                assert value == "2" if option == "--target_tp" else Path(value).is_file()
                del flags[place : place + 2]
        *_, data, args = read(*flags)
        assert data.row_length in (8192, 32768) and args.ttt_steps in (3, 7)

"""From prompts to a measured head with its card: answers by the target, training, evaluation on sets held out.

python scripts/recipe.py configs/recipe.yaml
python scripts/recipe.py configs/recipe.yaml train.ttt_steps=3 head=head_k3             a second head, same answers
python scripts/recipe.py configs/recipe.yaml target=/models/mine output_dir=runs/mine   another target
python scripts/recipe.py configs/recipe.yaml generate.engine=openai generate.base_url=http://localhost:8000

Steps that are done are not done again, and one that was interrupted goes on. The settings of each lie in `output_dir`,
so that a launcher may train, after `--until generate`; run again, this trains a finished run no further:

torchrun --nproc_per_node 8 scripts/train.py --config runs/recipe/head_train.yaml
"""

import argparse
import gc
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import yaml
from recipe_prompts import HELD_OUT, TRAINING, write_prompts

from draftsmith import Eagle3TrainingArguments, commands
from draftsmith.commands.arguments import (
    AdapterArguments,
    DraftArguments,
    OptionalTargetArguments,
    StateArguments,
    TargetArguments,
)
from draftsmith.commands.card import CardArguments
from draftsmith.commands.evaluate import EvaluateArguments
from draftsmith.commands.generate_arguments import GenerateArguments
from draftsmith.commands.parsing import (
    UsageError,
    check_values,
    nearest,
    parse,
    read_mapping,
    read_yaml,
    usage_errors,
)
from draftsmith.data import DataArguments
from draftsmith.data.files import written_whole
from draftsmith.data.wording import differences
from draftsmith.trainer.arguments import refuse_unpublishable


SECTIONS: dict[str, tuple[type, ...]] = {  # the steps after the prompts, in their order
    "generate": (TargetArguments, GenerateArguments),
    "train": (
        OptionalTargetArguments, StateArguments, DraftArguments, AdapterArguments, DataArguments,
        Eagle3TrainingArguments,
    ),
    "evaluate": (TargetArguments, EvaluateArguments),
    "card": (CardArguments,),
}  # fmt: skip
TARGET_KEYS = tuple(field.name for field in fields(TargetArguments))
KEYS = (*TARGET_KEYS, "output_dir", "head", *SECTIONS)


def read_recipe(path: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The file's values under those of `key=value` and `section.key=value`, names and types checked."""
    recipe = {"output_dir": "runs/recipe", "head": "head"} | read_mapping(path)
    for section in SECTIONS:
        recipe[section] = {} if recipe.get(section) is None else recipe[section]
    for override in overrides:
        name, is_given, text = override.partition("=")
        section, _, key = name.rpartition(".")
        if not is_given or section not in ("", *SECTIONS):
            hint = f"; did you mean `{nearest(section, SECTIONS)}.{key}`?" if section and is_given else ""
            raise UsageError(f"`{override}`: pass key=value, or section.key=value of {', '.join(SECTIONS)}{hint}")
        try:
            (recipe[section] if section else recipe)[key] = read_yaml(text)
        except yaml.YAMLError as error:
            raise UsageError(f"`{override}` has no YAML value: {error}") from error
    if unknown := [key for key in recipe if key not in KEYS]:
        raise UsageError(f"{path}: unknown key `{unknown[0]}`; did you mean `{nearest(str(unknown[0]), KEYS)}`?")
    for section, types in SECTIONS.items():
        if not isinstance(recipe[section], dict):
            raise UsageError(f"{path}: `{section}` is {recipe[section]!r}, not a section of `key: value` lines")
        check_values(types, recipe[section], f"{path}, section `{section}`")
    if "hub_token" in recipe["train"]:
        raise UsageError("`train.hub_token`: settings are written to `output_dir`: set the variable HF_TOKEN instead")
    check_values((TargetArguments,), {key: recipe[key] for key in TARGET_KEYS if key in recipe}, path)
    if not isinstance(recipe.get("target"), str):
        raise UsageError(f"{path}: `target` is required: the Hub id or directory of the model that is served")
    return recipe


def settings_of(recipe: dict[str, Any], prompts: Path) -> dict[str, dict[str, Any]]:
    """The fields of each command: what the recipe's sections leave out leads from one step to the next."""
    directory = Path(recipe["output_dir"])
    target = {key: recipe[key] for key in TARGET_KEYS if key in recipe}
    generate = {"dataset": [str(prompts / TRAINING)], "output_dir": str(directory / "answers")}
    generate = target | generate | recipe["generate"]
    train = {"dataset": [generate["output_dir"]], "output_dir": str(directory / recipe["head"])}
    train = target | train | recipe["train"]
    head = train["output_dir"]
    held_out = [str(prompts / name) for name in HELD_OUT]
    evaluate = {"draft": head, "prompts": held_out, "output": str(Path(head) / "evaluation.json")}
    evaluate = target | evaluate | recipe["evaluate"]
    card = {"draft": head, "evaluation": [evaluate["output"]]} | recipe["card"]
    return {"generate": generate, "train": train, "evaluate": evaluate, "card": card}


def check_settings(settings: dict[str, dict[str, Any]]) -> None:
    """Raise `UsageError` for values that a command would refuse after those before it have run."""
    head = Path(settings["train"]["output_dir"])
    with tempfile.TemporaryDirectory() as scratch:
        stand_in = Path(scratch)  # for a head that is yet to be trained
        (stand_in / "config.json").touch()
        if (head / "config.json").is_file():
            stand_in = head
        for step, types in SECTIONS.items():
            values = settings[step] if step == "train" else _moved(settings[step], head, stand_in)
            config = Path(scratch) / f"{step}.yaml"
            write_settings(values, config)
            try:
                parts = parse(types, ["--config", str(config)])
                for args in parts:
                    if isinstance(args, Eagle3TrainingArguments) and args.push_to_hub:
                        with usage_errors():
                            refuse_unpublishable(args)
            except UsageError as error:
                raise UsageError(f"section `{step}`: {str(error).replace(str(stand_in), str(head))}") from error


def _moved(value: Any, source: Path, to: Path) -> Any:
    """`value` with the paths in it that lie in `source` as they would be in `to`."""
    if isinstance(value, dict):
        return {key: _moved(item, source, to) for key, item in value.items()}
    if isinstance(value, list):
        return [_moved(item, source, to) for item in value]
    if isinstance(value, str) and Path(value).is_relative_to(source):
        return str(to / Path(value).relative_to(source))
    return value


def run_step(step: str, settings: dict[str, Any], config: Path) -> None:
    """Run a command with the settings of `config`, unless a file beside what it writes says that this is done.

    A card is always written anew.

    Raises:
        UsageError: a head has been trained with others.
    """
    mark = Path(settings["output_dir"] if "output_dir" in settings else settings["draft"]) / f"recipe_{step}.yaml"
    done = read_mapping(str(mark)) if mark.exists() else None
    if done == settings and step != "card":
        print(f"{step}: done, says {mark}", flush=True)
        return
    if done is not None and step == "train":
        changed = sorted(name for name, _, _ in differences(done, settings))
        raise UsageError(
            f"{mark.parent} was trained with other settings ({', '.join(changed)}): name another `head`, or remove it."
        )
    print(f"\n{step}", flush=True)
    commands.main([step, "--config", str(config)])
    write_settings(settings, mark)
    gc.collect()
    torch.cuda.empty_cache()  # the next step loads a target of its own


def write_settings(settings: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as unfinished:
        unfinished.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="YAML file, such as configs/recipe.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that win over the file's")
    parser.add_argument("--until", choices=("prompts", *SECTIONS), default="card", help="the last step to run")
    args = parser.parse_intermixed_args(argv)
    steps = ("prompts", *SECTIONS)
    try:
        recipe = read_recipe(args.recipe, args.overrides)
        directory = Path(recipe["output_dir"])
        prompts = directory / "prompts"
        settings = settings_of(recipe, prompts)
        check_settings(settings)
        configs = {step: directory / f"{recipe['head']}_{step}.yaml" for step in SECTIONS}
        for step, config in configs.items():
            write_settings(settings[step], config)
        if not (prompts / TRAINING).exists():
            write_prompts(prompts)
        for step in steps[1 : steps.index(args.until) + 1]:
            run_step(step, settings[step], configs[step])
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()

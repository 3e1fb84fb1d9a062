"""Runs of `heads`: commands in processes of their own, and what of their results is kept."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from draftsmith.data.files import file_digest

from .common import ROOT
from .heads_arms import RECIPE, STEPS, Arm
from .heads_train import progress


Row = dict[str, Any]
RUN = {"report_to": "none", "disable_tqdm": True}  # of every training
WITHOUT_CURVE = {"save_strategy": "no"}
TAIL = 12  # lines of a failed run's log
DECODED_AT_ONCE = 4  # heads of a curve: each is a process that spends most of its time starting


class Failed(Exception):
    """A command failed; its log's last lines."""


@dataclass(frozen=True)
class Experiment:
    """What all runs share.

    Attributes:
        target: the `target..` fields of both commands.
        train, evaluate: the recipe's sections, with what every run has in common.
        answers: the training data.
        data: digest of the answers and held-out prompts.
        prompts: the held-out sets, whose rows have the set's name as `category`.
    """

    directory: Path
    target: dict[str, Any]
    train: dict[str, Any]
    evaluate: dict[str, Any]
    answers: Path
    data: str
    prompts: list[Path]
    save_points: int
    jobs: int

    def once(self, module: Sequence[str], config: dict[str, Any], inputs: str, output: Path, gpu: str | None) -> Any:
        """The JSON that a command wrote, now or before, with the same config and `inputs`, which are a digest.

        Raises:
            Failed: the command did.
        """
        path, log = output.with_suffix(".yaml"), output.with_suffix(".log")
        text = f"# inputs {inputs}\n{yaml.safe_dump(config)}"
        if not (output.exists() and path.exists() and path.read_text() == text):
            output.unlink(missing_ok=True)
            if "output_dir" in config:
                shutil.rmtree(config["output_dir"], ignore_errors=True)
            path.write_text(text)
            modules = os.pathsep.join(filter(None, (str(ROOT / "scripts"), os.environ.get("PYTHONPATH"))))
            visible = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
            command = [sys.executable, *module, "--config", str(path)]
            with open(log, "w") as file:
                said = {"stdout": file, "stderr": subprocess.STDOUT}
                status = subprocess.run(
                    command, env={**os.environ, **visible, "PYTHONPATH": modules}, **said
                ).returncode
            if status or not output.exists():
                lines = [text for text in log.read_text(errors="replace").splitlines() if text.strip()]
                raise Failed("\n".join([f"status {status}, {log.parent.name}/{log.name}:", *lines[-TAIL:]]))
        return json.loads(output.read_text())

    def decode(self, head: Path, output: Path, gpu: str | None, **settings: Any) -> list[Row]:
        """For each number of draft tokens and temperature, the figures of every set."""
        output.parent.mkdir(parents=True, exist_ok=True)
        prompts = [str(path) for path in self.prompts]
        config = {**self.evaluate, **settings, **self.target, "draft": str(head), "prompts": prompts}
        module = ["-c", "from draftsmith.commands import main; main()", "evaluate"]
        inputs = digest_of([*sorted(head.glob("*.safetensors")), *self.prompts])
        found = self.once(module, {**config, "output": str(output)}, inputs, output, gpu)["results"]
        return [
            {
                "num_draft_tokens": result["num_draft_tokens"], "temperature": result["temperature"],
                "sets": {name: figures(counts) for name, counts in result["categories"].items()},
            }
            for result in found
        ]  # fmt: skip

    def first_setting(self) -> dict[str, Any]:
        """What arms are compared with, and learning curves drawn."""
        return {name: self.evaluate[name][:1] for name in ("num_draft_tokens", "temperature") if name in self.evaluate}


@dataclass(frozen=True)
class Training:
    """A run of an arm."""

    experiment: Experiment
    arm: Arm
    seed: int

    @property
    def flags(self) -> dict[str, Any]:
        return {**self.arm.config(self.experiment.train), "seed": self.seed}

    def names(self) -> Row:
        """What makes it the run that it is."""
        arm, shared = self.arm, self.experiment
        return {
            "arm": arm.name, "axis": arm.axis, "seed": self.seed, "flags": self.flags, "variant": arm.variant,
            "target": Path(shared.target["target"]).name, "data": shared.data, "evaluation": shared.evaluate,
        }  # fmt: skip

    def is_in(self, row: Row) -> bool:
        names = self.names()
        is_same = row["status"] == "ok" and {name: row.get(name) for name in names} == names
        return is_same and (not self.experiment.save_points or bool(row["curve"]))

    def measure(self, gpu: str | None) -> Row:
        experiment, place = self.experiment, self.experiment.directory / f"{self.arm.name}-{self.seed}"
        saving = WITHOUT_CURVE
        if experiment.save_points:  # a share of all steps
            saving = {"save_strategy": "steps", "save_steps": 1 / experiment.save_points, "save_only_model": True}
        head = place / "head"
        config = {**self.flags, **experiment.target, **RUN, **saving}
        config |= {"dataset": [str(experiment.answers)], "output_dir": str(head)}
        output = place / "trained.json"
        place.mkdir(parents=True, exist_ok=True)
        module = ["-m", "benchmarks.heads_train", "--variant", self.arm.variant, "--output", str(output)]
        trained = experiment.once(module, config, f"{experiment.data} {self.arm.variant}", output, gpu)
        share = trained.pop("supervised_share")
        settings = {} if self.arm.axis in (RECIPE.axis, STEPS) else experiment.first_setting()
        decoded = experiment.decode(head, place / "decoded" / "head.json", gpu, **settings)
        points = sorted(head.glob("checkpoint-*"), key=step_of)
        seen = {step_of(path): counts_at(path, share) for path in points}
        curve = list(decoded_curve(experiment, points, trained["steps"], decoded[0], place / "decoded", gpu, seen))
        counts = {"supervised_tokens": int(share * trained["tokens"]), "jobs": experiment.jobs}
        return {**trained, **counts, "sets": decoded[0]["sets"], "others": without_counts(decoded[1:]), "curve": curve}


def counts_at(checkpoint: Path, supervised_share: float) -> Row:
    seen = progress(json.loads((checkpoint / "trainer_state.json").read_text())["log_history"])
    return {**seen, "supervised_tokens": int(supervised_share * seen["tokens"])}


def decoded_curve(
    experiment: Experiment,
    heads: Sequence[Path],
    last: int,
    final: Row,
    place: Path,
    gpu: str | None,
    seen: Mapping[int, Row],
) -> Iterator[Row]:
    """Of each save point what it has `seen`, by its step, and accepts; of the `last` step that is known: `final`."""

    def decoded(path: Path) -> Row:
        if step_of(path) == last:
            return final
        output = place / f"{path.name}.json"
        return experiment.decode(path.absolute(), output, gpu, **experiment.first_setting())[0]

    with ThreadPoolExecutor(DECODED_AT_ONCE) as pool:
        for path, result in zip(heads, pool.map(decoded, heads), strict=True):
            lengths = {name: counts["acceptance_length"] for name, counts in result["sets"].items()}
            yield {"step": step_of(path), **seen[step_of(path)], "sets": lengths}


def figures(counts: Row) -> Row:
    names = ("prompts", "acceptance_length", "interval", "rates", "rounds", "accepted")
    return {"verifications": sum(counts["rounds"]), **{name: counts[name] for name in names}}


def without_counts(decoded: Sequence[Row]) -> list[Row]:
    """Of further settings, the figures alone."""
    kept = ("acceptance_length", "interval", "rates", "verifications")
    return [
        {**result, "sets": {name: {key: counts[key] for key in kept} for name, counts in result["sets"].items()}}
        for result in decoded
    ]


def digest_of(paths: Sequence[Path]) -> str:
    return hashlib.sha256("".join(file_digest(path, hashlib.sha256()) for path in paths).encode()).hexdigest()[:16]


def step_of(path: Path) -> int:
    found = re.search(r"(\d+)$", path.name)
    if found is None:
        raise ValueError(f"`--decode-only` {path}: the name of a save point ends in its step.")
    return int(found[1])

"""What a run knows about the head that it made, as `run.json` beside it."""

import json
import math
import os
import platform
import re
from dataclasses import asdict, dataclass, field, is_dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import torch
from transformers import TrainingArguments

from .metadata import LOCAL_PATH, License, holds_secret, is_hub_id, leaves


RUN_FILE = "run.json"
HUB, LOCAL, MEMORY = KINDS = "hub", "local", "memory"
SNAPSHOT = re.compile(r"(?:models|datasets)--(?P<id>[^/\\]+)[/\\]snapshots[/\\](?P<revision>[0-9a-f]+)")
# The training arguments that decide the weights: neither paths nor tokens nor how often a run logs.
RECIPE = (
    "ttt_steps", "objective", "ttt_step_loss_decay", "loss_normalization", "optim", "learning_rate",
    "lr_scheduler_type", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm",
    "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps", "bf16", "fp16",
    "gradient_checkpointing", "target_tp",
)  # fmt: skip
NOT_NEGATIVE = (
    "coverage", "target_vocab_size", "draft_vocab_size", "trained_parameters", "hours", "tokens_per_second",
    "tokens_seen",
)  # fmt: skip
LIBRARIES = ("draftsmith", "torch", "transformers", "accelerate", "datasets", "deepspeed", "peft")


@dataclass(frozen=True)
class Source:
    """A model or a dataset, without where it lies on this machine.

    Attributes:
        name: its Hub id; of something local the last component of its path.
        kind: `hub`, `local` or `memory`.
        revision: the commit of a Hub repository.
        split, rows: of a dataset; of rows those that were used, each a document, however they were packed.
    """

    name: str
    kind: str = HUB
    revision: str | None = None
    split: str | None = None
    rows: int | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("`name` is empty")
        if self.kind not in KINDS:
            raise ValueError(f"`kind` is {self.kind!r}, none of {', '.join(KINDS)}")

    @classmethod
    def of(
        cls, value: Any, *, revision: str | None = None, split: str | None = None, rows: int | None = None
    ) -> "Source":
        """What an argument stands for: a path or Hub id, or anything else, which is data in memory.

        A snapshot in the Hub's cache is the repository and the commit that it is of. Revision and split are the Hub's.
        Of a URL its file is told, and neither its query nor its user, which may hold signatures and passwords.
        """
        if not isinstance(value, str | os.PathLike) or not os.fspath(value):  # a model in memory has an empty path
            return cls("in-memory data", MEMORY, rows=rows)
        path = os.fspath(value)
        if snapshot := SNAPSHOT.search(path):
            return cls(snapshot["id"].replace("--", "/"), HUB, snapshot["revision"], split, rows)
        if "://" in path:
            parts = urlsplit(path)
            return cls(os.path.basename(parts.path.rstrip("/")) or parts.hostname or "a URL", LOCAL, rows=rows)
        local = Path(path).expanduser()
        if is_hub_id(path) and not local.exists():
            return cls(path, HUB, revision, split, rows)
        return cls(os.path.basename(os.path.abspath(local)) or "/", LOCAL, rows=rows)


@dataclass
class RunRecord:
    """What is known of a run; the rest is None or empty, and absent on the card.

    Attributes:
        target, target_precision, target_adapter, target_gguf_file, trust_remote_code: the model that was drafted for,
            as it was loaded (`bfloat16`, ..).
        draft: the head that training started from.
        datasets, eval_datasets: what it was trained and evaluated on.
        coverage: share of the supervised tokens that the draft vocabulary holds.
        recipe: [`training_recipe`].
        trained_parameters: how many were trained: fewer than the head has for an adapter.
        devices: [`device_counts`].
        tokens_per_second, tokens_seen: of training, over all devices.
        train_metrics, eval_metrics: the last of each.
        versions: [`library_versions`].
        repo_id, license: where on the Hub the head goes, `owner/name`, and for what use; of later cards, too.
    """

    target: Source | None = None
    target_precision: str | None = None
    target_adapter: Source | None = None
    target_gguf_file: str | None = None
    trust_remote_code: bool | None = None
    draft: Source | None = None
    datasets: list[Source] = field(default_factory=list)
    eval_datasets: list[Source] = field(default_factory=list)
    seed: int | None = None
    target_vocab_size: int | None = None
    draft_vocab_size: int | None = None
    coverage: float | None = None
    recipe: dict[str, Any] = field(default_factory=dict)
    trained_parameters: int | None = None
    devices: dict[str, int] = field(default_factory=dict)
    hours: float | None = None
    tokens_per_second: float | None = None
    tokens_seen: int | None = None
    train_metrics: dict[str, float] = field(default_factory=dict)
    eval_metrics: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    repo_id: str | None = None
    license: License | None = None

    def __post_init__(self) -> None:
        if self.coverage is not None and self.coverage > 1:
            raise ValueError(f"`coverage` is {self.coverage}, a share of more than 1")
        for name in NOT_NEGATIVE:
            if (value := getattr(self, name)) is not None and value < 0:
                raise ValueError(f"`{name}` is {value}, less than 0")

    def save(self, directory: str | Path) -> None:
        """Write `run.json`, whole or not at all.

        Raises:
            ValueError: a value is a path of this machine or an access token.
        """
        values = _known(asdict(self))
        _refuse_private(values)
        path = Path(directory) / RUN_FILE
        unfinished = path.with_name(f".{RUN_FILE}")
        try:
            unfinished.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)

    @classmethod
    def load(cls, directory: str | Path) -> "RunRecord":
        """Read `run.json`.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is damaged, or holds a path or a token.
        """
        path = Path(directory) / RUN_FILE
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            _refuse_private(values)
            return _decoded(cls, values, "the record")
        except (ValueError, TypeError) as error:  # TypeError: a field without a default is missing
            raise ValueError(
                f"{path} can't be used: {error}. Write it anew with `RunRecord.save`, or remove it; the card then "
                "lacks what it said."
            ) from error


def training_recipe(args: TrainingArguments, **others: Any) -> dict[str, Any]:
    """What decides the weights: of the training arguments, and `others`, such as `packing` and `max_length`."""
    given = {name: value for name, value in vars(args).items() if name in RECIPE}
    recipe = {name: given[name] for name in RECIPE if name in given}
    recipe.pop("num_train_epochs" if args.max_steps > 0 else "max_steps")
    recipe["world_size"] = args.world_size
    if args.deepspeed_plugin is not None:
        recipe["deepspeed_zero_stage"] = args.deepspeed_plugin.deepspeed_config["zero_optimization"]["stage"]
    recipe |= others
    return {name: value.value if isinstance(value, Enum) else value for name, value in recipe.items()}


def device_counts(args: TrainingArguments) -> dict[str, int]:
    """Names of the devices of a run, every process having one of the same, and how many."""
    if args.device.type == "cuda":
        return {torch.cuda.get_device_name(args.device): args.world_size}
    return {f"CPU ({platform.machine()}, {os.cpu_count()} cores)": 1}


def library_versions() -> dict[str, str]:
    """Of those installed."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _known(value: Any) -> Any:
    """Without None and floats that are not finite, at any depth, and without what is empty then."""
    if isinstance(value, dict):
        items = {key: _known(item) for key, item in value.items()}
        return {key: item for key, item in items.items() if item not in (None, {}, [])}
    if isinstance(value, list):
        return [_known(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _refuse_private(values: Any) -> None:
    for name, value in leaves(values):
        if isinstance(value, str) and holds_secret(value):
            raise ValueError(f"`{name}` holds an access token, key or password: leave it out")
        if isinstance(value, str) and LOCAL_PATH.search(value):
            raise ValueError(f"`{name}` is {value!r}, a path of this machine: record it by `Source.of`")


def _decoded(hint: Any, value: Any, name: str) -> Any:
    """`value`, as JSON gives it, as a `hint`; raises `ValueError` when it is none."""
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin is UnionType:
        return None if value is None else _decoded(arguments[0], value, name)
    if isinstance(origin, type) and is_dataclass(origin) and isinstance(value, dict):
        hints = get_type_hints(origin)
        if unknown := value.keys() - hints.keys():
            raise ValueError(f"`{name}` has an unknown field {min(unknown)!r}")
        fields = {key: _decoded(hints[key], item, key) for key, item in value.items()}
        try:
            return origin(**fields)
        except ValueError as error:
            raise ValueError(f"`{name}`: {error}") from error
    if origin is list and isinstance(value, list):
        return [_decoded(arguments[0], item, name) for item in value]
    if origin is dict and isinstance(value, dict):
        return {key: _decoded(arguments[1], item, f"{name}.{key}") for key, item in value.items()}
    if origin is float and type(value) is int:
        return float(value)
    if origin is Any or type(value) is origin:
        return value
    raise ValueError(f"`{name}` is {value!r}")

"""Dataclasses filled from YAML files and flags: files win over defaults, flags over files."""

from __future__ import annotations

import difflib
import inspect
import json
import re
from argparse import SUPPRESS, Action, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from types import UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import yaml
from huggingface_hub.errors import StrictDataclassError
from transformers import HfArgumentParser

from ..serving.servers import ServerError


class UsageError(Exception):
    """The user's input is wrong; the message says where, why and what to do. Printed without a traceback."""


def parse(dataclass_types: Sequence[type], argv: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Instances of `dataclass_types`, in their order, from `--config` files and flags.

    Args:
        dataclass_types: dataclasses without a field name in common; `TrainingArguments` may be among them. Those with
            a class method `check_given` are called with the names that are given, defaults left out, and may raise.
        argv: the flags; default: the process's.

    `--config` may be repeated, later files winning. A file is one YAML mapping from field names to values.
    Dictionaries and lists are plain YAML there and JSON as flags; a list may also be words: `--ids 2 14 25`.

    Raises:
        UsageError: a file is missing or broken, or a key is unknown, given twice, absent or of the wrong type.
    """
    parser = _Parser(dataclass_types)
    flags, unknown = parser.parse_known_args(argv, Namespace(**dict.fromkeys(parser.hints)))  # None: not given
    if unknown:
        raise UsageError(parser.describe_unknown(unknown[0]))
    from_files = {name: value for path in flags.config for name, value in parser.read_file(path).items()}
    values = vars(parser.parse_known_args(argv, Namespace(**from_files))[0])
    if missing := [name for name in parser.hints if name not in values]:
        raise UsageError(f"`{missing[0]}` is required: give it in a --config file or as --{missing[0]}")
    given = {name for source in (from_files, vars(flags)) for name, value in source.items() if value is not None}
    try:
        for dataclass_type in dataclass_types:
            if hasattr(dataclass_type, "check_given"):
                dataclass_type.check_given(given)
        return parser.parse_dict({name: _splice(value) for name, value in values.items()}, allow_extra_keys=True)
    except (ValueError, ImportError) as error:  # what `__post_init__` raises for bad values and missing extras
        raise UsageError(str(error)) from error


def read_mapping(path: str) -> dict[str, Any]:
    """The YAML file's one mapping. Raises `UsageError` for any other file."""
    try:
        with open(path, "rb") as file:
            values = read_yaml(file)
    except OSError as error:
        raise UsageError(f"cannot read `--config` {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date out of range
        raise UsageError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict | None):
        raise UsageError(f"{path} must hold one mapping of `field: value` lines, not a {type(values).__name__}")
    return values or {}


def read_yaml(source: Any) -> Any:
    """What a text or an open file holds, numbers like `1e-4` included. Raises `yaml.YAMLError`."""
    return yaml.load(source, Loader=_StrictLoader)


def check_values(dataclass_types: Sequence[type], values: Mapping[str, Any], place: str) -> None:
    """Raise `UsageError` for names and types that a file of these fields must not have; `place` begins the message."""
    parser = _Parser(dataclass_types)
    for name, value in values.items():
        parser.checked(place, name, value)


class _Parser(HfArgumentParser):
    """`HfArgumentParser` plus files, strict types and one `--help` group per class that declares fields."""

    def __init__(self, dataclass_types: Any) -> None:
        self.hints: dict[str, Any] = {}  # field name -> declared type
        usage = "draftsmith <command> [--config file.yaml] [--any_field value ...]"
        super().__init__(dataclass_types, usage=usage, allow_abbrev=False)
        self.add_argument("--config", action="append", default=[], metavar="FILE", help="YAML file of fields")
        if "local_rank" not in self.hints:  # the deepspeed launcher appends it to every script's arguments
            self.add_argument("--local_rank", help=SUPPRESS)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def _add_dataclass_arguments(self, dtype: Any) -> None:
        hints = get_type_hints(dtype)
        remaining = {field.name: field for field in fields(dtype) if field.init}
        self.hints |= {name: hints[name] for name in remaining}
        for cls in dtype.__mro__:  # derived first: our own options stand above the hundred of `TrainingArguments`
            group: Any = self.add_argument_group(cls.__name__)
            for name in [name for name in remaining if name in inspect.get_annotations(cls)]:
                field = remaining.pop(name)
                field.type = hints[name]
                self._parse_dataclass_field(group, field)
                _adapt(self._option_string_actions[f"--{name}"], hints[name])

    def describe_unknown(self, argument: str) -> str:
        """The error for an argument that no field takes."""
        if not argument.startswith("--"):
            return f"unexpected `{argument}`: fields are given as --field value, files as --config file.yaml"
        flag = argument.split("=")[0]
        closest = nearest(flag.removeprefix("--").replace("-", "_"), [*self.hints, "config"])
        return f"unknown flag `{flag}`; did you mean `--{closest}`?"

    def read_file(self, path: str) -> dict[str, Any]:
        """The fields that the YAML file sets, checked against their declared types."""
        values = read_mapping(path)
        return {name: self.checked(path, name, value) for name, value in values.items()}

    def checked(self, path: str, name: Any, value: Any) -> Any:
        if name not in self.hints:
            raise UsageError(f"{path}: unknown key `{name}`; did you mean `{nearest(str(name), self.hints)}`?")
        hint = self.hints[name]
        try:
            return _coerce(value, hint)
        except TypeError as error:
            remedy = "; quote it to make it text" if str in _members(hint) else ""
            message = f"{path}: `{name}` is {value!r} ({type(value).__name__}), expected {_type_name(hint)}{remedy}"
            raise UsageError(message) from error


class _StrictLoader(yaml.SafeLoader):
    """YAML whose keys are unique (the standard loader keeps the last, silently) and whose `1e-4` is a number."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key in [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]:
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"`{key.value}` is given twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return node


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def nearest(name: str, candidates: Iterable[str]) -> str:
    return difflib.get_close_matches(name, candidates, n=1, cutoff=0)[0]


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _coerce(value: Any, hint: Any) -> Any:
    """`value`, as YAML gives it, as a `hint`: only int to float is converted. Raises `TypeError` when it is none."""
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, UnionType):
        for member in arguments:
            try:
                return _coerce(value, member)
            except TypeError:
                continue
    elif origin is Any or (origin is Literal and value in arguments):
        return value
    elif origin is list and isinstance(value, list):
        return [_coerce(item, *arguments or (Any,)) for item in value]
    elif origin is dict and isinstance(value, dict):
        key_hint, value_hint = arguments or (Any, Any)
        return {_coerce(key, key_hint): _coerce(item, value_hint) for key, item in value.items()}
    elif origin is float and type(value) is int:
        return float(value)
    elif type(value) is origin:  # not isinstance: `true` is no int
        return value
    raise TypeError


def _adapt(action: Action, hint: Any) -> None:
    """Let a file give a required field, and JSON give a dictionary or a list."""
    if action.required:
        action.required, action.default = False, SUPPRESS
    for member in _members(hint):
        if (get_origin(member) or member) is dict:
            action.type = _dict_reader(member, is_text_valid=str in _members(hint))
    if action.nargs == "+":
        action.type = _item_reader(action.type)


def _dict_reader(hint: Any, is_text_valid: bool) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        if is_text_valid and not text.startswith("{"):
            return text
        value = _load_json(text, hint)
        return text if is_text_valid else value  # a field that takes text reads its JSON itself

    return read


def _item_reader(item_type: Any) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        return tuple(_load_json(text, list[item_type])) if text.startswith("[") else item_type(text)

    read.__name__ = item_type.__name__  # argparse names it: "invalid int value"
    return read


def _load_json(text: str, hint: Any) -> Any:
    try:
        return _coerce(json.loads(text), hint)
    except (json.JSONDecodeError, TypeError) as error:
        raise ArgumentTypeError(f"expected {_type_name(hint)} as JSON, got {text!r}") from error


def _splice(value: Any) -> Any:
    """A list flag's words, with the tuples that JSON lists became opened."""
    if not isinstance(value, list):
        return value
    return [item for word in value for item in (word if isinstance(word, tuple) else (word,))]


def _type_name(hint: Any) -> str:
    return hint.__name__ if get_origin(hint) is None else str(hint).replace("typing.", "")


@contextmanager
def usage_errors() -> Iterator[None]:
    """What loading and checking raise for unusable input becomes a [`UsageError`], before long work starts."""
    try:
        yield
    except (ValueError, OSError, ImportError, ServerError, StrictDataclassError) as error:  # the last: a broken config
        raise UsageError(str(error)) from error

"""A peft config from what a command line gives: fields, JSON, or a file."""

import dataclasses
import difflib
import json
from pathlib import Path
from typing import Any

from ..target_family import require_peft


def read_peft_config(source: dict[str, Any] | str) -> Any:
    """A peft config from its fields, as a mapping, as JSON, or in a file such as an adapter_config.json.

    Raises:
        ValueError: the file or a field is not there, or a value is wrong.
        ImportError: peft is missing.
    """
    require_peft()
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    values = _read_json(source) if isinstance(source, str) else source
    kinds = {kind.value: config_class for kind, config_class in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    kind = values.get("peft_type")
    if kind not in kinds:
        raise ValueError(f"`peft_config`: `peft_type` is {kind!r}: {near(str(kind), list(kinds))}")
    known = [item.name for item in dataclasses.fields(kinds[kind])]
    if unknown := [name for name in values if name not in known]:
        raise ValueError(f"`peft_config`: unknown key `{unknown[0]}` of {kind}; {near(unknown[0], known)}")
    try:
        return kinds[kind](**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`peft_config`: {error}") from error


def _read_json(source: str) -> dict[str, Any]:
    try:
        values = json.loads(source if source.startswith("{") else Path(source).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"`peft_config`: cannot read {source}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"`peft_config`: {source} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"`peft_config`: {source} must hold one mapping of fields.")
    return values


def near(name: str, candidates: list[str]) -> str:
    return f"did you mean `{difflib.get_close_matches(name, candidates, n=1, cutoff=0)[0]}`?"

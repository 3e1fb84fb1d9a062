"""How a run's target is loaded again: by our commands, in Python and by servers."""

import shlex
from typing import Any

from .run_record import HUB, RunRecord


DTYPES = ("bfloat16", "float16", "float32")  # other precisions are of the stored weights themselves


def command_words(record: RunRecord) -> str:
    """The flags of `draftsmith train` and `evaluate`, quoted for a shell."""
    assert record.target is not None
    options = {"target": record.target.name, "target_revision": _revision(record), **_adapter(record)}
    options |= {"target_gguf_file": record.target_gguf_file, "target_dtype": _dtype(record)}
    options["trust_remote_code"] = "true" if record.trust_remote_code else None
    given = [word for name, value in options.items() if value is not None for word in (f"--{name}", value)]
    return shlex.join(given)


def python_options(record: RunRecord) -> dict[str, Any]:
    """Keyword arguments of transformers' `from_pretrained`."""
    options: dict[str, Any] = {"revision": _revision(record), "gguf_file": record.target_gguf_file}
    options |= {"dtype": _dtype(record) or "auto", "trust_remote_code": record.trust_remote_code or None}
    return {name: value for name, value in options.items() if value is not None}


def server_flags(record: RunRecord) -> list[str]:
    """Flags that vLLM and SGLang have by the same names."""
    options = {"revision": _revision(record), "dtype": _dtype(record)}
    flags = [word for name, value in options.items() if value is not None for word in (f"--{name}", value)]
    return [*flags, *(["--trust-remote-code"] if record.trust_remote_code else [])]


def _revision(record: RunRecord) -> str | None:
    return record.target.revision if record.target is not None and record.target.kind == HUB else None


def _dtype(record: RunRecord) -> str | None:
    return record.target_precision if record.target_precision in DTYPES else None


def _adapter(record: RunRecord) -> dict[str, str]:
    return {} if record.target_adapter is None else {"target_adapter": record.target_adapter.name}

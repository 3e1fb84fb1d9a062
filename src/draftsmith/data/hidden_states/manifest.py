"""What a cache of hidden states says of itself: `index.json`, which appears when everything else is there.

Until then the same content, without `files`, is `unfinished.json`: a run that was killed goes on only as it began.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..files import written_whole


FORMAT = 1  # raised whenever caches are written that an earlier reader would misread
INDEX, UNFINISHED = "index.json", "unfinished.json"
TARGET = "target"  # directory of config, tokenizer, embedding and head


@dataclass
class Split:
    """Rows of one split: `tokens` of them all, and which of them each shard holds the states of.

    Attributes:
        shards: row numbers `[start, stop]` of each.
    """

    shards: list[list[int]]

    @property
    def rows(self) -> int:
        return self.shards[-1][1]


@dataclass
class Manifest:
    """Where the states come from and how they are stored.

    Attributes:
        target: `name`, `kind` and `revision` as in a run's record; `dtype`, `precision`, `adapter`, `gguf_file`; of a
            local directory the `fingerprint` of its weight files.
        tokenizer: fingerprint of the tokenizer and its chat template.
        aux_layer_ids: the target's states that are fused, as `hidden_states` indices.
        width: numbers of one state.
        storage: `bfloat16` or `float8`.
        batch_size: rows that the target ran at once.
        data: `sources` and `eval_sources`, the arguments of preparation, the `cache_keys` of what was prepared.
        splits: `train`, and perhaps `evaluation`.
        files: of each file, relative to the cache, its size in bytes and the BLAKE2b of its content.
    """

    target: dict[str, Any]
    tokenizer: str
    aux_layer_ids: list[int]
    width: int
    storage: str
    batch_size: int
    data: dict[str, Any]
    splits: dict[str, Split]
    format: int = FORMAT
    files: dict[str, list] = field(default_factory=dict)

    def save(self, directory: Path, name: str) -> None:
        with written_whole(directory / name) as unfinished:
            unfinished.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Manifest":
        """Read one of the two files.

        Raises:
            ValueError: it is damaged or of a format that this version does not read.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values["format"] != FORMAT:
                raise ValueError(
                    f"{path} is of format {values['format']}, but this version of draftsmith reads format {FORMAT}: "
                    "write the cache anew, or use the version that wrote it."
                )
            values["splits"] = {name: Split(**split) for name, split in values["splits"].items()}
            return cls(**values)
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged ({error!r}): write the cache anew.") from error

    def differences(self, other: "Manifest") -> list[str]:
        """The fields in which two caches differ, with both values, but for what is known when they are finished."""
        names = [item.name for item in fields(self) if item.name != "files"]
        ours, theirs = (dict(_leaves({name: asdict(cache)[name] for name in names})) for cache in (self, other))
        return [
            f"{name}: {ours.get(name)!r}, not {theirs.get(name)!r}"
            for name in dict.fromkeys([*ours, *theirs])
            if ours.get(name) != theirs.get(name)
        ]


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def shard_stem(split: str, number: int, count: int) -> str:
    """What the name of a shard begins with; the digest of its content follows."""
    return f"{split}-{number:05d}-of-{count:05d}"


def is_shard(name: str, split: str) -> bool:
    return name.startswith(f"{split}-") and name.endswith(".safetensors")


def digest_of(path: Path) -> str:
    """BLAKE2b of a file's content, 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while chunk := file.read(2**22):
            digest.update(chunk)
    return digest.hexdigest()

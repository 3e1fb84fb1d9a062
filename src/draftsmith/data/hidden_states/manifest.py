"""What a cache of hidden states says of itself: `index.json`, which appears when everything else is there.

Until then the same content, without the shards in `files`, is `unfinished.json`: a run that was killed goes on only
as it began. Every file has its digest from when it was written: shards in their names, others in one of the two, which
have one of themselves.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..files import file_digest, written_whole
from ..wording import differences


FORMAT = 2  # raised whenever caches are written that an earlier reader would misread
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
        files: of each file, relative to the cache, size in bytes and the BLAKE2b of its content, as it was written.
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
        values = asdict(self)
        with written_whole(directory / name) as unfinished:
            text = json.dumps({**values, "checksum": _checksum(values)}, indent=1)
            unfinished.write_text(text + "\n", encoding="utf-8")

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
            if values.pop("checksum") != _checksum(values):
                raise ValueError(f"{path} is damaged (its checksum is another): write the cache anew.")
            values["splits"] = {name: Split(**split) for name, split in values["splits"].items()}
            return cls(**values)
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged ({error!r}): write the cache anew.") from error

    def shard_files(self, split: str) -> list[str]:
        """The files of a split's shards, in the order of their rows."""
        files = {file.split(".")[0]: file for file in self.files}
        return [files[stem] for stem in self.shard_stems(split)]

    def shard_stems(self, split: str) -> list[str]:
        """What the names of a split's shards begin with; the digest of the content follows."""
        count = len(self.splits[split].shards)
        return [f"{split}-{number:05d}-of-{count:05d}" for number in range(count)]

    def differences(self, other: "Manifest") -> list[str]:
        """The fields in which two caches differ, with both values, but for what is known when they are finished.

        How many rows a source has follows from the rest, and earlier versions counted packed ones.
        """
        ours, theirs = (_compared(cache) for cache in (self, other))
        return [f"{name}: {our!r}, not {their!r}" for name, our, their in differences(ours, theirs)]


def _compared(cache: Manifest) -> dict[str, Any]:
    values = asdict(cache)
    del values["files"]
    for source in [*values["data"].get("sources", []), *values["data"].get("eval_sources", [])]:
        source.pop("rows", None)
    return values


def _checksum(values: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=16).hexdigest()


def digest_of(path: Path) -> str:
    """BLAKE2b of a file's content, 32 hexadecimal digits."""
    return file_digest(path, hashlib.blake2b(digest_size=16))

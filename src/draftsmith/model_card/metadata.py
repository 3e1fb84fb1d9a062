"""What the Hub takes as a card, checked before anything is uploaded."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from huggingface_hub import ModelCard
from huggingface_hub.errors import HFValidationError
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.utils import validate_repo_id


# https://huggingface.co/docs/hub/repositories-licenses; the Hub refuses others when a card is pushed.
LICENSES = frozenset(
    """
    apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m
    afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5
    cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0
    cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0
    cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0
    lgpl lgpl-2.1 lgpl-3.0 isc h-research intel-research lppl-1.3c ms-pl apple-ascl apple-amlr mpl-2.0 odc-by odbl
    openmdw-1.0 openmdw-1.1 openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl lgpl-lr
    deepfloyd-if-license fair-noncommercial-research-license llama2 llama3 llama3.1 llama3.2 llama3.3 llama4
    grok2-community gemma unknown other
    """.split()
)
LICENSE_FILES = ("LICENSE", "LICENSE.md")  # what `license_link` may name in the repository itself
DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".csv", ".txt", ".gz", ".bz2", ".xz", ".zst")
# Absolute and relative paths, also within a text; the slashes of a URL are none.
LOCAL_PATH = re.compile(r"(?:^|[\s\"'=(,:])(?:~?/[^\s/]|\.{1,2}[/\\]|[A-Za-z]:[/\\]|file:)")
# Secrets by their shapes. A token has 34 letters and digits behind `hf_`; names that begin so are shorter, or have
# dashes. No boundary is asked for in front: in escaped text a letter may stand there (`\nhf_..`).
TOKEN = re.compile(
    r"hf_[A-Za-z0-9]{30,}|hf_(?:oauth|jwt)_(?:eyJ[\w.=-]+|[A-Za-z0-9]{20,})"
    r"|sk-(?:proj|svcacct|admin|ant|or)-[\w-]{20,}|sk-[A-Za-z0-9]{40,}"
    r"|gh[oprsu]_[A-Za-z0-9]{36}|github_pat_\w{40,}|glpat-[\w-]{20,}|xox[abeprs]-[0-9A-Za-z-]{20,}"
    r"|A(?:KIA|SIA)[0-9A-Z]{16}|AIza[\w-]{35}|wandb_v1_\w{20,}|(?i:wandb_api_key)\W{1,4}[0-9a-f]{40}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
USER_INFO = re.compile(r"(?<=://)[^\s/@\"'\\]+:[^\s/@\"'\\]+(?=@)")  # of a URL: `user:password`


@dataclass(frozen=True)
class License:
    """The license of a repository, by the Hub's identifier; `other` needs a name and a link.

    Raises:
        ValueError: the Hub does not take it.
    """

    identifier: str
    name: str | None = None
    link: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.identifier, str) or self.identifier not in LICENSES:
            raise ValueError(
                f"`license` is {self.identifier!r}, no identifier of the Hub: pass one of "
                "https://huggingface.co/docs/hub/repositories-licenses, such as apache-2.0, or `other` with "
                "`license_name` and `license_link`."
            )
        if self.identifier == "other" and not (self.name and self.link):
            raise ValueError("`license` other says nothing by itself: add `license_name` and `license_link`.")
        if self.identifier != "other" and (self.name or self.link):
            raise ValueError(
                f"`license_name` and `license_link` belong to `license` other, not to {self.identifier}: leave them "
                "out."
            )
        if self.link and self.link not in LICENSE_FILES and not self.link.startswith(("https://", "http://")):
            raise ValueError(
                f"`license_link` is {self.link!r}: pass a URL, or {' or '.join(LICENSE_FILES)} in the repository."
            )

    def metadata(self) -> dict[str, str]:
        named = {"license": self.identifier, "license_name": self.name, "license_link": self.link}
        return {field: value for field, value in named.items() if value}


def is_hub_id(text: str) -> bool:
    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return not text.lower().endswith(DATA_SUFFIXES)


def holds_secret(text: str) -> bool:
    """Whether a token, a key, or a password within a URL is in it, by their usual shapes."""
    return any(pattern.search(text) for pattern in (TOKEN, USER_INFO))


def check_card(text: str) -> None:
    """Check offline what the Hub would check of a card, and that it gives away neither paths nor tokens.

    Raises:
        ValueError: names the field, the value and the remedy.
    """
    if holds_secret(text):
        raise ValueError("The card holds an access token, key or password: remove it, and revoke it if it was shared.")
    metadata = _metadata(text)
    for field, value in leaves(metadata):
        if value is None or isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"`{field}` is {value}: leave out what is not known.")
        if isinstance(value, str) and LOCAL_PATH.search(value):
            raise ValueError(
                f"`{field}` is {value!r}, a path of this machine: name a Hub repository, or leave it out."
            )
    if "license" in metadata:
        for identifier in _as_list(metadata["license"]):
            License(identifier, metadata.get("license_name"), metadata.get("license_link"))
    for field in ("base_model", "datasets"):
        for value in _as_list(metadata.get(field, [])):
            if not isinstance(value, str) or not is_hub_id(value):
                raise ValueError(f"`{field}` is {value!r}, no id of the Hub: write `owner/name`, or leave it out.")
    try:
        ModelCard(text)
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(
            f"`model-index` is {metadata.get('model-index')!r}, which huggingface_hub can't read ({error}): each "
            "result needs `task`, `dataset` and `metrics` with `type` and `value`; or leave it out."
        ) from error


def _metadata(text: str) -> dict[str, Any]:
    block = REGEX_YAML_BLOCK.search(text)
    if block is None:
        raise ValueError("The card has no metadata: begin it with YAML between two lines of `---`.")
    try:
        metadata = yaml.safe_load(block[2])
    except yaml.YAMLError as error:
        raise ValueError(
            f"The card's metadata is not valid YAML: {error}. Correct the block between `---`."
        ) from error
    if not isinstance(metadata, dict):
        raise ValueError(f"The card's metadata is {metadata!r}: write one `field: value` a line.")
    return metadata


def leaves(value: Any, field: str = "") -> Iterator[tuple[str, Any]]:
    """The values within dictionaries and lists, keys among them, each with the path of its field."""
    if isinstance(value, dict):
        for key, item in value.items():
            name = f"{field}.{key}" if field else str(key)
            yield name, key
            yield from leaves(item, name)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, f"{field}[{index}]")
    else:
        yield field, value


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]

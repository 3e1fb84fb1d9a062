"""Arguments that several commands share: which target, which head."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from huggingface_hub.errors import RepositoryNotFoundError, StrictDataclassError
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME, cached_file

from ..data import DataArguments
from ..models.eagle3 import Eagle3DraftConfig
from ..models.eagle3.adapters_eagle3 import is_adapter
from ..revisions import note_commit
from ..target import load_target
from ..tensor_parallel import check_placement
from ..trainer.adapter_configs import read_peft_config


def check_local_path(name: str, value: str) -> None:
    """Raise for a missing directory, which the Hub's client would report as a malformed repository id."""
    if value.startswith(("/", "./", "../", "~")) and not Path(value).expanduser().exists():
        raise ValueError(f"`{name}`: {value} does not exist.")


def check_draft(draft: str) -> None:
    """Raise `ValueError` for a head, or adapter, that is not there, before anything large is loaded."""
    with naming_what_is_missing("draft", draft):
        is_head = is_adapter(draft) or cached_file(draft, CONFIG_NAME) is not None
    if not is_head:
        raise ValueError(
            f"`draft`: {draft} has neither {CONFIG_NAME} nor {ADAPTER_CONFIG_NAME}: name a head, or an adapter of one."
        )


@contextmanager
def naming_what_is_missing(name: str, value: str) -> Iterator[None]:
    """What transformers raises for a model that it does not find, as `ValueError` that names the argument."""
    try:
        yield
    except OSError as error:
        if Path(value).is_dir():
            raise
        if isinstance(error.__cause__, RepositoryNotFoundError):
            reason = (
                "is no directory, and the Hub has no such repository, or not for you: correct the name, or log in "
                "with `hf auth login`"
            )
        else:
            said = str(error).partition("\n")[0].rstrip(".")
            reason = f"is no directory and did not come from the Hub ({said}): name a directory, or go online"
        raise ValueError(f"`{name}`: {value} {reason}.") from error


def check_output(name: str, value: str, beside: tuple[str, ...] = ()) -> None:
    """Raise for a file that could not be written when the work is done, or those `beside` it, by their suffixes."""
    path = Path(value)
    if not value or path.is_dir():
        raise ValueError(f"`{name}` is {value!r}, {'a directory' if value else 'empty'}: name a file.")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"`{name}`: the directory of {value} does not exist: make it, or name another.")
    for written in (path, *map(path.with_suffix, beside)):
        if written.exists() and not written.is_file():
            kind = "a directory" if written.is_dir() else "no regular file"
            raise ValueError(f"`{name}` is {value}, but {written} would be written, which is {kind}: name another.")
        try:
            tempfile.NamedTemporaryFile(prefix=f".{written.name}-", dir=written.parent).close()
        except OSError as error:
            raise ValueError(f"`{name}`: {written} cannot be written ({error.strerror}): name another.") from error


BESIDE_A_CACHE = {"draft_vocab_size", "vocab_map", "num_proc", "cache_dir"}  # data arguments that decide no row
DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass
class TargetArguments:
    """The model that is served, loaded as it is served."""

    target: str = field(metadata={"help": "Hub id or directory of the target model."})
    target_revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of the target."})
    target_dtype: str = field(
        default="auto", metadata={"help": "`auto` (as stored), `bfloat16`, `float16` or `float32`."}
    )
    target_adapter: str | None = field(default=None, metadata={"help": "A PEFT adapter served with the target."})
    target_gguf_file: str | None = field(default=None, metadata={"help": "The GGUF file in `target` to read."})
    target_attn_implementation: str = field(
        default="block_sparse_flash",
        metadata={"help": "Attention of the target: `block_sparse_flash`, `sdpa`, `eager`."},
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the target."})

    def __post_init__(self) -> None:
        check_local_path("target", self.target)
        if self.target_adapter is not None:
            check_local_path("target_adapter", self.target_adapter)
        if self.target_dtype not in DTYPES:
            raise ValueError(f"`target_dtype` is {self.target_dtype!r}: pass one of {', '.join(DTYPES)}.")

    def config(self) -> PreTrainedConfig:
        with naming_what_is_missing("target", self.target):
            config = AutoConfig.from_pretrained(self.target, **self._source())
        note_commit(config, self.target, self.target_revision)
        return config

    def generation_config(self) -> GenerationConfig:
        """How its authors recommend to sample; empty if they say nothing."""
        try:
            return GenerationConfig.from_pretrained(self.target, revision=self.target_revision or "main")
        except OSError:  # there is no such file
            return GenerationConfig()

    def check_placement(self, tp_size: int) -> None:
        """Raise what `load` would raise for `tp_size`, from the config alone."""
        if tp_size == 1:
            return
        check_placement(self.config(), tp_size, adapter=self.target_adapter, gguf_file=self.target_gguf_file)

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        with naming_what_is_missing("target", self.target):
            return AutoTokenizer.from_pretrained(self.target, **self._source())

    def load(self, *, tp_size: int = 1) -> PreTrainedModel:
        return load_target(
            self.target,
            dtype=self.target_dtype,
            adapter=self.target_adapter,
            attn_implementation=self.target_attn_implementation,
            tp_size=tp_size,
            **self._source(),
        )

    def _source(self) -> dict:
        source = {"revision": self.target_revision, "trust_remote_code": self.trust_remote_code}
        if self.target_gguf_file is not None:
            source["gguf_file"] = self.target_gguf_file
        return source


@dataclass
class OptionalTargetArguments(TargetArguments):
    """The model that is served, where it may be left out."""

    target: str | None = field(  # type: ignore[assignment]
        default=None,
        metadata={"help": "Hub id or directory of the target model. With `hidden_states` it may be left out."},
    )

    def __post_init__(self) -> None:
        if self.target is not None:
            return super().__post_init__()
        options = (item for item in fields(self) if item.name != "trust_remote_code")
        if given := [f"`{item.name}`" for item in options if getattr(self, item.name) != item.default]:
            raise ValueError(f"{', '.join(given)} needs `target`.")

    def require(self) -> None:
        if self.target is None:
            raise ValueError("`target` is required: give it in a --config file or as --target.")


@dataclass
class StateArguments:
    """Where the target's states come from."""

    hidden_states: str | None = field(
        default=None,
        metadata={"help": "A cache by `draftsmith cache`: its rows are trained on, and the target is not run."},
    )

    @classmethod
    def check_given(cls, given: set[str]) -> None:
        """Refuse what would decide the rows, which a cache has decided."""
        others = [f"`{item.name}`" for item in fields(DataArguments) if item.name in given - BESIDE_A_CACHE]
        if "hidden_states" in given and others:
            raise ValueError(
                f"`hidden_states` has rows of its own, prepared when it was written: leave out {', '.join(others)}."
            )


@dataclass
class AdapterArguments:
    """An adapter on the head that `draft` names, which stays as it is."""

    peft_config: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Train an adapter (pip install draftsmith[peft]): a JSON file such as adapter_config.json, or the "
            "fields of any peft method on layers: "
            '\'{"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": "all-linear"}\'. '
            'To train the output head too, add "modules_to_save": ["lm_head"].'
        },
    )

    def load(self, draft: str | None) -> Any | None:
        """The peft config for a head that exists."""
        if self.peft_config is None:
            return None
        if draft is None:
            raise ValueError("`peft_config` adapts a head that exists: name it with `draft`.")
        return read_peft_config(self.peft_config)


@dataclass
class DraftArguments:
    """The head that is trained. What is left out follows the target."""

    draft: str | None = field(default=None, metadata={"help": "A head to go on from; its options and map are kept."})
    aux_layer_ids: list[int] | None = field(
        default=None,
        metadata={"help": "Target states that are fused, as `hidden_states` indices; default 2, L//2, L-3."},
    )
    draft_hidden_size: int | None = field(default=None, metadata={"help": "Width of the head, if not the target's."})
    draft_intermediate_size: int | None = field(
        default=None, metadata={"help": "Width of its MLP, if not the target's."}
    )
    draft_sliding_window: int | None = field(default=None, metadata={"help": "Tokens the head sees; default all."})
    init_from_layer: int | None = field(
        default=None,
        metadata={"help": "The target's decoder layer that the head starts from (-1: the last); default random."},
    )
    norm_output: bool = field(default=False, metadata={"help": "EAGLE-3.1: the next step reads the normed output."})
    fc_norm: bool = field(default=False, metadata={"help": "EAGLE-3.1: one norm per fused target state."})
    norm_before_fc: bool = field(default=False, metadata={"help": "EAGLE-3.1: one norm over the fused states."})
    draft_attn_implementation: str = field(
        default="block_sparse_flash",
        metadata={"help": "Attention of the head; `sdpa` and `eager` are for comparison."},
    )

    def __post_init__(self) -> None:
        if self.draft is not None:
            check_local_path("draft", self.draft)
        for name in ("draft_hidden_size", "draft_intermediate_size", "draft_sliding_window"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"`{name}` is {value}: pass at least 1, or leave it out.")

    def architecture_given(self) -> list[str]:
        """The fields that ask for an architecture, for a head that has one already."""
        asking = (item for item in fields(self) if item.name not in ("draft", "draft_attn_implementation"))
        return [f"`{item.name}`" for item in asking if getattr(self, item.name) != item.default]

    def options(self) -> dict:
        """Keyword arguments of `Eagle3DraftModel.from_target`."""
        options = {
            "aux_layer_ids": self.aux_layer_ids,
            "hidden_size": self.draft_hidden_size,
            "intermediate_size": self.draft_intermediate_size,
            "init_from_layer": self.init_from_layer,
            "sliding_window": self.draft_sliding_window,
            "norm_output": self.norm_output,
            "fc_norm": self.fc_norm,
            "norm_before_fc": self.norm_before_fc,
            "attn_implementation": self.draft_attn_implementation,
        }
        return {name: value for name, value in options.items() if value is not None}

    def head_config(self, target: PreTrainedConfig, draft_vocab_size: int | None) -> Eagle3DraftConfig:
        """Of the new head that `draftsmith train` would make, from the target's config alone."""
        family = f"`target` is of the family `{target.model_type}`, for which no head can be made"
        if target.is_encoder_decoder:
            raise ValueError(f"{family}: it has an encoder. Name a decoder-only target.")
        options = {name: value for name, value in self.options().items() if name != "init_from_layer"}
        try:
            text = target.get_text_config(decoder=True)
            depth, heads = text.num_hidden_layers, text.num_attention_heads
            if self.init_from_layer is not None and not -depth <= self.init_from_layer < depth:
                raise ValueError(f"`init_from_layer` is {self.init_from_layer}, but the target has {depth} layers.")
            if self.draft_hidden_size is not None and self.draft_hidden_size % (2 * heads):  # rope rotates pairs
                raise ValueError(
                    f"`draft_hidden_size` is {self.draft_hidden_size}: pass a multiple of {2 * heads}, for the "
                    f"target's {heads} attention heads of an even width."
                )
            return Eagle3DraftConfig.from_target(target, draft_vocab_size=draft_vocab_size, **options)
        except AttributeError as error:
            raise ValueError(f"{family}: {error}. Name a target of another family.") from error
        except StrictDataclassError as error:
            raise ValueError(f"{family}: {error}") from error

"""Arguments that several commands share: which target, which head."""

from dataclasses import dataclass, field, fields
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..target import load_target
from ..tensor_parallel import check_placement


def check_local_path(name: str, value: str) -> None:
    """Raise for a missing directory, which the Hub's client would report as a malformed repository id."""
    if value.startswith(("/", "./", "../", "~")) and not Path(value).expanduser().exists():
        raise ValueError(f"`{name}`: {value} does not exist.")


def check_output(name: str, value: str) -> None:
    """Raise for a file that could not be written when the work is done."""
    path = Path(value)
    if not value or path.is_dir():
        raise ValueError(f"`{name}` is {value!r}, {'a directory' if value else 'empty'}: name a file.")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"`{name}`: the directory of {value} does not exist: make it, or name another.")


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

    def check_placement(self, tp_size: int) -> None:
        """Raise what `load` would raise for `tp_size`, from the config alone."""
        if tp_size == 1:
            return
        config = AutoConfig.from_pretrained(self.target, **self._source())
        check_placement(config, tp_size, adapter=self.target_adapter, gguf_file=self.target_gguf_file)

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
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

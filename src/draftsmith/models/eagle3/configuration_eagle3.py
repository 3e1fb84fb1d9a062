"""The config of an EAGLE-3 draft head: a Llama config of one layer plus the keys that vLLM and SGLang read."""

import copy
import math
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig, PreTrainedConfig

from ...serving.speculators import from_speculators_config, is_speculators_config


SERVED_ARCHITECTURE = "LlamaForCausalLMEagle3"
SERVED_MODEL_TYPE = "llama"
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
SERVED_MODEL_TYPES = (SERVED_MODEL_TYPE, "eagle3_draft")


@strict
class Eagle3DraftConfig(LlamaConfig):
    """Architecture of a draft head; training choices (steps, decay, objective) are training arguments.

    In memory `model_type` is `eagle3_draft`; on disk it is `llama`, because servers read configs through transformers
    and refuse unknown types.

    Args:
        draft_vocab_size: rows of the draft's `lm_head`; None = `vocab_size`, the target's embedding rows.
        target_hidden_size: width of the target's hidden states; None = `hidden_size`.
        eagle_aux_hidden_state_layer_ids: which target states are fused, as indices into `hidden_states` (0 = embedding
            output, i = output of layer i). None only for published heads that do not say; a target then fills it.
        norm_output: feed `norm(o)` instead of `o` to the next step.
        fc_norm: one RMSNorm per auxiliary state before `fc`.
        norm_before_fc: one RMSNorm over the concatenated auxiliary states, before `fc_norm`.
        norm_before_residual: the residual is the normed recurrent state.
        sliding_window: tokens a query sees, itself included; None = all.
    """

    model_type: ClassVar[str] = "eagle3_draft"

    num_hidden_layers: int = 1
    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    norm_output: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    sliding_window: int | None = None
    has_own_embedding: bool = False  # the checkpoint stores `embed_tokens`; found at load, never written

    def __post_init__(self, **kwargs):
        eagle_config = kwargs.pop("eagle_config", None) or {}
        served_ids = eagle_config.get("eagle_aux_hidden_state_layer_ids") or None
        self.norm_before_fc = eagle_config.get("norm_before_fc", self.norm_before_fc)  # servers read it here first
        for derived in ("layer_types", "model_type", "num_aux_hidden_states"):
            kwargs.pop(derived, None)
        super().__post_init__(**kwargs)
        if self.eagle_aux_hidden_state_layer_ids is None and served_ids is not None:
            self.eagle_aux_hidden_state_layer_ids = [layer + 1 for layer in served_ids]
        if self.draft_vocab_size is None:
            self.draft_vocab_size = self.vocab_size
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        self.architectures = [SERVED_ARCHITECTURE]
        self._check()

    def _check(self) -> None:
        if self.num_hidden_layers != 1:
            raise ValueError(f"`num_hidden_layers` is {self.num_hidden_layers}: an EAGLE-3 head has one layer.")
        if not 0 < self.draft_vocab_size <= self.vocab_size:  # type: ignore[operator]
            raise ValueError(
                f"`draft_vocab_size` is {self.draft_vocab_size}, outside 1..{self.vocab_size} (`vocab_size`, the "
                "target's embedding rows)."
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"`sliding_window` is {self.sliding_window}: pass at least 1, or None for no window.")
        if self.eagle_aux_hidden_state_layer_ids is not None:
            check_aux_layer_ids(self.eagle_aux_hidden_state_layer_ids)

    @property
    def num_aux_hidden_states(self) -> int:
        return len(self.eagle_aux_hidden_state_layer_ids) if self.eagle_aux_hidden_state_layer_ids else 3

    @property
    def has_reduced_vocabulary(self) -> bool:
        return self.draft_vocab_size < self.vocab_size  # type: ignore[operator]

    @property
    def has_target_width(self) -> bool:
        return self.hidden_size == self.target_hidden_size

    @classmethod
    def from_target(
        cls,
        target_config: PreTrainedConfig,
        *,
        draft_vocab_size: int | None = None,
        aux_layer_ids: list[int] | None = None,
        **options: Any,
    ) -> "Eagle3DraftConfig":
        """The head that fits a target: its width, heads, rope, limits and token ids, one dense layer.

        Args:
            target_config: the target's config; of a multimodal wrapper its `text_config` is used.
            draft_vocab_size: None = the full vocabulary.
            aux_layer_ids: None = `[2, L // 2, L - 3]`.
            options: any field of this config, over what the target gives.

        Raises:
            ValueError: the target has too few layers for the default ids, or an id is not in 1..L-1.
        """
        text = target_config.get_text_config(decoder=True)
        fields = {
            "vocab_size": text.vocab_size,
            "hidden_size": text.hidden_size,
            "intermediate_size": _dense_intermediate_size(text),
            "num_attention_heads": text.num_attention_heads,
            "num_key_value_heads": getattr(text, "num_key_value_heads", None),
            "head_dim": getattr(text, "head_dim", None),
            "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6),
            "max_position_embeddings": text.max_position_embeddings,
            "initializer_range": getattr(text, "initializer_range", 0.02),
            "rope_parameters": _full_attention_rope(text),
            "target_hidden_size": text.hidden_size,
            "eagle_aux_hidden_state_layer_ids": resolve_aux_layer_ids(aux_layer_ids, text.num_hidden_layers),
            **{name: getattr(text, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
        }
        if "hidden_size" in options and "head_dim" not in options:
            fields["head_dim"] = None  # the target's heads do not fit another width: derive it
        elif (
            text.hidden_size % text.num_attention_heads
        ):  # servers read the head as a Llama config, which refuses that
            fields["num_attention_heads"] = heads = text.hidden_size // text.head_dim
            fields["num_key_value_heads"] = math.gcd(heads, fields["num_key_value_heads"] or heads)
        width = options.get("hidden_size", text.hidden_size)
        heads = options.get("num_attention_heads", fields["num_attention_heads"])
        if width % heads:
            raise ValueError(f"`num_attention_heads` {heads} does not divide the head's `hidden_size` {width}.")
        return cls(**{**fields, "draft_vocab_size": draft_vocab_size, **options})

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if is_speculators_config(config_dict):
            config_dict = from_speculators_config(config_dict)
        if config_dict.get("model_type") in SERVED_MODEL_TYPES:  # both are ours: nothing to warn about
            config_dict["model_type"] = cls.model_type
        if "sliding_attention" not in (
            config_dict.get("layer_types") or ()
        ):  # a leftover of the target: servers ignore it
            config_dict.pop("sliding_window", None)
        return config_dict, kwargs

    def to_dict(self) -> dict[str, Any]:
        return self._as_served(super().to_dict())

    def to_diff_dict(self) -> dict[str, Any]:
        return self._as_served(super().to_diff_dict())

    def _as_served(self, keys: dict[str, Any]) -> dict[str, Any]:
        """The keys under the names and in the conventions that servers read; those they rely on are always there."""
        keys = {
            **keys,
            "architectures": [SERVED_ARCHITECTURE],
            "model_type": SERVED_MODEL_TYPE,
            "draft_vocab_size": self.draft_vocab_size,
            "norm_before_residual": self.norm_before_residual,
            "num_hidden_layers": 1,
            "rope_theta": self.rope_parameters["rope_theta"],  # type: ignore[index]
            "tie_word_embeddings": False,
        }
        if self.eagle_aux_hidden_state_layer_ids is not None:
            keys["eagle_aux_hidden_state_layer_ids"] = list(self.eagle_aux_hidden_state_layer_ids)
            keys["eagle_config"] = {  # SGLang counts layers from their inputs: one less
                "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in self.eagle_aux_hidden_state_layer_ids],
                "use_aux_hidden_state": True,
            }
        if self.sliding_window is not None:
            keys["layer_types"] = ["sliding_attention"]
        keys.pop("has_own_embedding", None)
        if self.has_target_width:
            keys.pop("target_hidden_size", None)
        return keys


def check_aux_layer_ids(aux_layer_ids: list[int], num_layers: int | None = None) -> None:
    """Raise unless the ids are ascending outputs of layers 1..L-1 (`hidden_states[L]` is normed in some families).

    vLLM gathers the states in the order of the layers, whatever the order of the ids.
    """
    valid = all(layer >= 1 and (num_layers is None or layer < num_layers) for layer in aux_layer_ids)
    if not aux_layer_ids or not valid or list(aux_layer_ids) != sorted(set(aux_layer_ids)):
        limit = "L-1" if num_layers is None else num_layers - 1
        raise ValueError(
            f"`aux_layer_ids` {list(aux_layer_ids)}: pass ascending ids in 1..{limit}, indices into the target's "
            "`hidden_states` (0 is the embedding output)."
        )


def resolve_aux_layer_ids(aux_layer_ids: list[int] | None, num_layers: int) -> list[int]:
    """The given ids, checked against a target of `num_layers`, or the default `[2, L // 2, L - 3]`."""
    if aux_layer_ids is None:
        aux_layer_ids = [2, num_layers // 2, num_layers - 3]
        if len(set(aux_layer_ids)) < 3 or min(aux_layer_ids) < 1:
            raise ValueError(
                f"`aux_layer_ids`: the default [2, L//2, L-3] has no three distinct layers in a target of "
                f"{num_layers}; pass ids in 1..{num_layers - 1} explicitly."
            )
    check_aux_layer_ids(aux_layer_ids, num_layers)
    return list(aux_layer_ids)


def _dense_intermediate_size(text: PreTrainedConfig) -> int:
    # A mixture-of-experts target may give the width of one expert, too narrow for the head's only MLP.
    width = getattr(text, "intermediate_size", None) or 0
    has_experts = any(getattr(text, name, None) for name in EXPERT_COUNTS)
    return 6 * text.hidden_size if width == 0 or has_experts and width < 2 * text.hidden_size else width


def _full_attention_rope(text: PreTrainedConfig) -> dict[str, Any] | None:
    """The target's rope parameters; where they differ by layer type, those of full attention."""
    rope = copy.deepcopy(getattr(text, "rope_parameters", None))
    if rope is None:
        return None
    rope = rope.get("full_attention", rope)
    partial = rope.get("partial_rotary_factor", 1.0)
    if partial != 1.0 and rope["rope_type"] != "default":
        raise ValueError(
            f"The target rotates {partial:.0%} of each head with `{rope['rope_type']}` frequencies, which a head that "
            "rotates all of it cannot share: pass its own `rope_parameters`."
        )
    if rope.get("alpha"):  # a fixed stretch of the base, which a default rope says to every server
        width = text.head_dim
        theta = rope["rope_theta"] * rope["alpha"] ** (width / (width - 2))
        return {"rope_type": "default", "rope_theta": theta}
    # The head rotates whole heads, and text positions only: all three axes of a multimodal rope agree there.
    return {key: value for key, value in rope.items() if key not in ("partial_rotary_factor", "mrope_section")}

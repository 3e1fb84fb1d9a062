"""The speculators layout: what vLLM's `speculators` library writes, and `vllm serve <head>` reads without flags.

Formats of speculators 0.9.0 (`Eagle3SpeculatorConfig`, `SpeculatorsConfig`) and of vLLM 0.32.0's reader
(`transformers_utils/configs/speculators`). The auxiliary layer ids count as in the default layout's top-level key.
"""

from collections.abc import Mapping
from typing import Any, TypeVar


VERSION = "0.9.0"
LAYER, DEFAULT_LAYER = "layers.0.", "midlayer."  # what the names of the layer's tensors begin with
HEAD_KEYS = (  # at top level; the other keys of a default config describe the layer
    "draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids",
    "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output",
)  # fmt: skip
COMMON_KEYS = ("dtype", "tie_word_embeddings")  # at top level for speculators, in the layer for vLLM
DEFAULT_KEYS = ("architectures", "eagle_config", "rope_theta", "transformers_version")  # of the default layout alone

Tensor = TypeVar("Tensor")


def is_speculators_config(config: Mapping[str, Any]) -> bool:
    return "speculators_model_type" in config


def to_speculators_config(
    config: Mapping[str, Any], *, verifier: str, verifier_architectures: list[str], num_draft_tokens: int
) -> dict[str, Any]:
    """The config of the speculators layout.

    Args:
        config: of the default layout, as `config.json` holds it.
        verifier: Hub id or directory of the target, which `vllm serve <head>` loads.
        verifier_architectures: of the target's config.
        num_draft_tokens: tokens that the server drafts per verification, unless told otherwise.
    """
    layer = {key: value for key, value in config.items() if key not in (*HEAD_KEYS, *DEFAULT_KEYS)}
    if layer_ids := config.get("eagle_aux_hidden_state_layer_ids"):
        layer["num_aux_hidden_states"] = len(layer_ids)  # vLLM counts them nowhere else in this layout
    return {
        **{key: config[key] for key in (*HEAD_KEYS, *COMMON_KEYS) if key in config},
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_draft_tokens}],
            "verifier": {"name_or_path": verifier, "architectures": verifier_architectures},
        },
        "transformer_layer_config": layer,
    }


def from_speculators_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The default layout's config of a head in the speculators layout.

    Raises:
        ValueError: it is no EAGLE-3 head, or its layer is no Llama layer.
    """
    kind = config["speculators_model_type"]
    if kind != "eagle3":
        raise ValueError(f"`speculators_model_type` is {kind!r}: only `eagle3` heads can be loaded.")
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise ValueError("`transformer_layer_config` is missing from config.json: the head's sizes are unknown.")
    if layer.get("model_type", "llama") != "llama":
        raise ValueError(
            f"`transformer_layer_config` is of model type {layer['model_type']!r}: only heads of `llama` layers can "
            "be loaded."
        )
    return {
        **{key: layer[key] for key in layer if key not in ("num_aux_hidden_states", "transformers_version")},
        **{key: config[key] for key in (*HEAD_KEYS, "dtype") if config.get(key) is not None},
        "norm_before_residual": config.get("norm_before_residual", True),  # as vLLM reads a config without it
        "model_type": "llama",
    }


def to_speculators_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under the names of the speculators layout; the way back is `DEFAULT_NAMES`."""
    return {
        f"{LAYER}{name.removeprefix(DEFAULT_LAYER)}" if name.startswith(DEFAULT_LAYER) else name: tensor
        for name, tensor in tensors.items()
    }


DEFAULT_NAMES = {r"^layers\.0\.": DEFAULT_LAYER}  # pattern -> replacement, as transformers' `key_mapping` takes it

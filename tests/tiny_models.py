"""Tiny random targets, one per family: hidden size 32, vocabulary 96, 4 layers, weights that show a leak."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)


VOCAB_SIZE = 96
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
_MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_LATENT = {  # multi-head latent attention: query and key width 8 + 8, value width 12
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    **_MIXTURE,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 4,
    "long_factor": [1.0, 2.0, 4.0, 6.0],
}
_LINEAR_ATTENTION = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
# Family -> (model type, fields beside `_SIZES`).
_TEXT_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_dynamic": (
        "llama",
        {"max_position_embeddings": 16, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "phi3_longrope": (
        "phi3",
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 16},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": 4, "head_dim": 8}),
    "gemma2": (
        "gemma2",
        {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8, "layer_types": _ALTERNATING},
    ),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8, "layer_types": _ALTERNATING},
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "head_dim": 8,
            "sliding_window": 4,
            "layer_types": _ALTERNATING,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "deepseek_v2": ("deepseek_v2", {**_LATENT, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("deepseek_v3", _LATENT),
    "granite": ("granite", {"logits_scaling": 8.0, "attention_multiplier": 0.4, "embedding_multiplier": 3.0}),
    "hyperclovax": ("hyperclovax", {"logits_scaling": 0.25, "attention_multiplier": 0.4}),
    "cohere": ("cohere", {"logit_scale": 0.0625}),
    "cohere2": ("cohere2", {"logit_scale": 0.0625, "sliding_window": 4, "layer_types": _ALTERNATING}),
    "nanochat": ("nanochat", {}),
    "phi": ("phi", {}),  # biased head
    "llama4": ("llama4_text", {"head_dim": 8, "attention_chunk_size": 8, "intermediate_size_mlp": 48}),
    "doge": ("doge", {}),
    "bloom": ("bloom", {"n_head": 4, "n_layer": 4}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "qwen3_next": (
        "qwen3_next",
        {"head_dim": 8, **_MIXTURE, **_LINEAR_ATTENTION, "num_experts": 4, "shared_expert_intermediate_size": 24},
    ),
    "mamba": ("mamba", {"state_size": 8}),
    "jamba": ("jamba", {"num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 8, "use_mamba_kernels": False}),
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 4,
}


def _text_config(family: str, **fields: Any) -> PreTrainedConfig:
    model_type, special = _TEXT_FAMILIES[family]
    return AutoConfig.for_model(model_type, **{**_SIZES, **special, **fields})


def _llava_config() -> PreTrainedConfig:
    vision = AutoConfig.for_model("clip_vision_model", **_VISION, image_size=8, projection_dim=32)
    return AutoConfig.for_model("llava", text_config=_text_config("llama"), vision_config=vision, image_token_index=95)


def _mistral3_config() -> PreTrainedConfig:
    vision = AutoConfig.for_model("pixtral", **_VISION, image_size=8, head_dim=8, initializer_range=0.3)
    return AutoConfig.for_model(
        "mistral3",
        text_config=_text_config("mistral"),
        vision_config=vision,
        image_token_index=95,
        spatial_merge_size=1,
    )


def _gemma3_multimodal_config() -> PreTrainedConfig:
    vision = AutoConfig.for_model("siglip_vision_model", **_VISION, image_size=8)
    return AutoConfig.for_model(
        "gemma3", text_config=_text_config("gemma3"), vision_config=vision, mm_tokens_per_image=4, image_token_index=95
    )


def _qwen2_5_vl_config() -> PreTrainedConfig:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    vision = {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "depth": 2, "num_heads": 4}
    vision |= {"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1], "initializer_range": 0.3}
    tokens = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    text = {**_SIZES, "rope_parameters": rope}
    return AutoConfig.for_model("qwen2_5_vl", text_config=text, vision_config=vision, **tokens)


_MULTIMODAL_FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llava": _llava_config,
    "mistral3": _mistral3_config,
    "gemma3_multimodal": _gemma3_multimodal_config,
    "qwen2_5_vl": _qwen2_5_vl_config,
}
RECURRENT_FAMILIES = ("qwen3_next", "mamba", "jamba")
# Families that refuse `block_sparse_flash`: soft-capped attention, chunks, a mask made of the values, attention that
# is not looked up by name.
UNSUPPORTED_FAMILIES = ("gemma2", "llama4", "doge", "bloom")
SUPPORTED_FAMILIES = (
    *(family for family in _TEXT_FAMILIES if family not in (*UNSUPPORTED_FAMILIES, *RECURRENT_FAMILIES, "opt")),
    *_MULTIMODAL_FAMILIES,
)


def tiny_config(family: str, **fields: Any) -> PreTrainedConfig:
    """A fresh config of `family`; `fields` override it (text families only)."""
    if family in _MULTIMODAL_FAMILIES:
        return _MULTIMODAL_FAMILIES[family]()
    return _text_config(family, **fields)


def tiny_model(
    family: str,
    *,
    attn_implementation: str | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **fields: Any,
) -> PreTrainedModel:
    """A random model of `family` in evaluation mode; the same `seed` gives the same weights at every attention."""
    auto_class = AutoModelForImageTextToText if family in _MULTIMODAL_FAMILIES else AutoModelForCausalLM
    torch.manual_seed(seed)
    config = tiny_config(family, **fields)
    return auto_class.from_config(config, attn_implementation=attn_implementation, dtype=dtype).eval()


def random_tokens(batch: int, length: int, *, seed: int = 0) -> torch.Tensor:
    """[batch, length] ordinary token ids: no special token, no image token."""
    return torch.randint(3, 90, (batch, length), generator=torch.Generator().manual_seed(seed))

"""What differs from one target family to the next: decoder, layers, output head, logit scale, rope, recurrent layers.

A family that transformers adds is usually one entry in a table here and one model in `tests/tiny_models.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import is_peft_available


# Config field -> factor on the logits.
_LOGIT_SCALES: dict[str, Callable[[float], float]] = {
    "logits_scaling": lambda value: 1 / value,  # Granite
    "logit_scale": float,  # Cohere
    "lm_head_multiplier": float,  # Falcon-H1
    "output_multiplier": float,  # Muse
    "logits_mup_width_multiplier": lambda value: 1 / value,  # Inkling
}
_MULTIPLIES_BY_LOGITS_SCALING = {"hyperclovax"}  # Granite's field with the opposite meaning
_SOFTCAP_FIELDS = ("final_logit_softcapping", "logits_soft_cap")
_RECURRENT_LAYER_TYPES = {"linear_attention", "mamba", "conv", "recurrent", "hybrid", "hybrid_sliding"}


def config_field(config: PreTrainedConfig, name: str) -> Any:
    """A field that only some families have; None elsewhere."""
    return getattr(config, name, None)


def base_model(model: PreTrainedModel) -> PreTrainedModel:
    """The transformers model inside a PEFT wrapper, adapters included; other models unchanged."""
    if is_peft_available():
        from peft import PeftModel

        if isinstance(model, PeftModel):
            return model.get_base_model()
    return model


def require_peft() -> None:
    if not is_peft_available():
        raise ImportError("adapters need peft, which is missing: pip install draftsmith[peft]")


def text_decoder(model: PreTrainedModel, config: PreTrainedConfig) -> tuple[PreTrainedModel, nn.ModuleList]:
    """The module that runs embedding, layers and final norm, and its layers."""
    depth = config.num_hidden_layers
    stacks = [
        (module, child)
        for module in base_model(model).get_decoder().modules()
        if isinstance(module, PreTrainedModel)
        for child in module.children()
        if isinstance(child, nn.ModuleList) and len(child) == depth
    ]
    if len(stacks) != 1:
        raise ValueError(
            f"{type(model).__name__} has {len(stacks)} module lists of {depth} layers, so the outputs of its decoder "
            "layers cannot be read. Use a decoder-only target whose layers form one list."
        )
    return stacks[0]


def checked_layer_ids(ids: Sequence[int], depth: int) -> tuple[int, ...]:
    """`ids` as given, or `ValueError`. `i` means `hidden_states[i]`, the output of decoder layer `i - 1`."""
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < 1 or ids[-1] > depth - 1:
        raise ValueError(
            f"`aux_layer_ids={list(ids)}` must be distinct, ascending and within 1..{depth - 1} for a target of "
            f"{depth} layers (`i` means `hidden_states[i]`, the output of decoder layer `i - 1`). Pass other ids."
        )
    return tuple(ids)


def recurrent_layers(decoder: nn.Module, config: PreTrainedConfig) -> list[str]:
    """Layer types or mixer classes that carry a state along the row, which no mask can reset between documents."""
    types = _RECURRENT_LAYER_TYPES & set(config_field(config, "layer_types") or ())
    # All state-space and linear-attention mixers of transformers begin with a short convolution; attention never does.
    mixers = {type(m).__name__ for m in decoder.modules() if any(isinstance(c, nn.Conv1d) for c in m.children())}
    return sorted(types | mixers)


def logit_scale(config: PreTrainedConfig) -> float:
    """The factor between `lm_head(last_hidden_state)` and the logits (before a soft cap)."""
    scale = 1.0
    for field, factor in _LOGIT_SCALES.items():
        if (value := config_field(config, field)) is not None:
            scale *= value if config.model_type in _MULTIPLIES_BY_LOGITS_SCALING else factor(value)
    return scale


def softcap(config: PreTrainedConfig) -> float | None:
    return next((cap for field in _SOFTCAP_FIELDS if (cap := config_field(config, field))), None)


def head_logits(
    states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, softcap: float | None
) -> torch.Tensor:
    """[.., Ht] states as the head reads them -> [.., V] logits in fp32, multiplied in the weight's dtype."""
    logits = nn.functional.linear(states.to(weight), weight, bias).float()
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def linear_head(model: PreTrainedModel) -> nn.Linear:
    """The output head as a plain linear module (of PEFT's `modules_to_save`, the trained copy), or `ValueError`."""
    head: Any = base_model(model).get_output_embeddings()
    if is_peft_available():
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils import ModulesToSaveWrapper

        if isinstance(head, ModulesToSaveWrapper):
            head = head.modules_to_save[head.active_adapters[0]]
        if isinstance(head, BaseTunerLayer):
            raise ValueError(
                "An adapter on the output head is not supported: take the head out of `target_modules` and train it "
                "whole, by naming it in `modules_to_save`."
            )
    if type(head) is nn.Linear and type(head.weight) is nn.Parameter and head.weight.is_floating_point():
        return head
    raise ValueError(
        f"The output head of {type(base_model(model)).__name__} is a {type(head).__name__}, not a plain `nn.Linear`: "
        "load the model with `AutoModelForCausalLM`, its head neither quantised nor sharded."
    )


@torch.no_grad()
def head_tensors(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Whole, plain, dequantised `weight` [V, Ht] and `bias` [V] of the output head; the live ones if already plain."""
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(model).__name__} has no output head: load it with `AutoModelForCausalLM`.")
    weight, bias = head.weight, head.bias
    if isinstance(weight, DTensor):
        return weight.full_tensor(), None if bias is None else bias.full_tensor()
    if type(head) is nn.Linear and type(weight) is nn.Parameter and weight.is_floating_point():
        return weight, bias
    # Quantised or adapted: whatever the module does is linear, so the identity matrix reads it out exactly.
    width, dtype = head.in_features, model.dtype
    probe = torch.cat([torch.zeros(1, width), torch.eye(width)]).to(weight.device, dtype)
    outputs = head(probe)  # [1 + Ht, V]
    offset = outputs[0]
    return (outputs[1:] - offset).T.contiguous(), offset if bool(offset.any()) else None


def embedding_weight(model: PreTrainedModel) -> torch.Tensor:
    """The raw input embedding matrix [Vemb, Ht]; scaled embedding modules scale outside of it."""
    embedding = model.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding) or not embedding.weight.is_floating_point():
        raise ValueError(
            f"The input embedding is a {type(embedding).__name__}, whose matrix servers do not share with a draft "
            "head. Merge the adapter (`merge_and_unload()`) or leave `embed_tokens` unquantised."
        )
    return whole(embedding.weight)


def whole(weight: torch.Tensor) -> torch.Tensor:
    """A weight that `target_tp` may have sharded; every rank that holds a part must ask for it."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def refuse_parts(model: PreTrainedModel) -> None:
    """Raise `ValueError` unless this process holds the whole model on one device, as one CUDA graph needs it."""
    weights = list(model.parameters())
    devices = sorted({str(weight.device) for weight in weights})
    if len(devices) > 1 or any(isinstance(weight, DTensor) for weight in weights):
        raise ValueError(
            f"`capture_target` needs the whole target on one GPU, but its weights are in parts, here on "
            f"{', '.join(devices)}: leave it out, or load the target without `device_map` and `target_tp`."
        )


def precision(model: PreTrainedModel) -> str:
    """What the weights are served in: the GGUF file, the quantisation method, or the dtype."""
    model = base_model(model)
    if (gguf_file := vars(model).get("gguf_file")) is not None:
        return Path(gguf_file).name
    quantization = config_field(model.config, "quantization_config")
    if quantization is None:
        return str(model.dtype).removeprefix("torch.")
    return (quantization if isinstance(quantization, dict) else quantization.to_dict())["quant_method"].lower()


@torch.no_grad()
def freeze_rope(decoder: nn.Module) -> None:
    """Fix `dynamic` and `longrope` frequencies at the ones vLLM and SGLang use for `max_position_embeddings`.

    transformers takes them from the largest position of each batch, so that a document's states would depend on its
    neighbours.
    """
    rotary: Any
    for rotary in decoder.modules():
        kinds = vars(rotary).get("rope_type")
        if isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                kinds[layer_type] = _freeze_frequencies(rotary, kind, f"{layer_type}_", {"layer_type": layer_type})
        elif isinstance(kinds, str):
            rotary.rope_type = _freeze_frequencies(rotary, kinds, "", {})


def _freeze_frequencies(rotary: Any, kind: str, prefix: str, layer: dict[str, str]) -> str:
    """Returns the rope type to store; any name unknown to transformers' update stops it."""
    config = rotary.config
    parameters = config.rope_parameters[layer["layer_type"]] if layer else config.rope_parameters
    if "dynamic" not in kind and kind != "longrope":
        return kind
    if "alpha" not in parameters:  # frequencies scaled by `alpha` do not depend on the length
        stretch = parameters["factor"] if "dynamic" in kind else 1
        inv_freq = getattr(rotary, f"{prefix}inv_freq")
        length = int(config.max_position_embeddings * stretch)
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, inv_freq.device, seq_len=length, **layer)
        inv_freq.copy_(frequencies)
        setattr(rotary, f"{prefix}attention_scaling", scaling)
    return "frozen"


@contextmanager
def captured_outputs(layers: nn.ModuleList, ids: Sequence[int], into: dict[int, torch.Tensor]) -> Iterator[None]:
    """Keep `hidden_states[i]` of the forwards inside, for each of `ids`, in `into`."""

    def keep(layer_id: int) -> Callable:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            into[layer_id] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [layers[i - 1].register_forward_hook(keep(i)) for i in ids]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

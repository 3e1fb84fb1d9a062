"""How a new head starts: from the target's output rows, and optionally from one of its decoder layers."""

import torch
from transformers import PreTrainedModel

from ...target_family import head_tensors, text_decoder, whole


LAYER_PARAMETERS = {  # ours -> a Llama-shaped target layer's
    "hidden_norm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "post_attention_layernorm.weight",
    **{f"self_attn.{name}_proj.weight": f"self_attn.{name}_proj.weight" for name in "qkvo"},
    **{f"mlp.{name}_proj.weight": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
}


@torch.no_grad()
def copy_head_rows(model, target: PreTrainedModel) -> None:
    """`lm_head` starts from the target's rows of the draft vocabulary."""
    target_head = head_tensors(target)[0]
    # An embedding may be padded beyond the head: rows that it lacks keep their random initialisation.
    target_ids = model.to_target_ids(torch.arange(model.config.draft_vocab_size))
    target_ids = target_ids[target_ids < len(target_head)].to(target_head.device)
    model.lm_head.weight[: len(target_ids)] = target_head[target_ids].to(model.lm_head.weight)


@torch.no_grad()
def start_from_layer(model, target: PreTrainedModel, index: int) -> None:
    """The head starts near a decoder layer of the target, reading its last auxiliary state: far fewer steps.

    The layer's projections act on the recurrent half of the attention input; the embedding half, and `fc` on the other
    auxiliary states, stay random and small, so that training decides what they carry.

    Raises:
        ValueError: the target has no such layer, or one that is not shaped like the head's.
    """
    decoder, layers = text_decoder(target, target.config.get_text_config(decoder=True))
    if not -len(layers) <= index < len(layers):
        raise ValueError(f"`init_from_layer` is {index}, but the target has {len(layers)} layers.")
    source, width = dict(layers[index].named_parameters()), model.config.hidden_size
    for ours, theirs in LAYER_PARAMETERS.items():
        weight = model.midlayer.get_parameter(ours)
        if ours.split(".")[-2] in ("q_proj", "k_proj", "v_proj"):
            weight.mul_(0.5)
            weight = weight[:, width:]
        if theirs not in source or source[theirs].shape != weight.shape:
            raise ValueError(
                f"`init_from_layer`: the target's layer has no `{theirs}` of shape {tuple(weight.shape)}; leave the "
                "option out for a target that is not shaped like the head."
            )
        weight.copy_(whole(source[theirs]))
    model.fc.weight.mul_(0.1)
    model.fc.weight[:, -width:] += torch.eye(width)
    model.norm.weight.copy_(whole(decoder.get_parameter("norm.weight")))

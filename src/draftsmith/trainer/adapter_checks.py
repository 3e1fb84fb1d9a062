"""What no adapter on a head can be, or be saved as: found out before training."""

import copy
from typing import Any

import torch

from ..models.eagle3 import Eagle3DraftModel
from ..target_family import base_model
from .adapter_configs import near


# Of LoRA: those that leave the base head's weights as they are
KEEPS_BASE = (True, False, "gaussian", "orthogonal", "eva")


def refuse_methods(config: Any) -> None:
    """Raise `ValueError` for methods that adapt no layers, or that this trainer or the loader can do nothing with."""
    fields, kind = vars(config), config.peft_type.value
    refusal = None
    if not {"target_modules", "modules_to_save"} <= fields.keys():  # virtual tokens, token rows, mixtures
        refusal = f"is {kind}, which adapts no layers: pass one that does, such as LoRA."
    elif kind == "ADALORA" or fields.get("use_asa"):
        refusal = (
            f"is {kind}, whose ranks are allocated by calls between the steps that this trainer does not make: pass "
            "LoRA, with `rank_pattern` for layers of other ranks."
        )
    elif fields.get("trainable_token_indices"):
        refusal = (
            "trains single tokens (`trainable_token_indices`), but a head borrows its target's embedding: leave them "
            "out, or train `lm_head` whole by naming it in `modules_to_save`."
        )
    elif fields.get("lora_bias"):
        refusal = "has `lora_bias`, but the layers of a head have no bias to merge it into: leave it out."
    if refusal is not None:
        raise ValueError(f"`peft_config` {refusal}")


def refuse_layers(config: Any, head: Eagle3DraftModel) -> None:
    """Raise `ValueError` for layers that are not there, cannot be trained, or are read past their adapter."""
    from peft.tuners.tuners_utils import check_target_module_exists

    if config.target_modules is not None and check_target_module_exists(config, "lm_head"):
        raise ValueError(
            "`peft_config` puts an adapter on `lm_head`, which would get no gradient, since the streamed loss reads "
            "the weight itself: take it out of `target_modules`, and train it whole by naming it in `modules_to_save`."
        )
    modules = dict(head.named_modules())
    targets = [] if isinstance(config.target_modules, str) else config.target_modules or ()
    for name in [*targets, *(config.modules_to_save or ())]:
        if name == "embed_tokens" and head.embed_tokens is None:
            raise ValueError(
                "`peft_config` names `embed_tokens`, but the head borrows the embedding of its target, which stays as "
                "it is: take it out."
            )
        if not any(module.endswith(name) for module in modules):
            raise ValueError(
                f"`peft_config` names `{name}`, but the head has no such module: {near(name, [*modules])}"
            )
    for name in config.modules_to_save or ():  # which peft takes for the end of a name
        for found, module in modules.items():
            if found.endswith(name) and isinstance(module, torch.nn.ModuleList):
                raise ValueError(
                    f"`peft_config` names `{name}` in `modules_to_save`, which peft takes for `{found}`, a ModuleList "
                    f"that it cannot train whole: name its members (`{found}.0`, ..), or adapt norms with "
                    "`LNTuningConfig`, whose `target_modules` are whole names."
                )


def base_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The state dict of the base head inside a `PeftModel`, under its own names."""
    head = base_model(model)
    with torch.device("meta"):
        own = type(head)(copy.deepcopy(head.config)).state_dict()
    found = {
        name.replace(".base_layer.", ".").replace(".original_module.", "."): tensor
        for name, tensor in head.state_dict().items()
    }
    return {name: tensor for name, tensor in found.items() if name in own}


def refuse_unrepeatable(model: Any, own: dict[str, torch.Tensor]) -> None:
    """Raise if the adapter begins by changing the base head in a way that putting it on once more would not repeat.

    Files hold the adapter alone, so whoever loads them puts it on the base head anew, and what it starts from must be
    what was trained on: random or data-driven decompositions of the weights are not.

    Args:
        model: a head with an adapter that was just put on.
        own: the head's state dict without.
    """
    from peft import PeftModel

    changed = base_tensors(model)
    if all(_is_same(tensor, own[name]) for name, tensor in changed.items()):
        return
    head: Any = base_model(model)
    (config,) = model.peft_config.values()
    devices = [head.device] if head.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.device(head.device):
        again = type(head)(copy.deepcopy(head.config))
        again.load_state_dict(own)
        again.to(head.dtype)
        try:
            repeated = base_tensors(PeftModel(again, copy.deepcopy(config)))
        except ValueError:  # it wants the data that it was initialised with
            repeated = own
    if not all(_is_same(tensor, repeated[name], tolerance=1e-3) for name, tensor in changed.items()):
        how = vars(config).get("init_lora_weights", config.peft_type.value)
        raise ValueError(
            f"`peft_config` starts by changing the base head ({how!r}), otherwise every time, so the adapter would be "
            "loaded onto other weights than it was trained on: leave out `init_lora_weights`, or choose one that "
            "gives the same each time, such as 'pissa' or 'olora'."
        )


def refuse_initialised_elsewhere(config: Any) -> None:
    """Raise for an adapter, put on by the caller, that may have changed the base head's weights."""
    how = vars(config).get("init_lora_weights", True)
    if how not in KEEPS_BASE:
        raise ValueError(
            f"`model` has an adapter that began by changing its base head (`init_lora_weights` {how!r}), which its "
            "files would not hold: pass the bare head and `peft_config`, or convert the adapter to a plain LoRA "
            "(`path_initial_model_for_weight_conversion` of peft's `save_pretrained`) and load that."
        )


def _is_same(tensor: torch.Tensor, other: torch.Tensor, tolerance: float = 0.0) -> bool:
    tensor, other = tensor.detach().float().cpu(), other.detach().float().cpu()
    return bool((tensor - other).abs().max() <= tolerance * other.abs().max())

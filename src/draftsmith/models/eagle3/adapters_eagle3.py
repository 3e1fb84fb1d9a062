"""Adapters of a draft head in peft's own format: found, read strictly, merged into the head."""

from pathlib import Path
from typing import Any

import torch
from transformers.utils.peft_utils import find_adapter_config_file

from ...target_family import require_peft


_HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "token")
_OWN_OPTIONS = ("revision", "subfolder")  # of the adapter's repository; its config names the base head's revision


def is_adapter(name_or_path: Any, **options: Any) -> bool:
    """Whether a directory or Hub id holds an adapter; `options` as of `from_pretrained`."""
    return find_adapter_config_file(name_or_path, **_chosen(options, *_HUB_OPTIONS, *_OWN_OPTIONS)) is not None


def load_merged(model_class: Any, source: str | Path, *args: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """The head of an adapter in `source`, its base head with the adapter merged, and how the base head was loaded.

    Raises:
        ValueError: the base head is not named or not there, the adapter does not fit it, or cannot be merged.
        ImportError: peft is missing.
    """
    require_peft()
    from peft import PeftConfig, PeftModel

    source = str(source)
    own = _chosen(options, *_HUB_OPTIONS, *_OWN_OPTIONS)
    config = PeftConfig.from_pretrained(source, **own)
    config.task_type = None
    options = {name: value for name, value in options.items() if name not in _OWN_OPTIONS}
    if config.revision is not None:
        options["revision"] = config.revision
    model, info = model_class.from_pretrained(_base_of(config, source), *args, output_loading_info=True, **options)
    served_dtype = model.dtype
    adapted = PeftModel(model.to(torch.promote_types(served_dtype, torch.float32)), config)
    load_adapter(adapted, source, **own)
    model = merged(adapted).to(served_dtype)
    model.requires_grad_(True)  # peft has frozen it
    model._freeze_borrowed_width()
    model.name_or_path = model.config.name_or_path = source  # not the base's: an adapter on this one would forget it
    return model, info


def load_adapter(model: Any, source: str | Path, **hub_options: Any) -> None:
    """Fill the adapter of a `PeftModel` from files that must hold its weights, all and no others."""
    from peft import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict

    name = model.active_adapters[0]
    if Path(source).is_dir() and not is_adapter(source):
        raise ValueError(f"{source} holds no adapter: it is of a run without `peft_config`.")
    weights = load_peft_weights(str(source), device=str(model.device), **hub_options)
    expected = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    for fault, names in (("lacks", expected.keys() - weights), ("has, beside what fits,", weights.keys() - expected)):
        if names:
            raise ValueError(f"{source}: the adapter {fault} {', '.join(sorted(names))}.")
    try:
        set_peft_model_state_dict(model, weights, adapter_name=name)
    except RuntimeError as error:  # shapes
        raise ValueError(f"{source}: the adapter does not fit its head: {error}") from error


def merged(model: Any) -> Any:
    """The head inside a `PeftModel`, with the adapter in its weights; the wrapper is of no use afterwards."""
    try:
        return model.merge_and_unload(safe_merge=True)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        kind = model.peft_config[model.active_adapters[0]].peft_type.value
        raise ValueError(
            f"This {kind} adapter cannot be merged into its head ({error or type(error).__name__}), and servers read "
            "whole heads alone. To run it as it is, call `peft.PeftModel.from_pretrained(base_head, adapter)`; to "
            "serve, train one that merges, such as LoRA."
        ) from error


def _base_of(config: Any, source: str) -> str:
    base = config.base_model_name_or_path
    if not base:
        raise ValueError(
            f"{source}: adapter_config.json names no `base_model_name_or_path`: write the directory or Hub id of the "
            "head there, or call `peft.PeftModel.from_pretrained(head, adapter)`."
        )
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise ValueError(
            f"{source}: its base head {base} does not exist: bring it back, or write where it is now into "
            "adapter_config.json, `base_model_name_or_path`."
        )
    return base


def _chosen(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: options[name] for name in names if options.get(name) is not None}

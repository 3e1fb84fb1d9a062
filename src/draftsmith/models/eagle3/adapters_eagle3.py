"""Adapters of a draft head in peft's own format: found, read strictly, merged into the head they were trained on."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import EntryNotFoundError
from safetensors import safe_open
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from ...hub import hub_id
from ...target_family import require_peft


BASE_DIGEST = "base_head_digest"  # key in the metadata of an adapter's weights
_HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "token")
_OWN_OPTIONS = ("revision", "subfolder")  # of the adapter's repository; its config names the base head's revision


def is_adapter(name_or_path: Any, **options: Any) -> bool:
    """Whether a directory or Hub id holds an adapter; `options` as of `from_pretrained`."""
    return find_adapter_config_file(name_or_path, **_chosen(options, *_HUB_OPTIONS, *_OWN_OPTIONS)) is not None


def load_merged(model_class: Any, source: str | Path, *args: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """The head of an adapter in `source`, its base head with the adapter merged, and how the base head was loaded.

    Raises:
        ValueError: the base head is not named, not there or another than in training; the adapter does not fit it, or
            cannot be merged.
        ImportError: peft is missing.
    """
    require_peft()
    from peft import PeftConfig, PeftModel

    source = str(source)
    own = _chosen(options, *_HUB_OPTIONS, *_OWN_OPTIONS)
    _refuse_cycle(source, own)
    config = PeftConfig.from_pretrained(source, **own)
    config.task_type = None
    options = {name: value for name, value in options.items() if name not in _OWN_OPTIONS}
    if config.revision is not None:
        options["revision"] = config.revision
    base = _base_of(config, source)
    try:
        model, info = model_class.from_pretrained(base, *args, output_loading_info=True, **options)
    except OSError as error:
        raise ValueError(
            f"{source}: its base head {base} is no directory seen from {Path.cwd()}, and did not come from the Hub "
            f"({str(error).partition(chr(10))[0].rstrip('.')}): correct `base_model_name_or_path` in "
            "adapter_config.json, or go online."
        ) from error
    _refuse_other_base(model, base, source, own)
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


def head_digest(tensors: dict[str, torch.Tensor]) -> str | None:
    """Of a head's state dict: equal for heads of equal weights, loaded in bfloat16 or fp32; None of those in float16.

    Weights are compared as bfloat16, to which both round alike; by way of float16 they would round twice.
    """
    if torch.float16 in {tensor.dtype for tensor in tensors.values()}:
        return None
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        tensor = tensor.bfloat16().view(torch.int16) if tensor.is_floating_point() else tensor
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().numpy().data)
    return digest.hexdigest()


def _refuse_other_base(head: Any, base: str, source: str, hub_options: dict[str, Any]) -> None:
    """Raise if the weights of the base head are not those that the adapter says it was trained on."""
    trained_on = _recorded_digest(source, hub_options)
    found = head_digest(head.state_dict()) if trained_on is not None else None
    if found is not None and found != trained_on:
        raise ValueError(
            f"{source}: its base head {base} has other weights than in training, so the adapter does not fit it: "
            "bring back the head that it was trained on, write where that is into adapter_config.json "
            "(`base_model_name_or_path`, on the Hub with its `revision`), or train the adapter again."
        )


def _recorded_digest(source: str, hub_options: dict[str, Any]) -> str | None:
    try:
        path = cached_file(source, ADAPTER_SAFE_WEIGHTS_NAME, **hub_options)
    except (OSError, EntryNotFoundError):  # of others, with weights under another name
        return None
    with safe_open(path, framework="pt") as file:
        return (file.metadata() or {}).get(BASE_DIGEST)


def _refuse_cycle(source: str, hub_options: dict[str, Any]) -> None:
    """Raise if the base heads of an adapter lead back to one of them: none would ever be loaded."""
    from peft import PeftConfig

    seen, next_one, options = [], source, hub_options
    while _is_reachable_adapter(next_one, options):
        here = (str(Path(next_one).resolve()) if Path(next_one).exists() else next_one, options.get("revision"))
        if here in seen:
            raise ValueError(
                f"{source}: its base head {next_one} is an adapter that is on itself in the end: write the head that "
                "it was trained on into adapter_config.json, `base_model_name_or_path`."
            )
        seen.append(here)
        config = PeftConfig.from_pretrained(next_one, **options)
        options = {**_chosen(hub_options, *_HUB_OPTIONS), **_chosen(vars(config), "revision")}
        next_one = _base_of(config, next_one)


def _is_reachable_adapter(source: str, options: dict[str, Any]) -> bool:
    try:
        return is_adapter(source, **options)
    except OSError:  # whoever loads it says why
        return False


def _base_of(config: Any, source: str) -> str:
    base = config.base_model_name_or_path
    if not base:
        raise ValueError(
            f"{source}: adapter_config.json names no `base_model_name_or_path`: write the directory or Hub id of the "
            "head there, or call `peft.PeftModel.from_pretrained(head, adapter)`."
        )
    if not Path(base).is_dir() and hub_id(base) is None:
        place = "" if Path(base).is_absolute() else f" in {Path.cwd()}"
        raise ValueError(
            f"{source}: its base head {base} does not exist{place}: "
            "bring it back, or write where it is now into adapter_config.json, `base_model_name_or_path`."
        )
    return base


def _chosen(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: options[name] for name in names if options.get(name) is not None}

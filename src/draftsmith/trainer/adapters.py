"""Adapters (PEFT) on a head that stays as it is: put on, checked before training, saved."""

import copy
import dataclasses
import difflib
import json
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.utils import ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME

from ..models.eagle3 import Eagle3DraftModel
from ..serving.directory import open_as_umask_says
from ..target import deepspeed_init_suspended
from ..target_family import base_model, require_peft
from .arguments import Eagle3TrainingArguments


logger = logging.getLogger(__name__)


def is_adapted(model: Any) -> bool:
    return base_model(model) is not model


def adapted(model: Any, peft_config: Any | None, args: Eagle3TrainingArguments) -> Any:
    """The model that is trained: `model` itself, or a `PeftModel` around it whose adapter alone is trainable.

    Args:
        model: a head, or a `PeftModel` of one, which then takes no `peft_config`.
        peft_config: a method of peft on layers; it is copied, and its `task_type` cleared: heads have none.
        args: where adapters will be saved, and the compute dtype.

    Raises:
        ValueError: the adapter would get no gradient, would not be saved, or could not be loaded again.
        ImportError: peft is missing.
    """
    if peft_config is None and not is_adapted(model):
        return model
    if peft_config is not None:
        model = _wrapped(model, peft_config)
    _check(model, args.output_dir)
    if not (args.bf16 or args.fp16):
        model.float()  # what is trained is raised to fp32, and layers compute in one dtype
    return model


def _wrapped(model: Any, peft_config: Any) -> Any:
    require_peft()
    from peft import get_peft_model

    if is_adapted(model):
        raise ValueError("`model` has an adapter already: leave out `peft_config`, or pass the bare head.")
    peft_config = copy.deepcopy(peft_config)
    peft_config.task_type, peft_config.inference_mode = None, False
    peft_config.base_model_name_or_path = peft_config.revision = None  # of the head it may have been saved for
    _refuse_layers(peft_config, model)
    try:
        with deepspeed_init_suspended():
            return get_peft_model(model, peft_config, revision=vars(model.config).get("_commit_hash"))
    except TypeError as error:
        raise ValueError(f"`peft_config`: {error}") from error


def _refuse_layers(config: Any, head: Eagle3DraftModel) -> None:
    """Raise for methods that are none on layers, and for layers that are not there or read past their adapter."""
    from peft.tuners.tuners_utils import check_target_module_exists

    if not {"target_modules", "modules_to_save"} <= vars(config).keys():  # virtual tokens, token rows, mixtures
        raise ValueError(
            f"`peft_config` is {config.peft_type.value}, which adapts no layers: pass one that does, such as LoRA."
        )
    if config.target_modules is not None and check_target_module_exists(config, "lm_head"):
        raise ValueError(
            "`peft_config` puts an adapter on `lm_head`, which would get no gradient, since the streamed loss reads "
            "the weight itself: take it out of `target_modules`, and train it whole by naming it in `modules_to_save`."
        )
    present = [name for name, _ in head.named_modules()]
    targets = [] if isinstance(config.target_modules, str) else config.target_modules or ()
    for name in [*targets, *(config.modules_to_save or ())]:
        if name == "embed_tokens" and head.embed_tokens is None:
            raise ValueError(
                "`peft_config` names `embed_tokens`, but the head borrows the embedding of its target, which stays as "
                "it is: take it out."
            )
        if not any(module.endswith(name) for module in present):
            raise ValueError(f"`peft_config` names `{name}`, but the head has no such module: {_near(name, present)}")


def _check(model: Any, output_dir: str | None) -> None:
    from peft import get_peft_model_state_dict

    if len(model.peft_config) > 1:
        raise ValueError(f"`model` has the adapters {', '.join(model.peft_config)}: train one at a time.")
    (config,) = model.peft_config.values()
    if config.task_type is not None:
        raise ValueError(f"`model` was wrapped for {config.task_type}: a draft head needs `task_type=None`.")
    head: Eagle3DraftModel = base_model(model)  # type: ignore[assignment]
    _refuse_layers(config, head)
    _record_base(config, head, output_dir)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if not trained:
        raise ValueError("`model` has nothing to train: load its adapter with `is_trainable=True`.")
    saved = get_peft_model_state_dict(model, adapter_name=model.active_adapters[0], save_embedding_layers=False)
    addresses = {tensor.data_ptr() for tensor in saved.values()}
    if lost := [name for name, weight in trained.items() if weight.data_ptr() not in addresses]:
        raise ValueError(
            f"`model` trains {', '.join(lost)}, which are part of no adapter and would not be saved: freeze them, or "
            "name their modules in `modules_to_save`."
        )


def _record_base(config: Any, head: Eagle3DraftModel, output_dir: str | None) -> None:
    """Name the base head in the adapter's config: a Hub id, or an absolute path, good from any directory."""
    base = config.base_model_name_or_path or head.name_or_path
    if not base:
        logger.warning(
            "The head that is adapted was never loaded from anywhere, so its adapters cannot be loaded by themselves: "
            "save it with `save_pretrained`, and load it from there first."
        )
        return
    if Path(base).is_dir():
        base = str(Path(base).absolute())
        if Path(output_dir or ".").absolute() == Path(base):
            raise ValueError(f"`output_dir` {base} holds the head that is adapted: name another for its adapters.")
    config.base_model_name_or_path = base


def with_adapter_of(model: Any, head: Eagle3DraftModel) -> Any:
    """Another head under an adapter like that of `model`, into which the weights of `model` can be loaded."""
    from peft import LoraConfig, PeftModel

    name = model.active_adapters[0]
    config = copy.deepcopy(model.peft_config[name])
    if isinstance(config, LoraConfig):
        config.init_lora_weights = True  # others start from data or a decomposition of the base, done long ago
    return PeftModel(head, config, name)


def save_adapter(
    model: Any, directory: Path, state_dict: dict[str, torch.Tensor] | None, dtype: torch.dtype | None
) -> None:
    """Write peft's own format, in `dtype` (None: as trained): nothing of the base head but its name.

    Not `model.save_pretrained`: it asks the Hub about the base head's vocabulary and writes a card of its own.
    """
    from peft import get_peft_model_state_dict

    name = model.active_adapters[0]
    tensors = get_peft_model_state_dict(model, state_dict, adapter_name=name, save_embedding_layers=False)
    copies = {  # parameters may share memory, which safetensors refuses
        key: tensor.detach().to(dtype if tensor.is_floating_point() else None, copy=True).contiguous()
        for key, tensor in tensors.items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(copies, directory / ADAPTER_SAFE_WEIGHTS_NAME, {"format": "pt"})
    config = copy.copy(model.peft_config[name])
    config.inference_mode = True
    head = type(base_model(model))
    config.save_pretrained(
        str(directory), auto_mapping_dict={"base_model_class": head.__name__, "parent_library": head.__module__}
    )
    open_as_umask_says(directory, ADAPTER_CONFIG_NAME)


def read_peft_config(source: dict[str, Any] | str) -> Any:
    """A peft config from its fields, as a mapping, as JSON, or in a file such as an adapter_config.json.

    Raises:
        ValueError: the file or a field is not there, or a value is wrong.
        ImportError: peft is missing.
    """
    require_peft()
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    values = _read_json(source) if isinstance(source, str) else source
    kinds = {kind.value: config_class for kind, config_class in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    kind = values.get("peft_type")
    if kind not in kinds:
        raise ValueError(f"`peft_config`: `peft_type` is {kind!r}: {_near(str(kind), list(kinds))}")
    known = [item.name for item in dataclasses.fields(kinds[kind])]
    if unknown := [name for name in values if name not in known]:
        raise ValueError(f"`peft_config`: unknown key `{unknown[0]}` of {kind}; {_near(unknown[0], known)}")
    try:
        return kinds[kind](**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"`peft_config`: {error}") from error


def _read_json(source: str) -> dict[str, Any]:
    try:
        values = json.loads(source if source.startswith("{") else Path(source).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"`peft_config`: cannot read {source}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"`peft_config`: {source} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"`peft_config`: {source} must hold one mapping of fields.")
    return values


def _near(name: str, candidates: list[str]) -> str:
    return f"did you mean `{difflib.get_close_matches(name, candidates, n=1, cutoff=0)[0]}`?"

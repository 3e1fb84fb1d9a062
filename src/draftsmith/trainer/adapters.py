"""Adapters (PEFT) on a head that stays as it is: put on, checked before training, saved."""

import copy
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.utils import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_SAFE_WEIGHTS_NAME,
    CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
)

from ..models.eagle3 import Eagle3DraftModel
from ..models.eagle3.adapters_eagle3 import BASE_DIGEST, head_digest
from ..revisions import commit_of
from ..serving.directory import open_as_umask_says
from ..target import deepspeed_init_suspended
from ..target_family import base_model, require_peft
from .adapter_checks import (
    base_tensors,
    refuse_initialised_elsewhere,
    refuse_layers,
    refuse_methods,
    refuse_unrepeatable,
)
from .arguments import Eagle3TrainingArguments


logger = logging.getLogger(__name__)

ADAPTER_FILES = (ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME)
HEAD_FILES = (CONFIG_NAME, SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)


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
    refuse_methods(peft_config)
    refuse_layers(peft_config, model)
    own = {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.state_dict().items()}
    try:
        with deepspeed_init_suspended():
            wrapped = get_peft_model(model, peft_config, revision=commit_of(model.config))
            refuse_unrepeatable(wrapped, own)
    except TypeError as error:
        raise ValueError(f"`peft_config`: {error}") from error
    wrapped.base_head_digest = head_digest(own)
    return wrapped


def _check(model: Any, output_dir: str | None) -> None:
    from peft import get_peft_model_state_dict

    if len(model.peft_config) > 1:
        raise ValueError(f"`model` has the adapters {', '.join(model.peft_config)}: train one at a time.")
    (config,) = model.peft_config.values()
    if config.task_type is not None:
        raise ValueError(f"`model` was wrapped for {config.task_type}: a draft head needs `task_type=None`.")
    head: Eagle3DraftModel = base_model(model)  # type: ignore[assignment]
    refuse_methods(config)
    refuse_layers(config, head)
    if "base_head_digest" not in vars(model):  # wrapped by the caller
        refuse_initialised_elsewhere(config)
        model.base_head_digest = head_digest(base_tensors(model))
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
    """Name the base head in the adapter's config: a Hub id with its commit, or an absolute path."""
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
    elif config.revision is None and base == head.name_or_path:
        config.revision = commit_of(head.config)
    config.base_model_name_or_path = base


def with_adapter_of(model: Any, head: Eagle3DraftModel) -> Any:
    """Another head under an adapter like that of `model`, into which the weights of `model` can be loaded."""
    from peft import LoraConfig, PeftModel

    name = model.active_adapters[0]
    config = copy.deepcopy(model.peft_config[name])
    if isinstance(config, LoraConfig):
        config.init_lora_weights = True  # others start from data or a decomposition of the base, done long ago
    return PeftModel(head, config, name)


def refuse_other_kind(directory: str | Path, *, adapts: bool) -> None:
    """Raise `ValueError` if a head would be saved beside an adapter, or the other way round.

    Whoever loads the directory takes it for an adapter then, and whoever pushes it, for both.
    """
    names = HEAD_FILES if adapts else ADAPTER_FILES
    if found := [name for name in names if (Path(directory) / name).exists()]:
        kinds = ("the adapter of this run", "a head") if adapts else ("the head of this run", "an adapter")
        raise ValueError(
            f"`output_dir` {directory} holds {kinds[1]} ({', '.join(found)}), beside which {kinds[0]} could not be "
            "told from it: name another directory, or move those files away."
        )


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
    metadata = {"format": "pt"}
    if (digest := vars(model)["base_head_digest"]) is not None:
        metadata[BASE_DIGEST] = digest
    save_file(copies, directory / ADAPTER_SAFE_WEIGHTS_NAME, metadata)
    config = copy.copy(model.peft_config[name])
    config.inference_mode = True
    head = type(base_model(model))
    config.save_pretrained(
        str(directory), auto_mapping_dict={"base_model_class": head.__name__, "parent_library": head.__module__}
    )
    open_as_umask_says(directory, ADAPTER_CONFIG_NAME)

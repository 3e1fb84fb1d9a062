"""What surrounds the weights of a draft head: the embedding slot, the vocabulary map, making, loading and saving."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub import CommitInfo
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME
from transformers.utils import logging as transformers_logging

from ... import hub
from ...revisions import note_commit
from ...serving.directory import open_as_umask_says
from ...serving.speculators import DEFAULT_NAMES
from ...target import deepspeed_init_suspended
from ...target_family import embedding_weight
from .adapters_eagle3 import is_adapter, load_merged
from .configuration_eagle3 import SERVED_ARCHITECTURE, Eagle3DraftConfig, check_aux_layer_ids, resolve_aux_layer_ids
from .initialization_eagle3 import copy_head_rows, start_from_layer


@contextmanager
def _without_load_report() -> Iterator[None]:
    """transformers reports missing and unexpected weights as a warning; here they are errors, or dealt with."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


class Eagle3PreTrainedModel(PreTrainedModel):
    """What [`Eagle3DraftModel`] is apart from its layers and unroll."""

    config: Any  # an Eagle3DraftConfig, whose fields are optional only until they are filled in
    config_class = Eagle3DraftConfig
    base_model_prefix = "draft"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Eagle3DecoderLayer"]
    _supports_sdpa = True
    _supports_attention_backend = True

    d2t: torch.Tensor  # both None at full vocabulary
    t2d: torch.Tensor

    def _init_embedding_slot(self) -> None:
        config = self.config
        self._target_embedding: tuple[torch.Tensor] | None = None
        self._target_name: str | None = None
        self.embed_tokens: nn.Embedding | None = None
        if config.has_own_embedding or not config.has_target_width:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
            self._freeze_borrowed_width()

    def _freeze_borrowed_width(self) -> None:
        """An own embedding is trained only where the target's would not fit."""
        if self.embed_tokens is not None:
            self.embed_tokens.requires_grad_(not self.config.has_target_width)

    def _init_vocabulary_map(self) -> None:
        """`d2t` int64 `[D]` offsets and `t2d` bool `[V]`; None at full vocabulary, where ids are the target's."""
        size = self.config.draft_vocab_size
        reduced = self.config.has_reduced_vocabulary
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.int64) if reduced else None)
        self.register_buffer("t2d", torch.arange(self.config.vocab_size) < size if reduced else None)

    def set_vocabulary_map(self, d2t: torch.Tensor) -> None:
        """Set `d2t` (int64 offsets `[D]`: target id = draft id + offset) and the `t2d` that follows from it."""
        target_ids = torch.arange(len(d2t), device=d2t.device) + d2t
        ascending = bool((target_ids.diff() > 0).all())
        in_range = 0 <= target_ids[0] <= target_ids[-1] < len(self.t2d)
        if len(d2t) != self.config.draft_vocab_size or not ascending or not in_range:
            raise ValueError(
                f"`d2t` must hold {self.config.draft_vocab_size} offsets to distinct ascending target ids below "
                f"{len(self.t2d)} (`vocab_size`); it holds {len(d2t)}, to ids {target_ids.min()}..{target_ids.max()}."
            )
        self.d2t.copy_(d2t)
        self.t2d.zero_()
        self.t2d[target_ids.to(self.t2d.device)] = True

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]

    def get_input_embeddings(self) -> nn.Embedding | None:  # type: ignore[override]
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module | torch.Tensor) -> None:
        """Fill the slot with the target's raw embedding matrix `[V, H]`: a module with a `weight`, or the tensor.

        The matrix is borrowed: no parameter of the head, never saved, moved or cast with it.
        """
        weight: Any = value.weight if isinstance(value, nn.Module) else value
        expected = (self.config.vocab_size, self.config.hidden_size)
        if self.embed_tokens is not None:
            raise ValueError("This head brings its own `embed_tokens`: it takes none from a target.")
        if tuple(weight.shape) != expected:
            raise ValueError(
                f"The embedding is {tuple(weight.shape)}, the head needs {expected} (`vocab_size`, `hidden_size`)."
            )
        # In a tuple the matrix is outside `_parameters`: `.to`, DDP, DeepSpeed and `state_dict` never see it, while
        # the parameter object still follows its owner to another device.
        self._target_embedding = (weight,)

    @property
    def compute_dtype(self) -> torch.dtype:
        device_type = self.device.type
        return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else self.dtype

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings `[..., H]` of the target's ids, in the compute dtype."""
        if self.embed_tokens is not None:
            return self.embed_tokens(input_ids).to(self.compute_dtype)
        if self._target_embedding is None:
            raise RuntimeError(
                "This head borrows the target's embedding and has none yet: load it with "
                "`from_pretrained(..., target=model)` or call `set_input_embeddings(model.get_input_embeddings())`."
            )
        return F.embedding(input_ids, self._target_embedding[0]).to(self.compute_dtype)

    @classmethod
    def from_target(
        cls, target_model, *, draft_vocab_size=None, d2t=None, aux_layer_ids=None, init_from_layer=None, **options
    ):
        """A new head for a target: fp32, `lm_head` from the target's rows of the draft vocabulary, the rest random.

        Args:
            target_model: a transformers causal LM (or multimodal wrapper of one).
            draft_vocab_size: None = the length of `d2t`, or the full vocabulary without one.
            d2t: int64 offsets `[D]`, see [`draftsmith.data.build_vocabulary_map`].
            init_from_layer: index of the target's decoder layer that the head starts from (-1 = the last one), for
                targets whose layers are shaped like the head's; None = random.
            aux_layer_ids, options: as in [`Eagle3DraftConfig.from_target`].
        """
        embedding = embedding_weight(target_model)
        if draft_vocab_size is None and d2t is not None:
            draft_vocab_size = len(d2t)
        options = {"vocab_size": embedding.shape[0], **options}
        config = cls.config_class.from_target(
            target_model.config, draft_vocab_size=draft_vocab_size, aux_layer_ids=aux_layer_ids, **options
        )
        if config.has_reduced_vocabulary and d2t is None:
            raise ValueError(
                f"`draft_vocab_size` {draft_vocab_size} is below the target's {config.vocab_size}: pass `d2t`, the "
                "map to target ids (`draftsmith.data.build_vocabulary_map` makes one)."
            )
        with deepspeed_init_suspended():
            model = cls(config)
        model._target_name = target_model.config.name_or_path
        if config.has_reduced_vocabulary:
            model.set_vocabulary_map(d2t)
        if model.embed_tokens is None:
            model.set_input_embeddings(embedding)
            copy_head_rows(model, target_model)
        if init_from_layer is not None:
            start_from_layer(model, target_model, init_from_layer)
        return model

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, target=None, **kwargs):
        """Load a head: ours, or one published in the `LlamaForCausalLMEagle3` or the speculators layout.

        Of a directory or id with a PEFT adapter: its base head with the adapter merged, as it would be served.

        Args:
            target: the target model, whose embedding fills the slot (a head that brings its own keeps it).
            args, kwargs: as in [`~transformers.PreTrainedModel.from_pretrained`].

        Raises:
            ValueError: weights are missing from the checkpoint or belong to no head of its config, its vocabulary map
                is missing or wrong, or its auxiliary layers do not fit the target.
        """
        return_info = kwargs.pop("output_loading_info", False)
        # `AutoModel` has replaced the adapter by its base head already
        source = (kwargs.get("adapter_kwargs") or {}).get("_adapter_model_path", pretrained_model_name_or_path)
        if is_adapter(source, **kwargs):
            kwargs.pop("adapter_kwargs", None)
            model, info = load_merged(cls, source, *args, target=target, **kwargs)
            note_commit(model.config, source, kwargs.get("revision"), kwargs.get("cache_dir"))
            return (model, info) if return_info else model
        # Mismatched shapes are an error too, raised by name below.
        kwargs = {"key_mapping": DEFAULT_NAMES, **kwargs, "output_loading_info": True, "ignore_mismatched_sizes": True}
        load: Any = partial(super().from_pretrained, pretrained_model_name_or_path, *args)
        with deepspeed_init_suspended(), _without_load_report():
            model, info = load(**kwargs)
            if "embed_tokens.weight" in info["unexpected_keys"]:  # build the head anew, with a place for it
                model.config.has_own_embedding = True
                model, info = load(**{**kwargs, "config": model.config})
        model._weight_conversions = None  # transformers would save under the names that were loaded
        if info["mismatched_keys"]:
            shapes = ", ".join(f"{name} {tuple(ours)} for {tuple(its)}" for name, ours, its in info["mismatched_keys"])
            raise ValueError(f"{pretrained_model_name_or_path}: config.json does not fit the weights: {shapes}.")
        model._check_loaded(pretrained_model_name_or_path, set(info["missing_keys"]), set(info["unexpected_keys"]))
        note_commit(model.config, source, kwargs.get("revision"), kwargs.get("cache_dir"))
        if target is not None:
            model.fit_to_target(target)
        return (model, info) if return_info else model

    def _check_loaded(self, source, missing: set[str], unexpected: set[str]) -> None:
        if unexpected := unexpected - {"d2t", "t2d"}:  # some heads write the identity map at full vocabulary
            raise ValueError(
                f"{source}: the checkpoint holds weights that no draft head of its config has: "
                f"{', '.join(sorted(unexpected))}. Without them it would draft otherwise than it was trained to."
            )
        self._freeze_borrowed_width()
        if {"d2t", "t2d"} <= missing:
            raise ValueError(
                f"{source}: `draft_vocab_size` {self.config.draft_vocab_size} is below `vocab_size` "
                f"{self.config.vocab_size}, but the checkpoint has neither `d2t` nor `t2d` to map the ids."
            )
        if missing - {"d2t", "t2d"}:
            raise ValueError(f"{source}: weights are missing from the checkpoint: {', '.join(sorted(missing))}.")
        if self.d2t is None:
            return
        from_mask = torch.nonzero(self.t2d).squeeze(1)
        if "d2t" in missing:
            self.set_vocabulary_map(from_mask - torch.arange(len(from_mask), device=from_mask.device))
        elif "t2d" in missing:
            self.set_vocabulary_map(self.d2t.clone())
        elif not torch.equal(from_mask, torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t):
            raise ValueError(
                f"{source}: `t2d` and `d2t` name different target ids; one of them belongs to another head."
            )

    def fit_to_target(self, target) -> None:
        """Borrow the target's embedding, unless the head brings its own, and check the auxiliary layers."""
        num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
        if self.config.eagle_aux_hidden_state_layer_ids is None:
            self.config.eagle_aux_hidden_state_layer_ids = resolve_aux_layer_ids(None, num_layers)
        check_aux_layer_ids(self.config.eagle_aux_hidden_state_layer_ids, num_layers)
        embedding = embedding_weight(target)
        expected = (self.config.vocab_size, self.config.target_hidden_size)
        if tuple(embedding.shape) != expected:
            raise ValueError(
                f"The target's embedding is {tuple(embedding.shape)}, but the head was made for "
                f"{expected} (`vocab_size`, `target_hidden_size`): it belongs to another target."
            )
        self._target_name = target.config.name_or_path
        if self.embed_tokens is None:
            self.set_input_embeddings(embedding)

    def save_pretrained(self, save_directory, is_main_process=True, state_dict=None, *args, **kwargs) -> None:
        """Write the layout that vLLM and SGLang serve; as in [`~transformers.PreTrainedModel.save_pretrained`]."""
        saved_dtype = None if state_dict is None else state_dict["fc.weight"].dtype
        super().save_pretrained(save_directory, is_main_process, state_dict, *args, **kwargs)
        self.config.architectures = [SERVED_ARCHITECTURE]  # transformers writes the class name here
        if saved_dtype is not None and is_main_process:  # and the dtype of the live parameters, not of what was saved
            self.config.dtype = saved_dtype
            self.config.save_pretrained(save_directory)
        if is_main_process:
            open_as_umask_says(Path(save_directory), CONFIG_NAME)

    def push_to_hub(  # type: ignore[override]
        self,
        repo_id: str,
        *,
        dtype: torch.dtype | None = None,
        card: str | None = None,
        max_shard_size: int | str = "50GB",
        **options: Any,
    ) -> CommitInfo:
        """Push the head as [`save_pretrained`] writes it; the repository then loads with [`from_pretrained`].

        Args:
            repo_id: `user/name`, or `name` in the namespace of the token's account.
            dtype: of the pushed weights; None = as they are.
            card: text of README.md; None = the repository's own, or a minimal one.
            max_shard_size: as in `save_pretrained`.
            options: `private`, `revision`, `create_pr`, `token` and others of [`draftsmith.hub.push`].

        Raises:
            ValueError: the name, the card or an option is not fit to be pushed; nothing was sent.
            draftsmith.hub.HubError: there is no token, or the Hub could not be reached or refused.
        """
        state_dict = None
        if dtype is not None:
            weights = self.state_dict().items()
            state_dict = {name: w.to(dtype) if w.is_floating_point() else w for name, w in weights}
        with tempfile.TemporaryDirectory() as directory:
            self.save_pretrained(directory, state_dict=state_dict, max_shard_size=max_shard_size)
            if card is not None:
                (Path(directory) / hub.CARD).write_text(card, encoding="utf-8")
            base_model, again = hub.hub_id(self._target_name), f"push_to_hub({repo_id!r}, ..)"
            return hub.push(directory, repo_id, **{"base_model": base_model, "again": again, **options})

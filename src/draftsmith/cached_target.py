"""What training needs of a target beside its hidden states: config, embedding and head, without any layer."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from . import target_family as family


WEIGHTS = "embedding_and_head.safetensors"


class TargetEnds(nn.Module):
    """Embedding and output head of a target, from which a draft head can be made as from the target itself."""

    def __init__(
        self, config: PreTrainedConfig, embedding: torch.Tensor, head: torch.Tensor, bias: torch.Tensor | None
    ):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding.from_pretrained(embedding, freeze=True)
        self.lm_head = nn.Linear(head.shape[1], head.shape[0], bias=bias is not None, device="meta")
        self.lm_head.weight = nn.Parameter(head, requires_grad=False)
        if bias is not None:
            self.lm_head.bias = nn.Parameter(bias, requires_grad=False)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head


class CachedTarget:
    """In training, a target whose states come from a cache: the attributes of [`~draftsmith.target.FrozenTarget`].

    Args:
        directory: as [`save_ends`] wrote it.
        device: where embedding and head go.
        precision: of the target that the states are of, adapters included.
        name, revision: its Hub id and commit, if it has one.
    """

    tp_size = 1
    adapter = None  # whose name the cache knows

    def __init__(
        self,
        directory: str | Path,
        *,
        device: torch.device | str = "cpu",
        precision: str,
        name: str = "",
        revision: str | None = None,
        trust_remote_code: bool = False,
    ):
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
        config.name_or_path, config._commit_hash = name, revision
        weights: dict[str, Any] = {
            name: weight.to(device) for name, weight in load_file(Path(directory) / WEIGHTS).items()
        }
        embedding = weights["embed_tokens.weight"]
        self.head_weight = weights.get("lm_head.weight", embedding)
        self.head_bias = weights.get("lm_head.bias")
        self.model = TargetEnds(config, embedding, self.head_weight, self.head_bias)
        self.embedding_weight = embedding
        self.softcap = family.softcap(config.get_text_config())
        self.precision = precision


def save_ends(target: Any, directory: Path) -> None:
    """Write config, embedding and head of a [`~draftsmith.target.FrozenTarget`]."""
    target.model.config.save_pretrained(directory)
    weights = {name: weight.detach().cpu().contiguous() for name, weight in _end_weights(target).items()}
    save_file(weights, directory / WEIGHTS)


def ends_size(target: Any) -> int:
    """Bytes of the weights that [`save_ends`] writes."""
    return sum(weight.nbytes for weight in _end_weights(target).values())


def _end_weights(target: Any) -> dict[str, torch.Tensor]:
    """A tied head is the embedding."""
    weights = {"embed_tokens.weight": target.embedding_weight, "lm_head.weight": target.head_weight}
    if target.head_weight.data_ptr() == target.embedding_weight.data_ptr():
        del weights["lm_head.weight"]
    if target.head_bias is not None:
        weights["lm_head.bias"] = target.head_bias
    return weights

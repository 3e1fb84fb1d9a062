"""A target that a server runs, for hidden states of targets too large to load: only its ends are loaded here."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from . import target_family as family
from .cached_target import TargetEnds
from .serving.hidden_states import HiddenStateServer
from .serving.servers import ServerError
from .target import TargetStates, auto_class_of


PROBE_TOKENS = 64


class ServedTarget:
    """What `draftsmith cache` needs of a [`~draftsmith.target.FrozenTarget`], whose layers a vLLM server runs.

    Embedding, final norm and head come from the checkpoint `name_or_path` and stay on the CPU; other weights are not
    read. Attributes: `model`, the ends; `aux_layer_ids`; `embedding_weight`, `head_weight`, `head_bias` and
    `precision` as of the frozen target; `server`.

    Raises `ValueError` for ids out of range, and for a checkpoint whose head or final norm cannot be had alone.
    """

    def __init__(
        self,
        name_or_path: str,
        aux_layer_ids: Sequence[int],
        base_url: str,
        *,
        revision: str | None = None,
        dtype: str = "auto",
        trust_remote_code: bool = False,
    ):
        source = {"revision": revision, "trust_remote_code": trust_remote_code}
        config = AutoConfig.from_pretrained(name_or_path, **source)
        text_config = config.get_text_config(decoder=True)
        depth = text_config.num_hidden_layers
        self.aux_layer_ids = family.checked_layer_ids(aux_layer_ids, depth)
        ends, missing = _load_ends(name_or_path, config, {**source, "dtype": dtype})
        if missing:
            raise ValueError(
                f"`target` {name_or_path}: {', '.join(missing[:5])} cannot be read from the checkpoint without its "
                "layers: the output head or embedding is quantised. Use `engine` hf."
            )
        self._norm = _final_norm(ends)
        self.embedding_weight = family.embedding_weight(ends)
        self.head_weight, bias = family.head_tensors(ends)
        self._logit_scale = family.logit_scale(text_config)
        self.head_bias = None if bias is None else bias * self._logit_scale
        self.softcap = family.softcap(text_config)
        config.dtype = ends.dtype
        self.model = TargetEnds(config, self.embedding_weight, self.head_weight, self.head_bias)
        self.precision = family.precision(self.model)  # type: ignore[arg-type]
        self.server = HiddenStateServer(base_url, [*self.aux_layer_ids, depth])

    @torch.no_grad()
    def __call__(
        self, input_ids: torch.Tensor, *, position_ids: torch.Tensor | None = None, document_ids: torch.Tensor
    ) -> TargetStates:
        """As of the frozen target, on the CPU; each document is a request. `position_ids` are implied.

        The state of a document's last token is left 0, as at padding: no token follows by which it could be taught,
        and a server takes the document with its answer only if both fit into the target's positions.
        """
        documents = list(_documents(document_ids))
        states = self.server.states([input_ids[row, start : stop - 1].tolist() for row, start, stop in documents])
        width, dtype = self.embedding_weight.shape[1], self.embedding_weight.dtype
        aux = torch.zeros(*input_ids.shape, len(self.aux_layer_ids) * width, dtype=dtype)
        last = torch.zeros(*input_ids.shape, width, dtype=dtype)
        for (row, start, stop), of_document in zip(documents, states, strict=True):
            aux[row, start : stop - 1] = of_document[:, :-1].flatten(1)
            last[row, start : stop - 1] = self._normed(of_document[:, -1])
        return TargetStates(aux, last)

    def _normed(self, residual: torch.Tensor) -> torch.Tensor:
        """[T, Ht] after the last layer -> as the head reads it, times the logit scale."""
        last = self._norm(residual)
        return last if self._logit_scale == 1 else last * self._logit_scale

    def verify(self, document: list[int], longest: int) -> None:
        """Find out on a few tokens whether the server is this target's, and its states those that were asked for.

        Args:
            document: token ids, of which the first are sent.
            longest: tokens of the longest document to come.

        Raises:
            ServerError: it extracts other layers, another width, dtype or target, or takes no document of `longest`.
        """
        server = self.server
        if longest - 1 > server.max_tokens:
            raise ServerError(
                f"A document has {longest} tokens, but {server.base_url} takes {server.max_tokens + 1}: start it with "
                f"--max-model-len {longest}, or prepare shorter ones (`max_length`)."
            )
        states, likeliest = server.probe(document[: min(PROBE_TOKENS, server.max_tokens)])
        weight = self.embedding_weight
        if states.shape[-1] != weight.shape[1] or states.dtype != weight.dtype:
            raise ServerError(
                f"{server.base_url} gives states of width {states.shape[-1]} in {_name(states.dtype)}, but `target` "
                f"has width {weight.shape[1]} in {_name(weight.dtype)}: serve this target with --dtype "
                f"{_name(weight.dtype)}, or pass `target_dtype` {_name(states.dtype)}."
            )
        self._verify_next_token(states[-1:, -1], likeliest)

    @torch.no_grad()
    def _verify_next_token(self, residual: torch.Tensor, likeliest: dict[int, float]) -> None:
        logits = family.head_logits(self._normed(residual), self.head_weight, self.head_bias, self.softcap)[0]
        theirs = torch.tensor([*likeliest.values()])
        ours = torch.log_softmax(logits, -1)[[*likeliest]]
        error = float((ours - theirs).norm() / theirs.norm().clamp_min(1))
        # 9% in bf16. Of SmolLM2's tokens rounding takes 1 to 3%, the layer before the last at least 19%, no norm 600%.
        if not error <= torch.finfo(residual.dtype).eps ** 0.5:
            raise ServerError(
                f"{self.server.base_url} takes token {max(likeliest, key=likeliest.__getitem__)} for the likeliest "
                f"after the probe, but token {int(logits.argmax())} follows from its last hidden state by the norm "
                f"and head of `target` (log-probabilities differ by {error:.0%}): it serves another target, or the "
                f"last of its layers is not {self.server.layer_ids[-1]}, the number of layers, before the final norm."
            )


def _load_ends(name_or_path: str, config: PreTrainedConfig, options: dict[str, Any]) -> tuple[PreTrainedModel, list]:
    """The target without any layer, and the names of what its checkpoint lacks for that.

    Quantisation is of layers; what is left is loaded as it is stored.
    """
    config = copy.deepcopy(config)
    vars(config).pop("quantization_config", None)
    text_config = config.get_text_config(decoder=True)
    text_config.num_hidden_layers = 0
    if "layer_types" in vars(text_config):
        text_config.layer_types = []
    with _without_report():
        model, info = auto_class_of(config).from_pretrained(
            name_or_path, config=config, output_loading_info=True, **options
        )
    return model.eval().requires_grad_(False), sorted(info["missing_keys"])


@contextmanager
def _without_report() -> Iterator[None]:
    """Transformers would list every weight of every layer as unexpected."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _final_norm(model: PreTrainedModel) -> nn.Module:
    """The module whose output is the decoder's."""
    decoder, _ = family.text_decoder(model, model.config.get_text_config(decoder=True))
    outputs: dict[nn.Module, Any] = {}
    handles = [
        module.register_forward_hook(lambda module, _inputs, output: outputs.update({module: output}))
        for module in decoder.children()
    ]
    last = decoder(input_ids=torch.tensor([[3, 4]]), use_cache=False).last_hidden_state
    for handle in handles:
        handle.remove()
    norms = [module for module, output in outputs.items() if output is last]
    if len(norms) != 1:
        raise ValueError(
            f"`{model.config.model_type}` has no final norm that could be applied to the last layer's output alone: "
            "use `engine` hf."
        )
    return norms[0]


def _documents(document_ids: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """[B, T] -> row, start and stop of each document of at least two tokens; -1 is padding."""
    for row, ids in enumerate(document_ids):
        values, counts = torch.unique_consecutive(ids, return_counts=True)
        stops = counts.cumsum(0).tolist()
        for value, count, stop in zip(values.tolist(), counts.tolist(), stops, strict=True):
            if value >= 0 and count > 1:
                yield row, stop - count, stop


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

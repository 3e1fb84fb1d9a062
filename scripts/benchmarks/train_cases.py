"""The shapes, lengths and supervisions that training steps are measured on, and random batches for them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, Qwen3Config

from draftsmith import Eagle3DraftConfig, Eagle3DraftModel
from draftsmith.data import DraftCollator
from draftsmith.ops.transfer import remember_on_host

from .loss_cases import CONFIDENCE, IN_VOCABULARY
from .targets import gpt_oss, llama


PERIOD = 1024  # tokens that one turn of the user and one of the assistant take together
SMALL = {"vocab_size": 8209, "hidden_size": 576, "intermediate_size": 1024}  # heads of the real width, a quarter
SMALL_LENGTH = 512
TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 16, "num_hidden_layers": 8,
}  # fmt: skip
TINY_LENGTH = 64


def qwen3(**sizes: Any) -> Qwen3Config:
    shape = {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    }  # fmt: skip
    return Qwen3Config(**shape | sizes)


def smollm2(**sizes: Any) -> PreTrainedConfig:
    shape = {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
    }  # fmt: skip
    return llama(**shape | sizes)


SHAPES: dict[str, Callable[..., PreTrainedConfig]] = {
    "llama": llama, "qwen3": qwen3, "gpt-oss": gpt_oss, "smollm2": smollm2,
}  # fmt: skip
TITLES = {"llama": "Llama-3.1-8B", "qwen3": "Qwen3-8B", "gpt-oss": "gpt-oss-20b", "smollm2": "SmolLM2-135M"}


@dataclass(frozen=True)
class Case:
    """A draft step from ready target states, or with `whole` the target's forward and the optimizer around it."""

    name: str
    shape: str
    length: int
    steps: int = 7
    draft_vocabulary: int | None = 32000  # None: full
    share: int = 100  # percent of the tokens that are supervised: the last of every `period`
    documents: int = 1  # of equal length, packed into one row
    whole: bool = False
    contenders: tuple[str, ...] = ()
    period: int = PERIOD
    sizes: tuple[tuple[str, int], ...] = ()  # over those of the shape

    @cached_property
    def target_config(self) -> PreTrainedConfig:
        return SHAPES[self.shape](**dict(self.sizes))

    @cached_property
    def draft_config(self) -> Eagle3DraftConfig:
        return Eagle3DraftConfig.from_target(self.target_config, draft_vocab_size=self.draft_vocabulary)

    def loss_mask(self) -> Tensor:
        """[T] bool, on the CPU. Turns lie in the same way in every document."""
        position = torch.arange(self.length) % (self.length // self.documents)
        return position % self.period >= self.period - self.share * self.period // 100

    def small(self) -> "Case":
        """The same step at a few hundred rows, with heads of the same width and grouping."""
        config = self.target_config
        group, keys = config.num_attention_heads // config.num_key_value_heads, max(1, config.num_key_value_heads // 4)
        sizes = {
            **SMALL, "num_attention_heads": group * keys, "num_key_value_heads": keys,
            "head_dim": self.draft_config.head_dim,
        }  # fmt: skip
        return self._resized(sizes, SMALL_LENGTH, self.draft_vocabulary and 2000)

    def tiny(self) -> "Case":
        sizes = TINY | ({"num_local_experts": 4} if self.shape == "gpt-oss" else {})
        case = self._resized(sizes, TINY_LENGTH, self.draft_vocabulary and 128)
        return replace(case, share=max(25, case.share))  # a tenth of so few tokens supervises no row

    def _resized(self, sizes: dict[str, int], length: int, draft_vocabulary: int | None) -> "Case":
        changes: dict[str, Any] = {"length": length, "period": length // 4, "documents": min(4, self.documents)}
        return replace(self, sizes=tuple(sizes.items()), draft_vocabulary=draft_vocabulary, **changes)


@dataclass
class Batch:
    """One row of tokens, collated as training does it, on the device; the row sets stay on the CPU."""

    case: Case
    tensors: dict[str, Any]  # of the collator

    @property
    def input_ids(self) -> Tensor:
        return self.tensors["input_ids"]

    @property
    def supervised(self) -> Tensor:
        """[B, T] int64: 1 at the rows R_0."""
        first = self.tensors["row_sets"][0]
        mask = torch.zeros(self.input_ids.numel(), dtype=torch.int64).index_fill_(0, first, 1)
        return mask.view(self.input_ids.shape).to(self.input_ids.device)

    def step(self, draft: Eagle3DraftModel, aux: Tensor, last: Tensor, head: Tensor) -> Tensor:
        """The loss of a forward pass, as the trainer asks for it."""
        names = ("input_ids", "document_ids", "position_ids", "row_sets")
        inputs = {name: self.tensors[name] for name in names}
        output = draft(
            aux_hidden_states=aux, teacher_hidden_states=last, teacher_head=head, ttt_steps=self.case.steps, **inputs
        )
        return output.loss


def make_batch(case: Case, tokens: Tensor) -> Batch:
    """`tokens` are [T], on the device."""
    part = case.length // case.documents
    row = {"input_ids": tokens.cpu(), "loss_mask": case.loss_mask(), "document_lengths": [part] * case.documents}
    tensors: dict[str, Any] = DraftCollator(case.steps)([row])
    row_sets = tensors.pop("row_sets")
    on_device = {name: tensor.to(tokens.device) for name, tensor in tensors.items()}
    remember_on_host(on_device["document_ids"], row_sets.document_ids)  # as the trainer does
    return Batch(case, {**on_device, "row_sets": row_sets})


@dataclass
class Inputs:
    """Ready target states, and the head that learns from them."""

    batch: Batch
    draft: Eagle3DraftModel
    aux: Tensor  # [1, T, 3H]
    last: Tensor  # [1, T, H]
    head: Tensor  # [V, H]
    embedding: Tensor  # [V, H]

    @property
    def case(self) -> Case:
        return self.batch.case


def make_inputs(case: Case, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Random; the teacher is confident of the token that follows, so that rounding changes no argmax.

    As with real draft vocabularies, most tokens are inside it: a pair outside has no loss to compute.
    """
    options: dict[str, Any] = {"device": device, "dtype": dtype}
    config, length = case.draft_config, case.length
    size, width = config.vocab_size, config.hidden_size
    tokens = torch.randint(size, (length,), device=device)
    ids = None
    if case.draft_vocabulary:
        ids = torch.randperm(size, device=device)[: case.draft_vocabulary].sort().values
        inside = ids[torch.randint(len(ids), (length,), device=device)]
        tokens = torch.where(torch.rand(length, device=device) < IN_VOCABULARY, inside, tokens)
    head = torch.randn(size, width, **options).mul_(width**-0.5)
    embedding = torch.randn(size, width, **options)
    last = torch.randn(length, width, **options).add_(head[tokens.roll(-1)], alpha=CONFIDENCE["target"])
    return Inputs(
        batch=make_batch(case, tokens),
        draft=make_draft(config, embedding, ids),
        aux=torch.randn(1, length, config.num_aux_hidden_states * width, **options),
        last=last[None],
        head=head,
        embedding=embedding,
    )


def make_draft(config: Eagle3DraftConfig, embedding: Tensor, ids: Tensor | None) -> Eagle3DraftModel:
    """Random weights on `embedding`'s device and in its dtype."""
    with embedding.device:
        draft = Eagle3DraftModel(config).to(embedding.dtype)
    draft.set_input_embeddings(embedding)
    if ids is not None:
        draft.set_vocabulary_map(ids - torch.arange(len(ids), device=ids.device))
    return draft.train()


def _draft(
    name: str, shape: str, length: int, peers: str = "compact", recompute: bool = False, **options: Any
) -> Case:
    ours = ("ours", "ours recompute") if recompute else ("ours",)
    return Case(name, shape, length, contenders=(*ours, *PEER_NAMES[peers]), **options)


def _whole(
    name: str, shape: str, length: int, ours: str = "ours", parts: bool = True, captured: bool = False, **options: Any
) -> Case:
    alone = ("ours compiled", "target", "target compiled", "attention", "gemms", "optimizer") if parts else ()
    graphs = ("ours captured", "target captured") if captured else ()
    return Case(name, shape, length, whole=True, contenders=(ours, *alone, *graphs), **options)


PEER_NAMES = {
    "compact": ("specforge compact",),
    "flex": ("specforge compact", "specforge"),
    "all": ("specforge compact", "specforge", "specforge sdpa"),
    "dense": ("specforge compact", "specforge", "dense"),
}
K = 1024
BAR_CASES = [  # what DESIGN's table of bars asks for
    _draft("llama 8k", "llama", 8 * K, "all", recompute=True),
    _draft("llama 32k", "llama", 32 * K, "flex", recompute=True),
    _draft("llama 8k, 25%", "llama", 8 * K, share=25),
    _whole("gpt-oss 8k, K 3, full, whole", "gpt-oss", 8 * K, steps=3, draft_vocabulary=None),
    _whole("llama 8k, whole", "llama", 8 * K),
    _whole("llama 128k, whole", "llama", 128 * K, "ours recompute", parts=False),
    _whole("llama 256k, whole", "llama", 256 * K, "ours recompute", parts=False),
]
CASES = [
    *BAR_CASES,
    _draft("llama packed 8x1k", "llama", 8 * K, documents=8),
    _draft("llama 16k", "llama", 16 * K, recompute=True),
    _draft("llama 2k", "llama", 2 * K, "dense", recompute=True),
    _draft("llama 8k, 50%", "llama", 8 * K, share=50),
    _draft("llama 8k, 10%", "llama", 8 * K, share=10),
    _draft("llama 8k, K 3", "llama", 8 * K, steps=3),
    _draft("llama 8k, full", "llama", 8 * K, draft_vocabulary=None),
    _draft("qwen3 8k", "qwen3", 8 * K),
    _draft("qwen3 8k, K 3, full", "qwen3", 8 * K, steps=3, draft_vocabulary=None),
    _whole("qwen3 8k, whole", "qwen3", 8 * K),
    _whole(  # so small that the GPU waits for the host
        "smollm2 packed 16x512, whole", "smollm2", 8 * K, captured=True, draft_vocabulary=16384, documents=16
    ),
    _draft("gpt-oss 8k, K 3, full", "gpt-oss", 8 * K, steps=3, draft_vocabulary=None),
    _draft("gpt-oss 8k", "gpt-oss", 8 * K),
    _draft("llama 32k, 25%", "llama", 32 * K, share=25),
    _draft("llama 128k", "llama", 128 * K, recompute=True),
]
QUICK_CASES = BAR_CASES[:5]
QUICK_CONTENDERS = ("ours", "ours recompute", "specforge compact", "target", "attention", "gemms", "optimizer")

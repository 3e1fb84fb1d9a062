"""Random targets and heads of a size that vLLM's CPU kernels take (heads of 32), with weights that hide nothing."""

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from draftsmith import Eagle3DraftModel


VOCAB_SIZE = 64
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def random_target(family: str = "llama", dtype: torch.dtype = torch.float32, **fields) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SIZES, **fields}), dtype=dtype).eval()


def random_head(target: PreTrainedModel, draft_vocab_size: int | None = None, **options) -> Eagle3DraftModel:
    """A head whose every weight is large and its own, so that its drafts differ from row to row and step to step.

    Only `fc` is small: a large state would drown in the residual what the layer adds, and repeat one draft.
    """
    torch.manual_seed(1)
    d2t = None
    if draft_vocab_size is not None:
        d2t = torch.randperm(VOCAB_SIZE)[:draft_vocab_size].sort().values - torch.arange(draft_vocab_size)
    draft = Eagle3DraftModel.from_target(target, d2t=d2t, **options)
    for name, parameter in draft.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.03 if name == "fc.weight" else 0.3)
    return draft.to(target.dtype).eval()


def overfit(draft: Eagle3DraftModel, target: PreTrainedModel, sequences: list[torch.Tensor], steps: int = 25) -> None:
    """Teach the head `sequences` [1, T], some better than others: then some drafts are accepted, and not all."""
    batches = [_training_batch(draft, target, sequence) for sequence in sequences]
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    for _ in range(steps):
        for batch in batches:
            draft(**batch, ttt_steps=4).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def _training_batch(draft: Eagle3DraftModel, target: PreTrainedModel, sequence: torch.Tensor) -> dict:
    states = target(sequence, output_hidden_states=True).hidden_states
    return {
        "input_ids": sequence,
        "aux_hidden_states": torch.cat([states[i] for i in draft.config.eagle_aux_hidden_state_layer_ids], dim=-1),
        "teacher_hidden_states": states[-1],
        "teacher_head": target.get_output_embeddings().weight.detach(),
        "loss_mask": torch.ones_like(sequence),
    }


def random_prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A word for every id, so that text and ids say the same."""
    words = {f"w{token}": token for token in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")

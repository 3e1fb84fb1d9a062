"""What is drafted in every round, by vLLM's engine and by us: `[last verified token, draft, .., draft]`."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import DynamicCache, PreTrainedModel

from draftsmith import Eagle3DraftModel
from draftsmith.speculative import speculative_generate


@dataclass(frozen=True)
class Decoded:
    """One prompt's new tokens and the rounds that led to them."""

    tokens: list[int]
    rounds: list[list[int]]


def decoded_by_vllm(
    target: Path,
    head: Path,
    prompts: list[list[int]],
    *,
    num_draft_tokens: int,
    max_new_tokens: int,
    dtype: str = "float32",
) -> list[Decoded]:
    """All prompts in one batch, greedily. A last round, which nobody verifies, may stand after our last one."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(
        str(target),
        skip_tokenizer_init=True,
        dtype=dtype,  # by itself vLLM would serve fp32 weights in half precision
        enforce_eager=True,
        max_model_len=128,
        speculative_config={"method": "eagle3", "model": str(head), "num_speculative_tokens": num_draft_tokens},
    )
    runner = llm.llm_engine.model_executor.driver_worker.model_runner
    propose = runner.drafter.propose
    rounds: dict[str, list[list[int]]] = {}

    def recorded(*args, next_token_ids, **kwargs):
        drafts = propose(*args, next_token_ids=next_token_ids, **kwargs)
        table = torch.cat([next_token_ids[:, None], drafts], dim=1).tolist()
        for request, round_ in zip(runner.input_batch.req_ids, table, strict=True):
            rounds.setdefault(request.split("-")[0], []).append(round_)
        return drafts

    runner.drafter.propose = recorded
    sampling = SamplingParams(temperature=0, max_tokens=max_new_tokens, ignore_eos=True, detokenize=False)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(inputs, sampling, use_tqdm=False)
    decoded = [Decoded(list(output.outputs[0].token_ids), rounds[output.request_id]) for output in outputs]
    runner.drafter.propose = propose
    del llm
    cleanup_dist_env_and_memory()  # of a dense model; the next one may have experts
    return decoded


def decoded_by_us(
    target: PreTrainedModel, draft: Eagle3DraftModel, prompt: list[int], *, num_draft_tokens: int, max_new_tokens: int
) -> Decoded:
    """`speculative_generate`; what it drafted is what the target is given to verify."""
    forwards: list[list[int]] = []
    hook = target.register_forward_pre_hook(
        lambda module, args, kwargs: forwards.append(kwargs["input_ids"][0].tolist()), with_kwargs=True
    )
    sequences, _, _ = speculative_generate(
        target, draft, torch.tensor([prompt]), num_draft_tokens=num_draft_tokens, max_new_tokens=max_new_tokens
    )
    hook.remove()
    return Decoded(sequences[0, len(prompt) :].tolist(), forwards[1:])


@torch.no_grad()
def draft_logits(
    target: PreTrainedModel, draft: Eagle3DraftModel, verified: list[int], drafts: list[int]
) -> torch.Tensor:
    """[K, D] the head's logits for each of `drafts` after the tokens `verified`, given the drafts before it."""
    tokens = torch.tensor([verified])
    states = target(tokens, output_hidden_states=True).hidden_states
    aux = torch.cat([states[i] for i in draft.config.eagle_aux_hidden_state_layer_ids], dim=-1)
    ids, state, positions = tokens[:, 1:], draft.fuse(aux[:, :-1]), torch.arange(len(verified) - 1)[None]
    cache, rows = DynamicCache(), []
    for token in drafts:
        logits, state = draft.draft_step(ids, state, positions, cache)
        rows.append(logits[0, -1].float())
        ids, state, positions = torch.tensor([[token]]), state[:, -1:], positions[:, -1:] + 1
    return torch.stack(rows)


def verified_before_rounds(prompt: list[int], decoded: Decoded) -> list[list[int]]:
    """The tokens that were verified when each round drafted, prompt included; of a round after the end, none."""
    prefixes, position = [], 0
    for last, *drafts in decoded.rounds:
        if position >= len(decoded.tokens):
            break
        assert decoded.tokens[position] == last
        position += 1
        prefixes.append(prompt + decoded.tokens[:position])
        for draft, token in zip(drafts, decoded.tokens[position:], strict=False):
            if draft != token:
                break
            position += 1
    return prefixes


def decoded_in_whole_rounds(
    target: PreTrainedModel,
    draft: Eagle3DraftModel,
    prompts: list[list[int]],
    *,
    num_draft_tokens: int,
    max_new_tokens: int,
) -> tuple[list[int], list[tuple[torch.Tensor, ...]]]:
    """A limit of new tokens for each prompt, at most `max_new_tokens`, and what `speculative_generate` gives with it.

    Each ends with a whole round: of one that a limit cuts, vLLM counts also the accepted drafts that it cuts off.
    """
    limits, results = [], []
    for prompt in prompts:
        decoded = decoded_by_us(
            target, draft, prompt, num_draft_tokens=num_draft_tokens, max_new_tokens=max_new_tokens
        )
        limits.append(len(verified_before_rounds(prompt, decoded)[-1]) - len(prompt))
        options = {"num_draft_tokens": num_draft_tokens, "max_new_tokens": limits[-1]}
        results.append(speculative_generate(target, draft, torch.tensor([prompt]), **options))
    return limits, results

"""`draftsmith evaluate`: decode prompts with the head and the target, and count what the target accepts."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from ..data import read_prompts
from ..models.eagle3 import Eagle3DraftModel
from ..speculative import acceptance_length, speculative_generate
from .arguments import TargetArguments, check_local_path
from .parsing import parse, usage_errors
from .prepare import write_json


@dataclass
class EvaluateArguments:
    """What to decode, and how."""

    draft: str = field(metadata={"help": "The head: a directory or Hub id."})
    prompts: list[str] = field(
        metadata={
            "help": "Prompts: JSON Lines, JSON or Parquet files, or Hub ids, with `messages`, `conversations` or "
            "`prompt`. Of a conversation everything before its last answer is the prompt."
        }
    )
    split: str = field(default="test", metadata={"help": "Split of Hub datasets."})
    num_prompts: int | None = field(default=None, metadata={"help": "Decode only so many prompts."})
    num_draft_tokens: int = field(default=5, metadata={"help": "Tokens drafted per verification."})
    max_new_tokens: int = field(default=256, metadata={"help": "New tokens per prompt."})
    temperature: float = field(default=0.0, metadata={"help": "0 is greedy."})
    batch_size: int = field(default=8, metadata={"help": "Prompts decoded together."})
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict, metadata={"help": "Arguments of the template."})
    seed: int = field(default=42, metadata={"help": "Seed of sampled decoding."})
    output: str | None = field(default=None, metadata={"help": "JSON file for the result."})

    def __post_init__(self) -> None:
        check_local_path("draft", self.draft)
        for name in ("batch_size", "num_draft_tokens", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}: pass at least 1.")
        if self.temperature < 0:
            raise ValueError(f"`temperature` is {self.temperature}: pass 0 for greedy decoding or a positive number.")
        if self.output is not None and not Path(self.output).parent.is_dir():
            raise ValueError(f"`output`: the directory of {self.output} does not exist.")


@dataclass
class DecodingResult:
    """Counts of one evaluation; `accepted_per_position[j]` rounds accepted their first j + 1 drafts."""

    prompts: int
    new_tokens: int
    drafted: int
    accepted_per_position: list[int]
    seconds: float

    @property
    def rounds(self) -> int:
        return self.drafted // len(self.accepted_per_position)

    @property
    def acceptance_length(self) -> float:
        return acceptance_length(torch.tensor(self.drafted), torch.tensor(self.accepted_per_position))

    def table(self) -> str:
        """Markdown: drafted and accepted counts and acceptance by position."""
        lines = ["| position | drafted | accepted | rate |", "|---|---|---|---|"]
        for position, accepted in enumerate(self.accepted_per_position, start=1):
            lines.append(f"| {position} | {self.rounds} | {accepted} | {accepted / max(self.rounds, 1):.3f} |")
        return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> DecodingResult:
    target_args, args = parse((TargetArguments, EvaluateArguments), argv)
    set_seed(args.seed)
    with usage_errors():
        prompts = read_prompts(args.prompts, split=args.split)[: args.num_prompts]
        tokenizer, target = target_args.load_tokenizer(), target_args.load()
        if torch.cuda.is_available() and target.device.type == "cpu":
            target.to("cuda")
        draft = Eagle3DraftModel.from_pretrained(args.draft, target=target, dtype=target.dtype).to(target.device)
    result, _ = decode(target, draft, tokenizer, prompts, args)
    print(result.table())
    print(
        f"acceptance length {result.acceptance_length:.3f} in {result.rounds} verifications, {result.prompts} prompts"
    )
    if args.output is not None:
        report = {**asdict(result), "acceptance_length": result.acceptance_length, "settings": asdict(args)}
        write_json(report, Path(args.output))
    return result


def decode(
    target: PreTrainedModel,
    draft: Eagle3DraftModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[dict[str, Any]] | str],
    args: EvaluateArguments,
) -> tuple[DecodingResult, list[list[int]]]:
    """Counts over all prompts, and the new ids of each up to its first padding."""
    counts = torch.zeros(args.num_draft_tokens, dtype=torch.int64)
    drafted, answers, start = 0, [], time.perf_counter()
    for first in tqdm(range(0, len(prompts), args.batch_size), desc="decoding", unit="batch"):
        batch = render(tokenizer, prompts[first : first + args.batch_size], args.chat_template_kwargs).to(
            target.device
        )
        sequences, batch_drafted, accepted = speculative_generate(
            target,
            draft,
            batch["input_ids"],
            attention_mask=batch["attention_mask"],
            num_draft_tokens=args.num_draft_tokens,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
        )
        drafted += int(batch_drafted.sum())
        counts += accepted.cpu()
        answers += sequences[:, batch["input_ids"].shape[1] :].tolist()
    seconds = time.perf_counter() - start
    # A row's new tokens are its prompt's first one, one per round, and the accepted drafts.
    new_tokens = len(prompts) + drafted // args.num_draft_tokens + int(counts.sum())
    return DecodingResult(len(prompts), new_tokens, drafted, counts.tolist(), seconds), answers


def render(
    tokenizer: PreTrainedTokenizerBase, prompts: list[list[dict[str, Any]] | str], template_kwargs: dict[str, Any]
):
    """Left-padded ids and mask of prompts as a server renders them; a string is a plain completion prompt."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    ids = []
    for prompt in prompts:
        if isinstance(prompt, str):
            ids.append(tokenizer(prompt)["input_ids"])
        else:  # a rendered chat already has its special tokens
            text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **template_kwargs)
            ids.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    return tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt")

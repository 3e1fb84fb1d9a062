"""`draftsmith evaluate`: decode prompts with the head and the target, and count what the target accepts."""

import math
import shlex
import shutil
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, set_seed

from ..data import PRESETS, LabelledPrompt, prompt_ids, read_prompts
from ..model_card import Source
from ..models.eagle3 import Eagle3DraftConfig
from ..models.eagle3.adapters_eagle3 import is_adapter
from ..serving.compatibility import launch_flags
from ..serving.launching import launched
from ..serving.servers import ENGINES, Server, ServerError, launch_command
from .arguments import TargetArguments, check_draft, check_local_path, check_output
from .evaluation_engines import Engine, ServerEngine, TransformersEngine
from .evaluation_report import BESIDE, Group, Report, can_plot, write_report
from .parsing import UsageError, parse, usage_errors


LEAST_TEMPERATURE = 1e-3  # above 0: logits divided by less overflow


@dataclass
class EvaluateArguments:
    """What to decode, and how."""

    draft: str = field(metadata={"help": "The head, or an adapter of one: a directory or Hub id."})
    prompts: list[str] = field(
        metadata={
            "help": f"Prompts: presets ({', '.join(PRESETS)}; `<preset>=<file>` for a local copy), JSON Lines, JSON "
            "or Parquet files, or Hub ids, with `messages`, `conversations` or `prompt`, and maybe `category`. Of a "
            "conversation, everything before its last answer is the prompt."
        }
    )
    split: str = field(default="test", metadata={"help": "Split of Hub datasets."})
    num_prompts: int | None = field(default=None, metadata={"help": "Decode only so many prompts of each category."})
    num_draft_tokens: list[int] = field(
        default_factory=lambda: [5], metadata={"help": "Tokens drafted per verification; several are tried in turn."}
    )
    temperature: list[float] = field(
        default_factory=lambda: [0.0], metadata={"help": "0 is greedy; several are tried in turn."}
    )
    max_new_tokens: int = field(default=256, metadata={"help": "New tokens per prompt."})
    length_buckets: list[int] = field(
        default_factory=list,
        metadata={"help": "Count by prompt length too, up to so many tokens: 2048 8192 16384 32768."},
    )
    batch_size: int = field(default=8, metadata={"help": "Prompts decoded together."})
    plain: bool = field(
        default=False, metadata={"help": "Decode without the head too, for the tokens per second (engine `hf`)."}
    )
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict, metadata={"help": "Arguments of the template."})
    seed: int = field(default=42, metadata={"help": "Seed of sampled decoding."})
    output: str | None = field(
        default=None, metadata={"help": "JSON file for the result; a table (.md) and a plot (.png) go beside it."}
    )

    # Servers
    engine: str = field(
        default="hf", metadata={"help": f"Who decodes: `hf`, here, or a server: {', '.join(ENGINES)}."}
    )
    base_url: str = field(default="http://localhost:8000", metadata={"help": "The server's address."})
    launch: bool = field(
        default=False, metadata={"help": "Start the server (vllm, sglang) with the head, and end it afterwards."}
    )
    server_python: str = field(
        default=sys.executable, metadata={"help": "The Python in whose environment the launched server is installed."}
    )
    server_flags: str = field(
        default="", metadata={"help": "Further flags of the launched server: --server_flags='--max-model-len 8192'"}
    )

    def __post_init__(self) -> None:
        if self.engine not in ("hf", *ENGINES):
            raise ValueError(f"`engine` is {self.engine!r}: pass one of hf, {', '.join(ENGINES)}.")
        if self.engine == "hf" or self.launch:
            check_local_path("draft", self.draft)
        for name in ("batch_size", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}: pass at least 1.")
        if self.num_prompts is not None and self.num_prompts < 1:
            raise ValueError(f"`num_prompts` is {self.num_prompts}: pass at least 1, or leave it out for all.")
        for name, least in (("num_draft_tokens", 1), ("length_buckets", 1), ("temperature", 0)):
            if wrong := [value for value in getattr(self, name) if not least <= value < math.inf]:
                raise ValueError(f"`{name}` has {wrong[0]}: pass at least {least}.")
        if wrong := [value for value in self.temperature if 0 < value < LEAST_TEMPERATURE]:
            raise ValueError(f"`temperature` has {wrong[0]}: pass at least {LEAST_TEMPERATURE}, or 0 for greedy.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"`seed` is {self.seed}: pass 0 to {2**32 - 1}.")
        if not self.num_draft_tokens or not self.temperature:
            raise ValueError("`num_draft_tokens` and `temperature` need a value each.")
        self._check_server()
        if self.plain and self.engine != "hf":
            raise ValueError("`plain` is for `engine` hf: start a server without a head to time it.")
        if self.output is not None and Path(self.output).suffix in BESIDE:
            raise ValueError(f"`output` is {self.output}: name the JSON file, beside which those are written.")
        if self.output is not None:
            check_output("output", self.output, BESIDE)

    def _check_server(self) -> None:
        if self.engine != "hf" and not self.launch and len(self.num_draft_tokens) > 1:
            raise ValueError(
                f"`num_draft_tokens` is {self.num_draft_tokens}, but a running server drafts as many as it was "
                "started for: pass that number, or `launch` one after the other."
            )
        if self.launch and self.engine not in ("vllm", "sglang"):
            raise ValueError(f"`launch` starts vllm or sglang, not {self.engine!r}.")
        if self.server_flags and not self.launch:
            raise ValueError("`server_flags` are for a server that is launched: add --launch.")
        if self.launch and shutil.which(self.server_python) is None:
            raise ValueError(f"`server_python` is {self.server_python!r}, no program: pass the path of a Python.")
        self.split_server_flags()
        if self.engine != "hf":
            self.server()

    def split_server_flags(self) -> list[str]:
        try:
            flags = shlex.split(self.server_flags)
        except ValueError as error:
            raise ValueError(f"`server_flags` is {self.server_flags!r} ({error}): quote it as for a shell.") from error
        if any(flag.partition("=")[0] == "--port" for flag in flags):
            raise ValueError("`server_flags` has --port: name the port in `base_url`, where the server is asked.")
        return flags

    def server(self) -> Server:
        return (Server.to_launch if self.launch else Server)(self.engine, self.base_url)


def main(argv: Sequence[str] | None = None) -> Report:
    target_args, args = parse((TargetArguments, EvaluateArguments), argv)
    with usage_errors():
        prompts = read_prompts(args.prompts, split=args.split)
        tokenizer = target_args.load_tokenizer()
        groups = grouped(prompts, tokenizer, args)
        if args.engine == "hf":
            check_lengths(groups, target_args.config(), args.max_new_tokens)
        if args.engine == "hf" or args.launch:
            check_draft(args.draft)
    if args.output is not None and not can_plot():
        print("no plot, which needs matplotlib: pip install draftsmith[plot]")
    report = Report(settings={**asdict(args), **sources(target_args, args)})
    # closed at once, whatever is raised here: a server that was launched ends with it
    with _as_usage_error(), closing(engines(target_args, args, tokenizer)) as tried:
        for engine, num_draft_tokens in tried:
            for temperature in args.temperature:
                set_seed(args.seed)
                counts = [engine.decode(group.ids, num_draft_tokens, temperature, group.name) for group in groups]
                plain = (
                    engine.plain([ids for group in groups for ids in group.ids], temperature) if args.plain else None
                )
                report.add(num_draft_tokens, temperature, groups, counts, plain)
                print(report.results[-1].table())
                print(report.results[-1].summary(), flush=True)
                if args.output is not None:  # after each, since a later one may fail
                    write_report(report, Path(args.output))
    return report


def sources(target_args: TargetArguments, args: EvaluateArguments) -> dict[str, Any]:
    """Target and head, and whether they are of the Hub, which their names alone do not tell elsewhere."""
    kinds = {"target_kind": Source.of(target_args.target).kind, "draft_kind": Source.of(args.draft).kind}
    return {"target": target_args.target, "target_revision": target_args.target_revision, **kinds}


def grouped(prompts: Sequence[LabelledPrompt], tokenizer: Any, args: EvaluateArguments) -> list[Group]:
    """The prompts' ids by category and, with `length_buckets`, by length; both in their order."""
    groups: dict[tuple[str, int | None], Group] = {}
    taken: dict[str, int] = {}
    for prompt in prompts:
        taken[prompt.category] = taken.get(prompt.category, 0) + 1
        if args.num_prompts is not None and taken[prompt.category] > args.num_prompts:
            continue
        ids = prompt_ids(tokenizer, prompt.content, args.chat_template_kwargs)
        bucket = None
        if args.length_buckets:
            longest = max(args.length_buckets)
            if len(ids) > longest:
                raise ValueError(
                    f"`length_buckets` end at {longest}, but a prompt of {prompt.category} has {len(ids)}."
                )
            bucket = min(length for length in args.length_buckets if len(ids) <= length)
        groups.setdefault((prompt.category, bucket), Group(prompt.category, bucket)).ids.append(ids)
    return list(groups.values())


def check_lengths(groups: Sequence[Group], config: PreTrainedConfig, max_new_tokens: int) -> None:
    """Raise for a prompt that does not fit into the target's positions with its answer."""
    text = config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    if limit is None:
        return
    if rope.get("rope_type") == "dynamic":
        limit = int(limit * rope["factor"])
    for group in groups:
        if (longest := max(map(len, group.ids))) + max_new_tokens > limit:
            raise ValueError(
                f"`prompts`: one of {group.category} has {longest} tokens, which with `max_new_tokens` "
                f"{max_new_tokens} exceeds the target's {limit} positions (`max_position_embeddings`): leave it out, "
                "or ask for fewer tokens."
            )


def engines(
    target_args: TargetArguments, args: EvaluateArguments, tokenizer: Any
) -> Generator[tuple[Engine, int], None, None]:
    """Who decodes, with each number of draft tokens."""
    if args.engine == "hf":
        with usage_errors():
            engine = TransformersEngine.load(target_args, args, tokenizer)
        for num_draft_tokens in args.num_draft_tokens:
            yield engine, num_draft_tokens
        return
    server = args.server()
    if args.launch:
        with usage_errors():
            if is_adapter(args.draft):
                raise ValueError(
                    f"`draft` {args.draft} is an adapter, which no server reads: merge it with `draftsmith export "
                    "--merge`, or evaluate with `engine` hf."
                )
            flags = launch_flags(Eagle3DraftConfig.from_pretrained(args.draft).to_diff_dict(), args.engine)
    for num_draft_tokens in args.num_draft_tokens:
        if not args.launch:
            yield ServerEngine(server, args), num_draft_tokens
            continue
        names = (args.engine, target_args.target, args.draft)
        options: dict[str, Any] = {"flags": [*flags, *args.split_server_flags()], "port": server.port}
        command = launch_command(*names, num_draft_tokens, **options, python=args.server_python)
        print("starting", " ".join(command), flush=True)
        with launched(command, server.base_url):
            yield ServerEngine(server, args), num_draft_tokens


@contextmanager
def _as_usage_error() -> Iterator[None]:
    try:
        yield
    except ServerError as error:
        raise UsageError(str(error)) from error

"""`draftsmith export`: a head in the layout of another reader, checked against what servers do with its options."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from ..model_card import RUN_FILE, RunRecord
from ..models.eagle3 import Eagle3DraftConfig, Eagle3DraftModel
from ..models.eagle3.adapters_eagle3 import is_adapter
from ..models.eagle3.configuration_eagle3 import resolve_aux_layer_ids
from ..serving import compatibility
from ..serving.directory import check_new, open_as_umask_says, whole_directory
from ..serving.speculators import to_speculators_config, to_speculators_tensors
from .arguments import check_draft, check_local_path
from .parsing import parse, usage_errors


@dataclass
class ExportArguments:
    """What to write, and for whom."""

    draft: str = field(metadata={"help": "The head: a directory or Hub id, in either format, or an adapter of one."})
    output: str = field(metadata={"help": "Directory to write; it must not exist."})
    format: str = field(
        default="default", metadata={"help": "`default` (vLLM, SGLang) or `speculators` (`vllm serve <output>`)."}
    )
    server: str | None = field(
        default=None, metadata={"help": "`vllm` or `sglang`: refuse what it would not serve as it was trained."}
    )
    target: str | None = field(
        default=None, metadata={"help": "Hub id or directory of the target; its config is checked against the head."}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the target."})
    merge: bool = field(
        default=False, metadata={"help": "Merge an adapter into its base head: servers read whole heads alone."}
    )
    num_draft_tokens: int = field(
        default=5, metadata={"help": "Tokens drafted per verification, written into the `speculators` format."}
    )

    def __post_init__(self) -> None:
        check_local_path("draft", self.draft)
        check_new("output", Path(self.output))
        for name, choices in (("format", WRITERS), ("server", (None, *compatibility.SERVERS))):
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"`{name}` is {value!r}: pass {' or '.join(filter(None, choices))}.")
        if self.server is not None and self.server not in compatibility.READERS_OF[self.format]:
            raise ValueError(f"`server` {self.server} does not read `format` {self.format}: pass `format` default.")
        if self.num_draft_tokens < 1:
            raise ValueError(f"`num_draft_tokens` is {self.num_draft_tokens}: pass at least 1.")
        if self.target is not None:
            check_local_path("target", self.target)
        elif self.format == "speculators":
            raise ValueError("`target` is needed with `format` speculators, whose config names the model to serve.")


def main(argv: Sequence[str] | None = None) -> Path:
    """Write the directory, say who serves it, and return it."""
    (args,) = parse((ExportArguments,), argv)
    with usage_errors():
        check_draft(args.draft)
        check_merge(args)
        refuse_own_base(args.draft)
        draft = Eagle3DraftModel.from_pretrained(args.draft)
        target_config = None
        if args.target is not None:
            target_config = AutoConfig.from_pretrained(args.target, trust_remote_code=args.trust_remote_code)
            fit_to_target_config(draft.config, target_config)
        export(draft, args, target_config)
    print(report(draft, args))
    return Path(args.output)


def check_merge(args: ExportArguments) -> None:
    """Raise unless `merge` is given exactly where there is an adapter."""
    if args.merge != is_adapter(args.draft):
        raise ValueError(
            f"`merge`: {args.draft} is a whole head: leave it out."
            if args.merge
            else f"`draft` {args.draft} is an adapter, which no server reads: add --merge to write its head with it."
        )


def refuse_own_base(draft: str) -> None:
    """Raise for adapters that are, by way of the heads that they name, their own base."""
    seen: list[str] = []
    while (path := find_adapter_config_file(draft)) is not None:
        here = str(Path(draft).resolve()) if Path(draft).is_dir() else draft.casefold()
        if here in seen:
            raise ValueError(
                f"`draft` {draft} names itself as its base head (`base_model_name_or_path` in {path}): write there "
                "which head it adapts."
            )
        seen.append(here)
        draft = json.loads(Path(path).read_text(encoding="utf-8")).get("base_model_name_or_path") or ""
        if not draft or Path(draft).is_absolute() and not Path(draft).is_dir():
            return  # the loader says so


def fit_to_target_config(config: Eagle3DraftConfig, target_config: PreTrainedConfig) -> None:
    """Check a head against the target's config alone, and fill in auxiliary layer ids that it does not say."""
    text = target_config.get_text_config(decoder=True)
    expected = (config.vocab_size, config.target_hidden_size)
    if (text.vocab_size, text.hidden_size) != expected:
        raise ValueError(
            f"`target` has `vocab_size` {text.vocab_size} and `hidden_size` {text.hidden_size}, but the head was made "
            f"for {expected[0]} and {expected[1]}: it belongs to another target."
        )
    config.eagle_aux_hidden_state_layer_ids = resolve_aux_layer_ids(
        config.eagle_aux_hidden_state_layer_ids, text.num_hidden_layers
    )


def export(draft: Eagle3DraftModel, args: ExportArguments, target_config: PreTrainedConfig | None) -> None:
    """Write `args.output`, whole or not at all.

    Raises:
        ValueError: the format's reader, or `args.server`, does not serve an option of the head.
        OSError: the directory could not be written.
    """
    for reader in compatibility.READERS_OF[args.format]:
        if reader in (args.server, compatibility.SPECULATORS):  # servers only on request, the layout always
            compatibility.check_readable(draft.config.to_diff_dict(), draft.state_dict(), reader)
    record = record_of(args.draft)
    try:
        with whole_directory(Path(args.output)) as directory:
            WRITERS[args.format](draft, directory, args, target_config)
            if record is not None:  # what the card will tell, but not where what it was made of lies on the Hub
                replace(record, repo_id=None).save(directory)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"`output`: {args.output} could not be written: {error}. Make room, or name another directory."
        ) from error


def record_of(draft: str) -> RunRecord | None:
    """`run.json` beside a head, in a directory or on the Hub, if it has one."""
    lenient = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    found = cached_file(draft, RUN_FILE, **lenient)
    return None if found is None else RunRecord.load(Path(found).parent)


def write_default(draft: Eagle3DraftModel, directory: Path, *_: Any) -> None:
    draft.save_pretrained(directory)


def write_speculators(
    draft: Eagle3DraftModel, directory: Path, args: ExportArguments, target_config: PreTrainedConfig
) -> None:
    config = to_speculators_config(
        {**draft.config.to_diff_dict(), "dtype": str(draft.dtype).removeprefix("torch.")},
        verifier=args.target,  # type: ignore[arg-type]
        verifier_architectures=target_config.architectures or [],
        num_draft_tokens=args.num_draft_tokens,
    )
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (directory / CONFIG_NAME).write_text(text, encoding="utf-8")
    tensors = {name: tensor.contiguous() for name, tensor in draft.state_dict().items()}
    save_file(to_speculators_tensors(tensors), directory / SAFE_WEIGHTS_NAME, {"format": "pt"})
    open_as_umask_says(directory, CONFIG_NAME)


WRITERS = {"default": write_default, "speculators": write_speculators}


def report(draft: Eagle3DraftModel, args: ExportArguments) -> str:
    """Markdown: who serves the directory, with which flags of its own, and who does not and why."""
    config, names = draft.config.to_diff_dict(), draft.state_dict()
    lines = [f"{args.output} holds the head in the {args.format} format."]
    for server in compatibility.SERVERS:
        if server not in compatibility.READERS_OF[args.format]:
            continue
        refused = compatibility.refusals(config, names, server)
        flags = shlex.join(compatibility.launch_flags(config, server))
        serves = "serves it" + (f" with {flags}" if flags else "")
        serves += " (by its source; not run)" if server == compatibility.SGLANG else ""
        reasons = "; ".join(f"`{name}`: {reason}" for name, reason in refused.items())
        lines.append(f"- {compatibility.READERS[server]} " + (f"does not: {reasons}" if refused else serves))
    return "\n".join(lines)

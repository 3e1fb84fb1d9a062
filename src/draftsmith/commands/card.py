"""`draftsmith card`: the model card of a head or of an adapter, from its config, its run and its evaluations."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME

from ..data.files import written_whole
from ..hub import make_card
from ..model_card import RUN_FILE, License, RunRecord, Source, check_card
from ..model_card.metadata import is_hub_id
from ..model_card.rendering import is_unedited
from ..model_card.run_record import HUB, MEMORY
from ..models.eagle3 import Eagle3DraftConfig
from ..serving.speculators import is_speculators_config
from .arguments import check_local_path, check_output
from .evaluation_files import evaluated_target, read_evaluation, read_json, refuse_another_head
from .parsing import parse, usage_errors


@dataclass
class CardArguments:
    """What to describe, and where the card goes."""

    draft: str = field(
        metadata={"help": "Directory of the head or of the PEFT adapter, with `run.json` if it has one."}
    )
    evaluation: list[str] = field(
        default_factory=list,
        metadata={"help": "JSON files of `draftsmith evaluate --output`; their plots come along."},
    )
    target: str | None = field(
        default=None,
        metadata={"help": "Hub id or directory of the target; default: what `run.json` or the evaluation says."},
    )
    license: str | None = field(
        default=None,
        metadata={"help": "The Hub's identifier of the license, apache-2.0; default: what `run.json` says."},
    )
    license_name: str | None = field(default=None, metadata={"help": "Name of the license, for `license` other."})
    license_link: str | None = field(default=None, metadata={"help": "Its URL, or LICENSE in the repository."})
    repo_id: str | None = field(
        default=None,
        metadata={"help": "Where on the Hub the head will be, owner/name; default: what `run.json` says."},
    )
    output: str | None = field(default=None, metadata={"help": "The card; default: README.md in `draft`."})
    overwrite: bool = field(
        default=False, metadata={"help": "Overwrite a card that was written or edited by someone else."}
    )

    def __post_init__(self) -> None:
        if not any((Path(self.draft) / name).is_file() for name in (CONFIG_NAME, ADAPTER_CONFIG_NAME)):
            raise ValueError(
                f"`draft` is {self.draft}, which has neither {CONFIG_NAME} nor {ADAPTER_CONFIG_NAME}: name the "
                "directory of a head or of an adapter."
            )
        if self.target is not None:
            check_local_path("target", self.target)
        if self.repo_id is not None and (self.repo_id.count("/") != 1 or not is_hub_id(self.repo_id)):
            raise ValueError(f"`repo_id` is {self.repo_id!r}, no id of the Hub: pass `owner/name`.")
        if self.license is not None:
            License(self.license, self.license_name, self.license_link)
        elif self.license_name or self.license_link:
            raise ValueError("`license_name` and `license_link` belong to `license` other: give that, too.")
        check_output("output", str(self.card))
        stems = [Path(path).stem for path in self.evaluation]
        if len(set(stems)) < len(stems):
            raise ValueError(f"`evaluation` has two files of one name ({', '.join(stems)}): their plots need two.")
        self._check_overwriting()

    def _check_overwriting(self) -> None:
        if self.overwrite:
            return
        if self.card.exists():
            if not is_unedited(self.card.read_text(encoding="utf-8", errors="replace")):
                raise ValueError(
                    f"`output`: {self.card} is not as this command wrote it: name another, or pass --overwrite true."
                )
            return
        for plot in self.plots:
            copy = self.card.with_name(plot.name)
            if copy.exists() and copy.read_bytes() != plot.read_bytes():
                raise ValueError(f"`output`: {copy} would be overwritten: rename it, or pass --overwrite true.")

    @property
    def card(self) -> Path:
        return Path(self.draft) / "README.md" if self.output is None else Path(self.output)

    @property
    def plots(self) -> list[Path]:
        paths = [Path(path).with_suffix(".png") for path in self.evaluation]
        return [path for path in paths if path.is_file()]


def main(argv: Sequence[str] | None = None) -> Path:
    """Write the card, whole or not at all, and return its path."""
    (args,) = parse((CardArguments,), argv)
    with usage_errors():
        text, license = card_text(args)
        check_card(text)
        write_card(args, text)
    print(f"{args.card} describes {args.draft} and keeps the Hub's rules.")
    if license is None:
        print(
            "It names no license, so nobody knows how they may use the head: give it a `license`, such as apache-2.0."
        )
    return args.card


def write_card(args: CardArguments, text: str) -> None:
    """The card last: the plots that it shows are there then."""
    for plot in args.plots:
        if (copy := args.card.with_name(plot.name)).absolute() != plot.absolute():
            with written_whole(copy) as unfinished:
                shutil.copyfile(plot, unfinished)
    with written_whole(args.card) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def card_text(args: CardArguments) -> tuple[str, License | None]:
    """The card, and the license that it names: what is not given is as `run.json` has it."""
    draft = Path(args.draft)
    evaluations = [read_evaluation(Path(path)) for path in args.evaluation]
    record = RunRecord.load(draft) if (draft / RUN_FILE).exists() else RunRecord()
    record = replace(record, target=known_target(args.target, record.target, evaluations))
    repo_id = args.repo_id or (record.repo_id if "/" in (record.repo_id or "") else None)
    refuse_another_head(evaluations, draft, repo_id)
    given = None if args.license is None else License(args.license, args.license_name, args.license_link)
    license = given or record.license
    config = None
    if not (draft / ADAPTER_CONFIG_NAME).is_file():
        if is_speculators_config(read_json(draft / CONFIG_NAME)):
            raise ValueError(
                f"`draft` is {draft}, a head in the speculators layout: name the head that it was exported from."
            )
        config = Eagle3DraftConfig.from_pretrained(draft).to_diff_dict()
    text = make_card(
        draft,
        record,
        config=config,
        repo_id=repo_id,
        license=license,
        evaluations=evaluations,
        plots=[plot.name for plot in args.plots],
    )
    return text, license


def known_target(given: str | None, recorded: Source | None, evaluations: Sequence[dict[str, Any]]) -> Source:
    """What the user says, or the run, or the evaluation; two of them may not name two models of the Hub."""
    if given is not None:
        target = Source.of(given)
        is_recorded = recorded is not None and (recorded.name, recorded.kind) == (target.name, target.kind)
        return recorded if is_recorded else target  # type: ignore[return-value]  # with its revision
    evaluated = [evaluated_target(evaluation["settings"]) for evaluation in evaluations]
    sources = [source for source in (recorded, *evaluated) if source is not None and source.kind != MEMORY]
    if not sources:
        raise ValueError(
            "`target` is not known without run.json or an evaluation: pass --target <Hub id or directory>."
        )
    on_hub = {source.name for source in sources if source.kind == HUB}
    if len(on_hub) > 1:
        raise ValueError(
            f"`evaluation` and run.json name different targets, {' and '.join(sorted(on_hub))}: leave out what is not "
            "of this head, or pass --target."
        )
    return sources[0]

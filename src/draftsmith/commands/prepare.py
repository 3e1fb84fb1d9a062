"""`draftsmith prepare`: chat data to token ids and supervision masks, as Parquet that `train` reads."""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..data import (
    DataArguments,
    DatasetStatistics,
    Distribution,
    PreparedDocuments,
    Report,
    dataset_statistics,
    preparation_fingerprint,
    prepare_documents,
    write_prepared,
)
from ..data.files import write_json, written_whole
from ..data.wording import counted
from .arguments import TargetArguments
from .inspection import read_tokens, sample, to_html, to_terminal
from .parsing import parse, usage_errors


BAR = 40  # characters


@dataclass
class PrepareArguments:
    """Where the prepared data goes."""

    output_dir: str = field(
        metadata={"help": "Directory of `train.parquet`, `evaluation.parquet` and `statistics.json`."}
    )
    inspect: int = field(
        default=0,
        metadata={
            "help": "Print this many training documents with the supervised tokens in colour, and write them to "
            "`inspect.html`."
        },
    )

    def __post_init__(self) -> None:
        if self.inspect < 0:
            raise ValueError(f"`inspect`={self.inspect} is negative.")


def main(argv: Sequence[str] | None = None) -> None:
    target_args, data_args, args = parse((TargetArguments, DataArguments, PrepareArguments), argv)
    output_dir = Path(args.output_dir)
    with usage_errors():
        output_dir.mkdir(parents=True, exist_ok=True)
        tokenizer = target_args.load_tokenizer()
        documents = prepare_documents(replace(data_args, packing=False), tokenizer)
    statistics = {name: dataset_statistics(part) for name, part in documents.parts.items()}
    fingerprint = preparation_fingerprint(tokenizer, data_args)
    with usage_errors():
        for name in ("evaluation.parquet", "inspect.html"):  # of an earlier run: they would belong to other data
            (output_dir / name).unlink(missing_ok=True)
        write_prepared(documents.parts["train"], output_dir / "train.parquet", fingerprint)
        # before the evaluation data: without it, all Parquet of a directory is read as one
        write_json(_report(documents, statistics), output_dir / "statistics.json")
        if "evaluation" in documents.parts:
            write_prepared(documents.parts["evaluation"], output_dir / "evaluation.parquet", fingerprint)
        if args.inspect:
            _inspect(documents.parts["train"], tokenizer, args.inspect, output_dir / "inspect.html")
    for name, report in documents.reports.items():
        print(_account(name, report, data_args.deduplicate))
    if len(documents.shares) > 1:
        print("train, by dataset:", *documents.shares, sep="\n  ")
    for name, numbers in statistics.items():
        print(_overview(name, numbers))
    print(f"Train on it with `draftsmith train --dataset {output_dir / 'train.parquet'}`.")


def _report(documents: PreparedDocuments, statistics: dict[str, DatasetStatistics]) -> dict[str, dict]:
    """Statistics of each part, and under `rows_read` what became of the rows that it was prepared from.

    Those of the training data hold under `datasets` what each entry of `dataset` gives to it.
    """
    report: dict[str, dict] = {name: asdict(numbers) for name, numbers in statistics.items()}
    for name, found in documents.reports.items():
        report[name]["rows_read"] = {
            "read": found.rows,
            "documents": sum(found.documents),
            "unusable": len(found.errors),
            "without_answer": len(found.unsupervised),
            "duplicates": found.duplicates,
            "truncated": found.truncated,
            "truncated_share": found.truncated / sum(found.documents),
        }
    report["train"]["datasets"] = [asdict(share) for share in documents.shares]
    return report


def _account(name: str, report: Report, deduplicate: bool) -> str:
    share = report.truncated / sum(report.documents)
    return (
        f"{name}: {counted(report.rows, 'row')} read, {len(report.errors):,} unusable, {len(report.unsupervised):,} "
        f"without an answer, {counted(report.duplicates, 'duplicate')} {'left out' if deduplicate else 'kept'}, "
        f"{counted(report.truncated, 'document')} truncated ({share:.1%})"
    )


def _overview(name: str, numbers: DatasetStatistics) -> str:
    lines = [
        f"{name}: {counted(numbers.documents, 'document')}, {counted(numbers.tokens, 'token')}, "
        f"{numbers.supervised_share:.1%} supervised, {counted(numbers.turns, 'turn')}"
    ]
    described = {
        "tokens": numbers.lengths,
        "supervised": numbers.supervised,
        "turns": numbers.turns_per_document,
    }
    header = [f"{quantile:>8}" for quantile in ("mean", *numbers.lengths.quantiles)]
    lines.append(f"  {'per document':14}{''.join(header)}")
    for title, distribution in described.items():
        cells = [f"{distribution.mean:>8.1f}", *(f"{value:>8,}" for value in distribution.quantiles.values())]
        lines.append(f"  {title:14}{''.join(cells)}")
    return "\n".join([*lines, *_histogram(numbers.lengths)])


def _histogram(distribution: Distribution) -> Iterator[str]:
    most = max(distribution.counts)
    for low, high, count in zip(distribution.edges, distribution.edges[1:], distribution.counts, strict=False):
        yield f"  {f'{low:,} to {high - 1:,}':>20} tokens {count:>9,} {'█' * round(BAR * count / most)}".rstrip()


def _inspect(documents: Dataset, tokenizer: PreTrainedTokenizerBase, count: int, path: Path) -> None:
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    shown = []
    for index in sample(documents, count):
        row = documents[index]
        shown.append((f"document {index + 1}", read_tokens(tokenizer, row["input_ids"], row["turn_ids"])))
        print(to_terminal(*shown[-1], colour=colour))
    with written_whole(path) as unfinished:
        unfinished.write_text(to_html("Prepared documents", shown), encoding="utf-8")
    print(f"The same with token boundaries and ids: {path}")

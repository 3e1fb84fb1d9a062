"""`draftsmith prepare`: chat data to token ids and supervision masks, as Parquet that `train` reads."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from datasets import Dataset

from ..data import DataArguments, prepare_datasets
from ..data.files import write_json, written_whole
from .arguments import TargetArguments
from .parsing import parse, usage_errors


@dataclass
class PrepareArguments:
    """Where the prepared data goes."""

    output_dir: str = field(
        metadata={"help": "Directory of `train.parquet`, `evaluation.parquet` and `statistics.json`."}
    )


def main(argv: Sequence[str] | None = None) -> None:
    target_args, data_args, args = parse((TargetArguments, DataArguments, PrepareArguments), argv)
    output_dir = Path(args.output_dir)
    with usage_errors():
        output_dir.mkdir(parents=True, exist_ok=True)
        data = prepare_datasets(replace(data_args, packing=False), target_args.load_tokenizer())
    for name, dataset in (("train", data.train), ("evaluation", data.evaluation)):
        if dataset is not None:
            _write_parquet(dataset, output_dir / f"{name}.parquet")
    statistics = {name: asdict(numbers) for name, numbers in data.statistics.items()}
    write_json(statistics, output_dir / "statistics.json")
    for name, numbers in data.statistics.items():
        share = numbers.supervised_tokens / numbers.tokens
        print(f"{name}: {numbers.documents:,} documents, {numbers.tokens:,} tokens, {share:.1%} supervised")
    print(f"Train on it with `draftsmith train --dataset {output_dir / 'train.parquet'}`.")


def _write_parquet(dataset: Dataset, path: Path) -> None:
    with written_whole(path) as unfinished:
        dataset.to_parquet(str(unfinished))

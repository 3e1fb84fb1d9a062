"""`draftsmith cache`: the target's hidden states on disk, so that training need not run it."""

import logging
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from accelerate import PartialState
from tqdm.auto import tqdm

from ..cached_target import ends_size
from ..data import DataArguments, DraftCollator, prepare_datasets
from ..data.hidden_states import CacheWriter, HiddenStateCache, NeededRows, refuse_another_run, stored_size
from ..data.wording import counted
from ..models.eagle3.configuration_eagle3 import resolve_aux_layer_ids
from ..serving.servers import ServerError
from ..target import FrozenTarget, TargetStates
from .arguments import OptionalTargetArguments
from .cache_servers import CacheServerArguments, served_target
from .cached_sources import manifest_of, save_target
from .parsing import UsageError, parse, usage_errors


logger = logging.getLogger(__name__)

GIB = 2**30
SAMPLED_ROWS = 8  # of each split, from which the size of all is predicted
Forward = Callable[[Mapping[str, Any]], TargetStates]  # of a batch of the collator


@dataclass
class CacheArguments:
    """Which states are kept, and how."""

    output_dir: str = field(
        metadata={"help": "Directory of the cache; run again, the command writes there what is missing or damaged."}
    )
    aux_layer_ids: list[int] | None = field(
        default=None,
        metadata={"help": "Target states that heads will fuse, as `hidden_states` indices; default 2, L//2, L-3."},
    )
    storage: Literal["bfloat16", "float8"] = field(
        default="bfloat16",
        metadata={
            "help": "`bfloat16`: every bit of the states of a bfloat16 target, in two thirds of their size. `float8`: "
            "in about a third, each number rounded to four bits or to a twentieth of its row's mean size."
        },
    )
    batch_size: int = field(
        default=1,
        metadata={
            "help": "Rows that the target runs at once. With 1, training at `per_device_train_batch_size` 1 meets the "
            "very bits that it would have computed; padding beside longer rows may round otherwise. "
            "A server gets the documents of so many rows at once: pass 16, say."
        },
    )
    shard_mib: int = field(
        default=1024, metadata={"help": "Largest file, in MiB of uncoded states; a killed run repeats what it began."}
    )
    verify: bool = field(
        default=False,
        metadata={"help": "Only read the cache in `output_dir` and compare all of it with its checksums."},
    )

    def __post_init__(self) -> None:
        for name in ("batch_size", "shard_mib"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}: pass at least 1.")


def main(argv: Sequence[str] | None = None) -> None:
    """Write the cache, on every rank a part of it, or go on with one that was begun; or verify it."""
    target_args, data_args, args, server_args = parse(
        (OptionalTargetArguments, DataArguments, CacheArguments, CacheServerArguments), argv
    )
    if args.verify:
        return verify(args.output_dir)
    with ExitStack() as stack:
        write(target_args, data_args, args, server_args, stack)


def write(
    target_args: OptionalTargetArguments,
    data_args: DataArguments,
    args: CacheArguments,
    server_args: CacheServerArguments,
    stack: ExitStack,
) -> None:
    """`main` but for `verify`; a server that is launched ends with `stack`."""
    ranks = PartialState(cpu=not torch.accelerator.is_available())
    with usage_errors():
        target_args.require()
        if ranks.is_main_process:
            refuse_another_run(Path(args.output_dir))
        server_args.check(target_args, ranks.num_processes)
        tokenizer = target_args.load_tokenizer()
        with ranks.main_process_first():
            data = prepare_datasets(data_args, tokenizer)
        rows = {"train": data.train} | ({} if data.evaluation is None else {"evaluation": data.evaluation})
        target: Any
        if server_args.engine == "vllm":
            target = stack.enter_context(served_target(target_args, args, server_args, rows))
        else:
            target = _loaded_target(target_args, args, ranks.device)
        manifest, states = manifest_of(target_args, data_args, args, data, target, tokenizer, rows)
        manifest.target["engine"] = server_args.engine
        writer = stack.enter_context(closing(CacheWriter(Path(args.output_dir), manifest)))
        if ranks.is_main_process:
            writer.begin()
        ranks.wait_for_everyone()
        writer.remove_damaged(ranks.process_index, ranks.num_processes)
        ranks.wait_for_everyone()
        missing = writer.missing()
        forward = _forward_of(target, ranks.device)
        if ranks.is_main_process:
            beside = writer.size_beside_states(rows, ends_size(target))
            if not (is_complete := not missing and not beside):
                _check_space(writer, beside + _predicted_size(writer, rows, states, missing, forward))
            writer.write_beside_states(rows, lambda directory: save_target(target, tokenizer, directory))
    ranks.wait_for_everyone()
    own = missing[ranks.process_index :: ranks.num_processes]
    try:
        _write(writer, rows, own, forward, args.batch_size, is_shown=ranks.is_main_process)
    except ServerError as error:
        raise UsageError(f"{error}\nWhat is written is kept: the same command goes on from there.") from error
    except KeyboardInterrupt as interrupt:
        done, shards = len(own) - sum(shard in own for shard in writer.missing()), counted(len(own), "shard")
        raise KeyboardInterrupt(f"after {done:,} of {shards} to write: the same command goes on") from interrupt
    ranks.wait_for_everyone()
    if ranks.is_main_process:
        with usage_errors():
            size = writer.finish()
        said = f"{args.output_dir} holds all of it already:" if is_complete else "Written:"
        print(f"{said} {size / GIB:.4g} GiB. Train with `draftsmith train --hidden_states {args.output_dir}`.")


def _loaded_target(target_args: OptionalTargetArguments, args: CacheArguments, device: torch.device) -> FrozenTarget:
    model: Any = target_args.load()
    if model.device.type == "cpu":  # one that was quantised onto devices stays where it is
        model.to(device)
    depth = model.config.get_text_config(decoder=True).num_hidden_layers
    return FrozenTarget(model, resolve_aux_layer_ids(args.aux_layer_ids, depth))


def verify(directory: str) -> None:
    """Exit with status 1 if a file is damaged, naming each."""
    with usage_errors():
        cache = HiddenStateCache(directory)
    checked = tqdm(cache.damaged_files(), total=len(cache.manifest.files), desc="Verifying", unit="file")
    if damaged := [name for name, is_damaged in checked if is_damaged]:
        listing = "\n".join(f"  {name}" for name in damaged)
        sys.exit(
            f"error: {directory}: the content of {counted(len(damaged), 'file')} is not what was written:\n{listing}\n"
            "Run `draftsmith cache` as it was run before: what is damaged is written anew."
        )
    print(f"{directory}: all of its {counted(len(cache.manifest.files), 'file')} as written.")


def _forward_of(target: Any, device: torch.device) -> Forward:
    def forward(batch: Mapping[str, Any]) -> TargetStates:
        return target(**{name: batch[name].to(device) for name in ("input_ids", "position_ids", "document_ids")})

    return forward


def _rows_with_states(rows: Any, numbers: Sequence[int], forward: Forward) -> list[tuple]:
    """Row number, auxiliary states and the teacher's, of some rows run together; only what training will read."""
    batch_rows = [rows[number] for number in numbers]
    states = forward(DraftCollator(ttt_steps=1)(batch_rows))
    results = []
    for place, (number, row) in enumerate(zip(numbers, batch_rows, strict=True)):
        needed = NeededRows.of(row)
        aux = states.aux_hidden_states[place][needed.context.to(states.aux_hidden_states.device)]
        teacher = states.last_hidden_state[place][needed.teacher.to(states.last_hidden_state.device)]
        results.append((number, aux.bfloat16().cpu(), teacher.bfloat16().cpu()))
    return results


def _predicted_size(
    writer: CacheWriter,
    rows: Mapping[str, Any],
    states: Mapping[str, list[int]],
    missing: Sequence[tuple[str, int]],
    forward: Forward,
) -> float:
    """Bytes of the missing shards, from what a few rows take."""
    predicted = 0.0
    for name, dataset in rows.items() if missing else ():
        numbers = sorted({int(number) for number in np.linspace(0, len(dataset) - 1, SAMPLED_ROWS)})
        sampled = [writer.encoded(*row) for number in numbers for row in _rows_with_states(dataset, [number], forward)]
        size = sum(map(stored_size, sampled)) / max(1, sum(states[name][number] for number in numbers))
        left = [number for part, shard in missing if part == name for number in writer.numbers(part, shard)]
        predicted += size * sum(states[name][number] for number in left)
    return predicted


def _check_space(writer: CacheWriter, predicted: float) -> None:
    """Refuse to begin what the disk cannot take."""
    free = shutil.disk_usage(writer.directory).free
    print(f"Predicted: {predicted / GIB:.4g} GiB more in {writer.directory}, where {free / GIB:.4g} GiB are free.")
    if predicted > free:
        raise UsageError(
            f"`output_dir`: the cache needs {predicted / GIB:.4g} GiB more, but {free / GIB:.4g} GiB are free in "
            f"{writer.directory}: make room, take fewer rows, or a smaller `storage`."
        )


def _write(
    writer: CacheWriter,
    rows: Mapping[str, Any],
    shards: Sequence[tuple[str, int]],
    forward: Forward,
    batch_size: int,
    *,
    is_shown: bool,
) -> None:
    """States are coded by threads while the target runs on; one shard is in memory at a time."""
    total = sum(len(writer.numbers(*shard)) for shard in shards)
    bar = tqdm(total=total, desc="Caching", unit="row", disable=not is_shown)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool, bar:
        for name, shard in shards:
            coded, numbers = [], writer.numbers(name, shard)
            for start in range(0, len(numbers), batch_size):
                for row in _rows_with_states(rows[name], numbers[start : start + batch_size], forward):
                    coded.append(pool.submit(writer.encoded, *row))
                    bar.update()
            with usage_errors():
                writer.write(name, shard, [arrays.result() for arrays in coded])

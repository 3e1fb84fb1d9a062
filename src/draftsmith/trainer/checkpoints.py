"""Checkpoint directories: whole or not there, whatever ends the process; broken ones are named, never trusted."""

import json
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints
from transformers.utils import SAFE_WEIGHTS_NAME

from ..hub import STATE


_TORCH_WRITE_ERROR = re.compile("PytorchStreamWriter|inline_container")  # all that `torch.save` says of a full disk
UNFINISHED = ".unfinished-"  # what a name begins with while its content is written or deleted


class TrainingFault(RuntimeError):
    """Training cannot go on. The message says why and what to do; commands print it without a traceback."""


def has_all_epochs(checkpoint: Path, num_train_epochs: float) -> bool:
    """Whether it has seen the data as often as asked for, in however many steps: fewer, on more ranks."""
    state = checkpoint / STATE
    return state.is_file() and (TrainerState.load_from_json(str(state)).epoch or 0.0) >= num_train_epochs


def remove_unfinished(run_dir: Path) -> None:
    """Remove what a killed process, or a failed save, left."""
    for leftover in run_dir.glob(f"{UNFINISHED}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def finish_checkpoint(written: Path, final: Path) -> None:
    """Give a whole checkpoint its name. One of an earlier run that has the name already gives way."""
    if final.exists():
        _discard(final)
    written.rename(final)


@contextmanager
def files_moved_to(directory: Path) -> Iterator[Path]:
    """A hidden directory inside `directory`, to which its files go when all are written."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=UNFINISHED) as unfinished:
        yield Path(unfinished)
        for path in Path(unfinished).iterdir():
            if path.is_dir():  # as of a tokenizer with several templates
                shutil.rmtree(directory / path.name, ignore_errors=True)
            path.replace(directory / path.name)


def rotate_checkpoints(run_dir: Path, limit: int | None, state: TrainerState) -> None:
    """Delete damaged ones, then the oldest, beyond `limit`; never the newest and the best.

    transformers' function of this name deletes in place: killed midway it leaves a checkpoint that lacks files.
    """
    checkpoints = sort_checkpoints(str(run_dir), use_mtime=True)  # not by step: a restart may have gone back
    checkpoints.sort(key=lambda path: damage_of(Path(path)) is None)  # stable: of no use goes before old
    kept = {checkpoints[-1], state.best_model_checkpoint or checkpoints[-1]}
    surplus = len(checkpoints) - max(limit, len(kept)) if limit else 0
    for path in [path for path in checkpoints if path not in kept][: max(surplus, 0)]:
        _discard(Path(path))


def _discard(directory: Path) -> None:
    hidden = directory.rename(directory.with_name(f"{UNFINISHED}{directory.name}"))
    shutil.rmtree(hidden, ignore_errors=True)


def last_whole_checkpoint(
    output_dir: str | os.PathLike | None, warn: Callable[[str], None] = lambda message: None
) -> str | None:
    """The checkpoint of the highest step that is whole; `warn` hears why later ones are passed over."""
    numbered = (
        path for path in Path(output_dir or ".").glob(f"{PREFIX_CHECKPOINT_DIR}-*") if step_of(path) is not None
    )
    for path in sorted(numbered, key=step_of, reverse=True):  # type: ignore[arg-type]
        if (damage := damage_of(path)) is None:
            return str(path)
        warn(f"{path.name} is passed over: {damage}")
    return None


def step_of(path: Path) -> int | None:
    number = path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
    return int(number) if number.isdecimal() else None


def refuse_damaged(checkpoint: str | os.PathLike) -> None:
    if damage := damage_of(Path(checkpoint)):
        raise ValueError(
            f"`resume_from_checkpoint` {checkpoint}: {damage}. Pass an earlier one, or `auto` for the last that is "
            "whole."
        )


def damage_of(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be resumed from, naming the file; None if it is whole. Reads no tensors."""
    if not checkpoint.is_dir():
        return "there is no such directory"
    if not (checkpoint / STATE).is_file():
        return f"{checkpoint / STATE} is missing: the checkpoint was not written to its end"
    weights = [path for pattern in ("*.safetensors", "*.bin", "global_step*") for path in checkpoint.glob(pattern)]
    if not [path for path in weights if path.name != "training_args.bin"]:
        return f"{checkpoint} holds no weights"
    return next((f"{path} is truncated or damaged ({error})" for path, error in _damaged_files(checkpoint)), None)


def _damaged_files(directory: Path) -> Iterator[tuple[Path, Exception]]:
    for path in sorted(directory.rglob("*")):
        if path.suffix in _OPENERS:
            try:
                _OPENERS[path.suffix](path)
            except (OSError, ValueError, SafetensorError, zipfile.BadZipFile) as error:
                yield path, error


def _open_json(path: Path) -> None:
    json.loads(path.read_text(encoding="utf-8"))


def _open_safetensors(path: Path) -> None:
    with safe_open(path, "pt"):  # compares the header's extents with the size of the file
        pass


def _open_zip(path: Path) -> None:
    with zipfile.ZipFile(path):  # the directory of a zip file, which is what `torch.save` writes, is at its end
        pass


_OPENERS = {".json": _open_json, ".safetensors": _open_safetensors, ".pt": _open_zip, ".pth": _open_zip}


def refuse_unwritable(output_dir: str | None) -> None:
    """Find out before long work starts whether checkpoints can be written; nothing is made for it."""
    output_dir = output_dir or "."
    path = Path(output_dir).absolute()
    try:
        nearest = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(b"\0" * 4096)
    except OSError as error:
        raise ValueError(
            f"`output_dir` {output_dir} cannot be written to ({error.strerror}): name a directory that you may write, "
            "on a disk with space."
        ) from error


@contextmanager
def explained_write_errors(directory: Path) -> Iterator[None]:
    """What fails while `directory` is written: which file, why, and what to do."""
    try:
        yield
    except TrainingFault:  # explained already
        raise
    except (OSError, RuntimeError, SafetensorError) as error:
        if isinstance(error, RuntimeError) and not _TORCH_WRITE_ERROR.search(str(error)):
            raise  # no fault of the disk
        disk = next(path for path in (directory, *directory.parents) if path.exists())
        free = shutil.disk_usage(disk).free / 2**20
        raise TrainingFault(
            f"{_failed_file(directory, error)} could not be written: {error}. {free:,.1f} MiB are free "
            "there. Make room, name another `output_dir`, or keep fewer checkpoints with `save_total_limit`; "
            "then go on with `resume_from_checkpoint` auto: earlier checkpoints are as they were."
        ) from error


def _failed_file(directory: Path, error: Exception) -> Path:
    """These errors name no file: it is the one that ends too early. safetensors deletes what it began."""
    weights = directory / SAFE_WEIGHTS_NAME if isinstance(error, SafetensorError) else directory
    return next((path for path, _ in _damaged_files(directory)), weights)

"""The `draftsmith` command line: `draftsmith <command> --config x.yaml --any_field value`."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import time
from collections.abc import Sequence


PATIENCE = 5  # seconds, in which a launcher ends the other ranks when one has failed
# Each is the module of the same name in this package, with a `main(argv)`; imported when called, not before.
COMMANDS = {
    "prepare": "chat data to token ids, supervision masks and packed rows",
    "generate": "the target's own answers to prompts, as data to train on",
    "cache": "the target's hidden states on disk, so that training need not run it",
    "plan": "what a training step needs of a GPU's memory, and what to do about it",
    "profile": "chart the memory of one step, ours beside dense attention and dense logits",
    "train": "train a draft head on a frozen target",
    "evaluate": "decode held-out prompts speculatively and measure the acceptance length",
    "export": "write a head in the layout that a server reads, or say why it does not serve it",
    "card": "write the model card of a head from its config, its run and its evaluations",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command; `argv` defaults to the process's arguments.

    A usage error prints as `error: ...` and exits with status 2, without a traceback; so does Ctrl-C, as
    `interrupted ...`, with status 130.
    """
    command, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if command in ("-h", "--help"):
        print(_help())
        return
    if command == "--version":
        from draftsmith import __version__

        print(__version__)
        return
    from draftsmith.commands.parsing import UsageError

    try:
        if command not in COMMANDS:
            nearest = difflib.get_close_matches(command, COMMANDS, n=1, cutoff=0)[0]
            raise UsageError(f"unknown command `{command}`; did you mean `{nearest}`?")
        importlib.import_module(f"draftsmith.commands.{command}").main(arguments)
        leave_together()
    except UsageError as error:
        _wait_behind_first_rank()
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as interrupt:
        print("interrupted", *interrupt.args, file=sys.stderr)  # with what a command says of how far it came
        sys.exit(130)


def _wait_behind_first_rank() -> None:
    """Ranks mostly find the same fault, which one of them says: the launcher ends the others then."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(PATIENCE)


def leave_together() -> None:
    """A rank that ends while its backend's threads still talk to others may abort."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _help() -> str:
    commands = "\n".join(f"  {name:<10}{summary}" for name, summary in COMMANDS.items())
    return (
        "usage: draftsmith <command> [--config file.yaml] [--any_field value ...]\n\n"
        f"commands:\n{commands}\n\n"
        "Flags win over files, files over defaults. `draftsmith <command> --help` lists the fields;\n"
        "`draftsmith --version` prints the version."
    )

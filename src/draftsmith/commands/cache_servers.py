"""`draftsmith cache --engine vllm`: hidden states from a server instead of a target that is loaded here."""

import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from ..models.eagle3.configuration_eagle3 import resolve_aux_layer_ids
from ..served_target import ServedTarget
from ..serving.hidden_states import extraction_command
from ..serving.launching import launched
from ..serving.servers import DEFAULT_PORT, Server, ServerError
from .arguments import OptionalTargetArguments


@dataclass
class CacheServerArguments:
    """Who runs the target."""

    engine: Literal["hf", "vllm"] = field(
        default="hf",
        metadata={
            "help": "Who runs the target: `hf`, here, or `vllm`, a server on this machine or one with the same disk, "
            "for targets too large to load. Run without one, the command says how it is started: vLLM's "
            "--speculative-config with the method extract_hidden_states, and ExampleHiddenStatesConnector, which "
            "writes the states to a directory that both see."
        },
    )
    base_url: str = field(default=f"http://localhost:{DEFAULT_PORT}", metadata={"help": "The server's address."})
    launch: bool = field(default=False, metadata={"help": "Start the server, and end it afterwards."})
    server_python: str = field(
        default=sys.executable, metadata={"help": "The Python in whose environment the launched server is installed."}
    )
    server_flags: str = field(
        default="", metadata={"help": "Further flags of the launched server: --server_flags='-tp 8'"}
    )

    def __post_init__(self) -> None:
        if self.engine == "hf":
            given = ("launch", self.launch), ("server_flags", self.server_flags)
            if names := [f"`{name}`" for name, value in given if value]:
                raise ValueError(f"{', '.join(names)} is of a server: add --engine vllm.")
            return
        if self.server_flags and not self.launch:
            raise ValueError("`server_flags` are for a server that is launched: add --launch.")
        if self.launch and shutil.which(self.server_python) is None:
            raise ValueError(f"`server_python` is {self.server_python!r}, no program: pass the path of a Python.")
        self.address()

    def address(self) -> Server:
        return (Server.to_launch if self.launch else Server)("vllm", self.base_url)

    def check(self, target_args: OptionalTargetArguments, num_processes: int) -> None:
        """Raise for what a server would not do."""
        if self.engine == "hf":
            return
        if target_args.target_adapter is not None or target_args.target_gguf_file is not None:
            raise ValueError(
                "`target_adapter` and `target_gguf_file` are for `engine` hf: of a server's target the ends are read "
                "from its safetensors files. Merge the adapter, or name the checkpoint that the GGUF file is of."
            )
        if self.launch and num_processes > 1:
            raise ValueError("`launch` starts one server: run one process, or start the server yourself.")


@contextmanager
def served_target(
    target_args: OptionalTargetArguments, args: Any, server_args: CacheServerArguments, rows: Mapping[str, Any]
) -> Iterator[ServedTarget]:
    """The target behind a server that is known to extract what `args` asks for, of the documents in `rows`.

    Raises:
        ServerError: it cannot be reached, or does not; with the command that starts one that does.
    """
    depth = target_args.config().get_text_config(decoder=True).num_hidden_layers
    name: Any = target_args.target
    address = server_args.address()
    target = ServedTarget(
        name,
        resolve_aux_layer_ids(args.aux_layer_ids, depth),
        address.base_url,
        revision=target_args.target_revision,
        dtype=target_args.target_dtype,
        trust_remote_code=target_args.trust_remote_code,
    )
    flags = [*(["--revision", target_args.target_revision] if target_args.target_revision else [])]
    flags += ["--trust-remote-code"] if target_args.trust_remote_code else []

    def command(directory: str, python: str) -> list[str]:
        return extraction_command(
            name,
            target.server.layer_ids,
            directory,
            dtype=str(target.model.dtype).removeprefix("torch."),
            port=address.port,
            flags=[*flags, *shlex.split(server_args.server_flags)],
            python=python,
        )

    with ExitStack() as stack:
        if server_args.launch:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="hidden_states-"))
            started = command(directory, server_args.server_python)
            print("starting", shlex.join(started), flush=True)
            stack.enter_context(launched(started, address.base_url))
        try:
            target.verify(_probe(rows), max(map(_longest_document, rows.values())))
        except ServerError as error:
            if server_args.launch:
                raise
            shown = shlex.join(command(f"{tempfile.gettempdir()}/hidden_states", "python"))
            raise ServerError(
                f"{error}\nThis command, in the environment of vLLM, starts a server that extracts them; both must "
                f"see the directory, which needs room for the states of some documents:\n{shown}"
            ) from error
        yield target


def _probe(rows: Mapping[str, Any]) -> list[int]:
    """The first document."""
    row = rows["train"][0]
    lengths = row.get("document_lengths", [len(row["input_ids"])])
    return [int(token) for token in row["input_ids"][: lengths[0]]]


def _longest_document(rows: Any) -> int:
    if "document_lengths" in rows.column_names:
        return max(max(lengths) for lengths in rows["document_lengths"])
    return max(map(len, rows["input_ids"]))

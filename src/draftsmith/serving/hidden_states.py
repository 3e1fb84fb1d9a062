"""A target's hidden states from a running vLLM server, which writes them to files that both see.

vLLM's `extract_hidden_states` caches the chosen layers' outputs of every prompt token, and its
`ExampleHiddenStatesConnector` writes those of a finished request to one safetensors file, `hidden_states`
`[T, layers, Ht]` and `token_ids` `[T]`, with a lock beside it that is held until the file is whole. Layer ids mean
what they mean here: `i` is `hidden_states[i]`, the output of decoder layer `i - 1` (0.26 and 0.32,
`model_executor/models/interfaces.py`), so that the number of layers is the last output before the final norm.
"""

import fcntl
import functools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from .servers import DEFAULT_PORT, ConnectionFailedError, Server, ServerError, all_at_once


REQUESTS = 64  # in flight
RETRY_SECONDS = (1, 5, 25)  # before each further try of a request whose connection failed
WRITING_SECONDS = 600  # how long the server may hold a file's lock
FINDING_SECONDS = 30  # how long a file may be missing: network filesystems show new ones late
LIKELIEST = 5  # tokens whose log-probabilities are compared


def served_name(layer_ids: Sequence[int]) -> str:
    """The name under which a server announces the layers that it extracts: nothing else in its answers tells them."""
    return f"hidden_states:{','.join(map(str, layer_ids))}"


def extraction_command(
    target: str,
    layer_ids: Sequence[int],
    directory: str,
    *,
    dtype: str,
    port: int = DEFAULT_PORT,
    flags: Sequence[str] = (),
    python: str = "python",
) -> list[str]:
    """The command that serves `target` in `dtype` and writes the states of `layer_ids` to files in `directory`."""
    extracted = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}}
    speculation = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": extracted}
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": directory},
    }
    return [
        *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", target, "--port", str(port)),
        *("--served-model-name", served_name(layer_ids), "--dtype", dtype, "--no-enable-prefix-caching"),
        *("--speculative-config", json.dumps(speculation), "--kv-transfer-config", json.dumps(transfer), *flags),
    ]


class HiddenStateServer(Server):
    """A vLLM server that was started by [`extraction_command`] for `layer_ids`, ascending.

    Its methods raise `ServerError` for a server that extracts nothing or other layers, for files that cannot be read
    here or hold other tokens, and for a connection that fails again and again.
    """

    def __init__(self, base_url: str, layer_ids: Sequence[int]):
        super().__init__("vllm", base_url)
        self.layer_ids = tuple(layer_ids)
        self._slots = BoundedSemaphore(REQUESTS)

    @functools.cached_property
    def max_tokens(self) -> int:
        """Tokens of the longest prompt that it takes, beside the one that it must answer."""
        cards = self._json("/v1/models")("data", kind=list)
        served: dict[Any, Any] = {card.get("id"): card.get("max_model_len") for card in cards}
        name = served_name(self.layer_ids)
        if name not in served:
            raise ServerError(
                f"{self.base_url} serves {', '.join(map(repr, served))}, not {name!r}: it does not extract the hidden "
                f"states of layers {list(self.layer_ids)}, or was started under another name."
            )
        if not isinstance(served[name], int):
            raise ServerError(f"{self.base_url}/v1/models has no `max_model_len`: is it a vLLM server?")
        return served[name] - 1

    def states(self, documents: Sequence[list[int]]) -> list[Tensor]:
        """Of each document's token ids `[T, len(layer_ids), Ht]`, in the server's dtype."""
        return all_at_once(lambda ids: self._ask_for_states(ids)[0], documents)

    def probe(self, ids: list[int]) -> tuple[Tensor, dict[int, float]]:
        """The states of `ids`, and the log-probabilities of the likeliest tokens after them."""
        states, answer = self._ask_for_states(ids, logprobs=LIKELIEST, return_tokens_as_token_ids=True)
        likeliest = answer("choices", 0, "logprobs", "top_logprobs", 0, kind=dict)
        return states, {int(token.removeprefix("token_id:")): value for token, value in likeliest.items()}

    def _ask_for_states(self, ids: list[int], **options: Any) -> tuple[Tensor, Callable[..., Any]]:
        request = {"model": served_name(self.layer_ids), "prompt": ids, "max_tokens": 1, "temperature": 0, **options}
        with self._slots:
            answer = self._json_with_retries("/v1/completions", request)
            return self._read(Path(answer("kv_transfer_params", "hidden_states_path", kind=str)), ids), answer

    def _json_with_retries(self, path: str, request: Any) -> Callable[..., Any]:
        for seconds in RETRY_SECONDS:
            try:
                return self._json(path, request)
            except ConnectionFailedError:
                time.sleep(seconds)
        return self._json(path, request)

    def _read(self, path: Path, ids: list[int]) -> Tensor:
        """The states in the file, which is removed if it is that of `ids`; nobody else would."""
        lock = path.with_name(f"{path.name}.lock")
        tensors = self._when_written(path, lock)
        if tensors.keys() != {"hidden_states", "token_ids"} or tensors["token_ids"].tolist() != ids:
            raise ServerError(
                f"{path} holds the states of other tokens than {self.base_url} was asked for. Start the server with "
                "--no-enable-prefix-caching, with a directory of its own, and ask for token ids as they are."
            )
        states = tensors["hidden_states"]
        if states.dim() != 3 or states.shape[:2] != (len(ids), len(self.layer_ids)):
            raise ServerError(
                f"{path}: the states are {list(states.shape)}, but {len(ids)} tokens of {len(self.layer_ids)} layers "
                f"({', '.join(map(str, self.layer_ids))}) were asked for: the server extracts other layers."
            )
        for written in (path, lock):
            written.unlink(missing_ok=True)
        return states

    def _when_written(self, path: Path, lock: Path) -> dict[str, Tensor]:
        start = time.monotonic()
        while True:
            try:
                with open(lock) as held:
                    fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    return load_file(path)
            except (OSError, SafetensorError) as error:
                limit = WRITING_SECONDS if isinstance(error, BlockingIOError) else FINDING_SECONDS
                if time.monotonic() - start > limit:
                    raise ServerError(
                        f"{self.base_url} says that the hidden states are in {path}, which cannot be read here after "
                        f"{limit} s ({error}). Its `shared_storage_path` must be a directory of this machine, too, of "
                        "the same name, for the same user (in a container: mounted in both), with room: see its log."
                    ) from error
            time.sleep(0.005)

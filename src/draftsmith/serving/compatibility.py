"""Which server serves which option of a head, as one table.

Read in vLLM 0.32.0 (`model_executor/models/llama_eagle3.py` and its `llama.py`, `v1/worker/gpu_model_runner.py`,
`v1/spec_decode/llm_base_proposer.py`), SGLang 0.5.23 (`srt/models/llama_eagle3.py` and its `llama.py`,
`srt/speculative/eagle_worker_v2.py`, the attention backends) and speculators 0.9.0 (`models/eagle3/config.py`).
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any


VLLM, SGLANG, SPECULATORS = "vllm", "sglang", "speculators"
READERS = {VLLM: "vLLM 0.32.0", SGLANG: "SGLang 0.5.23", SPECULATORS: "the speculators layout (0.9.0)"}
SERVERS = (VLLM, SGLANG)
READERS_OF = {"default": SERVERS, "speculators": (VLLM, SPECULATORS)}  # of each format

Config = dict[str, Any]  # of the default layout, as `config.json` holds it
Names = Collection[str]  # of the tensors of the default layout


@dataclass(frozen=True)
class Option:
    """Something that a head may ask of who reads it; what is in neither table is served as it was trained."""

    name: str
    is_used: Callable[[Config, Names], bool]
    refused_by: dict[str, str] = field(default_factory=dict)  # reader -> what it does instead
    launch_flags: dict[str, Callable[[Config], list[str]]] = field(default_factory=dict)  # server -> what it needs


def _is_set(key: str) -> Callable[[Config, Names], bool]:
    return lambda config, names: bool(config.get(key))


def _num_states(config: Config) -> int:
    return len(config.get("eagle_aux_hidden_state_layer_ids") or (0, 0, 0))


def _fused_width(config: Config) -> int:
    return _num_states(config) * (config.get("target_hidden_size") or config["hidden_size"])


OPTIONS = (
    Option("norm_output", _is_set("norm_output")),
    Option("fc_norm", _is_set("fc_norm")),
    Option("norm_before_fc", _is_set("norm_before_fc")),
    Option(
        "norm_before_fc with fc_norm",
        lambda config, names: bool(config.get("norm_before_fc") and config.get("fc_norm")),
        {SPECULATORS: "its config class takes only one of both"},
    ),
    Option(
        "norm_before_residual",
        _is_set("norm_before_residual"),
        {SGLANG: "it ignores the key and adds the state as it was before `hidden_norm`"},
    ),
    Option(
        "attention_bias",
        _is_set("attention_bias"),
        {SGLANG: "it builds the query, key and value projections without biases and drops the head's"},
    ),
    Option("mlp_bias", _is_set("mlp_bias"), {SGLANG: "it builds the MLP without biases and drops the head's"}),
    Option(
        "hidden_act",
        lambda config, names: config.get("hidden_act", "silu") != "silu",
        dict.fromkeys(SERVERS, "it computes `silu` only"),
    ),
    Option(
        # SGLang ignores `layer_types`. Its flag counts the tokens before the query's own (FlashAttention, FlashInfer,
        # Triton's extend); Triton's decode kernel sees one fewer.
        "sliding_window",
        _is_set("sliding_window"),
        launch_flags={
            SGLANG: lambda config: ["--speculative-draft-window-size", str(config["sliding_window"] - 1)],
        },
    ),
    Option(
        "sliding_window of 1",
        lambda config, names: config.get("sliding_window") == 1,
        {SGLANG: "its flag --speculative-draft-window-size, one less than the window, must be positive"},
    ),
    Option("target_hidden_size", _is_set("target_hidden_size")),
    Option(
        "embed_tokens of the target's width",
        lambda config, names: "embed_tokens.weight" in names and not config.get("target_hidden_size"),
        {SGLANG: "it replaces the embedding with the target's, which is right only where both are equal"},
    ),
    Option(
        "auxiliary states other than three",
        lambda config, names: _num_states(config) != 3,
    ),
    Option(
        "auxiliary states that are together as wide as the head",
        lambda config, names: _fused_width(config) == config["hidden_size"],
        {SGLANG: "it tells them from recurrent states by their width, and would leave out `fc`"},
    ),
    Option("draft_vocab_size", lambda config, names: config["draft_vocab_size"] < config["vocab_size"]),
    Option("full vocabulary", lambda config, names: config["draft_vocab_size"] == config["vocab_size"]),
    Option(
        "dynamic rope scaling",
        lambda config, names: (
            config["rope_parameters"]["rope_type"] == "dynamic" and config["rope_parameters"].get("factor", 1.0) != 1.0
        ),
        {VLLM: "it leaves the base of the rope as it is, SGLang stretches it by `factor`"},
    ),
    Option("rope scaling", lambda config, names: config["rope_parameters"]["rope_type"] != "default"),
)


def refusals(config: Config, names: Names, reader: str) -> dict[str, str]:
    """Options of the head that `reader` does not serve as trained, and what it does instead."""
    used = (option for option in OPTIONS if reader in option.refused_by and option.is_used(config, names))
    return {option.name: option.refused_by[reader] for option in used}


def check_readable(config: Config, names: Names, reader: str) -> None:
    """Raise `ValueError` unless `reader` (a key of `READERS`) serves every option of the head."""
    if refused := refusals(config, names, reader):
        others = [READERS[server] for server in SERVERS if server != reader and not refusals(config, names, server)]
        remedy = f"; {' or '.join(others)} serves it in the default layout" if others else ""
        reasons = "; ".join(f"`{name}`: {reason}" for name, reason in refused.items())
        raise ValueError(
            f"{READERS[reader]} does not serve this head as it was trained: {reasons}. Train one without{remedy}."
        )


def launch_flags(config: Config, server: str) -> list[str]:
    """Flags that `server` needs for this head, beside those that every head needs."""
    needed = [option for option in OPTIONS if server in option.launch_flags and option.is_used(config, ())]
    return [flag for option in needed for flag in option.launch_flags[server](config)]

"""Arguments of `draftsmith generate`."""

import math
import os
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import GenerationConfig

from ..data.questions import QUESTION_COLUMNS
from ..generation import DATA_FILE, PROVENANCE_FILE, Sampling
from ..serving.servers import Server


VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass
class GenerateArguments:
    """Which prompts, who answers them, and how."""

    dataset: list[str] = field(
        metadata={
            "help": "Prompts: JSON Lines, JSON or Parquet files, globs, directories, Hub ids. Of `messages` and "
            "`conversations` every answer is written anew; `turns` and `prompt` may be what a user says."
        }
    )
    output_dir: str = field(
        metadata={"help": f"Directory of `{DATA_FILE}` and `{PROVENANCE_FILE}`; an interrupted run goes on in it."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration name of the Hub datasets."})
    split: str = field(default="train", metadata={"help": "Split of the Hub datasets."})
    prompt_column: str | None = field(
        default=None, metadata={"help": f"Column to read. Default: the first of {', '.join(QUESTION_COLUMNS)}."}
    )
    on_bad_row: Literal["error", "skip"] = field(
        default="error", metadata={"help": "Rows that can't be used or answered: refuse the data, or leave them out."}
    )
    cut_answers: Literal["drop", "keep"] = field(
        default="drop",
        metadata={
            "help": "Answers that end at `max_new_tokens`: drop them, or keep them with `finished` false, so that "
            "training does not end them."
        },
    )

    # How tokens are chosen
    temperature: float | None = field(
        default=None,
        metadata={"help": "0 is greedy. Default, as of `top_p` and `top_k`: the target's generation config."},
    )
    top_p: float | None = field(default=None, metadata={"help": "1 leaves all tokens in."})
    top_k: int | None = field(default=None, metadata={"help": "0 leaves all tokens in."})
    max_new_tokens: int = field(default=2048, metadata={"help": "The longest answer."})
    seed: int = field(default=42, metadata={"help": "Seed of sampled answers."})
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict, metadata={"help": "Arguments of the template."})

    # Who answers
    engine: Literal["hf", "openai"] = field(
        default="hf", metadata={"help": "`hf`: transformers, here. `openai`: a server such as vLLM or SGLang."}
    )
    batch_size: int = field(default=32, metadata={"help": "Prompts decoded together (hf)."})
    continuous_batching: bool | None = field(
        default=None, metadata={"help": "transformers' continuous batching (hf). Default: on a GPU, if it can."}
    )
    base_url: str = field(default="http://localhost:8000", metadata={"help": "The server's address."})
    served_model: str | None = field(
        default=None, metadata={"help": "The target's name on the server. Default: the first that it lists."}
    )
    api_key_env: str | None = field(
        default=None, metadata={"help": "Name of the environment variable that holds the server's API key."}
    )
    concurrency: int = field(default=64, metadata={"help": "Requests at once."})
    request_timeout: float = field(default=1800.0, metadata={"help": "Seconds to wait for one answer."})
    max_retries: int = field(default=8, metadata={"help": "How often a request is sent again, after growing delays."})
    requests_per_minute: float | None = field(default=None, metadata={"help": "The most requests to send."})

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("batch_size", 1), ("concurrency", 1), ("max_retries", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` is {getattr(self, name)}: pass at least {least}.")
        for name in ("request_timeout", "requests_per_minute"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ValueError(f"`{name}` is {value}: pass more than 0.")
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise ValueError(f"`temperature` is {self.temperature}: pass 0 for greedy decoding, or more.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p` is {self.top_p}: pass more than 0, and at most 1.")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"`top_k` is {self.top_k}: pass 0 for all tokens, or how many.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"`seed` is {self.seed}: pass 0 to {2**32 - 1}.")
        if self.engine == "openai":
            self.server()

    def server(self) -> Server:
        return Server("openai", self.base_url, self._api_key(), self.served_model)

    def _api_key(self) -> str | None:
        if self.api_key_env is None:
            return None
        if not VARIABLE_NAME.fullmatch(self.api_key_env):  # maybe the key itself, which must not be shown
            raise ValueError("`api_key_env` is no name of a variable: export the key, and name the variable.")
        if not (key := os.environ.get(self.api_key_env)):
            raise ValueError("`api_key_env` names a variable that is not set: export it, or leave the option out.")
        return key

    def sampling(self, recommended: GenerationConfig) -> Sampling:
        """What is given, and else what the target's authors recommend, which is greedy if they say nothing."""
        known = recommended if recommended.do_sample else GenerationConfig(temperature=0.0)
        temperature = _first(self.temperature, known.temperature, 1.0)
        if temperature == 0:
            return Sampling(0.0, 1.0, None, self.max_new_tokens, self.seed)
        top_k = known.top_k if self.top_k is None else self.top_k
        return Sampling(temperature, _first(self.top_p, known.top_p, 1.0), top_k, self.max_new_tokens, self.seed)


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)

"""Cards filled from a head's config, its run and its evaluations."""

import hashlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment, PackageLoader, StrictUndefined

from .metadata import License
from .run_record import HUB, MEMORY, RunRecord, Source
from .target_options import command_words, python_options


ENGINES = {
    "hf": "draftsmith on transformers",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "openai": "an OpenAI-compatible API",
}
# Of all that a run logs, what describes the head and not the run.
SHOWN_METRICS = re.compile(r"(train_)?loss|(decoded_)?acceptance_length|step_\d+/\w+")
SIGNATURE = re.compile(r"<!-- draftsmith card (\w{16}) -->\n$")


@dataclass(frozen=True)
class Serving:
    """How one server serves a head: by a command, or not, for reasons by option."""

    name: str
    command: str | None
    refusals: dict[str, str] = field(default_factory=dict)


def render_card(
    config: Mapping[str, Any],
    record: RunRecord,
    *,
    name: str,
    repo_id: str | None = None,
    license: License | None = None,
    evaluations: Sequence[Mapping[str, Any]] = (),
    plots: Sequence[str] = (),
    servings: Sequence[Serving] = (),
) -> str:
    """The card of a draft head, with its metadata.

    Args:
        config: as in the head's `config.json`.
        record: what is known of its run; its target is needed.
        name: what the card calls the head.
        repo_id: its repository on the Hub; None: commands name the head's directory, `name`.
        license: of the head.
        evaluations: what `draftsmith evaluate --output` wrote.
        plots: files that lie beside the card.
        servings: of each server.
    """
    return _render(
        "draft_model_card.md",
        metadata=_metadata(record, _target(record), license, evaluations, name=name),
        record=record,
        evaluations=evaluations,
        name=name,
        location=repo_id or name,
        config=config,
        plots=plots,
        servings=servings,
    )


def render_adapter_card(
    adapter_config: Mapping[str, Any],
    record: RunRecord,
    *,
    name: str,
    repo_id: str | None = None,
    license: License | None = None,
    evaluations: Sequence[Mapping[str, Any]] = (),
    plots: Sequence[str] = (),
) -> str:
    """The card of a PEFT adapter of a head; `adapter_config` as in its JSON, the rest as in `render_card`."""
    _target(record)
    base = record.draft or Source.of(adapter_config["base_model_name_or_path"])
    modules = adapter_config.get("target_modules") or []
    adapted = modules if isinstance(modules, str) else ", ".join(sorted(modules))
    tags = ["peft", adapter_config["peft_type"].lower()]
    return _render(
        "adapter_card.md",
        metadata=_metadata(record, base, license, evaluations, name=name, tags=tags),
        record=record,
        evaluations=evaluations,
        name=name,
        location=repo_id or name,
        adapter=adapter_config,
        adapted=adapted,
        base=base,
        plots=plots,
    )


def is_unedited(card: str) -> bool:
    """Whether a card is as it was rendered."""
    match = SIGNATURE.search(card)
    return match is not None and match[1] == _digest(card[: match.start()])


def _target(record: RunRecord) -> Source:
    if record.target is None or record.target.kind == MEMORY:
        raise ValueError("`record` has no `target` with a name: say which model the head drafts for.")
    return record.target


def _render(
    template: str,
    *,
    metadata: ModelCardData,
    record: RunRecord,
    evaluations: Sequence[Mapping[str, Any]],
    **facts: Any,
) -> str:
    environment = Environment(
        loader=PackageLoader("draftsmith", "model_cards"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "cell": _cell, "quoted": json.dumps, "shell": shlex.quote, "prompt_name": _prompt_name,
        "engine_name": ENGINES.get,
    }  # fmt: skip
    text = environment.get_template(template).render(
        metadata=metadata.to_yaml(),
        record=record,
        evaluations=evaluations,
        categories=categories,
        temperatures=_temperatures(evaluations),
        recipe=[(f"`{name}`", value) for name, value in record.recipe.items()],
        devices=", ".join(f"{count} × {device}" for device, count in record.devices.items()),
        metrics=_metrics(record),
        target_words=command_words(record),
        target_options="".join(f", {name}={_python(value)}" for name, value in python_options(record).items()),
        **facts,
    )
    text = re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n\n"
    return f"{text}<!-- draftsmith card {_digest(text)} -->\n"


def _metadata(
    record: RunRecord,
    base: Source,
    license: License | None,
    evaluations: Sequence[Mapping[str, Any]],
    *,
    name: str,
    tags: Sequence[str] = (),
) -> ModelCardData:
    """Hub ids only; None where there is none, which `to_yaml` leaves out."""
    results = list(evaluation_results(evaluations)) or None
    base_model = base.name if base.kind == HUB else None
    datasets = list(dict.fromkeys(source.name for source in record.datasets if source.kind == HUB)) or None
    all_tags = ["eagle3", "speculative-decoding", "draft-model", *tags]
    fields: dict[str, Any] = {} if license is None else license.metadata()
    if base_model is not None:
        # Of the four relations that the Hub knows, a head is an adapter: it works with an unchanged base model only.
        fields["base_model_relation"] = "adapter"
        all_tags.append(f"base_model:adapter:{base_model}")
    return ModelCardData(
        library_name="draftsmith",
        base_model=base_model,
        datasets=datasets,
        pipeline_tag="text-generation",
        tags=all_tags,
        model_name=name if results else None,
        eval_results=results,
        **fields,
    )


def evaluation_results(evaluations: Sequence[Mapping[str, Any]]) -> Iterator[EvalResult]:
    """The acceptance length of each category and of all, as entries of `model-index`."""
    for evaluation in evaluations:
        settings = evaluation["settings"]
        for result in evaluation["results"]:
            drafts, temperature = result["num_draft_tokens"], result["temperature"]
            for category, counts in categories(result):
                if not sum(counts["rounds"]):  # a server that does not count
                    continue
                yield EvalResult(
                    task_type="text-generation",
                    task_name="Speculative decoding",
                    dataset_type=re.sub(r"[^\w.-]+", "-", category),
                    dataset_name=category,
                    metric_type="acceptance_length",
                    metric_name=f"Acceptance length, {drafts} draft tokens, temperature {temperature:g}",
                    metric_value=round(counts["acceptance_length"], 4),
                    metric_args={
                        "num_draft_tokens": drafts,
                        "temperature": temperature,
                        "max_new_tokens": settings["max_new_tokens"],
                        "engine": settings["engine"],
                    },
                )


def categories(result: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    total = [("all prompts", result["total"])] if len(result["categories"]) > 1 else []
    named = [
        (Source.of(name).name if "://" in name else name, counts) for name, counts in result["categories"].items()
    ]
    return [*named, *total]


def _metrics(record: RunRecord) -> list[tuple[str, float | None, float | None]]:
    """Name, value in training and in evaluation."""
    evaluated = {name.removeprefix("eval_"): value for name, value in record.eval_metrics.items()}
    names = [name for name in {**record.train_metrics, **evaluated} if SHOWN_METRICS.fullmatch(name)]
    return [(name, record.train_metrics.get(name), evaluated.get(name)) for name in names]


def _temperatures(evaluations: Sequence[Mapping[str, Any]]) -> list[str]:
    measured = {result["temperature"] for evaluation in evaluations for result in evaluation["results"]}
    return [f"{temperature:g}" for temperature in sorted(measured)]


def _prompt_name(prompts: str) -> str:
    """A preset, a Hub id or the last component of a path, of what `evaluate --prompts` takes."""
    preset, separator, _ = prompts.partition("=")
    return f"{preset} (a local copy)" if separator and "/" not in preset else Source.of(prompts).name


def _python(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _cell(value: Any) -> str:
    """A value within a Markdown table."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return " ".join(text.replace("|", "\\|").split())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]

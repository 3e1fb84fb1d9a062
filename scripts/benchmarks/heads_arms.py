"""The arms of `heads`: what each changes in the recipe's `train` section, and what it asks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from draftsmith.commands.arguments import (
    AdapterArguments,
    DraftArguments,
    OptionalTargetArguments,
    StateArguments,
    TargetArguments,
)  # fmt: skip
from draftsmith.commands.evaluate import EvaluateArguments
from draftsmith.commands.parsing import UsageError, parse
from draftsmith.data import DataArguments
from draftsmith.trainer import Eagle3TrainingArguments

from .heads_train import AS_IT_IS


TRAIN_ARGUMENTS = (
    OptionalTargetArguments, StateArguments, DraftArguments, AdapterArguments, DataArguments, Eagle3TrainingArguments,
)  # fmt: skip
OF_A_RUN = {"output_dir", "logging_dir", "run_name"}  # what differs between runs that train alike
PEER = "peer"  # the axis of what another library trained
STEPS = "draft steps in training"  # the axis whose heads are decoded with every number of draft tokens
LATER_STATES, WIDER_MLP = [5, 17, 29], 3072  # for SmolLM2-135M, where [2, 15, 27] and 1,536 follow the target
PADDED_DOCUMENTS = 24  # of some 340 tokens: as many tokens in a step as in a packed row of 8,192


@dataclass(frozen=True)
class Arm:
    """One training.

    Attributes:
        axis: what it varies.
        question: what its difference to the recipe answers.
        flags: fields of `draftsmith train` over the recipe's; None leaves one out.
        variant: of `heads_train`, for what is no option.
    """

    name: str
    axis: str
    question: str
    flags: dict[str, Any] = field(default_factory=dict)
    variant: str = AS_IT_IS

    def config(self, recipe: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of `draftsmith train`: the recipe's, under this arm's."""
        return {name: value for name, value in {**recipe, **self.flags}.items() if value is not None}


def _norms(name: str, question: str, *on: str) -> Arm:
    options = ("norm_output", "fc_norm", "norm_before_fc")
    return Arm(name, "norms of EAGLE-3.1", question, {option: option in on for option in options})


RECIPE = Arm("recipe", "recipe", "What does the recipe give, as it stands?")
ALL_ARMS = [
    RECIPE,
    Arm("rows_target", "output rows at the start", "Do the target's own rows help?"),
    Arm("rows_random", "output rows at the start", "What does a head lose that starts at random?",
        variant="random_rows"),
    Arm("layer_none", "layer at the start", "How good is a layer that starts at random?", {"init_from_layer": None}),
    Arm("layer_last", "layer at the start", "Does the target's last layer help?", {"init_from_layer": -1}),
    Arm("states_later", "fused states", "Do later states say more?", {"aux_layer_ids": LATER_STATES}),
    Arm("mlp_wider", "width of the MLP", "What does twice the width give?", {"draft_intermediate_size": WIDER_MLP}),
    *(Arm(f"objective_{name}", "objective", f"Is {name} the better loss?", {"objective": name})
      for name in ("kl", "ce", "tv", "lk_alpha", "lk_lambda")),
    *(Arm(f"normalized_{name}", "normalisation of the loss", f"Should every {name} weigh the same?",
          {"loss_normalization": name}) for name in ("token", "sequence")),
    *(Arm(f"decay_{decay:g}", "decay of the steps' weights", f"Should step k weigh {decay:g}^k?",
          {"ttt_step_loss_decay": decay}) for decay in (0.4, 0.6, 0.8, 0.9, 1.0)),
    *(Arm(f"k_{steps}", STEPS, f"How far do {steps} steps in training carry?",
          {"ttt_steps": steps}) for steps in (1, 3, 5, 7)),
    _norms("norms_none", "How good is plain EAGLE-3?"),
    _norms("norm_output", "Should the next step read the normed output?", "norm_output"),
    _norms("fc_norm", "Should each fused state be normed?", "fc_norm"),
    _norms("norm_before_fc", "Should the fused states be normed together?", "norm_before_fc"),
    _norms("norms_output_fc", "Do the first two go together?", "norm_output", "fc_norm"),
    _norms("norms_all", "And all three?", "norm_output", "fc_norm", "norm_before_fc"),
    *(Arm(f"vocabulary_{size}", "draft vocabulary", f"What do {size} tokens cost or spare?",
          {"draft_vocab_size": size}) for size in (8192, 16384, 32768)),
    Arm("vocabulary_full", "draft vocabulary", "What does the target's whole vocabulary give?",
        {"draft_vocab_size": None}),
    Arm("supervision_served", "supervision", "Is it enough to train what a server drafts?"),
    Arm("supervision_labels", "supervision", "Do paths that begin in the prompt help, too?", variant="all_labels"),
    Arm("rows_packed", "batches", "Does packing cost anything?", {"packing": True}),
    Arm("rows_padded", "batches", "Are padded batches better?",
        {"packing": False, "row_length": None, "keep_target_states": None,
         "per_device_train_batch_size": PADDED_DOCUMENTS}),
    *(Arm(f"batch_{rows}", "rows in a step", f"Are {rows} rows a better step?",
          {"per_device_train_batch_size": rows}) for rows in (1, 2, 4)),
    *(Arm(f"batch_2_rate_{rate}", "rows in a step", f"Do two rows bear a rate of {rate}?",
          {"per_device_train_batch_size": 2, "learning_rate": float(rate)}) for rate in ("2e-3", "4e-3")),
    Arm("rows_of_4096", "rows in a step", "Are half as many tokens a better step?", {"row_length": 4096}),
    Arm("weights_fp32", "weights in training", "What do fp32 masters give?"),
    Arm("weights_bf16", "weights in training", "What is lost without fp32 masters?", variant="bf16_weights"),
    *(Arm(f"rate_{rate}", "learning rate", f"Is {rate} the better rate?", {"learning_rate": float(rate)})
      for rate in ("1e-4", "3e-4", "1e-3", "2e-3", "4e-3")),
    Arm("clip_10", "gradient clipping", "And without clipping nearly every step?", {"max_grad_norm": 10.0}),
    *(Arm(f"epochs_{epochs}", "epochs", f"What do {epochs} epochs give?", {"num_train_epochs": epochs})
      for epochs in (1, 3, 6)),
]  # fmt: skip
ARMS = {arm.name: arm for arm in ALL_ARMS}


def parsed_arms(arms: Sequence[Arm], recipe: Mapping[str, Any], directory: Path) -> dict[str, dict[str, Any]]:
    """What `draftsmith train` makes of each arm, by name; files are written to `directory` for it.

    Raises:
        ValueError: it refuses some, all of which are named.
    """
    parsed, refused = {}, []
    directory.mkdir(parents=True, exist_ok=True)
    for arm in arms:
        path = directory / f"{arm.name}.yaml"
        path.write_text(yaml.safe_dump(arm.config(recipe)))
        try:
            found = parse(TRAIN_ARGUMENTS, ["--config", str(path)])
        except UsageError as error:
            refused.append(f"{arm.name}: {error}")
            continue
        values = {item.name: getattr(part, item.name) for part in found for item in fields(part)}
        parsed[arm.name] = {name: value for name, value in values.items() if name not in OF_A_RUN}
        parsed[arm.name]["variant"] = arm.variant
    if refused:
        raise ValueError("`--arms`: " + "\n".join(refused))
    return parsed


def check_evaluation(evaluate: Mapping[str, Any], directory: Path) -> None:
    """Raise `ValueError` if `draftsmith evaluate` refuses these fields; before any head is there to decode."""
    path = directory / "evaluate.yaml"
    path.write_text(yaml.safe_dump({**evaluate, "draft": str(directory), "prompts": []}))
    try:
        parse((TargetArguments, EvaluateArguments), ["--config", str(path)])
    except UsageError as error:
        raise ValueError(f"`evaluate` of the recipe: {error}") from error


def distinct(arms: Sequence[Arm], parsed: Mapping[str, dict[str, Any]]) -> tuple[list[Arm], dict[str, str]]:
    """The arms that train differently, and of the others, the recipe in particular, which arm they are like."""
    kept: list[Arm] = []
    alike: dict[str, str] = {}
    for arm in arms:
        same = next((other.name for other in kept if parsed[other.name] == parsed[arm.name]), None)
        if same is None:
            kept.append(arm)
        else:
            alike[arm.name] = same
    return kept, alike

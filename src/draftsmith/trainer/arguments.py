"""Training arguments: those of transformers, and how the head is unrolled and scored."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from .. import hub
from ..model_card import License
from ..ops import OBJECTIVES


LOSS_NORMALIZATIONS = ("token", "sequence")
# Arguments of a push, and the fields that give them.
PUSHED_BY = {
    "repo_id": "hub_model_id", "token": "hub_token", "private": "hub_private_repo", "revision": "hub_revision",
    "license": "hub_license",
}  # fmt: skip


@dataclass
class Eagle3TrainingArguments(TrainingArguments):
    """[`~transformers.TrainingArguments`] plus the choices of EAGLE-3 training.

    Defaults that differ: `learning_rate` 1e-4, `warmup_steps` 0.03 (a share of all steps), `adam_beta2` 0.95,
    `logging_steps` 10, `remove_unused_columns` False, `logging_nan_inf_filter` False (it hides NaN and synchronises
    every micro-batch), `ddp_find_unused_parameters` False.

    Under DeepSpeed, a config without `gradient_clipping` clips at `max_grad_norm` too, and ZeRO-3 always gathers the
    weights that are saved.
    """

    # The unroll
    ttt_steps: int = field(
        default=7, metadata={"help": "Training-time-test steps K: how far ahead the head is trained."}
    )
    ttt_step_loss_decay: float = field(default=0.8, metadata={"help": "Step k weighs `decay ** k` in the loss."})

    # The loss
    objective: str = field(
        default="kl",
        metadata={
            "help": "Loss of one (row, step) pair: `kl` to the target's distribution, `ce` of the hard label, `tv` "
            "distance, `lk_alpha` (negative log of the acceptance probability) or `lk_lambda` (KL and TV, weighted by "
            "acceptance)."
        },
    )
    loss_normalization: str = field(
        default="token",
        metadata={"help": "`token`: every supervised row weighs the same; `sequence`: every document does."},
    )

    # The target
    target_tp: int = field(
        default=1,
        metadata={
            "help": "Neighbouring ranks that hold one target together, sharded by tensor parallelism, for a target "
            "larger than one GPU; 1: the whole target on every rank. Ranks keep batches of their own either way."
        },
    )
    compile_target: bool = field(
        default=False,
        metadata={"help": "Compile the target's layers by `torch.compile`: a faster forward after the first batches."},
    )
    capture_target: bool = field(
        default=False,
        metadata={
            "help": "Record the target's forward as a CUDA graph and replay it: for a small target, where the GPU "
            "waits for the host. Rows are padded to a multiple of 64 tokens for it, and a shape of batch that comes "
            "again is recorded, up to 8 of them: it wants packed rows. Keeps the memory of a forward's activations; "
            "no effect on the CPU."
        },
    )
    keep_target_states: bool = field(
        default=False,
        metadata={
            "help": "Keep the target's states of every training row in host memory, so that later epochs skip its "
            "forward. For small data: a token takes (aux layers) * width values, a supervised one width more. Needs "
            "a batch size of 1 per device; `draftsmith cache` keeps them on disk, for data of any size."
        },
    )

    # Evaluation
    eval_prompts: list[str] | None = field(
        default=None,
        metadata={
            "help": "Prompts to decode at every evaluation, as `draftsmith evaluate` takes them: their acceptance "
            "length is `eval_decoded_acceptance_length`, also as `metric_for_best_model`."
        },
    )
    eval_num_prompts: int = field(default=16, metadata={"help": "Decode only so many of them."})
    eval_max_new_tokens: int = field(default=64, metadata={"help": "New tokens per decoded prompt."})
    eval_num_draft_tokens: int | None = field(
        default=None, metadata={"help": "Tokens drafted per verification; default: `ttt_steps`."}
    )

    # The Hub
    hub_license: str | None = field(
        default=None,
        metadata={"help": "License of the head on its card, an identifier of the Hub such as apache-2.0."},
    )

    # Faults
    max_nan_steps: int = field(
        default=10,
        metadata={
            "help": "Optimizer steps whose loss or gradients are not finite are skipped and counted in the log as "
            "`nan_steps`; so many in a row end training with an error."
        },
    )

    # Defaults and texts that differ from transformers
    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={"help": "A checkpoint directory to go on from; `auto`: the last whole one in `output_dir`, if any."},
    )
    learning_rate: float = field(default=1e-4, metadata={"help": "The initial learning rate of AdamW."})
    warmup_steps: float = field(default=0.03, metadata={"help": "Warm-up: steps, or a share of all steps if below 1."})
    adam_beta2: float = field(default=0.95, metadata={"help": "Beta2 of AdamW."})
    logging_steps: float = field(default=10, metadata={"help": "Log every so many steps, or a share if below 1."})
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Keep False: the collator needs every column."}
    )
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Hide NaN and infinite losses from the log."}
    )
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "Keep False: every parameter is used, also where nothing is supervised."}
    )

    def __post_init__(self):
        # transformers asks for `use_cpu` before it allows bf16 on a machine that has nothing else.
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        super().__post_init__()
        for name, allowed in (("objective", OBJECTIVES), ("loss_normalization", LOSS_NORMALIZATIONS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}: pass one of {', '.join(allowed)}.")
        if self.keep_target_states and self.per_device_train_batch_size != 1:
            raise ValueError(
                "`keep_target_states` needs `per_device_train_batch_size=1`: batches change with every epoch."
            )
        _check_target_groups(self)
        recompute = self.gradient_checkpointing_kwargs
        if isinstance(recompute, dict) and recompute.get("use_reentrant"):
            raise ValueError(
                "`gradient_checkpointing_kwargs`: `use_reentrant` loses the gradient of earlier steps' keys."
            )
        if self.ttt_steps < 1:
            raise ValueError(f"`ttt_steps` is {self.ttt_steps}: the head needs at least one step.")
        for name in ("eval_num_prompts", "eval_max_new_tokens", "eval_num_draft_tokens"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}: pass at least 1.")
        if self.max_nan_steps < 1:
            raise ValueError(f"`max_nan_steps` is {self.max_nan_steps}: pass at least 1, which ends at the first.")
        if self.enable_jit_checkpoint:
            raise ValueError(
                "`enable_jit_checkpoint` is not needed: SIGTERM always saves a checkpoint, of one step on all ranks."
            )
        if not self.average_tokens_across_devices:
            raise ValueError(
                "`average_tokens_across_devices=False` would weigh a rank with one supervised token like a rank with "
                "many; leave it True."
            )
        # accelerate's dispatcher would slice the row sets of a batch as if they were rows.
        self.accelerator_config.dispatch_batches = False  # type: ignore[union-attr]
        if self.deepspeed_plugin is not None:
            _complete(self.deepspeed_plugin.deepspeed_config, self.max_grad_norm)


def _check_target_groups(args: Eagle3TrainingArguments) -> None:
    if args.capture_target and args.target_tp > 1:
        raise ValueError(
            f"`capture_target` records the forward of a whole target, but `target_tp` is {args.target_tp}: leave one "
            "of them out."
        )
    if args.target_tp < 1 or args.world_size % args.target_tp:
        raise ValueError(
            f"`target_tp` is {args.target_tp}, which does not divide the {args.world_size} processes of this launch: "
            f"start a multiple of it (`torchrun --nproc_per_node`), or pass a divisor."
        )


def _complete(deepspeed_config: dict[str, Any], max_grad_norm: float) -> None:
    """Make ZeRO clip like DDP and save whole heads, whatever the config leaves out."""
    deepspeed_config.setdefault("gradient_clipping", max_grad_norm)  # left out, DeepSpeed clips at 1
    # A head is small, and one in shards is loaded neither by servers nor by `from_pretrained`.
    deepspeed_config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True


def refuse_unsupported_launches(args: TrainingArguments) -> None:
    if args.fsdp:
        raise ValueError("`fsdp` is not supported: shard with DeepSpeed ZeRO (`deepspeed=`).")
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} GPUs are visible to one process: start one process each with "
            f"`torchrun --nproc_per_node {args.n_gpu}`, or show one with CUDA_VISIBLE_DEVICES."
        )


def repository_of(args: Eagle3TrainingArguments) -> str:
    """Where heads are pushed to; without a namespace it is the account's."""
    return args.hub_model_id or Path(args.output_dir or ".").absolute().name


def refuse_unpublishable(args: Eagle3TrainingArguments) -> None:
    """What is known before training: the repository's name, the license, whether there is a token."""
    try:
        if args.hub_license is not None:
            License(args.hub_license)
        hub.check_push(repository_of(args), args.hub_token)
    except hub.HubError as error:
        raise ValueError(f"`push_to_hub`: {in_our_fields(error)}") from error
    except ValueError as error:
        raise ValueError(in_our_fields(error)) from error


def in_our_fields(error: Exception) -> str:
    """What is said of the arguments of a push, said of the fields that give them."""
    return re.sub(rf"`({'|'.join(PUSHED_BY)})`", lambda match: f"`{PUSHED_BY[match[1]]}`", str(error))

"""Training on several ranks: the launcher for tests, and what the scripts that it launches share."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from .common import logged


ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def run_two_ranks(script, output_dir, *, gpus=False, bf16=False, timeout=280):
    return run_ranks(2, script, output_dir, gpus=gpus, bf16=bf16, timeout=timeout)


def run_ranks(count, script, output_dir, *, gpus=False, bf16=False, timeout=280):
    """Run `tests.trainer.<script>` under torchrun and return the results that it saved, on the CPU."""
    launcher = [*TORCHRUN[:-1], f"--nproc_per_node={count}"]
    command = [*launcher, "-m", f"tests.trainer.{script}", str(output_dir), *(["--bf16"] if bf16 else [])]
    launch(command, gpus=gpus, timeout=timeout)
    return torch.load(Path(output_dir) / "result.pt", map_location="cpu")


def launch(command, *, gpus=False, timeout=280) -> str:
    """Run a launcher's command from the repository's root and return its output."""
    # Scripts take GPUs where they see some.
    device = {"NVIDIA_TF32_OVERRIDE": "0"} if gpus else {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **device}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def _zero(stage: int) -> dict:
    return {
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,  # a weight is whole only inside its module's forward
            "stage3_max_reuse_distance": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",  # DeepSpeed would clip at 1 without it
        "bf16": {"enabled": "auto"},
        "zero_force_ds_cpu_optimizer": False,
    }


# name -> `deepspeed` of the training arguments
MODES = {"ddp": None, **{f"zero{stage}": _zero(stage) for stage in range(4)}}


def compile_nothing() -> None:
    """Keep DeepSpeed from compiling its collectives for CPUs, which takes more than a minute."""
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False


@contextmanager
def launch_options(mode: str) -> Iterator[dict]:
    """The training arguments of one of several runs in a process."""
    use_cpu = not torch.cuda.is_available()
    if use_cpu:
        compile_nothing()
    yield {
        "deepspeed": MODES[mode],
        "use_cpu": use_cpu,
        "bf16": "--bf16" in sys.argv,
        "ddp_timeout": 90,  # ranks that wait for each other in vain end with an error
    }
    AcceleratorState._reset_state()
    unset_hf_deepspeed_config()


def result_of(trainer) -> dict:
    """What a trained trainer logged, evaluates to and holds, its weights whole; every rank takes part."""
    head_numel = trainer.model.lm_head.weight.numel()
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return {
        "loss": logged(trainer, "loss"),
        "metrics": trainer.evaluate(),
        "weights": {name: value for name, value in (weights or {}).items() if value.is_floating_point()},
        "head_numel": head_numel,
    }


def save_results(results: dict, output_dir: str) -> None:
    if os.environ["RANK"] == "0":
        torch.save(results, Path(output_dir) / "result.pt")

"""What happens to long runs: signals, kills while saving, full disks, damaged checkpoints, NaN, lack of memory."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback, TrainerState

from draftsmith import Eagle3TrainingArguments
from draftsmith.commands import main, train
from draftsmith.commands.parsing import UsageError
from draftsmith.trainer.callbacks import NonFiniteSteps
from draftsmith.trainer.checkpoints import (
    TrainingFault,
    damage_of,
    files_moved_to,
    last_whole_checkpoint,
    rotate_checkpoints,
)

from . import common
from .common import logged, make_rows, make_trainer, weights_of
from .ranks import ROOT, run_two_ranks


LENGTHS = [5, 40, 9, 17, 30, 3, 22, 12]
SAVING = {"max_steps": 5, **common.SAVING}


def assert_same_weights(trainer, truth):
    truth = weights_of(truth)
    assert all(torch.equal(value, truth[name]) for name, value in weights_of(trainer).items())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of `SAVING`, with all its checkpoints."""
    trainer = make_trainer(tmp_path_factory.mktemp("runs") / "whole", make_rows(LENGTHS), **SAVING)
    trainer.train()
    return trainer


@pytest.fixture
def copied(whole, tmp_path):
    """A copy of its output directory, to be damaged."""
    return shutil.copytree(whole.args.output_dir, tmp_path / "copy")


# Signals


class SignalAt(TrainerCallback):
    """Sends this process a signal at one step: while it runs, or while its checkpoint is saved."""

    def __init__(self, step, number=signal.SIGTERM, *, saving=False):
        self.step, self.number, self.saving = step, number, saving

    def on_step_begin(self, args, state, control, **kwargs):
        if not self.saving and state.global_step == self.step:
            os.kill(os.getpid(), self.number)

    def watch(self, trainer):
        save = trainer._save_optimizer_and_scheduler

        def save_signalled(output_dir):
            if trainer.state.global_step == self.step:
                os.kill(os.getpid(), self.number)
            save(output_dir)

        trainer._save_optimizer_and_scheduler = save_signalled


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_running_step_and_the_run_resumes_exactly(tmp_path, whole, capfd, number):
    options = {**SAVING, "save_steps": 100, "eval_strategy": "steps", "eval_steps": 3}
    rows, handlers = make_rows(LENGTHS), [signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGINT)]
    part = make_trainer(tmp_path, rows, eval_rows=rows, callbacks=[SignalAt(2, number)], **options)
    part.train()
    assert (part.stopped_by, part.state.global_step) == (number, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]
    assert not logged(part, "eval_loss")  # it was due at this step, and would have delayed the checkpoint
    assert f"{number.name}: training ends after this step" in capfd.readouterr().err
    assert [signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGINT)] == handlers
    resumed = make_trainer(tmp_path, rows, **options | {"eval_strategy": "no"})
    resumed.train(resume_from_checkpoint=True)
    assert resumed.stopped_by is None
    assert_same_weights(resumed, whole)


def test_a_signal_while_a_checkpoint_is_saved_ends_with_that_checkpoint(tmp_path, whole):
    callback = SignalAt(2, saving=True)
    part = make_trainer(tmp_path, make_rows(LENGTHS), callbacks=[callback], **SAVING)
    callback.watch(part)
    part.train()
    assert part.stopped_by == signal.SIGTERM and part.state.global_step == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-2"]
    resumed = make_trainer(tmp_path, make_rows(LENGTHS), **SAVING)
    resumed.train(resume_from_checkpoint=True)
    assert_same_weights(resumed, whole)


def test_the_checkpoint_of_a_signal_outlives_the_best_one(tmp_path):
    """transformers ends a run by loading the best weights, and with a limit of one deletes the others."""
    rows = make_rows(LENGTHS)
    options = {
        **SAVING,
        "learning_rate": 1.0,  # step 1 stays the best
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
    }
    part = make_trainer(tmp_path, rows, eval_rows=rows, callbacks=[SignalAt(2)], **options)
    part.train()
    assert (tmp_path / "checkpoint-3").is_dir()
    state = json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(tmp_path / f"checkpoint-{state['best_global_step']}")
    assert (tmp_path / f"checkpoint-{state['best_global_step']}").is_dir()


def test_a_second_interrupt_ends_at_once(tmp_path):
    trainer = make_trainer(tmp_path, make_rows(LENGTHS), **SAVING)
    trainer._stop.ECHO_SECONDS = 0
    for step in (1, 1):
        trainer.add_callback(SignalAt(step, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")


def test_echo_of_an_interrupt_is_ignored(tmp_path):
    callbacks = [SignalAt(1, signal.SIGINT), SignalAt(1, signal.SIGINT), SignalAt(1, signal.SIGTERM)]
    trainer = make_trainer(tmp_path, make_rows(LENGTHS), callbacks=callbacks, **SAVING)
    trainer.train()
    assert (trainer.stopped_by, trainer.state.global_step) == (signal.SIGINT, 2)


def test_command_line_reports_an_interrupt_in_one_line(monkeypatch, capsys):
    def interrupt(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "main", interrupt)
    with pytest.raises(SystemExit) as exit_:
        main(["train"])
    assert exit_.value.code == 130 and capsys.readouterr().err == "interrupted\n"


def test_jit_checkpoints_are_refused(tmp_path):
    with pytest.raises(ValueError, match="enable_jit_checkpoint"):
        Eagle3TrainingArguments(str(tmp_path), enable_jit_checkpoint=True)


def test_faults_of_one_rank_are_faults_of_both(tmp_path):
    """A signal stops both at one step, a step that is not finite is skipped by both: under DDP and ZeRO."""
    for (fault, mode), result in run_two_ranks("two_ranks_faults", tmp_path).items():
        if fault == "signal":
            name, step = result["stopped"]
            assert name == "SIGTERM" and 3 <= step < 5, mode  # it came in step 3, and is shared at the next step
            assert result["equal"], mode
        else:
            first, second, third = result["weights"]
            assert all(torch.equal(value, second[name]) for name, value in first.items()), mode
            assert not torch.equal(first["fc.weight"], third["fc.weight"]), mode
            assert all(value.isfinite().all() for value in third.values()), mode
            assert result["nan_steps"] == [1] and torch.tensor(result["loss"]).isfinite().all(), mode


@pytest.mark.slow
def test_launcher_forwards_sigterm(tmp_path):
    """torchrun sends its ranks SIGTERM, waits 30 s and kills: both save together, and the launcher ends."""
    (tmp_path / "until-signal").touch()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["-m", "tests.trainer.two_ranks_faults", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    launched = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "started").exists():
        assert launched.poll() is None
        time.sleep(0.1)
    launched.send_signal(signal.SIGTERM)
    errors = launched.communicate(timeout=60)[1]
    checkpoint = last_whole_checkpoint(tmp_path / "run")
    assert launched.returncode != 0 and "SIGTERM: training ends after this step" in errors
    assert checkpoint is not None and damage_of(tmp_path / "run" / checkpoint) is None


# Kills


def run_killed(tmp_path, mode, number, timeout):
    command = [sys.executable, "-m", "tests.trainer.killed_runs", str(tmp_path), mode, str(number)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads((tmp_path / "result.json").read_text())


def assert_every_restart_is_exact(results):
    for result in results:
        assert result["killed"] == -signal.SIGKILL and result["restarted"] == 0 and result["equal"], result
        assert not [name for name in result["left"] if not name.startswith("checkpoint-")], result


def test_killed_at_any_file_operation_of_a_save_a_run_goes_on(tmp_path):
    """A sample, from the saves that also delete; the slow test takes all."""
    results = run_killed(tmp_path, "operations", 5, 200)
    assert len(results) >= 5 and all(result["checkpoint"] for result in results)
    assert_every_restart_is_exact(results)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_killed_at_every_file_operation_a_run_goes_on(tmp_path):
    results = run_killed(tmp_path, "operations", "all", 1400)
    operations = {result["operation"] for result in results}
    assert {"half model.safetensors", "half optimizer.pt", "open trainer_state.json"} <= operations
    assert {"os.rename checkpoint-4", "os.rename checkpoint-2", "os.remove trainer_state.json"} <= operations
    assert_every_restart_is_exact(results)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_twenty_times_at_random_moments(tmp_path):
    result = run_killed(tmp_path, "random", 20, 800)
    assert result["died"] == 20 and result["with a checkpoint"] >= 5
    assert result["ended"] and all(result["ended"])


def test_a_run_that_goes_back_replaces_later_checkpoints(copied, whole):
    resumed = make_trainer(copied, make_rows(LENGTHS), **SAVING, save_total_limit=2)
    resumed.train(resume_from_checkpoint=str(copied / "checkpoint-3"))
    assert sorted(path.name for path in copied.iterdir()) == ["checkpoint-4", "checkpoint-5"]
    assert_same_weights(resumed, whole)


# Disks and damaged files


def test_a_damaged_checkpoint_is_rotated_out_before_a_whole_one(copied):
    (damaged,) = copied.glob("checkpoint-5")
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    rotate_checkpoints(copied, 4, TrainerState())
    names = sorted(path.name for path in copied.iterdir())
    assert "checkpoint-5" not in names and "checkpoint-4" in names and len(names) == 4


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt"])
def test_full_disk_names_the_file_and_leaves_the_last_checkpoint(tmp_path, whole, file):
    checkpoint = Path(whole.args.output_dir, "checkpoint-1")
    weights, failing = ((checkpoint / name).stat().st_size for name in ("model.safetensors", file))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = failing - weights // 2  # above the size of the weights if it is the optimizer's, twice theirs

    class FillDisk(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))

    trainer = make_trainer(tmp_path, make_rows(LENGTHS), callbacks=[FillDisk()], **SAVING)
    try:
        with pytest.raises(TrainingFault, match=rf"{file} could not be written.*MiB are free.*resume_from_checkpoint"):
            trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-2"]
    resumed = make_trainer(tmp_path, make_rows(LENGTHS), **SAVING)
    resumed.train(resume_from_checkpoint=True)
    assert_same_weights(resumed, whole)


def test_other_errors_while_saving_are_not_blamed_on_the_disk(tmp_path, monkeypatch):
    def fail(*args):
        raise RuntimeError("NCCL communicator was aborted")

    trainer = make_trainer(tmp_path, make_rows(LENGTHS), **SAVING)
    monkeypatch.setattr(trainer, "_save_rng_state", fail)
    with pytest.raises(RuntimeError, match="NCCL") as error:
        trainer.train()
    assert not isinstance(error.value, TrainingFault)


def test_unwritable_output_directory_is_found_before_anything_is_loaded(tmp_path):
    (tmp_path / "file").touch()
    unwritable = str(tmp_path / "file" / "head")
    with pytest.raises(UsageError, match="`output_dir` .*cannot be written to"):
        train.main(["--target", "does/not-exist", "--dataset", "none.jsonl", "--output_dir", unwritable, "--use_cpu"])
    with pytest.raises(ValueError, match="`output_dir` .*cannot be written to"):
        make_trainer(unwritable, make_rows(LENGTHS))


@pytest.mark.parametrize(
    "file", ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "config.json"]
)
def test_truncated_file_is_named_and_its_checkpoint_passed_over(copied, whole, file, caplog):
    damaged = copied / "checkpoint-5" / file
    os.truncate(damaged, damaged.stat().st_size // 2)
    args = Eagle3TrainingArguments(str(copied), resume_from_checkpoint="auto", use_cpu=True)
    assert train.resume_point(args) == str(copied / "checkpoint-4")
    assert f"checkpoint-5 is passed over: {damaged} is truncated" in caplog.text
    args.resume_from_checkpoint = str(copied / "checkpoint-5")
    with pytest.raises(UsageError, match=file):
        train.resume_point(args)
    trainer = make_trainer(copied, make_rows(LENGTHS), **SAVING)
    with pytest.raises(ValueError, match=rf"`resume_from_checkpoint`.*{file} is truncated.*auto"):
        trainer.train(resume_from_checkpoint=str(copied / "checkpoint-5"))
    if file == "optimizer.pt":
        trainer.train(resume_from_checkpoint=True)
        assert_same_weights(trainer, whole)


@pytest.mark.parametrize(("file", "reason"), [("trainer_state.json", "missing"), ("model.safetensors", "no weights")])
def test_missing_file_is_named(copied, file, reason):
    (copied / "checkpoint-5" / file).unlink()
    assert reason in damage_of(copied / "checkpoint-5")


# Steps that are not finite


class WeightsOfSteps(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.on_step_end(args, state, control, model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.seen.append({name: value.clone() for name, value in model.state_dict().items()})

    def equal(self, first, second):
        return all(torch.equal(value, self.seen[second][name]) for name, value in self.seen[first].items())


def break_states(trainer, steps):
    states = trainer._states

    def broken_states(inputs, *, keep):
        aux, teacher = states(inputs, keep=keep)
        if trainer.state.global_step in steps:
            aux[:] = torch.nan
        return aux, teacher

    trainer._states = broken_states


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch", "adamw_torch_fused"])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_step_that_is_not_finite_is_skipped_and_counted(tmp_path, optim, clip):
    """As if the step had not been: no momentum, no weight decay, no count of it in the optimizer."""
    watcher = WeightsOfSteps()
    options = {"optim": optim, "max_grad_norm": clip, "weight_decay": 0.1, "learning_rate": 0.01, "max_steps": 4}
    rows = make_rows([20] * 8)
    trainer = make_trainer(tmp_path, rows, callbacks=[watcher], gradient_accumulation_steps=2, **options)
    break_states(trainer, steps={1})
    trainer.train()
    assert [watcher.equal(step, step + 1) for step in range(4)] == [False, True, False, False]
    assert logged(trainer, "nan_steps") == [1]
    for key in ("loss", "step_0/alpha", "acceptance_length"):
        assert torch.tensor(logged(trainer, key)).isfinite().all()
    if optim != "sgd":
        assert {int(state["step"]) for state in trainer.optimizer.state_dict()["state"].values()} == {3}


def test_a_loss_that_is_not_finite_is_skipped_though_its_gradient_is(tmp_path):
    watcher = WeightsOfSteps()
    trainer = make_trainer(tmp_path, make_rows(LENGTHS), callbacks=[watcher])
    forward = trainer.model.forward

    def forward_to_infinity(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.loss = output.loss + torch.inf
        return output

    trainer.model.forward = forward_to_infinity
    trainer.train()
    assert watcher.equal(0, 1) and logged(trainer, "nan_steps") == [1]


def test_training_stops_after_a_limit_of_such_steps_in_a_row(tmp_path):
    watcher = WeightsOfSteps()
    trainer = make_trainer(tmp_path, make_rows(LENGTHS), callbacks=[watcher], max_steps=9, max_nan_steps=3)
    break_states(trainer, steps={0, 1, 3, 4, 5})  # two, and then three in a row
    with pytest.raises(TrainingFault, match="3 steps in a row .*max_nan_steps.*learning_rate"):
        trainer.train()
    assert trainer.state.global_step == 5 and watcher.equal(3, 5)
    assert all(value.isfinite().all() for value in weights_of(trainer).values())
    with pytest.raises(ValueError, match="max_nan_steps"):
        Eagle3TrainingArguments(str(tmp_path), max_nan_steps=0)


@pytest.mark.gpu
def test_skipping_does_not_make_the_host_wait():
    parameter = torch.nn.Parameter(torch.ones(8, device="cuda"))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    steps = NonFiniteSteps(limit=3)
    parameter.grad = torch.full_like(parameter, torch.nan)
    norms = torch.tensor([torch.nan, torch.nan, torch.nan], device="cuda").unbind()
    before = parameter.detach().clone()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for norm in norms:
            steps.skip(optimizer, norm)
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(parameter, before) and steps.pop_count() == 3
    with pytest.raises(TrainingFault, match="3 steps in a row"):  # read one step late
        steps.skip(optimizer, norms[0])


# Memory


def test_lack_of_memory_names_what_lowers_it(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, make_rows([9, 30]), per_device_train_batch_size=2)

    def forward(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(trainer, "_states", forward)
    with pytest.raises(torch.OutOfMemoryError) as error:
        trainer.train()
    message = str(error.value)
    assert "Tried to allocate 2.00 GiB" in message and "2 x 30 tokens, 24 of them supervised" in message
    assert "gradient_checkpointing" in message and "per_device_train_batch_size" in message and "offload" in message


def test_directories_of_a_tokenizer_give_way_to_those_of_the_next_save(tmp_path):
    for text in ("first", "second"):
        with files_moved_to(tmp_path) as unfinished:
            (unfinished / "additional_chat_templates").mkdir()
            (unfinished / "additional_chat_templates" / f"{text}.jinja").write_text(text)
    assert [path.name for path in (tmp_path / "additional_chat_templates").iterdir()] == ["second.jinja"]

"""`draftsmith train` that a signal ends while a push is under way: it does not wait for the Hub."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

from tests.commands.conftest import flags, target_dir  # noqa: F401  # fixtures

from . import hub_http


def test_a_signal_ends_a_command_that_waits_for_a_push(hub, flags, tmp_path, monkeypatch):  # noqa: F811
    stalled, released, post = threading.Event(), threading.Event(), hub_http.Handler.do_POST

    def stall(self):
        if re.search("/commit/", self.path):
            stalled.set()
            released.wait(120)
        with suppress(OSError):  # whom it answers is gone
            post(self)

    monkeypatch.setattr(hub_http.Handler, "do_POST", stall)
    saving = ["--max_steps", "2", "--save_strategy", "steps", "--save_steps", "1", "--eval_fraction", "0"]
    pushing = ["--push_to_hub", "true", "--hub_model_id", "user/head", "--hub_strategy", "every_save"]
    command = [
        sys.executable,
        "-c",
        "from draftsmith.commands import main; main()",
        "train",
        *flags,
        *saving,
        *pushing,
    ]
    with open(tmp_path / "log", "w") as log:
        run = subprocess.Popen(
            [*command, "--output_dir", str(tmp_path / "run")], stdout=log, stderr=subprocess.STDOUT, env=os.environ
        )
    try:
        assert stalled.wait(90)
        while not (tmp_path / "run" / "checkpoint-2").exists():
            time.sleep(0.1)
        time.sleep(1)  # training is over, and waits
        run.send_signal(signal.SIGTERM)
        assert run.wait(30) == 128 + signal.SIGTERM
    finally:
        released.set()
        run.kill()
    said = (tmp_path / "log").read_text()
    assert "local files are whole" in said and "go on with `--resume_from_checkpoint auto`" in said
    assert (tmp_path / "run" / "checkpoint-2" / "model.safetensors").is_file()

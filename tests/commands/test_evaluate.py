"""`draftsmith evaluate`: what it refuses before long work, and what is left when a server fails."""

import json
import sys

import pytest
from transformers import LlamaConfig

from draftsmith import Eagle3DraftConfig
from draftsmith.commands import evaluate, plan, prepare
from draftsmith.commands.arguments import TargetArguments
from draftsmith.commands.evaluation_report import Group
from draftsmith.commands.parsing import UsageError
from tests.fake_server import Answers, serving


ASKED = ["--target", "x/y", "--draft", "x/z", "--prompts", "p.jsonl"]
VLLM = ["--engine", "vllm"]
LAUNCHED = [*VLLM, "--launch", "true"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seed", "-1"], "`seed` is -1: pass 0 to 4294967295"),
        (["--seed", "99999999999"], "`seed` is 99999999999"),
        (["--temperature", "0", "1e-40"], "`temperature` has 1e-40: pass at least 0.001, or 0"),
        (["--target_dtype", "float17"], "`target_dtype` is 'float17': pass one of auto, bfloat16"),
        (["--target_adapter", "./nothere"], "`target_adapter`: ./nothere does not exist"),
        ([*VLLM, "--base_url", "localhost:8765"], "`base_url` is 'localhost:8765': add http://"),
        ([*VLLM, "--base_url", "http://localhost:99999"], "`base_url` is 'http://localhost:99999'"),
        ([*VLLM, "--base_url", ""], "`base_url` is ''"),
        ([*LAUNCHED, "--base_url", "http://example.com:1234"], "`base_url` is .* on this machine"),
        ([*LAUNCHED, "--server_flags=--a 'b"], r"`server_flags` is .* \(No closing quotation\)"),
        ([*LAUNCHED, "--server_flags=--port=81"], "`server_flags` has --port: name the port in `base_url`"),
        ([*LAUNCHED, "--server_python", "nopython"], "`server_python` is 'nopython', no program"),
        ([*LAUNCHED, "--server_python", "/"], "`server_python` is '/', no program"),
        (["--output", "/proc/x.json"], "`output`: /proc/x.json cannot be written"),
        (["--output", "/dev/null"], "`output` is /dev/null, but /dev/null would be written, which is no regular file"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_read(flags, message, monkeypatch):
    monkeypatch.setattr(evaluate, "read_prompts", None)
    with pytest.raises(UsageError, match=message):
        evaluate.main([*ASKED, *flags])


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("nothere.jsonl", "^`prompts`: nothere.jsonl does not exist"),
        ("gms8k", "^`prompts`: .*'gms8k' .*: did you mean `gsm8k`\\?"),
        ("mt_bench", "^`prompts`: .*: go online, or pass a copy: `mt_bench=file.jsonl`"),
        ("nobody/prompts", "^`prompts`: .*nobody/prompts.*: name a file, or go online"),
        ("humaneval=p.jsonl", "p.jsonl, line 1: `prompt`.*; without `humaneval=` the file is read as it is"),
    ],
)
def test_prompts_that_cannot_be_read(prompts, message, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"turns": ["What is it?"]}')
    with pytest.raises(UsageError, match=message):
        evaluate.main([*ASKED[:4], "--prompts", prompts])


def test_a_target_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = (
        r"^`target`: nobody/model is no directory and did not come from the Hub .*: name a directory, or go online"
    )
    data = ["--target", "nobody/model", "--dataset", "x.jsonl", "--output_dir", str(tmp_path / "data")]
    with pytest.raises(UsageError, match=message):
        prepare.main(data)
    with pytest.raises(UsageError, match=message):
        plan.main([*data[:2], "--gpu_memory", "80"])


@pytest.mark.parametrize("suffix", [".md", ".png"])
def test_what_goes_beside_the_result_is_checked_too(suffix, tmp_path):
    (tmp_path / f"result{suffix}").mkdir()
    with pytest.raises(UsageError, match=rf"`output` is .*result\{suffix} would be written, which is a directory"):
        evaluate.main([*ASKED, "--output", str(tmp_path / "result.json")])
    (tmp_path / f"result{suffix}").rmdir()
    with pytest.raises(UsageError, match="p.jsonl does not exist"):
        evaluate.main([*ASKED, "--output", str(tmp_path / "result.json")])
    assert not list(tmp_path.iterdir())  # the check leaves nothing


def test_prompts_beyond_the_positions_are_refused_before_weights_are_loaded(target_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(TargetArguments, "load", None)
    row = {"prompt": "again and " * 2000, "category": "endless"}
    (tmp_path / "p.jsonl").write_text(json.dumps(row))
    flags = ["--target", str(target_dir), "--draft", "x/z", "--prompts", str(tmp_path / "p.jsonl")]
    message = r"one of endless has \d{4,} tokens.*`max_new_tokens` 256.* 2048 positions"
    with pytest.raises(UsageError, match=message):
        evaluate.main(flags)


@pytest.mark.parametrize(("prompt", "new_tokens", "fits"), [(40, 24, True), (40, 25, False)])
def test_the_answer_takes_positions_too(prompt, new_tokens, fits):
    config, groups = LlamaConfig(max_position_embeddings=64), [Group("all", None, [[1], [1] * prompt])]
    if fits:
        evaluate.check_lengths(groups, config, new_tokens)
    else:
        with pytest.raises(ValueError, match="one of all has 40 tokens"):
            evaluate.check_lengths(groups, config, new_tokens)
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}  # stretched, as servers do
    evaluate.check_lengths(groups, config, new_tokens)


class Mortal(Answers):
    """Answers at temperature 0, fails at any other."""

    def do_GET(self):
        self.answer(json.dumps({"data": [{"id": "served"}]}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = {"choices": [{"text": "a"}], "usage": {"completion_tokens": 3}}
        self.answer(json.dumps(answer), 500 if body["temperature"] else 200)


@pytest.fixture
def mortal():
    with serving(Mortal) as address:
        yield address


@pytest.fixture
def asked(target_dir, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "What is it?"}\n' * 3)
    return ["--target", str(target_dir), "--prompts", str(tmp_path / "p.jsonl"), "--max_new_tokens", "4"]


def test_a_server_that_fails_at_the_second_setting_leaves_the_first(asked, mortal, tmp_path):
    output = tmp_path / "result.json"
    flags = ["--draft", "x/z", "--engine", "openai", "--base_url", mortal, "--temperature", "0", "0.7"]
    with pytest.raises(UsageError, match="answered 500"):
        evaluate.main([*asked, *flags, "--output", str(output)])
    (result,) = json.loads(output.read_text())["results"]
    assert result["temperature"] == 0 and result["total"]["new_tokens"] == 9
    assert "temperature 0" in output.with_suffix(".md").read_text()
    assert output.with_suffix(".png").exists()


def test_a_server_is_launched_at_the_port_that_is_asked_and_never_beside_another(asked, mortal, tmp_path, monkeypatch):
    Eagle3DraftConfig.from_target(LlamaConfig(num_hidden_layers=8)).save_pretrained(tmp_path / "head")
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\nimport sys, time\nprint(sys.argv[1:], flush=True)\nsys.exit(7)\n")
    program.chmod(0o755)
    flags = [*LAUNCHED, "--draft", str(tmp_path / "head"), "--server_python", str(program), "--base_url"]
    with pytest.raises(UsageError, match=f"`base_url` {mortal}: a server answers there already"):
        evaluate.main([*asked, *flags, mortal])
    monkeypatch.setattr("draftsmith.serving.servers.DEFAULT_PORT", 18_431)
    with pytest.raises(UsageError, match=r"status 7 (.|\n)*'--port', '18431'"):
        evaluate.main([*asked, *flags, "http://localhost"])

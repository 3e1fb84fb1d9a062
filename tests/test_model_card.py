"""What a run records, the card that it becomes, and what the Hub would refuse of one."""

import errno
import json
import os
import re
import shlex
from dataclasses import replace
from importlib import resources

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import model_index_to_eval_results
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

from draftsmith import Eagle3DraftModel, Eagle3TrainingArguments
from draftsmith.commands import card, evaluate, main
from draftsmith.commands.arguments import DraftArguments, TargetArguments
from draftsmith.commands.evaluation_report import Group, Report, write_report
from draftsmith.commands.parsing import UsageError, parse
from draftsmith.data.vocabulary import build_vocabulary_map
from draftsmith.model_card import (
    LICENSES,
    License,
    RunRecord,
    Source,
    check_card,
    device_counts,
    library_versions,
    render_card,
    training_recipe,
)
from draftsmith.model_card.metadata import TOKEN as TOKEN_PATTERN
from draftsmith.model_card.rendering import is_unedited
from draftsmith.serving.servers import launch_command
from draftsmith.speculative import Acceptance
from tests.data.common import CHATML, build_tokenizer, chat
from tests.tiny_models import tiny_config, tiny_model


TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
REVISION = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
TOKEN = "hf_" + "Ab3" * 12


def make_head(directory, draft_vocab_size=40, **options):
    target = tiny_model("llama")
    d2t = build_vocabulary_map(torch.arange(target.config.vocab_size), draft_vocab_size, target.config.vocab_size)
    Eagle3DraftModel.from_target(target, d2t=d2t, aux_layer_ids=(1, 2, 3), **options).save_pretrained(directory)
    return directory


@pytest.fixture
def head(tmp_path):
    return make_head(tmp_path / "head")


@pytest.fixture
def record():
    return RunRecord(
        target=Source(TARGET, revision=REVISION),
        target_precision="bfloat16",
        datasets=[Source("HuggingFaceH4/ultrachat_200k", split="train_sft", rows=1000)],
        seed=7,
        target_vocab_size=96,
        draft_vocab_size=40,
        coverage=0.98765,
        recipe={"ttt_steps": 3, "learning_rate": 1e-4, "packing": True},
        devices={"NVIDIA H200": 8},
        hours=1.25,
        tokens_per_second=12345.6,
        tokens_seen=1_000_000,
        train_metrics={"loss": 1.5, "step_0/accuracy": 0.75, "grad_norm": 3.0},
        eval_metrics={"eval_loss": 1.6, "eval_runtime": 9.0},
        versions={"torch": "2.13.0"},
    )


def evaluation_of(path, *, engine="hf", categories=("math", "chat | misc"), counted=True, **sources):
    """The JSON, table and plot of an evaluation, as `draftsmith evaluate` writes them."""
    settings = {
        "target": TARGET,
        "target_kind": "hub",
        **sources,
        "prompts": ["mt_bench", "gsm8k=/secret/place/gsm8k.jsonl", "/secret/place/mine.jsonl"],
        "num_prompts": 4,
        "max_new_tokens": 64,
        "batch_size": 2,
        "seed": 42,
        "engine": engine,
        "output": str(path),
    }
    report = Report(settings)
    groups = [Group(category, None) for category in categories]
    accepted = [2, 2, 2, 1, 2, 2, 1, 2, 2, 2, 1]
    counts = [Acceptance(3, [2] * 11, accepted, [12, 5, 2], prompts=11, new_tokens=43, seconds=2.0) for _ in groups]
    if not counted:
        counts = [Acceptance(3, [], [], prompts=2, new_tokens=43, seconds=2.0) for _ in groups]
    for temperature in (0.0, 0.7):
        report.add(3, temperature, groups, counts, 11.5)
    write_report(report, path)
    return path


def front_matter(text):
    return yaml.safe_load(text.split("---\n")[1])


def run(*flags):
    main(["card", *map(str, flags)])


def card_of(head, *flags):
    run("--draft", head, *flags)
    text = (head / "README.md").read_text()
    check_card(text)
    assert not re.search(r"\bNone\b|\bnan\b|Undefined|\{\{|\{%", text)
    lines = text.splitlines()
    for before, line in zip(lines, lines[1:], strict=False):  # Markdown takes a table for text unless it stands apart
        assert not line.startswith("|") or before == "" or before.startswith("|")
    return text


class TestSource:
    def test_hub_ids_local_paths_and_data_in_memory(self, tmp_path, monkeypatch):
        (tmp_path / "chats").mkdir()
        monkeypatch.chdir(tmp_path)
        assert Source.of(TARGET, revision="main") == Source(TARGET, "hub", "main")
        assert Source.of("gpt2").kind == "hub"
        for path in (tmp_path / "chats", str(tmp_path / "chats") + "/", "chats", "./chats", "/nowhere/chats"):
            assert Source.of(path) == Source("chats", "local")
        assert Source.of(".") == Source(tmp_path.name, "local")
        for path in ("data/*.parquet", "~/x/a.jsonl", "a.jsonl", "data/a.json.gz"):
            assert Source.of(path) == Source(path.split("/")[-1], "local")
        assert Source.of("a.jsonl", revision="main", split="train", rows=2) == Source("a.jsonl", "local", rows=2)
        assert Source.of("") == Source.of(None) == Source("in-memory data", "memory")
        assert Source.of([{"input_ids": [1]}], rows=1) == Source("in-memory data", "memory", rows=1)

    def test_a_snapshot_in_the_cache_is_its_repository(self):
        path = f"/root/.cache/huggingface/hub/models--HuggingFaceTB--SmolLM2-135M-Instruct/snapshots/{REVISION}"
        assert Source.of(path, revision="main") == Source(TARGET, "hub", REVISION)
        assert Source.of(f"{path}/model.gguf") == Source(TARGET, "hub", REVISION)


class TestRunRecord:
    def test_round_trip(self, tmp_path, record):
        record.save(tmp_path)
        assert RunRecord.load(tmp_path) == record
        assert [path.name for path in tmp_path.iterdir()] == ["run.json"]

    def test_unknown_figures_are_absent(self, tmp_path):
        RunRecord(target=Source("m", "local"), hours=float("nan"), eval_metrics={"eval_loss": float("inf")}).save(
            tmp_path
        )
        assert json.loads((tmp_path / "run.json").read_text()) == {"target": {"name": "m", "kind": "local"}}
        assert RunRecord.load(tmp_path) == RunRecord(target=Source("m", "local"))

    @pytest.mark.parametrize(
        "text",
        [
            '{"seed": 7, "hou',
            "[]",
            "null",
            '{"seed": "seven"}',
            '{"seed": true}',
            '{"hours": "1"}',
            '{"sead": 7}',
            '{"target": "gpt2"}',
            '{"target": {"kind": "hub"}}',
            '{"datasets": [1]}',
            '{"devices": {"H200": "8"}}',
            '{"recipe": {"vocab_map": "/home/me/map.pt"}}',
            '{"target": {"name": "a/b", "kind": "weird"}}',
            '{"target": {"name": ""}}',
            '{"coverage": 3}',
            '{"hours": -1}',
            '{"license": {"identifier": "foo"}}',
        ],
    )
    def test_damaged_records_are_refused(self, tmp_path, text):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(ValueError, match=r"run\.json can't be used: .+\. Write it anew"):
            RunRecord.load(tmp_path)

    def test_a_record_that_is_not_there(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            RunRecord.load(tmp_path)

    @pytest.mark.parametrize(
        "value", ["/data/map.pt", "~/map.pt", "../map.pt", "C:\\map.pt", "see /data/map.pt", TOKEN]
    )
    def test_paths_and_tokens_are_refused_and_nothing_is_written(self, tmp_path, value):
        with pytest.raises(ValueError, match="`recipe.vocab_map`") as error:
            RunRecord(recipe={"vocab_map": value}).save(tmp_path)
        assert TOKEN not in str(error.value) and not list(tmp_path.iterdir())

    def test_a_failed_write_leaves_the_old_record(self, tmp_path, record):
        record.save(tmp_path)
        with pytest.raises(TypeError):
            RunRecord(recipe={"x": object()}).save(tmp_path)
        assert RunRecord.load(tmp_path) == record and len(list(tmp_path.iterdir())) == 1

    def test_what_the_training_arguments_tell(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        args = Eagle3TrainingArguments(str(tmp_path), max_steps=5, use_cpu=True, hub_token=TOKEN, report_to="none")
        recipe = training_recipe(args, max_length=64, packing=True)
        assert recipe["ttt_steps"] == 7 and recipe["max_steps"] == 5 and "num_train_epochs" not in recipe
        assert recipe["optim"].startswith("adamw") and recipe["lr_scheduler_type"] == "linear"
        assert recipe["world_size"] == 1 and recipe["max_length"] == 64 and "output_dir" not in recipe
        record = RunRecord(recipe=recipe, devices=device_counts(args), versions=library_versions())
        record.save(tmp_path)
        assert RunRecord.load(tmp_path) == record
        assert TOKEN not in (tmp_path / "run.json").read_text()
        assert record.versions["torch"] and record.versions["transformers"] and list(record.devices.values()) == [1]


class TestCheckCard:
    @pytest.mark.parametrize("identifier", sorted(LICENSES - {"other"}))
    def test_licenses_of_the_hub(self, identifier):
        check_card(f"---\nlicense: {identifier}\n---\n")

    @pytest.mark.parametrize(
        ("metadata", "message"),
        [
            ("license: foo", "`license` is 'foo'.*pass one of"),
            ("license: Apache-2.0", "`license` is 'Apache-2.0'"),
            ("license: 3", "`license` is 3"),
            ("license: other", "`license_name` and `license_link`"),
            ("license: other\nlicense_name: mine\nlicense_link: legal.pdf", "`license_link` is 'legal.pdf'"),
            ("license: mit\nlicense_name: mine", "belong to `license` other"),
            ("license: null", "`license` is None: leave out"),
            ("tags:\n- a\n- null", r"`tags\[1\]` is None"),
            ("x: {y: ~}", r"`x\.y` is None"),
            ("x: .nan", "`x` is nan"),
            ("base_model: /data/llama", "`base_model` is '/data/llama', a path"),
            ("base_model: ./llama", "`base_model` is './llama', a path"),
            ("base_model: a/b/c", "`base_model` is 'a/b/c', no id of the Hub: write `owner/name`"),
            ("base_model: 3", "`base_model` is 3"),
            ("datasets: [x/y, chats.jsonl]", "`datasets` is 'chats.jsonl'"),
            ("datasets:\n- ~/chats", "a path of this machine"),
            ("x: file:///data", "a path of this machine"),
            ("model-index: 3", "`model-index` is 3"),
            ("model-index: [{name: x, results: [{task: {type: t}}]}]", "`model-index` .*can't read"),
            ("- a", "one `field: value` a line"),
            ("a: [", "not valid YAML"),
        ],
    )
    def test_what_the_hub_would_refuse(self, metadata, message):
        with pytest.raises(ValueError, match=message):
            check_card(f"---\n{metadata}\n---\n# Head\n")

    def test_a_card_without_metadata(self):
        with pytest.raises(ValueError, match="has no metadata"):
            check_card("# Head\n")

    def test_a_token_is_refused_and_not_repeated(self):
        with pytest.raises(ValueError, match="access token") as error:
            check_card(f"---\nlicense: mit\n---\nexport HF_TOKEN={TOKEN}\n")
        assert TOKEN not in str(error.value)

    def test_what_it_takes(self):
        check_card("---\nlicense: other\nlicense_name: mine\nlicense_link: https://x.org/license\n---\n")
        check_card("---\nlicense: [mit, apache-2.0]\nbase_model: [gpt2, x/y]\ndatasets: x/y\nlanguage: en\n---\n")
        check_card("---\nx: http://a.org/b\ny: tokens/s, 1/2\n---\nrun it from /data\n")


class TestCard:
    def test_first_lines_say_what_loads_the_head(self, head, record):
        record.save(head)
        text = card_of(head)
        opening = text.split("---\n")[2].split("## ")[0]
        assert opening.startswith("\n# head\n\nA draft head of EAGLE-3") and len(opening.strip().splitlines()) <= 8
        for name in ("vLLM", "SGLang", "`Eagle3DraftModel.from_pretrained`", "`AutoModel`", "untrained Llama", TARGET):
            assert name in opening

    def test_the_run_is_on_it(self, head, record):
        record.save(head)
        text = card_of(head, "--license", "apache-2.0", "--repo_id", "me/tiny-head")
        for figure in (
            f"[{TARGET}](https://huggingface.co/{TARGET}), revision `{REVISION}`", "| precision | bfloat16 |",
            "40 of the target's 96 tokens, which are 98.77% of the supervised", "| `ttt_steps` | 3 |",
            "| `learning_rate` | 0.0001 |", "| `packing` | yes |", "| seed | 7 |", "| `loss` | 1.5 | 1.6 |",
            "| `step_0/accuracy` | 0.75 |  |", "split `train_sft`, 1,000 rows", "| devices | 8 × NVIDIA H200 |",
            "| hours | 1.25 |", "| tokens per second | 12,346 |", "| tokens seen | 1,000,000 |", "- torch 2.13.0",
            "# tiny-head", "--draft me/tiny-head", "--ttt_steps 3", "arxiv.org/abs/2503.01840", "Not measured.",
            f'revision="{REVISION}"',
        ):  # fmt: skip
            assert figure in text, figure
        assert "grad_norm" not in text and "runtime" not in text
        assert front_matter(text) == {
            "library_name": "draftsmith",
            "license": "apache-2.0",
            "base_model": TARGET,
            "base_model_relation": "adapter",
            "datasets": ["HuggingFaceH4/ultrachat_200k"],
            "pipeline_tag": "text-generation",
            "tags": ["eagle3", "speculative-decoding", "draft-model", f"base_model:adapter:{TARGET}"],
        }

    def test_nothing_local_is_in_the_metadata(self, head, tmp_path):
        (tmp_path / "target").mkdir()
        sources = [Source.of(tmp_path / "chats.jsonl", rows=5), Source.of([{}], rows=2)]
        RunRecord(target=Source.of(str(tmp_path / "target")), datasets=sources).save(head)
        text = card_of(head)
        assert front_matter(text) == {
            "library_name": "draftsmith",
            "pipeline_tag": "text-generation",
            "tags": ["eagle3", "speculative-decoding", "draft-model"],
        }
        assert str(tmp_path) not in text
        for line in ("`target` (a local copy)", "`chats.jsonl` (a local file), 5 rows", "in-memory data, 2 rows"):
            assert line in text

    def test_without_a_record_only_the_config_and_the_target_are_known(self, head):
        text = card_of(head, "--target", TARGET)
        headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
        assert headings == ["Target", "Acceptance", "Head", "Limits", "Serve", "Load", "Continue training", "Citation"]

    @pytest.mark.parametrize(
        ("options", "present", "absent"),
        [
            ({"sliding_window": 5}, "--speculative-draft-window-size 4", "norms of EAGLE-3.1"),
            (
                {"norm_output": True, "fc_norm": True},
                "| norms of EAGLE-3.1 | fc_norm, norm_output |",
                "sliding window",
            ),
            ({"draft_vocab_size": None}, "It proposes all 96 tokens of the target.", "supervised tokens"),
            (
                {"hidden_act": "gelu"},
                "does not serve this head as it was trained, because of `hidden_act`",
                "## Serve",
            ),
            ({"attention_bias": True}, "SGLang 0.5.23 does not serve", "sglang.launch_server"),
        ],
    )
    def test_options_of_the_head(self, tmp_path, options, present, absent):
        vocabulary = {} if "draft_vocab_size" not in options else {"draft_vocab_size": options.pop("draft_vocab_size")}
        text = card_of(make_head(tmp_path / "head", **vocabulary, **options), "--target", TARGET)
        assert present in text and absent not in text

    def test_refused_servers_are_not_said_to_load_it(self, tmp_path):
        text = card_of(make_head(tmp_path / "head", hidden_act="gelu"), "--target", TARGET)
        assert "**What loads it:** `Eagle3DraftModel.from_pretrained`" in text

    def test_commands_are_those_that_evaluation_launches(self, tmp_path):
        head = make_head(tmp_path / "head", sliding_window=5)
        result = evaluation_of(tmp_path / "result.json")
        text = card_of(head, "--evaluation", result, "--repo_id", "me/tiny-head")
        commands = [shlex.split(line) for line in text.splitlines() if line.startswith("python -m ")]
        flags = {"vllm": [], "sglang": ["--speculative-draft-window-size", "4"]}
        assert commands == [launch_command(name, TARGET, "me/tiny-head", 3, flags=flags[name]) for name in flags]
        sglang = " ".join(commands[1])
        for flag in ("num-steps 3", "eagle-topk 1", "num-draft-tokens 4"):
            assert f"--speculative-{flag}" in sglang

    def test_the_evaluation_is_on_it(self, head, tmp_path, record):
        record.save(head)
        text = card_of(head, "--evaluation", evaluation_of(tmp_path / "result.json"))
        assert "/secret" not in text and str(tmp_path) not in text
        for line in (
            "prompts of mt_bench, gsm8k (a local copy), mine.jsonl, at most 4 of each category; at most 64 new tokens",
            "**3 draft tokens, temperature 0.7**: acceptance length 1.864 (95%: ",
            "in 44 verifications; 21.5 tokens/s, 11.5 without the head",
            "| math | 11 | 1.864 |", "| chat \\| misc | 11 |", "| all prompts | 22 |",
            " 0.545 | 0.227 | 0.091 | 21.5 |",
            "![result](result.png)", "no other temperature than 0, 0.7 and no other server", "trees were not measured",
        ):  # fmt: skip
            assert line in text, line
        assert (head / "result.png").read_bytes() == (tmp_path / "result.png").read_bytes()

    def test_model_index_is_what_huggingface_hub_reads(self, head, tmp_path):
        text = card_of(head, "--evaluation", evaluation_of(tmp_path / "result.json"))
        name, results = model_index_to_eval_results(front_matter(text)["model-index"])
        assert name == "head" and results == ModelCard(text).data.eval_results and len(results) == 6
        first = results[0]
        assert (first.task_type, first.dataset_name, first.metric_type) == (
            "text-generation",
            "math",
            "acceptance_length",
        )
        assert first.metric_value == pytest.approx(1 + 19 / 22, abs=1e-4)
        assert first.metric_args == {"num_draft_tokens": 3, "temperature": 0.0, "max_new_tokens": 64, "engine": "hf"}
        assert {result.dataset_type for result in results} == {"math", "chat-misc", "all-prompts"}
        assert str(ModelCard(text)) == text

    def test_a_server_that_does_not_count(self, head, tmp_path):
        result = evaluation_of(tmp_path / "result.json", engine="openai", categories=("math",), counted=False)
        text = card_of(head, "--evaluation", result)
        assert "model-index" not in text and "| math | 2 | not counted |  |  |  |  | 21.5 |" in text

    def test_several_evaluations(self, head, tmp_path):
        files = [evaluation_of(tmp_path / f"{engine}.json", engine=engine) for engine in ("hf", "vllm")]
        text = card_of(head, "--evaluation", *files)
        assert "with draftsmith on transformers and vLLM:" in text and len(ModelCard(text).data.eval_results) == 12
        assert "](hf.png)" in text and "](vllm.png)" in text

    def test_a_token_in_the_environment_appears_nowhere(self, head, record, monkeypatch, capsys):
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        record.save(head)
        assert TOKEN not in card_of(head) + capsys.readouterr().out + (head / "run.json").read_text()

    def test_the_renderer_needs_a_target(self, head):
        with pytest.raises(ValueError, match="`record` has no `target`"):
            render_card(json.loads((head / "config.json").read_text()), RunRecord(), name="head")

    def test_a_target_in_memory_needs_a_name(self, head):
        RunRecord(target=Source.of("")).save(head)
        with pytest.raises(UsageError, match="`target` is not known"):
            card.main(["--draft", str(head)])
        assert front_matter(card_of(head, "--target", TARGET))["base_model"] == TARGET


def changed(path, part, name, value):
    """The evaluation in `path` with one field changed, or, by `...`, gone."""
    evaluation = json.loads(path.read_text())
    values = evaluation
    for key in part:
        values = values[key]
    values.pop(name) if value is ... else values.update({name: value})
    path.write_text(json.dumps(evaluation))
    return path


class TestTargetsOptions:
    """What the target was loaded with is in every command and in the Python of a card."""

    def record(self, **options):
        target = Source(TARGET, revision=REVISION)
        return RunRecord(target=target, target_precision="float16", recipe={"ttt_steps": 3}, **options)

    def test_servers(self, head):
        self.record(trust_remote_code=True).save(head)
        commands = [shlex.split(line) for line in card_of(head).splitlines() if line.startswith("python -m ")]
        flags = ["--revision", REVISION, "--dtype", "float16", "--trust-remote-code"]
        assert commands == [launch_command(name, TARGET, "head", 3, flags=flags) for name in ("vllm", "sglang")]

    def test_our_commands_and_python(self, head):
        self.record(target_adapter=Source("me/lora"), target_gguf_file="a b.gguf", trust_remote_code=True).save(head)
        text = card_of(head)
        words = (
            f"--target {TARGET} --target_revision {REVISION} --target_adapter me/lora --target_gguf_file 'a b.gguf' "
            "--target_dtype float16 --trust_remote_code true"
        )
        assert f"draftsmith evaluate --draft head {words} --prompts" in text
        assert f"draftsmith train --draft head {words} --dataset chats.jsonl --ttt_steps 3" in text
        assert (
            f'from_pretrained("{TARGET}", revision="{REVISION}", gguf_file="a b.gguf", dtype="float16", '
            "trust_remote_code=True)"
        ) in text
        assert 'target = PeftModel.from_pretrained(target, "me/lora")' in text and "from peft import PeftModel" in text
        assert "--lora-modules tuned=me/lora" in text and "the GGUF file `a b.gguf`" in text

    def test_the_flags_are_those_of_the_commands(self, head):
        self.record(target_adapter=Source("me/lora"), target_gguf_file="x.gguf", trust_remote_code=True).save(head)
        words = re.search("draftsmith train (.*)--dataset", card_of(head))[1]
        args, _ = parse((TargetArguments, DraftArguments), shlex.split(words))
        assert (args.target_revision, args.target_adapter, args.target_gguf_file) == (REVISION, "me/lora", "x.gguf")
        assert args.target_dtype == "float16" and args.trust_remote_code is True

    def test_without_an_evaluation_as_many_tokens_are_drafted_as_were_trained(self, head):
        self.record().save(head)
        assert '"num_speculative_tokens": 3' in card_of(head)

    @pytest.mark.parametrize("name", ["my head (v2)", "head;touch x", "$(touch x)", "a'b"])
    def test_names_are_quoted_for_the_shell(self, tmp_path, name):
        head = make_head(tmp_path / name)
        text = card_of(head, "--target", TARGET)
        commands = re.findall("(draftsmith (?:evaluate|train) .*?)(?:`| measures|$)", text, re.MULTILINE)
        assert len(commands) == 2
        for command in commands:
            words = shlex.split(command)
            assert words[words.index("--draft") + 1] == name

    def test_the_python_of_a_card_with_precision_and_adapter_runs(self, tmp_path, head, monkeypatch):
        target = tiny_model("llama")
        target.save_pretrained(tmp_path / "target")
        get_peft_model(target, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "lora")
        record = RunRecord(Source("target", "local"), "bfloat16", target_adapter=Source("lora", "local"))
        record.save(head)
        monkeypatch.chdir(tmp_path)
        scope = {"input_ids": torch.tensor([[5, 6, 7]])}
        exec(re.search(r"```python\n(.*?)```", card_of(head), re.DOTALL)[1], scope)
        assert scope["target"].dtype == torch.bfloat16 and "lora" in str(scope["target"]).lower()
        assert scope["sequences"].shape[1] > 3


class TestEvaluations:
    @pytest.mark.parametrize(
        ("part", "name", "value", "message"),
        [
            (["results", 0], "total", {}, r"lacks `results\[0\].total.prompts`"),
            (["results", 0], "categories", None, r"lacks `results\[0\].categories`"),
            (["results", 1], "num_draft_tokens", "3", r"has `results\[1\].num_draft_tokens` '3', not a count"),
            (["results", 0], "num_draft_tokens", 2, r"has 3 `results\[0\].total.rates`, but 2 draft tokens"),
            (["results", 0], "temperature", "hot", r"has `results\[0\].temperature` 'hot', not a number"),
            (["results", 0, "total"], "rates", ..., r"lacks `results\[0\].total.rates`"),
            (["results", 0, "total"], "interval", [1], r"has `results\[0\].total.interval` \[1\]"),
            (
                ["results", 0, "categories", "math"],
                "acceptance_length",
                float("nan"),
                "has .*math.acceptance_length` nan",
            ),
            (["settings"], "engine", "trt", "has `settings.engine` 'trt', none of"),
            (["settings"], "prompts", "gsm8k", "has `settings.prompts` 'gsm8k'"),
            (["settings"], "target", None, "has `settings.target` None, not text"),
        ],
    )
    def test_damaged_ones_are_named_by_file_and_field(self, head, tmp_path, part, name, value, message):
        path = changed(evaluation_of(tmp_path / "result.json"), part, name, value)
        with pytest.raises(UsageError, match=rf"`evaluation`: .*result\.json {message}.*: name what `draftsmith eval"):
            card.main(["--draft", str(head), "--target", TARGET, "--evaluation", str(path)])
        assert not (head / "README.md").exists()

    @pytest.mark.parametrize("target", ["models/llama", "llama"])
    @pytest.mark.parametrize("kind", ["local", None])
    def test_a_relative_path_is_no_id_of_the_hub(self, head, tmp_path, target, kind):
        path = evaluation_of(tmp_path / "result.json", target=target, target_kind=kind or "local")
        if kind is None:  # as earlier versions wrote it
            changed(path, ["settings"], "target_kind", ...)
        text = card_of(head, "--evaluation", path)
        assert "base_model" not in front_matter(text) and "`llama` (a local copy)" in text

    def test_a_target_of_the_hub_keeps_its_revision(self, head, tmp_path):
        path = evaluation_of(tmp_path / "result.json", target_revision=REVISION)
        assert f"--revision {REVISION}" in card_of(head, "--evaluation", path)

    @pytest.mark.parametrize(
        ("sources", "flags", "is_other"),
        [
            ({"draft": "someone/other-head", "draft_kind": "hub"}, [], True),
            ({"draft": "/elsewhere/other"}, [], True),
            ({"draft": "someone/head", "draft_kind": "hub"}, ["--repo_id", "me/head"], True),
            ({"draft": "/elsewhere/head/"}, [], False),
            ({"draft": "runs/head"}, ["--repo_id", "me/first"], False),
            ({"draft": "me/first", "draft_kind": "hub"}, ["--repo_id", "me/first"], False),
        ],
    )
    def test_those_of_another_head_are_refused(self, head, tmp_path, sources, flags, is_other):
        arguments = ["--draft", str(head), "--evaluation", str(evaluation_of(tmp_path / "result.json", **sources))]
        if not is_other:
            card.main([*arguments, *flags])
            return
        with pytest.raises(UsageError, match=r"is of the head .*(other|someone/head).*, but the card is of .*head"):
            card.main([*arguments, *flags])

    def test_queries_and_passwords_of_urls_are_not_told(self, head, tmp_path):
        url = "https://me:s3cret@host.org/sets/z.jsonl?X-Amz-Signature=abc"
        path = evaluation_of(tmp_path / "result.json", categories=(url,))
        changed(path, ["settings"], "prompts", [url, f"gsm8k={url}"])
        text = card_of(head, "--evaluation", path)
        assert "Signature" not in text and "s3cret" not in text and "prompts of z.jsonl, gsm8k (a local copy)" in text
        assert Source.of(url, rows=3) == Source("z.jsonl", "local", rows=3)


class TestCommand:
    def test_license_and_id_are_those_of_the_run(self, head, record, capsys):
        replace(record, repo_id="me/first", license=License("mit")).save(head)
        text = card_of(head)
        assert front_matter(text)["license"] == "mit" and "# first\n" in text and '"model": "me/first"' in text
        assert "names no license" not in capsys.readouterr().out
        text = card_of(head, "--license", "apache-2.0", "--repo_id", "me/second")
        assert front_matter(text)["license"] == "apache-2.0" and '"model": "me/second"' in text

    def test_a_full_disk_is_named_and_leaves_the_old_card(self, head, monkeypatch):
        first = card_of(head, "--target", TARGET)

        def full(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr("draftsmith.data.files.synchronize", full)
        with pytest.raises(UsageError, match=r"README\.md can't be written, the disk is full: make room"):
            card.main(["--draft", str(head), "--target", TARGET, "--license", "mit"])
        assert (head / "README.md").read_text() == first

    def test_a_card_is_written_again_but_not_over_others(self, head):
        first = card_of(head, "--target", TARGET)
        assert is_unedited(first)
        card_of(head, "--target", TARGET, "--license", "mit")
        (head / "README.md").write_text(first.replace("# head", "# My head"))
        with pytest.raises(SystemExit):
            run("--draft", head, "--target", TARGET)
        assert "# My head" in (head / "README.md").read_text()
        assert "# head" in card_of(head, "--target", TARGET, "--overwrite", "true")

    def test_a_plot_is_not_written_over_another(self, head, tmp_path):
        (head / "result.png").write_bytes(b"mine")
        with pytest.raises(UsageError, match=r"`output`: .*result\.png would be overwritten"):
            card.main(["--draft", str(head), "--evaluation", str(evaluation_of(tmp_path / "result.json"))])
        assert (head / "result.png").read_bytes() == b"mine" and not (head / "README.md").exists()

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--license", "foo"], "`license` is 'foo'"),
            (["--license_name", "mine"], "belong to `license` other: give that"),
            (["--repo_id", "/data/head"], "`repo_id` is '/data/head'"),
            (["--repo_id", "head"], "pass `owner/name`"),
            (["--output", "/nowhere/README.md"], "`output`: the directory"),
            (["--evaluation", "/nowhere/result.json"], r"result\.json can't be read"),
            (["--evaluation", "a/x.json", "b/x.json"], "`evaluation` has two files of one name"),
            (["--target", "/nowhere/llama"], "`target`: /nowhere/llama does not exist"),
            ([], "`target` is not known"),
        ],
    )
    def test_errors_come_before_anything_is_written(self, head, flags, message):
        before = sorted(path.name for path in head.iterdir())
        with pytest.raises(UsageError, match=message):
            card.main(["--draft", str(head), *flags])
        assert sorted(path.name for path in head.iterdir()) == before

    def test_what_is_no_head_or_no_evaluation(self, head, tmp_path):
        with pytest.raises(UsageError, match=r"neither config\.json nor adapter_config\.json"):
            card.main(["--draft", str(tmp_path)])
        whole = json.loads(evaluation_of(tmp_path / "result.json").read_text())
        for part, lacking in (
            ({}, "`settings` and `results`"),
            ([1], "`settings` and `results`"),
            ({**whole, "results": []}, "any result"),
            ({**whole, "settings": {}}, "`settings.target`"),
            ({**whole, "results": [{"num_draft_tokens": 3}]}, r"`results\[0\].temperature`"),
        ):
            (tmp_path / "other.json").write_text(json.dumps(part))
            with pytest.raises(UsageError, match=f"`evaluation`: .*other.json lacks {lacking}: name what"):
                card.main(["--draft", str(head), "--evaluation", str(tmp_path / "other.json")])
        (head / "run.json").write_text("{")
        with pytest.raises(UsageError, match=r"run\.json can't be used"):
            card.main(["--draft", str(head), "--target", TARGET])

    def test_an_evaluation_with_another_target(self, head, tmp_path, record):
        record.save(head)
        result = evaluation_of(tmp_path / "result.json", target="Qwen/Qwen3-8B")
        with pytest.raises(UsageError, match=f"different targets, {TARGET} and Qwen/Qwen3-8B"):
            card.main(["--draft", str(head), "--evaluation", str(result)])
        assert front_matter(card_of(head, "--evaluation", result, "--target", TARGET))["base_model"] == TARGET


def test_adapter_card(tmp_path, head, record):
    target = tiny_model("llama")
    draft = Eagle3DraftModel.from_pretrained(head, target=target)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], modules_to_save=["fc"])
    get_peft_model(draft, config).save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "README.md").unlink()  # PEFT's own, which names local paths
    record.draft = Source.of("me/base-head")
    record.save(tmp_path / "adapter")
    text = card_of(tmp_path / "adapter", "--license", "mit", "--evaluation", evaluation_of(tmp_path / "result.json"))
    metadata = front_matter(text)
    assert metadata["base_model"] == "me/base-head" and metadata["base_model_relation"] == "adapter"
    assert {"peft", "lora", "eagle3"} <= set(metadata["tags"]) and metadata["library_name"] == "draftsmith"
    for line in (
        "A LORA adapter of the draft head [me/base-head](https://huggingface.co/me/base-head)", "| rank | 2 |",
        "| adapted layers | q_proj, v_proj |", "| trained whole | fc |", "export --draft adapter --merge true",
        'PeftModel.from_pretrained(draft, "adapter")', "ultrachat_200k", "acceptance length 1.864", "untrained Llama",
    ):  # fmt: skip
        assert line in text, line
    assert str(tmp_path) not in text and "launch_server" not in text


def test_adapter_card_of_a_local_head_that_only_the_adapter_names(tmp_path, head):
    draft = Eagle3DraftModel.from_pretrained(head, target=tiny_model("llama"))
    get_peft_model(draft, LoraConfig(target_modules=r".*\.[qk]_proj")).save_pretrained(tmp_path / "adapter")
    text = card_of(tmp_path / "adapter", "--target", TARGET, "--overwrite", "true")
    assert "base_model" not in front_matter(text) and "`head` (a local copy)" in text and str(tmp_path) not in text


def test_loading_as_the_card_says(tmp_path, head, monkeypatch):
    """The Python of a card runs, with a target beside it."""
    target = tiny_model("llama")
    target.save_pretrained(tmp_path / "target")
    RunRecord(target=Source.of(tmp_path / "target")).save(head)
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(.*?)```", card_of(head), re.DOTALL)[1]
    scope = {"input_ids": torch.tensor([[5, 6, 7]])}
    exec(code, scope)
    assert isinstance(scope["target"], LlamaForCausalLM) and scope["sequences"].shape[1] > 3
    get_peft_model(
        Eagle3DraftModel.from_pretrained(head, target=target), LoraConfig(target_modules=["fc"])
    ).save_pretrained(tmp_path / "adapter")
    text = card_of(tmp_path / "adapter", "--target", "target", "--overwrite", "true")
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], scope)
    assert isinstance(scope["draft"], Eagle3DraftModel)


def test_from_a_real_evaluation_to_the_card(tmp_path):
    tokenizer = build_tokenizer(CHATML)
    config = tiny_config("llama", vocab_size=len(tokenizer) + 5, eos_token_id=tokenizer.eos_token_id)
    torch.manual_seed(0)
    target = LlamaForCausalLM(config)
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    Eagle3DraftModel.from_target(target, aux_layer_ids=(1, 2, 3)).save_pretrained(tmp_path / "head")
    rows = [{"messages": chat(f"What is {n}?", f"It is {n}.")} for n in range(4)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = evaluate.main([
        *("--target", str(tmp_path / "target"), "--draft", str(tmp_path / "head"), "--max_new_tokens", "6"),
        *("--prompts", str(tmp_path / "chats.jsonl"), "--num_draft_tokens", "2", "--length_buckets", "64"),
        *("--output", str(tmp_path / "result.json")),
    ])  # fmt: skip
    text = card_of(tmp_path / "head", "--evaluation", tmp_path / "result.json")
    assert str(tmp_path) not in text and "`target` (a local copy)" in text and "base_model" not in front_matter(text)
    assert f"acceptance length {report.results[0].total.acceptance_length:.3f}" in text
    assert "| chats | 4 |" in text and "| up to 64 tokens | 4 |" in text and "prompts of chats.jsonl;" in text


def test_templates_are_in_the_package():
    folder = resources.files("draftsmith") / "model_cards"
    assert {"draft_model_card.md", "adapter_card.md"} <= {path.name for path in folder.iterdir()}


def test_license_is_checked_when_it_is_made():
    with pytest.raises(ValueError, match="`license` is 'foo'"):
        License("foo")


def test_nothing_accepted_is_zero_and_not_unknown(head, tmp_path):
    path = evaluation_of(tmp_path / "result.json", categories=("math",))
    evaluation = json.loads(path.read_text())
    for result in evaluation["results"]:
        for counts in (result["total"], result["categories"]["math"]):
            counts |= {"accepted": [0] * 11, "accepted_per_position": [0] * 3, "rates": [0.0] * 3}
            counts |= {"acceptance_length": 1.0, "interval": [1.0, 1.0]}
    path.write_text(json.dumps(evaluation))
    row = "| math | 11 | 1.000 | 1.000 to 1.000 | 0.000 | 0.000 | 0.000 | 21.5 |"
    assert row in card_of(head, "--evaluation", path, "--target", TARGET)


@pytest.mark.parametrize(
    ("text", "is_token"),
    [
        (TOKEN, True),
        (f"\\n{TOKEN}", True),  # as escaped text has it
        ("hf_" + "a" * 34, True),
        ("user/hf_transformersEagle3DraftHead", False),
        ("hf_eagle3-draft-head-for-a-private-fine-tune", False),
        ("half_of_the_training_data_of_the_second_run_of_2026", False),
    ],
)
def test_tokens_are_told_from_names(text, is_token):
    """By one pattern, for cards, records and the files of a push."""
    assert bool(TOKEN_PATTERN.search(text)) == is_token

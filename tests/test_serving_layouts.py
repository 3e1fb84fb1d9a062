"""Layouts of a head on disk, and which server serves which of its options."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, LlamaConfig

from draftsmith import Eagle3DraftModel
from draftsmith.commands import export, main
from draftsmith.serving import compatibility
from draftsmith.serving.compatibility import SERVERS, SGLANG, SPECULATORS, VLLM
from draftsmith.serving.directory import whole_directory
from draftsmith.serving.speculators import from_speculators_config

from .models.test_unroll import ROPES, SHAPE, make_model


# option -> how to make a head with it, and who refuses it
CASES = {
    "plain": ({}, ()),
    "reduced vocabulary": ({"draft_vocab_size": 40}, ()),
    "norm_output": ({"norm_output": True}, ()),
    "fc_norm": ({"fc_norm": True, "draft_vocab_size": 40}, ()),
    "norm_before_fc": ({"norm_before_fc": True}, ()),
    "both norms": ({"norm_before_fc": True, "fc_norm": True}, (SPECULATORS,)),
    "norm_before_residual": ({"norm_before_residual": True}, (SGLANG,)),
    "attention_bias": ({"attention_bias": True}, (SGLANG,)),
    "mlp_bias": ({"mlp_bias": True, "draft_vocab_size": 40}, (SGLANG,)),
    "hidden_act": ({"hidden_act": "gelu"}, (VLLM, SGLANG)),
    "sliding_window": ({"sliding_window": 5, "draft_vocab_size": 40}, ()),
    "sliding_window of 1": ({"sliding_window": 1}, (SGLANG,)),
    "two states": ({"aux_layer_ids": [1, 6]}, ()),
    "four states": ({"aux_layer_ids": [1, 3, 5, 7], "fc_norm": True}, ()),
    "one state": ({"aux_layer_ids": [5]}, (SGLANG,)),
    "another width": ({"hidden_size": 16, "num_attention_heads": 2, "draft_vocab_size": 40}, ()),
    "own embedding": ({"has_own_embedding": True}, (SGLANG,)),
    **{
        f"rope {name}": ({"rope_parameters": rope}, (VLLM,) if name == "dynamic" else ())
        for name, rope in ROPES.items()
        if rope
    },
}
MERGED = ("both norms",)  # what the speculators layout cannot hold


@pytest.fixture
def target(tmp_path):
    LlamaConfig(**SHAPE, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path / "target")
    return str(tmp_path / "target")


def make_head(directory, case="reduced vocabulary", dtype=torch.float32):
    make_model(dtype=dtype, **CASES[case][0]).save_pretrained(directory)
    return directory


def run(draft, output, *flags):
    main(["export", "--draft", str(draft), "--output", str(output), *flags])
    return output


def read_config(directory):
    return json.loads((directory / "config.json").read_text())


def edit_weights(directory, change):
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


def assert_same_head(directory, other):
    assert read_config(directory) == read_config(other)
    tensors, others = load_file(directory / "model.safetensors"), load_file(other / "model.safetensors")
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == others[name].dtype and torch.equal(tensor, others[name]), name


@pytest.mark.parametrize("case", [case for case in CASES if case not in MERGED])
def test_there_and_back_is_the_same_head(case, tmp_path, target):
    head = make_head(tmp_path / "head", case)
    there = run(head, tmp_path / "there", "--format", "speculators", "--target", target)
    back = run(there, tmp_path / "back")
    assert_same_head(head, back)
    assert_same_head(head, run(head, tmp_path / "copy", "--target", target))


def test_there_and_back_in_bf16(tmp_path, target):
    head = make_head(tmp_path / "head", dtype=torch.bfloat16)
    there = run(head, tmp_path / "there", "--format", "speculators", "--target", target)
    assert read_config(there)["dtype"] == "bfloat16"
    assert_same_head(head, run(there, tmp_path / "back"))


def test_what_the_speculators_layout_holds(tmp_path, target):
    there = run(
        make_head(tmp_path / "head", "sliding_window"), tmp_path / "there", "--format", "speculators",
        "--target", target, "--num_draft_tokens", "3",
    )  # fmt: skip
    names = load_file(there / "model.safetensors").keys()
    assert {"layers.0.self_attn.q_proj.weight", "fc.weight", "lm_head.weight", "d2t", "t2d"} <= names
    assert not any(name.startswith("midlayer") for name in names)
    config = read_config(there)
    assert config["speculators_model_type"] == "eagle3" and config["architectures"] == ["Eagle3Speculator"]
    assert "model_type" not in config  # vLLM knows the layout by its absence
    assert config["norm_before_residual"] is False and config["norm_output"] is False
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5] and config["draft_vocab_size"] == 40
    speculation = config["speculators_config"]
    assert speculation["verifier"] == {"name_or_path": target, "architectures": ["LlamaForCausalLM"]}
    assert speculation["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 3}]
    layer = config["transformer_layer_config"]
    assert layer["model_type"] == "llama" and layer["vocab_size"] == 97 and layer["num_aux_hidden_states"] == 3
    assert layer["layer_types"] == ["sliding_attention"] and layer["sliding_window"] == 5
    assert sorted(path.name for path in there.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("reader", compatibility.READERS)
def test_every_option_is_served_or_refused(case, reader, tmp_path, target, capsys):
    head = make_head(tmp_path / "head", case)
    flags = ["--format", "speculators", "--target", target] if reader == SPECULATORS else ["--server", reader]
    if reader not in CASES[case][1]:
        run(head, tmp_path / "out", *flags)
        return
    with pytest.raises(SystemExit):
        run(head, tmp_path / "out", *flags)
    error = capsys.readouterr().err.splitlines()[-1]  # after transformers' progress bars
    assert error.startswith(f"error: {compatibility.READERS[reader]} does not serve") and "Train one without" in error
    assert not (tmp_path / "out").exists()


def test_every_refusal_of_the_table_has_a_case():
    def used(option):
        models = [make_model(dtype=torch.float32, **options) for options, _ in CASES.values()]
        return any(option.is_used(model.config.to_diff_dict(), model.state_dict()) for model in models)

    assert all(used(option) for option in compatibility.OPTIONS)


def test_without_a_server_both_verdicts_are_printed(tmp_path, capsys):
    run(make_head(tmp_path / "head", "norm_before_residual"), tmp_path / "out")
    text = capsys.readouterr().out
    assert "vLLM 0.32.0 serves it\n" in text and "SGLang 0.5.23 does not: `norm_before_residual`" in text


def test_window_of_sglang_leaves_out_the_query(tmp_path, capsys):
    run(make_head(tmp_path / "head", "sliding_window"), tmp_path / "out", "--server", "sglang")
    assert "--speculative-draft-window-size 4" in capsys.readouterr().out  # 5 with the query's own


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--format", "gguf"], "`format` is 'gguf': pass default or speculators"),
        (["--server", "tgi"], "`server` is 'tgi': pass vllm or sglang"),
        (["--format", "speculators"], "`target` is needed"),
        (["--format", "speculators", "--server", "sglang"], "does not read `format` speculators"),
        (["--num_draft_tokens", "0"], "`num_draft_tokens` is 0"),
        (["--target", "./nowhere"], "`target`: ./nowhere does not exist"),
    ],
)
def test_wrong_arguments_name_the_remedy(tmp_path, flags, message, capsys):
    with pytest.raises(SystemExit):
        run(make_head(tmp_path / "head"), tmp_path / "out", *flags)
    assert message in capsys.readouterr().err


def test_another_target_is_refused(tmp_path, target, capsys):
    LlamaConfig(**{**SHAPE, "vocab_size": 101}).save_pretrained(target)
    with pytest.raises(SystemExit):
        run(make_head(tmp_path / "head"), tmp_path / "out", "--target", target)
    assert "another target" in capsys.readouterr().err


class TestWholeOrNot:
    @pytest.mark.parametrize("format", export.WRITERS)
    @pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
    def test_failed_export_leaves_nothing(self, format, error, tmp_path, target, monkeypatch, capsys):
        head = make_head(tmp_path / "head")

        def write_half(draft, directory, *_):
            (directory / "config.json").write_text("{")
            raise error

        monkeypatch.setitem(export.WRITERS, format, write_half)
        with pytest.raises(SystemExit):
            run(head, tmp_path / "out", "--format", format, "--target", target)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["head", "target"]
        assert "out could not be written" in capsys.readouterr().err or not isinstance(error, OSError)

    def test_killed_export_leaves_no_directory_of_that_name(self, tmp_path):
        if (child := os.fork()) == 0:
            with whole_directory(tmp_path / "out") as directory:
                (directory / "config.json").write_text("{")
                os._exit(1)  # nothing is cleaned up, as after SIGKILL
        os.waitpid(child, 0)
        assert [path.name.startswith(".unfinished-out-") for path in tmp_path.iterdir()] == [True]

    @pytest.mark.parametrize("exists", ["before", "meanwhile"])
    def test_nothing_is_overwritten(self, exists, tmp_path, monkeypatch, capsys):
        head, out = make_head(tmp_path / "head"), tmp_path / "out"

        def make_out(*_):
            out.mkdir()
            (out / "kept").touch()

        if exists == "before":
            make_out()
        monkeypatch.setitem(export.WRITERS, "default", make_out)
        with pytest.raises(SystemExit):
            run(head, out)
        assert "nothing is overwritten" in capsys.readouterr().err
        assert [path.name for path in out.iterdir()] == ["kept"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["head", "out"]


class TestPublishedHeads:
    def test_absent_norm_before_residual_means_true_in_speculators(self, tmp_path, target):
        head = make_head(tmp_path / "head", "norm_before_residual")
        there = run(head, tmp_path / "there", "--format", "speculators", "--target", target)
        config = read_config(there)
        config.pop("norm_before_residual")
        (there / "config.json").write_text(json.dumps(config))
        assert Eagle3DraftModel.from_pretrained(there).config.norm_before_residual is True

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"speculators_model_type": "dflash"}, "'dflash': only `eagle3`"),
            ({"transformer_layer_config": None}, "`transformer_layer_config` is missing"),
            ({"transformer_layer_config": {"model_type": "qwen3"}}, "'qwen3': only heads of `llama`"),
        ],
    )
    def test_other_speculators_are_refused(self, change, message):
        config = {"speculators_model_type": "eagle3", "transformer_layer_config": {"model_type": "llama"}}
        with pytest.raises(ValueError, match=message):
            from_speculators_config({**config, **change})

    @pytest.mark.parametrize("format", export.WRITERS)
    def test_missing_and_surplus_tensors_are_named(self, format, tmp_path, target):
        there = run(make_head(tmp_path / "head"), tmp_path / "there", "--format", format, "--target", target)
        extra = {"self_attn.q_norm.weight": torch.ones(8), "fc.bias": torch.ones(32)}
        edit_weights(there, lambda weights: weights.update(extra))
        with pytest.raises(ValueError, match=r"no draft head of its config has: fc.bias, self_attn.q_norm.weight\."):
            Eagle3DraftModel.from_pretrained(there)
        layer = "midlayer" if format == "default" else "layers.0"
        edit_weights(there, lambda weights: [weights.pop(name) for name in (*extra, f"{layer}.hidden_norm.weight")])
        with pytest.raises(ValueError, match=r"missing from the checkpoint: midlayer.hidden_norm.weight\."):
            Eagle3DraftModel.from_pretrained(there)

    def test_identity_map_at_full_vocabulary_is_not_written_on(self, tmp_path):
        head = make_head(tmp_path / "head", "plain")
        maps = {"d2t": torch.zeros(97, dtype=torch.int64), "t2d": torch.ones(97, dtype=torch.bool)}
        edit_weights(head, lambda weights: weights.update(maps))
        out = run(head, tmp_path / "out", "--server", "vllm")  # which crashes on them
        assert not {"d2t", "t2d"} & load_file(out / "model.safetensors").keys()

    def test_norm_before_fc_inside_eagle_config(self, tmp_path):
        head = make_head(tmp_path / "head", "norm_before_fc")
        config = read_config(head)
        config.pop("norm_before_fc")
        config["eagle_config"]["norm_before_fc"] = True
        config["num_aux_hidden_states"] = 3
        (head / "config.json").write_text(json.dumps(config))
        assert Eagle3DraftModel.from_pretrained(head).config.norm_before_fc is True

    def test_target_says_the_layers_that_a_head_does_not(self, tmp_path, target):
        head = make_head(tmp_path / "head")
        config = read_config(head)
        for key in ("eagle_config", "eagle_aux_hidden_state_layer_ids"):
            config.pop(key)
        (head / "config.json").write_text(json.dumps(config))
        out = run(head, tmp_path / "out", "--target", target)
        assert read_config(out)["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]


@pytest.mark.parametrize("case", [case for case in CASES if case not in MERGED])
class TestRealReaders:
    """Against the packages themselves, where they are installed."""

    @pytest.fixture
    def there(self, case, tmp_path, target):
        head = make_head(tmp_path / "head", case)
        return run(head, tmp_path / "there", "--format", "speculators", "--target", target)

    def test_speculators(self, case, there):
        eagle3 = pytest.importorskip("speculators.models.eagle3")
        config = eagle3.Eagle3SpeculatorConfig.from_pretrained(there)
        known = {*eagle3.Eagle3SpeculatorConfig.model_fields, "dtype", "tie_word_embeddings"}
        assert read_config(there).keys() <= known
        assert config.eagle_aux_hidden_state_layer_ids == read_config(there)["eagle_aux_hidden_state_layer_ids"]
        if case == "another width":  # its config has the key, its model does not read it
            return
        config.transformer_layer_config._attn_implementation = "eager"
        model = eagle3.Eagle3DraftModel(config)
        saved = load_file(there / "model.safetensors")
        missing, unexpected = model.load_state_dict(saved, strict=False)
        borrowed = {"embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
        assert set(missing) <= borrowed and not unexpected
        if case in ("rope dynamic", "rope longrope"):  # by the batch's length there, by the served length here
            return
        logits, ours = [], Eagle3DraftModel.from_pretrained(there)
        if ours.embed_tokens is None:
            torch.nn.init.normal_(model.embed_tokens.weight)
            ours.set_input_embeddings(model.embed_tokens)
        model.lm_head.register_forward_hook(lambda module, args, output: logits.append(output))
        ids, positions = torch.randint(97, (1, 9)), torch.arange(1, 10)[None]
        states = torch.randn(1, 9, ours.fc.in_features)
        model(states, ids, torch.zeros_like(ids), position_ids=positions, ttt_steps=1)
        expected = ours.draft_step(ids, ours.fuse(states), positions, DynamicCache())[0]
        torch.testing.assert_close(logits[0], expected, rtol=1e-4, atol=1e-4)

    def test_vllm(self, case, there, target):
        base = pytest.importorskip("vllm.transformers_utils.configs.speculators.base")
        config = base.SpeculatorsConfig.from_pretrained(there)
        served = read_config(there.parent / "head")
        for key in set(served) - {"architectures", "eagle_config", "rope_theta", "model_type", "transformers_version"}:
            value = getattr(config, key)
            assert (str(value).removeprefix("torch.") if key == "dtype" else value) == served[key], key
        assert config.architectures == ["Eagle3LlamaForCausalLM"]
        assert config.num_aux_hidden_states == len(served["eagle_aux_hidden_state_layer_ids"])
        speculation = base.SpeculatorsConfig.extract_vllm_speculative_config(read_config(there))
        assert speculation == {"method": "eagle3", "num_speculative_tokens": 5}


def test_readers_are_those_of_the_formats():
    assert {reader for readers in compatibility.READERS_OF.values() for reader in readers} == {*compatibility.READERS}
    assert set(SERVERS) < set(compatibility.READERS) and export.WRITERS.keys() == compatibility.READERS_OF.keys()

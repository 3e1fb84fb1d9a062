"""Adapters on a head: the mathematics of every step, what is trained and saved, exact resume, loading, refusals."""

import copy
import json
import shutil
import tempfile
from functools import partial

import pytest
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoraConfig,
    OFTConfig,
    PeftModel,
    PolyConfig,
    PrefixTuningConfig,
    TrainableTokensConfig,
    VeraConfig,
    get_peft_model,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModel, LlamaForCausalLM

from draftsmith import Eagle3DraftModel, Eagle3Trainer, Eagle3TrainingArguments, target_family
from draftsmith.target import FrozenTarget, load_target
from draftsmith.trainer import adapters
from draftsmith.trainer.adapter_configs import read_peft_config
from draftsmith.trainer.decoding import served_head
from tests.hub.heads import digests
from tests.models.test_unroll import assert_same, drafts_serially, make_batch, make_model

from .common import BEST, SAVING, assert_equal_weights, logged, make_rows, make_target, make_trainer, weights_of
from .peft_ranks import PEFT_MODES, make_adapter_trainer
from .ranks import run_two_ranks
from .test_eagle3_trainer import StopAfter
from .two_ranks import decoded


ATTENTION = ["q_proj", "k_proj", "v_proj"]
LINEAR = [*ATTENTION, "o_proj", "gate_proj", "up_proj", "down_proj", "fc"]
METHODS = {
    "lora": LoraConfig(r=4, target_modules=LINEAR),
    "lora_and_head": LoraConfig(r=4, target_modules="all-linear", modules_to_save=["lm_head", "hidden_norm"]),
    "dora": LoraConfig(r=4, target_modules=LINEAR, use_dora=True),
    "rslora": LoraConfig(r=4, target_modules=ATTENTION, use_rslora=True),
    "mlp": LoraConfig(r=4, target_modules=["down_proj"]),
    "ia3": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "oft": OFTConfig(oft_block_size=8, target_modules=ATTENTION),
    "vera": VeraConfig(r=4, target_modules=["q_proj"]),
    "loha": LoHaConfig(r=4, target_modules=ATTENTION),
    "norms": LNTuningConfig(target_modules=["norm", "input_layernorm"]),
}
LENGTHS = [5, 40, 9, 17, 30, 3, 22, 12]
IDS = torch.arange(1, 80, 2)  # a draft vocabulary with a map


def shaken(model, scale=0.2):
    """The model, its trainable parameters moved away from where an adapter does nothing."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("base") / "head"
    torch.manual_seed(1)
    head = Eagle3DraftModel.from_target(make_target(), d2t=IDS - torch.arange(len(IDS)))
    head.save_pretrained(directory)
    return directory


def load(directory, **options):
    return Eagle3DraftModel.from_pretrained(directory, target=make_target(), **options)


def adapter_trainer(output_dir, base, peft_config=METHODS["lora_and_head"], **options):
    rows = make_rows(LENGTHS)
    trainer_class = partial(Eagle3Trainer, peft_config=peft_config)
    draft = options.pop("draft", None) or load(base)
    torch.manual_seed(2)
    return make_trainer(
        output_dir, rows, draft=draft, trainer_class=trainer_class, **{"per_device_train_batch_size": 2, **options}
    )


def loss_of(model):
    """Of each step, for a head with or without its adapter merged."""
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = make_trainer(output_dir, make_rows(LENGTHS), draft=target_family.base_model(model))
    batch = trainer.data_collator(trainer.train_dataset)
    with torch.no_grad():
        _, outputs = trainer.compute_loss(trainer.model.eval(), batch, return_outputs=True)
    return outputs.raw_sums.loss


# The mathematics


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("attention", ["block_sparse_flash", "eager"])
def test_gradients_are_those_of_the_merged_weights(attention, recompute):
    """dA = s B' dW and dB = s dW A', with dW of a plain head that has the merged weights, over all steps."""
    head = make_model(norm_output=True)
    head.set_attn_implementation(attention)
    batch = make_batch(head, 2, 15, share=0.5)
    model = shaken(get_peft_model(head, copy.deepcopy(METHODS["lora_and_head"])))
    plain = copy.deepcopy(model).merge_and_unload().requires_grad_(True)
    if recompute:
        model.train()
        model.gradient_checkpointing_enable()
    model(**batch, ttt_steps=4).loss.backward()
    plain(**batch, ttt_steps=4).loss.backward()
    ours, truth = {}, {}
    for name, module in model.get_base_model().named_modules():
        if hasattr(module, "lora_A"):
            full, scaling = plain.get_submodule(name).weight.grad, module.scaling["default"]
            a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
            ours |= {f"{name}.A": a.grad, f"{name}.B": b.grad}
            truth |= {f"{name}.A": scaling * b.T @ full, f"{name}.B": scaling * full @ a.T}
        elif hasattr(module, "modules_to_save"):
            ours[name] = module.modules_to_save["default"].weight.grad
            truth[name] = plain.get_submodule(name).weight.grad
    assert len(truth) == 2 * len(LINEAR) + 2
    assert_same(ours, truth, 1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_adapted_head_is_the_merged_one_in_training_and_in_serial_drafting(method):
    head = make_model(attention_bias=method == "lora")
    batch = make_batch(head, 1, 9, share=1.1)
    model = shaken(get_peft_model(head, copy.deepcopy(METHODS[method]))).eval()
    plain = copy.deepcopy(model).merge_and_unload()
    with torch.no_grad():
        ours, truth = (item(**batch, ttt_steps=3).raw_sums.loss for item in (model, plain))
        torch.testing.assert_close(ours, truth, rtol=1e-6, atol=0)
        bare = make_model(attention_bias=method == "lora")
        assert not torch.allclose(ours, bare(**batch, ttt_steps=3).raw_sums.loss, rtol=1e-3)
        drafts, expected = (drafts_serially(item, batch, 9, 3) for item in (head, plain))
    assert drafts.keys() == expected.keys()
    for step in expected:
        torch.testing.assert_close(drafts[step], expected[step], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "recompute"), [*((method, False) for method in METHODS), *((name, True) for name in ("dora", "mlp"))]
)
def test_every_adapter_gets_a_gradient_and_nothing_else_moves(method, recompute, tmp_path, base):
    """The inputs of the head need no gradient themselves, which recompute must not take for a reason to stop."""
    trainer = adapter_trainer(tmp_path, base, METHODS[method], gradient_checkpointing=recompute)
    shaken(trainer.model)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trained = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert trained and all("default" in name for name in trained)
    trainer.train()
    changed = {name for name, value in trainer.model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == trained
    optimized = {id(item) for group in trainer.optimizer.param_groups for item in group["params"]}
    assert optimized == {id(parameter) for parameter in trainer.model.parameters() if parameter.requires_grad}


def test_nothing_supervised_leaves_the_adapter(tmp_path, base):
    draft = load(base)
    trainer_class = partial(Eagle3Trainer, peft_config=METHODS["dora"])
    trainer = make_trainer(tmp_path, make_rows([9] * 4, supervised=[0] * 4), draft=draft, trainer_class=trainer_class)
    before = weights_of(trainer)
    trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in weights_of(trainer).items())


# Saving and loading


@pytest.mark.parametrize("method", METHODS)
def test_saved_adapter_loads_in_every_way_and_equals_the_live_head(method, tmp_path, base):
    trainer = adapter_trainer(tmp_path, base, METHODS[method])
    shaken(trainer.model)
    trainer.save_model()
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["adapter_model.safetensors"]
    assert not (tmp_path / "config.json").exists() and not list(tmp_path.glob("*.bin"))
    with_peft = PeftModel.from_pretrained(load(base), tmp_path)
    live, merged = loss_of(trainer.model), load(tmp_path)
    torch.testing.assert_close(loss_of(with_peft), live, rtol=1e-5, atol=0)
    torch.testing.assert_close(loss_of(merged), live, rtol=1e-4, atol=0)
    plain = load(base)
    assert type(merged) is Eagle3DraftModel and merged.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(merged.d2t, plain.d2t) and torch.equal(merged.t2d, plain.t2d)
    assert all(parameter.requires_grad for parameter in merged.parameters())  # to be trained on


def test_checkpoints_are_fp32_and_the_saved_adapter_has_the_targets_dtype(tmp_path, base):
    target = make_target().to(torch.bfloat16)
    draft = Eagle3DraftModel.from_pretrained(base, target=target, dtype=torch.bfloat16)
    options = {"bf16": True, "save_strategy": "steps", "save_steps": 1}
    trainer = adapter_trainer(tmp_path, base, draft=draft, target=target, **options)
    assert {item.dtype for item in trainer.model.parameters() if item.requires_grad} == {torch.float32}
    assert {item.dtype for item in trainer.model.parameters() if not item.requires_grad} == {torch.bfloat16}
    trainer.train()
    trainer.save_model()
    checkpoint, served = (
        load_file(path / "adapter_model.safetensors") for path in (tmp_path / "checkpoint-1", tmp_path)
    )
    assert checkpoint.keys() == served.keys()
    assert {value.dtype for value in checkpoint.values()} == {torch.float32}
    assert {value.dtype for value in served.values()} == {torch.bfloat16}
    assert all("lora_" in name or name.split(".")[-2] in ("lm_head", "hidden_norm") for name in served)
    assert not list(tmp_path.glob("**/model.safetensors")) and not list(tmp_path.glob("**/*.md"))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base) and config["task_type"] is None
    assert Eagle3DraftModel.from_pretrained(tmp_path, target=target).dtype == torch.float32  # the base's, on disk
    half = Eagle3DraftModel.from_pretrained(tmp_path, target=target, dtype=torch.bfloat16)
    assert {item.dtype for item in half.parameters()} == {torch.bfloat16}


def test_bare_head_of_low_precision_computes_in_fp32_without_autocast(tmp_path, base):
    draft = load(base, dtype=torch.bfloat16)
    config = LoraConfig(r=4, target_modules=ATTENTION, modules_to_save=["fc", "mlp", "lm_head"])
    trainer = adapter_trainer(tmp_path, base, config, draft=draft)
    trainer.train()
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}


def test_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path, base):
    config = LoraConfig(r=4, target_modules=LINEAR, modules_to_save=["lm_head"], lora_dropout=0.2, use_dora=True)
    options = {"max_steps": 5, **SAVING}  # epochs of four steps
    whole = adapter_trainer(tmp_path / "whole", base, config, **options)
    whole.train()
    adapter_trainer(tmp_path / "part", base, config, callbacks=[StopAfter(2)], **options).train()
    resumed = adapter_trainer(tmp_path / "part", base, config, **options)
    shaken(resumed.model)
    resumed.train(resume_from_checkpoint=True)
    truth = weights_of(whole)
    assert all(torch.equal(value, truth[name]) for name, value in weights_of(resumed).items())
    assert logged(resumed, "loss") == logged(whole, "loss")


def test_a_wrapped_head_is_taken_as_it_is_and_its_adapter_goes_on(tmp_path, base):
    first = adapter_trainer(tmp_path / "first", base, max_steps=2)
    first.train()
    first.save_model()
    model = PeftModel.from_pretrained(load(base), tmp_path / "first", is_trainable=True)
    second = adapter_trainer(tmp_path / "second", base, None, draft=model, max_steps=2, max_grad_norm=1.0)
    before = weights_of(second)
    assert all(torch.equal(value, before[name]) for name, value in weights_of(first).items())
    second.train()
    second.save_model()
    assert not torch.equal(weights_of(second)[LM_HEAD], before[LM_HEAD])
    torch.testing.assert_close(loss_of(load(tmp_path / "second")), loss_of(second.model), rtol=1e-4, atol=0)


LM_HEAD = "base_model.model.lm_head.modules_to_save.default.weight"


def test_best_adapter_is_found_and_loaded(tmp_path, base):
    trainer = adapter_trainer(
        tmp_path,
        base,
        eval_rows=make_rows(LENGTHS),
        **BEST,
        metric_for_best_model="eval_loss",
        learning_rate=20.0,
    )
    trainer.train()
    values = logged(trainer, "eval_loss")
    assert len(values) == 3 and values[-1] > min(values) == trainer.state.best_metric
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(values), rel=1e-5)
    trainer.save_model()
    best = load_file(f"{trainer.state.best_model_checkpoint}/adapter_model.safetensors")
    assert all(
        torch.equal(value, best[name]) for name, value in load_file(tmp_path / "adapter_model.safetensors").items()
    )


def test_an_adapter_on_an_adapted_head_remembers_both(tmp_path, base):
    first = adapter_trainer(tmp_path / "first", base)
    shaken(first.model)
    first.save_model()
    second = adapter_trainer(tmp_path / "second", base, METHODS["mlp"], draft=load(tmp_path / "first"))
    shaken(second.model)
    second.save_model()
    config = json.loads((tmp_path / "second" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "first")
    torch.testing.assert_close(loss_of(load(tmp_path / "second")), loss_of(second.model), rtol=1e-4, atol=0)


def test_auto_model_gives_the_adapted_head(tmp_path, base):
    trainer = adapter_trainer(tmp_path, base)
    shaken(trainer.model)
    trainer.save_model()
    head, expected = AutoModel.from_pretrained(tmp_path), load(tmp_path)
    assert type(head) is Eagle3DraftModel
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in head.state_dict().items())


def test_a_head_with_an_embedding_of_its_own_takes_an_adapter_on_it(tmp_path):
    target = make_target()
    torch.manual_seed(1)
    head = Eagle3DraftModel.from_target(target, hidden_size=16, num_attention_heads=2, num_key_value_heads=1)
    head.save_pretrained(tmp_path / "head")
    draft = Eagle3DraftModel.from_pretrained(tmp_path / "head", target=target)
    config = LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"], init_lora_weights=False)
    trainer = adapter_trainer(tmp_path / "adapter", None, config, draft=draft)
    before = weights_of(trainer)
    trainer.train()
    changed = {name for name, value in weights_of(trainer).items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if "lora_" in name} and len(changed) == 4
    trainer.save_model()
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(saved) == 4
    torch.testing.assert_close(loss_of(load(tmp_path / "adapter")), loss_of(trainer.model), rtol=1e-4, atol=0)


def test_decoding_in_training_is_that_of_the_merged_head(tmp_path, base):
    trainer = adapter_trainer(tmp_path, base, METHODS["dora"], eval_rows=make_rows([6, 31]))
    shaken(trainer.model)
    state = torch.random.get_rng_state()
    head = served_head(trainer.model, trainer.target)
    assert torch.equal(torch.random.get_rng_state(), state)  # training goes on as without
    trainer.save_model()
    expected = load(tmp_path).state_dict()
    for name, value in head.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)
    trainer._decoded = decoded(trainer.args)
    assert trainer.evaluate()["eval_decoded_acceptance_length"] >= 1


# Refusals


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LoraConfig(target_modules=["q_proj", "lm_head"]), "lm_head.*modules_to_save"),
        (LoHaConfig(target_modules=".*(q_proj|lm_head)"), "lm_head.*modules_to_save"),
        (LoraConfig(target_modules=["q_proj", "embed_tokens"]), "embed_tokens.*borrows"),
        (LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"]), "embed_tokens.*borrows"),
        (LoraConfig(target_modules=["q_proj", "qkv_proj"]), "qkv_proj.*did you mean"),
        (LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_haed"]), "lm_haed.*did you mean `lm_head`"),
        (PrefixTuningConfig(num_virtual_tokens=3), "PREFIX_TUNING.*adapts no layers"),
        (TrainableTokensConfig(token_indices=[1]), "TRAINABLE_TOKENS.*adapts no layers"),
        (LoraConfig(target_modules=["hidden_norm"]), "Eagle3RMSNorm"),
    ],
)
def test_adapters_that_could_not_learn_are_refused_by_name(tmp_path, base, config, message):
    draft = load(base)
    with pytest.raises(ValueError, match=message):
        adapter_trainer(tmp_path, base, config, draft=draft)


def test_module_lists_are_refused(tmp_path):
    target = make_target()
    draft = Eagle3DraftModel.from_target(target, fc_norm=True)
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["fc_norm"])
    with pytest.raises(ValueError, match="peft_config.*ModuleList"):
        adapter_trainer(tmp_path, None, config, draft=draft)


def test_wrapped_heads_that_would_lose_something_are_refused(tmp_path, base):
    def wrapped(**options):
        return get_peft_model(load(base), LoraConfig(r=2, target_modules=["q_proj"], **options))

    with pytest.raises(ValueError, match="leave out `peft_config`"):
        adapter_trainer(tmp_path, base, METHODS["lora"], draft=wrapped())
    several = wrapped()
    several.add_adapter("other", LoraConfig(r=2, target_modules=["k_proj"]))
    unfrozen = wrapped()
    unfrozen.get_base_model().norm.requires_grad_(True)
    for model, message in (
        (wrapped(task_type="FEATURE_EXTRACTION"), "task_type=None"),
        (wrapped(inference_mode=True), "is_trainable=True"),
        (several, "default, other"),
        (unfrozen, r"norm\.weight.*modules_to_save"),
    ):
        with pytest.raises(ValueError, match=message):
            adapter_trainer(tmp_path, base, None, draft=model)


def test_a_task_type_is_cleared_and_the_given_config_left_alone(tmp_path, base):
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", inference_mode=True)
    before = copy.deepcopy(config)
    adapter_trainer(tmp_path, base, config).train()
    assert config == before


def test_the_heads_own_directory_is_no_place_for_its_adapter(base):
    with pytest.raises(ValueError, match="output_dir.*name another"):
        adapter_trainer(base, base)


def test_a_head_from_nowhere_trains_with_a_warning(tmp_path, caplog):
    draft = Eagle3DraftModel.from_target(make_target())
    trainer = adapter_trainer(tmp_path, None, draft=draft)
    assert "save it with `save_pretrained`" in caplog.text
    trainer.train()
    trainer.save_model()
    with pytest.raises(ValueError, match="base_model_name_or_path"):
        load(tmp_path)


def test_adapters_that_cannot_be_merged_are_refused_by_name(tmp_path, base):
    get_peft_model(load(base), PolyConfig(r=4, target_modules=["q_proj"], n_tasks=1)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="POLY adapter cannot be merged"):
        load(tmp_path)


def test_adapters_that_do_not_fit_are_never_loaded_in_part(tmp_path, base):
    trainer = adapter_trainer(tmp_path / "whole", base)
    trainer.save_model()
    weights = load_file(tmp_path / "whole" / "adapter_model.safetensors")
    name = next(iter(weights))
    faults = {
        "lacks": {key: value for key, value in weights.items() if key != name},
        "has, beside": {**weights, "base_model.model.norm.lora_A.weight": torch.zeros(4, 32)},
        "does not fit": {**weights, name: weights[name][:, 1:].contiguous()},
    }
    for message, tensors in faults.items():
        broken = tmp_path / message.replace(", ", "_")
        shutil.copytree(tmp_path / "whole", broken)
        save_file(tensors, broken / "adapter_model.safetensors")
        with pytest.raises(ValueError, match=message):
            load(broken)
    config = json.loads((broken / "adapter_config.json").read_text())
    (broken / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "/nowhere/head"}))
    with pytest.raises(ValueError, match="/nowhere/head does not exist"):
        load(broken)


def test_checkpoints_of_the_other_kind_are_not_resumed_from(tmp_path, base):
    make_trainer(tmp_path / "full", make_rows(LENGTHS), draft=load(base), **SAVING).train()
    with pytest.raises(ValueError, match="holds no adapter"):
        adapter_trainer(tmp_path / "full", base, **SAVING).train(resume_from_checkpoint=True)
    adapter_trainer(tmp_path / "adapter", base, **SAVING).train()
    with pytest.raises(ValueError, match="holds an adapter"):
        make_trainer(tmp_path / "adapter", make_rows(LENGTHS), draft=load(base), **SAVING).train(
            resume_from_checkpoint=True
        )


def test_missing_peft_is_named_with_its_extra(tmp_path, base, monkeypatch):
    monkeypatch.setattr(target_family, "is_peft_available", lambda: False)
    (tmp_path / "adapter_config.json").write_text("{}")
    for use in (
        lambda: adapter_trainer(tmp_path, base),
        lambda: load(tmp_path),
        lambda: read_peft_config({"peft_type": "LORA"}),
        lambda: load_target(str(tmp_path / "target"), adapter=str(tmp_path)),
    ):
        make_target().save_pretrained(tmp_path / "target")
        with pytest.raises(ImportError, match=r"pip install draftsmith\[peft\]"):
            use()


# Several ranks


def test_two_ranks_train_and_save_the_adapter_of_one(tmp_path, base):
    """As DDP, ZeRO-2 and ZeRO-3, where the trained output head is empty in memory and whole in the file."""
    launch_dir = tmp_path / "two"
    shutil.copytree(base, launch_dir / "base")
    one = make_adapter_trainer(tmp_path / "one", str(launch_dir / "base"))
    one.train()
    metrics = one.evaluate()
    results = run_two_ranks("peft_ranks", launch_dir)
    trained = {name: value.detach() for name, value in one.model.named_parameters() if value.requires_grad}
    for mode in PEFT_MODES:
        whole, resumed = results[mode, "whole"], results[mode, "resumed"]
        assert (whole["in_memory"] == 0) == (mode == "zero3")
        assert whole["loss"] == pytest.approx(logged(one, "loss"), rel=1e-5)
        for name in ("eval_loss", "eval_decoded_acceptance_length"):
            assert whole["metrics"][name] == pytest.approx(metrics[name], rel=1e-4)
        assert_equal_weights({name: whole["weights"][name] for name in trained}, trained, 1e-4)
        assert all(torch.equal(value, whole["weights"][name]) for name, value in resumed["weights"].items())
        assert resumed["loss"] == whole["loss"] and resumed["metrics"]["eval_loss"] == whole["metrics"]["eval_loss"]
        for directory in (launch_dir / mode, launch_dir / mode / "checkpoint-3"):
            saved = load_file(directory / "adapter_model.safetensors")
            assert saved["base_model.model.lm_head.weight"].shape == (len(IDS), 32) and len(saved) == len(trained)
            assert torch.equal(saved["base_model.model.lm_head.weight"], whole["weights"][LM_HEAD])
            torch.testing.assert_close(loss_of(load(directory)), loss_of(one.model), rtol=1e-3, atol=0)
        for states in (launch_dir / mode / "checkpoint-3").glob("global_step3/*model_states.pt"):
            kept = torch.load(states, weights_only=False)["module"].keys()
            assert kept - {"base_model.model.d2t", "base_model.model.t2d"} <= trained.keys()


# Targets with adapters


def test_a_head_learns_from_an_adapted_target_merged_or_not(tmp_path):
    make_target().save_pretrained(tmp_path / "target")
    tuned = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = shaken(get_peft_model(LlamaForCausalLM.from_pretrained(tmp_path / "target"), tuned), 0.05)
    adapted.save_pretrained(tmp_path / "tuned")
    unmerged = load_target(str(tmp_path / "target"), adapter=str(tmp_path / "tuned"))
    merged = load_target(str(tmp_path / "target"), adapter=str(tmp_path / "tuned")).merge_and_unload()
    bare = load_target(str(tmp_path / "target"))
    weights, losses = [], []
    for target in (unmerged, merged, bare):
        trainer = make_trainer(tmp_path / "head", make_rows(LENGTHS), target=target)
        trainer.train()
        weights.append(weights_of(trainer))
        losses.append(logged(trainer, "loss"))
    assert trainer.target.adapter is None
    assert FrozenTarget(unmerged, (2, 4, 5)).adapter == str(tmp_path / "tuned")
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=1e-3, atol=1e-5)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and losses[0] != pytest.approx(losses[2], rel=1e-2)
    ids = torch.tensor([row["input_ids"] for row in make_rows([20])])
    states = FrozenTarget(unmerged, (2, 4, 5))(ids)
    with torch.no_grad():
        expected = adapted.eval()(input_ids=ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(
        states.aux_hidden_states, torch.cat([expected[i] for i in (2, 4, 5)], -1), rtol=1e-4, atol=1e-4
    )


# What a saved adapter starts from


@pytest.mark.parametrize("how", ["pissa", "olora", "orthogonal", "gaussian"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_initialisations_that_change_the_base_head_load_as_they_were_trained(tmp_path, base, how, dtype):
    config = LoraConfig(r=4, target_modules=LINEAR, init_lora_weights=how)
    trainer = adapter_trainer(tmp_path, base, config, draft=load(base, dtype=dtype), bf16=dtype == torch.bfloat16)
    trainer.train()
    trainer.save_model()
    live, loaded = copy.deepcopy(trainer.model).float().merge_and_unload(), load(tmp_path)
    for name, weight in live.named_parameters():
        difference = (loaded.get_parameter(name) - weight).abs().max()
        assert difference <= (1e-4 if dtype == torch.float32 else 2e-2) * weight.abs().max(), name


@pytest.mark.parametrize("prepared", [False, True])
def test_initialisations_that_differ_each_time_are_refused(tmp_path, base, prepared):
    config = LoraConfig(r=4, target_modules=LINEAR, init_lora_weights="pissa_niter_2")
    if not prepared:
        with pytest.raises(ValueError, match="pissa_niter_2.*otherwise every time"):
            adapter_trainer(tmp_path, base, config)
        return
    with pytest.raises(ValueError, match="pissa_niter_2.*path_initial_model"):
        adapter_trainer(tmp_path, base, None, draft=get_peft_model(load(base), config))


def test_initialisations_from_data_are_refused(tmp_path, base):
    from peft import LoraGAConfig

    head = load(base)
    config = LoraConfig(r=4, target_modules=["fc"], init_lora_weights="lora_ga", lora_ga_config=LoraGAConfig())
    torch.manual_seed(1)
    head.fc._peft_loraga_grad = torch.randn_like(head.fc.weight)
    with pytest.raises(ValueError, match="lora_ga.*otherwise every time"):
        adapter_trainer(tmp_path, base, config, draft=head)
    with pytest.raises(ValueError, match="eigens"):
        adapter_trainer(tmp_path, base, LoraConfig(r=4, target_modules=["fc"], init_lora_weights="corda"))


def test_the_check_of_the_start_leaves_the_random_numbers_of_the_run_alone(tmp_path, base):
    states = []
    for check in (True, False):
        config = LoraConfig(r=4, target_modules=["fc"], init_lora_weights="pissa")
        draft = load(base)
        torch.manual_seed(7)
        if check:
            adapters.adapted(draft, config, Eagle3TrainingArguments(str(tmp_path), report_to="none", use_cpu=True))
        else:
            get_peft_model(draft, config)
        states.append(torch.random.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_is_not_merged_into_another_head_at_the_same_place(tmp_path, base, dtype):
    shutil.copytree(base, tmp_path / "base")
    trainer = adapter_trainer(tmp_path / "run", None, draft=load(tmp_path / "base", dtype=dtype))
    trainer.save_model()
    load(tmp_path / "run")
    load(tmp_path / "run", dtype=torch.bfloat16)  # the same head
    load(tmp_path / "run", dtype=torch.float16)
    other = load(base)
    other.norm.weight.data *= 1.02
    other.save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="other weights than in training"):
        load(tmp_path / "run")


def test_an_adapter_of_others_says_nothing_of_its_base_and_loads(tmp_path, base):
    get_peft_model(load(base), METHODS["lora"]).save_pretrained(tmp_path)
    assert torch.equal(load(tmp_path).norm.weight, load(base).norm.weight)


# What one directory holds


def test_a_directory_holds_a_head_or_an_adapter(tmp_path, base):
    adapter_trainer(tmp_path / "adapter", base).save_model()
    before = digests(tmp_path / "adapter")
    with pytest.raises(ValueError, match="`output_dir`.*holds an adapter.*name another"):
        make_trainer(tmp_path / "adapter", make_rows(LENGTHS))
    head = make_trainer(tmp_path / "head", make_rows(LENGTHS))
    head.save_model()
    with pytest.raises(ValueError, match="holds an adapter"):
        head.save_model(str(tmp_path / "adapter"))
    assert digests(tmp_path / "adapter") == before
    with pytest.raises(ValueError, match="`output_dir`.*holds a head.*name another"):
        adapter_trainer(tmp_path / "head", base)
    adapter_trainer(tmp_path / "adapter", base).save_model()  # another of the kind is as good


# More refusals


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LoraConfig(target_modules=["q_proj"], trainable_token_indices={"lm_head": [1]}), "trainable_token_indices"),
        (AdaLoraConfig(target_modules=["q_proj"], total_step=10), "ADALORA.*ranks.*pass LoRA"),
        (LoraConfig(target_modules=["q_proj"], lora_bias=True), "lora_bias.*leave it out"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_what_could_not_be_trained_or_loaded_is_refused_by_name(tmp_path, base, config, message, wrapped):
    draft = load(base)
    if wrapped:
        if message == "trainable_token_indices":
            pytest.skip("peft itself cannot put it on")
        draft = get_peft_model(draft, copy.deepcopy(config))
    with pytest.raises(ValueError, match=f"peft_config.*{message}"):
        adapter_trainer(tmp_path, base, None if wrapped else config, draft=draft)


def test_a_name_that_ends_that_of_a_list_is_refused(tmp_path):
    draft = Eagle3DraftModel.from_target(make_target(), fc_norm=True)
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"])
    with pytest.raises(ValueError, match="`norm`.*`fc_norm`.*ModuleList.*LNTuningConfig"):
        adapter_trainer(tmp_path, None, config, draft=draft)


def write_base(directory, name):
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": str(name)}))


def test_a_base_that_is_nowhere_is_named(tmp_path, base, monkeypatch):
    adapter_trainer(tmp_path / "run", base).save_model()
    monkeypatch.chdir(tmp_path)
    for name, message in (
        ("./heads/base", "does not exist in"),
        ("heads/base", "no directory seen from"),
        ("a/b/c", "does not exist in"),
    ):
        write_base(tmp_path / "run", name)
        with pytest.raises(ValueError, match=f"base head {name} .*{message}.*"):
            load(tmp_path / "run")
    shutil.copytree(base, tmp_path / "heads" / "base")
    write_base(tmp_path / "run", "heads/base")
    load(tmp_path / "run")


def test_adapters_on_each_other_are_refused(tmp_path, base, monkeypatch):
    for name in ("one", "two"):
        adapter_trainer(tmp_path / name, base).save_model()
    write_base(tmp_path / "one", tmp_path / "two")
    write_base(tmp_path / "two", tmp_path / "one")
    with pytest.raises(ValueError, match="on itself in the end"):
        load(tmp_path / "one")
    monkeypatch.chdir(tmp_path)
    write_base(tmp_path / "one", "one")
    with pytest.raises(ValueError, match="on itself in the end"):
        load(tmp_path / "one")

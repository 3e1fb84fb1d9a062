"""Config, saving, loading, the embedding slot and the vocabulary map."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, GptOssConfig, LlamaConfig, LlamaForCausalLM, LlamaModel, Qwen3Config

from draftsmith import Eagle3DraftConfig, Eagle3DraftModel

from .test_unroll import ROPES, SHAPE, make_batch, make_model


@pytest.fixture
def target():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


def offsets(*target_ids):
    return torch.tensor(target_ids) - torch.arange(len(target_ids))


def logits_of(model, dtype=torch.float32):
    from transformers import DynamicCache

    batch = make_batch(model, 1, 9, dtype=dtype)
    state = model.fuse(batch["aux_hidden_states"])
    return model.draft_step(batch["input_ids"], state, torch.arange(9)[None], DynamicCache())[0]


def edit_config(directory, **changes):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        config.pop(key, None) if value is ... else config.update({key: value})
    path.write_text(json.dumps(config))


def edit_weights(directory, change):
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_and_reload_is_bit_equal(tmp_path, target, dtype):
    model = make_model(draft_vocab_size=40, dtype=dtype, sliding_window=5, fc_norm=True, norm_before_fc=True)
    model.save_pretrained(tmp_path)
    del [torch.full((n,), float("nan")) for n in (10, 1000, 100000)][:]  # dirty the allocator
    loaded = Eagle3DraftModel.from_pretrained(tmp_path, dtype=dtype)
    state, reloaded = dict(model.named_buffers()), dict(loaded.named_buffers())
    assert state.keys() == reloaded.keys() and {"rotary_emb.inv_freq", "d2t", "t2d"} <= state.keys()
    assert all(
        torch.equal(state[name], reloaded[name]) and state[name].dtype == reloaded[name].dtype for name in state
    )
    assert loaded.rotary_emb.inv_freq.dtype == torch.float32
    loaded.set_input_embeddings(model._target_embedding[0])
    assert torch.equal(logits_of(model, dtype), logits_of(loaded, dtype))
    assert "embed_tokens.weight" not in load_file(tmp_path / "model.safetensors")


def test_config_on_disk_is_what_servers_read(tmp_path):
    config = Eagle3DraftConfig.from_target(LlamaConfig(**SHAPE, rope_parameters=ROPES["llama3"]), draft_vocab_size=40)
    Eagle3DraftModel(config).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["architectures"] == ["LlamaForCausalLMEagle3"] and saved["model_type"] == "llama"
    assert saved["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert saved["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert saved["rope_theta"] == saved["rope_parameters"]["rope_theta"] == 5e5
    assert saved["norm_before_residual"] is False and saved["tie_word_embeddings"] is False
    assert saved["num_hidden_layers"] == 1 and saved["draft_vocab_size"] == 40
    assert saved["max_position_embeddings"] == LlamaConfig().max_position_embeddings
    assert "target_hidden_size" not in saved and "has_own_embedding" not in saved
    LlamaConfig.from_pretrained(tmp_path).validate()  # servers read it as a Llama config


def test_config_of_both_model_types_loads_without_a_warning(tmp_path, caplog):
    Eagle3DraftConfig.from_target(LlamaConfig(**SHAPE)).save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, logger="transformers"):
        for model_type in ("llama", "eagle3_draft"):
            edit_config(tmp_path, model_type=model_type)
            assert Eagle3DraftConfig.from_pretrained(tmp_path).model_type == "eagle3_draft"
    assert not caplog.records


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_rope_is_the_targets(rope, tmp_path):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    target_config = LlamaConfig(**SHAPE, rope_parameters=rope, max_position_embeddings=64)
    config = Eagle3DraftConfig.from_target(target_config)
    config.save_pretrained(tmp_path)
    config = Eagle3DraftConfig.from_pretrained(tmp_path)
    assert config.rope_parameters == target_config.rope_parameters
    frequencies = Eagle3DraftModel(config).rotary_emb.inv_freq
    reference = LlamaRotaryEmbedding(target_config)
    if rope and rope["rope_type"] == "longrope":  # 64 tokens are beyond the original 16: the long factors
        reference(torch.zeros(1), torch.tensor([[63]]))
    if rope and rope["rope_type"] == "dynamic":  # servers build their table for factor * max_position_embeddings
        reference(torch.zeros(1), torch.tensor([[127]]))
    torch.testing.assert_close(frequencies, reference.inv_freq, rtol=0, atol=0)


def test_rope_frequencies_stay_fp32_when_the_model_is_cast():
    model = make_model(dtype=torch.float32)
    before = model.rotary_emb.inv_freq.clone()
    assert torch.equal(model.to(torch.bfloat16).rotary_emb.inv_freq, before)


def test_missing_head_is_an_error(tmp_path):
    make_model(dtype=torch.float32).save_pretrained(tmp_path)
    edit_weights(tmp_path, lambda weights: weights.pop("lm_head.weight"))
    with pytest.raises(ValueError, match="lm_head.weight"):
        Eagle3DraftModel.from_pretrained(tmp_path)


def test_mlp_is_the_targets_width_or_a_dense_one_for_experts():
    assert Eagle3DraftConfig.from_target(LlamaConfig(**SHAPE)).intermediate_size == 48
    experts = GptOssConfig(**SHAPE, num_local_experts=4)  # 48 is one expert's width
    assert Eagle3DraftConfig.from_target(experts).intermediate_size == 6 * 32
    assert Eagle3DraftConfig.from_target(experts, intermediate_size=96).intermediate_size == 96


@pytest.mark.parametrize("layers", [2, 4, 5])
def test_shallow_targets_need_explicit_ids(layers):
    config = LlamaConfig(**{**SHAPE, "num_hidden_layers": layers})
    with pytest.raises(ValueError, match="aux_layer_ids"):
        Eagle3DraftConfig.from_target(config)
    ids = list(range(1, layers))
    assert Eagle3DraftConfig.from_target(config, aux_layer_ids=ids).eagle_aux_hidden_state_layer_ids == ids
    with pytest.raises(ValueError, match=f"1..{layers - 1}"):
        Eagle3DraftConfig.from_target(config, aux_layer_ids=[layers])


def test_published_configs_load(tmp_path, target):
    """Rope at top level, aux ids absent, null or in SGLang's convention, a window left over from the target."""
    make_model(dtype=torch.float32).save_pretrained(tmp_path)
    edit_config(tmp_path, rope_parameters=..., rope_theta=5e5, rope_scaling=None, sliding_window=4096)
    edit_config(tmp_path, eagle_aux_hidden_state_layer_ids=..., eagle_config=...)
    for change in ({}, {"eagle_config": None}, {"eagle_aux_hidden_state_layer_ids": None}):
        edit_config(tmp_path, **change)
        model = Eagle3DraftModel.from_pretrained(tmp_path)
        assert model.config.rope_parameters["rope_theta"] == 5e5 and model.config.sliding_window is None
        assert model.config.eagle_aux_hidden_state_layer_ids is None
        model.fit_to_target(target)
        assert model.config.eagle_aux_hidden_state_layer_ids == [2, 4, 5]
    edit_config(tmp_path, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 6]})
    loaded = Eagle3DraftModel.from_pretrained(tmp_path, target=target)
    assert loaded.config.eagle_aux_hidden_state_layer_ids == [1, 3, 7]


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_published_head_with_its_own_embedding_keeps_it(tmp_path, target, norm_before_residual):
    model = make_model(dtype=torch.float32, draft_vocab_size=30, norm_before_residual=norm_before_residual)
    model.save_pretrained(tmp_path)
    own = model._target_embedding[0].clone()
    edit_weights(tmp_path, lambda weights: weights.update({"embed_tokens.weight": own}))
    loaded = Eagle3DraftModel.from_pretrained(tmp_path, target=target)
    assert torch.equal(loaded.embed_tokens.weight, own) and not loaded.embed_tokens.weight.requires_grad
    assert torch.equal(logits_of(loaded), logits_of(model))
    loaded.save_pretrained(tmp_path / "again")
    again = Eagle3DraftModel.from_pretrained(tmp_path / "again")
    assert torch.equal(again.embed_tokens.weight, own)


def test_pytorch_bin_heads_load_without_pickle_code(tmp_path):
    model = make_model(dtype=torch.float32, draft_vocab_size=30)
    model.save_pretrained(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    loaded = Eagle3DraftModel.from_pretrained(tmp_path)
    loaded.set_input_embeddings(model._target_embedding[0])
    assert torch.equal(logits_of(loaded), logits_of(model))


def test_narrow_draft_of_a_wide_target_trains_and_stores_its_embedding(tmp_path, target):
    wide = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "hidden_size": 64, "num_attention_heads": 8}))
    model = Eagle3DraftModel.from_target(wide, hidden_size=32, num_attention_heads=4)
    assert model.config.target_hidden_size == 64 and model.embed_tokens.weight.requires_grad
    assert model.fc.weight.shape == (32, 3 * 64)
    model(**make_batch(model, 1, 9, share=1.1, dtype=torch.float32), ttt_steps=2).loss.backward()
    assert model.embed_tokens.weight.grad.abs().sum() > 0
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["target_hidden_size"] == 64
    loaded = Eagle3DraftModel.from_pretrained(tmp_path, target=wide)
    assert torch.equal(loaded.embed_tokens.weight, model.embed_tokens.weight)
    with pytest.raises(ValueError, match="its own"):
        loaded.set_input_embeddings(wide.get_input_embeddings())


def test_borrowed_embedding_is_no_part_of_the_head(target):
    model = Eagle3DraftModel.from_target(target)
    assert "embed_tokens" not in " ".join([*model.state_dict(), *dict(model.named_modules())])
    embedding = target.get_input_embeddings().weight
    model.to(torch.bfloat16)
    model.float()
    target.to(torch.bfloat16)
    assert embedding.dtype == torch.bfloat16 and model.embed(torch.tensor([1])).dtype == torch.float32


def test_wrong_embedding_shape_is_refused():
    with pytest.raises(ValueError, match=r"\(97, 32\)"):
        make_model().set_input_embeddings(torch.zeros(98, 32))


def test_lm_head_starts_from_the_targets_rows(target):
    ids = [3, 5, 50, 96]
    model = Eagle3DraftModel.from_target(target, d2t=offsets(*ids))
    assert torch.equal(model.lm_head.weight, target.lm_head.weight[ids])
    full = Eagle3DraftModel.from_target(target)
    assert torch.equal(full.lm_head.weight, target.lm_head.weight) and full.lm_head.weight is not target.lm_head.weight
    assert not any(name in full.state_dict() for name in ("d2t", "t2d"))


def test_auto_classes_give_ours_for_heads_and_the_stock_class_for_llamas(tmp_path):
    make_model(dtype=torch.float32).save_pretrained(tmp_path / "head")
    LlamaModel(LlamaConfig(**SHAPE)).save_pretrained(tmp_path / "llama")
    assert type(AutoConfig.from_pretrained(tmp_path / "head")) is Eagle3DraftConfig
    assert type(AutoModel.from_pretrained(tmp_path / "head")) is Eagle3DraftModel
    assert type(AutoConfig.from_pretrained(tmp_path / "llama")) is LlamaConfig
    assert type(AutoModel.from_pretrained(tmp_path / "llama")) is LlamaModel
    assert type(AutoModel.from_config(Eagle3DraftConfig.from_target(LlamaConfig(**SHAPE)))) is Eagle3DraftModel


def test_attention_given_at_load_is_honoured(tmp_path):
    make_model(dtype=torch.float32).save_pretrained(tmp_path)
    assert Eagle3DraftModel.from_pretrained(tmp_path).config._attn_implementation == "block_sparse_flash"
    for name in ("eager", "sdpa", "block_sparse_flash"):
        assert Eagle3DraftModel.from_pretrained(tmp_path, attn_implementation=name).config._attn_implementation == name
    assert "attn_implementation" not in (tmp_path / "config.json").read_text()


def test_config_that_does_not_fit_the_weights_names_both_shapes(tmp_path):
    make_model(dtype=torch.float32, draft_vocab_size=40).save_pretrained(tmp_path)
    edit_config(tmp_path, draft_vocab_size=30)
    with pytest.raises(ValueError, match=r"lm_head.weight \(40, 32\) for \(30, 32\)"):
        Eagle3DraftModel.from_pretrained(tmp_path)


def test_head_of_another_target_is_refused(tmp_path, target):
    model = make_model(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    edit_weights(tmp_path, lambda weights: weights.update({"embed_tokens.weight": torch.zeros(97, 32)}))
    other = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "vocab_size": 101}))
    with pytest.raises(ValueError, match="another target"):
        Eagle3DraftModel.from_pretrained(tmp_path, target=other)


def test_rope_stretched_by_alpha_is_the_targets():
    """HunYuan's dynamic rope stretches its base by a constant."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}
    config = Eagle3DraftConfig.from_target(LlamaConfig(**SHAPE, rope_parameters=rope))
    truth = 1.0 / (1e4 * 1000.0 ** (8 / 6)) ** (torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(Eagle3DraftModel(config).rotary_emb.inv_freq, truth)


def test_partly_rotated_scaled_rope_is_refused():
    rope = {**ROPES["longrope"], "partial_rotary_factor": 0.5}
    with pytest.raises(ValueError, match="50%.*rope_parameters"):
        Eagle3DraftConfig.from_target(LlamaConfig(**SHAPE, rope_parameters=rope))


def test_heads_that_do_not_divide_the_width_are_replaced():
    """GLM-4.5: 96 heads of 128 on a width of 5120, which servers refuse in a Llama config."""
    target_config = Qwen3Config(**{**SHAPE, "num_attention_heads": 6}, head_dim=8)
    config = Eagle3DraftConfig.from_target(target_config)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 8)
    with pytest.raises(ValueError, match="num_attention_heads"):
        Eagle3DraftConfig.from_target(LlamaConfig(**SHAPE), hidden_size=30)


def test_head_of_a_multimodal_wrapper_follows_its_text_config():
    from transformers import LlavaConfig

    config = Eagle3DraftConfig.from_target(LlavaConfig(text_config=LlamaConfig(**SHAPE)))
    assert (config.hidden_size, config.vocab_size, config.eagle_aux_hidden_state_layer_ids) == (32, 97, [2, 4, 5])


class TestVocabularyMap:
    def test_only_safetensors_and_config_are_needed(self, tmp_path, target):
        Eagle3DraftModel.from_target(target, d2t=offsets(1, 4, 90)).save_pretrained(tmp_path)
        for path in tmp_path.iterdir():
            if path.name not in ("config.json", "model.safetensors"):
                path.unlink()
        model = Eagle3DraftModel.from_pretrained(tmp_path)
        assert model.d2t.dtype == torch.int64 and model.t2d.dtype == torch.bool and model.t2d.sum() == 3
        assert torch.equal(model.t2d.nonzero().squeeze(1), torch.arange(3) + model.d2t)
        assert model.to_target_ids(torch.arange(3)).tolist() == [1, 4, 90]

    def test_embedding_padded_beyond_the_tokenizer(self, tmp_path):
        padded = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "vocab_size": 128}))
        model = Eagle3DraftModel.from_target(padded, d2t=offsets(1, 4, 90))
        assert len(model.t2d) == 128
        model.save_pretrained(tmp_path)
        edit_weights(tmp_path, lambda weights: weights["d2t"].copy_(offsets(1, 4, 130)))
        with pytest.raises(ValueError, match="d2t"):
            Eagle3DraftModel.from_pretrained(tmp_path)

    def test_one_of_both_tensors_is_enough_and_none_is_refused(self, tmp_path, target):
        for missing in ("d2t", "t2d"):
            Eagle3DraftModel.from_target(target, d2t=offsets(1, 4, 90)).save_pretrained(tmp_path)
            edit_weights(tmp_path, lambda weights, name=missing: weights.pop(name))
            model = Eagle3DraftModel.from_pretrained(tmp_path)
            assert model.d2t.tolist() == [1, 3, 88] and model.t2d.nonzero().squeeze(1).tolist() == [1, 4, 90]
        edit_weights(tmp_path, lambda weights: weights.pop("d2t"))
        with pytest.raises(ValueError, match="neither"):
            Eagle3DraftModel.from_pretrained(tmp_path)

    def test_reduced_vocabulary_without_a_map_is_refused(self, target):
        with pytest.raises(ValueError, match="d2t"):
            Eagle3DraftModel.from_target(target, draft_vocab_size=40)

    def test_changing_sizes_in_one_folder_never_leave_a_stale_map(self, tmp_path, target):
        for ids in ([1, 4, 90], [0, 2, 5, 9], None):
            d2t = None if ids is None else offsets(*ids)
            Eagle3DraftModel.from_target(target, d2t=d2t).save_pretrained(tmp_path)
            model = Eagle3DraftModel.from_pretrained(tmp_path)
            assert model.to_target_ids(torch.arange(3)).tolist() == (ids or [0, 1, 2])[:3]
        assert "d2t" not in load_file(tmp_path / "model.safetensors")

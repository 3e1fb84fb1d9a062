"""The frozen target: states, head, packing, loading."""

import gc

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.integrations.deepspeed import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

from draftsmith.target import FrozenTarget, deepspeed_init_suspended, load_target
from draftsmith.transformers_hooks import ATTENTION_NAME
from tests.tiny_models import (
    RECURRENT_FAMILIES,
    SUPPORTED_FAMILIES,
    UNSUPPORTED_FAMILIES,
    random_tokens,
    tiny_config,
    tiny_model,
)


AUX = (1, 2, 3)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
FAMILIES = (*SUPPORTED_FAMILIES, *UNSUPPORTED_FAMILIES, *RECURRENT_FAMILIES)
MIXTURES = {"gpt_oss", "deepseek_v2", "deepseek_v3"}
ZERO3 = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}


def frozen(family, **options):
    """`family` under our attention, or under transformers' default where it is refused."""
    name = None if family in UNSUPPORTED_FAMILIES else ATTENTION_NAME
    return FrozenTarget(tiny_model(family, **{"attn_implementation": name, **options}), AUX)


def logits_of(target, states):
    z = nn.functional.linear(states, target.head_weight, target.head_bias)
    return z if target.softcap is None else target.softcap * torch.tanh(z / target.softcap)


def documents(*lengths, padding=0):
    ids = [torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((padding,), -1)]
    return torch.cat(ids)[None]


# States and head


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_output_hidden_states_and_case_teacher_logits_equal_the_targets(family):
    target = frozen(family)
    input_ids = random_tokens(2, 11)
    states = target(input_ids)
    with torch.no_grad():
        decoded = target.decoder(input_ids=input_ids, output_hidden_states=True, use_cache=False)
        expected = target.model(input_ids=input_ids, use_cache=False).logits
    aux = torch.cat([decoded.hidden_states[i] for i in AUX], dim=-1)
    if family != "mamba":  # its tuple starts with the first layer, not with the embedding
        torch.testing.assert_close(states.aux_hidden_states, aux, **CLOSE)
    torch.testing.assert_close(logits_of(target, states.last_hidden_state), expected, **CLOSE)
    assert not states.last_hidden_state.requires_grad and not states.last_hidden_state.is_inference()


def test_only_the_aux_layers_are_kept_and_no_logits_are_computed():
    target = frozen("llama")
    target(random_tokens(1, 4))
    calls = []
    target.model.lm_head.register_forward_hook(lambda *_: calls.append("lm_head"))
    target(random_tokens(1, 4))
    assert not calls
    assert all(len(layer._forward_hooks) == 0 for layer in target.layers)


def test_the_target_is_frozen_in_place():
    model = tiny_model("llama").train()
    target = FrozenTarget(model, AUX)
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())
    assert target.head_weight is model.lm_head.weight and target.embedding_weight is model.model.embed_tokens.weight
    assert target.text_config is model.config and target.precision == "float32"


@pytest.mark.parametrize("ids", [(), (0, 1), (1, 4), (2, 1), (1, 1), (-1, 2)])
def test_case_aux_layer_ids_out_of_range_are_refused(ids):
    with pytest.raises(ValueError, match=r"`aux_layer_ids=.*within 1\.\.3 for a target of 4 layers"):
        FrozenTarget(tiny_model("llama"), ids)


def test_case_targets_of_two_and_five_layers_take_explicit_ids():
    assert (
        FrozenTarget(tiny_model("llama", num_hidden_layers=2), (1,))(random_tokens(1, 5)).aux_hidden_states.shape[-1]
        == 32
    )
    assert (
        FrozenTarget(tiny_model("llama", num_hidden_layers=5), (1, 4))(random_tokens(1, 5)).aux_hidden_states.shape[-1]
        == 64
    )


@pytest.mark.parametrize("family", ["llava", "gemma3_multimodal", "qwen2_5_vl"])
def test_case_multimodal_wrapper_sizes_and_hooks_resolve(family):
    target = frozen(family)
    assert target.text_config.hidden_size == 32 and len(target.layers) == 4
    assert target(random_tokens(1, 6)).aux_hidden_states.shape == (1, 6, 96)


def test_an_unknown_logit_transform_is_refused_naming_the_family():
    model = tiny_model("llama")
    model.lm_head.register_forward_hook(lambda _module, _inputs, logits: logits * 1.5)
    target = FrozenTarget(model, AUX)
    for _ in range(2):
        with pytest.raises(ValueError, match="output head of `llama`"):
            target(random_tokens(1, 5))


def test_a_quantised_head_is_read_out_whole():
    class Int8Linear(nn.Linear):
        def __init__(self, linear):
            super().__init__(linear.in_features, linear.out_features, bias=False)
            self.scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
            self.weight = nn.Parameter(
                (linear.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False
            )

        def forward(self, states):
            return nn.functional.linear(states, self.weight * self.scale)

    model = tiny_model("llama", attn_implementation=ATTENTION_NAME)
    model.lm_head = Int8Linear(model.lm_head)
    target = FrozenTarget(model, AUX)
    torch.testing.assert_close(target.head_weight, model.lm_head.weight * model.lm_head.scale)
    assert target.head_bias is None
    target(random_tokens(1, 5))


def test_scaled_embeddings_hand_out_the_raw_matrix():
    target = frozen("gemma3")
    assert target.embedding_weight is target.model.model.embed_tokens.weight


def test_the_trainers_autocast_does_not_change_the_states():
    target = frozen("llama")
    input_ids = random_tokens(1, 8)
    expected = target(input_ids).last_hidden_state
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(target(input_ids).last_hidden_state, expected)


# Packing and padding


@pytest.mark.parametrize("family", SUPPORTED_FAMILIES)
@pytest.mark.parametrize("attention", [ATTENTION_NAME, "sdpa", "eager"])
def test_packed_equals_separate(family, attention):
    if family == "gpt_oss" and attention != ATTENTION_NAME:
        pytest.skip("its masks ignore `position_ids`: refused below")
    target = frozen(family, attn_implementation=attention)
    lengths = (3, 9, 1, 8)
    input_ids = torch.cat([random_tokens(1, 26), random_tokens(1, 26, seed=1)])
    document_ids = documents(*lengths, padding=5).expand(2, -1)
    packed = target(input_ids, document_ids=document_ids)
    separate = [target(document) for document in input_ids[:, :21].split(lengths, dim=1)]
    for name in ("aux_hidden_states", "last_hidden_state"):
        actual, expected = getattr(packed, name), torch.cat([getattr(states, name) for states in separate], dim=1)
        assert actual.isfinite().all()
        torch.testing.assert_close(actual[:, :21], expected, rtol=1e-3, atol=1e-3)


def test_position_ids_alone_mark_documents():
    target = frozen("gpt_oss")
    input_ids, document_ids = random_tokens(1, 9), documents(4, 5)
    position_ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    by_positions, by_documents = (
        target(input_ids, position_ids=position_ids),
        target(input_ids, document_ids=document_ids),
    )
    assert torch.equal(by_positions.last_hidden_state, by_documents.last_hidden_state)


@pytest.mark.parametrize("family", SUPPORTED_FAMILIES)
def test_case_changing_document_one_leaves_document_two_bit_identical(family):
    target = frozen(family)
    input_ids, document_ids = random_tokens(1, 16), documents(6, 10)
    before = target(input_ids, document_ids=document_ids)
    input_ids[:, :6] = random_tokens(1, 6, seed=1)
    after = target(input_ids, document_ids=document_ids)
    assert not torch.equal(before.last_hidden_state[:, :6], after.last_hidden_state[:, :6])
    for name in ("aux_hidden_states", "last_hidden_state"):
        one, two = getattr(before, name)[:, 6:], getattr(after, name)[:, 6:]
        if (
            family in MIXTURES
        ):  # an expert's matrix product has as many rows as tokens of all documents were routed to it
            torch.testing.assert_close(one, two, **CLOSE)
        else:
            assert torch.equal(one, two)


@pytest.mark.parametrize("family", ["llama_dynamic", "phi3_longrope"])
def test_case_dynamic_and_longrope_targets_packed_equals_separate(family):
    """Documents on both sides of the length (16) at which transformers would change the frequencies."""
    target = frozen(family)
    lengths = (30, 5)
    input_ids = random_tokens(1, 35)
    packed = target(input_ids, document_ids=documents(*lengths)).last_hidden_state
    separate = [target(document).last_hidden_state for document in input_ids.split(lengths, dim=1)]
    torch.testing.assert_close(packed, torch.cat(separate, dim=1), **CLOSE)


def test_dynamic_frequencies_are_those_of_the_servers():
    """vLLM builds its table once, for `factor * max_position_embeddings` positions."""
    target = frozen("llama_dynamic")
    base = 1e4 * (4.0 * 4.0 - 3.0) ** (8 / 6)
    torch.testing.assert_close(target.decoder.rotary_emb.inv_freq, base ** -(torch.arange(0, 8, 2) / 8))


def test_longrope_frequencies_are_those_of_the_servers():
    target = frozen("phi3_longrope")
    expected = 1 / (torch.tensor([1.0, 2.0, 4.0, 6.0]) * 1e4 ** (torch.arange(0, 8, 2) / 8))
    torch.testing.assert_close(target.decoder.rotary_emb.inv_freq, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_equals_unpadded(family):
    target = frozen(family)
    input_ids = random_tokens(2, 12)
    document_ids = torch.cat([documents(5, padding=7), documents(12)])
    padded = target(input_ids, document_ids=document_ids)
    alone = target(input_ids[:1, :5])
    assert padded.last_hidden_state.isfinite().all()
    torch.testing.assert_close(padded.aux_hidden_states[:1, :5], alone.aux_hidden_states, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(padded.last_hidden_state[:1, :5], alone.last_hidden_state, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen3_next", "linear_attention"),
        ("mamba", "MambaMixer"),
        ("jamba", "JambaMambaMixer"),
        ("bloom", "eager|sdpa"),
        ("opt", "sdpa"),
    ],
)
def test_packing_is_refused_naming_the_layer_type_or_the_attention(family, reason):
    target = FrozenTarget(tiny_model(family), AUX)
    target(random_tokens(2, 8))
    with pytest.raises(ValueError, match=f"`document_ids` put several documents into one row.*({reason})"):
        target(random_tokens(1, 8), document_ids=documents(3, 5))


def test_packing_is_refused_where_masks_ignore_positions():
    target = frozen("gpt_oss", attn_implementation="eager")
    with pytest.raises(ValueError, match="`attn_implementation='eager'`"):
        target(random_tokens(1, 8), document_ids=documents(3, 5))


# Loading


def test_load_target_takes_causal_and_multimodal_models(tmp_path):
    for family in ("qwen3", "llava"):
        tiny_model(family, dtype=torch.bfloat16).save_pretrained(tmp_path / family)
        model = load_target(str(tmp_path / family))
        assert model.get_decoder().config._attn_implementation == ATTENTION_NAME and not model.training
        assert FrozenTarget(model, AUX).precision == "bfloat16"


@pytest.mark.parametrize(("family", "expected"), [("gemma2", "eager"), ("llama4", "sdpa")])
def test_an_unsupported_attention_falls_back_and_says_so(family, expected, tmp_path, caplog):
    tiny_model(family).save_pretrained(tmp_path)
    model = load_target(str(tmp_path))
    assert model.config._attn_implementation == expected
    assert caplog.text.count("cannot be used with") == 1 and f"Loaded with '{expected}'" in caplog.text


def test_an_adapter_is_applied_to_states_and_head(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "base")
    adapted = get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj", "down_proj", "lm_head"], init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path / "adapter")
    target = FrozenTarget(load_target(str(tmp_path / "base"), adapter=str(tmp_path / "adapter")), AUX)
    input_ids = random_tokens(1, 7)
    with torch.no_grad():
        expected = adapted.eval()(input_ids=input_ids).logits
    torch.testing.assert_close(logits_of(target, target(input_ids).last_hidden_state), expected, **CLOSE)


def test_an_adapter_on_the_embedding_is_refused():
    adapted = get_peft_model(tiny_model("llama"), LoraConfig(r=4, target_modules=["embed_tokens"]))
    with pytest.raises(ValueError, match="merge_and_unload"):
        FrozenTarget(adapted, AUX)


def test_precision_names_the_quantisation():
    model = tiny_model("llama")
    model.config.quantization_config = {"quant_method": "MXFP4"}
    assert FrozenTarget(model, AUX).precision == "mxfp4"


def test_case_target_loaded_under_zero3_is_whole_and_the_flag_is_restored(tmp_path):
    expected = tiny_model("llama")
    expected.save_pretrained(tmp_path)
    active = HfDeepSpeedConfig(ZERO3)
    try:
        model = load_target(str(tmp_path))
        assert is_deepspeed_zero3_enabled()
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, expected.get_parameter(name)), name
        with pytest.raises(OSError):
            load_target(str(tmp_path / "missing"))
        assert is_deepspeed_zero3_enabled()
    finally:
        del active
        gc.collect()
    assert not is_deepspeed_zero3_enabled()


def test_suspension_builds_whole_modules_and_survives_errors():
    active = HfDeepSpeedConfig(ZERO3)
    with pytest.raises(RuntimeError, match="inside"), deepspeed_init_suspended():
        assert not is_deepspeed_zero3_enabled()
        assert type(tiny_model("llama"))(tiny_config("llama")).lm_head.weight.numel() == 96 * 32
        raise RuntimeError("inside")
    assert is_deepspeed_zero3_enabled()
    del active
    gc.collect()

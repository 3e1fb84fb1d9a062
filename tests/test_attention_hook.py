"""`attn_implementation="block_sparse_flash"` on stock transformers models."""

import functools
import importlib
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from draftsmith.ops import block_sparse_flash_attention
from draftsmith.transformers_hooks import (
    ATTENTION_NAME,
    BlockSparseMask,
    UnsupportedAttentionError,
    block_sparse_flash_attention_forward,
)
from tests.tiny_models import SUPPORTED_FAMILIES, UNSUPPORTED_FAMILIES, random_tokens, tiny_config, tiny_model


GENERATING_FAMILIES = ("llama", "mistral", "gemma3", "gpt_oss", "deepseek_v3")
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def pair(family, **options):
    """The same random weights under transformers' eager attention and under ours."""
    return tiny_model(family, attn_implementation="eager", **options), tiny_model(
        family, attn_implementation=ATTENTION_NAME, **options
    )


def logits(model, input_ids, **inputs):
    with torch.no_grad():
        return model(input_ids=input_ids, use_cache=False, **inputs).logits


def packed(*lengths):
    """Position ids, document ids and offsets of documents of these lengths in one row."""
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    document_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    return position_ids, document_ids, offsets


# The name


def test_the_name_is_accepted_wherever_transformers_takes_one(tmp_path):
    config = tiny_config("llama")
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation=ATTENTION_NAME)
    switched = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    switched.set_attn_implementation(ATTENTION_NAME)
    config = tiny_config("llama")
    config._attn_implementation = ATTENTION_NAME
    for candidate in (model, loaded, switched, LlamaForCausalLM(config)):
        assert candidate.config._attn_implementation == candidate.model.config._attn_implementation == ATTENTION_NAME
    assert ATTENTION_NAME not in json.dumps(json.loads((tmp_path / "config.json").read_text()))


def test_stock_models_are_untouched():
    model = tiny_model("llama")
    assert model.config._attn_implementation == "sdpa"
    assert ALL_ATTENTION_FUNCTIONS["sdpa"].__module__ == "transformers.integrations.sdpa_attention"
    mask = create_causal_mask(model.config, torch.zeros(1, 5, 32), None, None, torch.arange(5)[None])
    assert mask is None
    with pytest.raises((ImportError, ValueError)):  # other "flash" names still go to transformers' own check
        tiny_model("llama", attn_implementation="flash_attention_3")
    with pytest.raises(ValueError, match="not supported"):
        tiny_model("llama", attn_implementation="no_such_attention")


@pytest.mark.parametrize("family", UNSUPPORTED_FAMILIES)
def test_families_with_another_attention_are_refused_at_load(family):
    with pytest.raises(UnsupportedAttentionError, match='attn_implementation="sdpa"'):
        tiny_model(family, attn_implementation=ATTENTION_NAME)


# One forward


@pytest.mark.parametrize("family", SUPPORTED_FAMILIES)
def test_equals_eager(family):
    eager, ours = pair(family)
    input_ids = random_tokens(2, 21)
    torch.testing.assert_close(logits(ours, input_ids), logits(eager, input_ids), **CLOSE)


@pytest.mark.parametrize(
    ("family", "fields"), [("llama", {}), ("mistral", {}), ("deepseek_v3", {"first_k_dense_replace": 4})]
)
def test_equals_sdpa_in_fp64(family, fields):
    """Eager attention takes its softmax in fp32, sdpa in fp64."""
    fields = {"dtype": torch.float64, **fields}
    sdpa, ours = (tiny_model(family, attn_implementation=name, **fields) for name in ("sdpa", ATTENTION_NAME))
    input_ids = random_tokens(2, 21)
    torch.testing.assert_close(logits(ours, input_ids), logits(sdpa, input_ids), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_through_the_2d_mask(family, side):
    eager, ours = pair(family)
    input_ids = random_tokens(3, 12)
    padding = torch.tensor([[0], [4], [11]])
    columns = torch.arange(12)
    attention_mask = (columns >= padding if side == "left" else columns < 12 - padding).long()
    position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    inputs = {"attention_mask": attention_mask, "position_ids": position_ids}
    actual, expected = logits(ours, input_ids, **inputs), logits(eager, input_ids, **inputs)
    assert actual.isfinite().all()
    torch.testing.assert_close(actual[attention_mask > 0], expected[attention_mask > 0], **CLOSE)


def test_gradients_equal_eager():
    gradients = []
    for model in pair("gpt_oss"):
        model.train()
        model(input_ids=random_tokens(2, 14), use_cache=False).logits.square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if "self_attn" in name})
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss", "deepseek_v3"])
def test_case_our_attention_name_on_a_stock_target_never_sees_a_future_token(family):
    model = tiny_model(family, attn_implementation=ATTENTION_NAME)
    input_ids = random_tokens(2, 16)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1, :3] = 0
    before = logits(model, input_ids, attention_mask=attention_mask)
    input_ids[:, 10] = (input_ids[:, 10] + 1) % 90
    after = logits(model, input_ids, attention_mask=attention_mask)
    torch.testing.assert_close(after[:, :10], before[:, :10], rtol=1e-5, atol=1e-5)
    assert (after[:, 10] - before[:, 10]).abs().max() > 1e-3


# Packed documents


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("through", ["position_ids", "position_ids and a mask", "document_ids", "cu_seq_lens"])
def test_packed_documents_equal_separate_ones(family, through):
    model = tiny_model(family, attn_implementation=ATTENTION_NAME)
    lengths = (3, 5, 1, 8)
    position_ids, document_ids, offsets = packed(*lengths)
    input_ids = random_tokens(1, sum(lengths))
    extra = {
        "position_ids": {},
        "position_ids and a mask": {"attention_mask": torch.ones_like(position_ids)},  # which hides nothing
        "document_ids": {"document_ids": document_ids, "attention_mask": torch.ones_like(input_ids)},
        "cu_seq_lens": {
            "cu_seq_lens_q": offsets,
            "cu_seq_lens_k": offsets,
            "attention_mask": torch.ones_like(input_ids),
        },
    }[through]
    actual = logits(model, input_ids, position_ids=position_ids, **extra)
    separate = [logits(model, document) for document in input_ids.split(lengths, dim=1)]
    torch.testing.assert_close(actual, torch.cat(separate, dim=1), **CLOSE)


def test_document_ids_and_padding_of_the_mask_combine():
    model = tiny_model("llama", attn_implementation=ATTENTION_NAME)
    position_ids, document_ids, _ = packed(4, 3, 3)
    input_ids = random_tokens(1, 10)
    attention_mask = torch.tensor([[1] * 7 + [0] * 3])
    actual = logits(
        model, input_ids, position_ids=position_ids, document_ids=document_ids, attention_mask=attention_mask
    )
    expected = torch.cat([logits(model, document) for document in input_ids[:, :7].split((4, 3), dim=1)], dim=1)
    torch.testing.assert_close(actual[:, :7], expected, **CLOSE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted")
@pytest.mark.parametrize(("family", "windows"), [("llama", [None]), ("gemma3", [None, 4])])
@pytest.mark.parametrize("visible", [None, 1], ids=["without a mask", "a mask that hides nothing"])
def test_layers_share_what_is_worked_out_of_the_documents(family, windows, visible, monkeypatch):
    pytest.importorskip("triton")
    module = importlib.import_module("draftsmith.ops.block_sparse_attention.key_ranges")
    computed, compute = [], module._key_ranges
    monkeypatch.setattr(module, "_key_ranges", lambda *call: computed.append(call[1]) or compute(*call))
    attention = functools.partial(block_sparse_flash_attention, implementation="triton")
    model = tiny_model(family, attn_implementation=ATTENTION_NAME)
    position_ids, document_ids, _ = packed(4, 3, 3)
    inputs = {"position_ids": position_ids, "document_ids": document_ids}
    if visible is not None:
        inputs["attention_mask"] = torch.full_like(document_ids, visible)
    expected = logits(model, random_tokens(1, 10), **inputs)
    monkeypatch.setattr("draftsmith.transformers_hooks.block_sparse_flash_attention", attention)
    torch.testing.assert_close(logits(model, random_tokens(1, 10), **inputs), expected, **CLOSE)
    assert sorted(computed, key=str) == sorted(windows, key=str)


def test_offsets_need_one_row_and_equal_keys():
    model = tiny_model("llama", attn_implementation=ATTENTION_NAME)
    _, _, offsets = packed(4, 4)
    with pytest.raises(ValueError, match="`cu_seq_lens_q` needs batch size 1.*`document_ids`"):
        logits(model, random_tokens(2, 8), cu_seq_lens_q=offsets, cu_seq_lens_k=offsets)
    with pytest.raises(ValueError, match="`cu_seq_lens_k` differ"):
        logits(model, random_tokens(1, 8), cu_seq_lens_q=offsets, cu_seq_lens_k=torch.tensor([0, 3, 8]).int())


def test_masks_take_linear_memory():
    config = tiny_config("gpt_oss")
    config._attn_implementation = ATTENTION_NAME
    position_ids, _, _ = packed(300, 724)
    mask = create_causal_mask(config, torch.zeros(1, 1024, 32), None, None, position_ids)
    assert isinstance(mask, BlockSparseMask)
    assert mask.query_positions is None and mask.sliding_window is None
    assert mask.document_ids.shape == (1, 1024)


# Decoding


@pytest.mark.parametrize("family", GENERATING_FAMILIES)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_equals_eager_token_for_token(family, cache):
    eager, ours = pair(family)
    input_ids = random_tokens(3, 9)
    attention_mask = (torch.arange(9) >= torch.tensor([[0], [3], [7]])).long()
    options = {"max_new_tokens": 14, "do_sample": False, "attention_mask": attention_mask, "eos_token_id": None}
    expected = eager.generate(input_ids, **options)
    actual = ours.generate(input_ids, **options, cache_implementation=cache)
    assert actual.tolist() == expected.tolist()


@pytest.mark.parametrize("family", GENERATING_FAMILIES)
def test_several_new_tokens_against_a_cache(family):
    """What verifying a draft does: a forward of many queries after a prefill, past a sliding window."""
    eager, ours = pair(family)
    input_ids = random_tokens(2, 17)
    expected = logits(eager, input_ids)
    with torch.no_grad():
        prefix = ours(input_ids=input_ids[:, :9], use_cache=True)
        rest = ours(input_ids=input_ids[:, 9:], past_key_values=prefix.past_key_values)
    torch.testing.assert_close(torch.cat([prefix.logits, rest.logits], dim=1), expected, **CLOSE)


def test_padding_between_tokens_is_exact_in_decoding_and_refused_in_training():
    eager, ours = pair("llama")
    input_ids = random_tokens(1, 10)
    attention_mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1, 1, 1]])
    with torch.no_grad():
        prefix = ours(input_ids=input_ids[:, :7], use_cache=True)
        actual = ours(
            input_ids=input_ids[:, 7:], past_key_values=prefix.past_key_values, attention_mask=attention_mask
        )
        prefix = eager(input_ids=input_ids[:, :7], use_cache=True)
        expected = eager(
            input_ids=input_ids[:, 7:], past_key_values=prefix.past_key_values, attention_mask=attention_mask
        )
    torch.testing.assert_close(actual.logits, expected.logits, **CLOSE)
    with pytest.raises(UnsupportedAttentionError, match="padding between tokens"):
        logits(ours, input_ids, attention_mask=attention_mask)


# What is refused, and what goes to transformers


def test_dropout_is_refused_in_training_only():
    model = tiny_model("llama", attn_implementation=ATTENTION_NAME, attention_dropout=0.1)
    logits(model, random_tokens(1, 4))
    with pytest.raises(ValueError, match="`dropout`"):
        model.train()(input_ids=random_tokens(1, 4))


@pytest.mark.parametrize("name", ["softcap", "position_bias", "indices"])
def test_arguments_that_change_the_result_are_refused_by_name(name):
    states = torch.randn(1, 2, 4, 8)
    with pytest.raises(UnsupportedAttentionError, match=f"`{name}`"):
        block_sparse_flash_attention_forward(torch.nn.Identity(), states, states, states, None, **{name: 30.0})


def test_documents_and_sinks_are_refused_where_a_dense_mask_would_drop_them():
    states, mask = torch.randn(1, 2, 4, 8), torch.ones(1, 1, 4, 4, dtype=torch.bool)
    for name in ("s_aux", "document_ids", "cu_seq_lens_q"):
        with pytest.raises(UnsupportedAttentionError, match=f"`{name}` with a dense mask"):
            block_sparse_flash_attention_forward(torch.nn.Identity(), states, states, states, mask, **{name: states})


def test_custom_mask_functions_are_refused_by_name():
    config = tiny_config("llama")
    config._attn_implementation = ATTENTION_NAME
    with pytest.raises(UnsupportedAttentionError, match="or_masks"):
        create_causal_mask(config, torch.zeros(1, 5, 32), None, None, or_mask_function=lambda b, h, q, k: q == k)


def test_explicit_4d_masks_are_honoured_and_refused_with_sinks():
    eager, ours = pair("llama")
    input_ids = random_tokens(1, 6)
    visible = torch.rand(6, 6, generator=torch.Generator().manual_seed(0)).add(torch.eye(6)).gt(0.5).tril()[None, None]
    additive = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    expected = logits(eager, input_ids, attention_mask=additive)
    torch.testing.assert_close(logits(ours, input_ids, attention_mask=visible), expected, **CLOSE)
    torch.testing.assert_close(logits(ours, input_ids, attention_mask=additive), expected, **CLOSE)
    with pytest.raises(UnsupportedAttentionError, match="`s_aux`"):
        logits(tiny_model("gpt_oss", attn_implementation=ATTENTION_NAME), input_ids, attention_mask=additive)


def test_bidirectional_text_model_equals_eager():
    eager, ours = pair("llama", is_causal=False)
    input_ids = random_tokens(2, 7)
    torch.testing.assert_close(logits(ours, input_ids), logits(eager, input_ids), **CLOSE)


@pytest.mark.parametrize("switch", ["from_config", "set_attn_implementation"])
def test_vision_towers_of_multimodal_targets_keep_their_attention(switch):
    """Two images, windowed vision attention: Qwen2.5-VL hands packed images over as offsets under any "flash" name."""
    pixels, grid = torch.randn(2 * 64, 3 * 2 * 4 * 4), torch.tensor([[1, 8, 8], [1, 8, 8]])
    eager, ours = (
        pair("qwen2_5_vl") if switch == "from_config" else (tiny_model("qwen2_5_vl"), tiny_model("qwen2_5_vl"))
    )
    if switch == "set_attn_implementation":
        ours.set_attn_implementation(ATTENTION_NAME)
    with torch.no_grad():
        expected = eager.model.visual(pixels, grid_thw=grid).pooler_output
        actual = ours.model.visual(pixels, grid_thw=grid).pooler_output
    torch.testing.assert_close(actual, expected, **CLOSE)


@pytest.mark.parametrize("switch", ["from_config", "set_attn_implementation"])
def test_pixtral_towers_keep_two_images_apart(switch):
    """Pixtral drops its block mask under any "flash" name, so it must not be run under ours."""
    images, sizes = torch.randn(2, 3, 8, 8), torch.tensor([[8, 8], [8, 4]])
    eager, ours = (
        tiny_model("mistral3", attn_implementation=name)
        for name in ("eager", ATTENTION_NAME if switch == "from_config" else "eager")
    )
    ours.set_attn_implementation(ATTENTION_NAME)
    with torch.no_grad():
        expected = eager.model.vision_tower(images, image_sizes=sizes).last_hidden_state
        actual = ours.model.vision_tower(images, image_sizes=sizes).last_hidden_state
    assert ours.model.language_model.config._attn_implementation == ATTENTION_NAME
    torch.testing.assert_close(actual, expected, **CLOSE)


def test_llava_with_an_image_equals_eager():
    eager, ours = pair("llava")
    input_ids = random_tokens(1, 12)
    input_ids[0, 2:6] = 95
    inputs = {"pixel_values": torch.randn(1, 3, 8, 8)}
    torch.testing.assert_close(logits(ours, input_ids, **inputs), logits(eager, input_ids, **inputs), **CLOSE)


# The draft model's arguments


def test_op_arguments_pass_through():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 3, 8, generator=generator)
    key, value = (torch.randn(1, 2, 7, 8, generator=generator) for _ in range(2))
    diagonals = [torch.randn(1, 2, 3, 8, generator=generator) for _ in range(2)]
    arguments = {
        "document_ids": torch.tensor([[0, 0, 0, 1, 1, 1, -1]]),
        "query_positions": torch.tensor([[1, 4, -1]]),
        "sliding_window": 2,
        "diagonal_keys": diagonals[:1],
        "diagonal_values": diagonals[1:],
    }
    actual, weights = block_sparse_flash_attention_forward(torch.nn.Identity(), query, key, value, None, **arguments)
    expected = block_sparse_flash_attention(query, key, value, **arguments)
    assert weights is None
    torch.testing.assert_close(actual, expected.transpose(1, 2))


# On a GPU, where kernels serve bf16

GPU_FAMILIES = {
    "llama": {"head_dim": 32},
    "qwen3": {"head_dim": 128},
    "gpt_oss": {"head_dim": 64, "sliding_window": 50, "num_experts_per_tok": 4},  # all: no choice hangs on a rounding
}


def gpu_model(family, attn_implementation, dtype=torch.bfloat16):
    sizes = {"hidden_size": 128, "max_position_embeddings": 1024, **GPU_FAMILIES[family]}
    model = tiny_model(family, attn_implementation=attn_implementation, dtype=torch.bfloat16, **sizes)
    return model.to("cuda", dtype)


def errors_from_fp32(family, ours, separate):
    """The error of `ours`, and of eager attention in bf16 on the `separate` documents, from fp32."""
    exact, eager = (
        torch.cat([logits(gpu_model(family, "eager", dtype), document) for document in separate], dim=1).float()
        for dtype in (torch.float32, torch.bfloat16)
    )
    return (ours - exact).norm().item(), (eager - exact).norm().item()


@pytest.fixture(params=["best engine", "triton"])
def engine(request, monkeypatch):
    if request.param == "triton":
        attention = functools.partial(block_sparse_flash_attention, implementation="triton")
        monkeypatch.setattr("draftsmith.transformers_hooks.block_sparse_flash_attention", attention)


@pytest.mark.gpu
@pytest.mark.parametrize("family", GPU_FAMILIES)
def test_bf16_logits_equal_eager_on_a_gpu(family, engine):
    input_ids = random_tokens(2, 333).cuda()
    error, eager_error = errors_from_fp32(family, logits(gpu_model(family, ATTENTION_NAME), input_ids), [input_ids])
    assert error <= 2 * eager_error


@pytest.mark.gpu
@pytest.mark.parametrize("family", GPU_FAMILIES)
def test_packed_documents_equal_separate_ones_on_a_gpu(family, engine):
    lengths = (100, 257, 1, 150)
    input_ids, position_ids = random_tokens(1, sum(lengths)).cuda(), packed(*lengths)[0].cuda()
    ours = logits(gpu_model(family, ATTENTION_NAME), input_ids, position_ids=position_ids)
    error, eager_error = errors_from_fp32(family, ours, input_ids.split(lengths, dim=1))
    assert error <= 2 * eager_error


@pytest.mark.gpu
@pytest.mark.parametrize("family", GPU_FAMILIES)
def test_no_future_token_is_seen_on_a_gpu(family, engine):
    model, input_ids = gpu_model(family, ATTENTION_NAME), random_tokens(2, 300).cuda()
    before = logits(model, input_ids)
    input_ids[:, 200] = (input_ids[:, 200] + 1) % 90
    after = logits(model, input_ids)
    assert torch.equal(before[:, :200], after[:, :200])
    assert (after[:, 200] - before[:, 200]).abs().max() > 0.5


@pytest.mark.gpu
@pytest.mark.parametrize("family", GPU_FAMILIES)
def test_generate_equals_eager_on_a_gpu(family):
    input_ids = random_tokens(3, 70).cuda()
    attention_mask = (torch.arange(70) >= torch.tensor([[0], [3], [60]])).long().cuda()
    options = {"max_new_tokens": 10, "do_sample": False, "attention_mask": attention_mask, "eos_token_id": None}
    expected, actual = (
        gpu_model(family, name, torch.float32).generate(input_ids, **options) for name in ("eager", ATTENTION_NAME)
    )
    assert actual.tolist() == expected.tolist()

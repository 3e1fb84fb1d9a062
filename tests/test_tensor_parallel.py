"""What `target_tp` refuses, before anything is loaded. What it computes: tests/trainer/test_target_tp.py."""

import pytest
import torch.distributed as dist

from draftsmith.target import load_target
from draftsmith.tensor_parallel import check_placement
from tests.tiny_models import tiny_config


@pytest.fixture
def four_ranks(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_oss", "deepseek_v3", "llava"])
@pytest.mark.parametrize("size", [1, 2])
def test_families_with_a_plan_are_taken(four_ranks, family, size):
    check_placement(tiny_config(family), size)


@pytest.mark.parametrize(
    ("family", "fields", "size", "options", "message"),
    [
        ("llama", {}, 0, {}, "`target_tp` is 0"),
        ("llama", {}, 3, {}, "does not divide the 4 ranks"),
        ("llama", {}, 4, {}, "does not divide the target's `num_key_value_heads` 2"),
        ("qwen3", {"num_attention_heads": 3}, 2, {}, "does not divide the target's `num_attention_heads` 3"),
        ("gpt_oss", {"num_local_experts": 3}, 2, {}, "does not divide the target's `num_local_experts` 3"),
        ("bloom", {}, 2, {}, "no tensor-parallel plan for `bloom`"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, 2, {}, "this target is quantised"),
        ("llama", {}, 2, {"gguf_file": "model.gguf"}, "this target is quantised"),
        ("llama", {}, 2, {"adapter": "tuned"}, "`target_adapter` is not sharded"),
        ("llama", {}, 2, {"device_map": "auto"}, "`device_map` and `target_tp` both place the target"),
    ],
)
def test_what_cannot_be_sharded_is_named(four_ranks, family, fields, size, options, message):
    with pytest.raises(ValueError, match=message):
        check_placement(tiny_config(family, **fields), size, **options)


def test_a_single_process_is_told_to_use_a_launcher(tmp_path):
    tiny_config("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="start them with `torchrun --nproc_per_node 2`"):
        load_target(str(tmp_path), tp_size=2)

"""The benchmark of training steps on CPU: its dry run, what it checks before it times, and what it counts."""

import json
import math
import sys
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode


sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import benchmark
from benchmarks.common import Refused
from benchmarks.train_cases import CASES, QUICK_CASES, SHAPES, Case, make_inputs
from benchmarks.train_check import PeerReference, Reference
from benchmarks.train_contenders import CONTENDERS, Dense, Ours
from benchmarks.train_meters import compiled_graphs, recorded_waits
from benchmarks.train_profile import GROUPS, group_of
from benchmarks.train_whole import WHOLE_CONTENDERS, GemmsAlone, Step, Whole

from benchmarks import train, train_contenders
from draftsmith.ops.streaming_loss.reference import reference_draft_loss


CPU = torch.device("cpu")
QUARTER = Case("quarter", "llama", 0, steps=3, share=25).tiny()
PACKED = Case("packed", "gpt-oss", 0, steps=3, share=50, documents=4, draft_vocabulary=None).tiny()


def not_installed(module):
    raise Refused("not installed")


def run(*arguments, path):
    benchmark.main(["train", "--dry-run", *arguments, "--output", str(path)])
    rows = json.loads(path.read_text())["rows"]
    return {(row["case"], row["contender"]): row for row in rows}


def test_runs_dry(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train, "peer", not_installed)
    path = tmp_path / "train.json"
    whole, captured = "gpt-oss 8k, K 3, full, whole", "smollm2 packed 16x512, whole"
    rows = run("--cases", "llama 2k", "llama 8k, 25%", whole, captured, path=path)
    reasons = {contender: row["reason"] for (_, contender), row in rows.items() if row["status"] != "ok"}
    assert reasons == {"specforge compact": "not installed", "specforge": "not installed"}
    ours = [row for (_, contender), row in rows.items() if contender in ("ours", "ours recompute")]
    assert len(ours) == 2 + 1 + 1 + 1
    assert all(row["error_over_dense"] <= 2 and row["tokens_per_second"] > 0 for row in ours)
    assert all(len(row["rounds_ms"]) == 3 and row["recompilations"] == 0 for row in ours)
    graphs = {"ours captured", "target captured"}
    for case, left_out in ((whole, {"ours recompute", *graphs}), (captured, {"ours recompute"})):
        assert {contender for name, contender in rows if name == case} == WHOLE_CONTENDERS.keys() - left_out
    parts = [rows[whole, name]["ms"] for name in ("target", "attention", "gemms")]
    assert rows[whole, "ours"]["parts_ms"] == pytest.approx(sum(parts))
    assert rows[whole, "gemms"]["tflops"] > 0

    benchmark.main(["train-figures", "--results", str(path), "--output-dir", str(tmp_path)])
    page = (tmp_path / "train.md").read_text()
    for cell in ("| llama 2k | dense |", f"| {whole} | optimizer |", "25% over all supervised", ">= 18000"):
        assert cell in page
    assert 5_000 < (tmp_path / "train_lengths.png").stat().st_size < 150_000

    capsys.readouterr()
    benchmark.main(["train", "--dry-run", "--cases", "llama 8k", "--contenders", "ours", "--profile"])
    printed = capsys.readouterr().out
    assert "llama 8k, ours: " in printed and "forward alone" in printed and " x " in printed


def test_what_fails_is_recorded_and_the_rest_goes_on(tmp_path, monkeypatch):
    def exhausted(inputs):
        raise torch.OutOfMemoryError("of 139 GiB")

    monkeypatch.setitem(CONTENDERS, "dense", exhausted)
    rows = run("--cases", "llama 2k", "--contenders", "dense", "ours", path=tmp_path / "train.json")
    assert rows["llama 2k", "dense"]["reason"] == "out of memory"
    assert rows["llama 2k", "ours"]["status"] == "ok"
    rows = run("--cases", "llama 2k", "--time-limit", "0", path=tmp_path / "train.json")
    assert {row["reason"] for row in rows.values()} == {"out of time"}


@pytest.mark.parametrize("case", [QUARTER, PACKED], ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ours_and_the_dense_step_pass(case, dtype):
    reference = Reference(case, CPU, dtype)
    checked = {name.split(".")[-2] for name in reference.truth if name != "loss"}
    assert checked >= {"fc", "q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "lm_head"}
    for build in (Ours, partial(Ours, recompute=True), Dense):
        assert reference.check(build) <= 2


def test_the_dense_loss_is_the_reference():
    inputs = make_inputs(QUARTER, CPU, torch.float64)
    torch.testing.assert_close(Dense(inputs).results(), Dense(inputs, draft_loss=reference_draft_loss).results())


@pytest.mark.parametrize("name", ["loss", "fc.weight", "midlayer.self_attn.k_proj.weight", "lm_head.weight"])
def test_a_wrong_step_is_never_timed(name):
    reference = Reference(QUARTER, CPU, torch.bfloat16)
    peers = PeerReference(QUARTER, CPU, torch.bfloat16)
    right, of_peers = Ours(reference.inputs).results(), Ours(peers.inputs).results()

    def returning(results):
        return lambda inputs: SimpleNamespace(results=lambda: dict(results))

    assert reference.check(returning(right)) <= 2
    assert peers.check(returning(of_peers)) > 0.99
    for factor in (1.05, torch.nan):
        with pytest.raises(Refused, match="wrong"):
            reference.check(returning({**right, name: right[name] * factor}))
    with pytest.raises(Refused, match="missing"):
        reference.check(returning({key: value for key, value in right.items() if key != name}))
    if name != "loss":
        for factor in (1.2, -1, torch.nan):
            with pytest.raises(Refused, match="another step"):
                peers.check(returning({**of_peers, name: of_peers[name] * factor}))


def test_specforge_computes_the_same_step():
    pytest.importorskip("specforge")
    with torch._dynamo.config.patch(disable=True):  # on CPU it would be compiled from C++
        assert PeerReference(QUARTER, CPU, torch.float32).check(CONTENDERS["specforge sdpa"]) > 0.9999


def test_packed_documents_are_specforges_batch():
    inputs = make_inputs(PACKED, CPU, torch.float32)
    peer = SimpleNamespace(inputs=inputs)
    supervised = train_contenders.SpecForge._as_batch(peer, inputs.batch.supervised)
    assert supervised.shape == (4, 16)
    assert (supervised == supervised[0]).all()
    assert int(supervised.sum()) == len(inputs.batch.tensors["row_sets"][0])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_are_those_of_the_design(case):
    config = case.draft_config
    mlp = {"llama": 14336, "qwen3": 12288, "gpt-oss": 17280, "smollm2": 1536}[case.shape]
    heads = {"gpt-oss": (64, 8, 64), "smollm2": (9, 3, 64)}.get(case.shape, (32, 8, 128))
    assert config.intermediate_size == mlp
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == heads
    assert config.draft_vocab_size == case.draft_vocabulary or config.vocab_size
    assert case.length % case.documents == 0
    assert abs(100 * case.loss_mask().float().mean() - case.share) < 0.1
    assert set(case.contenders) <= (WHOLE_CONTENDERS if case.whole else CONTENDERS).keys()
    small = case.small()
    assert small.draft_config.head_dim == config.head_dim
    assert small.draft_config.num_attention_heads // small.draft_config.num_key_value_heads == heads[0] // heads[1]
    assert abs(100 * small.loss_mask().float().mean() - case.share) < 1


def test_quick_cases_cover_the_shapes_of_the_bars():
    assert {case.shape for case in QUICK_CASES} == SHAPES.keys() - {"qwen3", "smollm2"}
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", [QUARTER, PACKED], ids=lambda case: case.name)
def test_products_are_those_of_the_step(case):
    step = Step(case, CPU, torch.float32)
    states = step.target(step.batch.input_ids, document_ids=step.batch.tensors["document_ids"])
    inputs = (states.aux_hidden_states, states.last_hidden_state, step.target.head_weight)
    in_place = {torch.ops.aten.addmm_: lambda total, left, right, **_: 2 * math.prod(left) * right[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        step.batch.step(step.draft, *inputs).backward()
    counts = counter.get_flop_counts()["Global"]
    products = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
    assert GemmsAlone(step).flops == sum(counts.get(product, 0) for product in products)


def test_a_whole_step_trains():
    step = Step(QUARTER, CPU, torch.float32)
    before = {name: parameter.clone() for name, parameter in step.draft.named_parameters()}
    assert Whole(step).run() == []
    changed = {name for name, parameter in step.draft.named_parameters() if not parameter.equal(before[name])}
    assert changed == before.keys()
    assert all(parameter.grad is None for parameter in step.draft.parameters())


def test_waits_and_compilations_are_counted(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    places = Counter()
    with recorded_waits(places):
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert modes == ["warn", "default"]
    assert list(places.values()) == [2] and next(iter(places)).startswith("test_train_benchmark.py:")

    graphs = compiled_graphs()
    doubled = torch.compile(lambda tensor: 2 * tensor, backend="eager", dynamic=False)
    for length in (2, 2, 3):
        doubled(torch.ones(length))
    assert compiled_graphs() == graphs + 2


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNN", "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "gemm"),
        ("kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__", "attention"),
        ("_merge_kernel", "attention"),
        ("_teacher_kernel", "loss rows"),
        ("triton_poi_fused_copy_mul_silu_0", "norms and pointwise"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>", "norms and pointwise"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>", "norms and pointwise"),
        ("void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>", "copies and indexing"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<uint4>", "copies and indexing"),
        ("Memcpy DtoD (Device -> Device)", "copies and indexing"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("no such kernel", "other"),
    ],
)
def test_kernels_are_grouped_by_name(kernel, group):
    assert group in (*GROUPS, "other")
    assert group_of(kernel) == group

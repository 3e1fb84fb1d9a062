"""The target's forward as CUDA graphs: the states of the same forward without, for whatever batch is replayed.

Without a GPU a stand-in for a graph does what a replay does: it runs on the buffers, into the tensors of one result.
The real ones: python -m pytest -m gpu tests/test_captured_forwards.py
"""

import functools
import logging
from dataclasses import dataclass

import pytest
import torch

from draftsmith import captured_forwards, cuda_graphs
from draftsmith.captured_forwards import MAX_GRAPHS, MULTIPLE, CapturedForwards
from draftsmith.ops import block_sparse_flash_attention
from draftsmith.ops.block_sparse_attention import fa4
from draftsmith.target import FrozenTarget
from draftsmith.transformers_hooks import ATTENTION_NAME
from tests.tiny_models import random_tokens, tiny_model
from tests.trainer.common import logged, make_rows, make_target, make_trainer


AUX = (1, 2, 3)
LAYOUTS = [(64,), (28, 36), (1, 3, 60), (64,), (16, 16, 16, 16), (63, 1)]


@dataclass
class Result:
    doubled: torch.Tensor
    documents: torch.Tensor


@pytest.fixture
def captures(monkeypatch):
    """The memory pools of the graphs that were captured."""
    pools = []

    def capture(function, device, pool):
        pools.append(pool)
        result = function()
        for tensor in vars(result).values():
            tensor.zero_()  # a capture computes nothing

        def replay():
            for name, tensor in vars(function()).items():
                vars(result)[name].copy_(tensor)
            return result

        return replay

    monkeypatch.setattr(cuda_graphs, "capture", capture)
    monkeypatch.setattr(cuda_graphs, "exist_on", lambda device: True)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, len(pools)))
    return pools


@pytest.fixture
def failures(monkeypatch):
    """Captures that failed."""
    tried = []

    def capture(function, device, pool):
        tried.append(pool)
        raise RuntimeError("operation not permitted when stream is capturing\nSearch for it in the manual.")

    monkeypatch.setattr(cuda_graphs, "capture", capture)
    monkeypatch.setattr(cuda_graphs, "exist_on", lambda device: True)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    return tried


def batch(*lengths, padding=0, seed=0, device="cpu"):
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    documents = torch.nn.functional.pad(documents, (0, padding), value=-1)[None]
    return random_tokens(1, documents.shape[1], seed=seed).to(device), documents.to(device)


def states_of(target, given):
    return target(given[0], document_ids=given[1])


def assert_equal(states, expected):
    for name, tensor in vars(expected).items():
        assert torch.equal(vars(states)[name], tensor), name


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt_oss"])
def test_states_are_those_without_graphs(family, captures):
    model = tiny_model(family, attn_implementation=ATTENTION_NAME)
    plain, target = FrozenTarget(model, AUX), FrozenTarget(model, AUX)
    target.capture_forward()
    batches = [batch(*lengths, seed=seed) for seed, lengths in enumerate(LAYOUTS)]
    batches += [batch(*lengths, padding=MULTIPLE, seed=seed) for seed, lengths in enumerate(LAYOUTS)]
    batches = [*batches[::2], *batches[1::2]]  # of two lengths in turn
    states = [states_of(target, given) for given in batches]  # all kept while others are computed
    for given, got in zip(batches, states, strict=True):
        assert_equal(got, states_of(plain, given))
        assert not got.last_hidden_state.requires_grad and not got.last_hidden_state.is_inference()
    assert captures == [(0, 0), (0, 0)]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rows_that_end_a_little_earlier_are_one_shape(family, captures):
    """Packed rows end where the next document did not fit; other sizes of products may round otherwise."""
    model = tiny_model(family, attn_implementation=ATTENTION_NAME)
    plain, target = FrozenTarget(model, AUX), FrozenTarget(model, AUX)
    target.capture_forward()
    for seed, lengths in enumerate([(50,), (20, 44), (1, 32), (30, 30), (63,), (40,)]):
        given = batch(*lengths, padding=seed % 2, seed=seed)
        states, expected = states_of(target, given), states_of(plain, given)
        for name, tensor in vars(expected).items():
            torch.testing.assert_close(vars(states)[name], tensor, rtol=1e-5, atol=1e-5)
            assert vars(states)[name].is_contiguous()
    assert len(captures) == 1


def test_what_is_padded_says_so(captures):
    calls = []
    ids, documents = (torch.cat([tensor, tensor + 1]) for tensor in batch(30, 5))
    result = CapturedForwards("llama").run(double(calls), ids, documents)
    assert torch.equal(result.doubled, ids * 2) and result.doubled.is_contiguous()
    (padded, padding_marked) = calls[0]
    assert padded.shape == (2, MULTIPLE) and bool((padding_marked[:, 35:] == -1).all())
    assert torch.equal(padding_marked[:, :35], documents)


def double(calls):
    def forward(input_ids, document_ids):
        calls.append((input_ids, document_ids))
        return Result(input_ids * 2, document_ids.clone())

    return forward


def test_the_first_batch_runs_as_it_is_and_the_second_on_buffers(captures):
    calls = []
    forwards, forward = CapturedForwards("llama"), double(calls)
    for seed in range(4):
        given = batch(60, 4, seed=seed)
        result = forwards.run(forward, *given)
        assert torch.equal(result.doubled, given[0] * 2)
        if seed == 0:
            assert calls[0][0] is given[0] and calls[0][1] is given[1]
        else:
            assert all(buffer is not tensor for buffer, tensor in zip(calls[-1], given, strict=True))
    assert all(later[1] is calls[1][1] for later in calls[1:])
    assert len(captures) == 1


def test_shapes_beyond_the_most_that_are_recorded_run_as_they_are(captures):
    calls = []
    forwards, forward = CapturedForwards("llama"), double(calls)
    lengths = range(MULTIPLE, (MAX_GRAPHS + 4) * MULTIPLE, MULTIPLE)
    for seed in range(3):
        for length in lengths:
            given = batch(length, seed=seed)
            assert torch.equal(forwards.run(forward, *given).doubled, given[0] * 2)
    assert len(captures) == MAX_GRAPHS and len(set(captures)) == 1
    assert calls[-1][0] is given[0]


def test_a_forward_that_cannot_be_captured_goes_on_without(failures, caplog):
    model = tiny_model("llama", attn_implementation=ATTENTION_NAME)
    plain, target = FrozenTarget(model, AUX), FrozenTarget(model, AUX)
    target.capture_forward()
    with caplog.at_level(logging.WARNING):
        for lengths in ((64,), (8, 56), (64,), (3, 4), (7,)):
            assert_equal(states_of(target, batch(*lengths)), states_of(plain, batch(*lengths)))
    assert len(failures) == 1
    assert [record.getMessage() for record in caplog.records if record.name == captured_forwards.__name__] == [
        "Running `llama` without CUDA graphs, since capturing one failed: "
        "operation not permitted when stream is capturing"
    ]


def test_a_failure_frees_the_graphs_before_it(captures, monkeypatch):
    calls = []
    forwards, forward = CapturedForwards("llama"), double(calls)
    for length in (64, 64, 128):
        forwards.run(forward, *batch(length))

    def out_of_memory(function, device, pool):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(cuda_graphs, "capture", out_of_memory)
    for length in (128, 64):
        given = batch(length, seed=length)
        assert torch.equal(forwards.run(forward, *given).doubled, given[0] * 2)
        assert calls[-1][0] is given[0]


def test_on_the_cpu_nothing_is_captured():
    calls = []
    forwards, forward = CapturedForwards("llama"), double(calls)
    for _ in range(3):
        given = batch(6)
        forwards.run(forward, *given)
        assert calls[-1][0] is given[0]


def test_checks_of_the_target_run_as_they_are(captures):
    model = tiny_model("llama", attn_implementation=ATTENTION_NAME)
    target = FrozenTarget(model, AUX)
    target.capture_forward()
    for _ in range(3):
        target.verify_head(random_tokens(1, 9))
    assert not captures


def test_parts_of_a_target_are_refused():
    model = tiny_model("llama")
    model.model.layers[1].to("meta")  # as accelerate leaves what it has taken off the GPU
    with pytest.raises(ValueError, match="`capture_target` needs the whole target on one GPU.* on cpu, meta"):
        FrozenTarget(model, AUX).capture_forward()


def test_a_target_in_shards_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`capture_target` records .* whole target, but `target_tp` is 2: leave one"):
        make_trainer(tmp_path, make_rows([9]), target_tp=2, capture_target=True)


def test_training_is_the_same(tmp_path, captures):
    """Two epochs with accumulation, and evaluations between: states are kept while others are computed."""
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 6}
    options |= {"eval_strategy": "steps", "eval_steps": 3, "keep_target_states": False}
    losses = []
    for capture in (False, True):
        target = make_target()
        target.set_attn_implementation(ATTENTION_NAME)
        rows = make_rows([21, 14, 21, 14, 21, 21])
        trainer = make_trainer(
            tmp_path, rows, eval_rows=make_rows([14, 17], seed=1), target=target, capture_target=capture, **options
        )
        trainer.train()
        losses.append((logged(trainer, "loss"), logged(trainer, "eval_loss")))
        assert bool(captures) == capture
    assert losses[0] == losses[1] and len(losses[0][0]) == 6 and len(losses[0][1]) == 2


# On a GPU, with real graphs

GPU_LAYOUTS = [(320,), (100, 220), (320,), (1, 150, 169), (64, 64, 64, 64, 64), (319, 1)]
SIZES = {"hidden_size": 128, "max_position_embeddings": 1024}


def gpu_model(family):
    fields = {"llama": {"head_dim": 32}, "gemma3": {"head_dim": 64, "sliding_window": 50}, "qwen3": {"head_dim": 128}}
    options = {"attn_implementation": ATTENTION_NAME, "dtype": torch.bfloat16, **SIZES, **fields[family]}
    return tiny_model(family, **options).cuda()


def attend_by(monkeypatch, engine):
    attention = functools.partial(block_sparse_flash_attention, implementation=engine)
    monkeypatch.setattr("draftsmith.transformers_hooks.block_sparse_flash_attention", attention)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
def test_replayed_states_are_bit_by_bit_those_of_the_forward(family, compiled, monkeypatch, replays, caplog):
    """Also of other documents than the graph was captured with, of which the first batches have one alone."""
    attend_by(monkeypatch, "triton")
    target = FrozenTarget(gpu_model(family), AUX)
    if compiled:
        target.compile_layers()
    target.capture_forward()
    batches = [batch(*lengths, seed=seed, device="cuda") for seed, lengths in enumerate(GPU_LAYOUTS)]
    batches += [
        batch(*lengths, padding=MULTIPLE, seed=seed, device="cuda") for seed, lengths in enumerate(GPU_LAYOUTS)
    ]
    batches = [*batches[::2], *batches[1::2]]  # of two lengths in turn
    with caplog.at_level(logging.WARNING, captured_forwards.__name__):
        states = [states_of(target, given) for given in batches]
    assert not caplog.records
    assert len(replays) == len(batches) - 2 and len(set(replays)) == 2
    monkeypatch.setattr(target, "_captured", None)  # the same compiled layers, since another compilation may round
    for given, got in zip(batches, states, strict=True):
        assert_equal(got, states_of(target, given))


@pytest.mark.gpu
def test_rows_that_end_a_little_earlier_are_replayed_by_one_graph(monkeypatch, replays):
    attend_by(monkeypatch, "triton")
    target = FrozenTarget(gpu_model("llama"), AUX)
    target.capture_forward()
    given = [batch(100, length, seed=length, device="cuda") for length in (220, 157, 200, 219, 180)]
    states = [states_of(target, one) for one in given]
    assert len(replays) == len(given) - 1 and len(set(replays)) == 1
    monkeypatch.setattr(target, "_captured", None)
    for one, got in zip(given, states, strict=True):
        for name, expected in vars(states_of(target, one)).items():
            error = (vars(got)[name] - expected).float().norm() / expected.float().norm()
            assert error < 1e-2, (name, float(error))


@pytest.mark.gpu
def test_an_engine_that_reads_documents_on_the_host_is_not_captured(monkeypatch, replays, caplog):
    if reason := fa4.refuses(torch.empty(1, 1, 1, 64, dtype=torch.bfloat16, device="cuda"), None, None):
        pytest.skip(reason)
    attend_by(monkeypatch, "fa4")
    model = gpu_model("gemma3")
    plain, target = FrozenTarget(model, AUX), FrozenTarget(model, AUX)
    target.capture_forward()
    with caplog.at_level(logging.WARNING, captured_forwards.__name__):
        for seed, lengths in enumerate(GPU_LAYOUTS):
            given = batch(*lengths, seed=seed, device="cuda")
            assert_equal(states_of(target, given), states_of(plain, given))
    assert not replays
    (record,) = caplog.records
    assert "FlashAttention 4 reads documents on the host" in record.getMessage()
    assert torch.rand(4, device="cuda").isfinite().all()


@pytest.mark.gpu
def test_training_on_a_gpu_is_the_same(tmp_path, monkeypatch, replays):
    attend_by(monkeypatch, "triton")
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 6}
    losses = []
    for capture in (False, True):
        target = make_target()
        target.set_attn_implementation(ATTENTION_NAME)
        rows = make_rows([21, 14, 21, 14, 21, 21])
        options |= {"use_cpu": False, "bf16": True, "capture_target": capture}
        trainer = make_trainer(tmp_path, rows, target=target.bfloat16(), **options)
        trainer.train()
        losses.append(logged(trainer, "loss"))
        assert bool(replays) == capture
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)

"""The unroll against the plain mathematics and against serial drafting, in fp64."""

import pytest
import torch
from transformers import DynamicCache, GptOssConfig, LlamaConfig, Qwen3Config

from draftsmith import Eagle3DraftConfig, Eagle3DraftModel
from draftsmith.alignment import row_sets
from draftsmith.models.eagle3 import unroll_eagle3
from draftsmith.ops.block_sparse_attention import sdpa

from .plain_unroll import plain_loss


SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 8,
}
ROPES = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16, "rope_theta": 5e5,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    "longrope": {
        "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "factor": 4.0,
        "original_max_position_embeddings": 16, "rope_theta": 1e4,
    },
}  # fmt: skip
TARGET_CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
    "gpt_oss": GptOssConfig(**{**SHAPE, "num_attention_heads": 8}, head_dim=16, num_local_experts=2, sliding_window=4),
}


def make_model(target_config=None, *, draft_vocab_size=None, dtype=torch.float64, seed=0, **options):
    torch.manual_seed(seed)
    config = Eagle3DraftConfig.from_target(
        target_config or TARGET_CONFIGS["llama"], draft_vocab_size=draft_vocab_size, initializer_range=0.3, **options
    )
    model = Eagle3DraftModel(config).to(dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    if model.d2t is not None:
        ids = torch.randperm(config.vocab_size)[:draft_vocab_size].sort().values
        model.set_vocabulary_map(ids - torch.arange(draft_vocab_size))
    if model.embed_tokens is None:
        model.set_input_embeddings(torch.randn(config.vocab_size, config.hidden_size, dtype=dtype))
    return model


def make_batch(model, batch, length, *, share=0.7, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    width, vocab = model.config.target_hidden_size, model.config.vocab_size
    return {
        "input_ids": torch.randint(vocab, (batch, length)),
        "aux_hidden_states": torch.randn(batch, length, model.config.num_aux_hidden_states * width, dtype=dtype),
        "teacher_hidden_states": torch.randn(batch, length, width, dtype=dtype),
        "teacher_head": torch.randn(vocab, width, dtype=dtype),
        "loss_mask": torch.rand(batch, length) < share,
    }


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same(ours, truth, tolerance=1e-9):
    assert ours.keys() == truth.keys()
    for name in truth:
        scale = truth[name].abs().max().clamp(min=1e-12)
        assert (ours[name] - truth[name]).abs().max() / scale < tolerance, name


@pytest.mark.parametrize("objective", ["kl", "ce", "tv", "lk_alpha", "lk_lambda"])
@pytest.mark.parametrize("draft_vocab_size", [None, 40])
def test_loss_and_gradients_equal_the_plain_mathematics(objective, draft_vocab_size):
    model = make_model(draft_vocab_size=draft_vocab_size)
    batch = make_batch(model, 1, 17)
    output = model(**batch, ttt_steps=4, objective=objective)
    row = {name: value[0] if name != "teacher_head" else value for name, value in batch.items()}
    aux, teacher = row.pop("aux_hidden_states"), row.pop("teacher_hidden_states")
    truth, _ = plain_loss(model, aux=aux, teacher=teacher, **row, ttt_steps=4, objective=objective)
    assert truth > 0
    torch.testing.assert_close(output.loss, truth, rtol=1e-6, atol=0)
    assert_same(gradients(model, output.loss), gradients(model, truth), 1e-5)


OPTIONS = {
    "plain": {},
    "norm_output": {"norm_output": True},
    "fc_norm": {"fc_norm": True},
    "norm_before_fc": {"norm_before_fc": True},
    "norm_before_residual": {"norm_before_residual": True},
    "all": {"norm_output": True, "fc_norm": True, "norm_before_fc": True, "norm_before_residual": True},
    "window_1": {"sliding_window": 1},
    "window_2": {"sliding_window": 2},
    "window_5": {"sliding_window": 5},
    "four_layers": {"aux_layer_ids": [1, 3, 5, 6]},
    "bias": {"attention_bias": True},
    "width": {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16},
}


def drafts_serially(model, batch, length, ttt_steps):
    """Logits of (row, step), each row drafted from scratch with the head's KV cache, as a server does."""
    logits = {}
    tokens, aux = batch["input_ids"], batch["aux_hidden_states"]
    for row in range(length - 1):
        cache = DynamicCache()
        state = model.fuse(aux[:, : row + 1])
        ids, positions = tokens[:, 1 : row + 2], torch.arange(row + 1)[None]
        for step in range(ttt_steps):
            if row + 1 + step >= length:
                break
            if step > 0:
                ids, positions = tokens[:, row + 1 + step : row + 2 + step], torch.tensor([[row + step]])
            step_logits, state = model.draft_step(ids, state[:, -len(ids[0]) :], positions, cache)
            logits[row, step] = step_logits[0, -1]
            state = state[:, -1:]
    return logits


def trained_logits(model, batch, **kwargs):
    """Logits of (flattened row, step) as training computes them."""
    captured = {}

    def capture(module, args, keywords, output):
        captured["states"] = args[0]

    handle = model.lm_head.register_forward_hook(capture, with_kwargs=True)
    model(**batch, **kwargs)
    handle.remove()
    row_sets = kwargs["row_sets"]
    return {
        (int(row), step): state @ model.lm_head.weight.T
        for step, (rows, states) in enumerate(zip(row_sets, captured["states"], strict=True))
        for row, state in zip(rows, states, strict=True)
    }


@pytest.mark.parametrize("attention", ["block_sparse_flash", "sdpa", "eager"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_training_state_equals_serial_drafting(options, attention):
    model = make_model(**options)
    model.set_attn_implementation(attention)
    assert model.config._attn_implementation == attention
    batch = make_batch(model, 1, 11, share=1.1)
    rows = row_sets(batch["loss_mask"], ttt_steps=4)
    ours = trained_logits(model, batch, ttt_steps=4, row_sets=rows)
    truth = drafts_serially(model, batch, 11, 4)
    assert len(ours) == sum(len(row_set) for row_set in rows) == 30
    for pair, logits in ours.items():
        tolerance = 1e-5 if attention == "eager" else 1e-10  # eager's softmax is fp32
        torch.testing.assert_close(logits, truth[pair], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_training_state_equals_serial_drafting_for_every_rope(rope):
    model = make_model(LlamaConfig(**SHAPE, rope_parameters=rope, max_position_embeddings=64))
    batch = make_batch(model, 1, 40, share=1.1)
    ours = trained_logits(model, batch, ttt_steps=2, row_sets=row_sets(batch["loss_mask"], ttt_steps=2))
    truth = drafts_serially(model, batch, 40, 2)
    for pair, logits in ours.items():
        torch.testing.assert_close(logits, truth[pair], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("family", TARGET_CONFIGS)
def test_training_state_equals_serial_drafting_for_target_families(family):
    model = make_model(TARGET_CONFIGS[family])
    batch = make_batch(model, 1, 9, share=1.1)
    ours = trained_logits(model, batch, ttt_steps=7, row_sets=row_sets(batch["loss_mask"], ttt_steps=7))
    truth = drafts_serially(model, batch, 9, 7)
    assert max(step for _, step in ours) == 6
    for pair, logits in ours.items():
        torch.testing.assert_close(logits, truth[pair], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 3}, {"rope": "dynamic"}, {"rope": "longrope"}], ids=str)
@pytest.mark.parametrize("normalization", ["token", "sequence"])
def test_packed_documents_3_5_8_equal_separate_ones(options, normalization):
    options = dict(options)
    rope = ROPES[options.pop("rope", "default")]
    model = make_model(LlamaConfig(**SHAPE, rope_parameters=rope), draft_vocab_size=60, **options)
    batch = make_batch(model, 1, 16, share=1.1)
    documents = torch.tensor([[0] * 3 + [1] * 5 + [2] * 8])
    packed = model(
        **batch, document_ids=documents, ttt_steps=4, num_items_in_batch=1, loss_normalization=normalization
    )
    packed_gradients = gradients(model, packed.loss)
    losses, separate_gradients = [], {name: torch.zeros_like(grad) for name, grad in packed_gradients.items()}
    for start, end in ((0, 3), (3, 8), (8, 16)):
        part = {name: value[:, start:end] if name != "teacher_head" else value for name, value in batch.items()}
        output = model(**part, ttt_steps=4, num_items_in_batch=1, loss_normalization=normalization)
        losses.append(output.loss.detach())
        for name, gradient in gradients(model, output.loss).items():
            separate_gradients[name] += gradient
    torch.testing.assert_close(packed.loss.detach(), sum(losses), rtol=1e-9, atol=0)
    assert_same(packed_gradients, separate_gradients)


def test_padding_changes_nothing():
    model = make_model()
    batch = make_batch(model, 2, 40)
    documents = torch.zeros(2, 40, dtype=torch.int64)
    documents[0, 5:] = -1
    batch["aux_hidden_states"][0, 5:] = 1e6
    padded = model(**batch, document_ids=documents, ttt_steps=3)
    padded_gradients = gradients(model, padded.loss)
    short = {name: value[:1, :5] if name != "teacher_head" else value for name, value in batch.items()}
    long = {name: value[1:] if name != "teacher_head" else value for name, value in batch.items()}
    rows = padded.raw_sums.rows[0]
    outputs = [model(**part, ttt_steps=3, num_items_in_batch=rows) for part in (short, long)]
    torch.testing.assert_close(padded.loss, sum(output.loss for output in outputs), rtol=1e-9, atol=0)
    assert_same(padded_gradients, gradients(model, sum(output.loss for output in outputs)))


def test_one_span_gives_gradient_to_exactly_its_pairs():
    """One assistant span, tokens 5-8 of 12, K = 3."""
    model = make_model()
    batch = make_batch(model, 1, 12)
    batch["loss_mask"] = torch.tensor([[0] * 5 + [1] * 4 + [0] * 3])
    states = []
    handle = model.lm_head.register_forward_pre_hook(
        lambda module, args: [state.retain_grad() for state in args[0]] and states.extend(args[0])
    )
    rows = row_sets(batch["loss_mask"], ttt_steps=3)
    model(**batch, ttt_steps=3).loss.backward()
    handle.remove()
    assert [row_set.tolist() for row_set in rows] == [[4, 5, 6], [4, 5], [4]]
    for state, row_set in zip(states, rows, strict=True):
        assert len(state) == len(row_set) and (state.grad.abs().sum(-1) > 0).all()


def test_touching_assistant_turns_and_documents_are_not_crossed():
    mask = torch.ones(1, 8)
    assert row_sets(mask, turn_ids=torch.tensor([[0] * 4 + [1] * 4]), ttt_steps=2)[1].tolist() == [0, 3, 4]
    documents = torch.tensor([[0] * 4 + [1] * 4])
    assert [rows.tolist() for rows in row_sets(mask, documents, ttt_steps=2)] == [[0, 1, 4, 5], [0, 4]]


def test_unsupervised_rows_change_nothing():
    model = make_model()
    batch = make_batch(model, 2, 20, share=0.4)
    loss = model(**batch, ttt_steps=3).loss
    truth = gradients(model, loss)
    teacher_rows = row_sets(batch["loss_mask"], ttt_steps=3)[0] + 1
    unused = torch.ones(40, dtype=torch.bool)
    unused[teacher_rows] = False
    batch["teacher_hidden_states"].flatten(0, 1)[unused] = float("nan")
    scrambled = model(**batch, ttt_steps=3).loss
    assert torch.equal(loss, scrambled)
    assert_same(gradients(model, scrambled), truth)


def test_nothing_supervised_gives_zero_loss_and_gradients():
    model = make_model(draft_vocab_size=20)
    batch = make_batch(model, 2, 9, share=0.0)
    loss = model(**batch, ttt_steps=3).loss
    assert loss == 0
    assert all((gradient == 0).all() for gradient in gradients(model, loss).values())
    assert all(parameter.grad is not None for parameter in model.parameters())  # or DDP would wait for ever


class Adapted(torch.nn.Module):
    """A projection that is given both of its inputs at once, as adapters need it."""

    def __init__(self, projection):
        super().__init__()
        self.projection = projection

    def forward(self, inputs):
        return torch.nn.functional.linear(inputs, self.projection.weight, self.projection.bias)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_projection_of_another_class_is_given_both_inputs(share):
    model = make_model(attention_bias=True)
    batch = make_batch(model, 2, 15, share=share)
    plain = gradients(model, model(**batch, ttt_steps=3).loss)
    for name in ("q_proj", "v_proj"):
        setattr(model.midlayer.self_attn, name, Adapted(getattr(model.midlayer.self_attn, name)))
    adapted = gradients(model, model(**batch, ttt_steps=3).loss)
    assert_same({name.replace("projection.", ""): gradient for name, gradient in adapted.items()}, plain)


@pytest.mark.parametrize("ttt_steps", [1, 2, 7, 8])
@pytest.mark.parametrize("attention", ["block_sparse_flash", "eager"])
def test_recompute_equals_no_recompute(ttt_steps, attention, monkeypatch):
    monkeypatch.setattr(unroll_eagle3, "RECOMPUTED_ROWS", 7)
    model = make_model(norm_output=True)
    model.set_attn_implementation(attention)
    batch = make_batch(model, 2, 15)
    plain = gradients(model, model(**batch, ttt_steps=ttt_steps).loss)
    model.train()
    model.gradient_checkpointing_enable()
    assert_same(gradients(model, model(**batch, ttt_steps=ttt_steps).loss), plain)


def test_recompute_keeps_the_results_of_attention(monkeypatch):
    model = make_model()
    batch = make_batch(model, 2, 15)
    calls = []
    forward = sdpa.forward
    monkeypatch.setattr(sdpa, "forward", lambda *args, **options: calls.append(1) or forward(*args, **options))
    model.train()
    model.gradient_checkpointing_enable()
    gradients(model, model(**batch, ttt_steps=3).loss)
    assert len(calls) == 3


def test_bf16_compute_under_autocast_keeps_fp32_masters():
    model = make_model(dtype=torch.float32)
    batch = make_batch(model, 2, 33, dtype=torch.float32)
    truth = gradients(model, model(**batch, ttt_steps=3).loss)
    with torch.autocast("cpu", torch.bfloat16):
        states = []
        model.lm_head.register_forward_pre_hook(lambda module, args: states.extend(args[0]))
        loss = model(**batch, ttt_steps=3).loss
    assert {state.dtype for state in states} == {torch.bfloat16} and loss.dtype == torch.float32
    for name, gradient in gradients(model, loss).items():
        assert gradient.dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(gradient.flatten(), truth[name].flatten(), 0) > 0.99, name


def test_lengths_shrinking_then_growing():
    model = make_model(dtype=torch.float32)
    for length in (129, 2, 1, 127, 3, 40):
        batch = make_batch(model, 1, length, share=0.9, dtype=torch.float32)
        loss = model(**batch, ttt_steps=3).loss
        assert all(gradient.isfinite().all() for gradient in gradients(model, loss).values())


def test_missing_embedding_raises_and_names_both_remedies():
    model = make_model()
    model._target_embedding = None
    with pytest.raises(RuntimeError, match=r"target=.*set_input_embeddings"):
        model(**make_batch(model, 1, 8), ttt_steps=2)


def test_fewer_row_sets_than_steps_are_refused():
    model = make_model()
    batch = make_batch(model, 1, 8)
    with pytest.raises(ValueError, match="row_sets"):
        model(**batch, row_sets=[torch.tensor([1])], ttt_steps=2)


@pytest.mark.parametrize("ttt_steps", [1, 2, 7, 8])
def test_every_number_of_steps_equals_serial_drafting(ttt_steps):
    model = make_model()
    batch = make_batch(model, 1, 11, share=1.1)
    rows = row_sets(batch["loss_mask"], ttt_steps=ttt_steps)
    truth = drafts_serially(model, batch, 11, ttt_steps)
    ours = trained_logits(model, batch, ttt_steps=ttt_steps, row_sets=rows)
    assert max(step for _, step in ours) == ttt_steps - 1
    for pair, logits in ours.items():
        torch.testing.assert_close(logits, truth[pair], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("attention", ["block_sparse_flash", "sdpa", "eager"])
def test_steps_without_a_row_are_empty(attention):
    """Four supervised tokens, K = 7: steps 3 and later have no row."""
    model = make_model()
    model.set_attn_implementation(attention)
    batch = make_batch(model, 1, 12)
    batch["loss_mask"] = torch.tensor([[0] * 5 + [1] * 4 + [0] * 3])
    output = model(**batch, ttt_steps=7)
    assert output.raw_sums.rows.tolist() == [3, 2, 1, 0, 0, 0, 0]
    short = gradients(model, model(**batch, ttt_steps=3).loss)
    assert_same(gradients(model, output.loss), short, 1e-6)


def test_thirty_padded_steps_stay_finite_and_equal_unpadded_ones():
    """Batch 2, lengths 5 and 40."""
    padded, apart = make_model(seed=3), make_model(seed=3)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in (padded, apart)]
    documents = torch.zeros(2, 40, dtype=torch.int64)
    documents[0, 5:] = -1
    for seed in range(30):
        batch = make_batch(padded, 2, 40, share=0.9, seed=seed)
        padded.zero_grad(), apart.zero_grad()
        output = padded(**batch, document_ids=documents, ttt_steps=3)
        output.loss.backward()
        for row, length in ((0, 5), (1, 40)):
            cut = (slice(row, row + 1), slice(length))
            part = {name: value if name == "teacher_head" else value[cut] for name, value in batch.items()}
            apart(**part, ttt_steps=3, num_items_in_batch=output.raw_sums.rows[0]).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    ours, truth = dict(padded.named_parameters()), dict(apart.named_parameters())
    assert all(parameter.isfinite().all() for parameter in ours.values())
    assert_same(ours, truth, 1e-7)

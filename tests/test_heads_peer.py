"""A head trained by SpecForge on CPU, and what our decoder makes of it; its plan of steps, without SpecForge."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from draftsmith import Eagle3DraftConfig, Eagle3DraftModel
from draftsmith.target import load_target
from tests.data.common import CHATML, build_tokenizer, chat


sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import benchmark
from benchmarks.heads_peer import plan


LENGTHS = [5, 7, 11, 13, 17]


def planned(**options):
    return plan(
        LENGTHS, SimpleNamespace(**{"batch_size": 2, "epochs": None, "max_tokens": None, "seed": 0, **options})
    )


def tokens(batches):
    return [sum(LENGTHS[index] for index in batch) for batch in batches]


def test_the_plan_ends_with_the_epochs_or_the_tokens():
    batches = planned(epochs=2)
    assert len(batches) == 4 and all(len(set(batch)) == 2 for batch in batches)
    assert len({*batches[0], *batches[1]}) == 4  # within an epoch no document comes twice
    assert batches[:2] != batches[2:]
    assert planned(epochs=2) == batches != planned(epochs=2, seed=1)
    long = planned(max_tokens=200)
    assert sum(tokens(long)) >= 200 > sum(tokens(long[:-1]))
    assert long[:4] == batches
    with pytest.raises(ValueError, match="more than the 5 documents"):
        planned(epochs=1, batch_size=6)


@pytest.fixture
def flags(tmp_path):
    tokenizer = build_tokenizer(CHATML)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 5, hidden_size=32, intermediate_size=48, num_attention_heads=4,
        num_key_value_heads=2, num_hidden_layers=8, eos_token_id=tokenizer.eos_token_id, pad_token_id=None,
        initializer_range=0.2, max_position_embeddings=128,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    rows = [{"messages": chat(f"{n}?", "It is, " * (1 + n % 3) + f"{n}.")} for n in range(6)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "heads-peer", "--target", str(tmp_path / "target"), "--data", str(tmp_path / "chats.jsonl"), "--output_dir",
        str(tmp_path / "heads"), "--draft_vocab_size", "100", "--ttt_steps", "2", "--batch_size", "2", "--max_length",
        "48", "--attention_backend", "sdpa", "--dtype", "float32", "--learning_rate", "1e-2",
    ]  # fmt: skip


@pytest.mark.parametrize("options", [[], ["--fc_norm"]], ids=["plain", "fc_norm"])
def test_its_heads_are_drafted_with_as_it_trains_them(options, flags, tmp_path):
    pytest.importorskip("specforge", reason="needs specforge 0.2.0, installed with --no-deps")
    from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig

    benchmark.main([*flags, *options, "--epochs", "4", "--save_points", "2"])
    content = json.loads((tmp_path / "heads" / "heads_peer.json").read_text())
    first, last = content["rows"]
    assert (first["step"], last["step"]) == (6, 12)
    assert last["loss"] < first["loss"]
    assert 0 < last["supervised"] < last["tokens"] < last["positions"]
    assert last["seconds"] > first["seconds"] > first["first_step_seconds"]
    assert {path.name for path in (tmp_path / "heads").iterdir()} == {"heads_peer.json", "step-6", "step-12"}

    target = load_target(str(tmp_path / "target"), dtype=torch.float32)
    head = tmp_path / "heads" / last["head"]
    ours, info = Eagle3DraftModel.from_pretrained(head, target=target, output_loading_info=True)
    assert not info["missing_keys"]
    size = sum(parameter.numel() for parameter in ours.parameters() if parameter.requires_grad)
    sizes = Eagle3DraftConfig.from_target(target.config, draft_vocab_size=100, fc_norm=bool(options))
    new = sum(parameter.numel() for parameter in Eagle3DraftModel(sizes).parameters())
    assert content["settings"]["trained"] == new == size
    assert ours.config.eagle_aux_hidden_state_layer_ids == [
        layer + 1 for layer in content["settings"]["capture_layers"]
    ]
    assert torch.equal(ours.embed_tokens.weight, target.get_input_embeddings().weight)

    its = AutoDraftModel.from_config(AutoDraftModelConfig.from_file(head / "config.json"))
    its.load_state_dict(load_file(head / "model.safetensors"))
    ids, aux = torch.randint(target.config.vocab_size, (2, 9)), torch.randn(2, 9, 3 * 32)
    positions = torch.arange(9).expand(2, -1)
    mask = its.prepare_decoder_attention_mask(torch.ones(2, 9), aux, 2, 9, 0)
    with torch.no_grad(), torch._dynamo.config.patch(disable=True):
        fused = its.project_hidden_states(aux)
        state = its.backbone(its.embed_input_ids(ids), fused, [[], []], mask, positions)
        logits, recurrent = ours.draft_step(ids, ours.fuse(aux), positions, DynamicCache())
    torch.testing.assert_close(recurrent, state, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits, its.compute_logits(state), rtol=1e-4, atol=1e-5)
    assert torch.equal(ours.d2t, its.d2t) and int(its.t2d.sum()) == 100


@pytest.mark.parametrize(
    ("change", "message"),
    [(["--batch_size", "0"], "`--batch_size` is 0"), (["--output_dir", "."], "name a new directory")],
)
def test_wrong_arguments_are_refused_before_the_target_is_loaded(change, message, flags, capsys):
    with pytest.raises(SystemExit):
        benchmark.main([*flags, *change])
    assert message in capsys.readouterr().err

"""A cache from a server, which is the target itself here: its states, and every way in which it may fail to."""

import json
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from draftsmith.commands import cache
from draftsmith.commands.parsing import UsageError
from draftsmith.data.hidden_states import HiddenStateCache
from draftsmith.served_target import ServedTarget
from draftsmith.serving import hidden_states
from draftsmith.serving.servers import ServerError
from draftsmith.target import FrozenTarget
from tests.fake_server import Answers, serving
from tests.tiny_models import SUPPORTED_FAMILIES, random_tokens, tiny_model


AUX, DEPTH = [2, 4, 5], 8
LOCK = threading.Lock()


class Extractor(Answers):
    """Answers and writes files as vLLM does; subclasses fail."""

    model, directory, layer_ids, name, requests = None, None, [*AUX, DEPTH], "hidden_states:2,4,5,8", 0

    def do_GET(self):
        self.answer(json.dumps({"data": [{"id": "other"}, {"id": self.name, "max_model_len": 65}]}))

    def do_POST(self):
        with LOCK:  # hooks and counts are of one request at a time
            self.extract()

    @torch.no_grad()
    def extract(self):
        type(self).requests += 1
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids = request["prompt"]
        assert len(ids) + request["max_tokens"] <= 65
        found = {}
        layers = self.model.model.layers
        hooks = [
            layers[i - 1].register_forward_hook(lambda *call, i=i: found.update({i: call[-1]})) for i in self.layer_ids
        ]
        likeliest = self.model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1).topk(5)
        for hook in hooks:
            hook.remove()
        names = map("token_id:{}".format, likeliest.indices.tolist())
        tokens = dict(zip(names, likeliest.values.tolist(), strict=True))
        self.send(ids, torch.stack([found[i][0] for i in self.layer_ids], 1), {"logprobs": {"top_logprobs": [tokens]}})

    def send(self, ids, states, choice):
        path = self.directory / f"{self.requests}-{id(states)}.safetensors"
        save_file({"hidden_states": states, "token_ids": torch.tensor(ids)}, path)
        (self.directory / f"{path.name}.lock").touch()
        self.answer(json.dumps({"choices": [choice], "kv_transfer_params": {"hidden_states_path": str(path)}}))


class ExtractsNothing(Extractor):
    def send(self, ids, states, choice):
        self.answer(json.dumps({"choices": [choice], "kv_transfer_params": None}))


class WritesElsewhere(Extractor):
    def send(self, ids, states, choice):
        self.answer(json.dumps({"choices": [choice], "kv_transfer_params": {"hidden_states_path": "/nowhere/1.st"}}))


class WritesOtherTokens(Extractor):
    def send(self, ids, states, choice):
        super().send([*ids[1:], 3], states, choice)


class LeavesCachedTokensOut(Extractor):
    def send(self, ids, states, choice):
        super().send(ids, states[4:], choice)


class OtherLayers(Extractor):
    layer_ids = [*AUX, DEPTH - 1]


class OtherName(Extractor):
    name = "hidden_states:1,4,5,8"


class HalfPrecision(Extractor):
    def send(self, ids, states, choice):
        super().send(ids, states.half(), choice)


class DropsTheFirstTry(Extractor):
    def send(self, ids, states, choice):
        if ids in self.tried:
            super().send(ids, states, choice)
        self.tried.append(ids)  # without an answer the connection just ends


class DropsAll(Extractor):
    def send(self, ids, states, choice):
        pass


class DropsLater(Extractor):
    def send(self, ids, states, choice):
        if self.requests < 50:  # while the size is predicted, and then some
            super().send(ids, states, choice)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(hidden_states, "RETRY_SECONDS", (0.01, 0.02, 0.04))
    monkeypatch.setattr(hidden_states, "FINDING_SECONDS", 0.2)


@pytest.fixture(scope="module")
def tokenized(target_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("rows")
    rows = [
        {"input_ids": random_tokens(1, length, seed=length)[0].tolist(), "loss_mask": [0] * 5 + [1] * (length - 5)}
        for length in (65, *range(8, 40))
    ]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["--dataset", str(directory / "rows.jsonl"), "--cache_dir", str(directory / "cache"), "--max_length", "128"]
    return ["--target", str(target_dir), *data, "--packing", "true", "--row_length", "128", "--batch_size", "3"]


def caching(handler, tokenized, target_dir, directory, *flags):
    (directory / "exchange").mkdir(exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(target_dir).eval()
    answers = type("Answers", (handler,), {"model": model, "directory": directory / "exchange", "tried": []})
    with serving(answers) as url:
        cache.main(
            [*tokenized, "--engine", "vllm", "--base_url", url, *flags, "--output_dir", str(directory / "states")]
        )
    return directory / "states"


def test_states_of_a_server_are_those_of_the_target(tokenized, target_dir, tmp_path):
    states = caching(DropsTheFirstTry, tokenized, target_dir, tmp_path)
    assert not list((tmp_path / "exchange").iterdir())
    cache.main([*tokenized, "--output_dir", str(tmp_path / "here")])
    served, here = HiddenStateCache(states), HiddenStateCache(tmp_path / "here")
    assert served.manifest.differences(here.manifest) == ["target.engine: 'vllm', not 'hf'"]
    for ours, theirs in zip(served.rows("train"), here.rows("train"), strict=True):
        assert ours["input_ids"] == theirs["input_ids"]
        for name in ("aux_hidden_states", "teacher_hidden_states"):
            torch.testing.assert_close(ours[name], theirs[name], rtol=2**-7, atol=1e-5)
    for name in ("embedding_and_head.safetensors", "tokenizer.json"):
        assert (states / "target" / name).read_bytes() == (tmp_path / "here" / "target" / name).read_bytes()
    configs = [json.loads((each / "target" / "config.json").read_text()) for each in (states, tmp_path / "here")]
    assert configs[0] == configs[1]


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (ExtractsNothing, "answered without `kv_transfer_params.hidden_states_path`"),
        (WritesElsewhere, "/nowhere/1.st, which cannot be read here .*shared_storage_path"),
        (WritesOtherTokens, "holds the states of other tokens.*--no-enable-prefix-caching"),
        (LeavesCachedTokensOut, r"the states are \[60, 4, 32\], but 64 tokens of 4 layers"),
        (OtherName, "serves 'other', 'hidden_states:1,4,5,8', not 'hidden_states:2,4,5,8'"),
        (OtherLayers, "the last of its layers is not 8"),
        (HalfPrecision, "in float16, but `target` has width 32 in float32: serve this target with --dtype float32"),
        (DropsAll, "broke its answer off"),
    ],
)
def test_a_server_that_does_not_extract_is_found_before_anything_is_written(
    handler, message, tokenized, target_dir, tmp_path
):
    with pytest.raises(UsageError, match=message) as error:
        caching(handler, tokenized, target_dir, tmp_path)
    assert '"eagle_aux_hidden_state_layer_ids": [2, 4, 5, 8]' in str(error.value)
    assert "--no-enable-prefix-caching" in str(error.value)
    assert not (tmp_path / "states").exists()


def test_a_server_that_ends_leaves_what_is_written(tokenized, target_dir, tmp_path):
    with pytest.raises(UsageError, match="(?s)broke its answer off.*the same command goes on"):
        caching(DropsLater, tokenized, target_dir, tmp_path)
    assert (tmp_path / "states" / "unfinished.json").exists()
    states = caching(Extractor, tokenized, target_dir, tmp_path)
    assert len(HiddenStateCache(states).rows("train")) > 1


def test_no_server_and_arguments_of_none(tokenized, tmp_path, monkeypatch):
    flags = [*tokenized, "--output_dir", str(tmp_path / "states"), "--engine", "vllm"]
    with pytest.raises(
        UsageError, match="(?s)cannot be reached.*vllm.entrypoints.openai.api_server --model .*--port 9 "
    ):
        cache.main([*flags, "--base_url", "http://127.0.0.1:9"])
    with pytest.raises(UsageError, match="`server_flags` are for a server that is launched"):
        cache.main([*flags, "--server_flags=-tp 2"])
    with pytest.raises(UsageError, match="`base_url` is 'localhost'"):
        cache.main([*flags, "--base_url", "localhost"])
    with pytest.raises(UsageError, match="`launch` is of a server"):
        cache.main([*flags[:-2], "--launch", "true"])
    with pytest.raises(UsageError, match="`target_adapter` and `target_gguf_file` are for `engine` hf"):
        cache.main([*flags, "--target_adapter", str(tmp_path)])


def test_layers_may_be_quantised_but_not_the_head(tmp_path):
    """As in FP8 checkpoints: what is not of a layer is stored plain, and no kernel is needed to read it."""
    model = tiny_model("llama", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    served = ServedTarget(str(tmp_path), [2], "http://localhost:9")
    assert (served.precision, served.model.dtype) == ("fp8", torch.bfloat16)
    assert torch.equal(served.head_weight, model.lm_head.weight)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight_packed"] = weights.pop("lm_head.weight")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="lm_head.weight cannot be read .* quantised. Use `engine` hf"):
        ServedTarget(str(tmp_path), [2], "http://localhost:9")


@pytest.mark.parametrize("family", SUPPORTED_FAMILIES)
def test_ends_of_every_family_are_the_targets(family, tmp_path):
    """The final norm, head and scale, from a checkpoint of which no layer is read."""
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    target = FrozenTarget(model, [2])
    served = ServedTarget(str(tmp_path), [2], "http://localhost:9")
    ids, states = random_tokens(1, 9), {}
    hook = target.layers[-1].register_forward_hook(
        lambda module, inputs, output: states.update(last=output[0] if isinstance(output, tuple) else output)
    )
    last = target(ids).last_hidden_state
    hook.remove()
    torch.testing.assert_close(served._normed(states["last"]), last)
    for name in ("embedding_weight", "head_weight", "head_bias", "softcap", "precision"):
        ours, theirs = getattr(served, name), getattr(target, name)
        assert torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs
    assert not [name for name in dict(served._norm.named_parameters()) if "layers" in name]
    assert served.server.layer_ids == (2, 4)
    logits = model(ids).logits[0, -1].detach().log_softmax(-1).topk(5)
    likeliest = dict(zip(logits.indices.tolist(), logits.values.tolist(), strict=True))
    served._verify_next_token(states["last"][:, -1], likeliest)
    with pytest.raises(ServerError, match="the last of its layers is not 4"):
        served._verify_next_token(2 * states["last"][:, -1].roll(1, -1), likeliest)

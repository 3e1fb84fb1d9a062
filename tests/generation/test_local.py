"""Answers of transformers, here: those of `generate` for each prompt alone, whatever is decoded beside it."""

import json

import pytest
import torch
from datasets import load_dataset
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM

from draftsmith.commands.generate_arguments import GenerateArguments
from draftsmith.commands.parsing import UsageError
from draftsmith.data.formats import RowError
from draftsmith.generation import local
from draftsmith.generation.local import ContinuousEngine, GenerateEngine, local_engine
from draftsmith.generation.requests import Request, Sampling
from tests.data.common import CHATML, build_tokenizer, chat
from tests.tiny_models import tiny_model


GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=None, max_new_tokens=20, seed=0)
PROMPTS = ["What is it?", "Hello", "one two three " * 4, "It is", "again and again", "a", "there", "Hello again " * 2]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(CHATML)


def target(tokenizer, family="llama", stops=40, **fields):
    """A random target that ends some of its answers, since many of its tokens do."""
    model = tiny_model(family, vocab_size=len(tokenizer) + 5, max_position_embeddings=256, **fields)
    model.generation_config.eos_token_id = list(range(stops))
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def requests():
    return [Request(f"{n}-0", 0, chat(text), None, {}) for n, text in enumerate(PROMPTS)]


def own_answers(model, tokenizer, limit=20):
    found = {}
    for request in requests():
        text = tokenizer.apply_chat_template(request.messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        output = model.generate(ids, do_sample=False, max_new_tokens=limit)[0, ids.shape[1] :].tolist()
        stops = model.generation_config.eos_token_id
        end = next((at for at, token in enumerate(output) if token in stops), None)
        content = tokenizer.decode(output[:end])
        content = content if end is not None else content.rstrip("\N{REPLACEMENT CHARACTER}")
        if content.strip() or end is None:  # else there is nothing to train on
            found[request.key] = (content, end is not None, ids.shape[1], len(output))
    return found


def engine_answers(engine):
    found = {}
    for request in requests():
        engine.submit(request)
    for _ in PROMPTS:
        key, answer = engine.next()
        if isinstance(answer, RowError):
            assert str(answer) == "`messages[1]` was answered with nothing"
            continue
        found[key] = (answer.message["content"], answer.finished, answer.prompt_tokens, answer.new_tokens)
    engine.close()
    return found


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_greedy_answers_do_not_depend_on_the_batch(family, batch_size, tokenizer):
    model = target(tokenizer, family)
    truth = own_answers(model, tokenizer)
    assert 0 < sum(finished for _, finished, _, _ in truth.values()) < len(truth)
    assert engine_answers(GenerateEngine(model, tokenizer, GREEDY, {}, batch_size=batch_size)) == truth


def test_a_target_that_never_ends_is_cut(tokenizer):
    model = target(tokenizer)
    model.generation_config.eos_token_id = [len(tokenizer) + 4] * 2
    found = engine_answers(GenerateEngine(model, tokenizer, GREEDY, {}, batch_size=3))
    assert all((finished, tokens) == (False, 20) for _, finished, _, tokens in found.values())


def test_batches_are_left_half_done_and_filled_again(tokenizer, monkeypatch):
    model = target(tokenizer)
    batches, generate = [], type(model).generate

    def recorded(self, **inputs):
        output = generate(self, **inputs)
        batches.append((len(output), output.shape[1] - inputs["input_ids"].shape[1]))
        return output

    monkeypatch.setattr(type(model), "generate", recorded)
    engine_answers(GenerateEngine(model, tokenizer, GREEDY, {}, batch_size=4))
    assert batches[0][0] == batches[1][0] == 4 and len(batches) > 2
    assert any(tokens < 20 for _, tokens in batches)


def test_continuous_batching_gives_the_same(tokenizer):
    from transformers import ContinuousBatchingConfig

    model = target(tokenizer)
    truth = own_answers(model, tokenizer)
    small = ContinuousBatchingConfig(num_blocks=32, page_size=16, max_batch_tokens=64)
    engine = ContinuousEngine(model, tokenizer, GREEDY, {}, continuous_batching_config=small, warmup=False)
    assert engine_answers(engine) == truth


def test_targets_that_it_does_not_serve_are_decoded_in_batches(tokenizer, caplog, monkeypatch):
    def refuse(*_, **__):
        raise ValueError("no pages here")

    model = target(tokenizer)
    monkeypatch.setattr(type(model), "continuous_batching_context_manager", refuse)
    before = model.config._attn_implementation
    engine = local_engine(model, tokenizer, GREEDY, {}, batch_size=2, continuous_batching=True)
    assert isinstance(engine, GenerateEngine) and model.config._attn_implementation == before
    assert "Continuous batching does not serve this target: no pages here. Decoding in batches of 2." in caplog.text


def test_prompts_beyond_the_positions_are_refused_and_answers_end_there(tokenizer):
    model = target(tokenizer, stops=1)
    engine = GenerateEngine(model, tokenizer, GREEDY, {}, batch_size=2)
    engine.positions = 12
    engine.submit(requests()[2])
    _, error = engine.next()
    assert "fill" in str(error) and "12 positions" in str(error)
    engine.positions = None
    engine.submit(requests()[5])
    _, answer = engine.next()
    engine.positions = answer.prompt_tokens + 1
    engine.submit(requests()[5])
    _, answer = engine.next()
    assert answer.new_tokens == 1


def test_the_command_decodes_here(run, tmp_path, target_dir):
    rows = [{"turns": [text, "And then?"]} for text in PROMPTS[:3]]
    counts = run(rows, "--max_new_tokens", "6", "--cut_answers", "keep", "--batch_size", "2")
    assert counts.written == 3
    model, tokenizer = LlamaForCausalLM.from_pretrained(target_dir), AutoTokenizer.from_pretrained(target_dir)
    for row in load_dataset(str(tmp_path / "out"), split="train"):
        messages = row["messages"]
        for at in range(1, len(messages), 2):
            text = tokenizer.apply_chat_template(messages[:at], tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
            new = model.generate(ids, do_sample=False, max_new_tokens=6)[0, ids.shape[1] :]
            written = tokenizer.decode(new, skip_special_tokens=False).removesuffix(tokenizer.eos_token)
            assert messages[at]["content"] == written.rstrip("\N{REPLACEMENT CHARACTER}")
    provenance = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert provenance["settings"]["sampling"] | {"seed": 0} == {**vars(GREEDY), "max_new_tokens": 6}


@pytest.mark.parametrize(
    ("given", "recommended", "expected"),
    [
        ({}, {}, (0.0, 1.0, None)),
        ({}, {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}, (0.6, 0.95, 20)),
        ({}, {"do_sample": True}, (1.0, 1.0, None)),
        ({}, {"temperature": 0.6}, (0.0, 1.0, None)),  # read by nobody without `do_sample`
        ({"temperature": 0.0}, {"do_sample": True, "temperature": 0.6, "top_k": 20}, (0.0, 1.0, None)),
        ({"temperature": 0.9, "top_k": 0}, {"do_sample": True, "top_p": 0.8, "top_k": 20}, (0.9, 0.8, 0)),
        ({"temperature": 0.9}, {}, (0.9, 1.0, None)),
    ],
)
def test_sampling_is_what_is_given_and_else_what_the_target_recommends(given, recommended, expected):
    args = GenerateArguments(["x"], "y", max_new_tokens=5, seed=1, **given)
    assert args.sampling(GenerationConfig(**recommended)) == Sampling(*expected, max_new_tokens=5, seed=1)


def test_sampling_reaches_transformers(tokenizer):
    model = target(tokenizer)
    model.generation_config.repetition_penalty = 1.2
    config = local.generation_config(model, tokenizer, Sampling(0.5, 0.9, 0, 7, 0))
    found = config.do_sample, config.temperature, config.top_p, config.top_k, config.max_new_tokens
    assert found == (True, 0.5, 0.9, 0, 7) and config.repetition_penalty == 1.2
    same, other = (
        [engine_answers(GenerateEngine(model, tokenizer, Sampling(1.0, 1.0, 0, 12, seed), {}, batch_size=4))
         for seed in seeds]
        for seeds in ((1, 1), (1, 2))
    )  # fmt: skip
    assert same[0] == same[1] and other[0] != other[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temperature", "-1"], "`temperature` is -1.0"),
        (["--top_p", "0"], "`top_p` is 0.0"),
        (["--top_k", "-1"], "`top_k` is -1"),
        (["--concurrency", "0"], "`concurrency` is 0: pass at least 1"),
        (["--requests_per_minute", "0"], "`requests_per_minute` is 0.0"),
        (["--engine", "vllm"], "engine"),
        (["--engine", "openai", "--base_url", "localhost"], "add http://"),
        (["--temprature", "1"], "did you mean `--temperature`"),
    ],
)
def test_wrong_arguments_are_refused(flags, message, run):
    with pytest.raises(UsageError, match=message):
        run([{"prompt": "a"}], *flags)


def test_a_target_without_a_template_is_refused(run, target_dir):
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    tokenizer.chat_template = None
    template = target_dir / "chat_template.jinja"
    kept = template.read_text()
    template.unlink()
    try:
        with pytest.raises(UsageError, match="has no chat template"):
            run([{"prompt": "a"}])
    finally:
        template.write_text(kept)


def test_torch_is_left_without_gradients(tokenizer):
    model = target(tokenizer)
    engine_answers(GenerateEngine(model, tokenizer, GREEDY, {}, batch_size=8))
    assert torch.is_grad_enabled() and all(parameter.grad is None for parameter in model.parameters())

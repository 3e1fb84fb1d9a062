"""What a target accepts: counts by prompt, their interval, prompt sets, and servers that count by themselves."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import ThreadingHTTPServer

import pytest
import torch

from draftsmith import Eagle3DraftModel
from draftsmith.commands.evaluation_engines import ServerEngine
from draftsmith.data import PRESETS, read_prompts
from draftsmith.serving.launching import launched
from draftsmith.serving.servers import Counters, Server, ServerError, launch_command
from draftsmith.speculative import Acceptance, measure_acceptance, measure_plain, speculative_generate
from draftsmith.speculative.evaluation import continuation_lengths
from draftsmith.transformers_hooks import ATTENTION_NAME
from tests.fake_server import Answers, serving
from tests.tiny_models import random_tokens, tiny_model


@pytest.fixture(scope="module")
def models():
    target = tiny_model("llama")
    torch.manual_seed(0)
    return target, Eagle3DraftModel.from_target(target, aux_layer_ids=(1, 2, 3))


def batch_of(prompts, length=9):
    ids = random_tokens(prompts, length)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_counts_are_those_of_the_decoding(models, temperature):
    torch.manual_seed(3)
    counts, answers = measure_acceptance(
        *models, [batch_of(3), batch_of(2)], num_draft_tokens=4, max_new_tokens=11, temperature=temperature
    )
    torch.manual_seed(3)
    outputs = [
        speculative_generate(
            *models, batch_of(size)["input_ids"], num_draft_tokens=4, max_new_tokens=11, temperature=temperature
        )
        for size in (3, 2)
    ]
    assert counts.rounds == torch.cat([drafted // 4 for _, drafted, _ in outputs]).tolist()
    assert counts.accepted_per_position == sum(per_position for _, _, per_position in outputs).tolist()
    assert sum(counts.accepted) == sum(counts.accepted_per_position)
    assert counts.prompts == 5 and counts.new_tokens == 5 + sum(counts.rounds) + sum(counts.accepted)
    assert answers == [row[9:] for sequences, _, _ in outputs for row in sequences.tolist()]
    assert counts.tokens_per_second > 0


@pytest.mark.parametrize("has_sdpa", [True, False])
def test_plain_decoding_is_timed_under_transformers_own_attention(models, monkeypatch, has_sdpa):
    target, used = models[0], []
    monkeypatch.setattr(type(target), "_supports_sdpa", has_sdpa)
    target.set_attn_implementation(ATTENTION_NAME)
    hook = target.register_forward_pre_hook(lambda *_: used.append(target.config._attn_implementation))
    assert measure_plain(target, [batch_of(2)], max_new_tokens=3, temperature=0) > 0
    hook.remove()
    assert set(used) == {"sdpa" if has_sdpa else "eager"} and target.config._attn_implementation == ATTENTION_NAME


def test_a_row_ends_at_its_first_eos_or_at_the_limit():
    ids = torch.tensor([[5, 7, 0, 0], [5, 6, 5, 6], [7, 0, 0, 0], [5, 6, 5, 7]])
    assert continuation_lengths(ids, torch.tensor([7]), 9).tolist() == [2, 4, 1, 4]
    assert continuation_lengths(ids, torch.tensor([], dtype=torch.long), 3).tolist() == [3] * 4


def test_interval_is_that_of_a_ratio_over_prompts():
    """Against resampling of prompts; that of rounds alone would be too narrow, since prompts differ."""
    torch.manual_seed(0)
    chance = torch.rand(400)
    rounds = torch.randint(5, 60, (400,))
    accepted = torch.distributions.Binomial(3 * rounds.float(), chance).sample().long()
    low, high = Acceptance(3, rounds.tolist(), accepted.tolist()).interval
    picks = torch.randint(400, (4000, 400))
    resampled = 1 + accepted[picks].sum(1) / rounds[picks].sum(1)
    expected = torch.quantile(resampled, torch.tensor([0.025, 0.975])).tolist()
    assert [low, high] == pytest.approx(expected, abs=0.02)
    assert Acceptance(3, [4], [2]).interval is None
    assert Acceptance(3, [4] * 9, [2] * 9).interval is None  # as of a server that counts nine batches
    assert Acceptance(3, [4] * 10, [2] * 10).interval == (1.5, 1.5)
    assert Acceptance(3, [4] * 9 + [0] * 20, [2] * 9 + [0] * 20).interval is None  # answers of one token
    assert Acceptance(3, [4, 2, 0] * 5, [2, 3, 0] * 5).interval == Acceptance(3, [4, 2] * 5, [2, 3] * 5).interval
    assert Acceptance(3, [0] * 20, [0] * 20).interval is None


def test_counts_add_up_and_nothing_drafted_is_one():
    total = Acceptance(2, [3], [4], [3, 1], 1, 8, 0.5) + Acceptance(2, [1], [0], [0, 0], 1, 2, 0.5)
    assert total == Acceptance(2, [3, 1], [4, 0], [3, 1], 2, 10, 1.0)
    assert total.acceptance_length == 2.0 and total.rates == [0.75, 0.25] and total.tokens_per_second == 10.0
    assert Acceptance(2).acceptance_length == 1.0


ROWS = {
    "mt_bench": {"prompt": ["Write.", "Rewrite."], "category": "writing"},
    "gsm8k": {"question": "2 + 2?", "answer": "4"},
    "humaneval": {"prompt": "def f():", "task_id": "HumanEval/0"},
    "math500": {"problem": "Solve.", "answer": "1"},
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_read_local_copies(name, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS[name]) + "\n")
    (found,) = read_prompts([f"{name}={path}"])
    column = ROWS[name][PRESETS[name].column]
    said = column[0] if isinstance(column, list) else column
    assert found.content == [{"role": "user", "content": said}]
    assert found.category == ("writing" if name == "mt_bench" else name)


def test_a_preset_of_other_columns_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "x"}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 1: .*question.*the row has text"):
        read_prompts([f"gsm8k={path}"])


class FakeServer(Answers):
    """Answers three tokens to each prompt, two of them drafted and accepted in one round."""

    rounds = 0
    positions: tuple[int, ...] = (0, 1)
    counts = True

    def do_GET(self):
        if self.path == "/health":
            return self.answer("")
        if self.path == "/v1/models":
            return self.answer(json.dumps({"data": [{"id": "served"}]}))
        lines = ["# HELP vllm:other something", 'vllm:other{engine="0"} 1.0']
        if self.counts:
            lines.append(f'vllm:spec_decode_num_drafts_total{{engine="0",model_name="a,b"}} {float(self.rounds)}')
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines += [
                f'{name}{{engine="0",position="{p}"}} {float(self.rounds)}' for p in self.positions if self.rounds
            ]
        return self.answer("\n".join(lines))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] == "Bearer wrong":
            return self.answer("no such key", 401)
        type(self).rounds += 1
        if self.path == "/generate":
            assert body["input_ids"] and body["sampling_params"]["max_new_tokens"] == 4
            counts = {"completion_tokens": 4, "spec_verify_ct": 2}
            return self.answer(json.dumps({"text": "abcd", "meta_info": counts}))
        assert body["model"] == "served" and body["max_tokens"] == 4
        return self.answer(json.dumps({"choices": [{"text": "abcd"}], "usage": {"completion_tokens": 4}}))


@pytest.fixture
def address(monkeypatch):
    monkeypatch.setattr(FakeServer, "rounds", 0)
    with serving(FakeServer) as address:
        yield address


class Settings:
    batch_size, max_new_tokens = 2, 4


def decode(engine, address, **options):
    return ServerEngine(Server(engine, f"{address}/v1", **options), Settings()).decode([[1, 2]] * 3, 2, 0.0, "x")


def test_vllm_is_counted_by_its_counters_batch_by_batch(address):
    counts = decode("vllm", address)
    assert (counts.rounds, counts.accepted, counts.accepted_per_position) == ([2, 1], [4, 2], [3, 3])
    assert counts.prompts == 3 and counts.new_tokens == 12 and counts.acceptance_length == 3.0


def test_sglang_tells_the_rounds_of_each_answer(address):
    counts = decode("sglang", address)
    assert (counts.rounds, counts.accepted) == ([2, 2, 2], [1, 1, 1]) and counts.acceptance_length == 1.5


def test_any_other_server_is_timed_alone(address):
    counts = decode("openai", address)
    assert counts.rounds == [] and counts.new_tokens == 12 and counts.seconds > 0


def test_what_a_server_lacks_is_said(address, monkeypatch):
    with pytest.raises(ServerError, match="answered 401: no such key") as error:
        decode("openai", address, api_key="wrong")
    assert "Bearer" not in str(error.value)
    with pytest.raises(ServerError, match="drafts 3 tokens per verification, `num_draft_tokens` is 2: pass 3"):
        monkeypatch.setattr(FakeServer, "positions", (0, 1, 2))
        decode("vllm", address)
    with pytest.raises(ServerError, match="start it with a head"):
        monkeypatch.setattr(FakeServer, "counts", False)
        decode("vllm", address)
    with pytest.raises(ServerError, match="cannot be reached"):
        decode("vllm", "http://127.0.0.1:9")


ODD_ANSWERS = {
    "html": ("openai", b"<html>log in</html>", "answered without `data.0.id`: '<html>log in"),
    "no models": ("openai", b'{"data": []}', "answered without `data.0.id`"),
    "no object": ("openai", b"[]", "answered without `data.0.id`"),
    "no usage": ("openai", b'{"data": [{"id": "served"}], "choices": [{"text": ""}]}', "`usage.completion_tokens`"),
    "another engine": ("sglang", b'{"text": "a"}', "without `meta_info`.*engine sglang"),
    "no text": ("openai", b"\xff\xfe", "answered without `data.0.id`"),
    "nonsense counter": ("vllm", b"vllm:spec_decode_num_drafts_total abc", "counter that cannot be read .*'abc'"),
    "endless counter": ("vllm", b"vllm:spec_decode_num_drafts_total +Inf", "counter that cannot be read"),
    "no position": (
        "vllm", b"vllm:spec_decode_num_accepted_tokens_per_pos_total 1", "cannot be read .*'position'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD_ANSWERS)
def test_odd_answers_are_errors_of_the_server(name, address, monkeypatch):
    engine, body, message = ODD_ANSWERS[name]

    def answer(handler, _text, status=200):
        handler.send_response(status)
        handler.end_headers()
        handler.wfile.write(body)

    monkeypatch.setattr(FakeServer, "answer", answer)
    with pytest.raises(ServerError, match=message):
        decode(engine, address)


@pytest.mark.parametrize("status", [200, 500])
def test_an_answer_that_breaks_off_is_an_error_of_the_server(status, address, monkeypatch):
    def answer(handler, text, _status=200):
        handler.send_response(status)
        handler.send_header("Content-Length", "5000")
        handler.end_headers()
        handler.wfile.write(text.encode())

    monkeypatch.setattr(FakeServer, "answer", answer)
    with pytest.raises(ServerError, match="broke its answer off" if status == 200 else "answered 500"):
        decode("openai", address)


def test_metrics_of_others_are_not_read(address, monkeypatch):
    whole = FakeServer.answer
    others = '\nfoo{a="b"} abc\nvllm:spec_decode_num_drafts_total_created{engine="0"} nonsense\n'
    monkeypatch.setattr(FakeServer, "answer", lambda handler, text: whole(handler, text + others * ("# " in text)))
    assert decode("vllm", address).rounds == [2, 1]


@pytest.mark.parametrize("later", [Counters(1, [1, 1]), Counters(9, [9, 0]), Counters(9, [9, 9, 9])])
def test_counters_of_a_server_that_was_started_anew_are_no_difference(later):
    with pytest.raises(ServerError, match="went back"):
        later.since(Counters(3, [2, 1]))


def test_one_failure_does_not_wait_for_the_others(address, monkeypatch):
    def do_post(handler):
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        if body["prompt"] != [1]:
            time.sleep(30)
        handler.answer("too long", 400)

    monkeypatch.setattr(FakeServer, "do_POST", do_post)
    start = time.monotonic()
    with pytest.raises(ServerError, match="answered 400: too long"):
        Server("openai", address).complete([[2], [1], [2]], max_new_tokens=4, temperature=0.0)
    assert time.monotonic() - start < 10


def test_answers_are_in_the_order_of_their_prompts(address, monkeypatch):
    def do_post(handler):
        number = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))["prompt"][0]
        time.sleep(0.1 * (3 - number))
        text = {"choices": [{"text": str(number)}], "usage": {"completion_tokens": number}}
        handler.answer(json.dumps(text))

    monkeypatch.setattr(FakeServer, "do_POST", do_post)
    answers = Server("openai", address).complete([[0], [1], [2]], max_new_tokens=4, temperature=0.0)
    assert [answer.new_tokens for answer in answers] == [0, 1, 2]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("http://localhost:99999", "99999' .*0-65535"),
        ("http://localhost:abc", "abc"),
        ("http://localhost:0", "not the address"),
        ("http://[::1", "Invalid IPv6"),
        ("", "not the address"),
        ("http://", "not the address"),
        ("http://:8000", "not the address"),
        ("http://local host:1", "not the address"),
        ("http://a..b", "label"),
        ("http://me:secret@localhost", "not the address"),
        ("http://localhost/?a=b", "not the address"),
        ("ftp://localhost:1", "not the address"),
        ("localhost:8765", "add http:// before it"),
    ],
)
def test_addresses_to_which_nothing_can_be_sent_are_refused(address, message):
    with pytest.raises(ValueError, match=f"`base_url` is .*{message}"):
        Server("openai", address)


def test_a_launched_server_is_asked_where_it_is_started():
    for given, asked, port in (
        ("http://localhost", "http://localhost:8000", 8000),
        ("http://127.0.0.1/v1/", "http://127.0.0.1:8000", 8000),
        ("http://localhost:", "http://localhost:8000", 8000),
        ("http://[::1]:81", "http://[::1]:81", 81),
    ):
        server = Server.to_launch("vllm", given)
        assert (server.base_url, server.port) == (asked, port)
    assert Server("vllm", "http://localhost").base_url == "http://localhost"
    for elsewhere in ("http://example.com:1234", "https://localhost", "http://localhost:80/other"):
        with pytest.raises(ValueError, match="`base_url` is .*on this machine"):
            Server.to_launch("vllm", elsewhere)


SERVE = (
    "import sys, http.server as h, tests.test_evaluation as t;"
    "h.ThreadingHTTPServer(('127.0.0.1', int(sys.argv[1])), t.FakeServer).serve_forever()"
)


def free_port():
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeServer)
    server.server_close()
    return server.server_port


def test_a_launched_server_is_awaited_and_ended():
    port = free_port()
    with launched([sys.executable, "-c", SERVE, str(port)], f"http://127.0.0.1:{port}"):
        assert Server("openai", f"http://127.0.0.1:{port}").model == "served"
    with pytest.raises(ServerError, match="cannot be reached"):
        _ = Server("openai", f"http://127.0.0.1:{port}").model


def test_a_server_that_fails_to_start_shows_its_log():
    with pytest.raises(ServerError, match=r"status 3 (.|\n)*no memory left"):
        with launched([sys.executable, "-c", "print('no memory left'); exit(3)"], "http://127.0.0.1:9"):
            pass


def test_no_other_server_is_taken_for_the_launched_one(address):
    with pytest.raises(ServerError, match=f"`base_url` {address}: a server answers there already"):
        with launched([sys.executable, "-c", "raise SystemExit"], address):
            pass


def test_a_server_that_ended_is_not_the_one_that_answers(address, monkeypatch):
    """Another one took the port after it was found free."""
    monkeypatch.setattr("draftsmith.serving.launching._refuse_other_server", lambda base_url: None)
    answers_late = 'import time, sys; print("port is taken"); time.sleep(1); sys.exit(1)'
    with pytest.raises(ServerError, match=r"status 1 (.|\n)*port is taken"):
        monkeypatch.setattr(FakeServer, "do_GET", lambda handler: (time.sleep(2), handler.answer("")))
        with launched([sys.executable, "-c", answers_late], address):
            pass


def test_a_program_that_is_none_cannot_be_started(tmp_path):
    with pytest.raises(ServerError, match=r"nothing cannot be started: No such file"):
        with launched([str(tmp_path / "nothing")], "http://127.0.0.1:9"):
            pass


ASK = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background hands on that it is ignored
from draftsmith.serving.launching import launched
from draftsmith.serving.servers import Server
url = f"http://127.0.0.1:{sys.argv[1]}"
with launched([sys.executable, "-c", sys.argv[2], sys.argv[1]], url):
    print("up", flush=True)
    Server("openai", url).complete([[1]] * 3, max_new_tokens=4, temperature=0.0)
"""
NEVER_ANSWERS = """
import sys, time, http.server as h
class Handler(h.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "served"}]}')
    def do_POST(self):
        time.sleep(60)
h.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_thread_may_launch():
    port, names = free_port(), []

    def launch():
        with launched([sys.executable, "-c", NEVER_ANSWERS, str(port)], f"http://127.0.0.1:{port}"):
            names.append(Server("openai", f"http://127.0.0.1:{port}").model)

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert names == ["served"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_a_signal_ends_us_at_once_and_the_launched_server_with_us(number, status):
    port = free_port()
    command = [sys.executable, "-c", ASK, str(port), NEVER_ANSWERS]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout.readline() == "up\n"
    time.sleep(1)  # until the requests are sent
    start = time.monotonic()
    os.kill(process.pid, number)
    assert process.wait(timeout=120) == status
    assert time.monotonic() - start < 15
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_launch_commands_draft_a_chain():
    vllm = launch_command("vllm", "t", "d", 5, port=81)
    assert json.loads(vllm[-1]) == {"method": "eagle3", "model": "d", "num_speculative_tokens": 5}
    sglang = launch_command("sglang", "t", "d", 5)
    flags = dict(zip(sglang[3::2], sglang[4::2], strict=False))
    assert flags["--speculative-eagle-topk"] == "1" and flags["--speculative-num-steps"] == "5"
    assert flags["--speculative-num-draft-tokens"] == "6"
    with pytest.raises(ValueError, match="start any other server yourself"):
        launch_command("openai", "t", "d", 5)

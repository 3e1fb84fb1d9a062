"""Answers of a server over real HTTP, with what goes wrong between two machines."""

import html
import http.client
import json
import time
import traceback
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from urllib.parse import quote

import pytest
from datasets import load_dataset

from draftsmith.commands.parsing import UsageError
from draftsmith.generation.server import PROBE, Pace, seconds_of
from tests.generation.chat_server import answer_to


def user(text):
    return {"role": "user", "content": text}


def flags(server, *others):
    return ["--engine", "openai", "--base_url", server[0], "--max_retries", "3", *others]


def messages_of(tmp_path):
    rows = load_dataset(str(tmp_path / "out"), split="train")
    return [[{k: v for k, v in message.items() if v is not None} for message in row["messages"]] for row in rows]


def test_each_answer_is_to_the_targets_own_history(run, server, tmp_path):
    system = {"role": "system", "content": "Be brief."}
    rows = [{"messages": [system, user("one"), {"role": "assistant", "content": "old"}, user("two")]}, {"prompt": "x"}]
    counts = run(rows, *flags(server))
    history = [system, user("one")]
    history += [{"role": "assistant", "content": answer_to(history)}, user("two")]
    expected = [*history, {"role": "assistant", "content": answer_to(history)}]
    assert messages_of(tmp_path)[0] == expected and "old" not in json.dumps(server[1].requests)
    assert (counts.rows, counts.written, counts.answers, counts.cut) == (2, 2, 3, 0)
    provenance = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert provenance["tokens"] == {"prompt": 21, "new": 15} and provenance["settings"]["served_model"] == "served"
    assert str(tmp_path) not in json.dumps(provenance) and "127.0.0.1" not in json.dumps(provenance)


def test_requests_carry_the_settings_and_a_seed_each(run, server):
    rows = [{"prompt": "a", "tools": [{"type": "function"}], "chat_template_kwargs": {"b": 2}}, {"prompt": "a"}]
    chosen = ["--temperature", "0.5", "--top_p", "0.9", "--top_k", "20", "--max_new_tokens", "9"]
    run(rows, *flags(server, *chosen, "--chat_template_kwargs", '{"a": 1, "b": 1}'))
    first, second = sorted(server[1].requests, key=lambda request: "tools" not in request)
    for request in (first, second):
        found = request["model"], request["temperature"], request["top_p"], request["top_k"], request["max_tokens"]
        assert found == ("served", 0.5, 0.9, 20, 9)
    assert first["tools"] == [{"type": "function"}] and "tools" not in second
    assert (first["chat_template_kwargs"], second["chat_template_kwargs"]) == ({"a": 1, "b": 2}, {"a": 1, "b": 1})
    assert first["seed"] != second["seed"]


@pytest.mark.parametrize(
    ("chosen", "sent"), [([], {}), (["--top_k", "0"], {"top_k": -1}), (["--top_k", "3"], {"top_k": 3})]
)
def test_top_k_is_told_to_a_server_only_if_someone_named_it(chosen, sent, run, server):
    run([{"prompt": "a"}], *flags(server, "--temperature", "1", *chosen))
    (request,) = server[1].requests
    assert {name: request[name] for name in request if name == "top_k"} == sent


def test_a_busy_or_broken_server_is_asked_again(run, server, tmp_path):
    server[1].faults = {"0": [429, 500, "drop"], "1": ["drop"], "2": [503], "3": [502, 504]}
    run([{"prompt": str(n)} for n in range(6)], *flags(server))
    assert messages_of(tmp_path) == [
        [user(str(n)), {"role": "assistant", "content": answer_to([user(str(n))])}] for n in range(6)
    ]
    assert sorted(server[1].asked().values()) == [1, 1, 2, 2, 3, 4]


def test_an_answer_that_takes_too_long_is_asked_for_again(run, server, tmp_path):
    server[1].seconds = 0.5
    with pytest.raises(UsageError, match="Given up after 2 attempts: .* run the same command again to go on"):
        run([{"prompt": "a"}], *flags(server, "--request_timeout", "0.1", "--max_retries", "1"))
    server[1].seconds = 0.0
    run([{"prompt": "a"}], *flags(server))
    assert len(messages_of(tmp_path)) == 1


def test_the_server_says_how_long_all_wait(run, server):
    server[1].faults = {"0": [(429, {"Retry-After": "1"})]}
    run([{"prompt": str(n)} for n in range(3)], *flags(server, "--concurrency", "1"))
    assert server[1].times[1] - server[1].times[0] >= 1


def test_the_server_may_not_let_all_wait_for_a_day(run, server, monkeypatch, caplog):
    monkeypatch.setattr("draftsmith.generation.server.LONGEST_HOLD", 1.2)
    server[1].faults = {"0": [(429, {"Retry-After": "86400"})]}
    run([{"prompt": "0"}], *flags(server))
    assert server[1].times[1] - server[1].times[0] >= 1.2
    assert "The server asks for 86400 seconds without requests: waiting for 1." in caplog.text


@pytest.mark.parametrize("usage", [None, {"prompt_tokens": None}, {"completion_tokens": "5"}, [], "7"])
def test_usage_is_only_counted(usage, run, server, tmp_path):
    server[1].faults = {"a": [{"usage": usage}]}
    run([{"prompt": "a"}], *flags(server))
    assert len(server[1].requests) == 1
    assert json.loads((tmp_path / "out" / "provenance.json").read_text())["tokens"] == {"prompt": 0, "new": 0}


@pytest.mark.parametrize("nonsense", ["<html>Log in</html>", '{"choices": [{"mess', "[" * 9999, {"choices": []}])
def test_what_is_no_answer_is_not_asked_for_forever(nonsense, run, server):
    server[1].faults = {"a": [nonsense] * 99, PROBE["messages"][0]["content"]: [nonsense]}
    with pytest.raises(UsageError, match=r"up after 3 attempts: .* without `choices\.0\.message`: .*no proxy"):
        run([{"prompt": "a"}], *flags(server, "--max_retries", "8"))
    assert len(server[1].requests) == 3 + 1  # and once whether it answers at all
    server[1].faults = {"a": [nonsense]}
    run([{"prompt": "a"}], *flags(server))


@pytest.mark.parametrize(
    ("header", "seconds"),
    [(None, None), ("7", 7), ("soon", None), ("Thu, 01 Jan 1970 00:00:00 GMT", 0), ("²", None), ("-1", None)],
)
def test_retry_after(header, seconds):
    assert seconds_of(header) == seconds


def test_retry_after_a_date():
    date = format_datetime(datetime.now(timezone.utc) + timedelta(seconds=30), usegmt=True)
    assert 25 < seconds_of(date) <= 30


def test_requests_per_minute_are_spread_evenly(run, server):
    start = time.monotonic()
    run([{"prompt": str(n)} for n in range(5)], *flags(server, "--requests_per_minute", "600"))
    assert len(server[1].times) == 5 and time.monotonic() - start >= 0.4
    pace = Pace(1)
    waits = [pace.seconds_to_wait() for _ in range(3)]
    assert waits == pytest.approx([0, 60, 120], abs=10)  # the machine may be busy
    pace.hold(600)
    assert pace.seconds_to_wait() == pytest.approx(600, abs=10)


def test_no_more_requests_at_once_than_asked_for(run, server):
    server[1].seconds = 0.05
    run([{"prompt": str(n)} for n in range(12)], *flags(server, "--concurrency", "3"))
    assert server[1].most_at_once == 3


def test_a_row_that_the_server_refuses_is_named_and_can_be_left_out(run, server, tmp_path):
    server[1].faults = {"1": [400] * 9}
    rows = [{"prompt": str(n)} for n in range(4)]
    with pytest.raises(UsageError, match=r"1 row got no answer \(3 did(.|\n)*line 2: `messages` is refused.*not now"):
        run(rows, *flags(server))
    assert not (tmp_path / "out" / "train.parquet").exists()
    counts = run(rows, *flags(server, "--on_bad_row", "skip"))
    assert (counts.rows, counts.written) == (4, 3)
    assert [messages[0]["content"] for messages in messages_of(tmp_path)] == ["0", "2", "3"]
    assert sorted(server[1].asked().values()) == [1, 1, 1, 2]  # those that were answered are not asked for again


def test_a_row_that_breaks_the_server_does_not_stop_the_others(run, server):
    server[1].faults = {"8": [500] * 99}  # the last one, after which nothing else would be answered
    counts = run([{"prompt": str(n)} for n in range(9)], *flags(server, "--on_bad_row", "skip"))
    assert (counts.rows, counts.written) == (9, 8)


def test_a_server_that_dies_midway_is_no_fault_of_the_rows(run, server):
    rows = [{"prompt": str(n)} for n in range(30)]
    server[1].lives = 10
    with pytest.raises(UsageError, match="Given up after 4 attempts"):
        run(rows, *flags(server, "--concurrency", "2", "--on_bad_row", "skip"))
    server[1].lives = None
    answered = {json.dumps(request["messages"]) for request in server[1].requests[:10]}
    assert run(rows, *flags(server)).written == 30
    assert len(answered) == 10 and all(server[1].asked()[messages] == 1 for messages in answered)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_no_request_can_get_past_ends_the_run_at_once(status, run, server):
    server[1].faults = {str(n): [status] for n in range(9)}
    with pytest.raises(UsageError, match=f"answered {status}: not now"):
        run([{"prompt": str(n)} for n in range(9)], *flags(server, "--concurrency", "1"))
    assert len(server[1].requests) == 1


def test_hopeless_runs_end_early(run, server):
    server[1].faults = {str(n): [400] for n in range(99)}
    with pytest.raises(UsageError, match="The first 16 rows got no answer"):
        run([{"prompt": str(n)} for n in range(99)], *flags(server, "--concurrency", "1"))
    assert len(server[1].requests) < 20


def test_the_key_is_read_from_the_environment_and_kept_nowhere(run, server, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("MY_KEY", "sk-secret-1234")
    server[1].faults = {"bad": [400]}
    with pytest.raises(UsageError) as error:
        run([{"prompt": "a"}, {"prompt": "bad"}], *flags(server, "--api_key_env", "MY_KEY"))
    run([{"prompt": "a"}, {"prompt": "bad"}], *flags(server, "--api_key_env", "MY_KEY"))
    assert all(headers["Authorization"] == "Bearer sk-secret-1234" for headers in server[1].headers)
    kept = [path.read_bytes() for path in (tmp_path / "out").iterdir()]
    shown = "".join([str(error.value), *capfd.readouterr()]).encode()
    assert not any(b"sk-secret" in text for text in [*kept, shown])
    with pytest.raises(UsageError, match="names a variable that is not set") as error:
        run([{"prompt": "a"}], *flags(server, "--api_key_env", "NO_SUCH_KEY"))
    with pytest.raises(UsageError, match="is no name of a variable") as error:
        run([{"prompt": "a"}], *flags(server, "--api_key_env", "sk-secret-1234"))
    assert "sk-secret" not in str(error.value)


@pytest.mark.parametrize("key", ["sk-secret-1234", "sk-\"secret'/<1234>&", "sk-secret%+="])
@pytest.mark.parametrize("padding", [0, 290])
@pytest.mark.parametrize("form", ["raw", "json", "url", "html", "success", "no http"])
def test_a_key_that_the_server_sends_back_is_not_shown(key, padding, form, run, server, monkeypatch, capfd):
    monkeypatch.setenv("MY_KEY", key)
    said = {
        "raw": key, "json": json.dumps(key), "url": quote(key, safe=""), "html": html.escape(key), "success": key,
        "no http": key,
    }[form]  # fmt: skip
    server[1].refusal = "x" * padding + "Bearer " + said.replace("{", "{{")
    server[1].faults = {"a": [401]}
    if form == "success":
        server[1].faults = {"a": [json.dumps({"error": server[1].refusal})] * 9}
    if form == "no http":
        monkeypatch.setattr("http.client.HTTPResponse._read_status", broken_by(key))
    with pytest.raises(UsageError) as error:
        run([{"prompt": "a"}], *flags(server, "--api_key_env", "MY_KEY", "--served_model", "m"))
    shown = "".join([*traceback.format_exception(error.value), *capfd.readouterr()])
    assert "secret" not in shown and "1234" not in str(error.value)


def broken_by(key):
    def read(self):
        raise http.client.BadStatusLine(f"Bearer {key}")

    return read


def test_a_key_that_no_header_can_carry_is_refused_without_being_shown(run, server, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sk-secret\n1")
    with pytest.raises(UsageError, match="`api_key` holds a line break") as error:
        run([{"prompt": "a"}], *flags(server, "--api_key_env", "MY_KEY"))
    assert "secret" not in str(error.value)


def test_a_server_that_is_not_there(run):
    with pytest.raises(UsageError, match="cannot be reached"):
        run([{"prompt": "a"}], "--engine", "openai", "--base_url", "http://127.0.0.1:9")


def test_pace_without_a_limit_never_waits():
    pace = Pace(None)
    start = time.monotonic()
    assert max(pace.seconds_to_wait() for _ in range(1000)) == 0 and time.monotonic() - start < 1

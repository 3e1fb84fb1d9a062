"""What is refused before the first request, and tokens that get nowhere."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from draftsmith.hub import HubError, push

from .heads import digests, make_head
from .hub_server import OWNER_TOKEN


@pytest.fixture
def directory(tmp_path):
    make_head().save_pretrained(tmp_path / "head")
    return tmp_path / "head"


@pytest.fixture
def refused(hub, directory):
    """A check that a push fails with a message, sends nothing and changes nothing."""

    def check(message, *, repo_id="user/head", error=ValueError, **options):
        before = digests(directory)
        with pytest.raises(error, match=message) as caught:
            push(directory, repo_id, **options)
        assert hub.log == [] and digests(directory) == before
        return caught.value

    return check


@pytest.mark.parametrize("name", ["user/my head", "user/a/b", "/tmp/head", "user/head.git", "-user/head", ""])
def test_bad_repository_names(refused, name):
    refused("[Rr]epo", repo_id=name)


def test_pull_requests_go_to_the_main_branch_only(refused):
    refused("`create_pr` proposes to `main`: leave out `revision`", create_pr=True, revision="v2")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "arguments.bin", "sub/optimizer.pt", "ROWS.PKL"])
def test_pickles(refused, directory, name):
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).write_bytes(b"\x80\x04.")
    refused(f"`{name}` may be a pickle.*safetensors.*`ignore_patterns`")


@pytest.mark.parametrize("patterns", ["*.bin", ["*.bin"]])
def test_patterns_leave_files_out(hub, directory, patterns):
    (directory / "training_args.bin").write_bytes(b"\x80\x04.")
    push(directory, "user/head", ignore_patterns=patterns)
    assert set(hub.files("user/head")) == {"README.md", "config.json", "model.safetensors"}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_directories_without_a_head(refused, directory, name):
    (directory / name).unlink()
    refused("holds no head: .* is missing. Write one with `save_pretrained`")


def test_files_in_place_of_directories(hub, directory):
    with pytest.raises(ValueError, match="config.json is no directory"):
        push(directory / "config.json", "user/head")


def test_damaged_files(refused, directory):
    path = directory / "model.safetensors"
    whole = path.read_bytes()
    for damaged in (whole[:-100], b"", b"\xff" * 100):
        path.write_bytes(damaged)
        refused("`model.safetensors` is damaged .*: save the head again")
    path.write_bytes(whole)
    (directory / "config.json").write_text("{")
    refused("`config.json` is no JSON")


def test_missing_shards(refused, directory):
    (directory / "model.safetensors").unlink()
    make_head().save_pretrained(directory, max_shard_size="20KB")
    shards = sorted(directory.glob("*.safetensors"))
    assert len(shards) > 1
    shards[0].unlink()
    refused(f"`model.safetensors.index.json` names {shards[0].name}, which are missing")
    refused(f"names {shards[0].name}, {shards[1].name}, which", ignore_patterns=shards[1].name)


def test_files_over_the_limit_of_the_hub(refused, directory, monkeypatch):
    monkeypatch.setattr("draftsmith.hub.files.MAX_FILE_BYTES", 10_000)
    refused(r"`model.safetensors` has \d+ bytes, more than the 10000.*`max_shard_size`")


@pytest.mark.parametrize(
    ("card", "field"),
    [
        ("license: foo", "license"),
        ("license: mit\nbase_model: null", "base_model"),
        ("license: mit\nbase_model: /models/llama", "base_model"),
        ("license: mit\ndatasets:\n- ./rows.jsonl", "datasets"),
    ],
)
def test_cards(refused, directory, card, field):
    (directory / "README.md").write_text(f"---\n{card}\n---\n\n# A head\n")
    refused(f"`{field}")


def test_models_refuse_as_directories_do(hub):
    head = make_head()
    with pytest.raises(ValueError, match="`license` is 'foo'"):
        head.push_to_hub("user/head", card="---\nlicense: foo\n---\n")
    with pytest.raises(ValueError, match="`base_model`"):
        head.push_to_hub("user/head", base_model="/models/llama")
    assert hub.log == []


@pytest.mark.parametrize(
    "token",
    [
        OWNER_TOKEN,
        "hf_" + "a1B2" * 9,
        "hf_oauth_eyJhbGciOiJFZERTQSJ9.eyJzY29wZSI6WyJvcGVuaWQiXX0",
        "hf_jwt_eyJhbGciOiJFZERTQSJ9abcdefghijklmnopqrst",
        "sk-proj-abcdefghijklmnopqrstuvwxyz0123456789ABCD",
        "ghp_" + "a1B2" * 9,
        "AKIA" + "A1B2" * 4,
        "WANDB_API_KEY=" + "0a" * 20,
        "https://me:s3cret@example.org/x",
        "-----BEGIN OPENSSH PRIVATE KEY-----",
    ],
)
@pytest.mark.parametrize("name", ["notes.txt", "config.json", "model.safetensors"])
def test_tokens_in_files(refused, directory, name, token):
    """The token in use, and what looks like another one."""
    path = directory / name
    if name == "config.json":
        path.write_text(json.dumps({**json.loads(path.read_text()), "hub_token": token}))
    elif name == "model.safetensors":
        save_file({"fc.weight": torch.zeros(2)}, path, {"token": token})
    else:
        path.write_text(f"export HF_TOKEN={token}\n")
    error = refused(f"`{name}` holds an access token, key or password: remove it")
    assert token not in str(error)


def test_a_token_of_another_form_is_found_too(refused, directory):
    (directory / "notes.txt").write_text("corporate-token-1234")
    refused("`notes.txt` holds an access token", token="corporate-token-1234")


@pytest.mark.parametrize(
    "token",
    [OWNER_TOKEN[:10] + "\n" + OWNER_TOKEN[10:], OWNER_TOKEN + "\xe9", "", " \n", 5, b"hf_x", OWNER_TOKEN + "\x00"],
)
def test_what_is_no_token_is_refused_unseen(refused, token):
    error = refused("`token` (is|has)", token=token)
    assert "***" not in str(error) and OWNER_TOKEN[10:] not in str(error)


@pytest.mark.parametrize("around", ["{}\n", "{}\r\n", " {} "])
def test_white_space_around_a_token_is_none_of_it(hub, directory, around):
    push(directory, "user/head", token=around.format(OWNER_TOKEN))
    assert "model.safetensors" in hub.files("user/head")


@pytest.mark.parametrize("token", [OWNER_TOKEN, "hf_" + "a1B2" * 9, "https://me:s3cret@example.org"])
@pytest.mark.parametrize("name", ["commit_message", "path_in_repo", "revision", "base_model", "again"])
def test_tokens_in_texts_that_are_published_or_printed(refused, name, token):
    error = refused(f"`{name}` holds an access token", **{name: f"pushed with {token}"})
    assert token not in str(error)


def test_tokens_in_names(refused, directory):
    refused("`repo_id` holds an access token", repo_id=f"user/{OWNER_TOKEN}")
    (directory / f"{OWNER_TOKEN}.txt").write_text("x")
    assert OWNER_TOKEN not in str(refused("the name of a file holds an access token"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"commit_message": ""}, "`commit_message` is ''"),
        ({"commit_message": None}, "`commit_message` is None"),
        ({"path_in_repo": "../x"}, r"`path_in_repo` is '\.\./x'"),
        ({"path_in_repo": "/abs"}, "`path_in_repo`"),
        ({"path_in_repo": "sub/"}, "`path_in_repo`"),
        ({"path_in_repo": "a//b"}, "`path_in_repo`"),
        ({"revision": "refs/heads/main"}, "`revision` is 'refs/heads/main': pass the name of a branch"),
        ({"revision": "a b"}, "`revision`"),
        ({"revision": ""}, "`revision` is ''"),
        ({"revision": "a..b"}, "`revision`"),
        ({"private": "yes"}, "`private` is 'yes'"),
        ({"ignore_patterns": 5}, "`ignore_patterns` is 5"),
        ({"only": "weights"}, "`only` is 'weights': pass 'head', 'checkpoint' or None"),
        ({"repo_id": None}, "`repo_id` is None"),
    ],
)
def test_options_that_are_none(refused, options, message):
    refused(message, **options)


def test_hidden_files_and_what_a_run_leaves_stay_here(hub, directory):
    left = (".env", ".netrc", "sub/.env", "wandb/run.wandb", "train.log", "trainer_state.json", "all_results.json")
    for name in (*left, "training_args.bin", "sub/notes.txt"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(f"TOKEN={OWNER_TOKEN}" if name != "sub/notes.txt" else "mine")
    push(directory, "user/head")
    assert set(hub.files("user/head")) == {"README.md", "config.json", "model.safetensors", "sub/notes.txt"}


def test_only_a_head_and_the_pictures_of_its_card(hub, directory):
    names = (
        "result.png",
        "other.png",
        "notes.txt",
        "LICENSE",
        "tokenizer.json",
        "sub/model.safetensors",
        ".secret.png",
    )
    for name in names:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text("{}")
    card = "---\nlicense: mit\n---\n![result](result.png) ![x](../../x.png) ![all](*) ![y](.secret.png)\n"
    (directory / "README.md").write_text(card)
    push(directory, "user/head", only="head")
    head = {"README.md", "config.json", "model.safetensors"}
    assert set(hub.files("user/head")) == head | {"result.png", "LICENSE", "tokenizer.json"}


def test_a_directory_of_a_head_and_an_adapter_is_neither(refused, directory):
    (directory / "adapter_config.json").write_text('{"base_model_name_or_path": "user/base"}')
    refused(r"holds a head \(config.json\) and an adapter .*move away the one that is older")


@pytest.mark.parametrize("repo_id", ["user/target", "User/Target"])
def test_no_head_into_the_repository_of_its_target(refused, repo_id):
    refused("holds the model that this needs", repo_id=repo_id, base_model="user/target")


@pytest.mark.parametrize("token", [None, False])
def test_no_token(refused, monkeypatch, token):
    if token is None:
        monkeypatch.delenv("HF_TOKEN")
    refused(r"no token .*log in with `hf auth login`, set `HF_TOKEN`, or pass `token`", error=HubError, token=token)


@pytest.mark.parametrize("passed", [False, True])
def test_tokens_are_never_printed_or_saved(hub, directory, passed, monkeypatch, caplog, capfd, tmp_path):
    """Also not by a push that fails, nor in its error or those behind it."""
    caplog.set_level("DEBUG")
    if passed:
        monkeypatch.delenv("HF_TOKEN")
    options = {"token": OWNER_TOKEN} if passed else {}
    hub.echoes_token = True
    hub.fail(403, method="POST", path="/commit/")
    with pytest.raises(HubError) as caught:
        push(directory, "user/head", **options)
    push(directory, "user/head", **options)
    seen = [caplog.text, *capfd.readouterr(), repr(hub.log), *errors_behind(caught.value)]
    assert len(seen) > 5 and not [text for text in seen if OWNER_TOKEN in text]
    saved = [path for root in (tmp_path, os.environ["HF_HOME"]) for path in files_below(root)]
    assert saved and not [path for path in saved if OWNER_TOKEN.encode() in path.read_bytes()]
    assert not [name for name, content in hub.files("user/head").items() if re.search(b"hf_[A-Za-z0-9]{20}", content)]


def errors_behind(error):
    while error is not None:
        yield from (str(error), repr(error), repr(vars(error)))
        if hasattr(error, "response"):
            yield str(list(error.response.request.headers.items()))
        error = error.__cause__ or error.__context__


def files_below(root):
    return [path for path in Path(root).rglob("*") if path.is_file()]

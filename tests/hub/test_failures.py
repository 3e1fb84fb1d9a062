"""Pushes that the Hub refuses or that break off: what is said, what is kept, what is sent again."""

import re
import subprocess
import sys
import traceback

import pytest
from huggingface_hub import HfApi

from draftsmith import Eagle3DraftModel
from draftsmith.hub import HubError, push

from .heads import digests, equal, make_head
from .hub_server import OWNER_TOKEN, STRANGER_TOKEN, HubServer


UPLOAD = "/lfs/[0-9a-f]{64}"


@pytest.fixture
def shards(head, tmp_path):
    """A head in several files of weights."""
    head.save_pretrained(tmp_path / "head", max_shard_size="20KB")
    return tmp_path / "head"


@pytest.mark.parametrize(
    ("status", "path", "remedy"),
    [
        (401, "/repos/create", "the token is not valid: log in with `hf auth login`"),
        (401, "/commit/", "the token is not valid: log in with `hf auth login`"),
        (403, "/preupload/", "may not write there: use one with write access, or propose the head with `create_pr"),
        (404, "/preupload/", "the repository or the revision does not exist.*check both names"),
        (409, "/commit/", "something else is changing the repository: wait"),
        (412, "/commit/", "someone else has committed meanwhile"),
        (429, "/repos/create", "these were too many requests: wait 7 seconds"),
        (429, UPLOAD, "these were too many requests: wait 7 seconds"),
        (500, "/repos/create", "the Hub itself has failed: wait"),
        (500, "/objects/batch", "the Hub itself has failed: wait"),
        (500, UPLOAD, "the Hub itself has failed: wait"),
        (503, "/commit/", "the Hub itself has failed: wait"),
    ],
)
def test_each_refusal_says_what_to_do(hub, head, shards, status, path, remedy):
    before = digests(shards)
    hub.fail(status, method="PUT" if path == UPLOAD else "POST", path=path, times=99, retry_after=7)
    with pytest.raises(HubError, match=rf"push to `user/head` failed.*{remedy}") as caught:
        push(shards, "user/head")
    assert f"push again with `draftsmith.hub.push('{shards}', 'user/head')`" in str(caught.value)
    assert caught.value.__cause__ is not None
    assert digests(shards) == before
    assert ("model", "user/head") not in hub.store.repositories or not hub.files("user/head")
    hub.repair()
    push(shards, "user/head")
    assert equal(Eagle3DraftModel.from_pretrained("user/head"), head)


def test_short_outages_are_waited_for(hub, head, clock):
    hub.fail(500, method="PUT", path=UPLOAD, times=2)
    hub.fail(429, method="POST", path="/preupload/", retry_after=7)
    hub.drop(method="POST", path="/objects/batch")
    head.push_to_hub("user/head")
    assert clock.waits == [8, 1, 1, 2]  # the client adds a second to what the Hub asks for
    assert equal(Eagle3DraftModel.from_pretrained("user/head"), head)


def test_a_command_repeats_the_options_but_not_the_token(hub, shards):
    hub.fail(500, method="POST", path="/commit/")
    (shards / "rows.bin").write_bytes(b"not part of the head")
    with pytest.raises(HubError) as caught:
        push(shards, "user/head", private=True, revision="v2", ignore_patterns=["*.bin"], token=OWNER_TOKEN)
    command = re.search("`draftsmith.hub.(push.*)`;", str(caught.value))[1]
    eval(command)
    assert HfApi().model_info("user/head", revision="v2").private
    assert "model.safetensors.index.json" in hub.files("user/head", "v2")


def test_a_model_says_how_to_push_it_again(hub, head):
    hub.fail(500, method="POST", path="/commit/")
    with pytest.raises(HubError, match=r"push again with `push_to_hub\('user/head', ..\)`"):
        head.push_to_hub("user/head")


@pytest.mark.parametrize("options", [{}, {"create_pr": True}])
def test_repositories_of_others(hub, head, options):
    head.push_to_hub("user/head")
    changed = make_head(seed=1)
    if options:
        assert changed.push_to_hub("user/head", token=STRANGER_TOKEN, **options).pr_num == 1
    else:
        with pytest.raises(HubError, match=r"status 403 \(You have no write permission for user/head\)"):
            changed.push_to_hub("user/head", token=STRANGER_TOKEN)
    assert equal(Eagle3DraftModel.from_pretrained("user/head"), head)


def test_namespaces_of_others_and_unknown_tokens(hub, head):
    with pytest.raises(HubError, match="status 403 .*no rights in the namespace someone"):
        head.push_to_hub("someone/head")
    with pytest.raises(HubError, match="status 401 .*log in"):
        head.push_to_hub("user/head", token="hf_" + "x" * 34)


def test_revisions_that_cannot_be_made(hub, head):
    for is_there in (False, True):
        with pytest.raises(HubError, match=r"status 404 \((Invalid rev id: refs/pr/9|Repository not found)\)"):
            head.push_to_hub("user/head", revision="refs/pr/9")
        assert bool(hub.store.repositories) == is_there, "a repository was made for a pull request that is not there"
        HfApi().create_repo("user/head", exist_ok=True)


def test_passwords_of_the_endpoint_are_not_shown(hub, head, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint.replace("://", "://me:s3cret-passw0rd@"))
    with pytest.raises(HubError) as caught:
        head.push_to_hub("user/head")
    shown = "".join(traceback.format_exception(caught.value))
    assert "://***@127.0.0.1" in shown and "s3cret" not in shown


def test_hubs_that_cannot_be_reached(hub, head, monkeypatch):
    with HubServer() as gone:
        pass
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", gone.endpoint)
    with pytest.raises(HubError, match="no whole answer came .*refused.*see whether the Hub can be reached"):
        head.push_to_hub("user/head")


def test_what_has_arrived_is_not_sent_again(hub, head, shards):
    before = digests(shards)
    lost = before["model-00001-of-00004.safetensors"]
    hub.drop(method="PUT", path=lost, times=6)  # the client tries six times
    with pytest.raises(HubError, match="no whole answer came .*files that have arrived are not sent again"):
        push(shards, "user/head")
    assert hub.count("PUT", UPLOAD) == 3 and hub.count("PUT", lost, None) == 6
    assert not hub.files("user/head") and digests(shards) == before
    hub.log.clear()
    push(shards, "user/head")
    assert [entry.path for entry in hub.log if entry.method == "PUT"] == [f"/lfs/{lost}"]
    assert hub.count("POST", "/commit/") == 1
    assert equal(Eagle3DraftModel.from_pretrained("user/head"), head)


def test_an_answer_that_was_lost_after_the_commit(hub, head):
    hub.drop_answer(method="POST", path="/commit/")
    with pytest.raises(HubError, match="no whole answer"):
        head.push_to_hub("user/head")
    head.push_to_hub("user/head")
    assert len(HfApi().list_repo_commits("user/head")) == 2  # the initial one and ours


def test_downloads_go_on_where_they_broke_off(hub, head, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    head.push_to_hub("user/head")
    hub.drop_answer(method="GET", path="resolve/.*/model.safetensors")
    assert equal(Eagle3DraftModel.from_pretrained("user/head"), head)
    assert hub.count("GET", "model.safetensors", 206) == 1


def test_small_files_go_to_the_large_file_storage_too(hub, head):
    hub.lfs_threshold = 100
    head.push_to_hub("user/head")
    assert hub.count("PUT", UPLOAD) == 3
    assert all(file.lfs for file in HfApi().list_repo_tree("user/head"))
    assert equal(Eagle3DraftModel.from_pretrained("user/head"), head)


def test_large_files_in_parts(hub, head):
    hub.lfs_part_size = 10_000
    head.push_to_hub("user/head")
    size = len(hub.files("user/head")["model.safetensors"])
    assert hub.count("PUT", f"{UPLOAD}/") == -(-size // 10_000) and hub.count("POST", "/complete") == 1
    assert equal(Eagle3DraftModel.from_pretrained("user/head"), head)


def test_another_process_reads_the_hub_from_its_environment(hub, head):
    head.push_to_hub("user/head", private=True)
    program = (
        "import draftsmith, transformers; print(type(transformers.AutoModel.from_pretrained('user/head')).__name__)"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output.split()[-1] == "Eagle3DraftModel"

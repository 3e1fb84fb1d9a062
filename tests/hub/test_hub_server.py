"""The test Hub itself, as far as pushes and loads of heads do not show it."""

import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers.utils.hub import hf_api

from .hub_server import STRANGER_TOKEN


@pytest.fixture
def api(hub):
    """A client, and a repository with two commits."""
    api = HfApi()
    api.create_repo("user/files")
    commit(api, "first", CommitOperationAdd("a.txt", b"a"), CommitOperationAdd("sub/b.txt", b"b"))
    commit(api, "second", CommitOperationAdd("sub/c.bin", b"\0c"))
    return api


def commit(api, title, *operations, **options):
    return api.create_commit("user/files", operations, commit_message=title, **options)


def test_every_client_of_the_process_is_led_here(hub):
    assert HfApi().whoami()["name"] == hf_api().whoami()["name"] == "user"
    assert HfApi().whoami(token=STRANGER_TOKEN)["name"] == "stranger"
    assert hub.count("GET", "/api/whoami-v2") == 3


def test_commits_need_the_parent_that_they_name(api):
    first = api.list_repo_commits("user/files")[1].commit_id
    with pytest.raises(HfHubHTTPError, match="412"):
        commit(api, "late", CommitOperationAdd("d.txt", b"d"), parent_commit=first)
    commit(api, "in time", CommitOperationAdd("d.txt", b"d"), parent_commit=api.model_info("user/files").sha)
    titles = [entry.title for entry in api.list_repo_commits("user/files")]
    assert titles == ["in time", "second", "first", "initial commit"]


def test_trees_and_paths(api):
    assert {entry.path for entry in api.list_repo_tree("user/files")} == {"a.txt", "sub"}
    everything = {entry.path for entry in api.list_repo_tree("user/files", recursive=True)}
    assert everything == {"a.txt", "sub", "sub/b.txt", "sub/c.bin"}
    file, folder = api.get_paths_info("user/files", ["sub/c.bin", "sub", "none"])
    assert file.size == file.lfs.size == 2 and folder.path == "sub"
    with pytest.raises(RemoteEntryNotFoundError):
        list(api.list_repo_tree("user/files", "none"))


def test_deleted_files_and_folders(hub, api, tmp_path):
    commit(api, "third", CommitOperationDelete("a.txt"), CommitOperationDelete("sub/"), CommitOperationAdd("d", b"d"))
    assert hub.files("user/files") == {"d": b"d"}
    with pytest.raises(EntryNotFoundError):
        api.hf_hub_download("user/files", "a.txt")
    assert [path.name for path in tmp_path.joinpath(snapshot_download("user/files")).iterdir()] == ["d"]


def test_branches_and_tags(api):
    first = api.list_repo_commits("user/files")[1].commit_id
    api.create_branch("user/files", branch="old", revision=first)
    api.create_tag("user/files", tag="v1", revision="old")
    references = api.list_repo_refs("user/files")
    assert {ref.name: ref.target_commit for ref in [*references.branches, *references.tags]} == {
        "main": api.model_info("user/files").sha,
        "old": first,
        "v1": first,
    }
    assert "sub/c.bin" not in api.list_repo_files("user/files", revision="v1")
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_branch("user/files", branch="old")
    api.delete_tag("user/files", tag="v1")
    api.delete_branch("user/files", branch="old")
    with pytest.raises(RevisionNotFoundError):
        api.model_info("user/files", revision="v1")


def test_repositories_are_deleted_by_their_owner(api):
    with pytest.raises(HfHubHTTPError, match="403"):
        api.delete_repo("user/files", token=STRANGER_TOKEN)
    api.delete_repo("user/files")
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("user/files")

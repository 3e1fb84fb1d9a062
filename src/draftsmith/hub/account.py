"""Whose repository a name without a namespace means."""

from huggingface_hub import HfApi

from .upload import _explained, check_push


def full_name(repo_id: str, token: str | bool | None = None, *, again: str) -> str:
    """`repo_id` with its namespace, that of the token's account by default, as a push to it would have it.

    Raises:
        HubError: there is no token, or the Hub did not say whose it is; `again` is what to run then.
    """
    secret = check_push(repo_id, token)
    if "/" in repo_id:
        return repo_id
    with _explained(repo_id, secret, again):
        return f"{HfApi(token=secret, library_name='draftsmith').whoami()['name']}/{repo_id}"

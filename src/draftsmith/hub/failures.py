"""What the Hub's client raises, as one error that says what to do and gives no secret away."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from huggingface_hub.errors import HfHubHTTPError, HTTPError

from ..model_card.metadata import TOKEN, USER_INFO


LOG_IN = "log in with `hf auth login`, set `HF_TOKEN`, or pass `token`"
REMEDIES = {
    401: f"the token is not valid: {LOG_IN}",
    403: "the token may not write there: use one with write access, or {otherwise}",
    404: "the repository or the revision does not exist, or is private and not yours: check both names, and whose "
    "token it is",
    409: "something else is changing the repository: wait until it is done",
    412: "someone else has committed meanwhile: look at what has changed",
    413: "a file is too large: save the weights in smaller shards with `max_shard_size`",
    429: "these were too many requests: wait {wait}",
}
PROPOSE = "propose the head with `create_pr=True`"
HUB_FAILED = "the Hub itself has failed: wait a little"


class HubError(RuntimeError):
    """A push that the Hub did not take; says why and what to do, and never holds the token."""


@contextmanager
def explained(repo_id: str, token: str, again: str | None) -> Iterator[None]:
    """Failures of the Hub's client, whose types are many, as `HubError`.

    Args:
        again: what pushes after a failure; None = nothing is pushed yet.
    """
    try:
        yield
    except HubError:
        raise
    except Exception as error:
        _scrub(error, token)
        if again is None:
            reason = _reason(error, "name a repository of yours")
            raise HubError(f"`{repo_id}` can't be pushed to: {reason}.") from error
        raise HubError(
            f"The push to `{repo_id}` failed: {_reason(error, PROPOSE)}. Nothing local was changed. Then push again "
            f"with `{again}`; large files that have arrived are not sent again."
        ) from error


def _reason(error: Exception, otherwise: str) -> str:
    causes = [error, *_causes(error)]
    answer = next((cause for cause in causes if isinstance(cause, HfHubHTTPError)), None)
    if answer is None:
        lost = next((cause for cause in causes if isinstance(cause, HTTPError | ConnectionError)), None)
        is_lost = f"no whole answer came ({lost}): see whether the Hub can be reached"
        return f"{type(error).__name__}: {str(error).rstrip('.')}" if lost is None else is_lost
    status, wait = answer.response.status_code, answer.response.headers.get("Retry-After")
    remedy = REMEDIES.get(status, HUB_FAILED if status >= 500 else "the Hub does not take it: see what it says")
    said = f" ({answer.server_message})" if answer.server_message else ""
    remedy = remedy.format(wait=f"{wait} seconds" if wait else "some minutes", otherwise=otherwise)
    return f"status {status}{said}, {remedy}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    while error.__cause__ is not None:
        error = error.__cause__
        yield error


def without_secrets(value: Any, token: str) -> Any:
    """A text without the token, as it is or escaped, whatever looks like one, and the passwords of URLs."""
    if isinstance(value, BaseException):
        _scrub(value, token)
    if not isinstance(value, str):
        return value
    for form in (token, repr(token)[1:-1]):
        value = value.replace(form, "***")
    return USER_INFO.sub("***", TOKEN.sub("***", value))


def _scrub(error: BaseException | None, token: str) -> None:
    """Take secrets out of the messages and requests of an error and of those behind it."""
    if error is None:
        return
    error.args = tuple(without_secrets(arg, token) for arg in error.args)
    if isinstance(error, HfHubHTTPError):
        error.server_message = without_secrets(error.server_message, token)
        error.response.request.headers.pop("Authorization", None)
    elif isinstance(error, HTTPError):
        with suppress(RuntimeError):  # it has no request
            error.request.headers.pop("Authorization", None)
    _scrub(error.__cause__, token)
    if error.__context__ is not error.__cause__:
        _scrub(error.__context__, token)

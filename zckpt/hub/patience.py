"""Decides which failures of a hub are retried, after which wait, and makes the errors for all others.

For `client`. huggingface_hub's errors differ from version to version (requests, httpx, its own), so they are recognized by
what they carry: an answer with a status, or none. No token and no signed address leaves this module in a message.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

from zckpt.base.errors import AccessError, CorruptError, RemoteError, ZckptError, causes_of, redact

T = TypeVar("T")

DELAYS_S = (1, 2, 4, 8, 16, 32, 64)
"""Waits between tries, unless the server gives another."""

MOST_S = 900
"""Longest wait that a server may ask for; after an answer that asks for more, the call fails."""

RETRY = "Run the same command again to resume. Nothing was published."
"""The fix for a failure that may pass later."""

_PASSING = (408, 425, 429, 500, 502, 503, 504)
_TRANSPORT = {"TransportError", "ConnectionError", "Timeout", "TimeoutError", "ChunkedEncodingError"}
_CLOSED = "client has been closed"


class Passing(ConnectionError):
    """A failure after which the same call is tried again."""


def answer(error: BaseException) -> Any:
    """The server's answer in an error; None if it has none."""
    for cause in causes_of(error):
        response = getattr(cause, "response", None)
        if getattr(response, "status_code", None) is not None:
            return response
    return None


def status(error: BaseException) -> int:
    """The status of the answer in an error; 0 for none."""
    response = answer(error)
    return 0 if response is None else int(response.status_code)


def delay(error: BaseException, attempt: int) -> float | None:
    """The seconds to wait before the next try; None for an error that is not retried."""
    if isinstance(error, ZckptError):
        return None
    usual = float(DELAYS_S[min(attempt, len(DELAYS_S) - 1)])
    if isinstance(error, Passing):
        return usual
    code = status(error)
    if code in _PASSING:
        own = _own_delay(answer(error).headers)
        return usual if own is None else own if own <= MOST_S else None
    if code:
        return None
    return usual if _is_transport(error) or _CLOSED in str(error) else None


def _is_transport(error: BaseException) -> bool:
    """Whether a connection failed, by the names that HTTP libraries give such errors."""
    return bool({kind.__name__ for cause in causes_of(error) for kind in type(cause).__mro__} & _TRANSPORT)


def _own_delay(headers: Any) -> float | None:
    """Seconds that `Retry-After`, or the hub's `ratelimit: "api";r=0;t=55`, asks for; None for neither."""
    lower = {str(name).lower(): str(value) for name, value in headers.items()}
    after = lower.get("retry-after", "").strip()
    if after.isdecimal():
        return float(after)
    limit = re.search(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d+)", lower.get("ratelimit", ""))
    return float(limit[1]) if limit else None


def patiently(
    call: Callable[[], T], what: str, tell: Callable[[str], None], token: str = "", unanswered: int = len(DELAYS_S)
) -> T:
    """Calls until the call succeeds or fails for good.

    Args:
        call: called once for each try.
        what: what it does, for messages, such as "committing".
        tell: called with a sentence before each wait.
        token: is cut out of all messages.
        unanswered: how many more times it is called where nothing answers.

    Raises:
        AccessError: the hub does not let this token do it.
        CorruptError: the hub refused the bytes.
        RemoteError: any other failure.
    """
    attempt = 0
    while True:
        try:
            return call()
        except Exception as error:
            wait = delay(error, attempt)
            if wait is None or attempt >= (len(DELAYS_S) if status(error) else unanswered):
                raise failure(error, what, token) from error
            tell(f"{what}: {_short(error, token)}; trying again in {wait:g} s.")
            time.sleep(wait)
            attempt += 1


def failure(error: Exception, what: str, token: str = "") -> ZckptError:
    """The error to raise after the last try."""
    if isinstance(error, ZckptError):
        return error
    code, said = status(error), _short(error, token)
    if code in (401, 403):
        return AccessError(f"the hub does not allow {what}", found=said, remedy="Pass a --token that may do this.")
    if (
        any(isinstance(cause, RuntimeError) for cause in causes_of(error))
        and 400 <= code < 500
        and code not in _PASSING
    ):
        return CorruptError(
            f"the hub refused the bytes while {what}", found=said, expected="bytes with the hash that was announced",
            remedy="Check the disk and memory of this machine, and run the same command again. Nothing was published.",
        )  # fmt: skip
    if not code and _is_transport(error):
        return RemoteError(
            f"no connection to the hub while {what}", found=said,
            remedy=f"Check the network of this machine, its proxy (HTTPS_PROXY) and HF_ENDPOINT. {RETRY}",
        )  # fmt: skip
    return RemoteError(f"the hub failed while {what}", found=said, remedy=RETRY)


def _short(error: BaseException, token: str) -> str:
    """The message of a server or connection, as one line."""
    response = answer(error)
    if response is None:
        error = list(causes_of(error))[-1]
    words = " ".join(redact(str(error), token).split())
    if response is not None:
        own = getattr(error, "server_message", None)
        words = " ".join(redact(str(own), token).split()) if own else words
        return f"status {response.status_code} ({words[:300]})" if words else f"status {response.status_code}"
    return f"{type(error).__name__}: {words}"[:300]

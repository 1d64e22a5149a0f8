"""The calls of huggingface_hub that a push makes: the owner of a token, what a page holds, send a file, commit, read back.

For `transfer`, `pipeline` and `checks`. Works with huggingface_hub 0.36, 1.x and 2.x: differences are found by
looking at its functions, not at its version.

Which failures are tried again, after which wait, and the errors for all others: huggingface_hub's errors differ from version to
version (requests, httpx, its own), so they are recognized by what they carry: an answer with a status, or none. No token and no
signed address leaves this module in a message.
Sources: huggingface_hub 0.36.2, 1.8.0 and 2.4.0, hf_api.py, _commit_api.py, lfs.py.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from zckpt.base.errors import AccessError, CorruptError, RemoteError, UsageError, ZckptError, causes_of, redact
from zckpt.base.version import __version__
from zckpt.hub.target import Committed, Files, Page, PageTarget, SentFile, Watched
from zckpt.storage.fsspec_io import token_source

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd


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
    """Calls until the call succeeds or fails for good; where nothing answers, `unanswered` more times. `what` it does, such as
    "committing", is for messages, from which the token is cut out; `tell` gets a sentence before each wait. Raises AccessError if
    the hub does not let this token do it, CorruptError if it refused the bytes, RemoteError for any other failure.
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


_EXPIRED = (401, 403, 404, 410)
_PIECE_BYTES = 1 << 20


class Hub:
    """One hub, under one token. `token`: None for HF_TOKEN or the token that is logged in; `endpoint`: address of the hub, None
    for HF_ENDPOINT or huggingface.co; `tell`: called with a sentence when something takes long.
    """

    def __init__(self, token: str | None, endpoint: str | None, tell: Callable[[str], None]) -> None:
        import huggingface_hub
        from huggingface_hub import constants

        self.token: str = token or huggingface_hub.get_token() or ""
        self._token_from = "--token" if token else token_source()
        self.endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
        self.tell = tell
        self.api = huggingface_hub.HfApi(
            endpoint=self.endpoint, token=self.token or False, library_name="zckpt", library_version=__version__
        )
        self._xet: dict[str, bool] = {}
        self._asking = threading.Lock()

    def do(self, what: str, call: Callable[[], T], tell: Callable[[str], None] | None = None) -> T:
        """Calls as `patiently` does; `tell` instead of `self.tell` gets the sentences on waits."""
        return patiently(call, what, tell or self.tell, self.token)

    # ---- looking -----------------------------------------------------------------------------------------------------

    def who(self) -> dict[str, Any]:
        """The hub's answer to whoami: the token's owner, organisations and rights. Raises AccessError if there is no
        token, or the hub does not know it.
        """
        if not self.token:
            raise AccessError(
                "there is no token for the hub", found="no --token, no HF_TOKEN, and no token that is logged in",
                remedy="Run `hf auth login`, set HF_TOKEN, or pass --token.",
            )  # fmt: skip
        what = "asking who owns this token"
        try:
            return dict(patiently(lambda: self.api.whoami(token=self.token), what, self.tell, self.token, unanswered=2))
        except AccessError as error:
            raise AccessError(
                "the hub does not know this token", found=f"the token of {self._token_from}; {error.found}",
                remedy="It is wrong, has expired or was deleted. Make one at huggingface.co/settings/tokens, and set "
                "HF_TOKEN, run `hf auth login` or pass --token.",
            ) from error  # fmt: skip

    def may_write(self, repo_id: str) -> bool | None:
        """Whether the hub lets the token write to an existing repository; None if this huggingface_hub cannot ask."""
        if "write" not in inspect.signature(self.api.auth_check).parameters:
            return None
        try:
            self.do(f"asking for the rights in {repo_id}", lambda: self.api.auth_check(repo_id, write=True))
        except AccessError:
            return False
        return True

    def page(self, repo_id: str, revision: str) -> Page:
        """The contents of a repository at a revision."""
        from huggingface_hub.utils import RepositoryNotFoundError, RevisionNotFoundError

        def info(at: str | None) -> Any:
            try:
                return self.api.repo_info(repo_id, revision=at)
            except RevisionNotFoundError:
                return "no revision"
            except RepositoryNotFoundError:
                return None

        found = self.do(f"looking at {repo_id}", lambda: info(revision))
        if found is None:
            return Page(exists=False)
        if found == "no revision":
            found = self.do(f"looking at {repo_id}", lambda: info(None))
            return Page(exists=True, private=getattr(found, "private", None))
        return Page(True, str(found.sha), found.private, self.tree(repo_id, str(found.sha)))

    def tree(self, repo_id: str, revision: str) -> Files:
        """All files at a revision."""
        from huggingface_hub.hf_api import RepoFile

        listed = self.do(
            f"listing {repo_id}", lambda: list(self.api.list_repo_tree(repo_id, recursive=True, revision=revision))
        )
        files = [entry for entry in listed if isinstance(entry, RepoFile)]
        return {f.path: (f.size, f.lfs.sha256 if f.lfs else str(f.blob_id)) for f in files}

    def read(self, repo_id: str, path: str, revision: str, nbytes: int | None = None) -> bytes:
        """A file's bytes, or its first `nbytes` by a range request."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        url = hf_hub_url(repo_id, path, revision=revision, endpoint=self.endpoint)
        headers = {**build_hf_headers(token=self.token), "Accept-Encoding": "identity"}
        if nbytes is not None:
            headers["Range"] = f"bytes=0-{nbytes - 1}"

        def get() -> bytes:
            response = get_session().get(url, headers=headers)
            hf_raise_for_status(response)
            return bytes(response.content)

        return self.do(f"reading {path} back", get)

    # ---- sending -----------------------------------------------------------------------------------------------------

    def _batch(self, repo_id: str, blobs: Sequence[tuple[str, int]], transfers: list[str]) -> tuple[list[Any], str]:
        from huggingface_hub.lfs import UploadInfo, post_lfs_batch_info

        infos = [UploadInfo(sha256=bytes.fromhex(sha256), size=size, sample=b"") for sha256, size in blobs]
        answered = post_lfs_batch_info(
            upload_infos=infos, token=self.token, repo_type="model", repo_id=repo_id, endpoint=self.endpoint,
            transfers=transfers,
        )  # fmt: skip
        return list(answered[0]), str(answered[2]) if len(answered) > 2 else ""

    def present(
        self, repo_id: str, blobs: Sequence[tuple[str, int]], tell: Callable[[str], None] | None = None
    ) -> set[str]:
        """The SHA-256 of those large files, given as (SHA-256, size), that the repository's store already has."""
        found: set[str] = set()
        for start in range(0, len(blobs), 256):
            part = blobs[start : start + 256]
            ask = partial(self._batch, repo_id, part, ["basic", "multipart"])
            objects, _ = self.do("asking for files that are there already", ask, tell)
            found |= {str(entry["oid"]) for entry in objects if not entry.get("actions")}
        return found

    def speaks_xet(self, repo_id: str, sha256: str, size: int, tell: Callable[[str], None] | None = None) -> bool:
        """Whether the hub and this machine both speak Xet; asked once for a repository."""
        from huggingface_hub.utils._runtime import is_xet_available

        with self._asking:  # while the library looks for Xet on one thread, it finds none on the others
            if repo_id not in self._xet:

                def ask() -> str:
                    return self._batch(repo_id, [(sha256, size)], ["basic", "multipart", "xet"])[1]

                self._xet[repo_id] = (
                    is_xet_available() and self.do("asking for the kind of transfer", ask, tell) == "xet"
                )
            return self._xet[repo_id]

    def send(
        self, repo_id: str, revision: str, file: SentFile, path: str, watch: Callable[[int], None], *, create_pr: bool
    ) -> bool:
        """Sends one large file with the bytes of the local one at `path`, unless the hub has it; `create_pr`: for a pull request.
        `watch`: called with the number of bytes that were read; ends the transfer by raising. Returns whether any of it was sent.
        Raises CorruptError if the hub received bytes with another hash.
        """

        def tell(text: str) -> None:
            watch(0)  # raises where the push has ended: no wait, no message
            self.tell(text)

        xet, tries, went = self.speaks_xet(repo_id, file.sha256, file.size, tell), 0, False
        if xet:  # what it reads cannot be watched
            went = not self.present(repo_id, [(file.sha256, file.size)], tell)

        def attempt() -> None:
            nonlocal tries, went
            watch(0)
            tries += 1
            plain = not xet or tries > 2
            with contextlib.ExitStack() as stack:
                opened = stack.enter_context(Watched(path, watch)) if plain else None
                content = path if opened is None else opened
                operation = file.operation(content, uploaded=False)
                try:
                    self.api.preupload_lfs_files(repo_id, [operation], revision=revision, create_pr=create_pr)
                except RuntimeError as error:
                    passing = _passing(error, xet=not plain)
                    if passing is None:
                        raise
                    raise passing from error
                finally:
                    went = went or (opened is not None and opened.was_read)

        self.do(f"sending {file.path}", attempt, tell)
        return went

    def sort(self, repo_id: str, revision: str, operations: list[CommitOperationAdd], *, create_pr: bool) -> set[str]:
        """Sends those small files that the hub treats as large ones, and returns their paths."""
        self.do(
            "sending the small files",
            lambda: self.api.preupload_lfs_files(
                repo_id, operations, revision=revision, create_pr=create_pr, free_memory=False
            ),
        )
        return {op.path_in_repo for op in operations if getattr(op, "_upload_mode", None) == "lfs"}

    def commit(
        self,
        target: PageTarget,
        operations: Callable[[], Sequence[Any]],
        parent: str,
        made_already: Callable[[], Committed | None],
    ) -> Committed:
        """Makes one commit of everything, which must follow `parent`. `operations` makes them again for each try: a commit uses
        them up; `made_already` returns the commit if it was made and only the answer was lost. Raises MovedError if the revision
        is no longer at `parent`.
        """

        def attempt() -> Committed:
            try:
                info = self.api.create_commit(
                    target.repo_id, list(operations()), commit_message=target.message, revision=target.revision,
                    parent_commit=parent or None, create_pr=target.create_pr,
                )  # fmt: skip
            except Exception as error:
                code = status(error)
                if (code in (0, 409, 412) or code >= 500) and (found := made_already()) is not None:
                    return found
                if code in (409, 412):
                    raise MovedError(
                        "somebody else committed meanwhile", file=target.label, expected=f"commit {parent[:12]}",
                        remedy=RETRY,
                    ) from error  # fmt: skip
                raise
            return str(info.oid), str(info.pr_url or "")

        return self.do("committing", attempt)

    def pull_requests(self, repo_id: str) -> dict[int, str]:
        """Number -> title, of a repository's pull requests."""
        found = self.do("listing the pull requests", lambda: list(self.api.get_repo_discussions(repo_id)))
        return {int(d.num): str(d.title) for d in found if d.is_pull_request}


class MovedError(RemoteError):
    """The revision has received another commit since the push began."""

    code = "moved"


def _passing(error: RuntimeError, *, xet: bool) -> Passing | None:
    """The failure to retry after: an upload link that expired, or a failure of Xet. None for any other."""
    response = answer(error)
    if response is None:
        return Passing(f"Xet: {error}") if xet else None
    expired = response.status_code in _EXPIRED and response.request.method == "PUT"
    return Passing("an upload link expired") if expired else None


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keeps the library's progress bars and warnings, which show signed addresses, off the terminal."""
    from huggingface_hub import utils

    utils.tqdm.get_lock()  # made here, once: several threads that make it at the same time lose one

    logger = logging.getLogger("huggingface_hub")
    level, bars = logger.level, utils.are_progress_bars_disabled()
    logger.setLevel(logging.CRITICAL)
    if not bars:
        utils.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if not bars:
            utils.enable_progress_bars()


@contextlib.contextmanager
def in_large_pieces() -> Iterator[None]:
    """Lets the library's session read files that it sends a MiB at a time.

    httpx reads 64 KiB at a time, and what it does for each piece takes as long as reading and sending it. huggingface_hub 0.36
    has sessions of requests instead, which are left as they are.
    """
    from huggingface_hub.utils import get_session

    def enlarge(request: Any) -> None:
        if hasattr(request.stream, "CHUNK_SIZE"):
            request.stream.CHUNK_SIZE = _PIECE_BYTES

    hooks = getattr(get_session(), "event_hooks", {}).get("request", [])
    hooks.append(enlarge)
    try:
        yield
    finally:
        hooks.remove(enlarge)


def valid_name(repo_id: str) -> str:
    """The name of a repository, checked. Raises UsageError if no repository can have it."""
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
        if repo_id.count("/") > 1:
            raise ValueError("more than one '/'")
    except ValueError as error:
        raise UsageError(
            "no repository can have this name", file=repo_id, found=str(error).rstrip("."), expected="OWNER/NAME or NAME",
            remedy="Give the repository as OWNER/NAME.",
        ) from error  # fmt: skip
    return repo_id

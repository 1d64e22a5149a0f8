"""Lists and reads files at addresses (`s3://`, `gs://`, `hf://`, `memory://`) through fsspec.

For `location`, `engine.prefetch` and `uploads`. fsspec is imported when an address is first used. Only this module turns
exceptions of its backends into zckpt's errors.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, Union

from zckpt.base.errors import AccessError, NotACheckpointError, RemoteError, UsageError, ZckptError, causes_of, redact
from zckpt.base.patterns import compile_late
from zckpt.base.words import count
from zckpt.core.stores import FileStore
from zckpt.storage.object_store import ObjectStore, find_store

if TYPE_CHECKING:
    import mmap
    from concurrent.futures import Future, ThreadPoolExecutor

GAP_BYTES = 64 << 10
"""Ranges closer than this are fetched as one: a request costs about as much as these bytes."""

THREADS = 8
"""Small questions under way at a time, such as those for sizes."""

REQUESTS = 40
"""Requests for data under way at a time: a store gives each of them some MB a second, whatever the link can do."""

PIECE_BYTES = 2 << 20
"""A range that is more than a quarter longer is fetched in pieces of this size: all requests together are 80 MiB, and move as
much as 32 of 8 MiB do.
"""

_TRIES = 4
_BLOCK = 64 << 10
_MOST_BLOCKS = 64
"""How many blocks a `RemoteFile` keeps."""

_NAMING = (
    "ETag",
    "etag",
    "VersionId",
    "version_id",
    "blob_id",
    "xet_hash",
    "uploaded_at",
    "md5Hash",
    "LastModified",
    "last_modified",
    "mtime",
    "updated",
    "created",
)
"""The keys of fsspec's backends for facts that change when a file is written again."""

_UNREACHED = {
    "TransportError",
    "ConnectionError",
    "Timeout",
    "TimeoutError",
    "HTTPClientError",
    "ClientConnectionError",
}
"""Names of the exceptions that HTTP libraries raise if no answer came."""

Block = Union[bytes, "mmap.mmap"]
"""Bytes of a file; a slice of them is bytes."""

_FORBIDDEN = {
    "PermissionError",
    "PermissionDeniedError",
    "UnauthenticatedError",
    "RefreshError",
    "XetAuthenticationError",
}
"""Names of the exceptions that backends raise without permission."""

_REFUSED = compile_late(
    r"lacked the necessary privileges|lacked valid authentication|\b(Expired|Invalid)Token\b|^Forbidden:|, 401$"
)
"""What exceptions of other names say without permission: those of obstore's writer, of S3 for old keys, and of gcsfs."""

S = TypeVar("S")
T = TypeVar("T")


class Range(NamedTuple):
    """Bytes [start, stop) of a file."""

    address: str
    start: int
    stop: int


def filesystem(address: str) -> tuple[Any, str]:
    """The file system of an address, and the path in it: fsspec's, or `object_store`'s where that may be asked. Raises
    UsageError if fsspec or the backend is not installed, or there is no such kind of address.
    """
    if (found := find_store(address)) is not None:
        return found
    try:
        from fsspec.core import url_to_fs

        fs, path = url_to_fs(address, **_options(address))
    except ImportError as error:
        raise UsageError(
            "the package for this kind of address is missing", file=redact(address), found=str(error),
            expected="fsspec and its backend for this kind of address",
            remedy="Install fsspec and the backend for this kind of address (s3fs, gcsfs, ...).",
        ) from error  # fmt: skip
    except ValueError as error:
        raise UsageError(
            "the kind of address is unknown",
            file=redact(address),
            found=str(error),
            expected="a local path, or an address of a kind that fsspec knows",
            remedy="Use a local path, or an address of a kind that fsspec knows, such as s3://BUCKET/PATH.",
        ) from error
    return fs, str(path)


def _options(address: str) -> dict[str, Any]:
    """Options for the file system of an address, beside fsspec's own configuration: connections for all requests."""
    kind = address.partition("://")[0].lower()
    if kind not in ("s3", "s3a"):
        return {}
    from fsspec.config import conf

    return {"config_kwargs": {"max_pool_connections": 2 * REQUESTS, **conf.get("s3", {}).get("config_kwargs", {})}}


@contextlib.contextmanager
def as_zckpt_errors(address: str) -> Iterator[None]:
    """Turns exceptions of a backend into zckpt's errors. Raises NotACheckpointError if there is no such file,
    AccessError if it may not be read or written, RemoteError if the backend failed in another way.
    """
    try:
        yield
    except ZckptError:
        raise
    except Exception as error:  # backends have exceptions of their own
        is_missing = isinstance(error, FileNotFoundError)  # for the hub, also what it does not show
        if not is_missing and (refusal := _hub_refusal(error, address)) is not None:
            raise refusal from error
        kinds = {kind.__name__ for kind in type(error).__mro__}
        said = str(error) if {"GenericError", "OSError", "HttpError"} & kinds else ""
        if is_missing or "NoSuchBucket" in said or "HfUriError" in kinds:
            raise NotACheckpointError(
                "no such file or directory", file=redact(address), found=_line(error), expected="a file or directory here",
                remedy="Check the address.",
            ) from error  # fmt: skip
        if _FORBIDDEN & kinds or _REFUSED.search(said):
            raise AccessError(
                "the credentials do not allow this", file=redact(address), found=_line(error),
                expected="credentials that may read it, and write it if it is an output",
                remedy="Check the credentials that the backend finds in the environment.",
            ) from error  # fmt: skip
        if _UNREACHED & kinds or "error sending request" in said:
            raise RemoteError(
                "no connection to this address", file=redact(address), found=_line(error),
                remedy="Check the network of this machine, its proxy (HTTPS_PROXY) and the store's endpoint; then try again.",
            ) from error  # fmt: skip
        if "Credentials" in type(error).__name__:
            raise AccessError(
                "no credentials for this address", file=redact(address), found=_line(error),
                expected="credentials where the backend looks for them",
                remedy="Set the credentials that the backend needs, in the environment or in its own settings.",
            ) from error  # fmt: skip
        raise RemoteError(
            "the store failed", file=redact(address), found=_line(error), expected="an answer to the request",
            remedy="Run the same command again. If it fails again, check the address, the credentials and the store's service.",
        ) from error  # fmt: skip


def token_source() -> str:
    """The place where the hub's client has its token from."""
    import os

    return next((name for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") if os.environ.get(name)), "`hf auth login`")


def token_owner() -> str:
    """The owner of the token that the hub's client has, as the hub says it, with where the client has it from."""
    from huggingface_hub import HfApi, get_token

    if not (token := get_token()):
        return "no token"
    try:
        return f"the token of {token_source()}, of {HfApi().whoami(token=token)['name']}"
    except Exception:  # wrong, expired, or the hub does not say
        return f"the token of {token_source()}, which the hub does not know"


def is_page(address: str) -> bool:
    """Whether an address leads to a repository of the hub, where an output is a page; buckets of the hub are stores."""
    return address.lower().startswith("hf://") and not address.lower().startswith("hf://buckets/")


def is_hidden_at_hub(address: str) -> bool:
    """Whether an address leads to a repository of the hub that does not exist, or that the token may not see."""
    if not address.lower().startswith("hf://"):
        return False
    fs, path = filesystem(address)
    try:
        fs.resolve_path(path)
    except FileNotFoundError:
        return True
    except Exception:  # told where the address is read
        return False
    return False


def _hub_refusal(error: BaseException, address: str) -> AccessError | None:
    """The error for what the hub does not let a token read; None for any other failure."""
    answers = [getattr(cause, "response", None) for cause in causes_of(error)]
    status = next((code for one in answers if (code := getattr(one, "status_code", None)) is not None), 0)
    if status not in (401, 403) or not address.lower().startswith("hf://"):
        return None
    is_gated = any(kind.__name__ == "GatedRepoError" for kind in type(error).__mro__)
    page = "/".join(address[5:].split("/")[:2]).partition("@")[0]
    return AccessError(
        "the repository is gated: its owner lets in whom they choose" if is_gated else "the hub does not let this token read it",
        file=redact(address), found=f"status {status}, for {token_owner()}",
        remedy=f"Ask for access at https://huggingface.co/{page} with this account, then run the same command again."
        if is_gated
        else "Set HF_TOKEN to a token of an account that may read it, or run `hf auth login`. If it is public, unset HF_TOKEN.",
    )  # fmt: skip


def _line(error: BaseException) -> str:
    text = str(error).partition("\n\nDebug source")[0]  # obstore's
    return f"{type(error).__name__}: {redact(' '.join(text.split()))}"[:300]


def kind(address: str) -> str | None:
    """What exists at the address: "file" or "directory"; None for nothing."""
    fs, path = filesystem(address)
    try:
        return _listed_kind(address)
    except KeyError:
        pass
    try:
        with as_zckpt_errors(address):
            return str(fs.info(path)["type"])
    except NotACheckpointError:
        return None


_listings: dict[str, dict[str, str]] = {}
"""Directory -> what `entries` found in it since the last `refresh`: `kind` asks the store for nothing that follows from these."""

_UNLISTED = ("http://", "https://")
"""Servers that list what they like, and may have more."""


def _listed_kind(address: str) -> str | None:
    """As `kind`, from what was listed; raises KeyError where nothing follows from it."""
    if _listings.get(address.rstrip("/")):
        return "directory"
    above, _, name = address.rstrip("/").rpartition("/")
    inner = [name]
    while above not in _listings:
        above, _, name = above.rpartition("/")
        inner.append(name)
        if not name:  # the host is reached
            raise KeyError(address)
    if not {"", ".", ".."}.isdisjoint(inner) or "?" in address or address.lower().startswith(_UNLISTED):
        raise KeyError(address)
    found = _listings[above].get(inner[-1])
    if len(inner) > 1 and found == "directory":
        raise KeyError(address)
    return found if len(inner) == 1 else None


def refresh(address: str) -> None:
    """Drops what was listed before, here and in fsspec's cache."""
    _listings.clear()
    filesystem(address)[0].invalidate_cache()


def entries(address: str) -> dict[str, str]:
    """Name -> "file" or "directory", for all entries of a directory."""
    fs, path = filesystem(address)
    with as_zckpt_errors(address):
        found = fs.ls(path, detail=True)
    above = path.rstrip("/")
    names = {str(entry["name"]).rstrip("/").rpartition("/")[2]: str(entry["type"]) for entry in found
             if str(entry["name"]).rstrip("/").lstrip("/") != above.lstrip("/")}  # fmt: skip
    _listings[address.rstrip("/")] = listed = {name: kind for name, kind in names.items() if name}
    return dict(listed)


def walk(address: str) -> list[str]:
    """Paths of all files under a directory, relative to it."""
    fs, path = filesystem(address)
    with as_zckpt_errors(address):
        found = fs.find(path)
    above = path.strip("/") + "/"
    return sorted(str(name).lstrip("/").removeprefix(above) for name in found)


def status(address: str) -> FileStore:
    """A file as it is now, without fsspec's cache; its identity changes when it is written again."""
    found = _facts(address)
    return FileStore(address, int(found["size"]), (0, 1, _digest(found)), is_remote=True)


def statuses(addresses: Sequence[str]) -> dict[str, FileStore]:
    """Address -> `status`; several are asked for at a time."""
    return dict(zip(addresses, several(status, addresses), strict=True))


def _facts(address: str) -> dict[str, Any]:
    fs, path = filesystem(address)
    with as_zckpt_errors(address):
        fs.invalidate_cache(path)
        return dict(fs.info(path))


def _digest(found: dict[str, Any]) -> int:
    import hashlib  # which is slow to import, and only wanted of addresses

    text = repr([found.get(name) for name in _NAMING] + [found["size"]])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def mark(address: str) -> str:
    """A text that changes when a file is written again; "" if the store knows only its size. Raises NotACheckpointError
    if there is no such file.
    """
    found = _facts(address)
    return f"{_digest(found):014x}" if any(found.get(name) for name in _NAMING) else ""


def read(address: str, offset: int, nbytes: int) -> bytes:
    """At most `nbytes` bytes from `offset` on."""
    fs, path = filesystem(address)
    return bytes(patiently(address, lambda: _one(fs, path, offset, offset + nbytes))) if nbytes > 0 else b""


class Fetch:
    """Ranges of one or more files that are being read: near ranges together, long ones in pieces, `REQUESTS` pieces at a time.

    A piece that fails is asked for again by itself. Who begins first is served first.

    Args:
        ranges: of files.
        waits: whether nobody does anything else meanwhile; a single request is then made by who asks for the result.
    """

    def __init__(self, ranges: Sequence[Range], *, waits: bool = False) -> None:
        order = sorted(range(len(ranges)), key=lambda number: ranges[number])
        merged: list[Range] = []
        self._block_of: dict[int, int] = {}
        for number in order:
            wanted = ranges[number]
            if merged and merged[-1].address == wanted.address and wanted.start - merged[-1].stop <= GAP_BYTES:
                merged[-1] = merged[-1]._replace(stop=max(merged[-1].stop, wanted.stop))
            else:
                merged.append(wanted)
            self._block_of[number] = len(merged) - 1
        self._ranges, self._merged = list(ranges), merged
        self._blocks: list[Block] = [b""] * len(merged)
        self.nbytes = sum(whole.stop - whole.start for whole in merged)
        self._own = pieces = [piece for number in range(len(merged)) for piece in self._cut(number)]
        self._asked: list[Future[None]] = []
        if not (waits and len(pieces) == 1):
            self._asked = [requests().submit(self._take, *piece) for piece in pieces]

    def _cut(self, number: int) -> Iterator[tuple[int, int, int]]:
        """A range in pieces of about the same size, with memory for them."""
        whole = self._merged[number]
        nbytes = whole.stop - whole.start
        parts = max(1, -((PIECE_BYTES // 4 - nbytes) // PIECE_BYTES))
        if parts > 1:
            import mmap  # memory that the system gets back at once

            self._blocks[number] = mmap.mmap(-1, nbytes)
        edges = [whole.start + nbytes * at // parts for at in range(parts + 1)]
        return ((number, *edge) for edge in itertools.pairwise(edges))

    def _take(self, number: int, start: int, stop: int) -> None:
        """Fetches a piece; it goes to its place as soon as it is there, so none is in memory twice."""
        whole, block = self._merged[number], self._blocks[number]
        data = _whole(whole._replace(start=start, stop=stop))
        if isinstance(block, bytes):
            self._blocks[number] = bytes(data)
        else:
            memoryview(block)[start - whole.start : stop - whole.start] = data

    def result(self) -> list[tuple[Block, int]]:
        """For each range, a block of bytes that contains it, and the byte of the file where the block begins; they share blocks.

        Raises:
            RemoteError: the store failed, or sent fewer bytes than the range has, in each of several attempts.
        """
        try:
            if not self._asked:
                for piece in self._own:
                    self._take(*piece)
            for one in self._asked:
                one.result()
        finally:
            self.cancel()
        places = [self._block_of[number] for number in range(len(self._ranges))]
        return [(self._blocks[place], self._merged[place].start) for place in places]

    def cancel(self) -> None:
        """Cancels all requests that have not begun."""
        for one in self._asked:
            one.cancel()


def fetch(ranges: Sequence[Range]) -> list[tuple[Block, int]]:
    """Reads ranges of one or more files, as `Fetch.result`."""
    return Fetch(ranges, waits=True).result()


_pools: list[ThreadPoolExecutor] = []


def requests() -> ThreadPoolExecutor:
    """The threads of all requests for data. After a fork, the child begins with none."""
    if not _pools:
        from concurrent.futures import ThreadPoolExecutor  # which is slow to import, and only wanted of addresses

        _pools.append(ThreadPoolExecutor(REQUESTS, "zckpt-request"))
    return _pools[0]


os.register_at_fork(after_in_child=_pools.clear)


def several(ask: Callable[[S], T], questions: Sequence[S]) -> list[T]:
    """What `ask` answers to each question; several requests are under way at a time."""
    if len(questions) < 2:
        return [ask(question) for question in questions]
    from concurrent.futures import ThreadPoolExecutor  # which is slow to import, and only wanted of addresses

    with ThreadPoolExecutor(min(THREADS, len(questions))) as pool:
        return list(pool.map(ask, questions))


def _whole(wanted: Range) -> bytes | memoryview:
    fs, path = filesystem(wanted.address)

    def attempt() -> bytes | memoryview:
        data = _one(fs, path, wanted.start, wanted.stop)
        if len(data) != wanted.stop - wanted.start:
            raise RemoteError(
                "the server sent an answer of the wrong length", file=redact(wanted.address), found=count(len(data), 'byte'),
                expected=f"{count(wanted.stop - wanted.start, 'byte')} from byte {wanted.start:,} on",
                remedy="Run the same command again.",
            )  # fmt: skip
        return data

    return patiently(wanted.address, attempt)


def _one(fs: Any, path: str, start: int, stop: int) -> bytes | memoryview:
    """Reads one range in one request, without reading ahead."""
    if isinstance(fs, ObjectStore):
        return fs.read_range(path, start, stop)
    if getattr(fs, "async_impl", False):
        return bytes(fs.cat_file(path, start=start, end=stop))
    with fs.open(path, "rb", cache_type="none") as file:
        file.seek(start)
        return bytes(file.read(stop - start))


def patiently(address: str, attempt: Callable[[], T]) -> T:
    """Calls `attempt`, which may be done twice, and tries again after a `RemoteError`, with growing pauses. Raises
    RemoteError if every attempt failed.
    """
    for number in range(_TRIES):
        try:
            with as_zckpt_errors(address):
                return attempt()
        except RemoteError:
            if number == _TRIES - 1:
                raise
            time.sleep(0.25 * 4**number)
    raise AssertionError("not reached")


class RemoteFile(contextlib.AbstractContextManager["RemoteFile"]):
    """One file open for reading. Keeps a few blocks, so that reading a header takes one request instead of ten."""

    def __init__(self, address: str, size: int, identity: tuple[int, int, int] = (0, 0, 0)) -> None:
        self.size = size
        self.identity = identity
        self._address = address
        self._blocks: dict[int, bytes] = {}

    @classmethod
    def opened(cls, address: str) -> RemoteFile:
        """A file as it is now. Raises as `status`."""
        found = status(address)
        return cls(address, found.size, found.identity)

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, offset: int, nbytes: int) -> bytes:
        """At most `nbytes` bytes from `offset` on; fewer only at the end of the file."""
        stop = min(offset + nbytes, self.size)
        if offset >= stop:
            return b""
        first, last = offset // _BLOCK, (stop - 1) // _BLOCK
        if last - first > 16:
            return bytes(fetch([Range(self._address, offset, stop)])[0][0])
        wanted = range(first, last + 1)
        missing = [number for number in wanted if number not in self._blocks]
        if missing:
            low = missing[0] * _BLOCK
            data, _ = fetch([Range(self._address, low, min((missing[-1] + 1) * _BLOCK, self.size))])[0]
            if len(self._blocks) > _MOST_BLOCKS:
                self._blocks = {number: self._blocks[number] for number in wanted if number in self._blocks}
            for number in range(missing[0], missing[-1] + 1):
                self._blocks[number] = data[number * _BLOCK - low : (number + 1) * _BLOCK - low]
        start = first * _BLOCK
        whole = b"".join(self._blocks[number] for number in wanted)
        return whole[offset - start : stop - start]

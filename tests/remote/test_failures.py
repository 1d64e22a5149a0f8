"""A store that fails while files are read and written, by either client of S3: what is tried again, and what is left."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from addresses import FIXTURES, SMALL, put
from s3_server import S3Server

import zckpt
from zckpt.base.errors import AccessError, NotACheckpointError, RemoteError
from zckpt.storage import fsspec_io, uploads
from zckpt.storage.uploads import Upload

PART = uploads.LEAST_PART_BYTES


@pytest.fixture(autouse=True)
def by_each_client_without_pauses(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec_io.time, "sleep", lambda seconds: None)


class First:
    """Says so of the first requests of a kind.

    Args:
        most: how many.
        found: what is said of them.
        is_meant: whether a request is of the kind.
    """

    def __init__(self, most: int, found: bool | str, is_meant: Callable[[str, str, str], bool]) -> None:
        self.asked, self._most, self._found, self._is_meant = 0, most, found, is_meant
        self._lock = threading.Lock()

    def __call__(self, method: str, path: str, query: str) -> bool | str:
        if not self._is_meant(method, path, query):
            return False
        with self._lock:
            self.asked += 1
            return self.asked <= self._most and self._found


def is_range(method: str, path: str, query: str) -> bool:
    return method == "GET" and path == "/bkt/f"


def is_part(method: str, path: str, query: str) -> bool:
    return method == "PUT" and "partNumber=2" in query


def send(data: bytes) -> None:
    with Upload("s3://bkt/big", len(data)) as upload:
        for at in range(0, len(data), 4 << 20):
            upload.write(memoryview(data)[at : at + (4 << 20)])


@pytest.mark.parametrize("status", ["500 InternalError", "503 SlowDown", "429 TooManyRequests"])
def test_a_range_that_the_store_puts_off(status: str, s3: S3Server) -> None:
    data = os.urandom(100_000)
    fsspec.filesystem("s3").pipe_file("bkt/f", data)
    s3.failing = first = First(3, status, is_range)
    assert fsspec_io.read("s3://bkt/f", 10, 50_000) == data[10:50_010]
    assert first.asked == 4


def test_a_connection_that_ends_within_a_range(s3: S3Server) -> None:
    data = os.urandom(3_000_000)
    fsspec.filesystem("s3").pipe_file("bkt/f", data)
    s3.cutting = first = First(2, True, is_range)
    wanted = fsspec_io.Range("s3://bkt/f", 5, 2_999_000)
    block, at = fsspec_io.fetch([wanted])[0]
    assert block[wanted.start - at : wanted.stop - at] == data[5:2_999_000]
    assert first.asked >= 3


@pytest.mark.parametrize("status", ["500 InternalError", "503 SlowDown", "429 TooManyRequests", "cut"])
def test_a_part_that_fails_twice(status: str, s3: S3Server) -> None:
    data = os.urandom(2 * PART + 5)
    first = First(2, True if status == "cut" else status, is_part)
    if status == "cut":
        s3.cutting = first
    else:
        s3.failing = first
    send(data)
    assert first.asked == 3
    assert s3.files("bkt")["big"] == data


@pytest.mark.parametrize("status", ["403 AccessDenied", "403 InvalidAccessKeyId", "400 ExpiredToken"])
def test_credentials_that_the_store_refuses_are_not_tried_again(status: str, s3: S3Server) -> None:
    fsspec.filesystem("s3").pipe_file("bkt/f", b"1" * 100)
    s3.failing = first = First(99, status, is_range)
    with pytest.raises(AccessError, match="credentials"):
        fsspec_io.read("s3://bkt/f", 0, 100)
    assert first.asked == 1
    s3.failing = first = First(99, status, lambda method, path, query: method in ("PUT", "POST"))
    with pytest.raises(AccessError, match="credentials"):
        uploads.upload_small("s3://bkt/g", b"1")
    with pytest.raises(AccessError, match="credentials"):
        send(os.urandom(2 * PART + 5))
    assert first.asked == 2
    assert s3.files("bkt").keys() == {"f"}


def test_a_bucket_that_does_not_exist(tmp_path: Path) -> None:
    for data in (b"1", os.urandom(PART + 5)):
        with pytest.raises(NotACheckpointError, match="no such file"):
            uploads.upload_small("s3://no-such-bucket/g", data)


def test_a_part_that_may_not_be_sent(s3: S3Server) -> None:
    s3.failing = first = First(99, "403 AccessDenied", is_part)
    with pytest.raises(AccessError, match="credentials"):
        send(os.urandom(3 * PART))
    assert first.asked == 1 and s3.files("bkt") == {}


@pytest.mark.parametrize("how", ["cut", "500 InternalError"])
def test_a_server_that_stops_half_way(
    how: str, once: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing incomplete appears, and the same command completes the output when the server is back."""
    address, out = put(FIXTURES / SMALL / "checkpoint", "s3://bkt/ckpt"), "s3://bkt/out"
    zckpt.convert(address, tmp_path / "want", max_shard_size="800")
    stopped, lock, sent = threading.Event(), threading.Lock(), 0

    def is_down(method: str, path: str, query: str) -> bool:
        nonlocal sent
        with lock:
            sent += method == "PUT" and path.startswith("/bkt/out/model")
            if sent == 2:
                stopped.set()
        return stopped.is_set()

    if how == "cut":
        once.cutting = is_down
    else:
        once.failing = is_down
    with pytest.raises(RemoteError) as caught:
        zckpt.convert(address, out, max_shard_size="800")
    assert stopped.is_set() and caught.value.file.startswith("s3://bkt/out")
    there = {name.removeprefix("out/") for name in once.files("bkt") if name.startswith("out/")}
    want = {path.name: path.read_bytes() for path in (tmp_path / "want").iterdir()}
    assert not {"model.safetensors.index.json", "zckpt.json", "config.json"} & there
    assert all(once.files("bkt")[f"out/{name}"] == want[name] for name in there & want.keys())
    once.failing = once.cutting = lambda method, path, query: False
    zckpt.convert(address, out, max_shard_size="800")
    found = {name[4:]: data for name, data in once.files("bkt").items() if name.startswith("out/")}
    assert {name: found[name] for name in want if name != "zckpt.json"} == {
        name: data for name, data in want.items() if name != "zckpt.json"
    }

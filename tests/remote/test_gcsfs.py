"""Google's buckets by gcsfs, which is asked where obstore has no keys: ranges, uploads in chunks, what fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from addresses import FIXTURES, SMALL, local_tree
from google_server import GoogleServer

import zckpt
from zckpt.base.errors import AccessError, NotACheckpointError, RemoteError
from zckpt.storage import fsspec_io, object_store, uploads
from zckpt.storage.uploads import Upload

_KINDS = "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"
os.environ[_KINDS] = "false"  # otherwise Google itself is asked which kind a bucket is
try:
    gcsfs = pytest.importorskip("gcsfs")
finally:
    del os.environ[_KINDS]
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleServer]:
    with GoogleServer() as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        monkeypatch.setenv("FSSPEC_GS_TOKEN", "anon")
        monkeypatch.setattr(fsspec_io.time, "sleep", lambda seconds: None)
        monkeypatch.setattr("gcsfs.retry.random.random", lambda: -0.99)
        gcsfs.GCSFileSystem.clear_instance_cache()
        assert object_store.find_store("gs://bkt/f") is None
        yield server
        gcsfs.GCSFileSystem.clear_instance_cache()


def send(data: bytes) -> None:
    with Upload("gs://bkt/big", len(data)) as upload:
        for at in range(0, len(data), 4 << 20):
            upload.write(memoryview(data)[at : at + (4 << 20)])


def test_there_and_back(google: GoogleServer, tmp_path: Path) -> None:
    checkpoint = FIXTURES / SMALL / "checkpoint"
    zckpt.convert(checkpoint, tmp_path / "want", max_shard_size="800")
    zckpt.convert(checkpoint, "gs://bkt/out", max_shard_size="800")
    want = {name: data for name, data in local_tree(tmp_path / "want").items() if name != "zckpt.json"}
    assert {name: google.files[f"out/{name}"] for name in want} == want
    assert zckpt.convert(checkpoint, "gs://bkt/out", max_shard_size="800").already_done
    zckpt.convert("gs://bkt/out", tmp_path / "again", max_shard_size="800")
    again = local_tree(tmp_path / "again")
    assert {name: again[name] for name in want} == want


@pytest.mark.parametrize("status", [429, 503])
def test_what_is_put_off_is_asked_for_again(google: GoogleServer, status: int) -> None:
    data, left = os.urandom(40 << 20), {"GET": 1, "POST": 2}

    def failing(method: str, path: str, query: str) -> int:
        if not ((method == "GET" and path.startswith("/download")) or "upload_id" in query) or not left[method]:
            return 0
        left[method] -= 1
        return status

    google.failing = failing
    send(data)
    assert google.files["big"] == data and google.sessions == {} and left["POST"] == 0
    assert fsspec_io.read("gs://bkt/big", 5_000_000, 3_000_000) == data[5_000_000:8_000_000] and left["GET"] == 0


def test_an_upload_that_is_given_up_leaves_nothing(google: GoogleServer) -> None:
    with pytest.raises(KeyError), Upload("gs://bkt/big", 40 << 20) as upload:
        for _ in range(10):
            upload.write(os.urandom(4 << 20))
        raise KeyError
    assert google.files == {} and google.sessions == {}


@pytest.mark.parametrize("status", [401, 403])
def test_credentials_that_are_refused(google: GoogleServer, status: int) -> None:
    google.files["f"] = b"1" * 100
    asked: list[str] = []

    def failing(method: str, path: str, query: str) -> int:
        asked.append(path)
        return status

    google.failing = failing
    for ask in (lambda: fsspec_io.read("gs://bkt/f", 0, 10), lambda: uploads.upload_small("gs://bkt/g", b"1")):
        asked.clear()
        with pytest.raises(AccessError, match="credentials"):
            ask()
        assert len(asked) == 1


def test_what_is_missing(google: GoogleServer) -> None:
    for address in ("gs://bkt/none", "gs://no-such-bucket/f"):
        with pytest.raises(NotACheckpointError, match="no such file"):
            fsspec_io.status(address)
    google.failing = lambda method, path, query: 400
    with pytest.raises(RemoteError):
        fsspec_io.status("gs://bkt/none")

"""Google's buckets, through obstore where it has keys. The server speaks S3, which Google's XML interface is like."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from addresses import FIXTURES, SMALL, local_tree
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from s3_server import PartsAtOnce, S3Server

import zckpt
from zckpt.base.errors import AccessError, NotACheckpointError
from zckpt.storage import fsspec_io, object_store, uploads
from zckpt.storage.uploads import Upload

pytest.importorskip("obstore")


@pytest.fixture
def google(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    monkeypatch.setenv("GOOGLE_BASE_URL", s3.url)
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "token")
    monkeypatch.setattr(fsspec_io.time, "sleep", lambda seconds: None)
    return s3


def test_there_and_back(google: S3Server, tmp_path: Path) -> None:
    checkpoint = FIXTURES / SMALL / "checkpoint"
    zckpt.convert(checkpoint, tmp_path / "want", max_shard_size="800")
    zckpt.convert(checkpoint, "gs://bkt/out", max_shard_size="800")
    want = {name: data for name, data in local_tree(tmp_path / "want").items() if name != "zckpt.json"}
    found = {name.removeprefix("out/"): data for name, data in google.files("bkt").items()}
    assert {name: found[name] for name in want} == want
    assert zckpt.convert(checkpoint, "gcs://bkt/out", max_shard_size="800").already_done
    zckpt.convert("gcs://bkt/out", tmp_path / "again", max_shard_size="800")
    again = local_tree(tmp_path / "again")
    assert {name: again[name] for name in want} == want
    assert fsspec_io.kind("gs://bkt/out") == "directory" and fsspec_io.kind("gs://bkt/none") is None


def test_parts_are_sent_side_by_side(google: S3Server) -> None:
    data = os.urandom(22 << 20)
    google.failing = slow = PartsAtOnce()
    with Upload("gs://bkt/big", len(data)) as upload:
        for at in range(0, len(data), 4 << 20):
            upload.write(memoryview(data)[at : at + (4 << 20)])
    assert google.files("bkt")["big"] == data
    assert slow.most >= 3 and slow.asked == 6


def test_what_is_refused_or_missing(google: S3Server) -> None:
    uploads.upload_small("gs://bkt/f", b"1" * 100)
    google.failing = lambda method, path, query: method == "GET" and "401 Unauthorized"
    with pytest.raises(AccessError):
        fsspec_io.read("gs://bkt/f", 0, 10)
    google.failing = lambda method, path, query: False
    for address in ("gs://bkt/none", "gs://no-such-bucket/f"):
        with pytest.raises(NotACheckpointError, match="no such file"):
            fsspec_io.status(address)


@pytest.mark.parametrize("name", ["FSSPEC_GCS_TOKEN", "GCSFS_DEFAULT_PROJECT", "STORAGE_EMULATOR_HOST"])
def test_what_only_gcsfs_knows_is_left_to_it(google: S3Server, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert object_store.find_store("gs://bkt/f") is not None
    monkeypatch.setenv(name, "x")
    assert object_store.find_store("gs://bkt/f") is None
    assert object_store.find_store("s3://bkt/f") is not None


@pytest.fixture
def tokens() -> Iterator[tuple[str, list[str]]]:
    """A server that gives tokens, and the bodies of its requests."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            answer = json.dumps(
                {"access_token": f"token-{len(asked)}", "expires_in": 3600, "token_type": "Bearer"}
            ).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", asked
    server.shutdown()
    server.server_close()


def test_the_keys_that_googles_own_client_finds(
    google: S3Server, tokens: tuple[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("google.auth")
    url, asked = tokens
    key = rsa.generate_private_key(65537, 2048)
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    known = {"type": "service_account", "client_email": "a@b", "project_id": "p", "private_key_id": "1", "token_uri": url,
             "private_key": key.private_bytes(*form).decode()}  # fmt: skip
    (tmp_path / "keys.json").write_text(json.dumps(known))
    monkeypatch.delenv("GOOGLE_BEARER_TOKEN")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "keys.json"))
    assert object_store.find_store("gs://bkt/f") is not None
    uploads.upload_small("gs://bkt/f", b"123")
    assert fsspec_io.read("gs://bkt/f", 1, 2) == b"23"
    assert len(asked) == 1 and "assertion=" in asked[0]

"""A real S3 server for the tests here, empty before each, and fsspec's memory, empty after each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pytest
from address_requests import Requests
from addresses import ROOTS
from fsspec.implementations.memory import MemoryFileSystem
from s3_server import KEYS, S3Server

from zckpt.storage import fsspec_io, object_store


@pytest.fixture(scope="package")
def server() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


@pytest.fixture(autouse=True)
def s3(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    for name, value in {"AWS_ENDPOINT_URL": server.url, **KEYS}.items():
        monkeypatch.setenv(name, value)
    fs = fsspec.filesystem("s3")
    fs.invalidate_cache()
    if fs.exists("bkt"):
        fs.rm("bkt", recursive=True)
    fs.mkdir("bkt")
    yield server
    server.failing = server.losing = server.cutting = lambda method, path, query: False
    memory = fsspec.filesystem("memory")
    if memory.exists("/m"):
        memory.rm("/m", recursive=True)


@pytest.fixture(params=["obstore", "s3fs"])
def client(request: pytest.FixtureRequest, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """By which S3 is asked."""
    if request.param == "obstore":
        pytest.importorskip("obstore")
        assert object_store.find_store("s3://bkt/f") is not None
    else:
        monkeypatch.setattr(fsspec_io, "find_store", lambda address: None)
    return request.param


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """zckpt tries nothing a second time."""
    monkeypatch.setattr(fsspec_io, "_TRIES", 1)


@pytest.fixture
def once(s3: S3Server, impatient: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server where nobody tries nothing a second time."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr("s3fs.core.S3FileSystem.retries", 1)
    fsspec.filesystem("s3").clear_instance_cache()
    yield s3
    s3.failing = s3.losing = lambda method, path, query: False
    fsspec.filesystem("s3").clear_instance_cache()


@pytest.fixture(params=ROOTS)
def root(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    asked = Requests()
    for name in ("info", "ls", "find", "pipe_file", "rm_file", "cat_file", "_open"):
        real = getattr(MemoryFileSystem, name)

        def call(self: Any, *args: Any, real: Callable[..., Any] = real, **more: Any) -> Any:
            if asked.mode == "inside":
                return real(self, *args, **more)
            mode = asked.mode

            def whole() -> Any:
                asked.mode = "inside"  # what fsspec makes of one request is not another one
                try:
                    return real(self, *args, **more)
                finally:
                    asked.mode = mode

            return asked(whole)

        monkeypatch.setattr(MemoryFileSystem, name, call)
    return asked

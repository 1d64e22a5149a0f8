"""A real S3 server on loopback (moto's), which counts what it sends and can be made to fail.

    python s3_server.py HOST DIRECTORY

serves the files of a directory at an address of this machine, as the bucket `bkt`; prints its URL.
"""

from __future__ import annotations

import contextlib
import io
import re
import socketserver
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import fsspec
from moto.backends import get_backend
from moto.moto_api._internal import mock_random  # noqa: F401  # loads moto's backends before threads use them
from moto.server import create_backend_app

KEYS = {
    "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": "/nonexistent", "AWS_EC2_METADATA_DISABLED": "true",
}  # fmt: skip
"""What clients need in their environment beside `AWS_ENDPOINT_URL`; nothing of this machine's own is asked."""


_FAILED = "500 Internal Server Error"


class PartsAtOnce:
    """For `S3Server.failing`: each part of an upload takes a while, and the second one fails.

    Attributes:
        most: the most parts that were sent at a time.
        asked: how often a part was sent.
    """

    def __init__(self) -> None:
        self.most = self.asked = self._under_way = 0
        self._lock = threading.Lock()

    def __call__(self, method: str, path: str, query: str) -> bool:
        if method != "PUT" or "partNumber" not in query:
            return False
        with self._lock:
            self._under_way, self.asked = self._under_way + 1, self.asked + 1
            self.most = max(self.most, self._under_way)
            fails = self.asked == 2
        threading.Event().wait(0.3)  # `time.sleep` is another function in some tests
        with self._lock:
            self._under_way -= 1
        return fails


class S3Server:
    """Use as a context manager.

    Args:
        host: the address of this machine where it answers.

    Attributes:
        requests: (method, path, query, Range header) of every request so far.
        sent: bytes of all answers to GET so far.
        failing: is asked of each request whether to answer 500 instead, or which other status, which it may name.
        losing: is asked of each request whether to answer 500 after it was carried out.
        cutting: is asked of each request whether to close the connection after half of the answer.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.requests: list[tuple[str, str, str, str]] = []
        self.sent = 0
        self.failing: Callable[[str, str, str], bool | str] = lambda method, path, query: False
        self.losing: Callable[[str, str, str], bool] = lambda method, path, query: False
        self.cutting: Callable[[str, str, str], bool] = lambda method, path, query: False
        self._app = create_backend_app("s3")  # moto's choice of a service lists its folder for each request
        self._taken: dict[str, bytes] = {}
        self._server = _Server((host, 0), _Connection)
        self._server.app = self._answer
        self._server.cuts = lambda *asked: self.cutting(*asked)
        self.url = f"http://{host}:{self._server.server_address[1]}"

    def __enter__(self) -> S3Server:
        _forget()
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def take(self, directory: Path) -> None:
        """Makes the bucket `bkt` of the files of a directory, without a request; what is read of them costs moto no work."""
        self._backend.create_bucket("bkt", "us-east-1")
        for file in directory.rglob("*"):
            if file.is_file():
                name, data = file.relative_to(directory).as_posix(), file.read_bytes()
                key = self._backend.put_object("bkt", name, b"")
                key.contentsize = len(data)
                self._taken[f"/bkt/{name}"] = data

    def __exit__(self, *_: object) -> None:
        _forget()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def files(self, bucket: str) -> dict[str, bytes]:
        """Name -> bytes of all that is in a bucket, without a request."""
        return {name: key.value for name, key in self._bucket(bucket).keys.items()}

    def restore(self, bucket: str, files: dict[str, bytes]) -> None:
        """Makes a bucket hold these files, and no unfinished upload, without a request."""
        store = self._bucket(bucket)
        for name, key in list(store.keys.items()):
            if name not in files or key.value != files[name]:
                store.keys.pop(name)
        for name in set(files) - set(store.keys):
            self._backend.put_object(bucket, name, files[name])
        for upload in list(store.multiparts):
            del store.multiparts[upload]

    @property
    def _backend(self) -> Any:
        return get_backend("s3")["123456789012"]["aws"]

    def _bucket(self, name: str) -> Any:
        return self._backend.buckets[name]

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        method, path, query = (environ[key] for key in ("REQUEST_METHOD", "PATH_INFO", "QUERY_STRING"))
        self.requests.append((method, path, query, environ.get("HTTP_RANGE", "")))
        if status := self.failing(method, path, query):
            return self._failed(start_response, status if isinstance(status, str) else _FAILED)
        if self.losing(method, path, query):
            list(self._app(environ, lambda *answer: None))
            return self._failed(start_response)
        parts = list(self._part(path, environ, start_response) or self._app(environ, start_response))
        if method == "GET":
            self.sent += sum(map(len, parts))
        return parts

    def _part(self, path: str, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        """A part of a file that was taken; nothing for other requests."""
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", environ.get("HTTP_RANGE", ""))
        if path not in self._taken or environ["REQUEST_METHOD"] != "GET" or found is None:
            return []
        begin, end, whole = int(found[1]), int(found[2]) + 1, self._taken[path]
        part = whole[begin:end]
        place = f"bytes {begin}-{begin + len(part) - 1}/{len(whole)}"
        start_response("206 Partial Content", [("Content-Range", place), ("Content-Length", str(len(part)))])
        return [part]

    def _failed(self, start_response: Callable[..., Any], status: str = _FAILED) -> Iterable[bytes]:
        """An answer with a status such as "503 SlowDown"; its word is S3's code of the error."""
        code = status.partition(" ")[2]
        text = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode() if status != _FAILED else b""
        start_response(status, [("Content-Length", str(len(text))), ("Retry-After", "1")])
        return [text]


def _forget() -> None:
    """Lets clients ask the environment again: those that exist know the address of the server that was asked last."""
    fsspec.get_filesystem_class("s3").clear_instance_cache()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
    app: Callable[..., Iterable[bytes]]
    cuts: Callable[[str, str, str], bool]


class _Connection(socketserver.StreamRequestHandler):
    """Any number of requests on one connection, which werkzeug's server does not offer."""

    disable_nagle_algorithm = True
    server: _Server

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            self._handle()

    def _handle(self) -> None:
        while line := self.rfile.readline():
            method, target, _ = line.decode("latin-1").split()
            headers: dict[str, str] = {}
            while (line := self.rfile.readline()).strip():
                name, _, value = line.decode("latin-1").partition(":")
                headers[name.upper().replace("-", "_")] = value.strip()
            if headers.get("EXPECT"):
                self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = self.rfile.read(int(headers.get("CONTENT_LENGTH", 0)))
            self._answer(method, target, headers, body)

    def _answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> None:
        path, _, query = target.partition("?")
        environ = {f"HTTP_{name}": value for name, value in headers.items()} | {
            "REQUEST_METHOD": method, "SCRIPT_NAME": "", "PATH_INFO": unquote(path, "latin-1"), "RAW_URI": target,
            "REQUEST_URI": target, "QUERY_STRING": query, "CONTENT_LENGTH": str(len(body)),
            "CONTENT_TYPE": headers.get("CONTENT_TYPE", ""), "SERVER_NAME": "127.0.0.1",
            "SERVER_PORT": str(self.server.server_address[1]), "SERVER_PROTOCOL": "HTTP/1.1", "REMOTE_ADDR": "127.0.0.1",
            "wsgi.version": (1, 0), "wsgi.url_scheme": "http", "wsgi.input": io.BytesIO(body), "wsgi.errors": sys.stderr,
            "wsgi.multithread": True, "wsgi.multiprocess": False, "wsgi.run_once": False,
        }  # fmt: skip
        head: list[str] = []

        def start(status: str, fields: list[tuple[str, str]], *_: object) -> None:
            head[:] = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in fields)]

        answer = b"".join(self.server.app(environ, start))
        if not any(line.lower().startswith("content-length:") for line in head):
            head.append(f"Content-Length: {len(answer)}")
        text = "".join(f"{line}\r\n" for line in (*head, "")).encode("latin-1")
        whole = text + (answer if method != "HEAD" else b"")
        if self.server.cuts(method, environ["PATH_INFO"], query):
            self.wfile.write(whole[: len(whole) // 2])
            raise ConnectionAbortedError
        self.wfile.write(whole)


if __name__ == "__main__":
    with S3Server(sys.argv[1]) as running:
        running.take(Path(sys.argv[2]))
        print(running.url, flush=True)
        threading.Event().wait()

"""Google's JSON interface of object stores on loopback, as far as gcsfs asks it: one bucket, `bkt`, in memory."""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class GoogleServer:
    """Use as a context manager.

    Attributes:
        url: for `STORAGE_EMULATOR_HOST`.
        files: name -> bytes.
        sessions: uploads that are not complete: number -> (name, bytes so far).
        failing: is asked of each request (method, path, query) which status to answer instead; 0 for none.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.sessions: dict[str, tuple[str, bytearray]] = {}
        self.failing: Callable[[str, str, str], int] = lambda method, path, query: 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"store": self}))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> GoogleServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def facts(self, name: str) -> dict[str, Any]:
        """Of a file."""
        data = self.files[name]
        return {
            "name": name,
            "bucket": "bkt",
            "size": str(len(data)),
            "generation": str(hash(data) & 0xFFFFFFFF),
            "updated": "2026-11-01T00:00:00.000Z",
            "timeCreated": "2026-11-01T00:00:00.000Z",
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: GoogleServer

    def log_message(self, *_: object) -> None:
        pass

    def _say(self, status: int, body: object = None, **headers: str) -> None:
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _answer(self) -> None:
        split = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(split.query).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if status := self.store.failing(self.command, split.path, split.query):
            return self._say(status, {"error": {"code": status, "message": "so it is"}})
        found = re.fullmatch(r"/(?:(upload|download)/)?storage/v1/b/([^/]+)(?:/o(?:/(.*))?)?", split.path)
        if found is None or found[2] != "bkt":
            return self._say(404)
        if found[1] == "upload":
            return self._upload(body)
        if found[3] is None:
            return self._list()
        name = unquote(found[3])
        if name not in self.store.files:
            return self._say(404)
        if self.command == "DELETE":
            del self.store.files[name]
            return self._say(204)
        if self.query.get("alt") != "media":
            return self._say(200, self.store.facts(name))
        data = self.store.files[name]
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            return self._say(206, data[int(wanted[1]) : int(wanted[2]) + 1])
        return self._say(200, data)

    do_GET = do_POST = do_PUT = do_DELETE = _answer

    def _list(self) -> None:
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        names = sorted(name for name in self.store.files if name.startswith(prefix))
        below = {prefix + name[len(prefix) :].split("/")[0] + "/" for name in names if "/" in name[len(prefix) :]}
        if delimiter:
            names = [name for name in names if "/" not in name[len(prefix) :]]
        self._say(200, {"items": [self.store.facts(n) for n in names], "prefixes": sorted(below) if delimiter else []})

    def _upload(self, body: bytes) -> None:
        store, number = self.store, self.query.get("upload_id", "")
        if self.query["uploadType"] == "multipart":
            facts, data = _parts(body)
            name = json.loads(facts)["name"]
            store.files[name] = data
            return self._say(200, store.facts(name))
        if not number:
            number = secrets.token_hex(4)
            store.sessions[number] = json.loads(body)["name"], bytearray()
            url = f"{store.url}/upload/storage/v1/b/bkt/o?uploadType=resumable&upload_id={number}"
            return self._say(200, {}, Location=url)
        if self.command == "DELETE":
            del store.sessions[number]
            return self._say(499)
        name, held = store.sessions[number]
        found = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", self.headers["Content-Range"])
        assert found is not None
        if found[1]:
            held[int(found[1]) :] = body
        if found[3] == "*":
            return self._say(308, None, Range=f"bytes=0-{len(held) - 1}")
        assert len(held) == int(found[3])
        store.files[name] = bytes(held)
        del store.sessions[number]
        return self._say(200, store.facts(name))


def _parts(body: bytes) -> tuple[bytes, bytes]:
    """Of a body that has two."""
    _, first, second = body.removesuffix(b"\n--==0==--").split(b"--==0==", 2)
    return first.split(b"\n\n", 1)[1], second.split(b"\n\n", 1)[1]

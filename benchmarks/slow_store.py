"""An S3 server on loopback that limits each request, as S3, GCS and the hub do, and not the link.

    python benchmarks/slow_store.py DIRECTORY [--rate 8] [--wait 0.03] [--port 0]

DIRECTORY is the bucket `bkt`. Each answer waits, and each request moves at most `--rate` MB a second, in either direction; as
many requests as are under way move so much more. The first line that it prints is its port. No signature is checked.

`GET /__stats` gives what was moved since it was last asked: {"read", "written": bytes; "requests": how many had a body; "most":
how many of them at once; "busy": seconds of all bodies together; "span": seconds from the first body to the end of the last}.

Bytes go from file to socket in the kernel, so that this server is not the limit of what it is asked by.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import socketserver
import threading
import time
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bkt"
_CHUNK_S = 0.05
"""A body moves in pieces of what it may move in this time."""


class Store:
    """What is under way, and what was moved.

    Args:
        root: the bucket's directory.
        rate: bytes a second of each request.
        wait: seconds before each answer.
    """

    def __init__(self, root: Path, rate: float, wait: float) -> None:
        self.root, self.rate, self.wait = root, rate, wait
        self.parts = root.with_name(root.name + ".parts")
        self.lock = threading.Lock()
        self._under_way, self._last = 0, time.monotonic()
        self._clear()

    def _clear(self) -> None:
        self._read = self._written = self._requests = 0
        self._most, self._busy = self._under_way, 0.0
        self._first = self._end = 0.0

    def step(self, change: int, read: int = 0, written: int = 0) -> None:
        """A body begins (1) or has ended (-1)."""
        with self.lock:
            now = time.monotonic()
            self._busy += self._under_way * (now - self._last)
            self._under_way, self._last = self._under_way + change, now
            self._most = max(self._most, self._under_way)
            self._read, self._written = self._read + read, self._written + written
            if change > 0:
                self._requests += 1
                self._first = self._first or now
            else:
                self._end = now

    def stats(self) -> dict[str, float]:
        """Since the last call."""
        self.step(0)
        with self.lock:
            found = {
                "read": self._read, "written": self._written, "requests": self._requests, "most": self._most,
                "busy": self._busy, "span": max(0.0, self._end - self._first),
            }  # fmt: skip
            self._clear()
        return found

    def paced(self, nbytes: int, move: Callable[[int], int]) -> None:
        """Moves a body, `move` at most so many bytes of it at a time; returns when the rate allows it."""
        began, done, piece = time.monotonic(), 0, max(16 << 10, int(self.rate * _CHUNK_S))
        while done < nbytes:
            done += move(min(piece, nbytes - done))
            time.sleep(max(0.0, began + done / self.rate - time.monotonic()))

    def path(self, key: str) -> Path:
        """Where a file is."""
        found = Path(os.path.normpath(self.root / key))
        if not found.is_relative_to(self.root):
            raise PermissionError(key)
        return found


def etag(path: Path) -> str:
    """Changes when a file is written again."""
    stat = path.stat()
    return hashlib.md5(f"{path} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()


class Connection(socketserver.StreamRequestHandler):
    """Any number of requests, one after the other."""

    disable_nagle_algorithm = True
    rbufsize = 0
    store: Store

    def handle(self) -> None:
        """Answers until the client has no more requests."""
        self.rfile = self.connection.makefile("rb", 64 << 10)
        try:
            while line := self.rfile.readline():
                self.method, target, _ = line.decode().split(" ", 2)
                self.headers = {}
                while text := self.rfile.readline().decode().strip():
                    name, _, value = text.partition(":")
                    self.headers[name.lower()] = value.strip()
                split = urlsplit(target)
                self.query = dict(parse_qsl(split.query, keep_blank_values=True))
                self._answer(unquote(split.path).lstrip("/"))
        except ConnectionError:
            pass

    def _say(self, status: str, text: str = "", *headers: str) -> None:
        body = text.encode()
        lines = (f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Content-Type: application/xml", *headers)
        self.wfile.write("\r\n".join((*lines, "", "")).encode() + (body if self.method != "HEAD" else b""))

    def _refuse(self, status: str, code: str) -> None:
        self._say(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>")

    def _answer(self, path: str) -> None:
        store, query, method = self.store, self.query, self.method
        if path == "__stats":
            return self._say("200 OK", json.dumps(store.stats()))
        time.sleep(store.wait)
        bucket, _, key = path.partition("/")
        if bucket != BUCKET:
            return self._refuse("404 Not Found", "NoSuchBucket")
        if method == "POST" and "delete" in query:
            for name in re.findall(r"<Key>(.*?)</Key>", self.rfile.read(int(self.headers["content-length"])).decode()):
                store.path(name).unlink(missing_ok=True)
            return self._say("200 OK", "<DeleteResult/>")
        if not key:
            return self._list() if method == "GET" else self._say("200 OK")
        if method == "POST":
            return self._multipart(key)
        if method == "PUT":
            return self._take(key)
        if method == "DELETE":
            if "uploadId" in query:
                shutil.rmtree(store.parts / query["uploadId"], ignore_errors=True)
            else:
                store.path(key).unlink(missing_ok=True)
            return self._say("204 No Content")
        return self._give(store.path(key))

    def _list(self) -> None:
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        names = sorted(str(f.relative_to(self.store.root)) for f in self.store.root.rglob("*") if f.is_file())
        names = [name for name in names if name.startswith(prefix)]
        below: set[str] = set()
        if delimiter:
            below = {prefix + name[len(prefix) :].split("/")[0] + "/" for name in names if "/" in name[len(prefix) :]}
            names = [name for name in names if "/" not in name[len(prefix) :]]
        text = "".join(map(self._entry, names))
        text += "".join(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(below))
        head = f"<Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(names) + len(below)}</KeyCount>"
        self._say("200 OK", f"<ListBucketResult>{head}<IsTruncated>false</IsTruncated>{text}</ListBucketResult>")

    def _entry(self, name: str) -> str:
        path = self.store.path(name)
        at = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(path.stat().st_mtime))
        facts = (
            f"<LastModified>{at}</LastModified><ETag>&quot;{etag(path)}&quot;</ETag><Size>{path.stat().st_size}</Size>"
        )
        return f"<Contents><Key>{escape(name)}</Key>{facts}<StorageClass>STANDARD</StorageClass></Contents>"

    def _give(self, path: Path) -> None:
        if not path.is_file():
            return self._refuse("404 Not Found", "NoSuchKey")
        size = path.stat().st_size
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("range", ""))
        start, stop, status, place = 0, size, "200 OK", []
        if asked:
            start = int(asked[1]) if asked[1] else max(0, size - int(asked[2]))
            stop = min(size, int(asked[2]) + 1) if asked[1] and asked[2] else size
            status, place = "206 Partial Content", [f"Content-Range: bytes {start}-{stop - 1}/{size}"]
        if asked and start >= stop:
            return self._refuse("416 Range Not Satisfiable", "InvalidRange")
        at = formatdate(path.stat().st_mtime, usegmt=True)
        lines = (
            f"HTTP/1.1 {status}", f"Content-Length: {stop - start}", *place, "Accept-Ranges: bytes", f'ETag: "{etag(path)}"',
            f"Last-Modified: {at}", "Content-Type: binary/octet-stream", "", "",
        )  # fmt: skip
        self.wfile.write("\r\n".join(lines).encode())
        if self.method == "HEAD":
            return None
        offset, out = start, self.connection.fileno()
        self.store.step(1)
        try:
            with path.open("rb") as file:

                def send(nbytes: int) -> int:
                    nonlocal offset
                    sent = os.sendfile(out, file.fileno(), offset, nbytes)
                    offset += sent
                    return sent

                self.store.paced(stop - start, send)
        finally:
            self.store.step(-1, read=offset - start)
        return None

    def _take(self, key: str) -> None:
        query, store = self.query, self.store
        path = store.path(key)
        if "uploadId" in query:
            path = store.parts / query["uploadId"] / query["partNumber"]
            if not path.parent.is_dir():
                return self._refuse("404 Not Found", "NoSuchUpload")
        elif self.headers.get("if-none-match") == "*" and path.exists():
            return self._refuse("412 Precondition Failed", "PreconditionFailed")
        path.parent.mkdir(parents=True, exist_ok=True)
        whole, at = self._place_of_part(path) if "uploadId" in query else (None, 0)
        if self.headers.get("expect"):
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        new = path.with_name(f"{path.name}.{threading.get_ident()}.new")
        taken = 0
        store.step(1)
        try:
            with new.open("wb") if whole is None else whole.open("r+b") as file:
                file.seek(at)

                def take(nbytes: int) -> int:
                    nonlocal taken
                    data = self.rfile.read(nbytes)
                    if len(data) < nbytes:
                        raise ConnectionResetError("the client went away")
                    taken += len(data)
                    return file.write(data)

                coded = {self.headers.get("transfer-encoding", ""), self.headers.get("content-encoding", "")}
                if coded & {
                    "chunked",
                    "aws-chunked",
                }:  # length in hex, data, end of line; the last is empty, then trailers
                    while size := int(self.rfile.readline().split(b";")[0], 16):
                        store.paced(size, take)
                        self.rfile.readline()
                    while self.rfile.readline().strip():
                        pass
                else:
                    store.paced(int(self.headers.get("content-length", 0)), take)
            path.touch() if whole is not None else new.replace(path)
        finally:
            new.unlink(missing_ok=True)
            store.step(-1, written=taken)
        return self._say("200 OK", "", f'ETag: "{etag(path)}"')

    def _place_of_part(self, path: Path) -> tuple[Path | None, int]:
        """The file in which all parts that are as long as the first are put at once, and where in it; None for other parts."""
        coded = self.headers.get("content-length", 0)
        whole, length = path.with_name("whole"), int(self.headers.get("x-amz-decoded-content-length", coded))
        with self.store.lock:
            if not whole.exists():
                whole.touch()
                path.with_name("length").write_text(str(length))
        usual = int(path.with_name("length").read_text())
        return (whole, (int(path.name) - 1) * usual) if length == usual else (None, 0)

    def _multipart(self, key: str) -> None:
        text = self.rfile.read(int(self.headers.get("content-length", 0))).decode()
        parts = self.store.parts
        if "uploads" in self.query:
            number = os.urandom(8).hex()
            (parts / number).mkdir(parents=True)
            name = f"<Bucket>{BUCKET}</Bucket><Key>{escape(key)}</Key><UploadId>{number}</UploadId>"
            return self._say("200 OK", f"<InitiateMultipartUploadResult>{name}</InitiateMultipartUploadResult>")
        number, path = self.query["uploadId"], self.store.path(key)
        if not (parts / number).is_dir():
            return self._refuse("404 Not Found", "NoSuchUpload")
        whole, end = parts / number / "whole", 0
        usual = int((parts / number / "length").read_text())
        with whole.open("r+b") as file:  # as a store does, this copies no part again but the last
            for at, part in enumerate(parts / number / n for n in re.findall(r"<PartNumber>(\d+)</PartNumber>", text)):
                own = part.stat().st_size
                if own and end != at * usual:
                    return self._refuse("400 Bad Request", "InvalidPart")  # no client here sends such
                file.seek(end)
                with part.open("rb") as rest:
                    shutil.copyfileobj(rest, file, 1 << 20)
                end += own or usual
            file.truncate(end)
        path.parent.mkdir(parents=True, exist_ok=True)
        whole.replace(path)
        shutil.rmtree(parts / number)
        facts = f'<Bucket>{BUCKET}</Bucket><Key>{escape(key)}</Key><ETag>"{etag(path)}"</ETag>'
        return self._say("200 OK", f"<CompleteMultipartUploadResult>{facts}</CompleteMultipartUploadResult>")


class Server(socketserver.ThreadingTCPServer):
    """One thread for each connection."""

    allow_reuse_address = daemon_threads = True
    request_queue_size = 256


def serve(root: Path, rate: float, wait: float, port: int = 0) -> Server:
    """A server that answers once its `serve_forever` runs."""
    handler = type("Bound", (Connection,), {"store": Store(root.resolve(), rate, wait)})
    return Server(("127.0.0.1", port), handler)


def main() -> None:
    """As above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rate", type=float, default=8, help="MB a second of each request")
    parser.add_argument("--wait", type=float, default=0.03, help="seconds before each answer")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    with serve(options.directory, options.rate * 1e6, options.wait, options.port) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()

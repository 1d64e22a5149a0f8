"""Shows a directory, for reading, as a mount that limits each request: FUSE in plain Python, for root on Linux.

    python tests/slow_mount.py DIRECTORY MOUNT [--rate 8] [--wait 0.01]

Each request for bytes takes `--wait` seconds, and its bytes by `--rate` MB a second; as many requests as are under way move so
much more. So do NFS, Lustre and mounts of object stores limit what one stream gets. It prints a line when it is mounted; SIGTERM
unmounts.
Source of the protocol: Linux, include/uapi/linux/fuse.h, 7.31.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import heapq
import os
import signal
import stat
import struct
import threading
import time
from pathlib import Path

_IN = struct.Struct("=IIQQIIII")
_OUT = struct.Struct("=IiQ")
_ATTRIBUTES = struct.Struct("=QQQQQQIIIIIIIIII")
_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _STATFS, _RELEASE, _FLUSH, _INIT = 1, 2, 3, 14, 15, 17, 18, 25, 26
_OPENDIR, _READDIR, _RELEASEDIR, _INTERRUPT, _BATCH_FORGET = 27, 28, 29, 36, 42
_MOST_BYTES = 1 << 20
_BIG, _ASYNC, _PAGES = 1 << 5, 1 << 0, 1 << 22


class SlowMount:
    """Use as a context manager.

    Args:
        source: the directory.
        place: where it is shown.
        rate: bytes a second of each request.
        wait: seconds before each answer.

    Attributes:
        most: requests for bytes under way at once, at most.
    """

    def __init__(self, source: Path, place: Path, rate: float, wait: float) -> None:
        self._source, self._place, self._rate, self._wait = source, place, rate, wait
        self._nodes: list[Path] = [Path(), source]
        self._numbers = {source: 1}
        self._due: list[tuple[float, int, int, int, int, int]] = []
        self._more = threading.Condition()
        self._under_way = self.most = 0
        self._ends = False

    def __enter__(self) -> SlowMount:
        self._fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._fd},rootmode=40000,user_id=0,group_id=0,allow_other,max_read={_MOST_BYTES}".encode()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"zckpt-slow", os.fsencode(self._place), b"fuse", 0, options):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(self._place))
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._serve, self._deliver)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        ctypes.CDLL(None).umount2(os.fsencode(self._place), 2)
        with self._more:
            self._ends = True
            self._more.notify()
        os.close(self._fd)

    def _serve(self) -> None:
        """Answers requests at once, but those for bytes."""
        while True:
            try:
                data = os.read(self._fd, _MOST_BYTES + 4096)
            except InterruptedError:
                continue
            except OSError:
                return
            _, what, unique, node, *_ = _IN.unpack_from(data)
            body = data[_IN.size :]
            if what in (_FORGET, _BATCH_FORGET, _INTERRUPT):
                continue
            try:
                if what == _READ:
                    _, offset, size = struct.unpack_from("=QQI", body)
                    self._put_off(unique, node, offset, size)
                else:
                    self._answer(unique, self._say(what, node, body))
            except OSError as error:
                self._answer(unique, b"", error.errno or errno.EIO)

    def _say(self, what: int, node: int, body: bytes) -> bytes:
        path = self._nodes[node] if node else Path()
        if what == _INIT:
            _, minor, most, _ = struct.unpack_from("=IIII", body)
            flags = _BIG | _ASYNC | _PAGES
            return struct.pack(
                "=IIIIHHIIHH8I", 7, min(31, minor), most, flags, 1 << 14, 1 << 13, _MOST_BYTES, 1, 256, 0, *[0] * 8
            )
        if what == _LOOKUP:
            found = path / os.fsdecode(body.rstrip(b"\0"))
            facts = self._facts(found)
            return struct.pack("=QQQQII", self._number(found), 0, 60, 60, 0, 0) + facts
        if what == _GETATTR:
            return struct.pack("=QII", 60, 0, 0) + self._facts(path)
        if what in (_OPEN, _OPENDIR):
            return struct.pack("=QII", 0, 0, 0)
        if what == _READDIR:
            return self._names(path, *struct.unpack_from("=QQI", body)[1:])
        if what == _STATFS:
            return struct.pack("=5Q3I4x6I", *[1 << 20] * 5, 4096, 255, 4096, *[0] * 6)
        if what in (_RELEASE, _RELEASEDIR, _FLUSH):
            return b""
        raise OSError(errno.ENOSYS, "not offered")

    def _number(self, path: Path) -> int:
        if path not in self._numbers:
            self._numbers[path] = len(self._nodes)
            self._nodes.append(path)
        return self._numbers[path]

    def _facts(self, path: Path) -> bytes:
        s = path.stat()
        times = int(s.st_atime), int(s.st_mtime), int(s.st_ctime)
        parts = 0, s.st_mtime_ns % 10**9, 0
        node = self._numbers.get(path, 0) or self._number(path)
        return _ATTRIBUTES.pack(
            node, s.st_size, s.st_blocks, *times, *parts, s.st_mode, 1, s.st_uid, s.st_gid, 0, 4096, 0
        )

    def _names(self, path: Path, offset: int, size: int) -> bytes:
        out = b""
        for number, entry in enumerate(sorted(path.iterdir())[offset:], offset + 1):
            name = os.fsencode(entry.name)
            kind = stat.S_IFMT(entry.stat().st_mode) >> 12
            one = struct.pack("=QQII", self._number(entry), number, len(name), kind) + name
            one += b"\0" * (-len(one) % 8)
            if len(out) + len(one) > size:
                break
            out += one
        return out

    def _put_off(self, unique: int, node: int, offset: int, size: int) -> None:
        due = time.monotonic() + self._wait + size / self._rate
        with self._more:
            self._under_way += 1
            self.most = max(self.most, self._under_way)
            heapq.heappush(self._due, (due, unique, node, offset, size, 0))
            self._more.notify()

    def _deliver(self) -> None:
        """Gives bytes when they are due."""
        files: dict[int, int] = {}
        while True:
            with self._more:
                while not self._ends and (not self._due or self._due[0][0] > time.monotonic()):
                    self._more.wait(self._due[0][0] - time.monotonic() if self._due else None)
                if self._ends:
                    break
                _, unique, node, offset, size, _ = heapq.heappop(self._due)
                self._under_way -= 1
            if node not in files:
                files[node] = os.open(self._nodes[node], os.O_RDONLY)
            self._answer(unique, os.pread(files[node], size, offset))
        for fd in files.values():
            os.close(fd)

    def _answer(self, unique: int, data: bytes, error: int = 0) -> None:
        try:
            os.writev(self._fd, [_OUT.pack(_OUT.size + len(data), -error, unique), data])
        except OSError:  # who asked has gone
            pass


def main() -> None:
    """As above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("mount", type=Path)
    parser.add_argument("--rate", type=float, default=8, help="MB a second of each request")
    parser.add_argument("--wait", type=float, default=0.01, help="seconds before each answer")
    options = parser.parse_args()
    ends = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ends.set())
    options.mount.mkdir(parents=True, exist_ok=True)
    with SlowMount(options.directory.resolve(), options.mount.resolve(), options.rate * 1e6, options.wait) as mount:
        print("mounted", flush=True)
        ends.wait()
        print("requests at once:", mount.most, flush=True)


if __name__ == "__main__":
    main()

"""A directory that several machines share over their links, as on a network file system: FUSE's own messages, sent over TCP.

    python shared_directory.py serve HOST DIRECTORY          prints the port
    python shared_directory.py mount HOST PORT PATH COMMAND  runs a command that sees the directory at PATH, an existing one

Whoever mounts it passes on what the kernel asks, and what the server answers. Names and facts are asked for anew each time, and
what was read of a file counts until it is opened again. It takes root and /dev/fuse; `mount` is to run in a mount namespace of
its own.

Source: linux/fuse.h, 7.31.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

MOST_BYTES = 1 << 20
"""Of one read or write."""

_IN, _OUT = struct.Struct("=IIQQIIIHH"), struct.Struct("=IiQ")
_ATTR = struct.Struct("=6Q10I")
_BAREST = 65536


def received(connection: socket.socket, nbytes: int) -> bytearray:
    """Exactly so many bytes; fewer only where the connection has ended."""
    data, at = bytearray(nbytes), 0
    view = memoryview(data)
    while at < nbytes:
        more = connection.recv_into(view[at:])
        if not more:
            break
        at += more
    return data[:at]


class Served:
    """One machine's view of a directory.

    Args:
        root: the directory.
    """

    def __init__(self, root: str) -> None:
        self._paths = {1: root}
        self._numbers = {root: 1}
        self._next = 2
        self._answers: dict[int, Callable[[int, bytes], bytes]] = {
            1: self._lookup, 3: self._getattr, 4: self._setattr, 5: self._readlink, 6: self._symlink, 9: self._mkdir,
            10: self._unlink, 11: self._rmdir, 12: self._rename, 14: self._open, 15: self._read, 16: self._write,
            17: self._statfs, 18: self._release, 20: self._fsync, 25: lambda node, body: b"", 26: self._init,
            27: lambda node, body: bytes(16), 28: self._readdir, 29: lambda node, body: b"", 30: lambda node, body: b"",
            35: self._create, 43: self._fallocate, 45: self._rename2,
        }  # fmt: skip

    def answer(self, request: bytes) -> bytes:
        """The answer to a request; empty where none is wanted."""
        _, opcode, unique, node, *_ = _IN.unpack_from(request)
        if opcode in (2, 36, 38, 42):  # forgets, an interrupt, the end
            return b""
        try:
            do = self._answers.get(opcode)
            data = do(node, request[_IN.size :]) if do else None
            error = 0 if data is not None else -errno.ENOSYS
        except OSError as failed:
            data, error = b"", -(failed.errno or errno.EIO)
        data = data or b""
        return _OUT.pack(_OUT.size + len(data), error, unique) + data

    def _number(self, path: str) -> int:
        if path not in self._numbers:
            self._numbers[path], self._paths[self._next] = self._next, path
            self._next += 1
        return self._numbers[path]

    def _at(self, node: int, name: bytes) -> str:
        return os.path.join(self._paths[node], os.fsdecode(name.partition(b"\0")[0]))

    def _facts(self, found: os.stat_result) -> bytes:
        times = (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)
        return _ATTR.pack(
            found.st_ino, found.st_size, found.st_blocks, *(time // 10**9 for time in times), *(time % 10**9 for time in times),
            found.st_mode, found.st_nlink, found.st_uid, found.st_gid, 0, 4096, 0,
        )  # fmt: skip

    def _entry(self, path: str) -> bytes:
        found = os.lstat(path)
        return struct.pack("=4Q2I", self._number(path), 0, 0, 0, 0, 0) + self._facts(found)

    def _init(self, node: int, body: bytes) -> bytes:
        _, _, ahead, able = struct.unpack_from("=4I", body)
        flags = able & (1 << 0 | 1 << 5 | 1 << 12 | 1 << 18 | 1 << 22)  # async reads, large writes, ...
        pages = MOST_BYTES // 4096
        return struct.pack("=4I2H2I2H8I", 7, 31, ahead, flags, 64, 48, MOST_BYTES, 1, pages, 0, *([0] * 8))

    def _lookup(self, node: int, body: bytes) -> bytes:
        return self._entry(self._at(node, body))

    def _getattr(self, node: int, body: bytes) -> bytes:
        flags, _, handle = struct.unpack_from("=2IQ", body)
        found = os.fstat(handle) if flags & 1 else os.lstat(self._paths[node])
        return bytes(16) + self._facts(found)

    def _setattr(self, node: int, body: bytes) -> bytes:
        valid, _, handle, size, _, atime, mtime, _, *rest = struct.unpack_from("=2I6Q8I", body)
        place: int | str = handle if valid & 64 else self._paths[node]
        if valid & 8:
            os.truncate(place, size)
        if valid & 1:
            os.chmod(place, rest[3] & 0o7777)
        if valid & 6:
            os.chown(place, rest[5] if valid & 2 else -1, rest[6] if valid & 4 else -1)
        if valid & 48:
            now = os.stat(place)
            first = atime * 10**9 + rest[0] if valid & 16 else now.st_atime_ns
            os.utime(place, ns=(first, mtime * 10**9 + rest[1] if valid & 32 else now.st_mtime_ns))
        return bytes(16) + self._facts(os.stat(place))

    def _readlink(self, node: int, body: bytes) -> bytes:
        return os.fsencode(os.readlink(self._paths[node]))

    def _symlink(self, node: int, body: bytes) -> bytes:
        name, target, _ = body.split(b"\0")
        os.symlink(os.fsdecode(target), path := self._at(node, name))
        return self._entry(path)

    def _mkdir(self, node: int, body: bytes) -> bytes:
        os.mkdir(path := self._at(node, body[8:]), struct.unpack_from("=I", body)[0] & 0o7777)
        return self._entry(path)

    def _unlink(self, node: int, body: bytes) -> bytes:
        os.unlink(path := self._at(node, body))
        self._forget(path)
        return b""

    def _rmdir(self, node: int, body: bytes) -> bytes:
        os.rmdir(path := self._at(node, body))
        self._forget(path)
        return b""

    def _forget(self, path: str) -> None:
        self._numbers.pop(path, None)

    def _rename(self, node: int, body: bytes) -> bytes:
        return self._renamed(node, struct.unpack_from("=Q", body)[0], body[8:])

    def _rename2(self, node: int, body: bytes) -> bytes:
        directory, flags, _ = struct.unpack_from("=Q2I", body)
        if flags:
            raise OSError(errno.EINVAL, "flags")
        return self._renamed(node, directory, body[16:])

    def _renamed(self, node: int, directory: int, names: bytes) -> bytes:
        name, new, _ = names.split(b"\0")
        old, now = self._at(node, name), self._at(directory, new)
        os.rename(old, now)
        self._forget(now)
        for number, path in list(self._paths.items()):
            if path == old or path.startswith(old + "/"):
                self._numbers.pop(path, None)
                self._paths[number] = now + path[len(old) :]
                self._numbers[self._paths[number]] = number
        return b""

    def _open(self, node: int, body: bytes) -> bytes:
        flags = struct.unpack_from("=I", body)[0]
        return struct.pack("=QII", os.open(self._paths[node], flags & ~os.O_DIRECT), 0, 0)

    def _create(self, node: int, body: bytes) -> bytes:
        flags, mode = struct.unpack_from("=2I", body)
        handle = os.open(path := self._at(node, body[16:]), flags & ~os.O_DIRECT | os.O_CREAT, mode & 0o7777)
        return self._entry(path) + struct.pack("=QII", handle, 0, 0)

    def _read(self, node: int, body: bytes) -> bytes:
        handle, offset, nbytes = struct.unpack_from("=2QI", body)
        return os.pread(handle, nbytes, offset)

    def _write(self, node: int, body: bytes) -> bytes:
        handle, offset, nbytes = struct.unpack_from("=2QI", body)
        return struct.pack("=2I", os.pwrite(handle, memoryview(body)[40 : 40 + nbytes], offset), 0)

    def _statfs(self, node: int, body: bytes) -> bytes:
        f = os.statvfs(self._paths[1])
        counts = (f.f_blocks, f.f_bfree, f.f_bavail, f.f_files, f.f_ffree)
        return struct.pack("=5Q10I", *counts, f.f_bsize, f.f_namemax, f.f_frsize, *([0] * 7))

    def _release(self, node: int, body: bytes) -> bytes:
        os.close(struct.unpack_from("=Q", body)[0])
        return b""

    def _fsync(self, node: int, body: bytes) -> bytes:
        os.fsync(struct.unpack_from("=Q", body)[0])
        return b""

    def _fallocate(self, node: int, body: bytes) -> bytes:
        handle, offset, nbytes, mode = struct.unpack_from("=3QI", body)
        if mode:
            raise OSError(errno.EOPNOTSUPP, "mode")
        os.posix_fallocate(handle, offset, nbytes)
        return b""

    def _readdir(self, node: int, body: bytes) -> bytes:
        _, offset, room = struct.unpack_from("=2QI", body)
        data = b""
        for number, name in enumerate(sorted(os.listdir(self._paths[node]))[offset:], offset + 1):
            text = os.fsencode(name)
            entry = struct.pack("=2Q2I", _BAREST + number, number, len(text), 0) + text
            entry += bytes(-len(entry) % 8)
            if len(data) + len(entry) > room:
                break
            data += entry
        return data


def serve(host: str, directory: str) -> None:
    """Answers until it is killed."""
    listening = socket.create_server((host, 0))
    print(listening.getsockname()[1], flush=True)

    def work(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        view, answers = Served(directory), queue.Queue[bytes](8)  # what is read and what is written pass each other

        def say() -> None:
            with contextlib.suppress(OSError):
                while said := answers.get():
                    connection.sendall(said)

        threading.Thread(target=say, daemon=True).start()
        while head := received(connection, 4):
            rest = received(connection, int.from_bytes(head, sys.byteorder) - 4)
            if said := view.answer(bytes(head + rest)):
                answers.put(said)
        answers.put(b"")

    while True:
        threading.Thread(target=work, args=(listening.accept()[0],), daemon=True).start()


def mount(host: str, port: int, path: str, command: list[str]) -> int:
    """The command's exit status."""
    connection = socket.create_connection((host, port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40755,user_id=0,group_id=0,allow_other,default_permissions"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"shared", os.fsencode(path), b"fuse.shared", 0, options.encode()):
        raise OSError(ctypes.get_errno(), "mount")

    def ask() -> None:
        while True:
            try:
                connection.sendall(os.read(device, MOST_BYTES + 8192))
            except OSError as error:
                if error.errno not in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                    return  # it was unmounted

    def answer() -> None:
        while head := received(connection, 4):
            said = head + received(connection, int.from_bytes(head, sys.byteorder) - 4)
            try:
                os.write(device, said)
            except OSError as error:
                if error.errno != errno.ENOENT:  # nobody waits for it any more
                    raise

    for work in (ask, answer):
        threading.Thread(target=work, daemon=True).start()
    status = subprocess.run(command, check=False).returncode
    libc.umount2(os.fsencode(path), 2)
    return status


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], str(Path(sys.argv[3]).resolve()))
    else:
        sys.stdout.flush()
        status = mount(sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5:])
        os._exit(status)

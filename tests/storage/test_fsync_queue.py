"""Files are told of when they are durable, in their order, and not otherwise."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest
from descriptors import open_below

from zckpt.storage.fsync_queue import Syncing, make_durable


def opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT)


def test_files_are_told_of_in_their_order_and_after_they_are_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable: set[str] = set()
    sync = os.fsync

    def slow(fd: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        time.sleep(0.05 if name == "0" else 0)  # the first one takes longest
        sync(fd)
        durable.add(name)

    monkeypatch.setattr(os, "fsync", slow)
    told: list[str] = []

    def done(name: str) -> None:
        assert name in durable
        told.append(name)

    with Syncing(done) as syncing:
        for number in range(20):
            fd = opened(tmp_path / str(number))
            syncing.add(str(number), fd)
            os.close(fd)
            syncing.settle(wait=False)
        assert len(told) < 20
    assert told == [str(number) for number in range(20)]


def test_a_file_that_cannot_be_written_is_not_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sync(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("b"):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", sync)
    told: list[str] = []
    with pytest.raises(OSError, match="Input/output"), Syncing(told.append) as syncing:
        for name in "abc":
            fd = opened(tmp_path / name)
            syncing.add(name, fd)
            os.close(fd)
    assert told == ["a"] and open_below(tmp_path) == []


def test_what_is_durable_is_told_of_though_something_else_fails(tmp_path: Path) -> None:
    told: list[str] = []
    with pytest.raises(ValueError, match="else"), Syncing(told.append) as syncing:
        fd = opened(tmp_path / "a")
        syncing.add("a", fd)
        os.close(fd)
        raise ValueError("something else")
    assert told == ["a"]


def test_where_the_system_has_a_fuller_sync_it_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As macOS has; and where the file system does not know it, as none does here, the plain one."""
    asked: list[int] = []
    real, plain = fcntl.fcntl, os.fsync
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", fcntl.F_GETFD, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda fd, what: asked.append(what) or real(fd, what))
    monkeypatch.setattr(os, "fsync", lambda fd: asked.append(-1) or plain(fd))
    with (tmp_path / "x").open("wb") as file:
        make_durable(file.fileno())
        monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51)
        make_durable(file.fileno())
    assert asked == [fcntl.F_GETFD, 51, -1]

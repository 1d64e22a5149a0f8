"""Long ranges at addresses: in pieces, many at a time, each asked for once."""

from __future__ import annotations

import itertools
import os
import threading
import time
from pathlib import Path

import fsspec
import pytest
import torch
from s3_server import S3Server
from safetensors.torch import save_file

import zckpt
from zckpt.engine import prefetch
from zckpt.storage import fsspec_io


def ranges_of(s3: S3Server) -> list[tuple[int, int]]:
    """Of all requests for a part of a file, in order."""
    parts = [
        asked.removeprefix("bytes=").split("-") for method, _, _, asked in s3.requests if method == "GET" and asked
    ]
    return [(int(start), int(stop) + 1) for start, stop in parts]


def test_a_long_range_is_asked_for_in_pieces_and_a_piece_that_fails_alone(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsspec_io, "PIECE_BYTES", 64 << 10)
    data = os.urandom(3_000_001)
    fsspec.filesystem("s3").pipe_file("bkt/f", data)
    lock, under_way, most, failed = threading.Lock(), 0, 0, 0

    def slow(method: str, path: str, query: str) -> bool:
        nonlocal under_way, most, failed
        with lock:
            under_way, most, failed = under_way + 1, max(most, under_way + 1), failed + 1
            fails = failed == 20
        time.sleep(0.2)
        with lock:
            under_way -= 1
        return fails

    s3.failing = slow
    s3.requests.clear()
    wanted = [fsspec_io.Range("s3://bkt/f", 7, 1_500_000), fsspec_io.Range("s3://bkt/f", 1_400_000, 2_999_999)]
    for (block, at), r in zip(fsspec_io.fetch(wanted), wanted, strict=True):
        assert block[r.start - at : r.stop - at] == data[r.start : r.stop]
    asked = sorted(ranges_of(s3))
    assert most >= 16
    assert len(asked) == len(set(asked)) + 1 == 47  # one of 46 pieces failed
    pieces = sorted(set(asked))
    assert pieces[0][0] == 7 and pieces[-1][1] == 2_999_999
    assert all(before[1] == after[0] for before, after in itertools.pairwise(pieces))


def test_pieces_of_the_next_batches_are_asked_for_meanwhile(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One answer is late: all that fits into the window is asked for before it comes, and no more."""
    monkeypatch.setattr(fsspec_io, "PIECE_BYTES", 64 << 10)
    monkeypatch.setattr("zckpt.core.plan.SLAB_BYTES", 256 << 10)
    monkeypatch.setattr("zckpt.engine.batches.MOST_DISTANT_BYTES", 256 << 10)
    monkeypatch.setattr(prefetch, "AHEAD_BYTES", 2 << 20)
    weights = {f"w{n}": torch.randn(64, 1024) for n in range(24)}  # 256 KiB each
    save_file(weights, tmp_path / "model.safetensors")
    fsspec.filesystem("s3").put(str(tmp_path / "model.safetensors"), "bkt/one/model.safetensors")
    asked, lock, bodies = threading.Event(), threading.Lock(), 0

    def late(method: str, path: str, query: str) -> bool:
        nonlocal bodies
        if method == "GET" and path.endswith(".safetensors"):
            with lock:
                bodies += 1
                number = bodies
            if number == 3:  # the header is asked for before
                asked.wait(10)
                time.sleep(0.2)
                held.append(bodies)
            elif number >= 24:
                asked.set()
        return False

    held: list[int] = []
    s3.failing = late
    zckpt.convert("s3://bkt/one", tmp_path / "out.safetensors")
    zckpt.convert(tmp_path / "model.safetensors", tmp_path / "want.safetensors")
    assert (tmp_path / "out.safetensors").read_bytes() == (tmp_path / "want.safetensors").read_bytes()
    assert 24 <= held[0] <= 2 + (2 << 20) // (64 << 10) + 8  # a batch may be a header larger


def test_a_child_of_a_process_that_fetched_fetches_too() -> None:
    data = os.urandom(9 << 20)
    fsspec.filesystem("memory").pipe_file("/m/f", data)
    wanted = [fsspec_io.Range("memory://m/f", 1, len(data))]
    assert fsspec_io.fetch(wanted)[0][0][:] == data[1:]
    child = os.fork()
    if not child:
        os._exit(0 if fsspec_io.fetch(wanted)[0][0][:] == data[1:] else 1)
    deadline = time.monotonic() + 60  # a child without threads would wait for ever
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.02)
    if not ended[0]:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended == (child, 0)

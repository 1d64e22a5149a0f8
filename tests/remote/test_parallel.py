"""Long ranges at addresses: in pieces, many at a time, each asked for once; and uploads in parts, by either client of S3."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection
from pathlib import Path

import fsspec
import gguf
import numpy
import pytest
import torch
from hangs import HANG_S
from s3_server import PartsAtOnce, S3Server
from safetensors.torch import save_file

import zckpt
from zckpt.containers import open_container
from zckpt.engine import prefetch
from zckpt.storage import fsspec_io, object_store, uploads
from zckpt.storage.uploads import Upload


def ranges_of(s3: S3Server) -> list[tuple[int, int]]:
    """Of all requests for a part of a file, in order."""
    parts = [
        asked.removeprefix("bytes=").split("-") for method, _, _, asked in s3.requests if method == "GET" and asked
    ]
    return [(int(start), int(stop) + 1) for start, stop in parts]


def test_a_long_range_is_asked_for_in_pieces_and_a_piece_that_fails_alone(
    s3: S3Server, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsspec_io, "PIECE_BYTES", 64 << 10)
    data = os.urandom(3_000_001)
    fsspec.filesystem("s3").pipe_file("bkt/f", data)
    met, come = threading.Condition(), 0

    def slow(method: str, path: str, query: str) -> bool:
        """Answers no request for a piece before 16 have come."""
        nonlocal come
        if method != "GET":
            return False
        with met:
            come += 1
            fails = come == 20
            met.notify_all()
            assert met.wait_for(lambda: come >= 16, HANG_S), f"{come} requests at once"
        return fails

    s3.failing = slow
    s3.requests.clear()
    wanted = [fsspec_io.Range("s3://bkt/f", 7, 1_500_000), fsspec_io.Range("s3://bkt/f", 1_400_000, 2_999_999)]
    for (block, at), r in zip(fsspec_io.fetch(wanted), wanted, strict=True):
        assert block[r.start - at : r.stop - at] == data[r.start : r.stop]
    asked = sorted(ranges_of(s3))
    assert len(asked) == len(set(asked)) + 1 == 47  # one of 46 pieces failed
    pieces = sorted(set(asked))
    assert pieces[0][0] == 7 and pieces[-1][1] == 2_999_999
    assert all(before[1] == after[0] for before, after in itertools.pairwise(pieces))


@pytest.mark.parametrize(("nbytes", "pieces"), [(1, 1), (80 << 10, 1), ((80 << 10) + 1, 2), (128 << 10, 2)])
def test_a_range_that_is_a_little_longer_is_one_piece(
    nbytes: int, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsspec_io, "PIECE_BYTES", 64 << 10)
    fsspec.filesystem("memory").pipe_file("/m/f", os.urandom(nbytes))
    asked: list[tuple[int, int]] = []
    one = fsspec_io._one
    monkeypatch.setattr(fsspec_io, "_one", lambda fs, p, a, b: (asked.append((a, b)), one(fs, p, a, b))[1])
    fsspec_io.fetch([fsspec_io.Range("memory://m/f", 0, nbytes)])
    assert len(asked) == pieces


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
    assert 24 <= held[0] <= 2 + (2 << 20) // (64 << 10) + 16  # the late one may be of the second batch, or the third


def test_of_a_short_gguf_header_64_kib_are_fetched(s3: S3Server, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.attn_q.weight", numpy.ones((1024, 768), "float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    fsspec.filesystem("s3").put(str(path), "bkt/one/model.gguf")
    s3.sent = 0
    assert open_container("s3://bkt/one/model.gguf")
    assert s3.sent == 64 << 10


def test_parts_are_sent_side_by_side_and_a_part_that_fails_alone(s3: S3Server, client: str) -> None:
    data = os.urandom((32 << 20) + 5)
    s3.failing = slow = PartsAtOnce()
    s3.requests.clear()
    with Upload("s3://bkt/big", len(data)) as upload:
        for at in range(0, len(data), 4 << 20):
            upload.write(memoryview(data)[at : at + (4 << 20)])
            assert "big" not in s3.files("bkt")
    assert s3.files("bkt")["big"] == data
    parts = len({query for method, _, query, _ in s3.requests if method == "PUT" and "partNumber" in query})
    assert slow.asked == parts + 1
    assert slow.most >= 4


def test_no_more_parts_are_in_memory_than_are_sent(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """By s3fs, whose parts are collected here: none is begun while as many are under way as may be."""
    monkeypatch.setattr(fsspec_io, "find_store", lambda address: None)
    monkeypatch.setattr(uploads, "_SENT_BY_S3FS", 15 << 20)
    monkeypatch.setattr(uploads, "filesystem", fsspec_io.filesystem)
    gate, come, lock = threading.Event(), 0, threading.Lock()

    def held(method: str, path: str, query: str) -> bool:
        nonlocal come
        if method == "PUT" and "partNumber" in query:
            with lock:
                come += 1
            gate.wait(HANG_S)
        return False

    s3.failing = held
    data, taken = os.urandom(26 << 20), 0

    def send() -> None:
        nonlocal taken
        with Upload("s3://bkt/big", len(data)) as upload:
            for at in range(0, len(data), 1 << 20):
                upload.write(memoryview(data)[at : at + (1 << 20)])
                taken = at + (1 << 20)

    sender = threading.Thread(target=send)
    sender.start()
    deadline = time.monotonic() + HANG_S
    while come < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    assert come == 3 and taken <= 15 << 20
    gate.set()
    sender.join()
    assert s3.files("bkt")["big"] == data


def test_an_upload_that_is_given_up_leaves_nothing(s3: S3Server, client: str) -> None:
    with pytest.raises(KeyError), Upload("s3://bkt/big", 30 << 20) as upload:
        for _ in range(5):
            upload.write(os.urandom(4 << 20))
        raise KeyError
    begun = [query for method, path, query, _ in s3.requests if method == "POST" and path == "/bkt/big"]
    deadline = time.monotonic() + 30
    while s3._bucket("bkt").multiparts and time.monotonic() < deadline:
        time.sleep(0.05)
    assert begun and s3.files("bkt") == {} and not s3._bucket("bkt").multiparts


MALLINFO = """
import ctypes, sys
from zckpt.__main__ import give_back_blocks
fields = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in fields]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
if sys.argv[1] == "given back":
    give_back_blocks()
bytes(3 << 20)  # once such a block is freed, glibc keeps the next ones
before = libc.mallinfo2().hblkhd
held = bytes(2 << 20)
print(libc.mallinfo2().hblkhd - before >> 20)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="not glibc")
@pytest.mark.parametrize(("how", "mapped"), [("kept", "0"), ("given back", "2")])
def test_large_blocks_are_given_back_to_the_system(how: str, mapped: str) -> None:
    done = subprocess.run([sys.executable, "-c", MALLINFO, how], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == mapped


def test_where_a_bucket_is(s3: S3Server) -> None:
    host = s3.url.removeprefix("http://")
    assert object_store.bucket_region(HTTPConnection(host), "bkt") == "us-east-1"
    assert object_store.bucket_region(HTTPConnection(host), "nowhere") is None
    assert object_store.bucket_region(HTTPConnection("127.0.0.1:1"), "bkt") is None


@pytest.mark.parametrize(
    ("names", "asked"),
    [
        ({}, True),
        ({"FSSPEC_S3_KEY": "k"}, False),
        ({"AWS_ACCESS_KEY_ID": ""}, True),
        ({"AWS_PROFILE": "other"}, True),
        ({"AWS_PROFILE": "elsewhere"}, False),
    ],
)
def test_what_obstore_cannot_be_told_is_left_to_fsspec(
    s3: S3Server, names: dict[str, str], asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    (tmp_path / "keys").write_text("[default]\naws_access_key_id=a\naws_secret_access_key=b\n[other]\naws_access_key_id=c\n"
                                   "aws_secret_access_key=d\n[elsewhere]\naws_access_key_id=e\naws_secret_access_key=f\n"
                                   "endpoint_url=http://127.0.0.1:1\n")  # fmt: skip
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    for name, value in names.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    found = object_store.find_store("s3://bkt/f")
    assert (found is not None) == asked
    if found is not None:
        with pytest.raises(FileNotFoundError):  # an answer, to signed requests
            found[0].info("bkt/f")


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

"""What is handed to a sink is the file, byte for byte and in order, on both engines and on any number of threads."""

from __future__ import annotations

import hashlib
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hangs import HANG_S
from plans import NUMEL, plan_of

from zckpt.base.errors import OutputError
from zckpt.core.plan import Checksum, Plan
from zckpt.engine import batches
from zckpt.engine.move import Mode, run

ENGINES = [("reference", 1), ("native", 1), ("native", 2), ("native", 7)]


@pytest.fixture(params=ENGINES, ids=lambda p: f"{p[0]}-{p[1]}")
def engine(request: pytest.FixtureRequest) -> dict[str, object]:
    return {"engine": request.param[0], "threads": request.param[1], "window": 4096}


def test_a_sink_is_handed_the_file(engine: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    hashes = {name: hashlib.sha256() for name in "ab"}
    run(plan_of(tmp_path), str(tmp_path / "out"), consumers={n: h.update for n, h in hashes.items()}, **engine)
    for name, digest in hashes.items():
        data = (tmp_path / "out" / name).read_bytes()
        assert data[:40] == b"x" * 40 and data.endswith(b"end")
        assert digest.hexdigest() == hashlib.sha256(data).hexdigest()


def test_in_batches_of_any_size(engine: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MOST_MOVES", 1)
    (tmp_path / "out").mkdir()
    taken = bytearray()
    run(plan_of(tmp_path, ("a",)), str(tmp_path / "out"), consumers={"a": taken.extend}, **engine)
    assert (tmp_path / "out" / "a").read_bytes() == taken


def test_files_in_passing_are_written_over_what_lies_there(engine: dict[str, object], tmp_path: Path) -> None:
    plan, out = plan_of(tmp_path), tmp_path / "out"
    out.mkdir()
    run(plan, str(out), **engine)
    wanted = {name: (out / name).read_bytes() for name in "ab"}
    (out / "a").write_bytes(b"old" * len(wanted["a"]))
    (out / "b").write_bytes(b"old")
    inode, hashes = (out / "a").stat().st_ino, {name: hashlib.sha256() for name in "ab"}
    report = run(plan, str(out), consumers={n: h.update for n, h in hashes.items()}, mode=Mode.PASSING, **engine)
    assert {name: (out / name).read_bytes() for name in "ab"} == wanted and (out / "a").stat().st_ino == inode
    assert {name: h.digest() for name, h in hashes.items()} == {
        n: hashlib.sha256(d).digest() for n, d in wanted.items()
    }
    assert report.files == () and report.bytes_written == sum(map(len, wanted.values()))


def test_files_in_passing_never_follow_a_link(engine: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / "out" / "a").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutputError):
        run(plan_of(tmp_path), str(tmp_path / "out"), mode=Mode.PASSING, **engine)
    assert (tmp_path / "elsewhere").read_text() == "mine"


def test_files_in_passing_keep_nothing_of_what_was_there(tmp_path: Path) -> None:
    """Every byte of them is in the plan, and known in order."""
    plan = plan_of(tmp_path, ("a",))
    ((output, store),) = plan.files
    short = replace(output, literals=output.literals[1:])
    with pytest.raises(ValueError, match="what was there"):
        run(Plan(((short, store),), plan.pairs), str(tmp_path), mode=Mode.PASSING)
    with pytest.raises(ValueError, match="in order"):
        run(plan_of(tmp_path, ("a",), (Checksum(40, 8, (0,)),)), str(tmp_path), mode=Mode.PASSING)


def test_streamed_files_are_nowhere_but_in_their_sinks(engine: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    plan = plan_of(tmp_path)
    run(plan, str(tmp_path / "out"), **engine)
    taken = {name: bytearray() for name in "ab"}
    before = sorted(tmp_path.rglob("*"))
    report = run(plan, "/nonexistent", consumers={n: t.extend for n, t in taken.items()}, mode=Mode.STREAMED, **engine)
    assert sorted(tmp_path.rglob("*")) == before
    assert report.bytes_written == sum(map(len, taken.values()))
    assert all((tmp_path / "out" / name).read_bytes() == data for name, data in taken.items())


def test_checksums_are_told(engine: dict[str, object], tmp_path: Path) -> None:
    import zlib

    (tmp_path / "out").mkdir()
    covered = (Checksum(40, 2 * NUMEL, (1,)), Checksum(50 + 2 * NUMEL, 2 * NUMEL, (5, 9)))
    plan = plan_of(tmp_path, ("a",), covered)
    (told,) = run(plan, "", mode=Mode.STREAMED, **engine).files
    assert (told,) == run(plan, str(tmp_path / "out"), **engine).files
    data = (tmp_path / "out" / "a").read_bytes()
    assert told.slots.keys() == {1, 5, 9} and told.crc32 == zlib.crc32(data)
    for c in covered:
        crc = zlib.crc32(data[c.start : c.start + c.nbytes]).to_bytes(4, "little")
        assert {told.slots[slot] for slot in c.slots} == {crc} == {data[slot : slot + 4] for slot in c.slots}
    with pytest.raises(ValueError, match="not known in order"):
        run(plan, "", mode=Mode.STREAMED, consumers={"a": len}, **engine)


def test_what_a_sink_raises_ends_the_run(engine: dict[str, object], tmp_path: Path) -> None:
    calls = []

    def sink(view: memoryview) -> None:
        calls.append(len(view))
        if len(calls) == 2 or (len(calls) == 1 and engine["engine"] == "reference"):
            raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        run(plan_of(tmp_path), "", consumers={"a": sink}, mode=Mode.STREAMED, **engine)
    assert len(calls) <= 2


def test_a_view_that_was_kept_is_dead(tmp_path: Path) -> None:
    kept: list[memoryview] = []
    run(plan_of(tmp_path), "", consumers={"a": kept.append}, mode=Mode.STREAMED, engine="native")
    with pytest.raises(ValueError, match="released"):
        kept[0][0]


def test_a_run_that_is_stopped_leaves_nobody_waiting(tmp_path: Path) -> None:
    held, entered = threading.Event(), threading.Event()

    def sink(view: memoryview) -> None:
        entered.set()
        held.wait(HANG_S)

    def progress(written: int) -> None:
        if entered.is_set():
            held.set()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(plan_of(tmp_path), "", consumers={"a": sink}, mode=Mode.STREAMED, threads=4, window=4096, progress=progress)


def test_by_file(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    run(plan, str(tmp_path / "whole"))
    parts = list(plan.by_file())
    assert [len(part.pairs) for part in parts] == [2, 2]
    assert sum(part.bytes_written for part in parts) == plan.bytes_written
    for part in parts:
        run(part, str(tmp_path / "parts"))
    for name in os.listdir(tmp_path / "whole"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()

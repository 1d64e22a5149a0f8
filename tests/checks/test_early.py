"""What is read while Python still finds out what files hold: it changes no answer, and is not read again."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import synth
from descriptors import THREADS, open_below, threads

import zckpt
from zckpt.__main__ import begin_early
from zckpt.base.errors import ZckptError
from zckpt.base.pace import DEFAULT_PACE, Pace
from zckpt.checks.scan_order import ScanOrder
from zckpt.checks.verify import verify
from zckpt.engine import early
from zckpt.engine.early import EarlyReads, likely_files

FIXTURES = sorted(path.parent for path in (Path(__file__).parents[2] / "fixtures").glob("*/*/how.json"))
pytestmark = pytest.mark.skipif(not THREADS.is_dir(), reason="tells by /proc whether the thread has come to its end")


def let_it_end(before: set[str]) -> None:
    """Waits until no thread is left that reads."""
    while threads() - before:
        time.sleep(0.001)


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[ScanOrder]:
    """Small files are read early as well, and to their ends; returns the orders of the scans that follow."""
    made: list[ScanOrder] = []
    stop, leave_out = EarlyReads.stop, ScanOrder.leave_out
    before = threads()

    def waits(self: EarlyReads) -> Any:
        let_it_end(before)
        return stop(self)

    def kept(self: ScanOrder, *arguments: Any) -> None:
        made.append(self)
        leave_out(self, *arguments)

    monkeypatch.setattr(EarlyReads, "stop", waits)
    monkeypatch.setattr(ScanOrder, "leave_out", kept)
    monkeypatch.setattr(early, "WINDOW", 256)
    return made


def both(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """The verifications without and with reading early."""
    found = []
    for least in (1 << 40, 0):
        monkeypatch.setattr(early, "LEAST_BYTES", least)
        found.append(verify(checkpoint, deep=True).as_json())
    return found


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_answers_are_the_same(path: Path, orders: list[ScanOrder], monkeypatch: pytest.MonkeyPatch) -> None:
    without, with_it = both(path / "checkpoint", monkeypatch)
    assert with_it == without
    assert orders[0].spared_bytes == 0


@pytest.mark.parametrize("make", [synth.zero12, synth.zero3])
def test_what_was_read_early_is_left_out(
    make: Callable[..., Path], tmp_path: Path, orders: list[ScanOrder], monkeypatch: pytest.MonkeyPatch
) -> None:
    without, with_it = both(make(tmp_path / "ckpt", synth.two_groups(10), 2), monkeypatch)
    assert with_it == without
    assert orders[0].spared_bytes == 0 and orders[1].spared_bytes > 0
    assert bool(orders[1]._finite) == (make is synth.zero3)  # of ZeRO-2, masters are compared with copies


@pytest.mark.parametrize("seed", range(40))
def test_damage_shows_wherever_it_is(
    seed: int, tmp_path: Path, orders: list[ScanOrder], monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    checkpoint = chance.choice([synth.zero12, synth.zero3])(tmp_path / "ckpt", synth.two_groups(10), 2)
    path = chance.choice(sorted((checkpoint / "global_step5").iterdir()))
    bytes_of = bytearray(path.read_bytes())
    at = chance.randrange(len(bytes_of) // 4) * 4
    bytes_of[at : at + 4] = chance.choice([b"\0\0\x80\x7f", b"\0\0\xc0\x7f", b"\x01\0\0\0"])
    path.write_bytes(bytes_of)
    without, with_it = both(checkpoint, monkeypatch)
    assert with_it == without


def test_a_file_that_changes_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "LEAST_BYTES", 0)
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.write_bytes(bytes(3 << 20))
    before = threads()
    with EarlyReads([str(path) for path in (*paths, tmp_path / "none")], DEFAULT_PACE) as reads:
        let_it_end(before)
        os.utime(paths[0], ns=(1, 1))
        seen = reads.stop()
    stat = paths[1].stat()
    assert [*seen] == [((stat.st_dev, stat.st_ino, stat.st_mtime_ns), 3 << 20)]
    assert next(iter(seen.values())).run(5, 3 << 20) == (1 << 20, 3 << 20)


@pytest.mark.parametrize("pace", [{"threads": 1}, {"bytes_per_s": 1 << 40}, {"keep_cache": False}])
def test_it_keeps_to_what_was_asked_for(pace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "LEAST_BYTES", 0)
    (tmp_path / "a").write_bytes(bytes(3 << 20))
    wanted: Pace = {**DEFAULT_PACE, **pace}
    before = threads()
    with EarlyReads([str(tmp_path / "a")], wanted) as reads:
        let_it_end(before)
        assert reads.stop() == {}
    with EarlyReads([str(tmp_path / "a")], DEFAULT_PACE) as reads:
        let_it_end(before)
        assert reads.stop() != {}


@pytest.mark.parametrize("ends", [ZckptError, KeyboardInterrupt])
def test_no_thread_is_left_after(ends: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "large.pt").open("wb") as file:
        file.truncate(16 << 30)
    (tmp_path / "another.pt").write_bytes(b"of two files with weights, none is meant")
    monkeypatch.setattr("zckpt.base.pace.memory_bytes", lambda: 1 << 50)

    def interrupted(*_: Any, **__: Any) -> NoReturn:
        raise KeyboardInterrupt

    if ends is KeyboardInterrupt:
        monkeypatch.setattr("zckpt.checks.soundness.examine_checkpoint", interrupted)
    before = threads()
    with pytest.raises(ends):
        zckpt.verify(tmp_path, deep=True)
    assert threads() <= before
    assert open_below(tmp_path) == []


def test_which_files_are_meant(tmp_path: Path) -> None:
    for tag in ("step1", "step2"):
        (tmp_path / tag).mkdir()
        for name, nbytes in (("small.pt", 1), ("large.pt", 9), ("notes.txt", 99)):
            (tmp_path / tag / name).write_bytes(bytes(nbytes))
    (tmp_path / "latest").write_text("step2\n")
    expected = [str(tmp_path / "step2" / name) for name in ("large.pt", "small.pt")]
    assert likely_files(str(tmp_path), None) == expected
    assert likely_files(str(tmp_path), "step1") == [path.replace("step2", "step1") for path in expected]
    assert likely_files(str(tmp_path / "step2"), None) == expected
    assert likely_files(str(tmp_path / "none"), None) == likely_files("s3://bucket/run", None) == []


def test_the_command_line_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "LEAST_BYTES", 0)
    checkpoint = str(synth.zero3(tmp_path / "ckpt", synth.two_groups(10), 2))
    likely = likely_files(checkpoint, None)
    before = threads()
    for arguments in (
        ["verify", checkpoint],
        ["verify", checkpoint, "--deep", "--threads", "1"],
        ["verify", checkpoint, "weights", "--deep"],
        ["inspect", checkpoint, "--quiet"],
    ):
        begin_early(arguments)
        assert early._begun is None
    for _ in range(2):
        begin_early(["verify", "--json", checkpoint, "--deep"])
        first = early._begun
        assert first is not None and first.paths == likely
        let_it_end(before)
        assert early.begun(likely, DEFAULT_PACE) is first and first.stop() != {}
    begin_early(["verify", checkpoint, "--deep"])
    other = early._begun
    with early.begun(likely[:1], DEFAULT_PACE) as reads:
        assert reads is not other and reads.paths == likely[:1] and early._begun is None
    assert other is not None and other._reader is None

"""Whatever call fails, at whichever turn: a conversion ends complete, or with a clear error and nothing under its name."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import synth
from outputs import contents

import zckpt
from zckpt import Options
from zckpt._core import calls, inject
from zckpt.base.errors import CorruptError, InconsistentError, OutputError, ZckptError

pytestmark = pytest.mark.usefixtures("every_file_counts")

OPTIONS = Options(max_shard_size=200_000, threads=2)
SHORT = -2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth.vectors(tmp_path_factory.mktemp("faults") / "ckpt", 6, 60_000, 3)


@pytest.fixture(scope="module")
def wanted(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("wanted") / "out"
    zckpt.convert(checkpoint, out, dtype="bf16", options=OPTIONS)
    return contents(out)


def attempt(checkpoint: Path, out: Path, wanted: dict[str, bytes]) -> ZckptError | None:
    """One conversion, whole or not at all; then, where it failed, the same command without faults. The error, if any."""
    caught: ZckptError | None = None
    try:
        zckpt.convert(checkpoint, out, dtype="bf16", options=OPTIONS)
    except ZckptError as error:
        caught = error
        assert str(error) and error.found
        assert not out.exists()
        inject(False, 0, 0)
        inject(True, 0, 0)
        zckpt.convert(checkpoint, out, dtype="bf16", options=OPTIONS)
    assert contents(out) == wanted
    assert list(out.parent.iterdir()) == [out]
    shutil.rmtree(out)
    return caught


@pytest.mark.parametrize("kind", [SHORT, errno.EINTR], ids=["short", "EINTR"])
@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
def test_harmless_at_every_call(write: bool, kind: int, checkpoint: Path, out: Path, wanted: dict[str, bytes]) -> None:
    inject(write, 0, 0)
    attempt(checkpoint, out, wanted)
    total = calls(write)
    assert total >= 6
    for nth in range(1, total + 2):
        inject(write, nth, kind)
        assert attempt(checkpoint, out, wanted) is None


@pytest.mark.parametrize(
    ("write", "kind", "expected"),
    [
        (False, errno.EIO, CorruptError),
        (False, errno.ESTALE, CorruptError),
        (True, errno.ENOSPC, OutputError),
        (True, errno.EDQUOT, OutputError),
        (True, errno.EIO, OutputError),
    ],
)
def test_fatal_at_every_call(
    write: bool, kind: int, expected: type[ZckptError], checkpoint: Path, out: Path, wanted: dict[str, bytes]
) -> None:
    inject(write, 0, 0)
    attempt(checkpoint, out, wanted)
    total = calls(write)
    for nth in range(1, total + 1):
        inject(write, nth, kind)
        error = attempt(checkpoint, out, wanted)
        # Reads of a rerun are more than those of the first run: what is kept is read again.
        assert type(error) is expected or (error is None and nth == total), nth
        if isinstance(error, CorruptError):
            assert error.file is not None and error.file.endswith(".pt") and error.byte_offset is not None
        if isinstance(error, OutputError):
            told = {errno.ENOSPC: "full", errno.EDQUOT: "quota", errno.EIO: "cannot be written"}[kind]
            assert told in error.what


CALLS = ["fsync", "ftruncate", "open", "rename", "replace", "unlink", "mkdir", "makedirs", "write", "pwrite", "close"]


@pytest.mark.parametrize("name", CALLS)
def test_any_call_of_the_system_may_fail(
    name: str, checkpoint: Path, out: Path, wanted: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The n-th call that Python makes into the output's place fails, for every n."""
    real: Callable[..., Any] = getattr(os, name)
    seen = failing = 0

    def call(*arguments: Any, **more: Any) -> Any:
        nonlocal seen
        where = arguments[0]
        if isinstance(where, int):
            try:
                where = os.readlink(f"/proc/self/fd/{where}")
            except OSError:
                where = ""
        if str(out.parent) in str(where):
            seen += 1
            if seen == failing:
                if name == "close":
                    real(*arguments, **more)  # as the kernel does: the descriptor is gone, whatever close says
                raise OSError(errno.EIO, "Input/output error", where)
        return real(*arguments, **more)

    monkeypatch.setattr(os, name, call)
    attempt(checkpoint, out, wanted)
    total, errors = seen, 0
    for turn in range(1, total + 1):
        seen, failing = 0, turn
        try:
            zckpt.convert(checkpoint, out, dtype="bf16", options=OPTIONS)
        except (ZckptError, OSError):
            errors += 1
        failing = 0
        if out.exists():
            assert contents(out) == wanted
            shutil.rmtree(out)
        attempt(checkpoint, out, wanted)
    assert total == 0 or errors or name in ("unlink", "close")


@pytest.mark.parametrize("seed", range(30))
def test_several_faults_in_a_row(seed: int, checkpoint: Path, out: Path, wanted: dict[str, bytes]) -> None:
    chance = random.Random(seed)
    for _ in range(6):
        inject(
            chance.random() < 0.5, chance.randrange(1, 14), chance.choice([errno.EIO, errno.ENOSPC, SHORT, errno.EINTR])
        )
        try:
            zckpt.convert(checkpoint, out, dtype="bf16", options=OPTIONS)
            break
        except ZckptError:
            assert not out.exists()
    else:
        inject(False, 0, 0)
        inject(True, 0, 0)
        zckpt.convert(checkpoint, out, dtype="bf16", options=OPTIONS)
    assert contents(out) == wanted
    assert list(out.parent.iterdir()) == [out]


def grow(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"more")


def rewrite(path: Path) -> None:
    path.write_bytes(path.read_bytes()[::-1])


def replaced(path: Path) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_bytes(bytes(path.stat().st_size))
    fresh.rename(path)


@pytest.mark.parametrize("when", ["at once", "late"])
@pytest.mark.parametrize(
    "change", [lambda path: os.truncate(path, 5000), lambda path: os.truncate(path, 0), grow, rewrite, replaced, os.unlink],
    ids=["shrink", "empty", "grow", "rewrite", "replace", "unlink"],
)  # fmt: skip
def test_files_that_change_while_they_are_read(
    change: Callable[[Path], object], when: str, checkpoint: Path, out: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "ckpt"))
    victim = copy / "global_step5" / "zero_pp_rank_2_mp_rank_00_optim_states.pt"
    done = []

    def progress(written: int) -> None:
        if not done and (when == "at once" or written > 600_000):
            done.append(written)
            change(victim)

    with pytest.raises((CorruptError, InconsistentError)) as caught:
        zckpt.convert(copy, out, dtype="bf16", options=OPTIONS, progress=progress)
    assert caught.value.file == str(victim)
    assert not out.exists()
    if change in (rewrite, replaced):
        assert list(out.parent.iterdir()) == []  # nothing made of a source that changed is kept


def test_a_source_on_which_reads_end_early(checkpoint: Path, out: Path, tmp_path: Path) -> None:
    """The file is shortened, and its times are put back, between opening and reading."""
    copy = Path(shutil.copytree(checkpoint, tmp_path / "ckpt"))
    victim = copy / "global_step5" / "zero_pp_rank_2_mp_rank_00_optim_states.pt"
    stat = victim.stat()
    done = []

    def progress(written: int) -> None:
        if not done:
            done.append(written)
            os.truncate(victim, 5000)
            os.utime(victim, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    with pytest.raises(CorruptError, match="ends too early"):
        zckpt.convert(copy, out, dtype="bf16", options=OPTIONS, progress=progress)
    assert not out.exists()

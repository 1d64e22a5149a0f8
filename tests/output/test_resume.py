"""A conversion that ended anyhow is finished by the same command, and what it had finished is not done again."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import proofs
import pytest
import synth
import torch
from computed import COMPUTED
from hangs import HANG_S
from outputs import contents
from typer.testing import CliRunner

import zckpt
from zckpt import Options
from zckpt._core import inject
from zckpt.base.errors import CastError, InconsistentError, OutputError, UnsafeError
from zckpt.cli import app
from zckpt.core.dtypes import BF16
from zckpt.core.plan import OutputFile, Plan, WrittenFile
from zckpt.core.stores import FileStore
from zckpt.engine.move import run
from zckpt.jobs.convert import prepare
from zckpt.jobs.declarations import CONVERT
from zckpt.jobs.planned import execute
from zckpt.output import journal
from zckpt.output.journal import Journal, Seal
from zckpt.output.work_directory import WorkDirectory
from zckpt.storage import processes

pytestmark = pytest.mark.usefixtures("every_file_counts")

OPTIONS = Options(max_shard_size=200_000, threads=2)
RANK1 = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth.vectors(tmp_path_factory.mktemp("resume") / "ckpt", 8, 80_000, 3)


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "ckpt"))


def convert(checkpoint: Path, out: Path, **options: Any) -> zckpt.Report:
    chosen = {name: getattr(OPTIONS, name) for name in ("max_shard_size", "threads")} | options
    return zckpt.convert(checkpoint, out, dtype="bf16", options=Options(**chosen))


def interrupted(checkpoint: Path, out: Path, **options: Any) -> OutputError:
    """A conversion that the disk stops half-way."""
    inject(True, 6, errno.ENOSPC)
    with pytest.raises(OutputError, match="full") as caught:
        convert(checkpoint, out, **options)
    inject(True, 0, 0)
    assert not out.exists()
    return caught.value


@pytest.fixture
def wanted(original: Path, tmp_path: Path) -> dict[str, bytes]:
    convert(original, tmp_path / "whole")
    return contents(tmp_path / "whole")


# ---- going on --------------------------------------------------------------------------------------------------------


def test_a_full_disk_keeps_what_is_done(checkpoint: Path, out: Path, wanted: dict[str, bytes]) -> None:
    error = interrupted(checkpoint, out)
    private_directory = out.parent / ".out.zckpt"
    assert list(out.parent.iterdir()) == [private_directory]
    assert any(str(private_directory) in note and "Run the same command again" in note for note in error.__notes__)
    before = {path.name: path.stat().st_mtime_ns for path in (private_directory / "files").iterdir()}
    said: list[str] = []
    report = execute(prepare(checkpoint, out, OPTIONS.split(CONVERT, dtype=BF16)), None, said.append)
    assert report.kept >= 3
    total = len(contents(out)) - 1  # the manifest is not counted
    assert said == [f"resuming an interrupted conversion: {report.kept} of {total} files are already complete"]
    assert report.notes[-1] == said[0]
    assert contents(out) == wanted
    assert list(out.parent.iterdir()) == [out]
    same = [name for name, then in before.items() if (out / name).stat().st_mtime_ns == then]
    assert len(same) == report.kept
    assert zckpt.convert(checkpoint, out.parent / "again", dtype="bf16").kept == 0


def test_the_command_says_once_that_it_resumes(checkpoint: Path, out: Path) -> None:
    interrupted(checkpoint, out)
    done = CliRunner().invoke(app, ["to-bf16", str(checkpoint), str(out), "--max-shard-size", "200000"])
    assert done.exit_code == 0
    said = " ".join(done.stderr.split())
    assert said.count("note: resuming an interrupted conversion: ") == 1 and "files are already complete" in said


def test_a_mount_that_was_revoked(checkpoint: Path, out: Path, wanted: dict[str, bytes]) -> None:
    inject(False, 6, errno.EIO)
    with pytest.raises(zckpt.CorruptError, match="cannot be read"):
        convert(checkpoint, out)
    inject(False, 0, 0)
    assert convert(checkpoint, out).kept >= 1
    assert contents(out) == wanted


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: os.truncate(path, 100),
        Path.unlink,
    ],
    ids=["cut short", "gone"],
)
def test_what_was_done_is_checked(
    harm: Callable[[Path], object], checkpoint: Path, out: Path, wanted: dict[str, bytes]
) -> None:
    interrupted(checkpoint, out)
    first = sorted((out.parent / ".out.zckpt" / "files").iterdir())[0]
    clean = shutil.copytree(out.parent, out.parent.parent / "clean")
    harm(first)
    harmed = convert(checkpoint, out).kept
    assert contents(out) == wanted
    shutil.rmtree(out.parent)
    shutil.move(clean, out.parent)
    assert convert(checkpoint, out).kept == harmed + 1


def test_files_that_no_journal_names_are_not_trusted(checkpoint: Path, out: Path, wanted: dict[str, bytes]) -> None:
    interrupted(checkpoint, out)
    files = out.parent / ".out.zckpt" / "files"
    (files / "model-00009-of-00009.safetensors").write_bytes(b"left over")
    (files / "deeper").mkdir()
    (files / "deeper" / "still").write_bytes(b"left over")
    (files / "link").symlink_to(out.parent.parent)
    convert(checkpoint, out)
    assert contents(out) == wanted


@pytest.mark.parametrize("cut", [1, 10, 60])
def test_a_torn_journal_loses_its_last_line_only(
    cut: int, checkpoint: Path, out: Path, wanted: dict[str, bytes]
) -> None:
    interrupted(checkpoint, out)
    journal = out.parent / ".out.zckpt" / "journal"
    whole = journal.read_bytes()
    lines = whole.count(b"\n")
    journal.write_bytes(whole[:-cut])
    assert convert(checkpoint, out).kept == lines - 2
    assert contents(out) == wanted


@pytest.mark.parametrize("junk", [b"", b"\xff\xfe\n", b"[]\n", b'{"job": 3}\n', b"[" * 100_000 + b"\n"])
def test_a_journal_of_junk_is_no_journal(junk: bytes, checkpoint: Path, out: Path, wanted: dict[str, bytes]) -> None:
    interrupted(checkpoint, out)
    (out.parent / ".out.zckpt" / "journal").write_bytes(junk)
    assert convert(checkpoint, out).kept == 0
    assert contents(out) == wanted


@pytest.mark.parametrize("change", ["options", "source with its old time"])
def test_another_job_begins_anew(change: str, checkpoint: Path, out: Path) -> None:
    interrupted(checkpoint, out)
    options: dict[str, Any] = {}
    if change == "options":
        # two names exchanged: the headers are the same
        options = {"rename": [("w0", "x"), ("w1", "w0"), ("^x$", "w1")]}
    else:
        path = checkpoint / "global_step5" / RANK1
        stat = path.stat()
        data = bytearray(path.read_bytes())
        path.write_bytes(data)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert convert(checkpoint, out, **options).kept == 0
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_source_that_changes_meanwhile_leaves_nothing(checkpoint: Path, out: Path) -> None:
    path = checkpoint / "global_step5" / RANK1

    def touch(written: int) -> None:
        os.utime(path, ns=(1, 1))

    with pytest.raises(InconsistentError, match="changed"):
        zckpt.convert(checkpoint, out, dtype="bf16", options=OPTIONS, progress=touch)
    assert list(out.parent.iterdir()) == []


def test_overflows_of_kept_files_are_not_forgotten(tmp_path: Path, out: Path) -> None:
    group = {f"w{i}": torch.randn(80_000) for i in range(8)}
    group["w0"][5] = 1e30
    checkpoint = synth.zero12(tmp_path / "big", [group], 2)
    inject(True, 5, errno.ENOSPC)
    with pytest.raises(OutputError):
        zckpt.convert(checkpoint, out, dtype="fp16", options=OPTIONS)
    inject(True, 0, 0)
    with pytest.raises(CastError, match="'w0' \\(1 element"):
        zckpt.convert(checkpoint, out, dtype="fp16", options=OPTIONS)
    assert list(out.parent.iterdir()) == []  # the same command would fail again: nothing is kept
    for overflow in ("clamp", "inf"):
        inject(True, 5, errno.ENOSPC)
        chosen = Options(max_shard_size=200_000, overflow=overflow, overwrite=True)
        with pytest.raises(OutputError):
            zckpt.convert(checkpoint, out, dtype="fp16", options=chosen)
        inject(True, 0, 0)
        report = zckpt.convert(checkpoint, out, dtype="fp16", options=chosen)
        assert report.kept and report.overflows == {"w0": (1, pytest.approx(1e30))}


def test_room_that_an_earlier_run_takes_is_not_needed_again(
    checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(checkpoint, out)
    usage = shutil.disk_usage(out.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    with pytest.raises(OutputError, match="too little free disk"):
        convert(checkpoint, out.parent / "other")
    assert convert(checkpoint, out).bytes_written > 1_000_000


# ---- killing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "count", "flags"),
    [
        ("time", 20, []),
        ("event", 400, []),
        ("event", 400, ["overwrite"]),
        ("event", 400, ["single"]),
        ("event", 400, ["single", "overwrite"]),
        ("write", 400, []),
        ("read", 400, []),
        *proofs.cases([("time", 100, [])]),
        *proofs.cases((mode, 400, [job]) for job in COMPUTED for mode in ("event", "write")),
        *proofs.cases(("read", 400, [job]) for job in ("Quantised", "Averaged")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else str(value),
)
def test_killed_at_any_moment(mode: str, count: int, flags: list[str], original: Path, tmp_path: Path) -> None:
    """In time, or at the moments of one kind: all that are in the last files, and some of the others."""
    script = str(Path(__file__).parents[1] / "killing.py")
    every = 1 if mode == "time" else 3 if COMPUTED.keys() & set(flags) else 5
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, script, str(original), str(tmp_path), mode, str(count), "1", str(every), *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    if mode == "time":
        assert told["killed"] == count
    else:
        assert told["killed"] >= (1 if COMPUTED.keys() & set(flags) else 3) and told["done"] >= 1
    by_chance = mode == "time" and count < 100  # so few moments may all lie before the first file is done
    assert by_chance or told["kept"] > 0 or (COMPUTED.keys() & set(flags) and mode != "event") or "Gguf" in flags
    if mode == "event":
        assert told["published"] > 0


# ---- several runs ----------------------------------------------------------------------------------------------------


def test_many_runs_at_once(checkpoint: Path, out: Path, wanted: dict[str, bytes]) -> None:
    command = [sys.executable, "-m", "zckpt", "to-bf16", str(checkpoint), str(out), "--max-shard-size", "200KB"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    runs = [
        subprocess.Popen([*command, "--overwrite"], env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    told = [process.communicate(timeout=HANG_S)[1] for process in runs]
    codes = [process.returncode for process in runs]
    assert 0 in codes
    for code, text in zip(codes, told, strict=True):
        assert code == 0 or (code == 2 and "another run is writing" in text), text
    assert contents(out) == wanted
    assert list(out.parent.iterdir()) == [out]


def test_a_lock_whose_directory_went_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waited for the last run's lock must not go on with a file that no longer has a name."""
    import fcntl

    real, stolen = fcntl.flock, []

    def flock(fd: int, how: int) -> None:
        real(fd, how)
        if not stolen:
            stolen.append(fd)
            os.unlink(tmp_path / ".out.zckpt" / "lock")
            os.rmdir(tmp_path / ".out.zckpt")

    monkeypatch.setattr(fcntl, "flock", flock)
    directory = WorkDirectory(str(tmp_path / "out"))
    directory.take()
    assert stolen and (tmp_path / ".out.zckpt" / "lock").exists() and not directory.was_there
    directory.release(remove=True)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks(
    checkpoint: Path, out: Path, wanted: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    def flock(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    here = processes.this_process()
    dead, reused, elsewhere, alive = (
        out.parent / f".out.zckpt-{process}-00000000"
        for process in (
            replace(here, number=2**22 + 1), replace(here, started="1"), replace(here, space="1", number=2**22 + 1), here
        )
    )  # fmt: skip
    for directory in (dead, reused, elsewhere, alive):
        directory.mkdir()
        (directory / "files").mkdir()
    report = convert(checkpoint, out)
    assert any("no locks" in note for note in report.notes)
    assert contents(out) == wanted
    assert sorted(out.parent.iterdir()) == sorted([alive, elsewhere, out])
    shutil.rmtree(out)
    inject(True, 6, errno.ENOSPC)
    with pytest.raises(OutputError):
        convert(checkpoint, out)
    assert sorted(out.parent.iterdir()) == sorted([alive, elsewhere])


@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_is_planted_where_work_is_kept(kind: str, checkpoint: Path, out: Path) -> None:
    victim = out.parent.parent / "victim"
    victim.mkdir()
    (victim / "journal").write_bytes(b"precious")
    planted = out.parent / ".out.zckpt"
    planted.symlink_to(victim) if kind == "link" else planted.write_bytes(b"x")
    with pytest.raises(OutputError, match="needs this name"):
        convert(checkpoint, out)
    assert contents(victim) == {"journal": b"precious"} and not out.exists()


def test_links_in_the_private_directory_are_not_followed(checkpoint: Path, out: Path) -> None:
    victim = out.parent.parent / "victim"
    victim.write_bytes(b"precious")
    for name in ("lock", "journal.new"):
        planted = out.parent / ".out.zckpt"
        planted.mkdir(exist_ok=True)
        (planted / name).symlink_to(victim)
        with pytest.raises(OutputError):
            convert(checkpoint, out)
        assert victim.read_bytes() == b"precious"
        shutil.rmtree(planted, ignore_errors=True)


# ---- the protocol's parts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["../x", "/tmp/zckpt-x", "a/../../x", "", "a//b", "a\0b", "./a"])
def test_no_plan_writes_elsewhere(path: str, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    plan = Plan(((OutputFile(path, 3, ((0, b"abc"),)), FileStore(path, 3)),), [])
    with pytest.raises(UnsafeError, match="outside of the output"):
        run(plan, str(tmp_path / "root"))
    assert [p.name for p in tmp_path.rglob("*")] == ["root"]


def test_journal_round_trip(tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    writing = Journal(path, "job")
    writing.begin()
    file = WrittenFile("a/b", 10, 20, {"w": (3, 1e30)})
    writing.add(file)
    writing.close()
    seal = Seal("order", False, 3, 0, (("a", 5),), ("a", "b"), ("c",), (("a/b", 10, 20),))
    journal.write_seal(path, seal)
    assert journal.read(path) == journal.JournalRecord("job", {"a/b": file}, seal)
    assert Journal(path, "another").finished == {} and journal.read(path).job == "job"
    with open(path, "ab") as torn:
        torn.write(b'{"end": "do')
    assert journal.read(path).seal == seal
    journal.end_seal(path, "done")
    assert journal.read(path).seal is None and Journal(path, "job").done and not Journal(path, "another").done

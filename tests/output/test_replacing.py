"""What a new output may replace, where it may lie, and that what is done is not done again."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import synth
from outputs import contents, earlier_output
from typer.testing import CliRunner

import zckpt
from zckpt import Options
from zckpt.base.errors import OutputError
from zckpt.cli import app
from zckpt.hub import pipeline
from zckpt.output import journal
from zckpt.output.checks import check_space
from zckpt.output.journal import Journal, Seal
from zckpt.output.manifest import job_of
from zckpt.output.work_directory import WorkDirectory
from zckpt.storage.identity import is_mount
from zckpt.storage.location import locate


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth.vectors(tmp_path_factory.mktemp("replacing") / "ckpt", 3, 20_000, 2)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "place").mkdir()
    return tmp_path / "place" / "out"


def convert(checkpoint: Path, out: Path, dtype: str = "bf16", **options: Any) -> zckpt.Report:
    return zckpt.convert(checkpoint, out, dtype=dtype, options=Options(max_shard_size=60_000, **options))


def names(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir())


@pytest.fixture(scope="module")
def wanted(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    whole = tmp_path_factory.mktemp("wanted") / "out"
    convert(checkpoint, whole)
    return contents(whole)


# ---- what is zckpt's to delete ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stranger", ["link", "empty"])
def test_what_zckpt_did_not_write_stays(stranger: str, checkpoint: Path, out: Path, wanted: dict[str, bytes]) -> None:
    earlier_output(out, {"model-00009-of-00009.safetensors": b"old", "old/deep.bin": b"old", "config.json": b"{}"})
    place = out / stranger
    place.parent.mkdir(exist_ok=True)
    if stranger == "link":
        place.symlink_to("nowhere")
    else:
        place.mkdir()
    convert(checkpoint, out, overwrite=True)
    assert contents(out) == wanted and os.path.lexists(place)
    assert names(out.parent) == ["out"] and not (out / "old").exists()


def test_an_output_that_appears_while_the_work_is_done_is_not_replaced(checkpoint: Path, out: Path) -> None:
    def appear(written: int) -> None:
        out.mkdir(exist_ok=True)
        (out / "thesis.tex").write_bytes(b"years of work")

    with pytest.raises(OutputError, match="exists"):
        zckpt.convert(checkpoint, out, dtype="bf16", options=Options(max_shard_size=60_000), progress=appear)
    assert contents(out) == {"thesis.tex": b"years of work"}


# ---- where outputs lie -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["out", "out.bin"])
def test_a_symbolic_link_is_followed(name: str, checkpoint: Path, tmp_path: Path) -> None:
    link, real = tmp_path / name, tmp_path / "disk" / f"real-{name}"
    real.parent.mkdir()
    link.symlink_to(real)
    for dtype in ("bf16", "fp16"):
        zckpt.convert(checkpoint, link, dtype=dtype, options=Options(overwrite=dtype == "fp16"))
        assert link.is_symlink() and real.exists()
    assert names(tmp_path) == sorted(["disk", name])
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]


@pytest.fixture
def mounted(out: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A mount point as OUT, of the kind that the test asks for."""
    out.mkdir()
    beside = out.parent.parent / "source"
    beside.mkdir()
    kind = getattr(request, "param", "tmpfs")
    how = ["-t", "tmpfs", "-o", "size=8m", "tmpfs"] if kind == "tmpfs" else ["--bind", str(beside)]
    if os.geteuid() or subprocess.run(["mount", *how, str(out)], capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root, and a kernel that lets it")
    yield out
    subprocess.run(["umount", str(out)], check=True)


@pytest.mark.parametrize("mounted", ["bind"], indirect=True)
def test_a_mount_point_is_written_into(mounted: Path, checkpoint: Path, wanted: dict[str, bytes]) -> None:
    assert is_mount(str(mounted))
    convert(checkpoint, mounted)
    assert contents(mounted) == wanted and names(mounted.parent) == ["out"]
    (mounted / "notes.md").write_bytes(b"a thesis")
    convert(checkpoint, mounted, "fp16", overwrite=True)
    assert names(mounted) == sorted([*wanted, "notes.md"]) and contents(mounted)["zckpt.json"] != wanted["zckpt.json"]
    assert convert(checkpoint, mounted, overwrite=True).already_done is False
    assert contents(mounted) == {**wanted, "notes.md": b"a thesis"}


def test_room_is_asked_of_the_file_system_that_the_bytes_go_to(mounted: Path) -> None:
    with pytest.raises(OutputError, match="too little free disk"):
        check_space(locate(mounted), 9 << 20)
    check_space(locate(mounted), 1 << 20)
    check_space(locate(mounted / "inside"), 1 << 20)
    shutil.rmtree(mounted / "inside", ignore_errors=True)
    with pytest.raises(OutputError, match="too little free disk"):
        check_space(locate(mounted / "inside"), 9 << 20)


def test_a_file_that_is_mounted_is_refused_before_any_work(checkpoint: Path, tmp_path: Path) -> None:
    out, source = tmp_path / "out.bin", tmp_path / "source"
    out.touch()
    source.touch()
    if os.geteuid() or subprocess.run(["mount", "--bind", source, out], capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root, and a kernel that lets it")
    try:
        with pytest.raises(OutputError, match="mount point"):
            convert(checkpoint, out, overwrite=True)
    finally:
        subprocess.run(["umount", str(out)], check=True)


def test_a_directory_that_cannot_be_renamed(checkpoint: Path, tmp_path: Path, wanted: dict[str, bytes]) -> None:
    """As in a container, over a directory of its image: overlayfs renames no such directory."""
    below, above, work, merged = (tmp_path / name for name in ("below", "above", "work", "merged"))
    for directory in (below, above, work, merged):
        directory.mkdir()
    earlier_output(below / "out", {"model-00001-of-00003.safetensors": b"old", "old/deep.bin": b"old"})
    (below / "out" / "notes.md").write_bytes(b"a thesis")
    layers = f"lowerdir={below},upperdir={above},workdir={work},redirect_dir=off"
    how = ["mount", "-t", "overlay", "overlay", "-o", layers, str(merged)]
    if os.geteuid() or subprocess.run(how, capture_output=True, check=False).returncode:
        pytest.skip("mounting an overlay needs root, and a kernel that lets it")
    try:
        convert(checkpoint, merged / "out", overwrite=True)
        assert contents(merged / "out") == {**wanted, "notes.md": b"a thesis"}
        assert names(merged) == ["out"]
    finally:
        subprocess.run(["umount", str(merged)], check=True)


def test_directories_on_the_way_are_durable(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, synced = os.fsync, []

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    convert(checkpoint, tmp_path / "a" / "b" / "out")
    assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")} <= set(synced)


# ---- what is done already --------------------------------------------------------------------------------------------


@pytest.fixture
def attributes(tmp_path: Path) -> None:
    try:
        os.setxattr(tmp_path, "user.zckpt.test", b"1")
    except (OSError, AttributeError):
        pytest.skip("this file system has no user attributes, so that a finished output is not recognised")


@pytest.mark.usefixtures("attributes")
def test_the_same_command_again_does_nothing(checkpoint: Path, tmp_path: Path) -> None:
    """No file is touched, and the command says so."""
    out = tmp_path / "out"
    assert not convert(checkpoint, out).already_done
    before = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")}
    done = CliRunner().invoke(app, ["to-bf16", str(checkpoint), str(out), "--max-shard-size", "60000"])
    assert done.exit_code == 0 and "already done" in done.output
    assert {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")} == before


@pytest.mark.usefixtures("attributes")
@pytest.mark.parametrize("change", ["options", "source", "gone"])
def test_another_job_or_a_damaged_output_is_not_done(change: str, checkpoint: Path, out: Path) -> None:
    source = Path(shutil.copytree(checkpoint, out.parent / "ckpt"))
    convert(source, out)
    wanted = contents(out)
    options: dict[str, Any] = {"exclude": ["w2"]} if change == "options" else {}
    victim = sorted(out.glob("*.safetensors"))[0]
    if change == "source":  # the same bytes, written again: nobody knows that they are the same
        path = source / "global_step5" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
        path.write_bytes(path.read_bytes())
    elif change == "gone":
        victim.unlink()
    before = contents(out)
    with pytest.raises(OutputError, match="missing: 'm" if change == "gone" else "exists"):
        convert(source, out, **options)
    assert contents(out) == before
    assert not convert(source, out, overwrite=True, **options).already_done
    assert (contents(out) == wanted) == (change != "options")
    assert names(out.parent) == ["ckpt", "out"]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_one_file_that_is_gone_is_made_again(dtype: str, checkpoint: Path, tmp_path: Path) -> None:
    """Its manifest is still there, of the same command or of another one."""
    out = tmp_path / "out.bin"
    convert(checkpoint, out)
    before = contents(tmp_path)
    out.unlink()
    report = convert(checkpoint, out, dtype)
    assert not report.already_done and report.bytes_written > 0
    assert (contents(tmp_path) == before) == (dtype == "bf16")
    assert zckpt.verify(checkpoint, out).ok


@pytest.mark.usefixtures("attributes")
def test_manifests_say_nothing_of_the_machine(checkpoint: Path, out: Path) -> None:
    convert(checkpoint, out)
    facts = (out / "zckpt.json").read_bytes()
    assert job_of(str(out / "zckpt.json")) and job_of(str(out / "zckpt.json")).encode() not in facts
    assert job_of(str(out / "none")) == ""


# ---- the work directory ----------------------------------------------------------------------------------------------


def test_a_work_directory_with_a_seal_is_not_removed(tmp_path: Path) -> None:
    work = WorkDirectory(str(tmp_path / "out"))
    work.take()
    Path(work.files).mkdir()
    (Path(work.files) / "w").write_bytes(b"the only copy")
    writing = Journal(work.journal, "job")
    writing.begin()
    writing.close()
    journal.write_seal(work.journal, Seal("swap", False, Path(work.files).stat().st_ino, 0, files=(("w", 13, 0),)))
    work.release(remove=True)
    assert (Path(work.files) / "w").read_bytes() == b"the only copy"


def test_a_child_that_was_forked_meanwhile_does_not_keep_the_lock(tmp_path: Path) -> None:
    work = WorkDirectory(str(tmp_path / "out"))
    work.take()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.read(reading, 1)  # as a worker of a DataLoader, until it is told to end
        os._exit(0)
    work.release(remove=False)
    other = WorkDirectory(str(tmp_path / "out"))
    other.take()
    other.release(remove=True)
    os.close(writing)
    os.waitpid(child, 0)


def test_a_sealed_output_waits_while_something_else_has_its_name(checkpoint: Path, out: Path) -> None:
    work = WorkDirectory(str(out))
    work.take()
    Path(work.files).mkdir()
    (Path(work.files) / "w").write_bytes(b"new")
    writing = Journal(work.journal, "job")
    writing.begin()
    writing.close()
    journal.write_seal(work.journal, Seal("swap", False, Path(work.files).stat().st_ino, 0, files=(("w", 3, 0),)))
    work.release(remove=False)
    out.mkdir()
    (out / "thesis.tex").write_bytes(b"years of work")
    with pytest.raises(OutputError, match="somebody else has changed"):
        convert(checkpoint, out, overwrite=True)
    assert contents(out) == {"thesis.tex": b"years of work"}
    (out / "thesis.tex").rename(out.parent / "thesis.tex")
    with pytest.raises(OutputError, match="exists"):
        convert(checkpoint, out)  # first finishes what was sealed
    assert contents(out) == {"w": b"new"}
    assert names(out.parent) == ["out", "thesis.tex"]


def test_a_scratch_directory_that_went_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A push that waited for the lock of one that has just ended must not go on with a file that has no name any more."""
    real, stolen = fcntl.flock, []

    def flock(fd: int, how: int) -> None:
        real(fd, how)
        if not stolen:
            stolen.append(os.readlink(f"/proc/self/fd/{fd}"))
            shutil.rmtree(os.path.dirname(stolen[0]))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pipeline.open_scratch(str(tmp_path), "page") as room:
        assert stolen and os.path.dirname(stolen[0]) == room.path
        assert os.path.exists(os.path.join(room.path, "lock"))
        room.remember("identity", "name", "00" * 32)
        monkeypatch.setattr(fcntl, "flock", real)
        with pytest.raises(zckpt.UsageError, match="another push"), pipeline.open_scratch(str(tmp_path), "page"):
            pass


@pytest.mark.parametrize(
    "change",
    [
        {"enter": ["../victim"]}, {"deleted": ["/etc/passwd"]}, {"leave": [["a/../../victim", 1]]}, {"files": [["", 1, 1]]},
        {"staged": "many"}, {"enter": 3}, {"leave": [["a"]]},
    ],
)  # fmt: skip
def test_a_seal_that_zckpt_did_not_write(change: dict[str, Any], checkpoint: Path, out: Path) -> None:
    """A work directory may have come out of an archive, with the checkpoint."""
    planted, victim = out.parent / ".out.zckpt", out.parent / "victim"
    (planted / "files").mkdir(parents=True)
    (planted / "victim").write_bytes(b"planted")
    victim.write_bytes(b"precious")
    seal: dict[str, Any] = {
        "how": "order", "single": False, "staged": 1, "old": 0, "leave": [], "enter": [], "deleted": [], "files": [], **change
    }  # fmt: skip
    (planted / "journal").write_text(json.dumps({"job": "x"}) + "\n" + json.dumps({"seal": seal}) + "\n")
    with pytest.raises(OutputError, match="journal that zckpt did not write"):
        convert(checkpoint, out, overwrite=True)
    assert victim.read_bytes() == b"precious" and not out.exists()


@pytest.mark.parametrize("name", ["files", "aside"])
def test_links_in_a_sealed_work_directory_are_not_followed(name: str, checkpoint: Path, out: Path) -> None:
    planted, victim = out.parent / ".out.zckpt", out.parent / "victim"
    planted.mkdir()
    victim.mkdir()
    (victim / "w").write_bytes(b"precious")
    (planted / name).symlink_to(victim)
    seal = Seal("order", False, 1, 0, enter=("w",), deleted=("w",))
    (planted / "journal").write_text(json.dumps({"job": "x"}) + "\n" + json.dumps({"seal": asdict(seal)}) + "\n")
    with pytest.raises(OutputError, match="did not make"):
        convert(checkpoint, out, overwrite=True)
    assert (victim / "w").read_bytes() == b"precious"

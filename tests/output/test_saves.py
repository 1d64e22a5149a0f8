"""Work on saves beside their tags: who has it, what a killed run left, and what a stranger may have put there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zckpt.base.errors import OutputError
from zckpt.layouts.save.listing import is_trainers_file
from zckpt.output import commit, journal
from zckpt.output.saves import STAGED, SaveStaging, find_displaced
from zckpt.storage import processes

MODEL = "mp_rank_00_model_states.pt"


def staged(run: Path, tag: str, text: str) -> SaveStaging:
    """A save with one file that is ready to be sealed."""
    staging = SaveStaging(str(run), tag, is_trainers_file)
    staging.begin()
    (run / staging.name / STAGED / MODEL).write_text(text)
    return staging


def saved(run: Path, tag: str, text: str) -> None:
    staging = staged(run, tag, text)
    staging.seal()
    staging.commit()
    staging.end()


def test_a_tag_that_another_run_saves(tmp_path: Path) -> None:
    """It is refused; another tag is saved, and leaves alone what the first run works on."""
    first = staged(tmp_path, "one", "1")
    with pytest.raises(OutputError, match="another run"):
        SaveStaging(str(tmp_path), "one", is_trainers_file).begin()
    saved(tmp_path, "two", "2")
    first.seal()
    first.commit()
    first.end()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
    assert (tmp_path / "one" / MODEL).read_text() == "1"


def test_a_save_that_has_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two renamings: readers find the new one where it lies, and the save of any tag gives it its name."""
    saved(tmp_path, "again", "old")
    staging = staged(tmp_path, "again", "new")
    staging.seal()
    os.rename(tmp_path / "again", tmp_path / staging.name / "aside")
    [(tag, place)] = find_displaced(str(tmp_path)).items()
    assert tag == "again" and (Path(place) / MODEL).read_text() == "new"
    monkeypatch.undo()
    staging._work.release(remove=False)  # as the end of its process does
    saved(tmp_path, "other", "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "other"] and not find_displaced(str(tmp_path))
    assert (tmp_path / "again" / MODEL).read_text() == "new"


def test_the_second_renaming_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, "again", "old")
    staging = staged(tmp_path, "again", "new")
    staging.seal()
    monkeypatch.setattr(commit, "exchange", lambda a, b: False)
    rename = os.rename

    def broken(a: str, b: str) -> None:
        if a.endswith(STAGED) and not os.path.exists(b):
            raise OSError(5, "Input/output error")
        rename(a, b)

    monkeypatch.setattr(os, "rename", broken)
    with pytest.raises(OSError, match="Input/output"):
        staging.commit()
    staging.end()
    assert (tmp_path / "again" / MODEL).read_text() == "old" and os.listdir(tmp_path) == ["again"]


def test_without_locks_only_what_has_certainly_ended_is_finished(tmp_path: Path) -> None:
    """A process of this number in another namespace, or on another machine, may live."""
    ended = subprocess.run(
        [sys.executable, "-c", "from zckpt.storage.processes import this_process; print(this_process())"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    process = processes.parse(ended)
    assert process is not None
    elsewhere = f"{process.boot}-{int(process.space) + 1}-{process.number}-{process.started}"
    for owner in (ended, elsewhere, str(processes.this_process())):
        (tmp_path / f".zckpt-0123456789abcdef-{owner}-00000000" / STAGED).mkdir(parents=True)
    saved(tmp_path, "tag", "x")
    left = [path.name for path in tmp_path.iterdir() if path.name != "tag"]
    assert len(left) == 2 and not any(ended in name for name in left)


@pytest.mark.parametrize("tag", ["../victim", ".hidden", "tag"])
def test_a_journal_of_a_stranger_is_not_carried_out(tmp_path: Path, tag: str) -> None:
    """A checkpoint is unpacked that has one, and a run goes on in it: it touches no files but a save's."""
    run, victim = tmp_path / "run", tmp_path / "victim"
    (run / ".zckpt-0123456789abcdef" / STAGED).mkdir(parents=True)
    victim.mkdir()
    (victim / "precious").write_text("mine")
    work = run / ".zckpt-0123456789abcdef"
    (work / "aside").symlink_to(victim)
    (work / "journal").write_text(json.dumps({"job": tag}) + "\n")
    journal.write_seal(
        str(work / "journal"),
        journal.Seal("swap", False, os.lstat(work / STAGED).st_ino, 0, deleted=("precious",)),
    )
    saved(run, "mine", "x")
    assert (
        (victim / "precious").read_text() == "mine" and (run / "mine" / MODEL).exists() and not (run / "tag").exists()
    )

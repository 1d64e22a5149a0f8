"""A stdout that is full, closed, or a pipe that nobody reads: said as such, and nothing false is said of the work."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
CHECKPOINT = REPO / "fixtures" / "zero2" / "bf16_w2" / "checkpoint"
ENDINGS = {"> /dev/full": "No space left on device", ">&-": "Bad file descriptor", "| true": "Broken pipe"}
OUTPUTS = {
    "to-bf16 c out": "The output out is complete.",
    "to-fp32 c out.bin": "The output out.bin is complete.",
    "slim c out --drop optimizer": "The output out is complete.",
    "reshard c out --world-size 3 --json": "The output out is complete.",
    "to-dcp c out": "The output out is complete.",
    "delta old new out --version 1 --json": "The output out is complete.",
    "map c --html out.html": "The page out.html is complete.",
    "diff old new --html out.html": "The page out.html is complete.",
    "prune run --keep-last 1 --yes": "The saves that no rule keeps are deleted.",
}
ANSWERS = (
    "--help", "--version", "to-bf16 --help", "inspect c", "inspect c --json", "verify c", "map c", "diff old new", "du run",
    "prune run --keep-last 1", "to-bf16 c out --dry-run", "estimate config.json",
)  # fmt: skip


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Where a command finds what it reads."""
    from safetensors.numpy import np, save_file  # type: ignore[attr-defined]

    shutil.copytree(CHECKPOINT, tmp_path / "c")
    for step in (1, 2):
        shutil.copytree(CHECKPOINT, tmp_path / "run" / f"checkpoint-{step}")
    for version, name in enumerate(("old", "new")):
        (tmp_path / name).mkdir()
        save_file({"w": np.full(8, version, np.float16)}, tmp_path / name / "model.safetensors")
    model = REPO / "fixtures" / "transformers" / "llama_zero3" / "checkpoint" / "config.json"
    shutil.copy(model, tmp_path / "config.json")
    return tmp_path


def ended(home: Path, words: str, ending: str) -> tuple[int, str]:
    """The exit status and stderr of a command with such a stdout."""
    script = f'"$1" -m zckpt {words} {ending}; exit "${{PIPESTATUS[0]}}"'
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        ["bash", "-c", script, "bash", sys.executable], cwd=home, env=environment, capture_output=True, text=True, check=False
    )  # fmt: skip
    return done.returncode, done.stderr


def is_there(home: Path, words: str) -> bool:
    """Whether the work of a command is done."""
    if words.startswith("prune"):
        return not (home / "run" / "checkpoint-1").exists() and (home / "run" / "checkpoint-2").exists()
    return any(home.glob("out*")) and not any(home.glob(".*"))


@pytest.mark.parametrize(("words", "said"), OUTPUTS.items(), ids=[words.split()[0] for words in OUTPUTS])
def test_the_work_is_done_and_that_is_said(home: Path, words: str, said: str) -> None:
    ending, found = list(ENDINGS.items())[len(words) % len(ENDINGS)]
    status, stderr = ended(home, words, ending)
    assert status == 2 and is_there(home, words), stderr
    error = stderr[stderr.index("error:") :]
    assert error == (
        f"error: stdout: the result could not be printed\n  found     {found}\n"
        f"  fix       {said} Only the result was not printed.\n"
    )


@pytest.mark.parametrize("words", ANSWERS, ids=[words.replace(" ", "_") for words in ANSWERS])
def test_an_answer_that_nobody_gets_is_no_answer(home: Path, words: str) -> None:
    """Nothing was changed; of a reader that has gone nothing is said, and the status is not that of a "no"."""
    ending, found = list(ENDINGS.items())[len(words) % len(ENDINGS)]
    status, stderr = ended(home, words, ending)
    assert status == 2 and "Traceback" not in stderr and "Exception ignored" not in stderr
    if "| true" in ending:
        assert "error" not in stderr
    else:
        assert "stdout: the result could not be printed" in stderr and found in stderr


@pytest.mark.parametrize(("ending", "more"), [("> /dev/full", " --json"), (">&-", ""), ("| true", " --json")])
def test_each_ending(home: Path, ending: str, more: str) -> None:
    status, stderr = ended(home, f"to-bf16 c out{more}", ending)
    assert status == 2 and ENDINGS[ending] in stderr and is_there(home, "to-bf16"), stderr
    assert "Traceback" not in stderr and stderr.count("error:") == 1


def test_no_file_gets_the_number_of_a_stream_that_is_closed(home: Path) -> None:
    """Notes, and what libraries print, would be in it."""
    assert ended(home, "to-bf16 c wanted", "")[0] == 0
    assert ended(home, "to-bf16 c out --quiet", "<&- >&- 2>&-") == (0, "")
    for path in (home / "wanted").iterdir():
        assert (home / "out" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("ending", ["2> /dev/full", "2>&-"])
def test_notes_that_nobody_reads_end_no_work(home: Path, ending: str) -> None:
    assert ended(home, "slim c out --drop optimizer > told", ending) == (0, "")
    assert is_there(home, "slim") and "out" in (home / "told").read_text()


def test_an_error_where_stdout_is_full(home: Path) -> None:
    """It is the error that is said, and of the JSON nothing."""
    status, stderr = ended(home, "inspect nowhere --json", "> /dev/full")
    assert status == 2 and stderr.startswith("error: nowhere: no such file or directory") and "stdout" not in stderr
    status, stderr = ended(home, "inspect nowhere --json", "> told")
    assert status == 2 and json.loads((home / "told").read_text())["error"] == "not_a_checkpoint"

"""Progress for programs: JSON lines on stderr, as docs/schemas says."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from schemas import check
from typer.testing import CliRunner

from zckpt.base import progress
from zckpt.cli import app

CHECKPOINT = Path(__file__).parent.parent.parent / "fixtures" / "zero2" / "bf16_w2" / "checkpoint"


def lines_of(*words: object) -> list[dict[str, object]]:
    result = CliRunner().invoke(app, [*map(str, words), "--progress", "json"])
    assert result.exit_code == 0, result.output
    return [check("progress", line) for line in result.stderr.splitlines() if line.startswith("{")]


def test_every_long_command_says_how_far_it_is(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for words, label in (
        (("to-fp32", CHECKPOINT, out), "write"),
        (("verify", CHECKPOINT, out), "verify"),
        (("verify", CHECKPOINT, "--deep", "--quiet"), "verify"),
        (("diff", CHECKPOINT, out), "diff"),
        (("slim", CHECKPOINT, tmp_path / "slim", "--drop", "module-weights"), "write"),
        (("prune", tmp_path / "run", "--keep-last", 1, "--deep", "--yes"), "prune"),
    ):
        if label == "prune":
            import shutil

            for step in (1, 2):
                shutil.copytree(CHECKPOINT / "global_step2", tmp_path / "run" / f"global_step{step}")
        found = lines_of(*words)
        assert [line["ended"] for line in found][-2:] == [False, True] and {line["progress"] for line in found} == {
            label
        }
        assert found[-1]["done_bytes"] == found[-1]["total_bytes"] and found[-1]["done_bytes"], words
        assert found[-1]["seconds_left"] == 0
    assert subprocess.run([sys.executable, "-m", "zckpt", "verify", CHECKPOINT, "--json"], capture_output=True, text=True,
                          check=True).stderr == ""  # fmt: skip


def test_lines_come_at_most_twice_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    now = 0.0
    with progress.lines(None, "write", lambda: now) as watch:
        watch.expect(1000)
        for done in range(0, 1001, 10):
            now = done / 100
            watch.at(f"shard {done // 500}")
            watch(done)
    told = [json.loads(line) for line in sys.stderr.getvalue().splitlines()]
    assert len(told) == 22 and told[0]["total_bytes"] is None
    middle = told[10]
    assert middle["bytes_per_second"] == 100 and middle["seconds_left"] == pytest.approx(
        (1000 - middle["done_bytes"]) / 100
    )
    assert (told[1]["item"], told[-1]["item"], told[-1]["ended"]) == ("shard 0", "shard 2", True)

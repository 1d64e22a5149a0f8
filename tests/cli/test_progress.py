"""Progress for programs: JSON lines on stderr, as docs/schemas says."""

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from schemas import check
from typer.testing import CliRunner

from zckpt.base import progress
from zckpt.cli import app
from zckpt.cli.commands import COMMANDS

FIXTURES = Path(__file__).parent.parent.parent / "fixtures"
CHECKPOINT = FIXTURES / "zero2" / "bf16_w2" / "checkpoint"


def lines_of(*words: object) -> list[dict[str, object]]:
    result = CliRunner().invoke(app, [*map(str, words), "--progress", "json"])
    assert result.exit_code == 0, result.output
    return [check("progress", line) for line in result.stderr.splitlines() if line.startswith("{")]


LLAMA, OTHER, LORA, GGUF = "transformers/llama_zero3", "transformers/llama_zero2", "peft/lora_zero3", "gguf/llama"
LONG = (
    ("to-fp32 ZERO out", "write"),
    ("to-fp16 ZERO out", "write"),
    ("to-bf16 LORA out --merge-lora --base BASE", "write"),
    ("to-dcp ZERO out --optimizer optim", "write"),
    ("to-mcore LLAMA out", "write"),
    ("to-peft LORA out", "write"),
    ("to-fp8 LLAMA out", "write"),
    ("quantize LLAMA out --to int8", "write"),
    ("to-mlx MODEL out --bits 8", "write"),
    ("to-gguf MODEL out.gguf --pre-tokenizer llama-bpe", "write"),
    ("reshard ZERO out --world-size 3", "write"),
    ("to-universal ZERO out", "write"),
    ("to-states ZERO out", "write"),
    ("average LLAMA OTHER out", "write"),
    ("average LLAMA OTHER out --slerp 0.3", "write"),
    ("slim ZERO out --drop module-weights", "write"),
    ("delta LLAMA OTHER DELTA", "compare"),
    ("apply LLAMA DELTA out", "write"),
    ("verify ZERO --deep --quiet", "verify"),
    ("verify ZERO CONVERTED", "verify"),
    ("diff ZERO CONVERTED", "diff"),
    ("prune RUN --keep-last 1 --deep --yes", "prune"),
)
"""Calls of every command that works for long, and what their progress is called. tests/hub has that of push."""


def test_every_long_command_says_how_far_it_is(tmp_path: Path) -> None:
    places = {
        "ZERO": CHECKPOINT, "LLAMA": FIXTURES / LLAMA / "checkpoint", "OTHER": FIXTURES / OTHER / "checkpoint",
        "LORA": FIXTURES / LORA / "checkpoint", "BASE": FIXTURES / LORA / "base", "MODEL": FIXTURES / GGUF / "model",
        "DELTA": tmp_path / "delta", "CONVERTED": tmp_path / "0", "RUN": tmp_path / "run",
    }  # fmt: skip
    for step in (1, 2):
        shutil.copytree(CHECKPOINT / "global_step2", tmp_path / "run" / f"global_step{step}")
    for number, (call, label) in enumerate(LONG):
        places |= {"out": tmp_path / str(number), "out.gguf": tmp_path / f"{number}.gguf"}
        found = lines_of(*(places.get(word, word) for word in call.split()))
        assert [line["ended"] for line in found][-2:] == [False, True], call
        assert {line["progress"] for line in found} == {label}, call
        assert found[-1]["done_bytes"] == found[-1]["total_bytes"] and found[-1]["done_bytes"], call
        assert found[-1]["seconds_left"] == 0
    commands: Any = typer.main.get_command(app)
    shown = {n for n in COMMANDS if any(p.name == "progress_form" for p in commands.get_command(None, n).params)}
    assert shown - {"push", "convert"} == {call.split()[0] for call, _ in LONG}
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

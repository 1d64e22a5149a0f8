"""Bars in a terminal: as wide as it is, in colours there, and nowhere else."""

from __future__ import annotations

import io
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from zckpt.pictures.checkpoint_map import checkpoint_map
from zckpt.pictures.terminal import can_draw, draw, picture

FIXTURES = Path(__file__).parent.parent.parent / "fixtures"
WORDS = ("zero3/w12", "pipeline/zero1_pp2_tp2_dp2", "dcp/boxes_w4", "moe/tensor_w4", "mcore/stages_tp2_pp2")


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("width", [72, 100, 160])
def test_lines_fit_and_bars_are_to_scale(name: str, width: int) -> None:
    found = checkpoint_map(FIXTURES / name / "checkpoint")
    for contents in (None, found.contents()):
        lines = ["".join(text for text, _ in line).rstrip() for line in picture(found.grid, width, contents, lead="  ")]
        assert max(map(len, lines)) <= width
        assert width < 100 or max(map(len, lines)) > width * 0.55
    if name == "zero3/w12":
        bars = [part for line in lines if "rank 0 " in line for part in line.split() if part[0] == "█"]
        sizes = [file.nbytes for file in found.grid.files[:2]]
        assert abs(len(bars[0]) / len(bars[1]) - sizes[0] / sizes[1]) < 0.12


def test_of_many_ranks_the_first_are_shown_and_all_that_are_wrong(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "zero3" / "w12" / "checkpoint", tmp_path / "a")
    folder = next((tmp_path / "a").glob("global_step*"))
    for rank in range(12, 40):
        for kind, prefix in (("model", ""), ("optim", "bf16_")):
            shutil.copy(
                folder / f"{prefix}zero_pp_rank_{rank % 12}_mp_rank_00_{kind}_states.pt",
                folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt",
            )
    (folder / "bf16_zero_pp_rank_9_mp_rank_00_optim_states.pt").unlink()
    lines = ["".join(text for text, _ in line) for line in picture(checkpoint_map(tmp_path / "a").grid, 100)]
    assert len(lines) < 24 and any("more rows" in line for line in lines)
    assert next(line for line in lines if "rank 9" in line).rstrip().endswith("missing")


def test_without_a_terminal_there_are_no_colours_and_perhaps_no_blocks() -> None:
    lines = picture(checkpoint_map(FIXTURES / "zero3" / "w12" / "checkpoint").grid, 80)
    for encoding, block in (("utf-8", "█"), ("ascii", "#")):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        assert not can_draw(stream, 200)
        draw(lines, stream)
        stream.flush()
        text = stream.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
        assert block in text and "\x1b" not in text


def test_a_name_does_not_steer_the_terminal(tmp_path: Path) -> None:
    shutil.copy(FIXTURES / "gguf" / "llama" / "model" / "model.safetensors", tmp_path / "a\x1b[31mb\u202e.safetensors")
    found = checkpoint_map(tmp_path / "a\x1b[31mb\u202e.safetensors")
    text = "\n".join(text for line in picture(found.grid, 100, found.contents()) for text, _ in line)
    assert "\x1b" not in text and "\u202e" not in text and r"a\x1b[31mb\u202e.safe" in text


def test_inspect_draws_on_a_terminal_only() -> None:
    code = "import sys; from zckpt.cli import main\ntry: main()\nfinally: sys.stderr.write(' '.join(sys.modules))"
    command = [sys.executable, "-c", code, "inspect", str(FIXTURES / "zero3" / "w12" / "checkpoint")]
    piped = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "rank 0  " not in piped.stdout and "\x1b" not in piped.stdout
    assert not {"rich", "zckpt.pictures", "webbrowser"} & {*piped.stderr.split()}
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "100", "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL, env=environment) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:
                break
            if not part:
                break
            shown += part
    os.close(ours)
    assert process.returncode == 0
    drawn = shown.decode()
    assert drawn.replace("\r\n", "\n").startswith(piped.stdout[:200]) and "\x1b[" in drawn
    assert "rank 11" in drawn and "█" in drawn

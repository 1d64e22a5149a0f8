"""Names of files and tensors that a terminal would obey, and pipes in the places of files."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import zckpt
from zckpt import Options
from zckpt.base.errors import ZckptError
from zckpt.base.words import escape_controls
from zckpt.cli import main

SAVE = Path(__file__).parents[2] / "fixtures" / "zero2" / "bf16_w2" / "checkpoint"


@pytest.mark.parametrize("code", ["\x1b[31m", "\x07", "\r", "\x9b2J", "\u202e", "\x7f"])
def test_no_code_in_a_name_reaches_a_terminal(
    code: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"a{code}b.safetensors"
    save_file({f"w{code}.weight": torch.ones(3)}, path)
    for words in (["inspect", str(path), "--tensors"], ["verify", str(path)], ["inspect", f"{path}.none"]):
        monkeypatch.setattr("sys.argv", ["zckpt", *words])
        with pytest.raises(SystemExit):
            raise SystemExit(main())
        shown = "".join(capfd.readouterr())
        assert shown and not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", shown)
        assert repr(code)[1:-1] in shown or code == "\r"  # which wrapping makes a blank


def test_what_can_be_printed_stays() -> None:
    assert escape_controls("Gewichte für 模型 ─\n") == "Gewichte für 模型 ─\n"
    assert escape_controls("a\x1b[0m") == r"a\x1b[0m"


@pytest.mark.parametrize("name", ["latest", "global_step2/mp_rank_00_model_states.pt"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(name: str, tmp_path: Path) -> None:
    home = tmp_path / "save"
    shutil.copytree(SAVE, home)
    (home / name).unlink()
    os.mkfifo(home / name)
    with pytest.raises(ZckptError):
        zckpt.convert(home, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["out.safetensors", "out"])
def test_a_pipe_in_the_place_of_the_output_stays(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    for options in (Options(), Options(overwrite=True)):
        with pytest.raises(zckpt.OutputError, match="pipe"):
            zckpt.convert(SAVE, tmp_path / name, options=options, progress=False)
    assert (tmp_path / name).is_fifo() and len(list(tmp_path.iterdir())) == 1

"""Tensors that keep their dtype: which do, what verify says of it, and that a pattern for none is an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

import zckpt
from zckpt.cli import app

CHECKPOINT = Path(__file__).parents[2] / "fixtures" / "transformers" / "llama_zero2" / "checkpoint"


def write(out: Path, dtype: str, *keep: str) -> Path:
    zckpt.convert(CHECKPOINT, out, dtype=dtype, options=zckpt.Options(keep_dtype=keep), progress=False)
    return out


def test_what_matches_is_bit_for_bit_the_checkpoint_and_the_rest_as_asked(tmp_path: Path) -> None:
    whole, half = (load_file(write(tmp_path / f"{dtype}.safetensors", dtype)) for dtype in ("fp32", "fp16"))
    mixed = load_file(write(tmp_path / "mixed.safetensors", "fp16", "*norm*", "*.q_proj.*"))
    kept = {name for name in mixed if "norm" in name or ".q_proj." in name}
    assert kept and kept != mixed.keys() == whole.keys()
    for name, values in mixed.items():
        wanted = (whole if name in kept else half)[name]
        assert (values.dtype, values.tobytes()) == (wanted.dtype, wanted.tobytes()), name


def test_verify_accepts_it_and_rejects_one_that_was_cast(tmp_path: Path) -> None:
    mixed, wrong = write(tmp_path / "mixed", "fp16", "*norm*"), write(tmp_path / "wrong", "fp16")
    assert zckpt.verify(CHECKPOINT, mixed, progress=False).ok
    recorded = json.loads((mixed / "zckpt.json").read_text())
    assert recorded["options"]["keep_dtype"] == ["*norm*"]
    facts = json.loads((wrong / "zckpt.json").read_text())
    assert "keep_dtype" not in facts["options"]
    for out, options in ((wrong, recorded["options"]), (mixed, facts["options"])):
        claimed = json.loads((out / "zckpt.json").read_text())
        (out / "zckpt.json").write_text(json.dumps({**claimed, "options": options}))
        found = zckpt.verify(CHECKPOINT, out, progress=False)
        assert not found.ok and any("norm" in line and "is F" in line for line in found.lines())


def test_a_pattern_that_matches_no_tensor_is_an_error(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["to-bf16", str(CHECKPOINT), str(tmp_path / "out"), "--keep-dtype", "nothing*"])
    assert isinstance(shown.exception, zckpt.UsageError) or shown.exit_code == 2
    with pytest.raises(zckpt.UsageError, match=r"--keep-dtype 'nothing\*' matches no tensor"):
        write(tmp_path / "out", "bf16", "*norm*", "nothing*")
    assert not (tmp_path / "out").exists()


def test_jobs_that_have_no_use_for_it_refuse_it(tmp_path: Path) -> None:
    with pytest.raises(zckpt.UsageError, match="keep_dtype has no meaning for to_gguf"):
        zckpt.to_gguf(CHECKPOINT, tmp_path / "out.gguf", options=zckpt.Options(keep_dtype=["*norm*"]), progress=False)

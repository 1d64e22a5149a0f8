"""Conversions like a model that is there: its dtypes, its files; what only one of the two has; what verify says of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from bits import same_bits
from safetensors.torch import load_file, save_file

import zckpt

CHECKPOINT = Path(__file__).parents[2] / "fixtures" / "transformers" / "llama_zero2" / "checkpoint"
FILES = ("model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    out = tmp_path_factory.mktemp("whole") / "w.safetensors"
    zckpt.convert(CHECKPOINT, out, progress=False)
    return load_file(out)


def base_of(whole: dict[str, torch.Tensor], path: Path, *, leave: str = "", more: str = "") -> Path:
    """A model in three files, dealt out in turn, with norms in fp32 and the rest in bf16."""
    path.mkdir()
    names = [name for name in sorted(whole) if name != leave] + ([more] if more else [])
    where = {name: FILES[n % 3] for n, name in enumerate(names)}
    for file in FILES:
        own = {name: torch.zeros_like(whole.get(name, torch.ones(2))) for name in names if where[name] == file}
        save_file({n: t if "norm" in n else t.bfloat16() for n, t in own.items()}, path / file, {"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(CHECKPOINT.parent / "checkpoint/config.json", path) if (CHECKPOINT / "config.json").exists() else None
    return path


def test_dtypes_and_files_are_the_models(whole: dict[str, torch.Tensor], tmp_path: Path) -> None:
    base, out = base_of(whole, tmp_path / "base"), tmp_path / "out"
    zckpt.convert(CHECKPOINT, out, dtype="fp16", options=zckpt.Options(like=base), progress=False)
    own, wanted = (json.loads((d / "model.safetensors.index.json").read_text())["weight_map"] for d in (out, base))
    assert own == wanted
    for file in FILES:
        found, theirs = load_file(out / file), load_file(base / file)
        assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in theirs.items()}
        assert all(same_bits(t, whole[n].to(t.dtype)) for n, t in found.items())
    assert zckpt.verify(CHECKPOINT, out, progress=False).ok
    manifest = json.loads((out / "zckpt.json").read_text())
    assert "base" not in json.dumps(manifest["options"]["like"])  # no path of this machine
    manifest["options"].pop("like")
    (out / "zckpt.json").write_text(json.dumps(manifest))
    assert not zckpt.verify(CHECKPOINT, out, progress=False).ok


def test_an_index_alone_says_the_files(whole: dict[str, torch.Tensor], tmp_path: Path) -> None:
    base = base_of(whole, tmp_path / "base")
    for file in FILES:
        (base / file).unlink()
    for like in (base, base / "model.safetensors.index.json"):
        zckpt.convert(
            CHECKPOINT, tmp_path / "out", dtype="bf16", overwrite=True, options=zckpt.Options(like=like), progress=False
        )
        assert {t.dtype for file in FILES for t in load_file(tmp_path / "out" / file).values()} == {torch.bfloat16}


def test_what_only_one_of_the_two_has_is_said(whole: dict[str, torch.Tensor], tmp_path: Path) -> None:
    base = base_of(whole, tmp_path / "base", leave="model.norm.weight", more="extra.weight")
    report = zckpt.convert(CHECKPOINT, tmp_path / "out", options=zckpt.Options(like=base), progress=False)
    notes = " ".join(report.notes)
    assert "lacks 1 tensor that is written: 'model.norm.weight'" in notes
    assert "extra.weight" in notes
    assert same_bits(load_file(tmp_path / "out" / FILES[-1])["model.norm.weight"], whole["model.norm.weight"])


def test_what_is_no_model_is_refused(whole: dict[str, torch.Tensor], tmp_path: Path) -> None:
    (tmp_path / "i.index.json").write_text('{"weight_map": {"a": "../../x.safetensors"}}')
    for like in (tmp_path / "i.index.json", CHECKPOINT, tmp_path / "none"):
        with pytest.raises(zckpt.ZckptError):
            zckpt.convert(CHECKPOINT, tmp_path / "out", options=zckpt.Options(like=like), progress=False)
    assert not (tmp_path / "out").exists()
    one = tmp_path / "one.safetensors"
    zckpt.convert(CHECKPOINT, one, options=zckpt.Options(like=base_of(whole, tmp_path / "base")), progress=False)
    assert {n: t.dtype for n, t in load_file(one).items() if "norm" not in n}.popitem()[1] == torch.bfloat16

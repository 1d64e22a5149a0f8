"""A package outside zckpt adds a layout and a scheme by entry points: examples/zckpt-rows, installed as its users install it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import small_llama
import torch
from bits import same_bits
from hangs import HANG_S
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parent.parent
OF_DEEPSPEED = ROOT / "fixtures/zero3/bf16_w2/checkpoint"
LOOK = """
import sys
from zckpt.cli import main
try:
    main()
finally:
    print("imported", sorted(name for name in sys.modules if name.startswith("zckpt_rows")), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the package in it."""
    source, target = tmp_path_factory.mktemp("source") / "zckpt-rows", tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "examples/zckpt-rows", source)  # setuptools writes into it
    words = ["install", "-q", "--no-index", "--no-deps", "--no-build-isolation", "--target", target, source]
    subprocess.run([sys.executable, "-m", "pip", *map(str, words)], check=True, timeout=HANG_S)
    return target


def said(site: Path, *words: object, rc: int = 0, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-c", LOOK, *map(str, words)], env={**os.environ, "PYTHONPATH": f"{site}:{ROOT}"},
        capture_output=True, text=True, timeout=HANG_S, cwd=cwd,
    )  # fmt: skip
    assert done.returncode == rc, done.stdout + done.stderr
    return done.stdout + done.stderr


def write(directory: Path, tensors: dict[str, torch.Tensor], ranks: int) -> Path:
    """A save as the package's trainer writes it."""
    directory.mkdir(parents=True)
    shapes = json.dumps({name: list(tensor.shape) for name, tensor in tensors.items()})
    for rank in range(ranks):
        part = {name: tensor.tensor_split(ranks)[rank].contiguous() for name, tensor in tensors.items()}
        save_file(part, directory / f"rows-{rank}-of-{ranks}.safetensors", metadata={"shapes": shapes})
    return directory


def test_every_bit_comes_back_and_a_second_reader_agrees(site: Path, tmp_path: Path) -> None:
    model = {"a.weight": torch.randn(7, 3), "b.weight": torch.randn(7, 3), "c": torch.randn(2)}
    save, out = write(tmp_path / "run" / "step-7", model, 3), tmp_path / "out.safetensors"
    assert "rows" in said(site, "to-fp32", tmp_path / "run", out)
    assert all(same_bits(tensor, model[name]) for name, tensor in load_file(out).items())
    assert "Safe to delete" in said(site, "verify", save, out, "--deep")
    swapped = load_file(out)
    save_file({**swapped, "a.weight": swapped["b.weight"].clone()}, out)
    assert "Do not delete" in said(site, "verify", save, out, "--deep", rc=1)
    (save / "rows-1-of-3.safetensors").unlink()
    assert "rank 1" in said(site, "to-fp32", save, tmp_path / "other.safetensors", rc=2)


def test_its_names_are_written_and_read(site: Path, tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    model = {name: torch.randn(shape) for name, shape in small_llama.SHAPES.items()}
    save_file(model, tmp_path / "llama/model.safetensors")
    (tmp_path / "llama/config.json").write_text(json.dumps(small_llama.CONFIG))
    said(site, "to-dcp", tmp_path / "llama", tmp_path / "rows", "--names", "rows")
    said(
        site,
        "to-fp32",
        tmp_path / "rows",
        tmp_path / "back",
        "--to",
        "hf:llama",
        "--config",
        tmp_path / "llama/config.json",
    )
    back = load_file(tmp_path / "back/model.safetensors")
    assert back.keys() == model.keys() and all(same_bits(back[name], model[name]) for name in model)


def test_its_quantised_weights_are_numbers_everywhere(site: Path, tmp_path: Path) -> None:
    steps, sizes = torch.randint(0, 256, (5, 8), dtype=torch.uint8), torch.rand(5) / 64
    save_file({"a_steps": steps, "a_size": sizes, "b": torch.ones(3)}, tmp_path / "model.safetensors")
    out = tmp_path / "out"
    told = said(site, "to-fp32", tmp_path / "model.safetensors", out)
    found = load_file(out / "model.safetensors")
    assert found.keys() == {"a", "b"} and same_bits(found["a"], (steps.float() - 128) * sizes[:, None]), told
    assert "zckpt_rows.steps" in told and "bytes of zckpt-rows" in said(site, "inspect", tmp_path / "model.safetensors")
    said(
        site, "verify", tmp_path / "model.safetensors", out, "--deep", rc=1
    )  # one file does not say what its model has
    found["a"][0, 0] += 1
    save_file(found, out / "model.safetensors")
    assert "'a'" in said(site, "verify", tmp_path / "model.safetensors", out, "--deep", rc=1)
    broken = tmp_path / "site"
    shutil.copytree(site, broken)
    text = (broken / "zckpt_rows/steps.py").read_text()
    (broken / "zckpt_rows/steps.py").write_text(text.replace(", again=again", ""))
    assert "without a second one" in " ".join(said(broken, "inspect", tmp_path / "model.safetensors", rc=1).split())


def test_nothing_of_it_is_imported_for_other_saves(site: Path, tmp_path: Path) -> None:
    save = write(tmp_path / "save", {"a": torch.randn(4, 2)}, 2)
    assert "imported []" in said(site, "inspect", OF_DEEPSPEED)
    assert "zckpt_rows.layout" in said(site, "inspect", save) and "zckpt_rows.second" not in said(site, "inspect", save)
    assert "zckpt-rows 1.0" in said(site, "formats").replace("_", "-")


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("raise RuntimeError('of no use')", "RuntimeError: of no use"),
        ("FAMILY = 3", "is a int, and no Family"),
        ("", "has no attribute 'FAMILY'"),
    ],
)
def test_a_broken_package_is_named(site: Path, tmp_path: Path, fault: str, told: str) -> None:
    broken = tmp_path / "site"
    shutil.copytree(site, broken)
    (broken / "zckpt_rows/layout.py").write_text(fault)
    save = write(tmp_path / "save", {"a": torch.randn(4, 2)}, 2)
    found = " ".join(said(broken, "inspect", save, rc=2).split())
    assert "zckpt_rows 1.0" in found and told in found and "pip uninstall zckpt_rows" in found
    said(broken, "inspect", OF_DEEPSPEED)  # which is not its


def test_a_broken_scheme_is_named(site: Path, tmp_path: Path) -> None:
    broken = tmp_path / "site"
    shutil.copytree(site, broken)
    (broken / "zckpt_rows/rows.json").write_text("{")
    assert "zckpt_rows 1.0" in said(broken, "formats", rc=2)


def test_a_package_in_the_current_directory_does_not_count(site: Path, tmp_path: Path) -> None:
    save = write(tmp_path / "save", {"a": torch.randn(4, 2)}, 2)
    shutil.copytree(site, save, dirs_exist_ok=True)
    assert "imported []" in said(ROOT, "formats", cwd=save)
    assert "zckpt-rows" not in said(save, "formats", cwd=save).replace("_", "-")

"""docs/extending.md: the layout and the test that it prints work as they are printed, with nothing else."""

from __future__ import annotations

import inspect
import re
import sys
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from bits import same_bits

import zckpt
from zckpt import layouts
from zckpt.checks.verify import verify

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/extending.md").read_text(), re.DOTALL)
FIXTURE = ROOT / "fixtures/parts"


def module_of(name: str, code: str) -> ModuleType:
    made = ModuleType(name)
    exec(compile(code, f"docs/extending.md: {name}", "exec"), made.__dict__)
    return made


def test_what_the_page_names_is_there() -> None:
    text = (ROOT / "docs/extending.md").read_text()
    named = [path for path in re.findall(r"`((?:zckpt|tests|fixtures)/[\w./]+)`", text) if "flat_shards" not in path]
    assert len(named) > 12
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The family of the page, as its line adds it."""
    family = module_of("zckpt.layouts.flat_shards", BLOCKS[0])
    monkeypatch.setitem(sys.modules, "zckpt.layouts.flat_shards", family)
    monkeypatch.setattr(layouts, "flat_shards", family, raising=False)
    families: dict[str, Any] = {}
    exec(BLOCKS[1], dict(vars(layouts)), families)
    assert families["FAMILIES"][1:] == layouts.FAMILIES
    monkeypatch.setattr(layouts, "FAMILIES", families["FAMILIES"])
    return family


@pytest.fixture
def template() -> ModuleType:
    return module_of("test_flat_shards", BLOCKS[2])


def test_the_test_of_the_page_passes(installed: ModuleType, template: ModuleType, tmp_path: Path) -> None:
    tests = {name: test for name, test in vars(template).items() if name.startswith("test_")}
    assert len(tests) == 3
    for name, test in tests.items():
        marks = [mark.args for mark in getattr(test, "pytestmark", ())]
        for number, values in enumerate(product(*(choices for _, choices in marks))):
            place = tmp_path / f"{name}-{number}"
            place.mkdir()
            test(place, **dict(zip((argument for argument, _ in marks), values, strict=True)))
            assert "tmp_path" in inspect.signature(test).parameters


def test_it_reads_what_the_real_framework_wrote(installed: ModuleType) -> None:
    roots = [torch.load(FIXTURE / f"checkpoint-shard{rank}.pt") for rank in range(2)]
    flat = torch.cat([root["model"]["0.flat_param_0"] for root in roots])
    with zckpt.open_checkpoint(FIXTURE / "checkpoint-shard1.pt") as checkpoint:
        assert {name: tuple(checkpoint[name].shape) for name in checkpoint} == {
            "1.weight": (3, 5), "1.bias": (3,), "0.0.weight": (5, 6), "0.0.bias": (5,), "0.1.weight": (5,), "0.1.bias": (5,)
        }  # fmt: skip
        named = [checkpoint[name].reshape(-1) for name in checkpoint if name.startswith("0.")]
    assert same_bits(torch.cat(named), flat[:45])


def test_inspect_and_verify_know_its_files(installed: ModuleType, template: ModuleType, tmp_path: Path) -> None:
    save = template.write(tmp_path / "save", 3)
    zckpt.convert(save, tmp_path / "out.safetensors")
    assert verify(str(save), str(tmp_path / "out.safetensors"), deep=True).ok
    assert any("ranks 0-2  1 data file" in line for line in zckpt.inspect_checkpoint(save).lines())
    (save / "checkpoint-shard1.pt").unlink()
    found = zckpt.inspect_checkpoint(save)
    assert not found.exportable.ok
    assert [found.grid[0][rank]["shard"].state for rank in range(3)] == ["ok", "missing", "ok"]
    assert not verify(str(save)).ok

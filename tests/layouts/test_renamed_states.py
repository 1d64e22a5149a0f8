"""State dicts under other names than the parameters', of several pipeline stages, slices and experts: read right, or refused."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bits import same_bits
from safetensors.torch import load_file

import zckpt
from zckpt.base.errors import IncompleteError, InconsistentError, ZckptError

FIXTURES = Path(__file__).parents[2] / "fixtures"


def with_prefix(name: str) -> str:
    return f"wrapped.{name}"


def with_wrapper(name: str) -> str:
    """As torch.compile and CheckpointWrapper put a part of their own into a name."""
    before, dot, last = name.rpartition(".")
    return f"{before}{dot}_orig_mod.{last}"


def with_other_words(name: str) -> str:
    return name.replace("weight", "kernel").replace("bias", "shift")


Rename = Callable[[str], str]
READ: list[tuple[str, Rename]] = [
    ("tensor/zero1_tp2_dp2", with_prefix),
    ("tensor/zero1_tp2_dp2", with_other_words),
    ("tensor/zero0_tp2", with_wrapper),
    ("tensor/zero3_tp2_dp2", with_prefix),
    ("pipeline/zero0_pp2", with_wrapper),
    ("moe/zero0_w2", with_wrapper),
]
REFUSED: list[tuple[str, Rename, type[ZckptError], str]] = [
    ("tensor/zero0_tp2", with_prefix, InconsistentError, "no pattern .*'wrapped"),
    ("pipeline/zero1_pp2_dp2", with_prefix, IncompleteError, "state dicts have other names than their parameters"),
    ("pipeline/zero1_pp2_tp2_dp2", with_wrapper, IncompleteError, "state dicts have other names than their parameters"),
    ("moe/zero1_w4", with_prefix, InconsistentError, "'wrapped.*other names|other names.*'wrapped"),
    ("moe/zero1_w4", with_wrapper, InconsistentError, r"experts\.0\.up\.weight"),
    ("moe/zero1_w4", with_other_words, InconsistentError, "other names than its parameters.*kernel"),
    ("moe/pipeline_pp2_dp2", with_other_words, InconsistentError, "other names than its parameters.*kernel"),
]


def renamed(home: Path, fixture: str, rename: Rename) -> Path:
    """The fixture, with other names in every state dict of the model."""
    shutil.copytree(FIXTURES / fixture / "checkpoint", home)
    for path in home.rglob("*model_states.pt"):
        state = torch.load(path, weights_only=False)
        if isinstance(state.get("module"), dict):
            state["module"] = OrderedDict((rename(name), value) for name, value in state["module"].items())
        elif path.name.startswith("layer_"):
            state = OrderedDict((rename(name), value) for name, value in state.items())
        torch.save(state, path)
    return home


@pytest.mark.parametrize(("fixture", "rename"), READ)
def test_it_is_read_as_without_other_names(fixture: str, rename: Rename, tmp_path: Path) -> None:
    zckpt.convert(renamed(tmp_path / "run", fixture, rename), tmp_path / "out.safetensors", progress=False)
    zckpt.convert(FIXTURES / fixture / "checkpoint", tmp_path / "usual.safetensors", progress=False)
    found, wanted = load_file(tmp_path / "out.safetensors"), load_file(tmp_path / "usual.safetensors")
    assert found.keys() == wanted.keys()
    assert all(same_bits(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize(("fixture", "rename", "kind", "words"), REFUSED)
def test_it_is_refused(fixture: str, rename: Rename, kind: type[ZckptError], words: str, tmp_path: Path) -> None:
    with pytest.raises(kind, match=f"(?s){words}"):
        zckpt.convert(renamed(tmp_path / "run", fixture, rename), tmp_path / "out.safetensors", progress=False)
    assert not (tmp_path / "out.safetensors").exists()

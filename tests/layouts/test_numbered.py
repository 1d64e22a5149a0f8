"""Weights with an optimizer's files beside them: of OSS, of ZeroRedundancyOptimizer, and of any optimizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import same_bits
from damage import forget_name
from safetensors.torch import load_file, save_file

import zckpt
from zckpt import layouts
from zckpt.base.errors import IncompleteError, UnsupportedError
from zckpt.jobs.groups import Reading
from zckpt.jobs.inspection import inspect_checkpoint
from zckpt.jobs.open import open_catalog, read_tensor
from zckpt.layouts.numbered.read import _placed_on_ranks
from zckpt.layouts.run.numbering import positions
from zckpt.layouts.save.listing import ReadOptions

FIXTURES = Path(__file__).parents[2] / "fixtures" / "optimizers"
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/facts.json"))


def place_of(name: str, file: bool) -> Path:
    home = FIXTURES / name / "checkpoint"
    return home / "checkpoint.pt" if file or name == "zero_whole_w2" else home


@pytest.mark.parametrize("file", [False, True], ids=["directory", "file"])
@pytest.mark.parametrize("name", NAMES)
def test_states_have_names(name: str, file: bool) -> None:
    how = json.loads((FIXTURES / name / "facts.json").read_text())
    opened = open_catalog(str(place_of(name, file)))
    catalog, truth = opened.catalog, load_file(FIXTURES / name / "truth.safetensors")
    assert {*catalog.tensors, *catalog.aliases} == truth.keys() and catalog.aliases == {"head.weight": "embed.weight"}
    assert [n for n in truth if not same_bits(read_tensor(catalog[n], "pt"), truth[n])] == []
    assert {n: e.role for n, e in catalog.tensors.items()} == {n: how["roles"][n] for n in catalog.tensors}
    training = layouts.read_training(opened.place.listing)
    found = {f"{state}/{n}": e for n, own in training.states.items() for state, e in own.items()}
    states = load_file(FIXTURES / name / "optimizer.safetensors")
    assert found.keys() == states.keys()
    assert [key for key in states if not same_bits(read_tensor(found[key], "pt"), states[key])] == []
    assert [list(group.names) for group in training.groups] == how["groups"]
    assert training.model["global_steps"] == catalog.source.global_steps == 2 and training.model["epoch"] == 3


def test_outputs_have_the_states_and_are_verified(tmp_path: Path) -> None:
    source = FIXTURES / "zero_ranks_w2" / "checkpoint"
    zckpt.convert(source, tmp_path / "out")
    assert zckpt.verify(source, tmp_path / "out", deep=True).ok
    zckpt.to_dcp(source, tmp_path / "dcp", optimizer="optim")
    here, there = (open_catalog(str(path)) for path in (source, tmp_path / "dcp"))
    ours, theirs = (layouts.read_training(opened.place.listing).states for opened in (here, there))
    assert ours.keys() == theirs.keys() and len(ours) == 10
    for parameter, states in ours.items():
        for state, entry in states.items():
            assert same_bits(read_tensor(entry, "pt"), read_tensor(theirs[parameter][state], "pt"))
    zckpt.reshard(source, tmp_path / "zero", world_size=2)
    assert zckpt.verify(source, tmp_path / "zero").ok


def test_a_trainers_folder(tmp_path: Path) -> None:
    """model.safetensors and optimizer.pt, as transformers' Trainer has them: weights decay, biases and norms do not."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3))
    groups = [[p for p in model.parameters() if p.dim() == 2], [p for p in model.parameters() if p.dim() == 1]]
    optimizer = torch.optim.AdamW([{"params": own} for own in groups])
    model(torch.randn(4, 5)).square().mean().backward()
    optimizer.step()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    torch.save({"last_epoch": 1}, tmp_path / "scheduler.pt")
    refused(tmp_path, "order")  # safetensors has its tensors sorted by name
    shapes = tmp_path / "shapes.json"
    shapes.write_text(json.dumps({name: list(p.shape) for name, p in model.named_parameters()}))
    opened = open_catalog(str(tmp_path), Reading(read_options=ReadOptions(shapes=str(shapes))))
    training = layouts.read_training(opened.place.listing)
    for name, parameter in model.named_parameters():
        assert same_bits(read_tensor(training.states[name]["exp_avg"], "pt"), optimizer.state[parameter]["exp_avg"])


# -- what is wrong ---------------------------------------------------------------------------------------------------


def copy_of(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / name / "checkpoint", tmp_path / name))


def changed(path: Path, change: Callable[[Any], object]) -> None:
    root = torch.load(path, weights_only=False)
    change(root)
    torch.save(root, path)


def refused(home: Path, match: str, kind: type[Exception] = UnsupportedError) -> None:
    opened = open_catalog(str(home))
    assert any("not read" in note for note in opened.catalog.source.notes)
    with pytest.raises(kind, match=match):
        layouts.read_training(opened.place.listing)
    assert "that zckpt does not read" in inspect_checkpoint(str(home)).resumable.reason


def test_a_missing_rank(tmp_path: Path) -> None:
    """The weights are whole without it."""
    home = copy_of("oss_ranks_w3", tmp_path)
    (home / "optimizer_rank1.pt").unlink()
    refused(home, r"\(rank 1\)", IncompleteError)
    shutil.copy(FIXTURES / "oss_ranks_w3/checkpoint/optimizer_rank1.pt", home)
    (home / "optimizer_rank2.pt").unlink()  # nothing says how many there were: the parameters do not add up
    refused(home, "no way")


def test_a_rank_of_another_run(tmp_path: Path) -> None:
    home = copy_of("oss_ranks_w3", tmp_path)
    shutil.copy(home / "optimizer_rank0.pt", home / "optimizer_rank1.pt")
    forget_name(home / "optimizer_rank1.pt")
    refused(home, "no way")
    shutil.copy(FIXTURES / "zero_ranks_w2/checkpoint/optimizer_rank1.pt", home)
    refused(home, "same groups")


def test_a_state_of_another_shape(tmp_path: Path) -> None:
    home = copy_of("oss_whole_w2", tmp_path)
    changed(home / "optimizer.pt", lambda root: root["state"][3].update(exp_avg_sq=torch.ones(2)))
    opened = open_catalog(str(home))
    with pytest.raises(UnsupportedError, match="another shape"):
        layouts.read_training(opened.place.listing)


def test_files_that_are_no_optimizer(tmp_path: Path) -> None:
    home = copy_of("oss_whole_w2", tmp_path)
    torch.save({"state": {}}, home / "optimizer.pt")
    verdict = inspect_checkpoint(str(home / "checkpoint.pt")).resumable
    assert not verdict.ok and "'optimizer.pt'" in verdict.reason
    (home / "optimizer.pt").write_bytes(b"PK\x03\x04 damaged")
    zckpt.convert(home / "checkpoint.pt", tmp_path / "out.safetensors")


# -- the numbers -----------------------------------------------------------------------------------------------------


def test_positions() -> None:
    a, b, c = (2, 3), (3,), (4,)
    assert positions([a, b, a, b], [[a, b, a, b]]) == [[0, 1, 2, 3]]
    assert positions([a, b, a, b], [[b, b], [a, a]]) == [[1, 3], [0, 2]]
    assert positions([a, b, a, b], [[a, None, a, b]]) == [[0, 1, 2, 3]]
    assert positions([a, b, c], [[a, c]]) == [[0, 2]]
    assert positions([a, a], [[a], [a]]) is None  # either may be in either group
    assert positions([a, a, b], [[a, b]]) is None  # either may be left out
    assert positions([a, b], [[b, a]]) is None
    assert positions([a], [[a, b]]) is None
    many = [[(n % 7, 3)] for n in range(3000)]
    assert positions([shape for (shape,) in many], [[shape for (shape,) in many]]) == [list(range(3000))]


def test_parts_are_those_of_the_ranks() -> None:
    """The same sizes in both orders give another partition; equal ones the same."""
    shapes = [(1,), (5,), (2,), (4,)]
    in_order = [[[(1,), (2,), (4,)]], [[(5,)]]]
    by_size = [[[(5,), (1,)]], [[(4,), (2,)]]]
    assert _placed_on_ranks(shapes, in_order) == [[(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 0, 2)]]
    assert _placed_on_ranks(shapes, by_size) == [[(0, 0, 1), (1, 0, 0), (2, 1, 1), (3, 1, 0)]]
    assert _placed_on_ranks(shapes, [[[(5,), (2,)]], [[(4,), (1,)]]]) is None
    assert _placed_on_ranks([(2,), (2,)], [[[(2,)]], [[(2,)]]]) == [[(0, 0, 0), (1, 1, 0)]]
    assert _placed_on_ranks([(2,), (2,)], [[[(2,)], []], [[], [(2,)]]]) is None  # two groups of one shape

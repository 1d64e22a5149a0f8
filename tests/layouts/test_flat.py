"""Flat parameters of torch's first FSDP, whose shapes the user says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import same_bits
from safetensors.torch import load_file, save_file

import zckpt
from zckpt import layouts
from zckpt.base.errors import CorruptError, IncompleteError, InconsistentError, UnsupportedError, ZckptError
from zckpt.jobs.groups import Reading
from zckpt.jobs.open import open_catalog, read_tensor
from zckpt.jobs.options import Options
from zckpt.layouts.dcp import flat
from zckpt.layouts.save.listing import ReadOptions

FIXTURES = Path(__file__).parents[2] / "fixtures" / "flat"
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/facts.json"))
CASES = [(name, said) for name in NAMES for said in ("shapes.json", "weights.pt")] + [("llama_w2", "config.json")]


def opened(name: str | Path, said: Path | str) -> Any:
    home = FIXTURES / name / "checkpoint" if isinstance(name, str) else name
    return open_catalog(str(home), Reading(read_options=ReadOptions(shapes=str(said))))


@pytest.mark.parametrize(("name", "said"), CASES)
def test_weights_and_states(name: str, said: str) -> None:
    home = FIXTURES / name
    found = opened(name, home / said)
    catalog, truth = found.catalog, load_file(home / "truth.safetensors")
    tied = {"head.weight": "table.weight"} if said == "weights.pt" and name != "llama_w2" else {}
    assert catalog.aliases == tied
    assert {*catalog.tensors, *catalog.aliases} == truth.keys() - ({"head.weight"} - tied.keys())
    assert [n for n in catalog.tensors if not same_bits(read_tensor(catalog[n], "pt"), truth[n])] == []
    roles = json.loads((home / "facts.json").read_text())["roles"]
    assert {n: e.role for n, e in catalog.tensors.items()} == {n: roles[n] for n in catalog.tensors}
    if (states := home / "optimizer.safetensors").exists():
        training = layouts.read_training(found.place.listing)
        entries = {f"{state}/{n}": e for n, own in training.states.items() for state, e in own.items()}
        wanted = load_file(states)
        assert entries.keys() == wanted.keys()
        assert [key for key in wanted if not same_bits(read_tensor(entries[key], "pt"), wanted[key])] == []


def test_without_shapes_the_error_says_what_to_do() -> None:
    for name in NAMES:
        with pytest.raises(UnsupportedError, match="flat parameters of FSDP") as error:
            open_catalog(str(FIXTURES / name / "checkpoint"))
        assert "--shapes" in error.value.remedy and "named_parameters" in error.value.remedy


def test_an_output_is_verified_and_a_resharded_run_goes_on(tmp_path: Path) -> None:
    home = FIXTURES / "local_uneven_w3"
    read_options = ReadOptions(shapes=str(home / "weights.pt"))
    zckpt.convert(home / "checkpoint", tmp_path / "out", options=Options(read_options=read_options))
    assert zckpt.verify(home / "checkpoint", tmp_path / "out", deep=True, read_options=read_options).ok
    zckpt.to_dcp(home / "checkpoint", tmp_path / "dcp", optimizer="optim", options=Options(read_options=read_options))
    here, there = opened("local_uneven_w3", home / "weights.pt"), open_catalog(str(tmp_path / "dcp"))
    ours, theirs = (layouts.read_training(one.place.listing).states for one in (here, there))
    assert len(ours) == 14
    for parameter, states in ours.items():
        for state, entry in states.items():
            assert same_bits(read_tensor(entry, "pt"), read_tensor(theirs[parameter][state], "pt"))


@pytest.mark.parametrize("change", ["a shape", "a name more", "a name less", "other names"])
def test_shapes_that_do_not_fit(change: str, tmp_path: Path) -> None:
    shapes = json.loads((FIXTURES / "local_w2" / "shapes.json").read_text())
    if change == "a shape":
        shapes["layers.0.up.bias"] = [4]
    elif change == "a name more":
        shapes["layers.0.gate"] = [3]
    elif change == "a name less":
        del shapes["table.weight"]
    else:
        shapes = {name.replace("layers", "blocks"): shape for name, shape in shapes.items()}
    (tmp_path / "shapes.json").write_text(json.dumps(shapes))
    with pytest.raises(InconsistentError, match="do not fit"):
        opened("local_w2", tmp_path / "shapes.json")


def test_files_that_say_no_order(tmp_path: Path) -> None:
    weights = torch.load(FIXTURES / "local_w2" / "weights.pt")
    del weights["head.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match="order"):
        opened("local_w2", tmp_path / "model.safetensors")
    for config in (
        {"model_type": "llama", "hidden_size": 5},
        {"model_type": "roberta", "architectures": ["RobertaModel"]},
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(UnsupportedError, match="not known in their order"):
            opened("local_w2", tmp_path / "config.json")
    (tmp_path / "config.json").write_text((FIXTURES / "llama_w2" / "config.json").read_text())
    with pytest.raises(InconsistentError):
        opened("local_w2", tmp_path / "config.json")
    for text in ("[1, 2]", '{"a": 3}', '{"a": [-1]}', "{}", "{"):
        (tmp_path / "odd.json").write_text(text)
        with pytest.raises(CorruptError):
            opened("local_w2", tmp_path / "odd.json")
    with pytest.raises(ZckptError, match="not a file"):
        opened("local_w2", tmp_path / "none.json")


def test_where_parameters_begin() -> None:
    """Of 1, 4 and 3 elements: end to end, at multiples of 16 bytes of floats, and of halves."""
    assert flat._starts([1, 4, 3], 1) == ((0, 1, 5), 8)
    assert flat._starts([1, 4, 3], 4) == ((0, 4, 8), 11)
    assert flat._starts([1, 4, 3], 8) == ((0, 8, 16), 19)


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    home = Path(shutil.copytree(FIXTURES / "plain_w3" / "checkpoint", tmp_path / "save"))
    (home / "model_world_size_3_rank_1.pt").unlink()
    with pytest.raises(IncompleteError, match="rank 1"):
        opened(home, FIXTURES / "plain_w3" / "shapes.json")


def test_damage_is_an_error_or_nothing(tmp_path: Path) -> None:
    """What a file may say of a flat parameter, and should not."""
    said, flat_name = FIXTURES / "plain_w3" / "shapes.json", "_fsdp_wrapped_module._flat_param"
    odd = {"two": torch.ones(3, 4), "none": torch.ones(()), "half": torch.ones(13).half()}
    for rank in range(3):
        file = f"model_world_size_3_rank_{rank}.pt"
        root = torch.load(FIXTURES / "plain_w3" / "checkpoint" / file)
        for name, tensor in odd.items():
            (tmp_path / name).mkdir(exist_ok=True)
            torch.save(root | ({flat_name: tensor} if rank else {}), tmp_path / name / file)
    for name in odd:
        with pytest.raises(ZckptError):
            opened(tmp_path / name, said)

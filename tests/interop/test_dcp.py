"""Directories for torch.distributed.checkpoint, from every layout: torch's own loaders find the truth in them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from bits import same_bits
from ranks import BARE, run_ranks
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import zckpt
from zckpt import layouts, to_dcp
from zckpt.base.errors import CastError, UnsupportedError, UsageError
from zckpt.jobs.open import open_catalog, read_tensor, strip_wrappers
from zckpt.layouts.dcp import write as dcp_out
from zckpt.layouts.run.values import step_of

HOME = Path(__file__).parents[2] / "fixtures"
FIXTURES = sorted(path.parent for path in HOME.glob("*/*/how.json"))
WORKER = Path(__file__).with_name("dcp_worker.py")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def consolidated(directory: Path, out: Path) -> Any:
    """By torch's own script."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(directory, out)
    return torch.load(out, weights_only=False)


def stripped(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """What zckpt reads, which the tests of each layout compare with the truth; and the aliases."""
    catalog, _ = strip_wrappers(open_catalog(str(path)).catalog)
    return {name: read_tensor(entry, "pt") for name, entry in catalog.tensors.items()}, dict(catalog.aliases)


# -- reading: torch's own consolidation finds the same -------------------------------------------------------------

BY_TORCH = [path for path in FIXTURES if path.parent.name == "dcp" and path.name not in ("alone_w2", "huggingface_w2")]


@pytest.mark.parametrize("path", BY_TORCH, ids=name_of)
def test_reading_is_torchs(path: Path, tmp_path: Path) -> None:
    place = open_catalog(str(path / "checkpoint")).place
    state = consolidated(Path(place.listing.directory), tmp_path / "theirs.pt")
    for key in ("app", "model", "state_dict"):
        state = state.get(key, state)
    ours, aliases = stripped(path / "checkpoint")
    ours |= {dropped: ours[kept] for dropped, kept in aliases.items()}
    theirs = {n.replace("_orig_mod.", "").removeprefix("module."): t for n, t in state.items() if torch.is_tensor(t)}
    assert ours.keys() == theirs.keys()
    assert all(same_bits(ours[name], theirs[name]) for name in ours)


# -- writing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FIXTURES, ids=name_of)
def test_torch_consolidates_what_was_written(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_out.DcpWriter.__init__, "__defaults__", (40,))  # so that tensors are cut
    to_dcp(path / "checkpoint", tmp_path / "out")
    found = consolidated(tmp_path / "out", tmp_path / "theirs.pt")["model"]
    wanted, aliases = stripped(path / "checkpoint")
    wanted |= {dropped: wanted[kept] for dropped, kept in aliases.items()}
    assert found.keys() == wanted.keys()
    assert all(same_bits(found[name], wanted[name]) for name in wanted)
    again, kept = stripped(tmp_path / "out")  # and so does zckpt, ties included
    nonempty = {dropped: name for dropped, name in aliases.items() if wanted[name].numel()}
    assert again.keys() == wanted.keys() - nonempty.keys() and kept == nonempty
    assert all(same_bits(again[name], wanted[name]) for name in again)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_cast(dtype: str, tmp_path: Path) -> None:
    to_dcp(HOME / "zero3" / "tied_w2" / "checkpoint", tmp_path / "out", dtype=dtype, under="app.model")
    found = consolidated(tmp_path / "out", tmp_path / "theirs.pt")["app"]["model"]
    zckpt.convert(HOME / "zero3" / "tied_w2" / "checkpoint", tmp_path / "out.bin", dtype=dtype)
    wanted = torch.load(tmp_path / "out.bin", weights_only=True)
    assert found.keys() == wanted.keys()
    assert all(same_bits(found[name], wanted[name]) for name in wanted)


def test_on_top_and_in_several_files(tmp_path: Path) -> None:
    from zckpt.jobs.declarations import TO_DCP
    from zckpt.jobs.planned import execute
    from zckpt.jobs.to_dcp import prepare

    path = HOME / "zero2" / "groups_w3" / "checkpoint"
    prepared = prepare(str(path), str(tmp_path / "out"), TO_DCP.ask(dtype=None, under="", max_file_bytes=3000))
    execute(prepared)
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names[0] == ".metadata" and names[1:4] == ["__0_0.distcp", "__0_1.distcp", "__0_2.distcp"]
    found = consolidated(tmp_path / "out", tmp_path / "theirs.pt")
    wanted, _ = stripped(path)
    assert found.keys() == wanted.keys() and all(same_bits(found[name], wanted[name]) for name in wanted)


def test_metadata_are_as_torch_writes_them(tmp_path: Path) -> None:
    """Of the same state dict, torch's own writer says the same but for where things lie."""
    state = {"a": torch.randn(5, 3), "n": torch.arange(4), "s": torch.tensor(2.5), "h": torch.ones(2).bfloat16()}
    torch.save(state, tmp_path / "in.bin")
    to_dcp(tmp_path / "in.bin", tmp_path / "ours")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": state}, checkpoint_id=tmp_path / "theirs")
    ours, theirs = (FileSystemReader(tmp_path / name).read_metadata() for name in ("ours", "theirs"))
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data
    assert ours.storage_data.keys() == theirs.storage_data.keys()
    assert ours.version == theirs.version


def test_a_large_tensor_is_cut_where_ranks_cut_it(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(100, 1 << 20, dtype=torch.uint8)}, tmp_path / "in.bin")
    to_dcp(tmp_path / "in.bin", tmp_path / "out")
    chunks = FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata["model.w"].chunks
    assert [tuple(chunk.sizes) for chunk in chunks] == [(64, 1 << 20), (36, 1 << 20)]


# -- into sharded models -------------------------------------------------------------------------------------------

WITH_OPTIMIZER = ["zero1/bf16_w3", "zero2/groups_w3", "zero2/fp16_w2", "zero3/groups_w3", "dcp/fsdp2_nested_w2",
                  "dcp/fsdp1_w2", "dcp/fsdp2_flat_w4", "dcp/fsdp2_tp_w4"]  # fmt: skip
INTO_MODELS = [*WITH_OPTIMIZER, "dcp/accelerate_fsdp2_w2", "dcp/boxes_w4", "zero0/bf16_groups", "zero2/tied_frozen_w2",
               "zero2/scalar_w2", "zero2/compiled_w2", "zero3/tied_w2", "zero3/lora_w2", "bf16_optimizer/groups_w3",
               "tensor/zero3_tp2_dp2", "pipeline/zero1_pp2_tp2_dp2", "transformers/llama_zero3"]  # fmt: skip


def jobs_of(tmp_path: Path, world_size: int) -> list[tuple[Path, dict[str, Any]]]:
    made: list[tuple[Path, dict[str, Any]]] = []
    for name in INTO_MODELS:
        path = HOME / name
        optimizer = name in WITH_OPTIMIZER
        out = tmp_path / name.replace("/", "_")
        to_dcp(path / "checkpoint", out, optimizer="optim" if optimizer else None)
        opened = open_catalog(str(path / "checkpoint"))
        catalog, _ = strip_wrappers(opened.catalog)
        tensors = {n: (e.shape, e.dtype.torch_name, e.role) for n, e in catalog.tensors.items()}
        job = {"checkpoint": str(out), "shape": "fsdp", "tensors": tensors, "tied": dict(catalog.aliases)}
        if optimizer:
            training = layouts.read_training(opened.place.listing)
            names = dict(zip(opened.catalog.tensors, catalog.tensors, strict=True))
            job["groups"] = [[names[n] for n in group.names] for group in training.groups]
        job["partial"] = optimizer and path.parent.name != "dcp"
        made.append((path, job))
        if path.parent.name == "transformers":
            to_dcp(path / "checkpoint", out / "pytorch_model_fsdp_0")
            made.append((path, {**job, "shape": "accelerate", "checkpoint": str(out / "pytorch_model_fsdp_0")}))
        if name == "zero3/groups_w3" and world_size > 1:
            made.append((path, {**job, "shape": "tensor"}))
    return made


@pytest.mark.parametrize("world_size", [1, 2])
def test_torch_loads_it_into_sharded_models(world_size: int, tmp_path: Path) -> None:
    jobs = jobs_of(tmp_path, world_size)
    (tmp_path / "jobs.json").write_text(json.dumps([job for _, job in jobs]))
    run_ranks(world_size, tmp_path / "jobs.json", WORKER, BARE)
    for number, (path, job) in enumerate(jobs):
        found = torch.load(tmp_path / f"{number}.pt", weights_only=False)
        wanted, aliases = stripped(path / "checkpoint")
        for name, tensor in (wanted | {dropped: wanted[kept] for dropped, kept in aliases.items()}).items():
            if name in found["model"]:
                assert same_bits(found["model"][name], tensor), (path, name)
        assert found["model"].keys() >= wanted.keys(), path
        if "groups" in job:
            assert_same_optimizer(path, found["optim"])


def assert_same_optimizer(path: Path, found: dict[str, Any]) -> None:
    opened = open_catalog(str(path / "checkpoint"))
    training = layouts.read_training(opened.place.listing)
    names = dict(zip(opened.catalog.tensors, strip_wrappers(opened.catalog)[0].tensors, strict=True))
    for name, states in training.states.items():
        assert states.keys() == {"exp_avg", "exp_avg_sq"}
        for state, entry in states.items():
            assert same_bits(found["state"][names[name]][state], read_tensor(entry, "pt")), (path, name, state)
    groups = {frozenset(group["params"]): group for group in found["param_groups"]}
    for group in filter(lambda group: group.names, training.groups):
        theirs = groups[frozenset(names[name] for name in group.names)]
        assert theirs["lr"] == group.settings["lr"] and theirs["weight_decay"] == group.settings["weight_decay"]
        assert theirs["betas"] == tuple(group.settings["betas"]) and theirs["eps"] == group.settings["eps"]
        for name in group.names:
            assert found["state"][names[name]]["step"] == step_of(group.scalars["step"])


def test_optimizer_goes_round(tmp_path: Path) -> None:
    """An FSDP run as zckpt writes it is the run that torch wrote, states, settings and all."""
    path = HOME / "dcp" / "fsdp2_nested_w2"
    to_dcp(path / "checkpoint", tmp_path / "out", optimizer="optim")
    ours = consolidated(tmp_path / "out", tmp_path / "ours.pt")["optim"]
    theirs = consolidated(path / "checkpoint", tmp_path / "theirs.pt")["optim"]
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for name, states in theirs["state"].items():
        assert ours["state"][name].keys() == states.keys()
        assert all(same_bits(ours["state"][name][state], tensor) for state, tensor in states.items())


def test_a_resharded_run_goes_round(tmp_path: Path) -> None:
    """ZeRO-3 to torch.distributed.checkpoint and back to ZeRO: masters and moments are the same bits."""
    path = HOME / "zero3" / "groups_w3" / "checkpoint"
    to_dcp(path, tmp_path / "dcp", optimizer="optim")
    zckpt.reshard(tmp_path / "dcp", tmp_path / "zero", world_size=2, stage=2, precision="bf16")
    before, after = (open_catalog(str(p)) for p in (path, tmp_path / "zero"))
    trainings = [layouts.read_training(opened.place.listing) for opened in (before, after)]
    for name, entry in before.catalog.tensors.items():
        if entry.role == "parameter":
            assert same_bits(read_tensor(entry, "pt"), read_tensor(after.catalog.tensors[name], "pt")), name
    for name, states in trainings[0].states.items():
        for state, entry in states.items():
            assert same_bits(read_tensor(entry, "pt"), read_tensor(trainings[1].states[name][state], "pt")), (
                name,
                state,
            )
    for old, new in zip(*(t.groups for t in trainings), strict=True):
        assert old.names == new.names and old.settings["lr"] == new.settings["lr"]
        assert step_of(old.scalars["step"]) == step_of(new.scalars["step"])


# -- what cannot be written ----------------------------------------------------------------------------------------


def test_no_optimizer_to_write(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="holds no optimizer states"):
        to_dcp(HOME / "dcp" / "boxes_w4" / "checkpoint", tmp_path / "out", optimizer="optim")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("keys", [("model", "model"), ("app", "app.optim"), ("", "optim"), ("a..b", "optim")])
def test_keys_that_cannot_be(keys: tuple[str, str], tmp_path: Path) -> None:
    under, optimizer = keys
    path = HOME / "zero2" / "groups_w3" / "checkpoint"
    if keys == ("", "optim"):  # torchtitan's form: the weights on top, the optimizer beside them
        to_dcp(path, tmp_path / "out", under=under, optimizer=optimizer)
        wanted, _ = stripped(path)
        found, _ = stripped(tmp_path / "out")
        assert found.keys() == wanted.keys() and all(same_bits(found[n], wanted[n]) for n in wanted)
        return
    with pytest.raises(UsageError):
        to_dcp(path, tmp_path / "out", under=under, optimizer=optimizer)
    assert not (tmp_path / "out").exists()


def test_selected_weights_have_no_optimizer(tmp_path: Path) -> None:
    path = HOME / "zero2" / "groups_w3" / "checkpoint"
    with pytest.raises(UsageError, match="would not fit the weights"):
        to_dcp(path, tmp_path / "out", optimizer="optim", options=zckpt.Options(exclude=["head.*"]))
    to_dcp(path, tmp_path / "out", options=zckpt.Options(include=["head.*"], rename=[("^head", "lm_head")]))
    assert set(consolidated(tmp_path / "out", tmp_path / "theirs.pt")["model"]) == {"lm_head.weight"}


def test_too_large_for_fp16(tmp_path: Path) -> None:
    torch.save({"w": torch.tensor([1e30])}, tmp_path / "in.bin")
    with pytest.raises(CastError):
        to_dcp(tmp_path / "in.bin", tmp_path / "out", dtype="fp16")
    assert not (tmp_path / "out").exists()


def test_the_input_is_not_written_into(tmp_path: Path) -> None:
    path = HOME / "dcp" / "fsdp2_tp_w4" / "checkpoint"
    with pytest.raises(zckpt.OutputError):
        to_dcp(path, path, options=zckpt.Options(overwrite=True))
    assert load_file(path.parent / "truth.safetensors").keys() == stripped(path)[0].keys()

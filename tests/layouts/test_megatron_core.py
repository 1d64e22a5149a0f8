"""Saves of Megatron-Core as it writes them: weights, fp32 weights, states, the run's arguments; what is wrong with them."""

from __future__ import annotations

import argparse
import hashlib
import json
import pickle
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from bits import same_bits
from safetensors.torch import load_file
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import zckpt
from zckpt import layouts
from zckpt.base.errors import CorruptError, IncompleteError, UnsupportedError, ZckptError
from zckpt.containers import TensorRef
from zckpt.jobs.groups import Reading
from zckpt.jobs.inspection import inspect_checkpoint
from zckpt.jobs.open import open_catalog, read_tensor
from zckpt.layouts.megatron_core.contents import has_names
from zckpt.layouts.megatron_core.read import unflatten
from zckpt.layouts.run.values import number_in
from zckpt.storage.location import locate

FIXTURES = Path(__file__).parents[2] / "fixtures" / "mcore"
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/how.json"))


def truth_of(name: str, kind: str = "truth") -> dict[str, torch.Tensor]:
    path = FIXTURES / name / f"{kind}.safetensors"
    return load_file(path) if path.exists() else {}


def copy_of(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / name / "checkpoint", tmp_path / name))


def tensor(entry: Any) -> torch.Tensor:
    found = read_tensor(entry, "pt")
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize("at", [0, 100, 4 << 20, 9 << 20])
@pytest.mark.parametrize("back", [1, 7, 20])
def test_names_are_found_wherever_they_lie_in_the_metadata(at: int, back: int, tmp_path: Path) -> None:
    """Also across two of the windows in which the file is read, and far from each other."""
    content = bytearray(at + 100)
    path = tmp_path / ".metadata"
    path.write_bytes(content)
    assert not has_names(locate(path))
    start = max(at - back, 0)
    content[start : start + 24] = b"optimizer.state.exp_avg."
    path.write_bytes(content)
    assert has_names(locate(path))
    content[start : start + 24] = b"mlp.linear_fc1".ljust(24, b"\0")
    path.write_bytes(content)
    assert not has_names(locate(path))
    path.write_bytes(b"model.module." + content)
    assert has_names(locate(path))


def save(state: dict[str, Any], path: Path, *, flatten: bool = True) -> None:
    planner = DefaultSavePlanner(flatten_state_dict=flatten)
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, checkpoint_id=path, no_dist=True, planner=planner)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_the_live_models(name: str) -> None:
    catalog = open_catalog(str(FIXTURES / name / "checkpoint")).catalog
    truth, states = truth_of(name), truth_of(name, "optimizer")
    named = bool(states)
    assert catalog.source.layout == "megatron-core" and catalog.tensors.keys() == truth.keys()
    for key, entry in catalog.tensors.items():
        assert same_bits(tensor(entry), states[f"param/{key}"] if named else truth[key]), key
        assert bool(entry.replicas) == named
        assert entry.role == "parameter"


@pytest.mark.parametrize("name", NAMES)
def test_states_are_the_live_optimizers(name: str) -> None:
    opened = open_catalog(str(FIXTURES / name / "checkpoint"))
    states = {key: value for key, value in truth_of(name, "optimizer").items() if not key.startswith("param/")}
    if not states:
        with pytest.raises(UnsupportedError, match="holds no optimizer states"):
            layouts.read_training(opened.place.listing)
        assert not opened.catalog.source.optimizer_states
        return
    training = layouts.read_training(opened.place.listing)
    found = {f"{state}/{n}": entry for n, own in training.states.items() for state, entry in own.items()}
    assert found.keys() == states.keys()
    assert all(same_bits(tensor(entry), states[key]) for key, entry in found.items())
    vectors = {n for n in opened.catalog.tensors if n.endswith(("layer_norm_weight", "layernorm.weight", "bias"))}
    for group in training.groups:
        assert (group.settings["weight_decay"] == 0) == (set(group.names) <= vectors)
        assert [number(group.scalars["step"]), group.settings["lr"]] == [2, 0.05]
    assert {n for group in training.groups for n in group.names} == set(opened.catalog.tensors)


def number(value: object) -> object:
    return number_in(value) if isinstance(value, TensorRef) else value


def test_inspect_says_what_the_run_was() -> None:
    found = inspect_checkpoint(str(FIXTURES / "stages_tp2_pp2/checkpoint"))
    facts: Any = found.as_json()
    assert (facts["topology"]["tp"], facts["topology"]["pp"], facts["steps"]) == (2, 2, 2)
    assert "query groups 2" in facts["details"]["model"] and "vocabulary 16" in facts["details"]["model"]
    for name, kind in {"reshardable_dp2": "fully_reshardable", "buckets": "dp_reshardable"}.items():
        found = inspect_checkpoint(str(FIXTURES / name / "checkpoint"))
        assert any(line.split() == ["sharding", kind] for line in found.lines())
        assert found.resumable.ok
    extras = open_catalog(str(FIXTURES / "moe_ep2/checkpoint")).catalog.extras
    assert isinstance(extras["args"], Mapping) and extras["args"]["num_experts"] == 2


@pytest.mark.parametrize("name", ["model_space_tp2_dp2_0_12", "moe_ep2", "buckets"])
def test_outputs_hold_weights_alone(name: str, tmp_path: Path) -> None:
    source = FIXTURES / name / "checkpoint"
    zckpt.convert(source, tmp_path / "out", dtype="bf16")
    truth = truth_of(name)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == truth.keys() and all(same_bits(found[n], truth[n]) for n in truth)
    checked = zckpt.verify(source, tmp_path / "out", deep=True)
    assert checked.ok and any("Megatron-Core" in line for line in checked.lines())


def test_other_layouts_of_the_same_run(tmp_path: Path) -> None:
    source = FIXTURES / "model_space_tp2_dp2_0_12" / "checkpoint"
    zckpt.to_dcp(source, tmp_path / "dcp", optimizer="optim")
    zckpt.reshard(source, tmp_path / "zero", world_size=3, stage=2)
    states = truth_of("model_space_tp2_dp2_0_12", "optimizer")
    for place in (tmp_path / "dcp", tmp_path / "zero"):
        assert zckpt.diff(source, place).same
        opened = open_catalog(str(place))
        training = layouts.read_training(opened.place.listing)
        for key, value in states.items():
            state, _, name = key.partition("/")
            entry = opened.catalog.tensors[name] if state == "param" else training.states[name][state]
            assert same_bits(tensor(entry), value), key


# -- where saves are found -----------------------------------------------------------------------------------------------


def test_run_directories(tmp_path: Path) -> None:
    run = copy_of("stages_tp2_pp2", tmp_path)
    step = run / "iter_0000002"
    shutil.copytree(step, run / "iter_0000010")
    for path in (run, step, step / "__0_0.distcp", step / "common.pt"):
        assert open_catalog(str(path)).place.listing.directory.name == "iter_0000002"
    other = open_catalog(str(run), Reading(tag="iter_0000010"))
    assert other.place.listing.directory.name == "iter_0000010"
    released = open_catalog(str(FIXTURES / "layers_by_number_tp2_0_14/checkpoint"))
    assert released.place.listing.directory.name == "release"


def test_the_files_that_name_a_step(tmp_path: Path) -> None:
    """Megatron Bridge's is a torch file, which it asks before Megatron's; a run without either lacks Megatron's, not `latest`."""
    run = copy_of("stages_tp2_pp2", tmp_path)
    shutil.copytree(run / "iter_0000002", run / "iter_0000010")
    torch.save(
        {"step": torch.tensor(2, dtype=torch.int32), "do_train": torch.tensor(True)}, run / "latest_train_state.pt"
    )
    (run / "latest_checkpointed_iteration.txt").write_text("10")
    assert open_catalog(str(run)).place.listing.directory.name == "iter_0000002"
    (run / "latest_train_state.pt").unlink()
    assert open_catalog(str(run)).place.listing.directory.name == "iter_0000010"
    torch.save({"steps": 2}, run / "latest_train_state.pt")
    with pytest.raises(CorruptError, match="does not say which step it is of"):
        open_catalog(str(run))
    assert open_catalog(str(run), Reading(tag="iter_0000002")).catalog.tensors
    for name in ("latest_train_state.pt", "latest_checkpointed_iteration.txt"):
        (run / name).unlink()
    shutil.rmtree(run / "iter_0000010")
    (note,) = open_catalog(str(run)).place.notes
    assert note.startswith("There is no 'latest_checkpointed_iteration.txt'")


def test_the_tokenizer_of_megatron_bridge(tmp_path: Path) -> None:
    """It is in a directory of the save, and comes along."""
    run = copy_of("stages_tp2_pp2", tmp_path)
    inner = run / "iter_0000002" / "tokenizer"
    inner.mkdir()
    (inner / "tokenizer.json").write_text("{}")
    (inner / "other.txt").write_text("")
    zckpt.convert(run, tmp_path / "out")
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert "tokenizer.json" in written and "other.txt" not in written


@pytest.mark.parametrize("inner", ["actor/dist_ckpt", "dist_ckpt", "weights"])
def test_saves_in_directories_of_others(inner: str, tmp_path: Path) -> None:
    """Those of verl and NeMo 2."""
    home = tmp_path / "global_step_3"
    shutil.copytree(FIXTURES / "stages_tp2_pp2/checkpoint/iter_0000002", home / inner)
    hub = (home / inner).parent / "huggingface"
    hub.mkdir()
    (hub / "config.json").write_text('{"model_type": "tiny"}')
    opened = open_catalog(str(home))
    assert opened.place.listing.directory.path == str(home / inner) and opened.catalog.source.layout == "megatron-core"
    zckpt.convert(home, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "tiny"


def test_a_config_as_yaml_stands_for_arguments(tmp_path: Path) -> None:
    run = copy_of("stages_tp2_pp2", tmp_path)
    step = run / "iter_0000002"
    torch.save({"iteration": 7, "checkpoint_version": 3.0}, step / "common.pt")
    (step / "run_config.yaml").write_text("model:\n  num_layers: 2\n  tensor_model_parallel_size: 2\ntrain: {}\n")
    catalog = open_catalog(str(step)).catalog
    assert catalog.extras["args"] == {"num_layers": 2, "tensor_model_parallel_size": 2}
    assert (catalog.topology.tp, catalog.source.global_steps) == (2, 7)
    (step / "run_config.yaml").write_text("model: !!python/object/apply:os.system ['true']\n")
    assert "args" not in open_catalog(str(step)).catalog.extras
    (step / "common.pt").unlink()
    assert len(open_catalog(str(step)).catalog) == 9


# -- forms that no wheel on CPU writes, as torch writes them -----------------------------------------------------------------


def test_the_common_state_as_an_item(tmp_path: Path) -> None:
    common = {"args": argparse.Namespace(num_layers=2, hidden_size=4), "iteration": 5}
    weights = {"decoder.layers.mlp.linear_fc1.weight": torch.randn(2, 6, 4)}
    objects = {"common_state/shard_0_1": [common], "rng_state/shard_0_1": [1], "decoder._extra_state/shard_0_1": [None]}
    save({**weights, **objects}, tmp_path / "save", flatten=False)
    metadata = tmp_path / "save" / ".metadata"
    data = metadata.read_bytes()
    (tmp_path / "save" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    named = data.replace(b"\x8c\x08Metadata\x94", b"\x8c\x0dMCoreMetadata\x94", 1)
    assert named != data
    metadata.write_bytes(refitted(named, len(named) - len(data)))
    catalog = open_catalog(str(tmp_path / "save")).catalog
    assert same_bits(tensor(catalog["decoder.layers.mlp.linear_fc1.weight"]), next(iter(weights.values())))
    assert list(catalog) == list(weights) and catalog.source.global_steps == 5
    assert isinstance(catalog.extras["args"], Mapping) and catalog.extras["args"]["hidden_size"] == 4


def refitted(data: bytes, grown: int) -> bytes:
    """A pickle whose first frame became longer."""
    at = data.index(b"\x95") + 1
    return data[:at] + (int.from_bytes(data[at : at + 8], "little") + grown).to_bytes(8, "little") + data[at + 8 :]


def test_fsdp_dtensor(tmp_path: Path) -> None:
    names = ["decoder.layers.0.mlp.linear_fc1.weight_w", "decoder.layers.0.input_layernorm.weight"]
    weights = {names[0]: torch.randn(6, 4), names[1]: torch.randn(4)}
    states = {n: {s: torch.randn_like(t) for s in ("exp_avg", "exp_avg_sq")} for n, t in weights.items()}
    settings = {n: {"lr": 0.1, "wd_mult": float(t.dim() > 1), "weight_decay": 0.1} for n, t in weights.items()}
    state = {
        "model": {f"module.{n}": t for n, t in weights.items()},
        "optimizer": {
            "state": {f"module.module.module.{n}": {**s, "step": torch.tensor(3.0)} for n, s in states.items()},
            "param_to_group_meta": {f"module.module.module.{n}": own for n, own in settings.items()},
        },
        "args": argparse.Namespace(num_layers=1), "iteration": 3, "rng_state": [1],
    }  # fmt: skip
    save(state, tmp_path / "save")
    opened = open_catalog(str(tmp_path / "save"))
    assert opened.catalog.source.layout == "megatron-core" and opened.catalog.source.global_steps == 3
    assert {n: same_bits(tensor(e), weights[n]) for n, e in opened.catalog.tensors.items()} == dict.fromkeys(
        weights, True
    )
    training = layouts.read_training(opened.place.listing)
    assert all(same_bits(tensor(training.states[n][s]), t) for n, own in states.items() for s, t in own.items())
    assert [(g.names, g.settings["weight_decay"]) for g in training.groups] == [((names[0],), 0.1), ((names[1],), 0.0)]
    assert [number(group.scalars["step"]) for group in training.groups] == [3, 3]


# -- what is wrong -------------------------------------------------------------------------------------------------------


def test_missing_files_are_named(tmp_path: Path) -> None:
    step = copy_of("stages_tp2_pp2", tmp_path) / "iter_0000002"
    (step / "__2_1.distcp").unlink()
    with pytest.raises(IncompleteError, match=r"__2_1\.distcp"):
        open_catalog(str(step))
    assert not zckpt.verify(step).ok
    (step / ".metadata").unlink()
    with pytest.raises(IncompleteError, match=r"\.metadata is missing"):
        open_catalog(str(step))


def test_files_of_another_save_are_found(tmp_path: Path) -> None:
    step = copy_of("stages_tp2_pp2", tmp_path) / "iter_0000002"
    shutil.copy(FIXTURES / "buckets/checkpoint/iter_0000002/__0_0.distcp", step / "__2_1.distcp")
    with pytest.raises(ZckptError, match=r"__2_1\.distcp"):
        open_catalog(str(step))


def test_fp32_weights_of_another_model_are_found(tmp_path: Path) -> None:
    step = copy_of("reshardable_dp2", tmp_path) / "iter_0000002"
    assert zckpt.verify(step, deep=True).ok
    truth = truth_of("reshardable_dp2")["decoder.layers.mlp.linear_fc2.weight"]
    weight = truth.view(torch.uint8).numpy().tobytes()
    held = [path for path in step.glob("*.distcp") if weight in path.read_bytes()]
    for path in held:
        path.write_bytes(path.read_bytes().replace(weight, weight[:2] + b"\x01\x41" + weight[4:]))
    assert len(held) == 1
    found = zckpt.verify(step, deep=True)
    assert any(
        "linear_fc2" in problem for check in found.checks if check.name == "masters" for problem in check.problems
    )


def test_shapes_that_contradict_each_other(tmp_path: Path) -> None:
    entry = open_catalog(str(FIXTURES / "stages_tp2_pp2/checkpoint")).catalog["decoder.layers.mlp.linear_fc2.weight"]
    boxes = replace(entry, shape=(2, 16, 12))
    for shape in ((2, 32), (3, 128), (0, 384), (2, 192, 1)):
        with pytest.raises(CorruptError, match="does not fit its parts"):
            unflatten(boxes, shape)


def test_zarr_is_named(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    torch.save({"iteration": 1}, tmp_path / "common.pt")
    (tmp_path / "output_layer.weight").mkdir()
    with pytest.raises(UnsupportedError, match="zarr"):
        open_catalog(str(tmp_path))


def test_listed_digests_are_compared(tmp_path: Path) -> None:
    step = copy_of("stages_tp2_pp2", tmp_path) / "iter_0000002"
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in step.iterdir()}
    (step / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": sums}))
    assert zckpt.verify(step, deep=True).ok and zckpt.verify(step).ok
    (step / "metadata.json").write_text((step / "metadata.json").read_text() + " ")
    assert zckpt.verify(step).ok
    found = zckpt.verify(step, deep=True)
    assert [problem for check in found.checks for problem in check.problems] == [
        "'metadata.json' does not have the SHA-256 that the save lists"
    ]
    (step / "integrity.json").write_text(json.dumps({"files": {"../x": ""}}))
    assert any("elsewhere" in problem for check in zckpt.verify(step).checks for problem in check.problems)


def test_a_plain_save_of_torch_is_no_megatrons(tmp_path: Path) -> None:
    save({"model": {"decoder.layers.0.self_attn.weight": torch.ones(2)}}, tmp_path)
    (tmp_path / "metadata.json").write_text("[not json")
    assert open_catalog(str(tmp_path)).catalog.source.layout == "dcp"


MANY_CHUNKS = """
import sys
from zckpt.jobs.inspection import inspect_checkpoint
inspect_checkpoint(sys.argv[1])
used = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))  # maxrss is also the parent's
print(int(used.split()[1]) >> 10)
"""


def test_metadata_of_many_chunks_take_little_memory(tmp_path: Path) -> None:
    """A 405 B model on 512 ranks has 69,000 chunks, most of them of moments, which are cut anywhere (`model_space`)."""
    home = copy_of("model_space_tp2_dp2_0_12", tmp_path)
    (file,) = home.rglob(".metadata")
    with file.open("rb") as opened, warnings.catch_warnings(action="ignore"):
        metadata = pickle.load(opened)
    wide = 20_000
    known = metadata.state_dict_metadata["optimizer.state.exp_avg.decoder.final_layernorm.weight"]
    chunks = [ChunkStorageMetadata(torch.Size((0, 1000 * n)), torch.Size((1, 1000))) for n in range(wide)]
    metadata.state_dict_metadata["optimizer.state.exp_avg.more"] = replace(
        known, size=torch.Size((1, 1000 * wide)), chunks=chunks
    )
    for number, chunk in enumerate(chunks):
        index = MetadataIndex("optimizer.state.exp_avg.more", torch.Size(tuple(chunk.offsets)))
        metadata.storage_data[index] = _StorageInfo("".join(("__", "0_0.distcp")), 5000 * number, 5000)
    file.write_bytes(pickle.dumps(metadata))
    done = subprocess.run([sys.executable, "-c", MANY_CHUNKS, home], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64

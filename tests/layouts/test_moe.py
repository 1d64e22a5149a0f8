"""Mixtures of experts, AutoEP and AutoTP: what is put together, what is refused, and where experts lie."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import same_bits
from safetensors.torch import load_file

import zckpt
from zckpt import layouts
from zckpt.base.errors import (
    CorruptError,
    IncompleteError,
    InconsistentError,
    UnsafeError,
    UnsupportedError,
    ZckptError,
)
from zckpt.core.catalog import Catalog
from zckpt.engine import replicas
from zckpt.jobs.convert import convert
from zckpt.jobs.groups import Reading
from zckpt.jobs.inspection import inspect_checkpoint
from zckpt.jobs.open import open_catalog, read_tensor
from zckpt.jobs.reshard import reshard
from zckpt.jobs.to_universal import to_universal
from zckpt.layouts.moe.experts import sharers
from zckpt.live import load_into

FIXTURES = Path(__file__).parents[2] / "fixtures"
EXPERTS = ".moe.deepspeed_moe.experts.deepspeed_experts."


def copied(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / name / "checkpoint", tmp_path / "checkpoint"))


def opened(path: Path) -> Catalog:
    return open_catalog(str(path)).catalog


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    loaded = torch.load(path, weights_only=False)
    torch.save(change(loaded) or loaded, path)


def assert_truth(checkpoint: Path, name: str) -> None:
    catalog = opened(checkpoint)
    truth = load_file(FIXTURES / name / "truth.safetensors")
    assert catalog.tensors.keys() == truth.keys()
    for key, tensor in truth.items():
        assert same_bits(read_tensor(catalog[key], "pt"), tensor), key
    replicas.check(catalog)


def assert_carried(source: Path, out: Path, stage: int) -> None:
    """Resharded to three ranks, all numbers and groups are what they were, and experts are nothing special."""
    reshard(source, out, world_size=3, stage=stage)
    before, after = opened(source), opened(out)
    assert (after.topology.ep, after.topology.dp) == (1, 3)
    old, new = (layouts.read_training(open_catalog(str(path)).place.listing) for path in (source, out))
    assert [group.names for group in old.groups] == [group.names for group in new.groups]
    assert not any("moe" in group.settings for group in new.groups)
    for key, entry in before.tensors.items():
        assert same_bits(read_tensor(entry, "pt"), read_tensor(after[key], "pt"))
        for state, held in old.states.get(key, {}).items():
            assert same_bits(read_tensor(held, "pt"), read_tensor(new.states[key][state], "pt"))


def refused(kind: type[ZckptError], checkpoint: Path, tmp_path: Path) -> ZckptError:
    with pytest.raises(kind) as caught:
        convert(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    return caught.value


def one(checkpoint: Path, glob: str) -> Path:
    (found,) = checkpoint.glob(f"*/{glob}")
    return found


# -- what is put together --------------------------------------------------------------------------------------------


def test_experts_of_one_layer_differ() -> None:
    """Or a converter that mixes them up would pass."""
    truth = load_file(FIXTURES / "moe" / "zero1_w4" / "truth.safetensors")
    experts = [truth[f"blocks.0{EXPERTS}{expert}.up.weight"] for expert in range(4)]
    assert all(not torch.equal(a, b) for a in experts for b in experts if a is not b)


def test_experts_lie_in_their_layer() -> None:
    names = list(opened(FIXTURES / "moe" / "zero2_pyramid_w4" / "checkpoint"))
    first = next(at for at, name in enumerate(names) if name.startswith("blocks.1."))
    assert all(name.startswith(("embed", "blocks.0.")) for name in names[:first])


def test_every_master_is_proved_by_a_weight() -> None:
    catalog = opened(FIXTURES / "moe" / "zero2_frozen_w4" / "checkpoint")
    trained = [entry for entry in catalog.tensors.values() if entry.role == "parameter"]
    assert trained and all(entry.replicas for entry in trained)
    frozen = {name for name, entry in catalog.tensors.items() if entry.role == "frozen"}
    assert frozen == {name for name in catalog if name.endswith(("up.bias", "embed.weight"))}


def test_ranks_that_list_their_groups_in_another_order(tmp_path: Path) -> None:
    """As they do, since DeepSpeed walks a set of strings for each group that it splits, when nobody fixed the hash seed."""
    checkpoint = copied("moe/zero2_pyramid_w4", tmp_path)

    def turn_round(root: Any) -> None:
        state = root["optimizer_state_dict"]
        order = [0, 1, *reversed(range(2, 5)), *reversed(range(5, 8))]
        lists = ("single_partition_of_fp32_groups", "param_slice_mappings", "param_alignment_paddings")
        for key in (*lists, "group_paddings", "partition_count"):
            state[key] = [state[key][number] for number in order]
        inner = state["base_optimizer_state"]
        inner["state"] = {at: inner["state"][number] for at, number in enumerate(order)}
        inner["param_groups"] = [{**inner["param_groups"][number], "params": [at]} for at, number in enumerate(order)]

    for rank in (1, 3):
        edit(one(checkpoint, f"*zero_pp_rank_{rank}_*"), turn_round)
    assert_truth(checkpoint, "moe/zero2_pyramid_w4")
    before = layouts.read_training(open_catalog(str(FIXTURES / "moe/zero2_pyramid_w4/checkpoint")).place.listing)
    after = layouts.read_training(open_catalog(str(checkpoint)).place.listing)
    assert [group.names for group in before.groups] == [group.names for group in after.groups]
    for name, states in before.states.items():
        for state, entry in states.items():
            assert same_bits(read_tensor(entry, "pt"), read_tensor(after.states[name][state], "pt"))


@pytest.mark.parametrize("name", ["zero0_bf16_w4", "zero0_pyramid_w4"])
def test_masters_without_zero_where_only_group_names_tell_the_ranks(name: str, tmp_path: Path) -> None:
    checkpoint = copied(f"moe/{name}", tmp_path)
    buffers = [key for key in opened(checkpoint) if key.endswith("gain")]
    edit(one(checkpoint, "mp_rank_00*"), lambda root: root.update(buffer_names=[]))
    catalog, truth = opened(checkpoint), load_file(FIXTURES / "moe" / name / "truth.safetensors")
    for key, tensor in truth.items():
        if key not in buffers:
            assert same_bits(read_tensor(catalog[key], "pt"), tensor), key


@pytest.mark.parametrize("name", ["moe/zero2_pyramid_w4", "autoep/zero0_w2"])
def test_into_a_model_that_holds_all_experts(name: str) -> None:
    """A live model's own names are those of the catalog."""
    truth = load_file(FIXTURES / name / "truth.safetensors")
    model = torch.nn.Module()
    for key, tensor in truth.items():
        *path, own = key.split(".")
        owner = model
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, torch.nn.Module())
            owner = owner._modules[part]
        owner.register_parameter(own, torch.nn.Parameter(torch.zeros_like(tensor)))
    load_into(model, opened(FIXTURES / name / "checkpoint"))
    for key, tensor in model.state_dict().items():
        assert same_bits(tensor, truth[key])


def test_into_deepspeeds_own_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    monkeypatch.setattr(sys, "path", [str(FIXTURES), *sys.path])  # folders there are called as packages are: torch_xla
    from expert_models import MIXTURES, Mixture

    wide = {**MIXTURES["two_ranks"], "layers": [(n, 1, residual) for n, _, residual in MIXTURES["two_ranks"]["layers"]]}
    model = Mixture(**wide)
    load_into(model, opened(FIXTURES / "moe" / "zero1_w4" / "checkpoint"))
    truth = load_file(FIXTURES / "moe" / "zero1_w4" / "truth.safetensors")
    assert model.state_dict().keys() == truth.keys()
    for name, tensor in model.state_dict().items():
        assert same_bits(tensor, truth[name]), name


@pytest.mark.parametrize(
    "name",
    [
        "moe/tensor_w4",
        "autoep/folded_w4",
        "moe/tensor_sliced_w4",
        "moe/pipeline_pp2_tp2",
        "moe/pipeline_some",
        "moe/pipeline_bf16_pp2_dp2",
        "moe/tensor_unwritten",
        "moe/zero2_pyramid_w4",
        "moe/bf16_optimizer_w4",
        "autoep/zero2_w4",
        "autoep/zero3_w4",
    ],
)
def test_down_to_plain_data_parallelism(name: str, tmp_path: Path) -> None:
    assert_carried(FIXTURES / name / "checkpoint", tmp_path / "out", stage=2)


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("moe/zero0_w2", "moe/zero2_w2"),
        ("moe/zero0_bf16_w4", "moe/zero1_w4"),
        ("moe/zero0_pyramid_w4", "moe/zero2_pyramid_w4"),
        ("moe/tensor_zero0_w4", "moe/tensor_w4"),
        ("moe/tensor_sliced_zero0_w4", "moe/tensor_sliced_w4"),
    ],
)
def test_states_without_zero_are_those_of_the_same_run_under_zero(name: str, same: str, tmp_path: Path) -> None:
    """DeepSpeed scales gradients of experts otherwise there; but of all states of a shape, each is most like its own;
    those of a few numbers may be like another's by chance.
    """
    listings = [open_catalog(str(FIXTURES / path / "checkpoint")).place.listing for path in (name, same)]
    own, other = (layouts.read_training(listing) for listing in listings)
    assert {n for group in own.groups for n in group.names} == own.states.keys() == other.states.keys()
    found, wanted = (
        {key: read_tensor(states["exp_avg"], "pt").flatten() for key, states in training.states.items()}
        for training in (own, other)
    )
    for key, state in found.items():
        alike = {k: torch.cosine_similarity(state, of, 0) for k, of in wanted.items() if of.shape == state.shape}
        assert alike[key] > 0.7 and (max(alike, key=lambda k: float(alike[k])) == key or len(state) < 10), key


@pytest.mark.parametrize(
    "name",
    [
        "moe/zero0_w2",
        "moe/zero0_pyramid_w4",
        "moe/tensor_zero0_w4",
        "moe/tensor_zero0_wide_w4",
        "moe/tensor_sliced_zero0_w4",
    ],
)
def test_resharded_without_zero(name: str, tmp_path: Path) -> None:
    assert_carried(FIXTURES / name / "checkpoint", tmp_path / "out", stage=3)


def test_groups_of_stages_that_are_not_alike_stay_apart() -> None:
    """A stage without experts has others: its second group has no weight decay, that of experts has."""
    place = open_catalog(str(FIXTURES / "moe/pipeline_some/checkpoint")).place
    groups = layouts.read_training(place.listing).groups
    assert [(group.settings["name"], group.settings["weight_decay"]) for group in groups] == [
        ("all", 0.1), ("decay", 0.1), ("ep_size_1", 0.1), ("plain", 0.0)
    ]  # fmt: skip
    assert groups[3].names == ("3.up.bias", "3.down.bias", "4.up.bias", "4.down.bias")


@pytest.mark.parametrize("world_size", [2, 4, 12])
@pytest.mark.parametrize("data_first", [False, True])
def test_ranks_that_share_experts_are_those_of_deepspeed(world_size: int, data_first: bool) -> None:
    """Example of its own documentation: world size 16, two expert-parallel ranks."""
    assert list(sharers(2, 1, 16, data_first=False)) == [1, 3, 5, 7, 9, 11, 13, 15]
    assert list(sharers(2, 1, 16, data_first=True)) == [8, 9, 10, 11, 12, 13, 14, 15]
    for ep in (1, 2):
        held = [rank for own in range(ep) for rank in sharers(ep, own, world_size, data_first=data_first)]
        assert sorted(held) == list(range(world_size))


# -- what is refused -------------------------------------------------------------------------------------------------


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    checkpoint = copied("moe/zero1_w4", tmp_path)
    one(checkpoint, "layer_0_expert_2_*").unlink()
    error = refused(IncompleteError, checkpoint, tmp_path)
    assert error.what == "files of experts of layer 0 are missing"
    assert "layer_0_expert_2_mp_rank_00_model_states.pt" in error.expected and "--also" in error.remedy


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("tensor_sliced_w4", "layer_1_expert_1_mp_rank_01_model_states.pt"),
        ("tensor_w4", "layer_0_expert_3_mp_rank_01_model_states.pt"),
        ("pipeline_pp2_tp2", "layer_0_expert_2_mp_rank_03_model_states.pt"),
        ("pipeline_some", "layer_0_expert_2_mp_rank_01_model_states.pt"),
    ],
)
def test_a_missing_slice_of_an_expert(name: str, file: str, tmp_path: Path) -> None:
    checkpoint = copied(f"moe/{name}", tmp_path)
    one(checkpoint, file).unlink()
    assert "layer" in refused(IncompleteError, checkpoint, tmp_path).what


@pytest.mark.parametrize("name", ["moe/tensor_w4", "moe/tensor_sliced_w4", "moe/pipeline_pp2_tp2"])
def test_missing_tensor_parallel_ranks(name: str, tmp_path: Path) -> None:
    """All files of one, or its model file where DeepSpeed did write one."""
    checkpoint = copied(name, tmp_path)
    one(checkpoint, "mp_rank_01_model_states.pt").unlink()
    assert "no model states file of mp_rank 01" in refused(IncompleteError, checkpoint, tmp_path).what
    for path in checkpoint.glob("*/*_mp_rank_01_*"):
        path.unlink()
    assert "01" in refused(IncompleteError, checkpoint, tmp_path).remedy


def test_a_model_file_that_deepspeed_does_not_write() -> None:
    inspection = inspect_checkpoint(str(FIXTURES / "moe/tensor_unwritten/checkpoint"))
    assert inspection.exportable.ok and not inspection.resumable.ok
    (row,) = (line for line in inspection.lines() if "mp_rank 1  " in line)
    assert "model missing, optimizer (" in row
    assert any("'mp_rank_01_model_states.pt'" in note for note in inspection.notes)


@pytest.mark.parametrize("change", ["size", "name", "frozen"])
def test_a_model_file_that_was_not_written_and_cannot_be_told(change: str, tmp_path: Path) -> None:
    checkpoint = copied("moe/tensor_unwritten", tmp_path)

    def edited(root: Any) -> None:
        shapes = root["param_shapes"][0]
        if change == "size":
            shapes["split.up.weight"] = torch.Size([5, 6])
        elif change == "name":
            shapes["split.other.weight"] = shapes.pop("split.up.weight")
        else:
            root["module"]["split.frozen"] = torch.ones(3)

    edit(one(checkpoint, "mp_rank_00_model*"), edited)
    found = refused(IncompleteError, checkpoint, tmp_path).what
    assert "split.frozen" in found if change == "frozen" else "mp_rank 01" in found


def test_experts_left_over_in_a_pipeline_without_any(tmp_path: Path) -> None:
    checkpoint = copied("pipeline/zero1_pp2_dp2", tmp_path)
    source = FIXTURES / "moe" / "zero1_w4" / "checkpoint" / "global_step2"
    for path in source.glob("layer_*_expert_*"):
        shutil.copy(path, next(checkpoint.glob("global_step*")))
    error = refused(InconsistentError, checkpoint, tmp_path)
    assert "layer_0_expert_0" in error.found and "without experts" in error.expected


@pytest.mark.parametrize("name", ["moe/zero1_w4", "moe/zero0_w2", "moe/pipeline_some", "autoep/zero2_w4"])
def test_all_experts_missing(name: str, tmp_path: Path) -> None:
    checkpoint = copied(name, tmp_path)
    for path in checkpoint.glob("*/*exp*"):
        path.unlink()
    assert "layer 0" in refused(IncompleteError, checkpoint, tmp_path).what


def test_experts_of_another_nodes_disk(tmp_path: Path) -> None:
    checkpoint = copied("moe/zero1_w4", tmp_path)
    other = tmp_path / "other" / "global_step2"
    other.mkdir(parents=True)
    for path in checkpoint.glob("*/layer_*_expert_1_*"):
        shutil.move(path, other)
    catalog = open_catalog(str(checkpoint), Reading(also=[str(tmp_path / "other")])).catalog
    assert len(catalog) == len(load_file(FIXTURES / "moe" / "zero1_w4" / "truth.safetensors"))


def test_experts_left_over_from_another_save(tmp_path: Path) -> None:
    checkpoint = copied("moe/zero1_w4", tmp_path)
    shutil.copy(
        one(checkpoint, "layer_1_expert_1_*"), checkpoint / "global_step2/layer_1_expert_7_mp_rank_00_model_states.pt"
    )
    assert "layer_1_expert_7" in refused(InconsistentError, checkpoint, tmp_path).found


def test_two_files_of_one_expert(tmp_path: Path) -> None:
    checkpoint = copied("moe/zero1_w4", tmp_path)
    shutil.copy(
        one(checkpoint, "layer_1_expert_1_*"), checkpoint / "global_step2/layer_1_expert_01_mp_rank_00_model_states.pt"
    )
    assert "layer_1_expert_01" in refused(InconsistentError, checkpoint, tmp_path).found


@pytest.mark.parametrize("name", ["moe/zero2_w2", "autoep/zero2_w4"])
def test_an_experts_file_that_is_anothers(name: str, tmp_path: Path) -> None:
    checkpoint = copied(name, tmp_path)
    shutil.copy(one(checkpoint, "layer_0_expert_1_*"), one(checkpoint, "layer_0_expert_2_*"))
    error = refused(CorruptError, checkpoint, tmp_path)
    assert "layer_0_expert_2" in str(error.file) and "expert 2" in error.expected


@pytest.mark.parametrize("name", ["moe/zero1_w4", "autoep/zero1_w2"])
def test_experts_that_are_not_those_of_the_optimizer(name: str, tmp_path: Path) -> None:
    """Of another step: the names fit, the numbers do not."""
    checkpoint = copied(name, tmp_path)
    edit(one(checkpoint, "layer_0_expert_1_*"), lambda root: {key: value + 1 for key, value in root.items()})
    assert "expert" in refused(InconsistentError, checkpoint, tmp_path).found


def test_ranks_that_were_swapped(tmp_path: Path) -> None:
    checkpoint = copied("moe/zero1_w4", tmp_path)
    first, second = one(checkpoint, "*zero_pp_rank_0_*"), one(checkpoint, "*zero_pp_rank_1_*")
    first.rename(tmp_path / "held")
    second.rename(first)
    (tmp_path / "held").rename(second)
    refused(InconsistentError, checkpoint, tmp_path)


def test_ranks_whose_masters_disagree(tmp_path: Path) -> None:
    """Without ZeRO every expert-parallel rank has all masters that are not experts'."""
    checkpoint = copied("moe/zero0_bf16_w4", tmp_path)
    copy = next(replica for replica in opened(checkpoint)["embed.weight"].replicas if replica.whole)
    with open(str(copy.fragments[0].store), "r+b") as file:
        file.seek(copy.fragments[0].byte_offset + 80)
        byte = file.read(1)
        file.seek(copy.fragments[0].byte_offset + 80)
        file.write(bytes([byte[0] ^ 1]))
    error = refused(InconsistentError, checkpoint, tmp_path)
    assert "embed.weight" in error.found and "expert-parallel rank 1" in str(error)


def test_slices_whose_masters_disagree(tmp_path: Path) -> None:
    """Of experts over tensor-parallel ranks: those of the same one have the same slice beside them."""
    checkpoint = copied("moe/tensor_zero0_wide_w4", tmp_path)
    model = torch.load(one(checkpoint, "mp_rank_01_model*"), weights_only=False)
    shape = model["module"]["split.up.weight"].shape

    def change(root: Any) -> None:
        masters = [m for group in root["optimizer"]["fp32_groups"] for m in group if m.shape == shape]
        masters[0].view(torch.int32).bitwise_xor_(1)  # less than the half-precision weights show

    edit(one(checkpoint, "expp_rank_3_mp_rank_01*"), change)
    error = refused(InconsistentError, checkpoint, tmp_path)
    assert "split.up.weight" in str(error) and "expert-parallel rank 3" in str(error)


@pytest.mark.parametrize("name", ["moe/tensor_zero0_w4", "moe/tensor_zero0_wide_w4"])
def test_masters_of_experts_over_slices_without_zero(name: str, tmp_path: Path) -> None:
    """Which file has them: none is missing, none is there twice, and all are of one step."""
    checkpoint = copied(name, tmp_path)
    catalog = opened(checkpoint)
    assert all(
        entry.replicas and entry.dtype.name == "F32" for entry in catalog.tensors.values() if entry.role == "parameter"
    )
    path = one(checkpoint, "expp_rank_1_mp_rank_01*")
    other = path.with_name(path.name.replace("mp_rank_01", "mp_rank_00"))
    shutil.copy(path, other)
    error = refused(InconsistentError, checkpoint, tmp_path)
    assert other.name in str(error) and path.name in str(error)
    path.unlink()
    assert "fit no parameter" in refused(InconsistentError, checkpoint, tmp_path).what
    other.unlink()
    assert path.name in refused(IncompleteError, checkpoint, tmp_path).expected


def test_steps_of_experts_over_slices_without_zero(tmp_path: Path) -> None:
    checkpoint = copied("moe/tensor_zero0_w4", tmp_path)

    def later(root: Any) -> None:
        for state in root["optimizer"]["optimizer_state_dict"]["state"].values():
            state["step"] += 1

    edit(one(checkpoint, "expp_rank_1_mp_rank_01*"), later)
    assert "the step" in str(refused(InconsistentError, checkpoint, tmp_path))


@pytest.mark.parametrize("missing", ["expp_rank_1_*", "expp_rank_?_*"])
def test_missing_optimizer_files_without_zero(missing: str, tmp_path: Path) -> None:
    checkpoint = copied("moe/zero0_bf16_w4", tmp_path)
    for path in checkpoint.glob(f"*/{missing}"):
        path.unlink()
    expected = refused(IncompleteError, checkpoint, tmp_path).expected
    assert f"expp_rank_{int('1' in missing)}_mp_rank_00_optim_states.pt" in expected


def test_a_half_precision_run_without_masters_is_told(tmp_path: Path) -> None:
    checkpoint = copied("moe/zero0_bf16_w4", tmp_path)
    for path in (one(checkpoint, "mp_rank_00*"), *checkpoint.glob("*/expp_rank_*")):
        edit(path, lambda root: root.update(optimizer=None))
    assert any("no fp32 master weights" in note for note in opened(checkpoint).source.notes)


@pytest.mark.parametrize("name", ["moe/data_first_w4", "autoep/zero3_w4"])
def test_a_missing_rank(name: str, tmp_path: Path) -> None:
    checkpoint = copied(name, tmp_path)
    one(checkpoint, "*zero_pp_rank_2_*_optim_*").unlink()
    assert "(rank 2)" in refused(IncompleteError, checkpoint, tmp_path).what


def test_a_group_of_both_kinds(tmp_path: Path) -> None:
    checkpoint = copied("moe/zero1_w4", tmp_path)

    def mix(root: Any) -> None:
        dense, experts = root["param_shapes"]
        experts[next(iter(dense))] = dense.pop(next(iter(dense)))

    edit(one(checkpoint, "mp_rank_00*"), mix)
    assert "optimizer group" in refused(InconsistentError, checkpoint, tmp_path).what


@pytest.mark.parametrize("counts", [4, [], [4], [4, -2], [4, 2**40], [4, 3], [4, 2, 2], ["4", 2], None])
def test_wrong_counts(counts: Any, tmp_path: Path) -> None:
    checkpoint = copied("moe/zero1_w4", tmp_path)
    edit(one(checkpoint, "mp_rank_00*"), lambda root: root.update(num_experts=counts))
    with pytest.raises((IncompleteError, InconsistentError, UnsupportedError)):
        convert(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_experts_that_cannot_be_spread(tmp_path: Path) -> None:
    """A rank that says it has three of four."""
    checkpoint = copied("moe/zero1_w4", tmp_path)

    def add(root: Any) -> None:
        root["buffer_names"].append(f"blocks.0{EXPERTS}2.gain")

    edit(one(checkpoint, "mp_rank_00*"), add)
    assert "layer 0" in refused(InconsistentError, checkpoint, tmp_path).what


@pytest.mark.parametrize("ranks", [[], [[0, 1], [1, 2]], [[0, 1], [2]], [[0, 1], [2, "3"]], [[3, 2], [1, 0]], 7])
def test_another_placement(ranks: Any, tmp_path: Path) -> None:
    """One that places each expert once is believed, and the weights say that it is wrong."""
    checkpoint = copied("autoep/zero1_w2", tmp_path)
    listed = [{"rank": at, "experts": held} for at, held in enumerate(ranks)] if isinstance(ranks, list) else ranks

    def change(root: Any) -> None:
        root["ds_autoep_layers"][0]["expert_placement"]["ranks"] = listed

    edit(one(checkpoint, "mp_rank_00*"), change)
    refused(InconsistentError, checkpoint, tmp_path)


@pytest.mark.parametrize("damage", [7, [7], [{}], [{"moe_layer_id": "0", "expert_key_prefix": 3}]])
def test_damaged_records(damage: Any, tmp_path: Path) -> None:
    checkpoint = copied("autoep/zero2_w4", tmp_path)
    edit(one(checkpoint, "mp_rank_00*"), lambda root: root.update(ds_autoep_layers=damage))
    refused(CorruptError, checkpoint, tmp_path)


HOSTILE = ["../../evil", "/etc/evil", "nul\0nul", "x" * 10_000, "", "a\nb", "..", 7, ("t",)]


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda name: repr(name)[:12])
def test_hostile_names_in_experts_files(hostile: Any, tmp_path: Path) -> None:
    """They are names of no expert; and where they are, nothing is written but under OUT."""
    checkpoint = copied("moe/zero1_w4", tmp_path)
    edit(one(checkpoint, "layer_0_expert_1_*"), lambda root: {hostile: torch.zeros(2), **root})
    error = refused(CorruptError, checkpoint, tmp_path)
    assert "layer_0_expert_1" in str(error.file) and len(str(error)) < 2_000
    if not isinstance(hostile, str):
        return
    for path in checkpoint.glob("*/layer_0_expert_*"):
        number = path.name.split("_")[3]
        own = f"{hostile}{EXPERTS}{number}.up.weight"
        torch.save({own: torch.zeros(2)}, path)
    with pytest.raises(ZckptError):
        convert(checkpoint, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", [1, 2], {"x": 3}, {}])
def test_experts_files_that_are_none(content: Any, tmp_path: Path) -> None:
    checkpoint = copied("moe/zero1_w4", tmp_path)
    path = one(checkpoint, "layer_1_expert_0_*")
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(ZckptError) as caught:
        convert(checkpoint, tmp_path / "out")
    assert not isinstance(caught.value, UnsafeError) and "layer_1_expert_0" in str(caught.value)


def test_a_universal_checkpoint_of_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as caught:
        to_universal(FIXTURES / "moe" / "zero1_w4" / "checkpoint", tmp_path / "out")
    assert "experts" in caught.value.what and not (tmp_path / "out").exists()


# -- where it all lies -----------------------------------------------------------------------------------------------


def lines_of(name: str, *, tensors: bool = False) -> list[str]:
    inspection = inspect_checkpoint(str(FIXTURES / name / "checkpoint"))
    return list(inspection.lines(tensors=tensors))


def expert_lines(name: str) -> list[str]:
    return [line[14:] for line in lines_of(name) if line[14:].startswith("layer ")]


def test_the_grid_of_experts() -> None:
    assert expert_lines("moe/zero2_pyramid_w4") == [
        "layer 0: 0 on ranks 0, 2; 1 on ranks 1, 3",
        "layer 1: 0 on rank 0; 1 on rank 1; 2 on rank 2; 3 on rank 3",
        "layer 2: 0-2 on ranks 0-3",
    ]
    assert expert_lines("moe/data_first_w4")[0] == "layer 0: 0-1 on ranks 0-1; 2-3 on ranks 2-3"
    assert expert_lines("moe/pipeline_pp2_tp2") == ["layer 0-1: 0-1 on rank 0; 2-3 on rank 1"]


def test_the_grid_of_a_split_model(tmp_path: Path) -> None:
    lines = [line[14:].split(" (")[0] for line in lines_of("pipeline/zero1_pp2_tp2_dp2")]
    at = lines.index("mp_rank 0-3  data rank 0  model, optimizer")
    assert lines[at + 1 : at + 4] == [
        "             data rank 1  optimizer",
        "mp_rank is 2 x the pipeline stage + the tensor rank",
        "8 layer files such as layer_00-model_00-model_states.pt",
    ]
    checkpoint = copied("pipeline/zero1_pp2_tp2_dp2", tmp_path)
    one(checkpoint, "*zero_pp_rank_1_mp_rank_02_*").unlink()
    inspection = inspect_checkpoint(str(checkpoint))
    lines = [line[14:].split(" (")[0] for line in inspection.lines()]
    at = lines.index("mp_rank 2    data rank 0  model, optimizer")
    assert lines[at + 1] == "             data rank 1  optimizer missing" and not inspection.exportable.ok


def test_the_grid_as_json(tmp_path: Path) -> None:
    checkpoint = FIXTURES / "moe" / "zero1_w4" / "checkpoint"
    command = [sys.executable, "-m", "zckpt", "inspect", str(checkpoint), "--json"]
    facts = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert facts["topology"] == {"dp": 4, "tp": 1, "pp": 1, "ep": 2}
    assert facts["experts"][0] == {
        "layer": 0, "spread": [{"experts": [0, 1], "ranks": [0, 2]}, {"experts": [2, 3], "ranks": [1, 3]}]
    }  # fmt: skip
    assert {file["file"] for file in facts["files"]} == {path.name for path in checkpoint.glob("*/*")}
    expert = next(file for file in facts["files"] if file["file"].startswith("layer_0_expert_3"))
    assert (expert["kind"], expert["layer"], expert["expert"], expert["mp_rank"]) == ("expert", 0, 3, 0)
    shard = next(file for file in facts["files"] if "zero_pp_rank_2_" in file["file"])
    assert (shard["rank"], shard["pp"], shard["tp"], shard["state"]) == (2, 0, 0, "ok")
    assert "slices" not in facts["tensors"][0]


@pytest.mark.parametrize("name", ["moe/zero1_w4", "tensor/zero1_tp2_dp2", "autoep/zero3_w4"])
def test_slices_are_where_the_numbers_lie(name: str) -> None:
    """By the listed places alone, tensors are read back to the bit."""
    checkpoint = FIXTURES / name / "checkpoint"
    facts = inspect_checkpoint(str(checkpoint)).as_json(slices=True)
    truth = load_file(FIXTURES / name / "truth.safetensors")
    read = 0
    for tensor in facts["tensors"]:  # type: ignore[attr-defined]
        wanted = truth[tensor["name"]].flatten()
        if tensor["dtype"] != "F32" or any("computed" in piece["file"] for piece in tensor["slices"]):
            continue
        found = torch.full_like(wanted, float("nan"))
        for piece in tensor["slices"]:
            raw = one(checkpoint, piece["file"]).read_bytes()
            for row in range(piece["rows"]):
                at = piece["byte_offset"] + 4 * row * piece["store_pitch"]
                start = piece["start"] + row * piece["pitch"]
                values = torch.frombuffer(bytearray(raw[at : at + 4 * piece["count"]]), dtype=torch.float32)
                found[start : start + piece["count"]] = values
        assert same_bits(found, wanted), tensor["name"]
        read += 1
    assert read >= 9


def test_plain_weights_have_no_grid() -> None:
    lines = list(inspect_checkpoint(str(FIXTURES / "moe" / "zero1_w4" / "truth.safetensors")).lines(tensors=True))
    assert not any("grid" in line or "rank" in line for line in lines)
    assert any(line.startswith("    element 0: truth.safetensors from byte ") for line in lines)


def test_slices_in_words() -> None:
    lines = lines_of("tensor/zero1_tp2_dp2", tensors=True)
    at = next(number for number, line in enumerate(lines) if line.endswith(" down.weight"))
    assert "[0:3, 0:5]: bf16_zero_pp_rank_" in lines[at + 1]


# -- AutoTP ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["zero1_tp2_dp2", "zero2_tp2_dp2", "zero3_tp2_dp2", "fused_tp2"])
def test_autotp_down_to_plain_data_parallelism(name: str, tmp_path: Path) -> None:
    reshard(FIXTURES / "autotp" / name / "checkpoint", tmp_path / "out", world_size=3, stage=3)
    catalog, truth = opened(tmp_path / "out"), load_file(FIXTURES / "autotp" / name / "truth.safetensors")
    assert (catalog.topology.tp, catalog.topology.dp) == (1, 3)
    for key, tensor in truth.items():
        assert same_bits(read_tensor(catalog[key], "pt"), tensor), key


def test_autotp_ranks_that_disagree(tmp_path: Path) -> None:
    checkpoint = copied("autotp/zero1_tp2_dp2", tmp_path)

    copy = next(replica for replica in opened(checkpoint)["model.norm.weight"].replicas if replica.rank)
    with open(str(copy.fragments[0].store), "r+b") as file:
        file.seek(copy.fragments[0].byte_offset)
        file.write(b"\1\2\3\4")
    assert "model.norm.weight" in refused(InconsistentError, checkpoint, tmp_path).found


def test_a_file_of_another_stage_under_a_rank_s_name_is_an_error_of_the_save(tmp_path: Path) -> None:
    """In a pipeline, the stages' optimizer files have different numbers of groups."""
    home = shutil.copytree(FIXTURES / "moe" / "pipeline_pp2_dp2" / "checkpoint", tmp_path / "save")
    name = str(home / "global_step2" / "bf16_zero_pp_rank_{}_mp_rank_{:02d}_optim_states.pt")
    for source, target in (((1, 1), (0, 0)), ((0, 0), (1, 1))):
        shutil.copytree(home, tmp_path / "other", dirs_exist_ok=True)
        other = name.replace(str(home), str(tmp_path / "other"))
        shutil.copy(name.format(*source), other.format(*target))
        assert not zckpt.verify(tmp_path / "other", progress=False).ok

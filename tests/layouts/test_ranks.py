"""Rank files of FSDP as torch writes them: what they hold, where they are found, what is wrong with them."""

from __future__ import annotations

import itertools
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import proofs
import pytest
import torch
from bits import same_bits
from safetensors.torch import load_file
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

import zckpt
from zckpt import layouts
from zckpt.base.errors import (
    CorruptError,
    IncompleteError,
    InconsistentError,
    UnsupportedError,
    ZckptError,
)
from zckpt.containers import Placeholder
from zckpt.jobs.groups import Reading
from zckpt.jobs.inspection import inspect_checkpoint
from zckpt.jobs.open import open_catalog, read_tensor
from zckpt.layouts.save import cut_tensors
from zckpt.layouts.save.companions import other_class

FIXTURES = Path(__file__).parents[2] / "fixtures" / "ranks"
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/how.json"))
NUMBERED = ("empty_w5", "fsdp1_alone_w1")
"""Two groups of parameters; and plain tensors, among which buffers look like parameters."""


def tensors_of(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    catalog = open_catalog(str(path), Reading(**options)).catalog
    return {name: read_tensor(entry, "pt") for name, entry in catalog.tensors.items()}


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_roles(name: str) -> None:
    how = json.loads((FIXTURES / name / "how.json").read_text())
    opened = open_catalog(str(FIXTURES / name / "checkpoint"))
    truth = load_file(FIXTURES / name / "truth.safetensors")
    assert {n: same_bits(read_tensor(e, "pt"), truth[n]) for n, e in opened.catalog.tensors.items()} == dict.fromkeys(
        truth, True
    )
    roles = {n: e.role for n, e in opened.catalog.tensors.items()}
    assert roles == how["roles"]
    assert opened.catalog.source.layout == "fsdp"


@pytest.mark.parametrize("name", NAMES)
def test_optimizers(name: str) -> None:
    opened = open_catalog(str(FIXTURES / name / "checkpoint"))
    if name in NUMBERED:
        with pytest.raises(UnsupportedError, match="numbers"):
            layouts.read_training(opened.place.listing)
        assert any("not read" in note for note in opened.catalog.source.notes)
        return
    training = layouts.read_training(opened.place.listing)
    found = {f"{state}/{n}": e for n, states in training.states.items() for state, e in states.items()}
    trained = [n for n, entry in opened.catalog.tensors.items() if entry.role == "parameter"]
    assert found.keys() == {f"{state}/{n}" for n in trained for state in ("exp_avg", "exp_avg_sq")}
    if (truth := FIXTURES / name / "optimizer.safetensors").exists():
        for key, tensor in load_file(truth).items():
            assert same_bits(read_tensor(found[key], "pt"), tensor), key


def test_what_a_run_directory_means(tmp_path: Path) -> None:
    run = Path(shutil.copytree(FIXTURES / "fsdp2_w2" / "checkpoint", tmp_path / "run"))
    actor = run / "global_step_2" / "actor"
    for path in (run, run / "global_step_2", actor, actor / "model_world_size_2_rank_1.pt"):
        assert open_catalog(str(path)).place.listing.directory.path == str(actor)
    shutil.copytree(actor.parent, run / "global_step_10")
    assert "global_step_2" in str(open_catalog(str(run)).place.listing.directory)
    (run / "latest_checkpointed_iteration.txt").write_text("10\n")
    assert "global_step_10" in str(open_catalog(str(run)).place.listing.directory)
    assert "global_step_2/" in str(open_catalog(str(run), Reading(tag="global_step_2")).place.listing.directory)
    (run / "latest_checkpointed_iteration.txt").write_text("11")
    with pytest.raises(IncompleteError, match="latest_checkpointed_iteration"):
        open_catalog(str(run))
    (run / "latest_checkpointed_iteration.txt").unlink()
    found = inspect_checkpoint(str(run))
    assert "global_step_10" in str(found.place.listing.directory) and any("newest" in note for note in found.notes)
    shutil.copytree(actor, actor.parent / "critic")
    found = inspect_checkpoint(str(actor.parent))
    assert found.place.listing.directory.name == "actor" and any("critic" in note for note in found.notes)
    assert open_catalog(str(actor.parent), Reading(tag="critic")).place.listing.directory.name == "critic"


def test_latest_counts_beside_the_pointer_of_megatron(tmp_path: Path) -> None:
    """Megatron-DeepSpeed writes both."""
    run = Path(shutil.copytree(FIXTURES.parent / "zero2/bf16_w2/checkpoint", tmp_path / "run"))
    tag = (run / "latest").read_text()
    shutil.copytree(run / tag, run / "global_step7")
    (run / "latest_checkpointed_iteration.txt").write_text("7")
    assert open_catalog(str(run)).place.listing.tag == tag


def test_an_output_has_the_config_and_is_verified(tmp_path: Path) -> None:
    source, out = FIXTURES / "fsdp2_w2" / "checkpoint", tmp_path / "out"
    zckpt.convert(source, out)
    assert json.loads((out / "config.json").read_text())["model_type"] == "tiny"
    assert zckpt.verify(source, out).ok
    truth = load_file(FIXTURES / "fsdp2_w2" / "truth.safetensors")
    assert all(same_bits(tensor, truth[name]) for name, tensor in load_file(out / "model.safetensors").items())


@pytest.mark.parametrize("name", [name for name in NAMES if name not in (*NUMBERED, "fsdp1_alone_w1")])
def test_resharding_keeps_weights_and_states(name: str, tmp_path: Path) -> None:
    source = FIXTURES / name / "checkpoint"
    zckpt.to_dcp(source, tmp_path / "dcp", optimizer="optim")
    here, there = (open_catalog(str(path)) for path in (source, tmp_path / "dcp"))
    for tensor, entry in here.catalog.tensors.items():
        assert same_bits(read_tensor(entry, "pt"), read_tensor(there.catalog.tensors[tensor], "pt"))
    ours, theirs = (layouts.read_training(opened.place.listing).states for opened in (here, there))
    assert {n: set(s) for n, s in ours.items()} == {n: set(s) for n, s in theirs.items()}
    for parameter, states in ours.items():
        for state, entry in states.items():
            assert same_bits(read_tensor(entry, "pt"), read_tensor(theirs[parameter][state], "pt"))


def test_an_adapter_of_peft(tmp_path: Path) -> None:
    source = FIXTURES / "lora_w2" / "checkpoint"
    zckpt.to_peft(source, tmp_path / "out")
    truth = load_file(FIXTURES / "lora_w2" / "truth.safetensors")
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert len(found) == 4
    assert all(same_bits(tensor, truth[name.replace(".weight", ".default.weight")]) for name, tensor in found.items())


def test_a_critic_is_a_model_for_token_classification(tmp_path: Path) -> None:
    """verl's own manager wrote it; its config goes on to name the causal language model that the critic was made of."""
    import transformers

    home, out = FIXTURES.parent / "verl" / "critic_w2", tmp_path / "out"
    truth = load_file(home / "truth.safetensors")
    done = zckpt.convert(home / "checkpoint", out)
    assert any("LlamaForTokenClassification" in note for note in done.notes)
    model, said = transformers.AutoModelForTokenClassification.from_pretrained(out, output_loading_info=True)
    assert not any(said.values()), said
    assert type(model) is transformers.LlamaForTokenClassification and model.num_labels == 1
    assert type(model).__name__ in json.loads((out / "config.json").read_text())["architectures"]
    found = model.state_dict()
    assert found.keys() == truth.keys() and all(same_bits(found[name], truth[name]) for name in truth)
    assert zckpt.verify(home / "checkpoint", out).ok
    with zckpt.open_checkpoint(home / "checkpoint" / "global_step_2" / "critic") as critic:
        states = load_file(home / "optimizer.safetensors")
        assert all(same_bits(critic.states[key.split("/")[0]][key.split("/")[1]], states[key]) for key in states)
    config = {"architectures": ["LlamaForCausalLM"]}
    assert other_class(config, ["score.weight"]) == "LlamaForSequenceClassification"
    assert not other_class(config, ["score.weight", "lm_head.weight"]) and not other_class(None, ["score.weight"])


@proofs.only
def test_verls_own_merger_gives_the_same(tmp_path: Path) -> None:
    """Where it reads the files at all: it takes no ShardedTensors, no tensor parallelism, and no mesh without names or of an
    older torch."""
    import verl_merger

    critic = FIXTURES.parent / "verl" / "critic_w2" / "checkpoint" / "global_step_2" / "critic"
    ours, theirs = {n: t.bfloat16() for n, t in tensors_of(critic).items()}, verl_merger.merged(critic)
    assert ours.keys() == theirs.keys() and all(same_bits(ours[n], theirs[n]) for n in ours)
    refused = []
    for name in NAMES:
        source = copy_of(name, tmp_path)
        how = json.loads((FIXTURES / name / "how.json").read_text())
        (source / "fsdp_config.json").write_text(json.dumps({"world_size": how["world_size"]}))
        try:
            theirs = verl_merger.merged(source)
        except (AssertionError, AttributeError, RuntimeError, OSError):
            refused.append(name)
            continue
        ours = {name: tensor.bfloat16() for name, tensor in tensors_of(source).items()}
        assert ours.keys() == theirs.keys()
        assert all(same_bits(ours[n], theirs[n]) for n in ours)
    assert set(refused) == {name for name in NAMES if name.startswith(("old_", "sharded_", "tp_", "any_", "fsdp2_"))}


def test_peft_loads_the_adapter_of_a_run_that_wrote_verls_facts_alone(tmp_path: Path) -> None:
    """verl writes no adapter_config.json: rank, alpha and task are in `lora_train_meta.json`."""
    from peft import PeftModel

    out = tmp_path / "out"
    assert any("lora_train_meta.json" in note for note in zckpt.to_peft(FIXTURES / "lora_w2" / "checkpoint", out).notes)
    base = torch.nn.Module()
    truth = load_file(FIXTURES / "lora_w2" / "truth.safetensors")
    for name in ("body", "head", "other"):  # `other` is like them, and has no LoRA
        weight = truth.get(f"base_model.model.{name}.base_layer.weight", torch.ones(3, 3))
        base.add_module(name, torch.nn.Linear(*reversed(weight.shape)))
    base.prepare_inputs_for_generation = None  # PEFT asks every causal language model for it
    model = PeftModel.from_pretrained(base, str(out))
    loaded = {name: tensor for name, tensor in model.state_dict().items() if "lora_" in name}
    assert loaded.keys() == {name for name in truth if "lora_" in name}
    assert all(same_bits(tensor, truth[name]) for name, tensor in loaded.items())
    assert model.base_model.model.body.scaling == {"default": 2.0}
    assert zckpt.verify(FIXTURES / "lora_w2" / "checkpoint", out).ok


@pytest.mark.parametrize("meta", ["{}", "[]", '{"r": "8", "lora_alpha": 4}', '{"r": 8, "lora_alpha": 4}'])
def test_facts_of_another_adapter_are_refused(meta: str, tmp_path: Path) -> None:
    source = copy_of("lora_w2", tmp_path)
    (source / "lora_train_meta.json").write_text(meta)
    with pytest.raises(ZckptError, match=r"lora_train_meta.json"):
        zckpt.to_peft(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- what is wrong ---------------------------------------------------------------------------------------------------


def copy_of(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / name / "checkpoint", tmp_path / name))


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    place = copy_of("hsdp_w4", tmp_path)
    (place / "model_world_size_4_rank_2.pt").unlink()
    with pytest.raises(IncompleteError, match="rank 2") as error:
        open_catalog(str(place))
    assert error.value.expected == "world size 4"
    assert not zckpt.verify(place).ok
    other = copy_of("any_name_w2", tmp_path)
    (other / "rank0.pt").unlink()
    with pytest.raises(IncompleteError, match="rank 0"):
        open_catalog(str(other))


def test_files_of_two_world_sizes(tmp_path: Path) -> None:
    place = copy_of("alone_w1", tmp_path)
    shutil.copy(FIXTURES / "sharded_tensors_w2/checkpoint/model_world_size_2_rank_1.pt", place)
    with pytest.raises(InconsistentError, match="several world sizes"):
        open_catalog(str(place))


def test_a_rank_of_another_run(tmp_path: Path) -> None:
    place = copy_of("sharded_tensors_w2", tmp_path)
    shutil.copy(place / "model_world_size_2_rank_0.pt", place / "model_world_size_2_rank_1.pt")
    with pytest.raises((IncompleteError, InconsistentError)):
        open_catalog(str(place))
    torch.save({"mean": torch.ones(3)}, place / "model_world_size_2_rank_1.pt")
    with pytest.raises(InconsistentError, match="do not agree on 'mean'"):
        open_catalog(str(place))


def test_copies_that_differ_are_found(tmp_path: Path) -> None:
    place = copy_of("fsdp2_w2", tmp_path) / "global_step_2" / "actor"
    assert zckpt.verify(place, deep=True).ok
    path = place / "model_world_size_2_rank_1.pt"
    data = path.read_bytes()
    mean = torch.linspace(-1, 1, 5).numpy().tobytes()
    assert data.count(mean) == 1
    path.write_bytes(data.replace(mean, mean[:4] + bytes(4) + mean[8:]))
    found = zckpt.verify(place, deep=True)
    assert any("mean" in problem for check in found.checks for problem in check.problems)


def test_plain_tensors_of_several_ranks_are_refused(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"w": torch.ones(2, 3)}, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    with pytest.raises(UnsupportedError, match="which part"):
        open_catalog(str(tmp_path))


def test_whole_dtensors_in_a_plain_file(tmp_path: Path) -> None:
    source = FIXTURES / "alone_w1/checkpoint/model_world_size_1_rank_0.pt"
    shutil.copy(source, tmp_path / "weights.pt")
    truth = load_file(FIXTURES / "alone_w1/truth.safetensors")
    found = tensors_of(tmp_path / "weights.pt")
    assert found.keys() == truth.keys() and all(same_bits(found[n], truth[n]) for n in truth)


def test_other_directories_are_none(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "rank0.pt")
    torch.save({"w": torch.ones(2)}, tmp_path / "rank1.pt")
    with pytest.raises(IncompleteError, match="2 parts that zckpt does not join"):
        open_catalog(str(tmp_path))


# -- the arithmetic --------------------------------------------------------------------------------------------------

_CHOICES = [
    (Shard(0), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Shard(0)), (Replicate(), Shard(1)), (Shard(0), Replicate()),
    (Replicate(), Replicate()), (_StridedShard(0, split_factor=3), Shard(0)), (Shard(-1), Shard(0)),
]  # fmt: skip


@pytest.mark.parametrize("size", [(12, 6), (7, 5), (1, 4), (6, 1)])
def test_boxes_are_torchs(size: tuple[int, int]) -> None:
    """`torch.chunk` applied in the order that the placements say, to numbered elements."""
    mesh = (2, 3)
    for placements in _CHOICES:
        strided = isinstance(placements[0], _StridedShard)
        for at in itertools.product(*map(range, mesh)):
            local = torch.arange(size[0] * size[1]).view(size)
            for mesh_dim in (1, 0) if strided else (0, 1):
                if not isinstance(one := placements[mesh_dim], Replicate):
                    parts = local.chunk(mesh[mesh_dim], one.dim % 2)
                    index = at[mesh_dim]
                    local = parts[index] if index < len(parts) else local.narrow(one.dim % 2, 0, 0)
            found = cut_tensors.cut_tensor(dtensor(size, mesh, at, placements, local), "w", "f")
            assert found is not None
            boxes = [
                torch.arange(size[0] * size[1]).view(size)[o[0] : o[0] + r.shape[0], o[1] : o[1] + r.shape[1]]
                for o, r in found.boxes
            ]
            assert len(boxes) == (local.numel() > 0) and all(torch.equal(box, local) for box in boxes)


def dtensor(size: Any, mesh: Any, at: Any, placements: Any, local: torch.Tensor) -> Placeholder:
    """What the pickle machine makes of a DTensor."""
    from zckpt.containers.tensor_ref import TensorRef
    from zckpt.core.dtypes import I64
    from zckpt.core.stores import FileStore

    store = FileStore("f", 1 << 20)
    ref = TensorRef(store, 0, I64, tuple(local.shape), tuple(local.stride()), "0", 0, 1 << 10, 0)
    named: list[Placeholder] = []
    for one in placements:
        fields = {key: getattr(one, key) for key in ("dim", "split_factor") if hasattr(one, key)}
        named.append(Placeholder("torch", type(one).__name__, state=fields, called=True))
    layout = Placeholder("torch", "_MeshLayout", state={"shape": tuple(mesh), "stride": (mesh[1], 1)}, called=True)
    place = Placeholder("torch", "DeviceMesh", state={"_layout": layout, "_coordinate_on_dim": tuple(at)}, called=True)
    spec = Placeholder("torch", "DTensorSpec", state={"mesh": place, "placements": tuple(named)}, called=True)
    kind = Placeholder("torch.distributed.tensor", "DTensor")
    args = (kind, I64, tuple(size), (size[1], 1), 0, None, None, False)
    state = (None, {"_local_tensor": ref, "_spec": spec})
    return Placeholder("torch._utils", "_rebuild_wrapper_subclass", args, state, called=True)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"_coordinate_on_dim": (5, 0)}, CorruptError),
        ({"_coordinate_on_dim": (0,)}, CorruptError),
        ({"_coordinate_on_dim": (-1, 0)}, CorruptError),
        ({"_coordinate_on_dim": "ab"}, CorruptError),
        ({"_layout": None}, CorruptError),
        ({"_coordinate_on_dim": (1, 2)}, InconsistentError),  # of another rank, whose part is smaller
    ],
)
def test_meshes_that_contradict_themselves(change: dict[str, object], kind: type[ZckptError]) -> None:
    value = dtensor((7, 5), (2, 3), (0, 0), (Shard(0), Shard(0)), torch.zeros(2, 5))
    spec: Any = value.state
    spec[1]["_spec"].state["mesh"].state.update(change)
    with pytest.raises(kind):
        cut_tensors.cut_tensor(value, "w", "f")


def test_sums_that_were_not_made_are_refused() -> None:
    value = dtensor((4, 5), (2, 3), (0, 0), (Replicate(), Replicate()), torch.zeros(4, 5))
    spec: Any = value.state
    spec[1]["_spec"].state["placements"] = (Placeholder("torch", "Partial", called=True),) * 2
    with pytest.raises(UnsupportedError, match="rows or columns"):
        cut_tensors.cut_tensor(value, "w", "f")


def test_nothing_of_a_pickle_runs(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return print, ("ran",)

    place = copy_of("alone_w1", tmp_path)
    torch.save({"w": Evil()}, place / "model_world_size_1_rank_0.pt", pickle_module=pickle)
    with pytest.raises(ZckptError):
        open_catalog(str(place))


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (("state",), []), (("state",), None), (("state",), float("inf")), (("state", 0), []), (("state", 0), float("inf")),
        (("state", 0, "step"), float("nan")), (("state", 0, "exp_avg"), float("inf")), (("param_groups",), []),
        (("param_groups", 0, "lr"), float("inf")),
    ],
)  # fmt: skip
def test_a_ranks_optimizer_that_contradicts_itself(at: tuple[Any, ...], value: object, tmp_path: Path) -> None:
    """It costs the resume, not the weights; and no verdict calls it sound."""
    save = tmp_path / "save"
    shutil.copytree(FIXTURES / "fsdp2_w2" / "checkpoint", save)
    path = save / "global_step_2" / "actor" / "optim_world_size_2_rank_1.pt"
    root = held = torch.load(path, weights_only=False)
    for key in at[:-1]:
        held = held[key]
    held[at[-1]] = value
    torch.save(root, path)
    zckpt.convert(save, tmp_path / "out", progress=False)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == set(zckpt.open_checkpoint(save))
    found = zckpt.verify(save, tmp_path / "out", progress=False)
    assert not found.ok and found.deletable is not None and not found.deletable[0]
    assert path.name in str([check.problems for check in found.checks])
    with pytest.raises(ZckptError):
        zckpt.to_universal(save, tmp_path / "universal")

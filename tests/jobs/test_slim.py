"""Smaller saves hold the same weights, and only what was to be left out is missing; DeepSpeed loads them in tests/interop."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from bits import same_bits
from safetensors.torch import load_file

import zckpt
from zckpt.base.errors import InconsistentError, UnsupportedError, UsageError
from zckpt.jobs.declarations import SLIM
from zckpt.jobs.open import open_catalog, read_tensor
from zckpt.jobs.slim import PlannedSlim, execute, prepare
from zckpt.upkeep.usage import du

FIXTURES = Path(__file__).parents[2] / "fixtures"
CASES = [
    ("zero2/bf16_w2", ("optimizer",)), ("zero2/tied_frozen_w2", ("optimizer", "module-weights", "frozen")), ("zero2/lora_w2", ()),
    ("zero1/elastic_w2", ("optimizer", "module-weights")), ("zero3/lora_w2", ("optimizer", "frozen")),
    ("zero0/bf16", ("optimizer",)), ("zero3/mics_w4", ("optimizer",)), ("bf16_optimizer/groups_w3", ("module-weights",)),
    ("moe/tensor_w4", ("optimizer",)), ("pipeline/zero1_pp2_tp2_dp2", ("optimizer",)), ("autoep/folded_w4", ("optimizer",)),
    ("ranks/fsdp2_w2", ("optimizer",)),
    ("optimizers/oss_ranks_w3", ("optimizer",)), ("trainers/lightning_w1", ("optimizer",)),
    ("fairscale/fairseq_w3", ("optimizer",)), ("dcp/fsdp2_flat_w4", ("optimizer",)), ("dcp/accelerate_fsdp2_w2", ("optimizer",)),
    ("mcore/moe_ep2", ("optimizer",)), ("mcore/model_space_tp2_dp2_0_12", ("optimizer",)), ("nvme/bf16_w2", ("optimizer",)),
    ("nvme/pipelined_w2", ("optimizer",)), ("nvme/params_w2", ("optimizer",)),
]  # fmt: skip


def slim(checkpoint: Path, out: Path, *drop: str) -> PlannedSlim:
    planned = prepare(checkpoint, out, SLIM.ask(drop=drop))
    execute(planned)
    return planned


@pytest.mark.parametrize(
    ("name", "drop"), CASES, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_the_weights_are_the_same(name: str, drop: tuple[str, ...], tmp_path: Path) -> None:
    checkpoint, out = FIXTURES / name / "checkpoint", tmp_path / "out"
    planned = slim(checkpoint, out, *drop)
    if (out / "checkpoint.pt").exists():  # the optimizer's files beside it are gone
        out = out / "checkpoint.pt"
    before, after = open_catalog(checkpoint).catalog, open_catalog(out).catalog
    kept = {n for n, entry in before.tensors.items() if "frozen" not in drop or entry.role != "frozen"}
    assert after.tensors.keys() == kept
    assert dict(after.aliases) == {d: k for d, k in before.aliases.items() if k in kept}
    for tensor in kept:
        assert same_bits(read_tensor(before[tensor], "pt"), read_tensor(after[tensor], "pt")), tensor
    assert planned.saved_bytes > sum(planned.dropped.values()) * 0.5 and planned.dropped.keys() == set(drop)
    usage = du(out).classes
    assert usage["waste"] == 0 or name.startswith("ranks/")  # tensors in objects are left as they are
    assert "optimizer" not in drop or usage["moments"] == 0
    for file in out.rglob("*.pt"):
        torch.load(file, weights_only=False)
    zckpt.convert(checkpoint, tmp_path / "a.safetensors", progress=False)
    zckpt.convert(out, tmp_path / "b.safetensors", progress=False)
    a, b = load_file(tmp_path / "a.safetensors"), load_file(tmp_path / "b.safetensors")
    assert all(same_bits(a[n], b[n]) for n in b) and b.keys() == {n for n in a if n in kept}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["fsdp2_nested_w2", "fsdp2_tp_w4", "hsdp_w4"])
def test_torch_loads_what_remains_of_its_own_saves(name: str, tmp_path: Path) -> None:
    """Every item but the optimizer's, tensors and pickled objects, by torch.distributed.checkpoint itself."""
    checkpoint, out = FIXTURES / "dcp" / name / "checkpoint", tmp_path / "out"
    slim(checkpoint, out, "optimizer")
    before, after = loaded(checkpoint), loaded(out)
    gone = before.keys() - after.keys()
    assert gone == {key for key in before if ".state." in key or "param_groups" in key} and gone
    assert after.keys() <= before.keys() and any("model." in key for key in after)
    for key, value in after.items():
        same = same_bits(value, before[key]) if isinstance(value, torch.Tensor) else value == before[key]
        assert same, key


def loaded(place: Path) -> dict[str, object]:
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    items = FileSystemReader(place).read_metadata().state_dict_metadata
    found: dict[str, object] = {
        name: torch.empty(item.size, dtype=item.properties.dtype) if isinstance(item, TensorStorageMetadata) else b""
        for name, item in items.items()
    }
    load(found, checkpoint_id=place, no_dist=True)
    return found


def test_what_cannot_be_left_out(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name, drop, kind in (
        ("zero2/bf16_w2", (), UsageError),  # nothing to leave out
        ("zero2/bf16_w2", ("frozen",), UsageError),
        ("zero2/sgd_w2", ("optimizer",), UsageError),
        ("zero2/fp32_w1", ("module-weights",), UsageError),
        ("zero3/bf16_w2", ("module-weights",), UnsupportedError),
        ("zero0/bf16", ("module-weights",), UnsupportedError),
        ("pipeline/zero1_pp2_dp2", ("module-weights",), UnsupportedError),
        ("moe/zero1_w4", ("frozen",), UnsupportedError),
        ("ranks/fsdp2_w2", ("frozen",), UnsupportedError),
        ("dcp/fsdp2_nested_w2", ("frozen",), UnsupportedError),
        ("dcp/fsdp2_nested_w2", (), UsageError),
        ("dcp/huggingface_w2", ("optimizer",), UnsupportedError),
        ("nvme/bf16_w2", ("module-weights",), UnsupportedError),
        ("mcore/moe_ep2", ("frozen",), UnsupportedError),
        ("mcore/buckets", ("optimizer",), UnsupportedError),  # which hold the fp32 weights too
        ("mcore/gathered_dp2_0_12", ("optimizer",), UnsupportedError),
        ("mcore/stages_tp2_pp2", ("optimizer",), UsageError),  # has none
        ("megatron_legacy/hf_llama_tp2", ("optimizer",), UnsupportedError),
    ):
        with pytest.raises(kind):
            prepare(FIXTURES / name / "checkpoint", out, SLIM.ask(drop=drop))
    with pytest.raises(UsageError):
        SLIM.ask(drop=("everything",))
    assert not out.exists()


def model_file(checkpoint: Path) -> Path:
    return next(checkpoint.glob("global_step*/mp_rank_00_model_states.pt"))


def test_weights_that_masters_do_not_give_back_are_not_left_out(tmp_path: Path) -> None:
    """Every element is compared, not only those at the ends."""
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(FIXTURES / "zero2" / "bf16_w2" / "checkpoint", checkpoint)
    root = torch.load(model_file(checkpoint), weights_only=False)
    weight = max(root["module"].values(), key=lambda tensor: tensor.numel())
    weight.view(-1)[weight.numel() // 2] += 1
    torch.save(root, model_file(checkpoint))
    with pytest.raises(InconsistentError, match="would not give them back"):
        slim(checkpoint, tmp_path / "out", "module-weights")
    assert not (tmp_path / "out").exists()
    slim(checkpoint, tmp_path / "out", "optimizer")


def test_copies_of_frozen_parameters_become_one(tmp_path: Path) -> None:
    """On a GPU, DeepSpeed writes them twice; on a CPU, its two are one storage."""
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(FIXTURES / "zero2" / "lora_w2" / "checkpoint", checkpoint)
    root = torch.load(model_file(checkpoint), weights_only=False)
    fragments = root["frozen_param_fragments"]
    root["frozen_param_fragments"] = {name: tensor.clone() for name, tensor in fragments.items()}
    torch.save(root, model_file(checkpoint))
    slim(checkpoint, tmp_path / "out")
    again = torch.load(model_file(tmp_path / "out"), weights_only=False)
    for name, tensor in again["frozen_param_fragments"].items():
        assert tensor.data_ptr() == again["module"][name].data_ptr() and same_bits(tensor, fragments[name])
    max(root["frozen_param_fragments"].values(), key=torch.numel).view(-1)[3] += 1
    torch.save(root, model_file(checkpoint))
    with pytest.raises(InconsistentError):
        slim(checkpoint, tmp_path / "other")


def test_shards_that_hold_a_whole_vector(tmp_path: Path) -> None:
    """As DeepSpeed's zero_to_fp32.py writes them."""
    import json

    flat = torch.randn(1000)
    (tmp_path / "in").mkdir()
    parts = {f"w{n}": f"pytorch_model-0000{n + 1}-of-00002.bin" for n in (0, 1)}
    for n, (name, file) in enumerate(parts.items()):
        torch.save(
            {name: flat[500 * n : 500 * n + 500], "odd": flat[n::7][:10], f"tied{n}": flat[:3]}, tmp_path / "in" / file
        )
    names = {**parts, "tied0": parts["w0"], "tied1": parts["w1"], "odd": parts["w0"]}
    (tmp_path / "in" / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    planned = slim(tmp_path / "in", tmp_path / "out")
    assert planned.saved_bytes > 3500
    for n, (name, file) in enumerate(parts.items()):
        again = torch.load(tmp_path / "out" / file, weights_only=True)
        assert same_bits(again[name], flat[500 * n : 500 * n + 500]) and same_bits(again["odd"], flat[n::7][:10])
        assert again[name].untyped_storage().nbytes() == 2000


@pytest.mark.parametrize("name", ["zero2/groups_w3", "zero2/tied_frozen_w2", "tensor/zero1_tp2_dp2"])
def test_a_universal_save_without_moments(name: str, tmp_path: Path) -> None:
    """Weights, buffers, frozen parameters and settings stay, and the files that stay are the very same."""
    zckpt.to_universal(FIXTURES / name / "checkpoint", tmp_path / "in", progress=False)
    planned = slim(tmp_path / "in", tmp_path / "out", "optimizer")
    before, after = open_catalog(tmp_path / "in").catalog, open_catalog(tmp_path / "out").catalog
    assert before.tensors.keys() == after.tensors.keys() and dict(before.aliases) == dict(after.aliases)
    assert all(same_bits(read_tensor(before[n], "pt"), read_tensor(after[n], "pt")) for n in before.tensors)
    assert before.source.optimizer_states and not after.source.optimizer_states
    old, new = ({p.relative_to(home) for p in home.rglob("*.pt")} for home in (tmp_path / "in", tmp_path / "out"))
    assert new < old and all((tmp_path / "in" / f).read_bytes() == (tmp_path / "out" / f).read_bytes() for f in new)
    assert {path.stem for path in old - new} <= {"exp_avg", "exp_avg_sq", "step"}
    assert planned.dropped["optimizer"] == sum((tmp_path / "in" / file).stat().st_size for file in old - new)
    for what in ("module-weights", "frozen"):
        with pytest.raises(UnsupportedError, match="by the model files in it"):
            prepare(tmp_path / "in", tmp_path / "no", SLIM.ask(drop=(what,)))


def test_a_universal_save_of_stage_3_keeps_its_moments(tmp_path: Path) -> None:
    zckpt.to_universal(FIXTURES / "zero3" / "bf16_w2" / "checkpoint", tmp_path / "in", progress=False)
    with pytest.raises(UnsupportedError, match="without the optimizer's states"):
        prepare(tmp_path / "in", tmp_path / "out", SLIM.ask(drop=("optimizer",)))


def test_swap_files_of_masters_stay(tmp_path: Path) -> None:
    """With the attribute that names them, which torch reads without running code; stale buffers are not written."""
    checkpoint = FIXTURES / "nvme" / "pipelined_w2" / "checkpoint"
    slim(checkpoint, tmp_path / "out", "optimizer")
    swapped = {path.name for path in (tmp_path / "out").rglob("*.swp")}
    assert swapped == {p.name for p in checkpoint.rglob("*.swp") if not p.name.startswith("exp_avg")}
    for path in checkpoint.rglob("*optim_states.pt"):
        found = torch.load(tmp_path / "out" / path.relative_to(checkpoint), weights_only=False)["optimizer_state_dict"]
        wanted = torch.load(path, weights_only=False)["optimizer_state_dict"]
        labels = [[vector.ds_id for vector in one["fp32_flat_groups"]] for one in (found, wanted)]
        assert labels[0] == labels[1] and all(not vector.numel() for vector in found["fp32_flat_groups"])

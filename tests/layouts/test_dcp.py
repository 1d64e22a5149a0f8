"""Saves of torch.distributed.checkpoint as torch writes them: what they hold, where they are found, what is wrong with them."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from bits import same_bits
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

import zckpt
from zckpt import layouts
from zckpt.base.errors import (
    CorruptError,
    IncompleteError,
    InconsistentError,
    NotACheckpointError,
    UnsafeError,
    UnsupportedError,
    UsageError,
    ZckptError,
)
from zckpt.jobs.groups import Reading
from zckpt.jobs.inspection import inspect_checkpoint
from zckpt.jobs.open import open_catalog, read_tensor, strip_wrappers
from zckpt.layouts.dcp.write import split_into_chunks
from zckpt.layouts.run.values import step_of
from zckpt.layouts.save.listing import ReadOptions

FIXTURES = Path(__file__).parents[2] / "fixtures" / "dcp"
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/how.json"))


def how_of(name: str) -> dict[str, Any]:
    return json.loads((FIXTURES / name / "how.json").read_text())


def weights(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    catalog, _ = strip_wrappers(open_catalog(str(path), Reading(**options)).catalog)
    return {name: read_tensor(entry, "pt") for name, entry in catalog.tensors.items()}


# -- what they hold ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_roles_and_steps(name: str) -> None:
    how, opened = how_of(name), open_catalog(str(FIXTURES / name / "checkpoint"))
    assert {n: e.role for n, e in strip_wrappers(opened.catalog)[0].tensors.items()} == how["roles"]
    assert opened.catalog.source.layout == "dcp"
    if name not in ("ddp_w2", "hsdp_w4"):  # an optimizer with numbers instead of names, and one without a step
        assert opened.catalog.source.global_steps == (how["step"] if how["groups"] else None)


@pytest.mark.parametrize("name", [name for name in NAMES if (FIXTURES / name / "optimizer.safetensors").exists()])
def test_optimizers(name: str) -> None:
    how, opened = how_of(name), open_catalog(str(FIXTURES / name / "checkpoint"))
    if name == "ddp_w2":
        assert any("not read" in note for note in opened.catalog.source.notes)
        with pytest.raises(UnsupportedError, match="numbers"):
            layouts.read_training(opened.place.listing)
        return
    training = layouts.read_training(opened.place.listing)
    groups = [sorted(group.names) for group in training.groups]
    assert sorted(groups) == sorted(sorted(group) for group in how["groups"] if group or [] in groups)
    truth = load_file(FIXTURES / name / "optimizer.safetensors")
    found = {f"{state}/{n}": entry for n, states in training.states.items() for state, entry in states.items()}
    assert found.keys() == truth.keys()
    for key, entry in found.items():
        assert same_bits(read_tensor(entry, "pt"), truth[key]), key
    for group in training.groups:
        if group.names:
            assert step_of(group.scalars["step"]) == how["step"]
            assert group.settings["lr"] in (0.05, 0.005, 0.0005)


def test_a_training_states_own_items_go_along() -> None:
    opened = open_catalog(str(FIXTURES / "fsdp2_nested_w2" / "checkpoint"))
    model = layouts.read_training(opened.place.listing).model
    assert model["lr_scheduler"]["last_epoch"] == 0 and model["global_steps"] == 2


@pytest.mark.parametrize("key", ["ema", "model"])
def test_a_key_takes_another_state_dict(key: str) -> None:
    opened = open_catalog(str(FIXTURES / "averaged_w2" / "checkpoint"), Reading(read_options=ReadOptions(key=key)))
    catalog, _ = strip_wrappers(opened.catalog)
    for name, tensor in load_file(FIXTURES / "averaged_w2" / "truth.safetensors").items():
        assert same_bits(read_tensor(catalog[name], "pt"), tensor * (0.5 if key == "ema" else 1))


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(UsageError, match="'model', 'ema'"):
        open_catalog(str(FIXTURES / "averaged_w2" / "checkpoint"), Reading(read_options=ReadOptions(key="other")))
    with pytest.raises(UsageError, match="one state dict"):
        open_catalog(
            str(FIXTURES.parent / "zero3" / "bf16_w2" / "checkpoint"), Reading(read_options=ReadOptions(key="ema"))
        )


# -- where they are found ------------------------------------------------------------------------------------------


PLACES = [
    ("accelerate_fsdp2_w2", "", None),
    ("accelerate_fsdp2_w2", "pytorch_model_fsdp_0", None),
    ("accelerate_fsdp2_w2", "pytorch_model_fsdp_0/.metadata", None),
    ("accelerate_fsdp2_w2", "pytorch_model_fsdp_0/__1_0.distcp", None),
    ("fsdp1_w2", "", None),
    ("fsdp1_w2", "checkpoint-2", None),
    ("fsdp2_flat_w4", "", None),
    ("fsdp2_flat_w4", "", "step-2"),
    ("fsdp2_flat_w4", "step-2", None),
    ("fsdp2_flat_w4", "step-2", "step-2"),
]


@pytest.mark.parametrize(("name", "inner", "tag"), PLACES)
def test_any_path_that_means_it(name: str, inner: str, tag: str | None) -> None:
    found = weights(FIXTURES / name / "checkpoint" / inner, tag=tag)
    truth = load_file(FIXTURES / name / "truth.safetensors")
    assert found.keys() == truth.keys() and all(same_bits(found[n], truth[n]) for n in truth)


def test_an_older_save_by_its_tag() -> None:
    now, then = (weights(FIXTURES / "fsdp2_flat_w4" / "checkpoint", tag=tag) for tag in (None, "step-1"))
    assert now.keys() == then.keys() and not all(same_bits(now[n], then[n]) for n in now)


def test_parts_on_two_disks(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        for path in (FIXTURES / "fsdp2_tp_w4" / "checkpoint").iterdir():
            if (path.name == ".metadata" and rank == 0) or path.name.startswith((f"__{rank}_", f"__{rank + 2}_")):
                shutil.copy(path, tmp_path / str(rank))
    with pytest.raises(IncompleteError, match=r"rank 3"):
        weights(tmp_path / "0")
    truth = load_file(FIXTURES / "fsdp2_tp_w4" / "truth.safetensors")
    for first, second in ((0, 1), (1, 0)):
        found = weights(tmp_path / str(first), also=[str(tmp_path / str(second))])
        assert all(same_bits(found[name], truth[name]) for name in truth)


def test_inspect() -> None:
    inspection = inspect_checkpoint(str(FIXTURES / "fsdp2_tp_w4" / "checkpoint"))
    text = "\n".join(inspection.lines(tensors=True))
    assert "torch.distributed.checkpoint 1.0.0, step 2" in text and "exp_avg, exp_avg_sq" in text
    assert inspection.resumable.ok
    assert list(inspection.grid[0]) == [0, 1, 2, 3]
    lines = text.splitlines()
    at = next(n for n, line in enumerate(lines) if line.endswith(" head.weight"))
    assert [line.split(" from ")[0].strip() for line in lines[at + 1 : at + 5]] == [
        "[0:4, 0:2]: __0_0.distcp",
        "[0:4, 2:4]: __1_0.distcp",
        "[4:7, 0:2]: __2_0.distcp",
        "[4:7, 2:4]: __3_0.distcp",
    ]


def places_of(path: str) -> dict[str, list[tuple[int, ...]]]:
    catalog = open_catalog(path).catalog
    return {n: [(f.byte_offset, f.start, f.count, f.rows) for f in e.fragments] for n, e in catalog.tensors.items()}


@pytest.mark.parametrize("name", ["fsdp2_tp_w4", "accelerate_fsdp2_w2", "fsdp2_flat_w4", "huggingface_w2"])
def test_behind_an_address(name: str) -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    here = f"{FIXTURES / name / 'checkpoint'}"
    memory.put(here, f"/dcp/{name}", recursive=True)
    assert places_of(f"memory://dcp/{name}") == places_of(here)


# -- whether they are intact ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_intact(name: str) -> None:
    for deep in (False, True):
        assert zckpt.verify(FIXTURES / name / "checkpoint", deep=deep).ok


@pytest.mark.parametrize("deep", [False, True])
def test_every_record_of_every_item_is_checked(deep: bool, save: Path) -> None:
    (path,) = save.glob("*.distcp")
    data = bytearray(path.read_bytes())
    for what in (b"FloatStorage", torch.arange(24.0).numpy().tobytes(), b"little"):
        at = data.index(what)
        data[at] ^= 4
        path.write_bytes(data)
        found = zckpt.verify(save, deep=deep)
        assert not found.ok, what
        data[at] ^= 4
    path.write_bytes(data)
    assert zckpt.verify(save, deep=deep).ok
    path.unlink()
    assert not zckpt.verify(save, deep=deep).ok


def test_an_output_is_verified(tmp_path: Path) -> None:
    source = FIXTURES.parent / "zero3" / "tied_w2" / "checkpoint"
    zckpt.to_dcp(source, tmp_path / "out")
    found = zckpt.verify(source, tmp_path / "out")
    assert found.ok and found.deletable is not None
    data = bytearray((tmp_path / "out" / "__0_0.distcp").read_bytes())
    data[900] ^= 1
    (tmp_path / "out" / "__0_0.distcp").write_bytes(data)
    assert not zckpt.verify(tmp_path / "out").ok


# -- what can be wrong with them -----------------------------------------------------------------------------------


@pytest.fixture
def save(tmp_path: Path) -> Path:
    """A save of two chunks of one tensor, a scalar and an object, by one process."""
    whole = torch.arange(24.0).reshape(6, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": {"w": whole, "s": torch.tensor(2.5)}, "step": 7}, checkpoint_id=tmp_path / "ckpt")
    return tmp_path / "ckpt"


def changed(save: Path, change: Callable[[Metadata], None]) -> Path:
    """The save with other metadata, pickled by torch's own classes."""
    metadata = pickle.loads((save / ".metadata").read_bytes())
    change(metadata)
    (save / ".metadata").write_bytes(pickle.dumps(metadata))
    return save


def halves(metadata: Metadata, *rows: tuple[int, int]) -> None:
    """Describes `w` as chunks of these rows, all of them where the whole one is."""
    item = metadata.state_dict_metadata["model.w"]
    place = metadata.storage_data.pop(MetadataIndex("model.w", (0, 0)))
    item.chunks = [ChunkStorageMetadata(torch.Size((a, 0)), torch.Size((b - a, 4))) for a, b in rows]
    metadata.storage_data |= {MetadataIndex("model.w", (a, 0)): place for a, _ in rows}


def place(metadata: Metadata, **fields: Any) -> None:
    index = MetadataIndex("model.w", (0, 0))
    metadata.storage_data[index] = replace(metadata.storage_data[index], **fields)


def size(metadata: Metadata, *shape: int) -> None:
    item = metadata.state_dict_metadata["model.w"]
    item.size = torch.Size(shape)
    item.chunks = [ChunkStorageMetadata(torch.Size((0,) * len(shape)), torch.Size(shape))]


WRONG: dict[str, tuple[Callable[[Metadata], None], type[ZckptError], str]] = {
    "overlapping chunks": (lambda m: halves(m, (0, 4), (2, 6)), InconsistentError, "overlap"),
    "a gap": (lambda m: halves(m, (0, 2), (4, 6)), IncompleteError, "are missing"),
    "a chunk missing": (lambda m: halves(m, (0, 3)), IncompleteError, "12 of 24"),
    "no chunks": (lambda m: halves(m), IncompleteError, "0 of 24"),
    "a chunk outside": (lambda m: halves(m, (0, 3), (3, 7)), InconsistentError, "a chunk outside of tensor"),
    "chunks of another size than stored": (lambda m: halves(m, (0, 3), (3, 6)), InconsistentError, "not what"),
    "no place": (lambda m: m.storage_data.clear(), IncompleteError, "no file holds"),
    "beyond the end": (lambda m: place(m, offset=1 << 30), CorruptError, "ends before the end"),
    "an offset of 2^63": (lambda m: place(m, offset=1 << 63), CorruptError, "impossible numbers"),
    "a negative offset": (lambda m: place(m, offset=-8), CorruptError, "impossible numbers"),
    "a length of 2^63": (lambda m: place(m, length=1 << 63), CorruptError, "impossible numbers"),
    "a length of nothing": (lambda m: place(m, length=0), CorruptError, None),
    "a length that cuts": (lambda m: place(m, length=600), CorruptError, "cut short"),
    "an offset that misses": (lambda m: place(m, offset=100), CorruptError, None),
    "a path above": (lambda m: place(m, relative_path="../../x.distcp"), UnsafeError, "elsewhere"),
    "an absolute path": (lambda m: place(m, relative_path="/etc/passwd"), UnsafeError, "elsewhere"),
    "a path with NUL": (lambda m: place(m, relative_path="a\0b"), UnsafeError, "elsewhere"),
    "a path of nothing": (lambda m: place(m, relative_path=""), UnsafeError, "elsewhere"),
    "a path that is a number": (lambda m: place(m, relative_path=5), UnsafeError, "elsewhere"),
    "a file that is not there": (lambda m: place(m, relative_path="__9_0.distcp"), IncompleteError, "rank 9"),
    "a directory": (lambda m: place(m, relative_path="inner"), IncompleteError, "data files are missing"),
    "transformed bytes": (lambda m: place(m, transform_descriptors=["zstd"]), UnsupportedError, "zstd"),
    "a size of 2^62 squared": (lambda m: size(m, 1 << 62, 1 << 62), ZckptError, None),
    "9,999 dimensions": (lambda m: size(m, *(1,) * 9999), CorruptError, None),
    "another tensor's place": (
        lambda m: m.storage_data.update(
            {MetadataIndex("model.w", (0, 0)): m.storage_data[MetadataIndex("model.s", ())]}
        ),
        InconsistentError,
        "not what the metadata say",
    ),
    "an object's place": (
        lambda m: m.storage_data.update({MetadataIndex("model.w", (0, 0)): m.storage_data[MetadataIndex("step")]}),
        CorruptError,
        "another object",
    ),
    "names that are numbers": (lambda m: m.state_dict_metadata.update({7: None}), CorruptError, "not a text"),
    "no description": (lambda m: m.state_dict_metadata.update({"x": None}), CorruptError, "TensorStorageMetadata"),
    "nothing described": (lambda m: setattr(m, "state_dict_metadata", None), CorruptError, "have no state dict"),
    "nothing stored": (lambda m: setattr(m, "storage_data", None), CorruptError, "name no data files"),
    "objects only": (lambda m: m.state_dict_metadata.pop("model.w") and m.state_dict_metadata.pop("model.s"),
                     NotACheckpointError, "holds no weights"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_metadata_that_lie(wrong: str, save: Path, tmp_path: Path) -> None:
    change, kind, text = WRONG[wrong]
    (save / "inner").mkdir()
    changed(save, change)
    with pytest.raises(kind, match=text):
        zckpt.convert(save, tmp_path / "out.safetensors")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ckpt"]


def test_two_chunks_in_one_place_are_no_error_where_they_fit(save: Path) -> None:
    """The same file may hold several items: what is read is what the place says."""
    found = weights(save)
    assert same_bits(found["w"], torch.arange(24.0).reshape(6, 4)) and found["s"] == 2.5


class Evil:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)


def test_metadata_that_run_code(save: Path, tmp_path: Path) -> None:
    (save / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "canary")))
    with pytest.raises(ZckptError):
        weights(save)
    assert not (tmp_path / "canary").exists()
    changed_metadata = {"state_dict_metadata": Evil(tmp_path / "canary")}
    (save / ".metadata").write_bytes(pickle.dumps(changed_metadata))
    with pytest.raises(ZckptError):
        weights(save)
    assert not (tmp_path / "canary").exists()


def test_items_that_run_code(save: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.pt"
    torch.save(Evil(tmp_path / "canary"), bad)
    (save / "__5_0.distcp").write_bytes(bad.read_bytes())
    changed(save, lambda m: place(m, relative_path="__5_0.distcp", offset=0, length=bad.stat().st_size))
    with pytest.raises(ZckptError):
        weights(save)
    assert not (tmp_path / "canary").exists()
    pickle.loads(pickle.dumps(Evil(tmp_path / "canary")))
    assert (tmp_path / "canary").exists()  # it is armed


def test_data_files_that_are_damaged(save: Path) -> None:
    data = (save / "__0_0.distcp").read_bytes()
    for stop in range(0, len(data), 97):
        (save / "__0_0.distcp").write_bytes(data[:stop])
        with pytest.raises(CorruptError):
            weights(save)


def test_metadata_that_are_damaged(save: Path) -> None:
    data = (save / ".metadata").read_bytes()
    for stop in range(0, len(data), 31):
        (save / ".metadata").write_bytes(data[:stop])
        with pytest.raises(ZckptError):
            weights(save)


def test_metadata_with_other_bytes(save: Path) -> None:
    """Whatever a byte becomes: an error of ours, or the tensors of a save that is still sound."""
    data = bytearray((save / ".metadata").read_bytes())
    for at in range(0, len(data), 7):
        for value in (0, 0xFF, data[at] ^ 1):
            (save / ".metadata").write_bytes(data[:at] + bytes([value]) + data[at + 1 :])
            try:
                weights(save)
            except ZckptError:
                pass


def test_no_metadata(save: Path) -> None:
    (save / ".metadata").rename(save / ".metadata.tmp")
    with pytest.raises(IncompleteError, match="which the save did not finish"):
        weights(save)


def test_the_error_says_how_much_is_there(save: Path) -> None:
    changed(save, lambda m: halves(m, *((n, n + 1) for n in range(5))))
    with pytest.raises(IncompleteError, match="20 of 24 elements, in 5 chunks"):
        weights(save)


def test_flat_parameters_are_said(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": {"body._flat_param": torch.zeros(5)}}, checkpoint_id=tmp_path)
    with pytest.raises(UnsupportedError, match="--shapes"):
        weights(tmp_path)


def test_an_optimizer_alone() -> None:
    with pytest.raises(NotACheckpointError, match="pytorch_model_fsdp_0"):
        weights(FIXTURES / "accelerate_fsdp2_w2" / "checkpoint" / "optimizer_0")


def test_a_rank_that_saved_alone_is_missing(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "alone_w2" / "checkpoint", tmp_path / "ckpt")
    (tmp_path / "ckpt" / "__1.metadata").unlink()
    with pytest.raises(IncompleteError, match="metadata and data files of all ranks"):
        weights(tmp_path / "ckpt")


def test_a_safetensors_shard_is_missing(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "huggingface_w2" / "checkpoint", tmp_path / "ckpt")
    next((tmp_path / "ckpt").glob("shard-00001-*")).unlink()
    with pytest.raises(IncompleteError):
        weights(tmp_path / "ckpt")


# -- how they are cut when they are written ------------------------------------------------------------------------


def boxes(shape: tuple[int, ...], chunk_bytes: int) -> Iterator[torch.Tensor]:
    for offsets, sizes in split_into_chunks(shape, 4, chunk_bytes):
        box = torch.zeros(shape, dtype=torch.int)
        box[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] = 1
        yield box


@pytest.mark.parametrize("shape", [(), (1,), (7,), (0,), (0, 4), (3, 0), (5, 3), (1, 1, 6, 2), (1, 1), (2, 3, 4)])
@pytest.mark.parametrize("chunk_bytes", [1, 8, 24, 1 << 20])
def test_chunks_cover_a_tensor_once_in_runs(shape: tuple[int, ...], chunk_bytes: int) -> None:
    held = list(boxes(shape, chunk_bytes))
    assert torch.equal(sum(held, torch.zeros(shape, dtype=torch.int)), torch.ones(shape, dtype=torch.int))
    for box in held:
        ones = box.reshape(-1).nonzero().reshape(-1)
        assert not len(ones) or len(ones) == ones[-1] - ones[0] + 1  # without a gap, as a file holds them
    if chunk_bytes == 1 << 20:
        assert len(held) == 1


def test_storage_information_is_torchs_own() -> None:
    """Fields that a newer torch adds would be overlooked."""
    assert set(_StorageInfo.__dataclass_fields__) == {"relative_path", "offset", "length", "transform_descriptors"}
    assert set(MetadataIndex.__dataclass_fields__) == {"fqn", "offset", "index"}


def casting_tensor(module: str, name: str, field: str, **more: object) -> Any:
    """A class of tensors that stands for one of torchao's: it holds the weight, and says how it will be cast."""

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, inner.size(), strides=inner.stride(), dtype=torch.float32)

        def __init__(self, inner: torch.Tensor) -> None:
            for key, value in {**more, field: inner}.items():
                setattr(self, key, value)

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
            out = func(*(getattr(arg, field) if isinstance(arg, cls) else arg for arg in args), **(kwargs or {}))
            return cls(out) if isinstance(out, torch.Tensor) and out.shape == args[0].shape else out

    Wrapper.__module__, Wrapper.__qualname__, Wrapper.__name__ = module, name, name
    return Wrapper


@pytest.mark.parametrize(
    ("module", "name", "more", "is_read"),
    [
        ("torchao.float8.fsdp_utils", "WeightWithDynamicFloat8CastTensor", {"_precomputed_scale": None}, True),
        (
            "torchao.float8.fsdp_utils",
            "WeightWithDynamicFloat8CastTensor",
            {"_precomputed_scale": torch.ones(())},
            True,
        ),
        ("torchao.prototype.moe_training.tensor", "Float8TrainingWeightWrapperTensor", {"config": None}, True),
        ("torchao.float8.fsdp_utils", "Odd", {"scale": torch.ones(6, 1)}, False),
        ("torchao.dtypes", "AffineQuantizedTensor", {}, False),
    ],
)
def test_the_weight_in_a_wrapper_that_casts_it(
    module: str, name: str, more: dict[str, object], is_read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = casting_tensor(module, name, "_data", **more)
    for at in range(1, module.count(".") + 2):
        monkeypatch.setitem(sys.modules, path := ".".join(module.split(".")[:at]), types.ModuleType(path))
    setattr(sys.modules[module], name, kind)
    weight = torch.arange(24.0).reshape(6, 4)
    with pytest.warns(UserWarning):
        dcp.save(
            {"model": {"a.weight": kind(weight), "norm": torch.ones(3)}}, checkpoint_id=tmp_path / "save", no_dist=True
        )
    if not is_read:
        with pytest.raises(UnsupportedError, match="the kind of tensor"):
            zckpt.convert(tmp_path / "save", tmp_path / "out", progress=False)
        return
    zckpt.convert(tmp_path / "save", tmp_path / "out", progress=False)
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["a.weight"], weight)
    found = zckpt.verify(tmp_path / "save", tmp_path / "out", progress=False)
    assert found.deletable is not None and found.deletable[0], found.deletable


def test_the_same_as_accelerates_own_merge(tmp_path: Path) -> None:
    """Its `merge_fsdp_weights`, of what its `save_state` left."""
    from accelerate.utils import merge_fsdp_weights

    checkpoint = FIXTURES / "accelerate_fsdp2_w2" / "checkpoint"
    merge_fsdp_weights(str(checkpoint / "pytorch_model_fsdp_0"), str(tmp_path / "theirs"))
    zckpt.convert(checkpoint, tmp_path / "ours", dtype="fp32")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(same_bits(ours[name], tensor.float()) for name, tensor in theirs.items())


# -- what lies beside the model ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"v_head.weight": torch.randn(1, 4)}, "'v_head.weight'"),
        ({"extra": {"scale": torch.randn(2)}}, "'extra.scale'"),
        ({"step": torch.tensor(7)}, "'step'"),
        ({"rng": torch.zeros(5056, dtype=torch.uint8)}, ""),
        ({}, ""),
    ],
)
def test_small_tensors_beside_the_model_are_named_before_it_is_called_safe(
    more: dict[str, Any], named: str, tmp_path: Path
) -> None:
    dcp.save({"model": {"w": torch.randn(4, 4)}, **more}, checkpoint_id=tmp_path / "save", no_dist=True)
    zckpt.convert(tmp_path / "save", tmp_path / "out", progress=False)
    found = zckpt.verify(tmp_path / "save", tmp_path / "out", progress=False)
    assert found.deletable is not None and found.deletable[0]
    wanted = f"if you will not need {named}, where nothing was compared: " if named else "every weight is in the output"
    assert found.deletable[1].startswith(wanted)


@pytest.mark.filterwarnings("ignore")
def test_a_data_file_of_an_earlier_save_is_named(tmp_path: Path) -> None:
    """A run that resumed on fewer ranks leaves the files of those that it lacks; a writer with many threads leaves empty ones."""
    for where, values in (("save", torch.ones(4, 4)), ("older", torch.zeros(4, 4))):
        dcp.save({"w": values}, checkpoint_id=tmp_path / where, no_dist=True)
    shutil.copy(tmp_path / "older" / "__0_0.distcp", tmp_path / "save" / "__1_0.distcp")
    (tmp_path / "save" / "__0_7.distcp").touch()
    catalog = open_catalog(str(tmp_path / "save")).catalog
    assert [note for note in catalog.source.notes if "'__1_0.distcp'; it is of another save" in note]
    assert not [note for note in catalog.source.notes if "__0_7" in note]
    assert catalog.topology.dp == 1
    zckpt.convert(tmp_path / "save", tmp_path / "out", progress=False)
    assert load_file(tmp_path / "out" / "model.safetensors")["w"].eq(1).all()
    found = zckpt.verify(tmp_path / "save", tmp_path / "out", progress=False)
    assert found.deletable is not None and "need '__1_0.distcp', where nothing" in found.deletable[1]

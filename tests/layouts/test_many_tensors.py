"""Saves of very many tensors: what each of them may take, and files that are laid out by rules of other programs."""

from __future__ import annotations

import io
import json
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import split_state_dict_into_shards_factory
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from zckpt.base.errors import ZckptError
from zckpt.checks.verify import verify
from zckpt.containers.safetensors_file import skeleton
from zckpt.containers.skeleton import TensorSpec
from zckpt.core.catalog import Catalog, TensorColumns, TensorEntry
from zckpt.core.dtypes import BF16, U8
from zckpt.core.fragments import Fragment
from zckpt.core.plan import PairColumns
from zckpt.core.stores import FileStore
from zckpt.jobs.convert import CONVERT, convert, prepare
from zckpt.jobs.inspection import inspect_checkpoint
from zckpt.layouts.dcp import metadata
from zckpt.layouts.dcp.read import read
from zckpt.layouts.plain.write import WeightsTarget, lay_out
from zckpt.layouts.save.listing import list_files
from zckpt.storage.location import locate

TENSORS, RANKS = 6000, 8
STORE = FileStore("f", 1 << 40)


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A save of `torch.distributed.checkpoint` by eight ranks, each tensor whole on one of them."""
    home = tmp_path_factory.mktemp("many")
    buffer = io.BytesIO()
    torch.save(torch.ones((1, 8), dtype=torch.bfloat16), buffer)
    data = buffer.getvalue()
    described: dict[str, Any] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for number in range(TENSORS):
        name, rank = f"model.layers.{number // 64}.mlp.experts.{number % 64}.weight", number % RANKS
        chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([1, 8]))
        described[name] = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), torch.Size([1, 8]), [chunk])
        stored[MetadataIndex(name, torch.Size([0, 0]))] = _StorageInfo(
            f"__{rank}_0.distcp", number // RANKS * len(data), len(data)
        )
    for rank in range(RANKS):
        (home / f"__{rank}_0.distcp").write_bytes(data * (TENSORS // RANKS))
    pickled = Metadata(described, {name: ("model", name[6:]) for name in described}, stored)
    (home / ".metadata").write_bytes(pickle.dumps(pickled, protocol=4))
    return home


def test_a_tensor_takes_few_bytes_until_it_is_planned(save: Path, tmp_path: Path) -> None:
    asked = CONVERT.ask(dtype=BF16, max_shard_size="20KB")
    prepare(str(save), str(tmp_path / "first"), asked)  # imports
    tracemalloc.start()
    try:
        prepared = prepare(str(save), str(tmp_path / "o"), asked)
        held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(prepared.plan.pairs) == TENSORS and len(prepared.plan.files) == 6
    assert held < 1000 * TENSORS  # it, where it goes, their names, and headers and an index of 250 bytes for each
    assert most < 1400 * TENSORS


sizes = st.lists(st.integers(0, 40), max_size=12)


@given(sizes, st.integers(1, 60))
def test_shards_are_those_of_the_hub(numels: list[int], most: int) -> None:
    entries = [
        TensorEntry(f"t{at}", (n,), U8, "parameter", (Fragment(STORE, 0, 0, n),) if n else ())
        for at, n in enumerate(numels)
    ]
    found = lay_out([(entry, U8) for entry in entries], {}, WeightsTarget("safetensors", max_shard_size=most))
    split = split_state_dict_into_shards_factory(
        {entry.name: entry for entry in entries},  # type: ignore[type-var]
        get_storage_size=lambda entry: entry.nbytes,  # type: ignore[attr-defined]
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=most,
    )
    index = {output.path: output.literals for output, _ in found.files}.pop("model.safetensors.index.json", None)
    assert [output.path for output, _ in found.files if output.path.endswith("s")] == [*split.filename_to_tensors]
    where = {name: entry.fragments[0].store for name, entry in found.entries.items() if entry.fragments}
    assert {name: str(store) for name, store in where.items()} == {
        name: split.tensor_to_filename[name] for name in where
    }
    assert (index is not None) == split.is_sharded
    if index is not None:
        weights = dict(sorted(split.tensor_to_filename.items()))
        metadata = {"total_parameters": sum(numels), "total_size": sum(numels)}
        assert index[0][1].decode() == json.dumps({"metadata": metadata, "weight_map": weights}, indent=2) + "\n"


@given(st.lists(st.text(), unique=True, max_size=5), st.lists(st.integers(0, 3), max_size=3))
def test_a_header_is_the_json_that_python_writes(names: list[str], shape: list[int]) -> None:
    specs = [TensorSpec(name, BF16, tuple(shape)) for name in names if name != "__metadata__"]
    try:
        found = skeleton(specs, metadata={"a": 'é"'})
    except Exception as error:
        assert "Unicode" in str(error)
        return
    end, wanted = 0, dict[str, object]({"__metadata__": {"format": "pt", "a": 'é"'}})
    for spec in specs:
        wanted[spec.name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + spec.nbytes]}
        end += spec.nbytes
    text = json.dumps(wanted, ensure_ascii=False, separators=(",", ":")).encode()
    ((_, literal),) = found.literals
    assert literal[8:].rstrip(b" ") == text and len(literal) % 64 == 0
    assert int.from_bytes(literal[:8], "little") == len(literal) - 8
    assert found.offsets == {name: len(literal) + wanted[name]["data_offsets"][0] for name in found.offsets}  # type: ignore[index]


def test_metadata_of_very_many_tensors_become_columns_that_mean_the_same(
    save: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = CONVERT.ask(dtype=BF16, max_shard_size="20KB")
    plain = prepare(str(save), str(tmp_path / "o"), asked)
    facts = inspect_checkpoint(save)
    monkeypatch.setattr(metadata, "LARGE_BYTES", 0)
    columns = prepare(str(save), str(tmp_path / "o"), asked)
    assert isinstance(columns.catalog.tensors, TensorColumns) and isinstance(columns.plan.pairs, PairColumns)
    assert columns.plan.move_count == plain.plan.move_count == TENSORS
    assert columns.plan.bytes_read == plain.plan.bytes_read == TENSORS * 16
    assert [[list(literal) for literal in file.literals] for file, _ in columns.plan.files] == [
        [list(literal) for literal in file.literals] for file, _ in plain.plan.files
    ]
    assert [(file.path, file.size) for file, _ in columns.plan.files] == [(f.path, f.size) for f, _ in plain.plan.files]
    assert list(map(seen, columns.plan.pairs)) == list(map(seen, plain.plan.pairs))
    assert seen(columns.plan.pairs[-1]) == seen(plain.plan.pairs[-1])
    assert list(map(seen, columns.plan.pairs[5:7])) == list(map(seen, plain.plan.pairs[5:7]))
    found = inspect_checkpoint(save)
    assert isinstance(found.catalog, Catalog) and isinstance(found.catalog.tensors, TensorColumns)
    assert found.as_json(slices=True) == facts.as_json(slices=True)
    assert list(found.lines(tensors=True)) == list(facts.lines(tensors=True))
    tensors = found.catalog.tensors
    assert tensors["layers.1.mlp.experts.2.weight"] is tensors["layers.1.mlp.experts.2.weight"]
    assert "layers.1.mlp.experts.2.weight" in tensors and "other" not in tensors and "" not in tensors
    assert {store.path for store in found.catalog.stores()} == {store.path for store in facts.catalog.stores()}  # type: ignore[union-attr]


def seen(pair: Any) -> list[object]:
    return [
        (
            one.name,
            one.shape,
            one.dtype,
            one.role,
            [(str(f.store), f.byte_offset, f.start, f.count) for f in one.fragments],
        )
        for one in pair
    ]


def test_what_is_written_from_columns_is_what_is_written_without(
    save: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(save, tmp_path / "plain", dtype="fp32", max_shard_size="20KB", progress=False)
    monkeypatch.setattr(metadata, "LARGE_BYTES", 0)
    convert(save, tmp_path / "columns", dtype="fp32", max_shard_size="20KB", progress=False)
    names = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "columns").iterdir())
    for name in names:
        assert (tmp_path / "columns" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes(), name
    assert verify(save, tmp_path / "columns", progress=False).ok


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensors of several kinds: one without elements and in no file, one without dimensions, a buffer; the state dict has another
    order than the metadata.
    """
    home = tmp_path_factory.mktemp("few")
    tensors = {
        "b.weight": torch.arange(6.0).view(2, 3),
        "a.step": torch.tensor(7),
        "none": torch.zeros(0, 4),
        "c": torch.ones(3),
    }
    described: dict[str, Any] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    held = [b"", b""]
    for number, (name, tensor) in enumerate(tensors.items()):
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        zeros = torch.Size([0] * tensor.dim())
        described[name] = TensorStorageMetadata(
            TensorProperties(dtype=tensor.dtype), tensor.shape, [ChunkStorageMetadata(zeros, tensor.shape)]
        )
        if tensor.numel():
            place = _StorageInfo(f"__{number % 2}_0.distcp", len(held[number % 2]), len(buffer.getvalue()))
            stored[MetadataIndex(name, zeros)] = place
            held[number % 2] += buffer.getvalue()
    for rank, data in enumerate(held):
        (home / f"__{rank}_0.distcp").write_bytes(data)
    pickled = Metadata(described, {name: (name,) for name in sorted(described)}, stored)
    (home / ".metadata").write_bytes(pickle.dumps(pickled, protocol=4))
    return home


def meaning(home: Path) -> object:
    """What a save means: its tensors and where they lie; or the error."""
    try:
        catalog = read(list_files(locate(home), ""))
    except ZckptError as error:
        return type(error), error.what, error.found, error.expected, error.remedy
    return catalog.source, catalog.evidence, catalog.topology, [seen([one])[0] for one in catalog.tensors.values()]


def test_columns_hold_tensors_of_every_kind(few: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = meaning(few)
    monkeypatch.setattr(metadata, "LARGE_BYTES", 0)
    assert meaning(few) == plain
    tensors = read(list_files(locate(few), "")).tensors
    assert isinstance(tensors, TensorColumns) and list(tensors) == ["a.step", "b.weight", "c", "none"]
    assert [(one.role, n) for one, n in tensors.alike()] == [
        ("buffer", 1),
        ("parameter", 1),
        ("parameter", 1),
        ("parameter", 1),
    ]


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_damaged_saves_mean_the_same_with_columns(
    few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for file in few.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    data = (few / name).read_bytes()
    cases = [data[:at] for at in range(0, len(data), 37)]
    for at in range(0, len(data), 3 if name == ".metadata" else 29):
        cases += [data[:at] + bytes([new]) + data[at + 1 :] for new in {data[at] ^ 1, 0xFF, ord("0")}]
    others = 0
    for case in cases:
        (tmp_path / name).write_bytes(case)
        monkeypatch.setattr(metadata, "LARGE_BYTES", 1 << 40)
        plain = meaning(tmp_path)
        monkeypatch.setattr(metadata, "LARGE_BYTES", 0)
        assert meaning(tmp_path) == plain, case
        others += isinstance(plain, tuple) and isinstance(plain[0], type)
    assert others > len(cases) / 4


@pytest.mark.parametrize(
    "change", ["two files", "same place", "missing file", "optimizer", "another key", "key", "config"]
)
def test_what_columns_cannot_hold_is_read_one_by_one(
    few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    for file in few.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    pickled = pickle.loads((few / ".metadata").read_bytes())
    places = list(pickled.storage_data)
    if change == "same place":
        pickled.state_dict_metadata["again"] = pickled.state_dict_metadata["c"]
        pickled.planner_data["again"] = ("again",)
        pickled.storage_data[MetadataIndex("again", torch.Size([0]))] = pickled.storage_data[places[-1]]
    elif change == "two files":
        pickled.state_dict_metadata["c"].chunks = [
            ChunkStorageMetadata(torch.Size([at]), torch.Size([n])) for at, n in ((0, 1), (1, 2))
        ]
    elif change == "missing file":
        (tmp_path / "__0_0.distcp").unlink()
    elif change == "optimizer":
        pickled.state_dict_metadata["optim.param_groups.0.lr"] = BytesStorageMetadata()
    elif change == "another key":
        pickled.planner_data["c"] = ("ema", "c")
    elif change == "key":
        pickled.planner_data = {name: ("model", *path) for name, path in pickled.planner_data.items()}
    else:
        (tmp_path / "config.json").write_text(
            json.dumps({"model_type": "llama", "vocab_size": 2, "tie_word_embeddings": True})
        )
    (tmp_path / ".metadata").write_bytes(pickle.dumps(pickled, protocol=4))
    plain = meaning(tmp_path)
    monkeypatch.setattr(metadata, "LARGE_BYTES", 0)
    assert meaning(tmp_path) == plain
    if change != "missing file" and isinstance(plain, tuple) and not isinstance(plain[0], type):
        assert not isinstance(read(list_files(locate(tmp_path), "")).tensors, TensorColumns)

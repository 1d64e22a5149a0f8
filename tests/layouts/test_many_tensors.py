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
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from zckpt.containers.safetensors_file import skeleton
from zckpt.containers.skeleton import TensorSpec
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import BF16, U8
from zckpt.core.fragments import Fragment
from zckpt.core.stores import FileStore
from zckpt.jobs.convert import CONVERT, prepare
from zckpt.layouts.plain.write import WeightsTarget, lay_out

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
    metadata = Metadata(described, {name: ("model", name[6:]) for name in described}, stored)
    (home / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))
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

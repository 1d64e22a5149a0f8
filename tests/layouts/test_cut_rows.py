"""Tensors of many chunks, and many tensors of one chunk, opened in columns: as chunk by chunk, or the same error."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from zckpt.base.errors import ZckptError
from zckpt.containers import torch_zip
from zckpt.layouts.dcp import cut_rows
from zckpt.layouts.dcp.chunks import Chunks
from zckpt.layouts.dcp.read import read
from zckpt.layouts.save.listing import list_files
from zckpt.storage.location import locate

RANKS = 12


def torch_file(numbers: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(numbers, buffer)
    return buffer.getvalue()


@pytest.fixture(params=["cut", "whole"])
def save(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Four tensors cut over twelve ranks: by rows, with a shorter last chunk, as vectors, and by columns; or as many of each
    as there are ranks, each whole on one rank, and one of them transposed.
    """
    tensors = {
        "even": torch.arange(48, dtype=torch.float32).view(24, 2),
        "uneven": torch.arange(46, dtype=torch.bfloat16).view(23, 2),
        "vector": torch.arange(24, dtype=torch.float64),
        "columns": torch.arange(48, dtype=torch.float32).view(2, 24),
    }
    is_whole = request.param == "whole"
    if is_whole:
        tensors = {f"{name}.{rank}": tensor for rank in range(RANKS) for name, tensor in tensors.items()}
        tensors["turned"] = torch.arange(6.0).view(3, 2).t()
    stored: dict[MetadataIndex, _StorageInfo] = {}
    described: dict[str, Any] = {}
    held = [b""] * RANKS
    for name, tensor in tensors.items():
        dim = int(name == "columns")
        chunks = []
        number = int(name.rpartition(".")[2]) if "." in name else 0
        for rank, part in [(number, tensor)] if is_whole else enumerate(tensor.split(2, dim)):
            offsets = torch.Size([rank * 2 if d == dim and not is_whole else 0 for d in range(tensor.dim())])
            data = torch_file(part.clone(memory_format=torch.preserve_format))
            stored[MetadataIndex(name, offsets)] = _StorageInfo(f"__{rank}_0.distcp", len(held[rank]), len(data))
            held[rank] += data
            chunks.append(ChunkStorageMetadata(offsets, part.shape))
        described[name] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, chunks[::-1])
    for rank, data in enumerate(held):
        (tmp_path / f"__{rank}_0.distcp").write_bytes(data)
    metadata = Metadata(described, {name: ("model", name) for name in described}, stored)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))
    return tmp_path


def opened(save: Path) -> object:
    """Name -> (file, byte, first element, elements, rows) of each fragment; or an error."""
    try:
        catalog = read(list_files(locate(save), ""))
    except ZckptError as error:
        return type(error), error.what, error.found
    return {
        name: (
            entry.shape,
            entry.dtype,
            [(str(f.store), f.byte_offset, f.start, f.count, f.rows) for f in entry.fragments],
        )
        for name, entry in catalog.tensors.items()
    }


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Any:
    def slow(save: Path) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(cut_rows, "_LEAST_CHUNKS", 1 << 30)
            patch.setattr(Chunks, "are_one", lambda *_: False)
            return opened(save)

    return slow


def test_the_same_fragments(save: Path, one_by_one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read_files, count = torch_zip.read_input, []
    monkeypatch.setattr(torch_zip, "read_input", lambda *args: count.append(1) or read_files(*args))
    found = opened(save)
    assert len(count) < 8  # one of each form is read, and others are compared with it
    assert type(found) is dict and list(found) in (
        ["even", "uneven", "vector", "columns"],
        [f"{name}.{rank}" for rank in range(RANKS) for name in ("even", "uneven", "vector", "columns")] + ["turned"],
    )
    assert found == one_by_one(save)


@pytest.mark.parametrize("what", ["header", "shape", "cut short", "lost", "elsewhere"])
def test_damage_is_the_same_error(what: str, save: Path, one_by_one: Any) -> None:
    path = save / "__5_0.distcp"
    data = bytearray(path.read_bytes())
    if what == "header":
        data[data.index(b"PK\x03\x04") + 2] ^= 1
    elif what == "shape":  # a pickle that says one row less
        at = data.index(b"data.pkl")
        rows = b"\x18" if b"K\x18K\x02\x86" in data else b"\x02"
        data[data.index(b"K" + rows + b"K\x02\x86", at) + 1] -= 1
    elif what == "cut short":
        del data[-40:]
    elif what == "elsewhere":
        data[0:0] = b"more"
    path.write_bytes(data)
    if what == "lost":
        path.unlink()
    found = opened(save)
    assert type(found) is tuple
    assert found == one_by_one(save)

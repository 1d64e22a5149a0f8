"""Rows that C++ reads out of a pickle: nothing may come out of it that the opcodes one by one would not give."""

from __future__ import annotations

import pickle
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import damage_pickle
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from zckpt.base.errors import ZckptError
from zckpt.containers import load_pickle, pickles
from zckpt.containers.phrases import Phrases
from zckpt.containers.records import PlaceTable
from zckpt.layouts.dcp.chunks import FINISHERS, Boxes, Chunks, is_inside, row_kinds
from zckpt.layouts.dcp.metadata import TensorItem, read_metadata
from zckpt.layouts.save.listing import list_files
from zckpt.storage.location import locate

RANKS, TENSORS = 400, 5
SIZES = (1, 300, 70_000, 1 << 33)


def metadata(ranks: int = RANKS, *, known_names: bool = True, odd: bool = False) -> Metadata:
    """Places of chunks as torch writes them, over several frames of the pickle: numbers of all sizes, known and new texts."""
    shuffled = random.Random(0)
    described: dict[str, Any] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for tensor in range(TENSORS):
        name, rest = (
            f"layer.{tensor}\u00e9" if odd and tensor == 1 else f"layer.{tensor}",
            [SIZES[tensor % 4]] * (tensor % 3),
        )
        chunks = [ChunkStorageMetadata(torch.Size([r, *[0] * len(rest)]), torch.Size([1, *rest])) for r in range(ranks)]
        described[name] = TensorStorageMetadata(
            TensorProperties(dtype=torch.bfloat16), torch.Size([ranks, *rest]), chunks
        )
        for rank, chunk in enumerate(chunks):
            own = name if known_names else "".join(name)[:-1] + name[-1]
            index = MetadataIndex(own, torch.Size(chunk.offsets), rank if odd and rank % 2 else None)
            stored[index] = _StorageInfo(f"__{rank}_0.distcp", tensor * shuffled.choice(SIZES), 100 + rank)
    stored[MetadataIndex("rng")] = _StorageInfo("__0_0.distcp", 1 << 40, 7)
    return Metadata(described, {name: ("model", name) for name in described}, stored)


def by_rows(data: bytes) -> Any:
    return load_pickle(data, file="f", finishers=FINISHERS, rows=row_kinds(), most=1 << 30).state  # type: ignore[attr-defined]


def one_by_one(data: bytes) -> Any:
    return load_pickle(data, file="f", finishers=FINISHERS, most=1 << 30).state  # type: ignore[attr-defined]


def boxes_in(state: Any) -> dict[str, object]:
    """The boxes of each tensor, in either form."""
    return {name: [*map(tuple, value.state["chunks"])] for name, value in state["state_dict_metadata"].items()}


@pytest.mark.parametrize("known_names", [True, False])
@pytest.mark.parametrize("odd", [True, False])
def test_rows_are_what_the_opcodes_give(odd: bool, known_names: bool) -> None:
    data = pickle.dumps(metadata(known_names=known_names, odd=odd), protocol=4)
    assert data.count(b"\x95") > 3  # frames begin within rows
    rows, objects = by_rows(data), one_by_one(data)
    table, places = rows["storage_data"], objects["storage_data"]
    assert type(table) is PlaceTable and type(places) is dict
    assert len(table) == len(places) == RANKS * TENSORS + 1 and not table.odd
    assert all(table.get(key) == place for key, place in places.items())
    assert table.get(("layer.0", (RANKS,))) is None and table.get(("layer", (0,))) is None
    assert boxes_in(rows) == boxes_in(objects)


def test_hardly_any_object_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done in Python grows with the ranks and the tensors, and not with the chunks, which are their product."""
    counted, read = [0], Phrases.read

    def count(*args: Any) -> Any:
        counted[0] += 1
        return read(*args)

    monkeypatch.setattr(Phrases, "read", count)
    by_rows(pickle.dumps(metadata(), protocol=4))
    assert counted[0] < 3 * RANKS  # the names of files are used again, so each first one is read by itself


def test_a_chunk_takes_few_bytes(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata(4000), protocol=4))
    listing = list_files(locate(tmp_path), "")
    tracemalloc.start()
    try:
        found = read_metadata(listing)
        held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    chunks = sum(len(item.chunks) for item in found.items.values() if isinstance(item, TensorItem))
    assert chunks == 4000 * TENSORS
    assert all(
        type(item.chunks) is Chunks for item in found.items.values() if isinstance(item, TensorItem) and item.size
    )
    assert held < 120 * chunks  # seven numbers, and the names of 4,000 files
    assert most < held + 300 * chunks  # the pickle, of 170 bytes for each


def test_damaged_pickles_give_what_they_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte or more is changed, removed or doubled, in 60 ways: the same places, or the same error."""
    data, changes = pickle.dumps(metadata(120), protocol=4), random.Random(1)
    read = 0

    def said(rows: bool, damaged: bytes) -> Any:
        try:
            state = (by_rows if rows else one_by_one)(damaged)
            stored = state["storage_data"]
            boxes = {k: list(v.state["chunks"]) for k, v in state["state_dict_metadata"].items()}
        except ZckptError as error:
            return type(error), error.what
        except (AttributeError, TypeError, KeyError):
            return "no metadata"
        return boxes, stored

    for _ in range(60):
        damaged = bytearray(data)
        at = changes.randrange(len(damaged) // 5, len(damaged))
        damage_pickle(damaged, at, changes)
        fast, slow = said(True, bytes(damaged)), said(False, bytes(damaged))
        if isinstance(fast, tuple) and isinstance(fast[1], PlaceTable):
            table, places = fast[1], slow[1]
            assert repr(fast[0]) == repr(slow[0])
            tuples = {key: place for key, place in places.items() if type(key) is tuple}
            odd = {key: place for key, place in table.odd.items() if type(key) is tuple}
            differ = [key for key in tuples if repr(tuples[key]) not in (repr(table.get(key)), repr(odd.get(key)))]
            assert not any(
                is_inside(table.get(key).file) for key in differ
            )  # `metadata` refuses the others, as it does objects
            assert len(places) - len(tuples) == len(table.odd) - len(odd)
            read += 1
        else:
            assert repr(fast) == repr(slow)
    assert 5 < read < 55  # of both kinds


def test_a_dict_that_is_used_twice_stays_one() -> None:
    """Nothing else may take the place of an object that something else refers to."""
    places = metadata().storage_data
    state = {"state_dict_metadata": {}, "storage_data": places, "planner_data": places}
    data = pickle.dumps(Metadata(**state), protocol=4)
    found = by_rows(data)
    assert found["storage_data"] is found["planner_data"] and len(found["storage_data"]) == RANKS * TENSORS + 1


def test_without_the_engine_there_are_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles, "entries_behind", None)
    found = by_rows(pickle.dumps(metadata(100), protocol=4))
    assert type(found["storage_data"]) is dict
    assert isinstance(found["state_dict_metadata"]["layer.1"].state["chunks"], Boxes)

"""Objects that are read in one go: nothing may come out of it that the opcodes one by one would not give."""

from __future__ import annotations

import pickle
import random
import re
from typing import Any

import pytest
import torch
from damage import damage_pickle
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from zckpt.base.errors import ZckptError
from zckpt.containers import Placeholder, pickles
from zckpt.containers.machine import Machine
from zckpt.containers.meanings import MEANINGS, runs_code
from zckpt.containers.phrases import Phrases
from zckpt.layouts.dcp.chunks import FINISHERS, Boxes

MANY = 60


def metadata(protocol: int = 4) -> bytes:
    """Places of chunks as torch writes them: shapes of one to five dimensions, new and known names, all sizes of numbers."""
    random.seed(0)
    same, chunks, stored = "a.name", [], {}
    for n in range(MANY):
        dims = random.choice((1, 2, 3, 5))
        shape = torch.Size(random.choice((0, 7, 255, 256, 70_000, 1 << 33)) for _ in range(dims))
        chunks.append(ChunkStorageMetadata(shape, torch.Size(random.randrange(99) for _ in range(dims))))
        name = same if n % 3 else f"\u00e9.{n}"
        index = MetadataIndex(name, torch.Size(tuple(shape) + (n,)), random.choice((None, 3, 1000)))
        stored[index] = _StorageInfo(f"__{n}_0.distcp", random.choice((0, 40_000, 1 << 31, 1 << 40)), n * 1000)
    kinds = [
        TensorProperties(dtype=dtype, requires_grad=grad)
        for dtype in (torch.float32, torch.bfloat16)
        for grad in (0, 1)
    ]
    tensors = [
        TensorStorageMetadata(
            kinds[n % 4],
            torch.Size([1, n]),
            [ChunkStorageMetadata(torch.Size([0, n]), torch.Size([1, k])) for k in range(n % 4)],
        )
        for n in range(MANY)
    ]
    tensors.append(
        TensorStorageMetadata(
            kinds[0],
            torch.Size([2500, 1]),
            [ChunkStorageMetadata(torch.Size([n, 0]), torch.Size([1, 1])) for n in range(2500)][:: 2500 // MANY],
        )
    )
    named = whole_tensors()
    held = [chunks, tensors, named, stored, [same] * 3, chunks[-1], chunks[-1].sizes, [*named]]
    return pickle.dumps(held, protocol=protocol)


def whole_tensors() -> dict[str, TensorStorageMetadata]:
    """Tensors of few shapes and kinds, each in one chunk or two: they differ in their names."""
    return {
        f"layers.{n}.{chr(0xE9) * (n % 2)}weight": TensorStorageMetadata(
            TensorProperties(dtype=(torch.float32, torch.bfloat16)[n // 2 % 2]),
            torch.Size([300, 2]),
            [
                ChunkStorageMetadata(torch.Size([k * 300 // (1 + n % 2), 0]), torch.Size([300 // (1 + n % 2), 2]))
                for k in range(1 + n % 2)
            ],
        )
        for n in range(MANY)
    }


def plain(value: Any) -> Any:
    """An inert object as values that can be compared."""
    if isinstance(value, Placeholder):
        return (str(value), value.called, value.new, plain(value.args), plain(value.state), plain(value.items))
    if isinstance(value, Boxes):
        return list(value)
    if isinstance(value, dict):
        return sorted(((plain(key), plain(item)) for key, item in value.items()), key=repr)
    return type(value).__name__, [plain(item) for item in value] if isinstance(value, list | tuple) else value


def loaded(data: bytes) -> tuple[object, int]:
    """What a pickle gives, an error too, and its cost."""
    machine = Machine(data, "file", finishers=FINISHERS, most=1 << 30)
    try:
        return plain(pickles.read_pickle(machine)), machine.cost
    except EOFError:
        return "no end", 0
    except ZckptError as error:
        return (type(error), error.what), 0


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same without phrases; `fast` says how many objects phrases read."""
    read, taken = Phrases.read, []

    def counted(*args: Any) -> Any:
        found = read(*args)
        taken.append(found)
        return found

    monkeypatch.setattr(Phrases, "read", counted)

    def slow(data: bytes) -> tuple[object, int]:
        with monkeypatch.context() as patch:
            patch.setattr(Phrases, "read", lambda *_: None)
            return loaded(data)

    slow.fast = lambda: sum(found is not None for found in taken)  # type: ignore[attr-defined]
    return slow


def test_most_objects_are_read_in_one_go_and_are_the_same(one_by_one: Any) -> None:
    data = metadata()
    (fast, cost), (slow, slow_cost) = loaded(data), one_by_one(data)
    assert fast == slow and type(fast) is tuple
    assert one_by_one.fast() > 2 * MANY
    assert 200 * one_by_one.fast() < cost < slow_cost  # that of what remains: a bound on memory stays one


def test_an_object_that_stands_for_several_is_not_changed_for_all(
    monkeypatch: pytest.MonkeyPatch, one_by_one: Any
) -> None:
    """A second state, for one of the tensors that are described by equal objects."""
    repeated, taken = Phrases.read_repeated, []

    def counted(*args: Any) -> Any:
        found = repeated(*args)
        taken.append(found[1])
        return found

    monkeypatch.setattr(Phrases, "read_repeated", counted)
    held = [[ChunkStorageMetadata(torch.Size([n]), torch.Size([1])) for n in range(20)], whole_tensors()]
    data = pickle.dumps(held, protocol=4)
    ends = [match.end() for match in re.finditer(rb"uba?e?ub(?=\x8c)", data)]
    assert len(ends) == MANY - 1
    for at in ends[2], ends[-2]:
        changed = data[:at] + b"}b" + data[at:]
        found = loaded(changed)[0]
        assert found == one_by_one(changed)[0] and found != one_by_one(data)[0]
    assert sum(taken) > MANY


def test_other_ways_to_write_them_are_read_one_by_one(one_by_one: Any) -> None:
    """Protocol 2 puts objects into the memo by number: those could be set twice."""
    data = metadata(2)
    assert loaded(data)[0] == one_by_one(data)[0]
    assert not one_by_one.fast()


def test_damaged_pickles_give_what_they_gave(one_by_one: Any) -> None:
    """One byte or more is changed, removed or doubled, in 120 ways: the same object, or the same error."""
    data, changes = metadata(), random.Random(1)
    read = 0
    for _ in range(120):
        damaged = bytearray(data)
        for _ in range(changes.choice((1, 1, 3))):
            at = changes.randrange(len(damaged) // 4, len(damaged))
            damage_pickle(damaged, at, changes)
        (fast, _), (slow, _) = loaded(bytes(damaged)), one_by_one(bytes(damaged))
        assert fast == slow
        read += type(fast) is tuple and fast[0] == "list"
    assert 10 < read < 110  # of both kinds


@pytest.mark.parametrize("cut", [1 / 3, 2 / 3, 0.95])
def test_a_pickle_that_ends_early(cut: float, one_by_one: Any) -> None:
    data = metadata()
    assert loaded(data[: int(len(data) * cut)]) == ("no end", 0) == one_by_one(data[: int(len(data) * cut)])


def test_only_classes_that_are_kept_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The very opcodes of an object that is read in one go, of another class."""
    for name in FINISHERS:
        kind = Placeholder("torch.distributed.checkpoint.metadata", name)
        assert not runs_code(kind) and str(kind) not in MEANINGS
    read, taken = Phrases.read, []

    def with_others(self: Phrases, machine: Machine, kind: Placeholder, at: int) -> Any:
        if (found := read(self, machine, kind, at)) is not None:
            others = (Placeholder("os", kind.name), Placeholder(kind.module, "Metadata"), Placeholder("torch", "Size"))
            taken.append([read(Phrases(), machine, one, at) is not None for one in (kind, *others)])
        return found

    monkeypatch.setattr(Phrases, "read", with_others)
    loaded(metadata())
    assert len(taken) > MANY and all(found == [True, False, False, False] for found in taken)

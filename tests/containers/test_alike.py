"""Pickles of several ranks that are alike: what is made from another one's is what each would give by itself, or its error."""

from __future__ import annotations

import functools
import io
import random
import shutil
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from zckpt.base.errors import ZckptError
from zckpt.containers import NumpyArray, Placeholder, StorageRef, TensorRef, open_container, torch_zip
from zckpt.containers.alike import AlikePickles
from zckpt.containers.alike_items import AlikeItems
from zckpt.containers.container import Input, open_input
from zckpt.core.stores import FileStore
from zckpt.layouts.save.listing import Listing
from zckpt.storage.location import locate

FIXTURES = Path(__file__).parents[2] / "fixtures"


def same(a: Any, b: Any, seen: set[tuple[int, int]] | None = None) -> bool:
    """Whether two inert values are equal; placeholders and arrays by what they hold. What has no bytes is in no file."""
    seen = set() if seen is None else seen
    if type(a) is not type(b):
        return False
    if (id(a), id(b)) in seen:
        return True
    seen.add((id(a), id(b)))
    if isinstance(a, dict):
        keys = all(same(x, y, seen) for x, y in zip(a, b, strict=False))
        return len(a) == len(b) and keys and all(same(x, y, seen) for x, y in zip(a.values(), b.values(), strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y, seen) for x, y in zip(a, b, strict=True))
    if isinstance(a, Placeholder | NumpyArray | TensorRef | StorageRef | FileStore):
        nbytes = a.storage_nbytes if isinstance(a, TensorRef) else a.nbytes if isinstance(a, StorageRef) else 1
        names = set(type(a).__slots__) - ({"store"} if not nbytes else set())
        return all(same(getattr(a, name), getattr(b, name), seen) for name in names)
    return bool(a == b)


class Counted(AlikePickles):
    """Counts the objects that were made from another pickle's."""

    made = 0

    def root(self, *args: Any) -> object | None:
        found = super().root(*args)
        self.made += found is not None
        return found


def opened(files: list[Path], alike: AlikePickles | None) -> list[object]:
    """What each file holds, or its error."""
    found: list[object] = []
    for file in files:
        try:
            found.append(open_container(file, alike).root)
        except ZckptError as error:
            found.append((type(error).__name__, error.what))
    return found


def check(files: list[Path], most: int | None = None) -> int:
    """Compares; returns how many were made from another's."""
    for ahead in ([], [1], [len(files) - 1, 1]):
        alike = Counted(functools.partial(map, torch_zip.pickle_of, [files[n] for n in ahead]))
        plain, found = opened(files, None), opened(files, alike)
        assert all(same(a, b) for a, b in zip(plain, found, strict=True)), files
    assert most is None or alike.made == most
    return alike.made


def write(file: Path, coordinate: int, rows: int, steps: int) -> Path:
    """As a rank's file is: a number here and there is another one."""
    torch.save(
        {
            "w": torch.ones(4, 3),
            "uneven": torch.ones(rows, 2),
            "tied": (shared := torch.arange(300.0)),
            "again": shared,
            "views": [shared[10:20], shared.view(30, 10).t()],
            "hooks": OrderedDict(step=steps),
            "array": numpy.arange(3),
            "mesh": torch.finfo,
            "at": [coordinate, {"rank": coordinate, "rows": (rows, None)}, 70000 + steps],
        },
        file,
    )
    return file


def test_ranks_of_one_save(tmp_path: Path) -> None:
    files = [write(tmp_path / f"rank{n}.pt", n, 300 if n < 3 else 290, 1000 * n + 257) for n in range(4)]
    assert check(files, 4) == 4
    roots = opened(files, AlikePickles())
    assert [root["at"][0] for root in roots] == [0, 1, 2, 3]  # type: ignore[index]
    assert [root["uneven"].shape for root in roots] == [(300, 2)] * 3 + [(290, 2)]  # type: ignore[index]
    assert [root["w"].store.path for root in roots] == [str(file) for file in files]  # type: ignore[index]


@pytest.mark.parametrize(("ranks", "together"), [(2, 0), (3, 3)])
def test_two_files_are_read_one_by_one(
    ranks: int, together: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Counted] = []
    monkeypatch.setattr("zckpt.containers.alike.AlikePickles", lambda ahead: made.append(Counted(ahead)) or made[-1])
    names = [write(tmp_path / f"rank{n}.pt", n, 300, 257).name for n in range(ranks)]
    listing = Listing(locate(tmp_path), "", {name: locate(tmp_path / name) for name in names})
    listing.open_alike(names)
    assert sum(one.made for one in made) == together
    assert [listing.entry(name, "at")[0] for name in names] == list(range(ranks))  # type: ignore[index]


@pytest.mark.parametrize(
    "pattern", ["ranks/*/checkpoint", "flat/*/checkpoint", "zero3/bf16_w2/checkpoint/*", "verl/**/critic"]
)
def test_real_files(pattern: str) -> None:
    for home in FIXTURES.glob(pattern):
        for kind in ("model", "optim", "extra", "rank"):
            if len(files := sorted(home.glob(f"*{kind}*.pt"))) > 1:
                check(files)


def with_pickle(source: Path, target: Path, data: bytes, shorter: str = "") -> Path:
    """A copy of a torch file with another pickle; `shorter`: a record that loses its last bytes."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            held = data if name.endswith("data.pkl") else old.read(name)
            new.writestr(name, held[:-8] if shorter and name.endswith(shorter) else held)
    return target


def test_whatever_differs_is_read_as_it_would_be_by_itself(tmp_path: Path) -> None:
    """Other bytes anywhere, among them opcodes that are not ours, keys, shapes, and storages that are too small."""
    first = write(tmp_path / "rank0.pt", 0, 300, 257)
    pickle, chance = torch_zip.pickle_of(first), random.Random(5)
    assert pickle.count(b"K") > 9
    numbers = [at for at, byte in enumerate(pickle) if byte in b"KMJ"]
    made = 0
    for round_ in range(90):
        data = bytearray(pickle)
        for _ in range(chance.choice((1, 1, 2, 5))):
            at = chance.choice(numbers) + chance.choice((0, 1, 1, 2, 4)) if round_ % 3 else chance.randrange(len(data))
            data[min(at, len(data) - 1)] = chance.choice((0, 1, 2, 7, 75, 0xFE, 0x82, chance.randrange(256)))
        other = with_pickle(first, tmp_path / "rank1.pt", bytes(data))
        made += check([first, other, first])
    assert made > 40
    last = with_pickle(first, tmp_path / "rank2.pt", pickle, shorter="data/0")
    assert check([first, last, first]) == 2


def test_numbers_that_are_looked_at_are_not_holes(tmp_path: Path) -> None:
    for number, value in enumerate(({1: "key"}, {2: "key"}, {"set": {3}}, {"set": {4}})):
        torch.save(value, tmp_path / f"{number}.pt")
    for pair in ([0, 1], [2, 3]):
        assert check([tmp_path / f"{number}.pt" for number in pair], 0) == 0
    itself: list[Any] = [1]
    itself.append(itself)
    torch.save(itself, tmp_path / "a.pt")
    shutil.copy(tmp_path / "a.pt", tmp_path / "b.pt")
    alike = Counted(lambda: [torch_zip.pickle_of(tmp_path / "b.pt")])
    opened([tmp_path / "a.pt", tmp_path / "b.pt"], alike)
    assert alike.made == 0


def plain(root: object) -> object:
    """A root without the file's time, which each writing changes."""
    return replace(root, store=None) if isinstance(root, TensorRef) else str(root)


# -- items of torch.distributed.checkpoint ---------------------------------------------------------------------------------


def test_files_of_one_tensor_that_differ_in_nothing_else_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind each other in one file, as torch.distributed.checkpoint writes them; another shape or dtype is read by itself."""
    tensors = [torch.randn(40, 30) for _ in range(5)] + [torch.randn(30, 40), torch.randn(1200), torch.ones(1200).int()]
    whole, places = b"", []
    for tensor in tensors:
        stream = io.BytesIO()
        torch.save(tensor, stream)
        places.append((len(whole), len(stream.getvalue())))
        whole += stream.getvalue()
    (tmp_path / "items").write_bytes(whole)
    read, taken = torch_zip.read_input, []
    monkeypatch.setattr(torch_zip, "read_input", lambda *args: taken.append(args) or read(*args))

    def roots(reader: Callable[[Input], object], data: bytes) -> list[object]:
        """What each item holds, or its error."""
        (tmp_path / "items").write_bytes(data)
        taken.clear()
        roots: list[object] = []
        with open_input(tmp_path / "items") as file:
            for place in places:
                try:
                    roots.append(reader(file.part(*place, "an item")))
                except ZckptError as error:
                    roots.append((type(error).__name__, error.what, error.found))
        return roots

    found = roots(AlikeItems().root, whole)
    assert len(taken) == 4
    for tensor, ref in zip(tensors, found, strict=True):
        assert isinstance(ref, TensorRef) and ref.shape == tuple(tensor.shape)
        assert whole[ref.byte_offset :][: 4 * tensor.numel()] == tensor.numpy().tobytes()
    at = places[2][0]
    for byte in (
        at + 3,
        whole.index(b"PK\x01\x02", at) + 3,
        whole.index(b"rebuild", at),
        whole.index(b"PK\x05\x06", at) + 3,
    ):
        damaged = whole[:byte] + b"?" + whole[byte + 1 :]
        by_itself = roots(lambda item: read(item).root, damaged)
        assert not isinstance(by_itself[2], TensorRef)
        made = roots(AlikeItems().root, damaged)
        assert same(list(map(plain, made)), list(map(plain, by_itself)))

"""The comparator: every element has to be where the second reader says that it is, in the whole tensor."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from zckpt.checks import second
from zckpt.containers import TensorRef
from zckpt.core.catalog import Catalog, Replica, Source, TensorEntry
from zckpt.core.dtypes import F32
from zckpt.core.evidence import OWN_INDEX
from zckpt.core.fragments import Fragment
from zckpt.core.stores import FileStore
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.second import (
    BesideMaster,
    HeldRun,
    SecondLook,
    StoredRows,
    UnprovedFamily,
    hold_box,
    hold_elements,
    names_in_lists,
)
from zckpt.storage.location import locate

FILES = {name: FileStore(name, 1 << 12) for name in "ab"}


def ref(file: str, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> TensorRef:
    return TensorRef(FILES[file], offset, F32, shape, stride, "0", 0, 1 << 12, offset)


def elements(runs: list[HeldRun]) -> dict[int, int]:
    """Element of the tensor -> byte of the file, one by one."""
    return {
        row.start + r * row.pitch + n: row.offset + 4 * (r * row.store_pitch + n * row.step)
        for _, _, row in runs
        for r in range(row.rows)
        for n in range(row.count)
    }


BOXES = [
    ((), (), (), ()),
    ((5,), (2,), (3,), (1,)),
    ((4, 6), (1, 0), (2, 6), (6, 1)),
    ((4, 6), (0, 3), (4, 3), (3, 1)),
    ((4, 6), (0, 3), (4, 3), (1, 4)),
    ((4, 6), (2, 5), (2, 1), (1, 1)),
    ((3, 4, 5), (0, 2, 0), (3, 2, 5), (10, 5, 1)),
    ((3, 4, 5), (1, 0, 1), (2, 4, 3), (12, 3, 1)),
    ((2, 3, 4, 5), (0, 1, 0, 2), (2, 2, 4, 3), (24, 12, 3, 1)),
    ((2, 1, 3), (0, 0, 0), (2, 1, 3), (3, 9, 1)),
]


@pytest.mark.parametrize(("shape", "offsets", "sizes", "stride"), BOXES)
def test_a_box_is_in_the_whole_where_its_indexes_are(
    shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    found = elements(list(hold_box("t", "", ref("a", 40, sizes, stride), offsets, shape)))
    expected = {}
    for indexes in itertools.product(*map(range, sizes)):
        number = 0
        for index, at, extent in zip(indexes, offsets, shape, strict=True):
            number = number * extent + at + index
        expected[number] = 40 + 4 * sum(index * step for index, step in zip(indexes, stride, strict=True))
    assert found == expected


def test_a_part_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        list(hold_box("t", "", ref("a", 0, (3,), (1,)), (2,), (4,)))
    with pytest.raises(ValueError, match="elements"):
        hold_elements("t", "", ref("a", 0, (3,), (1,)), 2, 2, 0)


def places(entry: TensorEntry, look: SecondLook, monkeypatch: pytest.MonkeyPatch) -> second.Places:
    monkeypatch.setattr(second, "look_again", lambda listing: look)
    listing = Listing(locate("."), "", {})
    return second.compare_places(listing, Catalog({entry.name: entry}, Source("test", "."), OWN_INDEX))


def entry_of(*fragments: Fragment, shape: tuple[int, ...] = (4, 4)) -> TensorEntry:
    return TensorEntry("t", shape, F32, "parameter", fragments)


def rows(file: str, offset: int, start: int, count: int, *more: int) -> HeldRun:
    return HeldRun("t", "", StoredRows(file, offset, start, count, *more))


HALVES = [rows("a", 0, 0, 8), rows("b", 0, 8, 8)]
COLUMNS = [rows("a", 0, 0, 2, 4, 4, 2), rows("b", 0, 2, 2, 4, 4, 2)]


@pytest.mark.parametrize(
    ("fragments", "held"),
    [
        ([("a", 0, 0, 8), ("b", 0, 8, 8)], HALVES),
        ([("a", 0, 0, 3), ("a", 12, 3, 5), ("b", 0, 8, 8)], HALVES),
        ([("a", 0, 0, 8), ("b", 0, 8, 8)], [rows("a", 0, 0, 5), rows("a", 20, 5, 3), rows("b", 0, 8, 8)]),
        ([("b", 64, 0, 8), ("b", 0, 8, 8)], [*HALVES, rows("b", 64, 0, 8)]),  # one of two ranks that hold the same
        ([("a", 0, 0, 2, 4, 4, 2), ("b", 0, 2, 2, 4, 4, 2)], COLUMNS),
        ([("a", 0, 0, 2, 4, 4, 2), ("b", 0, 2, 2, 4, 4, 2)],
         [rows("a", 8 * n, 4 * n, 2) for n in range(4)] + [rows("b", 8 * n, 4 * n + 2, 2) for n in range(4)]),
        ([("a", 0, 0, 4, 4, 4, 1, 4)], [rows("a", 0, 0, 4, 4, 4, 1, 4)]),
    ],
)  # fmt: skip
def test_the_same_places_are_found_however_they_are_cut(
    fragments: list[tuple[str, int]], held: list[HeldRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = entry_of(*(Fragment(FILES[file], *more) for file, *more in fragments))
    found = places(entry, SecondLook({"t": (4, 4)}, held), monkeypatch)
    assert found == second.Places("second reader", 1, "")


@pytest.mark.parametrize(
    ("fragments", "held"),
    [
        ([("b", 0, 0, 8), ("a", 0, 8, 8)], HALVES),  # ranks in reverse
        ([("a", 4, 0, 8), ("b", 0, 8, 8)], HALVES),
        ([("b", 0, 0, 2, 4, 4, 2), ("a", 0, 2, 2, 4, 4, 2)], COLUMNS),
        ([("a", 0, 0, 16)], HALVES),
        ([("a", 0, 0, 16)], [rows("a", 0, 0, 4, 4, 4, 1, 4)]),  # transposed
    ],
)
def test_other_places_are_found(
    fragments: list[tuple[str, int]], held: list[HeldRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = entry_of(*(Fragment(FILES[file], *more) for file, *more in fragments))
    found = places(entry, SecondLook({"t": (4, 4)}, held), monkeypatch)
    assert found.problems == ("'t' is not read where the files have it",)


def test_names_are_compared_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = entry_of(Fragment(FILES["a"], 0, 0, 8), Fragment(FILES["b"], 0, 8, 8))
    more = places(entry, SecondLook({"t": (4, 4), "u": None}, HALVES), monkeypatch)
    assert more.problems == ("'u' is in the files, and is not read from them",)
    shape = places(entry, SecondLook({"t": (2, 8)}, HALVES), monkeypatch)
    assert shape.problems == ("'t' is read as [4, 4], in the files it is [2, 8]",)
    fewer = places(entry, SecondLook({}, HALVES), monkeypatch)
    assert fewer.problems == ("'t' is read, and is not a name of the files",)


def test_a_loose_name_is_of_a_copy_that_is_read_or_an_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Replica(F32, (Fragment(FILES["b"], 64, 0, 16),))
    entry = replace(entry_of(Fragment(FILES["a"], 0, 0, 8), Fragment(FILES["b"], 0, 8, 8)), replicas=(copy,))
    names = {"t": (4, 4), "u": (4, 4)}
    said = ("'u' is in the files, and is not read from them",)
    for offset, shape, problems in ((64, (4, 4), ()), (128, (4, 4), said), (64, (2, 8), said), (64, (2, 4), said)):
        loose = {"u": ref("b", offset, shape, (shape[1], 1))}
        assert places(entry, SecondLook(names, HALVES, loose=loose), monkeypatch).problems == problems
    assert places(entry, SecondLook({"t": (4, 4)}, HALVES), monkeypatch).problems == ()


NAMED = [
    ({"a.weight": (2,), "b.bias": (2,)}, {"model.a.weight": (2,), "model.b.bias": (2,)},
     {"a.weight": "model.a.weight", "b.bias": "model.b.bias"}),
    ({"m.a.weight": (2,), "m.fixed": (3,)}, {"a.weight": (2,)}, {"m.a.weight": "a.weight", "m.fixed": "fixed"}),
    ({"body.0.w": (2,), "back.w": (2,)}, {"body.0._checkpoint_wrapped_module.w": (2,)},
     {"body.0.w": "body.0._checkpoint_wrapped_module.w"}),
    ({"wte.weight": (9, 2), "lm.weight": (2, 2)}, {"embed.weight": (9, 2), "head.weight": (2, 2)},
     {"wte.weight": "embed.weight", "lm.weight": "head.weight"}),
    ({"wte.weight": (2, 2), "lm.weight": (2, 2)}, {"embed.weight": (2, 2), "head.weight": (2, 2)}, {}),
    ({"x.0.w": None, "x.1.w": None}, {"y.0.w": (2,), "y.1.w": (3,)}, {"x.0.w": "y.0.w", "x.1.w": "y.1.w"}),
    ({"scale": (1,)}, {"model.scale": None}, {"scale": "model.scale"}),
    ({"scale": (1,)}, {"model.scale": (2,)}, {}),
    ({"scale": (1,)}, {}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("loose", "lacking", "found"), NAMED)
def test_names_of_a_state_dict_are_found_in_lists(
    loose: dict[str, tuple[int, ...] | None], lacking: dict[str, tuple[int, ...] | None], found: dict[str, str]
) -> None:
    assert names_in_lists(loose, lacking) == found


def test_what_is_not_found_is_not_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = entry_of(Fragment(FILES["a"], 0, 0, 16))
    found = places(entry, SecondLook({"t": None}, (), unproved="the file has no names"), monkeypatch)
    assert (found.by, found.found) == ("none", 0)
    assert found.as_answer() == (
        "not found a second time: 't': the file has no names; a mistake of zckpt's own reader would not be noticed"
    )

    def broken() -> object:
        yield HALVES[0]
        raise KeyError("storage")

    assert places(entry, SecondLook({"t": None}, broken()), monkeypatch).by == "none"  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [StopIteration, RecursionError, ZeroDivisionError, OSError, TypeError])
def test_a_second_reader_that_does_not_understand_proves_nothing(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(listing: Listing) -> SecondLook:
        raise error("strange")

    family = replace(second.layouts.FAMILIES[-1], second=look)
    monkeypatch.setattr(second.layouts, "family_of", lambda listing: family)
    found = second.compare_places(Listing(locate(tmp_path), "", {}), Catalog({}, Source("test", "."), OWN_INDEX))
    assert found.by == "none" and error.__name__ in found.why


def test_a_family_without_a_second_reader_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = replace(second.layouts.FAMILIES[-1], second=UnprovedFamily("nobody wrote it"))
    monkeypatch.setattr(second.layouts, "family_of", lambda listing: family)
    found = second.compare_places(Listing(locate(tmp_path), "", {}), Catalog({}, Source("test", "."), OWN_INDEX))
    assert found == second.Places("none", 0, "nobody wrote it")


def test_states_without_names_are_found_beside_their_masters(monkeypatch: pytest.MonkeyPatch) -> None:
    from zckpt.layouts.run.training import Training

    master = entry_of(Fragment(FILES["a"], 16, 0, 16))
    pair = BesideMaster(ref("a", 0, (32,), (1,)), "exp_avg", ref("b", 256, (32,), (1,)))
    monkeypatch.setattr(second, "look_again", lambda listing: SecondLook({"t": None}, (), beside=[pair]))
    for offset, problems in ((272, ()), (256, ("exp_avg of 't' is not read beside its master",))):
        states = {"t": {"exp_avg": entry_of(Fragment(FILES["b"], offset, 0, 16))}}
        training = Training((), states, {}, {}, F32)
        found = second.compare_states(Listing(locate("."), "", {}), training, {"t": master})
        assert found.problems == problems

"""What `verify` derives a second time: it takes what is right, and finds every bit that is not, in every geometry."""

from __future__ import annotations

import errno
import itertools
import os
import zlib
from pathlib import Path

import numpy as np
import pytest

from zckpt._core import cast as native_cast
from zckpt._core import inject, judge
from zckpt.base.errors import CorruptError
from zckpt.core.catalog import Replica, TensorEntry
from zckpt.core.dtypes import ALL, BF16, F16, F32, F64, DType
from zckpt.core.fragments import Fragment
from zckpt.engine import independent
from zckpt.engine import independent as confirming
from zckpt.engine.checksums import join
from zckpt.engine.independent import can_confirm, derived_again, differences
from zckpt.engine.rounding import cast
from zckpt.engine.scan_requests import CrcRange
from zckpt.storage.location import locate

EXACT, CLAMPED, SAME = 0, 1, 2
RNG = np.random.default_rng(0)


def samples(dtype: DType) -> bytes:
    """Every number of a small dtype; of a large one, those beside every half and every middle between two, and many others."""
    if dtype.itemsize <= 2:
        return np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}").tobytes()
    parts = [RNG.bytes(dtype.itemsize * 20_000)]
    for half in (F16, BF16):
        every = native_cast(half.number, F32.number, np.arange(1 << 16, dtype="<u2").tobytes())[0]
        for apart in (0, 1, -1, 0x8000, 0x7FFF, 0x8001, 0x1000, 0xFFF, 0x1001):
            with np.errstate(all="ignore"):
                bits = np.frombuffer(every, "<u4")[:: 3 if apart else 1] + np.uint32(apart % (1 << 32))
                parts.append(bits.view("<f4").astype(f"<f{dtype.itemsize}").tobytes())
    return b"".join(parts)


@pytest.mark.parametrize("source", [dtype for dtype in ALL if dtype.kind == "float"], ids=str)
def test_only_what_is_nearest_is_right(source: DType) -> None:
    data = samples(source)
    numel = len(data) // source.itemsize
    for target, clamp in itertools.product((F32, F16, BF16), (False, True)):
        if source == target:
            continue
        how = CLAMPED if clamp else EXACT
        right, _, _ = cast(data, source, target, "little", clamp)
        assert judge(how, source.number, target.number, data, right)[0] == 0, (target, clamp)
        bits = np.frombuffer(right, f"u{target.itemsize}")
        sign = bits.dtype.type(1 << (8 * target.itemsize - 1))
        for wrong in (bits + bits.dtype.type(1), bits - bits.dtype.type(1), bits ^ sign):
            assert judge(how, source.number, target.number, data, wrong.tobytes()) == (numel, 0), (target, clamp)
        if not clamp:
            assert judge(SAME, source.number, target.number, data, right)[0] == 0


@pytest.mark.parametrize("target", [F16, BF16], ids=str)
def test_blocks_that_are_wrong_in_the_least_way_only_are_found(target: DType) -> None:
    """Each block is looked at as a whole first, which must see each way by itself: a last bit beyond the middle, odd in it."""
    largest = 0x7C00 if target is F16 else 0x7F80
    low, sign = np.arange(largest - 1, dtype="<u2"), np.arange(largest - 1, dtype="<u2") % 2 << 15
    values = native_cast(target.number, F32.number, np.arange(largest, dtype="<u2").tobytes())[0]
    exact = np.frombuffer(values, "<f4").astype("<f8")
    middle = ((exact[:-1] + exact[1:]) / 2).astype("<f4").view("<u4")
    for first, every, beyond, wrong in ((0, 2, 0, low | 1), (1, 2, 0, low | 1), (0, 1, 1, low), (0, 1, -1, low + 1)):
        bits = (middle + np.uint32(beyond % (1 << 32))) | sign.astype("<u4") << 16
        x, y = bits[first::every].tobytes(), (wrong | sign)[first::every]
        right, _, _ = cast(x, F32, target, "little", False)
        assert judge(EXACT, F32.number, target.number, x, right)[0] == 0
        assert judge(EXACT, F32.number, target.number, x, y.tobytes()) == (y.size, 0), (first, beyond)
    nans = np.arange(0x7F810001, 0x7FBF0000, 0x100, dtype="<u4")
    for y in ((nans + 0x7FFF) >> 16,) if target is BF16 else (nans * 0, nans * 0 + largest):
        assert judge(EXACT, F32.number, target.number, nans.tobytes(), y.astype("<u2").tobytes()) == (nans.size, 0)


def test_the_same_numbers_need_not_be_the_same_bits() -> None:
    a = np.array([0.0, -0.0, np.nan, 1.0, np.inf], "<f4")
    b = np.array([-0.0, 0.0, -np.nan, -1.0, np.inf], "<f4")
    assert judge(SAME, F32.number, F32.number, a.tobytes(), b.tobytes()) == (1, 3)
    assert judge(EXACT, F32.number, F32.number, a.tobytes(), b.tobytes()) == (4, 0)
    halves = np.array([0x8000, 0, 0xFFC1, 0x3F81, 0x7F80], "<u2")
    assert judge(SAME, F32.number, BF16.number, a.tobytes(), halves.tobytes()) == (1, 3)


ROWS, COLUMNS = 301, 1023
NUMEL = ROWS * COLUMNS


def sources(path: Path, dtype: DType, data: bytes, byteorder: str) -> dict[str, TensorEntry]:
    """The tensor in files of many geometries; a few bytes are in front."""
    size, array = dtype.itemsize, np.frombuffer(data, f"V{dtype.itemsize}").reshape(ROWS, COLUMNS)

    def stored(name: str, *parts: np.ndarray) -> list[tuple[object, int]]:
        places = []
        for number, part in enumerate(parts):
            raw = np.ascontiguousarray(part).tobytes()
            if byteorder == "big" and size > 1:
                raw = np.frombuffer(raw, f"<u{size}").byteswap().tobytes()
            file = path / f"{name}-{byteorder}-{number}"
            file.write_bytes(b"pad" + raw)
            places.append((locate(file).store(byteorder), 3))
        return places

    flat = array.reshape(-1)
    cut = [flat[n : n + 50_001] for n in range(0, NUMEL, 50_001)]
    whole = stored("whole", array)[0][0]
    half = COLUMNS // 2
    columns = stored("columns", array[:, :half], array[:, half:])
    turned = stored("turned", array.T)[0][0]
    return {
        name: TensorEntry("x", (ROWS, COLUMNS), dtype, "parameter", tuple(fragments))
        for name, fragments in {
            "whole": [Fragment(whole, 3, 0, NUMEL)],
            "cut": [Fragment(s, 3, 50_001 * i, len(cut[i])) for i, (s, _) in enumerate(stored("cut", *cut))],
            "columns": [
                Fragment(s, 3, i * half, (half, COLUMNS - half)[i], ROWS, COLUMNS, (half, COLUMNS - half)[i])
                for i, (s, _) in enumerate(columns)
            ],
            "narrow": [
                Fragment(whole, 3 + k * size, k, min(64, COLUMNS - k), ROWS, COLUMNS, COLUMNS)
                for k in range(0, COLUMNS, 64)
            ],
            "turned": [Fragment(turned, 3, 0, COLUMNS, ROWS, COLUMNS, 1, ROWS)],
            "two halves turned": [
                Fragment(turned, 3 + size * k, k * COLUMNS, COLUMNS, rows, COLUMNS, 1, ROWS)
                for k, rows in ((0, 150), (150, ROWS - 150))
            ],
        }.items()
    }  # fmt: skip


def outputs(path: Path, dtype: DType, data: bytes) -> dict[str, TensorEntry]:
    """The same, as files that are written: rows in one file, in three, and columns in two."""
    array = np.frombuffer(data, f"V{dtype.itemsize}").reshape(ROWS, COLUMNS)
    parts = {
        "one": [array],
        "three": [array[:100], array[100:101], array[101:]],
        "columns": [array[:, :500], array[:, 500:]],
    }
    entries = {}
    for name, own in parts.items():
        fragments, at = [], 0
        for number, part in enumerate(own):
            file = path / f"out-{name}-{number}"
            file.write_bytes(b"head" + np.ascontiguousarray(part).tobytes() + b"tail")
            store = locate(file).store()
            if name == "columns":
                fragments.append(Fragment(store, 4, at, part.shape[1], ROWS, COLUMNS, part.shape[1]))
                at += part.shape[1]
            else:
                fragments.append(Fragment(store, 4, at, part.size))
                at += part.size
        entries[name] = TensorEntry("x", (ROWS, COLUMNS), dtype, "parameter", tuple(fragments))
    return entries


@pytest.mark.parametrize("byteorder", ["little", "big"])
@pytest.mark.parametrize("dtypes", [(F32, F32), (F32, BF16), (F64, F16), (BF16, F32)], ids=str)
def test_every_geometry_of_both_sides(
    dtypes: tuple[DType, DType], byteorder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of few stores at once, as where there are very many ranks, give the same."""
    a, b = dtypes
    data = RNG.standard_normal(NUMEL).astype("<f8" if a == F64 else "<f4").tobytes()[: NUMEL * a.itemsize]
    expected, _, _ = cast(data, a, b, "little", False)
    sides = sources(tmp_path, a, data, byteorder), outputs(tmp_path, b, expected)
    pairs = [(source, output) for source in sides[0].values() for output in sides[1].values()]
    assert all(can_confirm(*pair) for pair in pairs)
    assert differences(pairs) == []
    bad = bytearray(expected)
    wrong = sorted({0, NUMEL - 1, 100 * COLUMNS, *RNG.integers(0, NUMEL, 5).tolist()})
    for element in wrong:
        bad[element * b.itemsize] ^= 1
    damaged = list(outputs(tmp_path, b, bytes(bad)).values())
    pairs = [(source, output) for source in sides[0].values() for output in damaged]
    found = differences(pairs, threads=1)
    assert [(one.number, one.count, one.first) for one in found] == [(n, len(wrong), 0) for n in range(len(pairs))]
    monkeypatch.setattr(confirming, "_STORES_OF_SOURCE", 2)
    monkeypatch.setattr(confirming, "_STORES_OF_OUTPUT", 1)
    monkeypatch.setattr(confirming, "_MOST_STORES", 5)
    assert differences(pairs) == found
    monkeypatch.setattr(independent, "can_confirm", lambda *pair: False)
    assert differences(pairs[3:6]) == [
        independent.Difference(one.number - 3, one.count, one.first, one.file) for one in found[3:6]
    ]


def test_checksums_and_copies_on_the_way(tmp_path: Path) -> None:
    """Each byte counts once for the CRCs of its file, whoever reads it; a copy that is not the source is found."""
    data = RNG.standard_normal(NUMEL).astype("<f4").tobytes()
    source = sources(tmp_path, F32, data, "little")["cut"]
    output = outputs(tmp_path, F32, data)["three"]
    halves = bytearray(cast(data, F32, BF16, "little", False)[0])
    (tmp_path / "copy").write_bytes(b"pad" + bytes(halves))
    store = locate(tmp_path / "copy").store()
    copy = Replica(BF16, (Fragment(store, 3, 0, 70_000), Fragment(store, 140_003, 70_000, NUMEL - 70_000)), "", True)
    stores = [f.store for f in (*source.fragments, *output.fragments)] + [store]
    sums = [CrcRange(one, 0, one.size) for one in stores]  # type: ignore[arg-type]
    differ, found = derived_again([(source, output), (source, output)], {0: [copy]}, sums)
    assert differ == [] and found.copied == {0} and not found.copies
    for number, one in enumerate(sums):
        parts = sorted(found.crcs[number])
        data_of = Path(one.store.path).read_bytes()
        # outputs are read from their beginning
        at = 3 if number < len(source.fragments) or number == len(sums) - 1 else 0
        assert parts[0][0] == at
        assert all(a[0] + a[1] == b[0] for a, b in itertools.pairwise(parts)), one.store.path
        end = parts[-1][0] + parts[-1][1]
        assert end == one.store.size - (4 if "out-" in one.store.path else 0)
        assert join(parts, at, end - at) == zlib.crc32(data_of[at:end])
    halves[2 * 70_001] ^= 1
    (tmp_path / "copy").write_bytes(b"pad" + bytes(halves))
    store = locate(tmp_path / "copy").store()
    copy = Replica(BF16, (Fragment(store, 3, 0, NUMEL),), "", True)
    differ, found = derived_again([(source, output)], {0: [copy]})
    assert found.copies == {(0, 0): (1, 70_001)} and differ == []


@pytest.mark.parametrize("direct", [True, False])
def test_disks_that_fail_and_files_that_end(direct: bool, tmp_path: Path) -> None:
    data = RNG.standard_normal(NUMEL).astype("<f4").tobytes()
    source, output = sources(tmp_path, F32, data, "little")["whole"], outputs(tmp_path, F32, data)["one"]
    keep = None if direct else True
    try:
        for kind in (-2, errno.EINTR):
            for nth in (1, 2, 3):
                inject(False, nth, kind)
                assert derived_again([(source, output)], keep_cache=keep)[0] == []
        if not direct:
            inject(False, 2, errno.EIO)
            with pytest.raises(CorruptError, match="cannot be read"):
                derived_again([(source, output)], keep_cache=keep)
    finally:
        inject(False, 0, 0)
    path = Path(str(source.fragments[0].store))
    before = path.stat()
    os.truncate(path, before.st_size - 5000)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(CorruptError, match="ends too early"):
        derived_again([(source, output)], keep_cache=keep)

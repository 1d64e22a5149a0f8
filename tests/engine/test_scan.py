"""Both engines of a scan learn the same from the same bytes, and that is what numpy and torch say."""

from __future__ import annotations

import errno
import itertools
import math
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zckpt._core import calls, inject
from zckpt.base.errors import CorruptError, InconsistentError
from zckpt.core import dtypes
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import BF16, BY_NAME, F16, F32, F64, DType
from zckpt.core.fragments import Fragment
from zckpt.engine import scan_requests as looks
from zckpt.engine.checksums import join
from zckpt.engine.scan import scan
from zckpt.engine.scan_requests import (
    CRC_SOURCE,
    NUMBERS,
    CrcRange,
    comparisons,
    request_of,
    request_of_bytes,
)
from zckpt.engine.tensor_statistics import Relation, Statistics
from zckpt.storage.location import locate

ENGINES = [("reference", 1), ("native", 1), ("native", 4)]


@pytest.fixture(params=ENGINES, ids=lambda p: f"{p[0]}-{p[1]}")
def engine(request: pytest.FixtureRequest) -> dict[str, object]:
    return {"engine": request.param[0], "threads": request.param[1]}


@pytest.fixture(autouse=True)
def no_faults() -> Iterator[None]:
    yield
    inject(False, 0, 0)


def stored(path: Path, data: bytes, dtype: DType, shape: tuple[int, ...], byteorder: str = "little") -> TensorEntry:
    """A tensor that begins at byte 3 of its own file."""
    if byteorder == "big" and dtype.component > 1:
        data = np.frombuffer(data, f"u{min(dtype.component, 8)}").byteswap().tobytes()
    path.write_bytes(b"pad" + data)
    numel = math.prod(shape)
    return TensorEntry(path.name, shape, dtype, "parameter", (Fragment(locate(path).store(byteorder), 3, 0, numel),))


def requests_of(entry: TensorEntry, tensor: int) -> list[looks.ScanRequest]:
    """Requests for all elements of a tensor."""
    return [request_of(fragment, entry.dtype, tensor) for fragment in entry.fragments if fragment.numel]


def agree(a: Statistics, b: Statistics) -> None:
    exact = [f for f in Statistics.__slots__ if f not in ("dot", "square", "other_square")]
    assert [getattr(a, f) for f in exact] == [getattr(b, f) for f in exact]
    for name in ("dot", "square", "other_square"):
        x, y = getattr(a, name), getattr(b, name)
        if math.isfinite(x) and math.isfinite(y):  # doubles of any bits have squares that are not
            assert math.isclose(x, y, rel_tol=1e-9, abs_tol=1e-9 * (1 + a.square + a.other_square)), name


SPECIAL = {
    F64: [0.0, -0.0, 1.5, math.nan, math.inf, -math.inf, 5e-324, 1e150, 1e-9],
    F32: [0.0, -0.0, 1.5, math.nan, math.inf, -math.inf, 1e-45, 3e38, 1e-9],
    F16: [0.0, -0.0, 1.5, math.nan, math.inf, -math.inf, 6e-8, 65504.0, 1e-3],
}


def numbers(rng: np.random.Generator, dtype: DType, numel: int) -> bytes:
    if dtype in SPECIAL:
        values = rng.standard_normal(numel).astype(dtype.numpy)
        places = rng.random(numel) < 0.05
        values[places] = rng.choice(np.array(SPECIAL[dtype], dtype.numpy), int(places.sum()))
        return values.tobytes()
    if dtype.name == "BOOL":
        return rng.integers(0, 2, numel, dtype=np.uint8).tobytes()
    return rng.integers(0, 256, numel * dtype.itemsize, dtype=np.uint8).tobytes()


@pytest.mark.parametrize("dtype", dtypes.ALL, ids=str)
@pytest.mark.parametrize("byteorder", ["little", "big"])
def test_numbers_are_counted_alike(dtype: DType, byteorder: str, tmp_path: Path) -> None:
    entry = stored(tmp_path / "a", numbers(np.random.default_rng(1), dtype, 70_001), dtype, (70_001,), byteorder)
    found = [scan(requests_of(entry, 7), engine=name, threads=n).statistics for name, n in ENGINES]
    assert all(f.keys() == {7} for f in found)
    for other in found[1:]:
        agree(found[0][7], other[7])
    assert found[0][7].count == 70_001 * (2 if dtype.kind == "complex" else 1)


def test_what_is_not_finite_is_counted_as_torch_does(engine: dict[str, object], tmp_path: Path) -> None:
    for dtype in (F64, F32, F16, BF16, BY_NAME["F8_E4M3"], BY_NAME["F8_E5M2"]):
        every = np.arange(65536, dtype="<u2").tobytes() if dtype.itemsize == 2 else bytes(range(256)) * 256
        tensor = torch.frombuffer(bytearray(every), dtype=getattr(torch, dtype.torch_name)).float()
        if dtype.itemsize > 2:
            tensor = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0]).to(getattr(torch, dtype.torch_name))
            every = tensor.numpy().tobytes()
        entry = stored(tmp_path / dtype.name, every, dtype, (tensor.numel(),))
        statistics = scan(requests_of(entry, 0), **engine).statistics[0]
        assert statistics.nan == int(tensor.isnan().sum())
        assert statistics.inf == int(tensor.isinf().sum())
        assert statistics.nonzero == int((tensor != 0).sum())


PAIRS = [(F32, F32), (F32, BF16), (F16, F32), (F64, F32), (BF16, F16), (BF16, BF16), (BY_NAME["F8_E4M3"], F32)]
PAIRS += [(BY_NAME[a], BY_NAME[b]) for a, b in (("I64", "I32"), ("U64", "I64"), ("U8", "U8"), ("C64", "C128"))]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_two_tensors_are_compared_alike(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    draw = data.draw
    a_dtype, b_dtype = draw(st.sampled_from(PAIRS))
    numel = draw(st.sampled_from([1, 7, 8, 2048, 2049, 5000, 300_001]))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    root = tmp_path_factory.mktemp("s")
    a = numbers(rng, a_dtype, numel)
    if a_dtype == b_dtype:
        b = bytearray(a)
        for place in rng.integers(0, len(b), draw(st.integers(0, 3))):
            b[place] ^= 1 << int(rng.integers(0, 8))
        b = bytes(b)
    else:
        b = numbers(rng, b_dtype, numel)
    orders = [draw(st.sampled_from(["little", "big"])) for _ in range(2)]
    entries = [
        stored(root / "a", a, a_dtype, (numel,), orders[0]),
        stored(root / "b", b, b_dtype, (numel,), orders[1]),
    ]
    tolerant = Relation(atol=draw(st.sampled_from([0.0, 0.1])), rtol=draw(st.sampled_from([0.0, 0.5])))
    relations = [Relation(), tolerant]
    if b_dtype in (F32, F16, BF16) and a_dtype.kind == "float":
        relations.append(Relation(rounded=True))
    for relation in relations:
        reports = [
            scan(comparisons(*entries, 3), relation=relation, spreads=True, engine=name, threads=n)
            for name, n in ENGINES
        ]
        assert reports[0].spreads == reports[1].spreads == reports[2].spreads
        found = [report.statistics[3] for report in reports]
        for other in found[1:]:
            agree(found[0], other)
        assert repr(found[1]) == repr(found[2])  # to the last bit: threads change nothing


def test_bits_count_and_tolerances_forgive(engine: dict[str, object], tmp_path: Path) -> None:
    x = np.array([1.0, -0.0, math.nan, 2.0, 1e-8, math.inf], "<f4")
    y = np.array([1.0, 0.0, math.nan, 2.5, 0.0, -math.inf], "<f4")
    pair = stored(tmp_path / "x", x.tobytes(), F32, (6,)), stored(tmp_path / "y", y.tobytes(), F32, (6,))
    exact = scan(comparisons(*pair, 0), **engine).statistics[0]
    assert (exact.differ, exact.first, exact.max_abs, exact.nan, exact.other_inf) == (4, 1, math.inf, 1, 1)
    close = scan(comparisons(*pair, 0), relation=Relation(atol=1e-6), **engine).statistics[0]
    assert (close.differ, close.first) == (2, 3)
    looser = scan(comparisons(*pair, 0), relation=Relation(rtol=0.2, atol=1e-6), **engine).statistics[0]
    assert (looser.differ, looser.first) == (1, 5)


def test_how_far_numbers_are_apart(engine: dict[str, object], tmp_path: Path) -> None:
    gaps = [0.0, 1.0, 1.5, -1.999, 2.0, -0.25, 2.0**-140, 5e-324, 1e300, math.inf, math.nan]
    x = np.zeros(300_000)
    x[:: 300_000 // len(gaps)][: len(gaps)] = gaps
    pair = stored(tmp_path / "x", x.tobytes(), F64, x.shape), stored(tmp_path / "y", bytes(x.nbytes), F64, x.shape)
    report = scan(comparisons(*pair, 5), spreads=True, **engine)
    assert report.spreads[5].counts == {-128: 2, -2: 1, 0: 3, 1: 1, 127: 1}
    assert list(report.spreads[5].counts) == sorted(report.spreads[5].counts)
    assert scan(comparisons(*pair, 5), **engine).spreads == {}
    assert scan(comparisons(pair[0], pair[0], 5), spreads=True, **engine).spreads == {}


@pytest.mark.parametrize("half", [BF16, F16], ids=str)
def test_a_rounded_copy_is_torchs(engine: dict[str, object], half: DType, tmp_path: Path) -> None:
    masters = torch.randn(50_000) * 1e3
    masters[:4] = torch.tensor([math.nan, math.inf, -0.0, 1e30])
    copy = masters.to(getattr(torch, half.torch_name))
    a = stored(tmp_path / "a", masters.numpy().tobytes(), F32, (50_000,))
    b = stored(tmp_path / "b", copy.view(torch.int16).numpy().tobytes(), half, (50_000,))
    statistics = scan(comparisons(a, b, 0), relation=Relation(rounded=True), **engine).statistics[0]
    assert (statistics.differ, statistics.first, statistics.nan, statistics.inf) == (0, None, 1, 1)
    copy[777] += 64
    b = stored(tmp_path / "c", copy.view(torch.int16).numpy().tobytes(), half, (50_000,))
    statistics = scan(comparisons(a, b, 0), relation=Relation(rounded=True), **engine).statistics[0]
    assert (statistics.differ, statistics.first) == (1, 777)


def test_cosine(engine: dict[str, object], tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).standard_normal((2, 9999)).astype("<f4")
    pair = stored(tmp_path / "x", x.tobytes(), F32, (9999,)), stored(tmp_path / "y", y.tobytes(), F32, (9999,))
    found = scan(comparisons(*pair, 0), **engine).statistics[0].cosine
    assert math.isclose(found, float(x @ y / np.linalg.norm(x) / np.linalg.norm(y)), rel_tol=1e-4)
    assert scan(comparisons(pair[0], pair[0], 0), **engine).statistics[0].cosine == 1.0


def test_every_cut_of_both_sides(engine: dict[str, object], tmp_path: Path) -> None:
    """Columns over two files against rows over three: the first difference is named by its place in the tensor."""
    tensor = np.arange(60 * 64, dtype="<i4").reshape(60, 64)
    other = tensor.copy()
    other[41, 7] = -1
    i32 = BY_NAME["I32"]
    columns = []
    for i in range(2):
        (tmp_path / f"c{i}").write_bytes(np.ascontiguousarray(tensor[:, 32 * i : 32 * i + 32]).tobytes())
        columns.append(Fragment(locate(tmp_path / f"c{i}").store(), 0, 32 * i, 32, 60, 64, 32))
    rows = []
    for i in range(3):
        (tmp_path / f"r{i}").write_bytes(other[20 * i : 20 * i + 20].tobytes())
        rows.append(Fragment(locate(tmp_path / f"r{i}").store(), 0, 20 * 64 * i, 20 * 64))
    a = TensorEntry("x", (60, 64), i32, "buffer", tuple(columns))
    b = TensorEntry("x", (60, 64), i32, "buffer", tuple(rows))
    for pair in ((a, b), (b, a)):
        statistics = scan(comparisons(*pair, 0), **engine).statistics[0]
        assert (statistics.count, statistics.differ, statistics.first) == (60 * 64, 1, 41 * 64 + 7)
    transposed = tuple(Fragment(locate(tmp_path / "r0").store(), 4 * c, 20 * c, 1, 20, 1, 64) for c in range(64))
    flipped = TensorEntry("t", (64, 20), i32, "buffer", transposed)
    (tmp_path / "t").write_bytes(np.ascontiguousarray(other[:20].T).tobytes())
    straight = TensorEntry("t", (64, 20), i32, "buffer", (Fragment(locate(tmp_path / "t").store(), 0, 0, 1280),))
    assert scan(comparisons(flipped, straight, 0), **engine).statistics[0].differ == 0


@pytest.mark.parametrize("byteorder", ["little", "big"])
def test_checksums_of_what_passes_by(engine: dict[str, object], byteorder: str, tmp_path: Path) -> None:
    data = os.urandom(3_000_000)
    path = tmp_path / "f"
    path.write_bytes(data)
    store = locate(path).store(byteorder)
    sums = [CrcRange(store, 0, 5), CrcRange(store, 5, 1_999_995), CrcRange(store, 2_000_000, 1_000_000)]
    tensors = [
        TensorEntry(str(i), (n,), F32, "parameter", (Fragment(store, at, 0, n),))
        for i, (at, n) in enumerate([(100, 10), (140, 400_000), (2_100_000, 1000)])
    ]
    looks = [request_of(entry.fragments[0], F32, i, NUMBERS | CRC_SOURCE) for i, entry in enumerate(tensors)]
    gaps = [(0, 100), (1_600_140, 499_860), (2_104_000, 896_000)]
    looks += [request_of_bytes(store, start, nbytes) for start, nbytes in gaps]
    report = scan(looks, sums, **engine)
    for number, wanted in enumerate(sums):
        crc = join(report.crcs[number], wanted.start, wanted.nbytes)
        assert crc == zlib.crc32(data[wanted.start : wanted.start + wanted.nbytes])
    assert report.bytes_read == len(data)
    assert report.statistics[1].count == 400_000


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_follows_each_other_is_looked_at_chunk_by_chunk(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Tensors of all sizes and dtypes, with gaps and comparisons between them, and checksums whose ranges end anywhere."""
    path = tmp_path_factory.mktemp("c") / "f"
    seed = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    byteorder = data.draw(st.sampled_from(["little", "big"]))
    counts = st.one_of(st.integers(1, 9), st.integers(20_000, 200_000))
    kinds = [F64, F32, BF16, F16, BY_NAME["U8"], BY_NAME["C64"]]
    at, places = data.draw(st.integers(0, 9)), []
    for _ in range(data.draw(st.integers(1, 12))):
        dtype, count = data.draw(st.sampled_from(kinds)), data.draw(counts)
        places.append((at, dtype, count))
        at += dtype.itemsize * count + data.draw(st.sampled_from([0, 0, 0, 1, 5000]))
    total = at + 100
    contents = seed.integers(0, 256, total, np.uint8).tobytes()
    path.write_bytes(contents)
    store = locate(path).store(byteorder)
    wanted = []
    for number, (start, dtype, count) in enumerate(places):
        entry = TensorEntry(str(number), (count,), dtype, "parameter", (Fragment(store, start, 0, count),))
        if data.draw(st.integers(0, 3)):
            wanted.append(request_of(entry.fragments[0], dtype, number, NUMBERS | CRC_SOURCE))
        else:
            wanted += [one._replace(how=one.how | CRC_SOURCE) for one in comparisons(entry, entry, number)]
    edges = sorted({0, total, *(data.draw(st.integers(0, total)) for _ in range(data.draw(st.integers(0, 4))))})
    sums = [CrcRange(store, low, high - low) for low, high in itertools.pairwise(edges)]
    found = scan(wanted, sums, engine="native", threads=3)
    expected = scan(wanted, sums, engine="reference")
    told = [
        {number: (one.count, one.nan, one.inf, one.nonzero, one.differ) for number, one in report.statistics.items()}
        for report in (found, expected)
    ]
    assert told[0] == told[1] and found.bytes_read == expected.bytes_read
    covered = sorted((start, start + dtype.itemsize * count) for start, dtype, count in places)
    for number in range(len(sums)):
        parts = sorted(found.crcs.get(number, ()))
        assert sum(length for _, length, _ in parts) == sum(
            max(0, min(high, sums[number].start + sums[number].nbytes) - max(low, sums[number].start))
            for low, high in covered
        )
        assert all(zlib.crc32(contents[offset : offset + length]) == crc for offset, length, crc in parts)


def test_small_neighbours_are_read_together(tmp_path: Path) -> None:
    """In chunks of 128 KiB, where the page cache has them."""
    path = tmp_path / "f"
    path.write_bytes(bytes(400_000))
    store = locate(path).store()
    entries = [TensorEntry(str(i), (10,), F32, "parameter", (Fragment(store, 40 * i, 0, 10),)) for i in range(10_000)]
    inject(False, 0, 0)
    report = scan((look for i, entry in enumerate(entries) for look in requests_of(entry, i)), engine="native")
    assert len(report.statistics) == 10_000 and calls(False) == 4


def test_large_looks_are_cut_for_their_batches(
    engine: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks, "_MOST_BYTES", 4000)
    x = np.random.default_rng(0).standard_normal(5000).astype("<f4")
    y = x.copy()
    y[4321] = 9
    pair = stored(tmp_path / "x", x.tobytes(), F32, (5000,)), stored(tmp_path / "y", y.tobytes(), F32, (5000,))
    statistics = scan(comparisons(*pair, 0), **engine).statistics[0]
    assert (statistics.count, statistics.differ, statistics.first) == (5000, 1, 4321)


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_faults_of_the_disk(nth: int, tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal(1 << 20).astype("<f4")
    pair = stored(tmp_path / "x", x.tobytes(), F32, (1 << 20,)), stored(tmp_path / "y", x.tobytes(), F32, (1 << 20,))
    for kind in (-2, errno.EINTR):
        inject(False, nth, kind)
        assert scan(comparisons(*pair, 0), engine="native").statistics[0].differ == 0
    inject(False, nth, errno.EIO)
    with pytest.raises(CorruptError, match="cannot be read"):
        scan(comparisons(*pair, 0), engine="native")


def test_a_file_that_shrank_or_changed(engine: dict[str, object], tmp_path: Path) -> None:
    entry = stored(tmp_path / "x", bytes(40_000), F32, (10_000,))
    before = os.stat(tmp_path / "x")
    os.truncate(tmp_path / "x", 20_000)
    with pytest.raises(InconsistentError, match="changed"):
        scan(requests_of(entry, 0), **engine)
    os.utime(tmp_path / "x", ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(CorruptError, match="ends too early"):
        scan(requests_of(entry, 0), **engine)

"""Every engine moves the same bytes: reference, native portable and native vector, on any number of threads."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import struct
import subprocess
import sys
import textwrap
import zlib
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
from hangs import HANG_S
from hypothesis import given, settings
from hypothesis import strategies as st

from zckpt._core import calls, crc32, crc32_combine, has_vector_paths, inject, use_vector_paths
from zckpt._core import cast as native_cast
from zckpt.base.errors import CorruptError, InconsistentError, OutputError, UnsupportedError
from zckpt.core import dtypes
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import BF16, BY_NAME, F16, F32, F64, DType
from zckpt.core.fragments import Block, Fragment
from zckpt.core.overlaps import embed, place
from zckpt.core.plan import Checksum, OutputFile, Plan
from zckpt.core.stores import FileStore, MemoryStore
from zckpt.core.views import transpose_fragments
from zckpt.engine.move import Mover, run
from zckpt.engine.output_files import output_failed
from zckpt.engine.rounding import cast as reference_cast
from zckpt.storage.location import locate
from zckpt.team.partition import begin, move, part_of

ENGINES = [("reference", 1, True), ("native", 1, False), ("native", 2, True), ("native", 4, True)]


@pytest.fixture(params=ENGINES, ids=lambda p: f"{p[0]}-{p[1]}-{'vector' if p[2] else 'portable'}")
def engine(request: pytest.FixtureRequest) -> Iterator[dict[str, object]]:
    name, threads, vector = request.param
    use_vector_paths(vector)
    yield {"engine": name, "threads": threads, "window": 4096}
    use_vector_paths(True)


@pytest.fixture(autouse=True)
def no_faults() -> Iterator[None]:
    yield
    inject(False, 0, 0)
    inject(True, 0, 0)


def source_file(path: Path, data: bytes, byteorder: str = "little") -> FileStore:
    path.write_bytes(data)
    return locate(path).store(byteorder)


def whole(name: str, shape: tuple[int, ...], dtype: DType, store: object, offset: int = 0) -> TensorEntry:
    numel = int(np.prod(shape, dtype=np.int64))
    return TensorEntry(name, shape, dtype, "parameter", (Fragment(store, offset, 0, numel),) if numel else ())


def one_file(size: int, **more: object) -> tuple[OutputFile, FileStore]:
    return OutputFile("out", size, **more), FileStore("out", size)


# ---- routes --------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_cut_of_any_tensors_comes_out_whole(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    draw = data.draw
    root = tmp_path_factory.mktemp("m")
    pairs, offset = [], 100
    sizes = draw(st.lists(st.integers(0, 3000), min_size=1, max_size=6))
    total = 100 + sum(4 * n for n in sizes) + 37
    output = OutputFile("out", total, ((0, bytes(range(100))), (total - 37, b"z" * 37)))
    store = FileStore("out", total)
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    expected = bytes(range(100))
    world = draw(st.integers(1, 5))
    for index, numel in enumerate(sizes):
        values = rng.standard_normal(numel).astype("<f4").tobytes()
        expected += values
        cuts = sorted({0, numel, *(int(c) for c in rng.integers(0, numel + 1, world))})
        fragments = []
        for number, (low, high) in enumerate(itertools.pairwise(cuts)):
            path = root / f"s{index}_{number}"
            big = draw(st.booleans())
            piece = np.frombuffer(values[4 * low : 4 * high], "<f4")
            stored = source_file(
                path, b"pad" + piece.astype(">f4" if big else "<f4").tobytes(), "big" if big else "little"
            )
            fragments.append(Fragment(stored, 3, low, high - low))
        source = TensorEntry(str(index), (numel,), F32, "parameter", tuple(fragments))
        pairs.append((source, whole(str(index), (numel,), F32, store, offset)))
        offset += 4 * numel
    expected += b"z" * 37
    for name, threads, vector in ENGINES:
        use_vector_paths(vector)
        out = root / f"{name}{threads}{vector}"
        out.mkdir()
        run(Plan(((output, store),), pairs), str(out), engine=name, threads=threads, window=4096)
        assert (out / "out").read_bytes() == expected
    use_vector_paths(True)


@pytest.mark.parametrize("dtype", [BF16, F32, F64, BY_NAME["I64"], BY_NAME["C64"], BY_NAME["BOOL"]])
def test_transposed_and_broadcast_sources(engine: dict[str, object], dtype: DType, tmp_path: Path) -> None:
    rows, columns = 37, 53
    data = os.urandom(rows * columns * dtype.itemsize)
    store = source_file(tmp_path / "s", data)
    transposed = tuple(Fragment(store, r * dtype.itemsize, r * columns, 1, columns, 1, rows) for r in range(rows))
    broadcast = (Fragment(store, 5 * dtype.itemsize, 0, 1, rows * columns, 1, 0),)
    size = 2 * len(data)
    output, to = one_file(size)
    pairs = [
        (TensorEntry("t", (rows, columns), dtype, "parameter", transposed), whole("t", (rows, columns), dtype, to)),
        (
            TensorEntry("b", (rows, columns), dtype, "parameter", broadcast),
            whole("b", (rows, columns), dtype, to, size // 2),
        ),
    ]
    run(Plan(((output, to),), pairs), str(tmp_path), **engine)
    raw = np.frombuffer(data, f"V{dtype.itemsize}")
    wanted = raw.reshape(columns, rows).T.tobytes() + raw[5:6].tobytes() * (rows * columns)
    assert (tmp_path / "out").read_bytes() == wanted


@pytest.mark.parametrize("threads", [1, 3])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_transposed_matrices_by_tiles(
    threads: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Rows of any length, cut anywhere, in windows that end within a column; what a cast loses is counted once.

    Of every eighth matrix all numbers are any bits at all: NaNs, infinities, subnormals.
    """
    root = tmp_path_factory.mktemp("t")
    rows, columns = data.draw(st.integers(1, 400)), data.draw(st.integers(1, 400))
    lead, hole = data.draw(st.integers(0, 9)), data.draw(st.sampled_from([0, 0, 3, 2000]))
    target, order = data.draw(st.sampled_from([F32, F16, BF16])), data.draw(st.sampled_from(["little", "big"]))
    source = data.draw(st.sampled_from([F32, F32, F16, BF16]))
    rng, scale = np.random.default_rng(rows * columns), data.draw(st.sampled_from([1, 1, 60_000]))
    numbers = rng.integers(0, 1 << 16, (rows, columns), np.uint16)
    if source is F32 and data.draw(st.integers(0, 7)):
        numbers = rng.normal(0, scale, (rows, columns)).astype(np.float32)
    elif source is F32:
        numbers = rng.integers(0, 1 << 32, (rows, columns), np.uint32).view(np.float32)
    size = source.itemsize
    cuts = sorted({0, rows * columns, *data.draw(st.lists(st.integers(0, rows * columns), max_size=3))})
    held = np.zeros((rows, columns + hole), numbers.dtype)
    held[:, :columns] = numbers
    if hole:  # rows that lie apart
        pieces = [(held.ravel(), [(r * columns, columns, r * (columns + hole)) for r in range(rows)])]
    else:
        pieces = [(numbers.ravel()[a:b], [(a, b - a, 0)]) for a, b in itertools.pairwise(cuts)]
    fragments: list[Fragment] = []
    for number, (values, parts) in enumerate(pieces):
        bits = values.view(f"<u{size}").astype(f"{'<' if order == 'little' else '>'}u{size}").tobytes()
        store = source_file(root / f"s{number}", bytes(lead) + bits, order)
        fragments += [Fragment(store, lead + size * at, start, count) for start, count, at in parts]
    turned = transpose_fragments(fragments, rows, columns, size)
    file, to = one_file(rows * columns * target.itemsize + 10)
    entry = TensorEntry("t", (columns, rows), source, "parameter", turned)
    plan = Plan(((file, to),), [(entry, whole("t", (columns, rows), target, to, 10))])
    use_vector_paths(data.draw(st.booleans()))
    window = data.draw(st.sampled_from([4096, 4096, 65536]))
    try:
        report = run(plan, str(root), threads=threads, window=window, engine="native")
    finally:
        use_vector_paths(True)
    wanted, lost, _ = reference_cast(np.ascontiguousarray(numbers.T).tobytes(), source, target, "little", False)
    assert (root / file.path).read_bytes()[10:] == wanted
    assert sum(count for count, _ in report.overflows.values()) == lost
    assert sum(1 for _ in plan.moves()) <= 3 * len(pieces) + 2 + hole * rows
    begin(plan, str(root / "shared"))  # and by several processes, each of which has a part of the file
    for rank in range(3):
        part = part_of(plan, rank, 3)
        move(Mover(part, window=4096, threads=threads), part, str(root / "shared"), lambda piece: None)
    assert (root / "shared" / file.path).read_bytes()[10:] == wanted


@pytest.mark.parametrize("threads", [1, 3])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_transposed_matrices_among_others(
    threads: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Vectors, and matrices that fit windows, nearly fit them and are cut; rows of some come in groups, in another order."""
    root = tmp_path_factory.mktemp("t")
    target = data.draw(st.sampled_from([F32, BF16]))
    tensors: list[tuple[np.ndarray, list[int]]] = []
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    for _ in range(data.draw(st.integers(1, 6))):
        groups = data.draw(st.sampled_from([0, 0, 1, 1, 3]))  # 0: a vector
        rows, columns = max(groups, 1) * data.draw(st.integers(1, 70)), data.draw(st.integers(1, 300))
        tensors.append(
            (rng.normal(0, 1, (rows, columns)).astype(np.float32), data.draw(st.permutations(range(groups))))
        )
    store = source_file(root / "s", b"".join(numbers.tobytes() for numbers, _ in tensors))
    file, to = one_file(target.itemsize * sum(numbers.size for numbers, _ in tensors))
    pairs, at, expected = [], 0, b""
    for number, (numbers, order) in enumerate(tensors):
        rows, columns = numbers.shape
        fragments, shape = (Fragment(store, 4 * at, 0, numbers.size),), (numbers.size,)
        if order:
            count = numbers.size // len(order)
            placed = sorted((place, 4 * (at + count * n)) for n, place in enumerate(order))
            cut = [Fragment(store, offset, count * place, count) for place, offset in placed]
            fragments, shape = transpose_fragments(cut, rows, columns, 4), (columns, rows)
            numbers = numbers.reshape(len(order), -1, columns)[np.argsort(order)].reshape(rows, columns).T
        entry = TensorEntry(f"t{number}", shape, F32, "parameter", fragments)
        pairs.append((entry, whole(entry.name, shape, target, to, target.itemsize * at)))
        expected += np.ascontiguousarray(numbers).tobytes()
        at += numbers.size
    plan = Plan(((file, to),), pairs)
    expected, _, _ = reference_cast(expected, F32, target, "little", False)
    for window in (4096, 16384):
        out = root / str(window)
        out.mkdir()
        run(plan, str(out), threads=threads, window=window, engine="native")
        assert (out / file.path).read_bytes() == expected


def test_a_transposed_matrix_is_read_in_few_strips(tmp_path: Path) -> None:
    """It begins and ends anywhere: no part of it that is left over costs a read for each of its rows."""
    rows, columns = 1000, 6500
    rng = np.random.default_rng(0)
    vector, matrix = rng.normal(0, 1, 150_000).astype("<f4"), rng.normal(0, 1, (rows, columns)).astype("<f4")
    store = source_file(tmp_path / "s", vector.tobytes() + matrix.tobytes())
    file, to = one_file(2 * 2 * (vector.size + matrix.size))
    turned = transpose_fragments((Fragment(store, vector.nbytes, 0, matrix.size),), rows, columns, 4)
    pairs, at = [], 0
    for name in ("v", "m", "v again", "m again"):
        shape = (columns, rows) if "m" in name else vector.shape
        fragments = turned if "m" in name else (Fragment(store, 0, 0, vector.size),)
        pairs.append((TensorEntry(name, shape, F32, "parameter", fragments), whole(name, shape, BF16, to, at)))
        at += 2 * (matrix.size if "m" in name else vector.size)
    inject(False, 0, 0)
    run(Plan(((file, to),), pairs), str(tmp_path), engine="native", threads=2, window=1 << 20)
    parts = 3  # of each matrix, since two would be longer than windows may be
    assert calls(False) <= 2 * parts * rows + 20
    expected = torch.tensor(np.concatenate([vector, matrix.T.ravel()] * 2)).bfloat16()
    assert (tmp_path / file.path).read_bytes() == expected.view(torch.int16).numpy().tobytes()


def test_boxes_into_pitched_files(engine: dict[str, object], tmp_path: Path) -> None:
    tensor = np.arange(20 * 64, dtype="<i4").reshape(20, 64)
    halves = [np.ascontiguousarray(tensor[:, :32]), np.ascontiguousarray(tensor[:, 32:])]
    stores = [source_file(tmp_path / f"s{i}", half.tobytes()) for i, half in enumerate(halves)]
    i32 = BY_NAME["I32"]
    fragments = tuple(Fragment(s, 0, 32 * i, 32, 20, 64, 32) for i, s in enumerate(stores))
    source = TensorEntry("x", (20, 64), i32, "parameter", fragments)
    tops = [(OutputFile(f"o{i}", 20 * 16 * 4), FileStore(f"o{i}", 20 * 16 * 4)) for i in range(4)]
    boxes = tuple(Fragment(store, 0, 16 * i, 16, 20, 64, 16) for i, (_, store) in enumerate(tops))
    run(Plan(tuple(tops), [(source, TensorEntry("x", (20, 64), i32, "parameter", boxes))]), str(tmp_path), **engine)
    for i in range(4):
        assert (tmp_path / f"o{i}").read_bytes() == tensor[:, 16 * i : 16 * i + 16].tobytes()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_rows_of_any_pitch_come_out_right(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Slices of any dimension into slices of any other, cast or not, through windows that cut rows anywhere."""
    draw = data.draw
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 7, 33, 150, 1100]), min_size=2, max_size=3)))
    hypothesis.assume(np.prod(shape) < 400_000)
    source_dtype, target_dtype = draw(st.sampled_from([(F32, F32), (F32, BF16), (BF16, F32), (F64, F64)]))
    numbers = torch.arange(int(np.prod(shape))).reshape(shape).to(getattr(torch, source_dtype.torch_name))
    root = tmp_path_factory.mktemp("p")

    def slices(dim: int, parts: int) -> list[tuple[int, int]]:
        edges = sorted({0, shape[dim], *(shape[dim] * i // parts for i in range(parts))})
        return list(itertools.pairwise(edges))

    dim, to = (draw(st.integers(0, len(shape) - 1)) for _ in range(2))
    fragments, targets, outputs, wanted = [], [], [], []
    big = draw(st.booleans())
    for low, high in slices(dim, draw(st.integers(1, 4))):
        held = numbers.narrow(dim, low, high - low).contiguous()
        stored = held.view(torch.uint8).numpy().reshape(-1, source_dtype.itemsize)
        path = root / f"s{low}"
        store = source_file(path, b"#" + (stored[:, ::-1] if big else stored).tobytes(), "big" if big else "little")
        fragments += embed(
            (Fragment(store, 1, 0, held.numel()),), held.shape, dim, low, shape[dim], source_dtype.itemsize
        )
    for low, high in slices(to, draw(st.integers(1, 4))):
        part = numbers.narrow(to, low, high - low).contiguous().to(getattr(torch, target_dtype.torch_name))
        size = 5 + part.numel() * target_dtype.itemsize
        output, store = OutputFile(f"o{low}", size, ((0, b"head:"),)), FileStore(f"o{low}", size)
        outputs.append((output, store))
        wanted.append(b"head:" + part.view(torch.uint8).numpy().tobytes())
        targets += embed((Fragment(store, 5, 0, part.numel()),), part.shape, to, low, shape[to], target_dtype.itemsize)
    pairs = [
        (
            TensorEntry("x", shape, source_dtype, "parameter", tuple(fragments)),
            TensorEntry("x", shape, target_dtype, "parameter", tuple(targets)),
        )
    ]
    for name, threads, vector in ENGINES:
        if name == "reference" and np.prod(shape) > 20_000:
            continue
        use_vector_paths(vector)
        out = root / f"{name}{threads}{vector}"
        out.mkdir()
        run(Plan(tuple(outputs), pairs), str(out), engine=name, threads=threads, window=4096)
        assert [(out / output.path).read_bytes() for output, _ in outputs] == wanted
    use_vector_paths(True)


def test_memory_on_both_sides(engine: dict[str, object]) -> None:
    a = np.arange(5000, dtype=np.float32)
    b = np.zeros((100, 100), np.float32)
    source = whole("x", (50, 100), F32, MemoryStore(a.ctypes.data, a.nbytes, a))
    store = MemoryStore(b.ctypes.data, b.nbytes, b)
    every_other_row = tuple(Fragment(store, 0, 0, 100, 50, 100, 200) for _ in range(1))
    run(Plan((), [(source, TensorEntry("x", (50, 100), F32, "parameter", every_other_row))]), "", **engine)
    assert (b[::2] == a.reshape(50, 100)).all() and not b[1::2].any()
    c = np.zeros((50, 100, 2), np.float32)
    strided = (Fragment(MemoryStore(c.ctypes.data, c.nbytes, c), 4, 0, 1, 5000, 1, 2),)
    run(Plan((), [(source, TensorEntry("x", (50, 100), F32, "parameter", strided))]), "", **engine)
    assert (c[..., 1].ravel() == a).all() and not c[..., 0].any()


def test_checksums_and_direct_writes(engine: dict[str, object], tmp_path: Path) -> None:
    data = os.urandom((3 << 20) + 4 * 777)
    store = source_file(tmp_path / "s", data)
    size = 64 + len(data) + 13
    output = OutputFile(
        "out", size, ((0, b"h" * 64), (size - 13, b"t" * 13)), (Checksum(64, len(data), (8, size - 8)),)
    )
    to = FileStore("out", size)
    pair = (whole("x", (len(data) // 4,), F32, store), whole("x", (len(data) // 4,), F32, to, 64))
    for window in (4096, 1 << 20):
        directory = tmp_path / str(window)
        directory.mkdir()
        report = run(Plan(((output, to),), [pair]), str(directory), **{**engine, "window": window})
        crc = struct.pack("<I", zlib.crc32(data))
        wanted = bytearray(b"h" * 64 + data + b"t" * 13)
        wanted[8:12] = wanted[size - 8 : size - 4] = crc
        assert (directory / "out").read_bytes() == bytes(wanted)
        assert report.bytes_read == len(data)


def test_files_follow_the_umask(engine: dict[str, object], tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        run(Plan((one_file(3, literals=((0, b"abc"),)),), []), str(tmp_path), **engine)
    finally:
        os.umask(old)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o640


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_file_comes_with_its_checksum(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Literals, elements, slots over literals, and holes that nothing is written to."""
    draw = data.draw
    root = tmp_path_factory.mktemp("c")
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    files, pairs = [], []
    for number in range(draw(st.integers(1, 4))):
        path, offset, literals, checksums = f"f{number}", 0, [], []
        store = FileStore(path, 1 << 20)
        for index in range(draw(st.integers(0, 5))):
            literal = rng.bytes(int(rng.integers(8, 40)))
            literals.append((offset, literal))
            slot = offset + 2
            offset += len(literal)
            numel = draw(st.sampled_from([0, 1, 7, 3000]))
            stored = source_file(root / f"s{number}_{index}", rng.bytes(4 * numel))
            source = whole(f"{number}.{index}", (numel,), F32, stored)
            pairs.append((source, whole(source.name, (numel,), F32, store, offset)))
            if draw(st.booleans()):
                checksums.append(Checksum(offset, 4 * numel, (slot,)))
            offset += 4 * numel + draw(st.sampled_from([0, 0, 5, 10_000]))
        files.append((OutputFile(path, offset, tuple(literals), tuple(checksums)), store))
    for name, threads, vector in ENGINES:
        use_vector_paths(vector)
        out = root / f"{name}{threads}{vector}"
        out.mkdir()
        told = []
        report = run(
            Plan(tuple(files), pairs), str(out), engine=name, threads=threads, window=4096, finished=told.append
        )
        assert sorted(told, key=lambda f: f.path) == sorted(report.files, key=lambda f: f.path)
        assert {f.path for f in told} == {output.path for output, _ in files}
        for file in told:
            written = (out / file.path).read_bytes()
            assert (file.nbytes, file.crc32) == (len(written), zlib.crc32(written))
        assert {f.name: f.read_bytes() for f in out.iterdir()} == {
            f.name: f.read_bytes() for f in (root / "reference1True").iterdir()
        }
    use_vector_paths(True)


def test_crcs_in_python() -> None:
    """What stands in for the C++ where that was not built."""
    import importlib
    import sys as python

    from zckpt.engine import checksums as sums

    core = python.modules["zckpt._core"]
    python.modules["zckpt._core"] = None  # type: ignore[assignment]
    try:
        importlib.reload(sums)
        for a, b in ((b"", b""), (b"a", b""), (b"", b"b"), (b"hello ", b"world" * 1000)):
            assert sums.crc32_combine(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)
    finally:
        python.modules["zckpt._core"] = core
        importlib.reload(sums)
    assert sums.crc32_combine is crc32_combine


def test_files_that_are_done_are_left_alone(engine: dict[str, object], tmp_path: Path) -> None:
    data = os.urandom(8000)
    source = whole("x", (2000,), F32, source_file(tmp_path / "s", data))
    stores = [FileStore(f"o{i}", 4000) for i in range(2)]
    halves = tuple(Fragment(store, 0, 1000 * i, 1000) for i, store in enumerate(stores))
    plan = Plan(
        tuple((OutputFile(store.path, 4000), store) for store in stores),
        [(source, TensorEntry("x", (2000,), F32, "parameter", halves))],
    )
    (tmp_path / "o0").write_bytes(b"as it was")
    report = run(plan, str(tmp_path), **engine, done={"o0"})
    assert (tmp_path / "o0").read_bytes() == b"as it was"
    assert (tmp_path / "o1").read_bytes() == data[4000:]
    assert [file.path for file in report.files] == ["o1"]


def test_files_are_told_of_as_soon_as_they_are_complete(
    engine: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zckpt.engine import batches

    monkeypatch.setattr(batches, "LEAST_BYTES", 0)
    data = os.urandom(12_000)
    source = source_file(tmp_path / "s", data)
    files, pairs = [], []
    for i in range(3):
        store = FileStore(f"o{i}", 4000)
        files.append((OutputFile(store.path, 4000), store))
        pairs.append((whole(str(i), (1000,), F32, source, 4000 * i), whole(str(i), (1000,), F32, store)))
    wanted = {f"o{i}": data[4000 * i : 4000 * (i + 1)] for i in range(3)}
    seen = []

    def is_whole(name: str) -> bool:
        return (tmp_path / name).read_bytes() == wanted[name]

    run(
        Plan(tuple(files), pairs),
        str(tmp_path),
        **engine,
        finished=lambda file: seen.append((file.path, [name for name in wanted if is_whole(name)])),
    )
    assert [path for path, _ in seen] == ["o0", "o1", "o2"]
    for number, (_, complete) in enumerate(seen):  # the next one may be complete while one becomes durable
        assert list(wanted)[: number + 1] == complete[: number + 1] and len(complete) <= number + 2


def test_a_window_of_many_small_pieces_is_one_read_per_file(tmp_path: Path) -> None:
    """ZeRO-3 with many ranks: small parameters lie in pieces, one after another, in every rank's file."""
    ranks, parameters, piece = 16, 400, 8
    stores = []
    for rank in range(ranks):
        values = np.arange(parameters * piece, dtype="<f4") + rank * 1e5
        stores.append(source_file(tmp_path / f"r{rank}", b"head" + values.tobytes()))
    to = FileStore("out", 4 * parameters * piece * ranks)
    pairs = []
    for number in range(parameters):
        fragments = tuple(
            Fragment(store, 4 + 4 * number * piece, rank * piece, piece) for rank, store in enumerate(stores)
        )
        source = TensorEntry(str(number), (ranks * piece,), F32, "parameter", fragments)
        pairs.append((source, whole(str(number), (ranks * piece,), F32, to, 4 * number * piece * ranks)))
    for target in (F32, BF16):
        to = FileStore("out", target.itemsize * parameters * piece * ranks)
        cast_pairs = [
            (source, whole(source.name, source.shape, target, to, target.itemsize * i * piece * ranks))
            for i, (source, _) in enumerate(pairs)
        ]
        (tmp_path / "out").unlink(missing_ok=True)
        inject(False, 0, 0)
        run(Plan(((OutputFile("out", to.size), to),), cast_pairs), str(tmp_path), engine="native")
        assert calls(False) == ranks
    wanted = np.stack(
        [np.arange(parameters * piece, dtype="<f4").reshape(parameters, piece) + r * 1e5 for r in range(ranks)], 1
    )
    assert (tmp_path / "out").read_bytes() == torch.tensor(wanted).bfloat16().view(torch.int16).numpy().tobytes()


def test_a_limit_of_the_rate(engine: dict[str, object], tmp_path: Path) -> None:
    import time

    plan, data = job(tmp_path)
    began = time.monotonic()
    run(plan, str(tmp_path), **engine, bytes_per_s=len(data) * 8)
    assert time.monotonic() - began >= 0.2  # 128 KiB read and written at 512 KiB/s, less what the last windows may owe
    assert (tmp_path / "out").read_bytes() == data


def resident(path: Path) -> int:
    """Pages of a file that the page cache holds."""
    import ctypes

    size = path.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    vector = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    with open(path, "rb") as file:
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), vector)
    libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    return sum(v & 1 for v in vector)


def test_the_page_cache_is_given_back(tmp_path: Path) -> None:
    data = os.urandom(8 << 20)
    source = source_file(tmp_path / "s", data)
    with open(tmp_path / "s", "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident(tmp_path / "s"):
        pytest.skip("this file system lives in the page cache")
    pages = len(data) // mmap.PAGESIZE

    def held(keep: bool) -> int:
        """Pages of the source that a run leaves in the cache. The kernel keeps a few that another processor has just used."""
        to = FileStore("out", len(data))
        pairs = [(whole("x", (len(data) // 4,), F32, source), whole("x", (len(data) // 4,), F32, to))]
        run(Plan(((OutputFile("out", len(data)), to),), pairs), str(tmp_path), keep_cache=keep)
        assert (tmp_path / "out").read_bytes() == data
        (tmp_path / "out").unlink()
        return resident(tmp_path / "s")

    assert any(held(False) <= pages // 50 for _ in range(5))
    assert any(held(True) >= pages - pages // 50 for _ in range(5))


def test_the_page_cache_is_given_back_by_default_above_the_size_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from zckpt.base import pace as tuning

    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < tuning.memory_bytes() <= physical
    assert tuning.gives_back(None, physical + 1) and not tuning.gives_back(None, 1000)
    assert tuning.gives_back(False, 1) and not tuning.gives_back(True, 1 << 60)


# ---- casts ---------------------------------------------------------------------------------------------------------

TORCH = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16, F64: torch.float64}
ALL_16_BITS = np.arange(65536, dtype="<u2").tobytes()


def boundaries() -> bytes:
    """fp32 numbers around every bf16 and fp16 number and every midpoint between two."""
    around = np.array([-1, 0, 1], np.int64)
    bf16 = (np.arange(65536, dtype=np.int64) << 16)[:, None] + np.array([0, 0x8000])
    half = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32).astype(np.int64)
    half = half[:, None] + np.array([0, 0x800, 0x1000])
    bits = np.concatenate([(x[..., None] + around).ravel() for x in (bf16, half)])
    return (bits & 0xFFFFFFFF).astype("<u4").tobytes()


def inputs() -> list[tuple[DType, bytes]]:
    rng = np.random.default_rng(1)
    random = rng.integers(0, 1 << 32, 1 << 20, dtype=np.uint32).astype("<u4").tobytes()
    double = np.concatenate([rng.standard_normal(5000) * 10.0**k for k in range(-320, 300, 10)])
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3.5e38, -3.5e38, 65519.99, 65520.0, 5e-324])
    eights = [(BY_NAME[n], bytes(range(256))) for n in ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")]
    return [
        (F32, random), (F32, boundaries()), (F16, ALL_16_BITS), (BF16, ALL_16_BITS),
        (F64, np.concatenate([double, special]).astype("<f8").tobytes()), *eights,
    ]  # fmt: skip


def as_torch(data: bytes, dtype: DType) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype.torch_name))


@pytest.mark.parametrize("target", [F32, F16, BF16], ids=str)
def test_casts_are_torchs_to_the_bit(target: DType) -> None:
    for source, data in inputs():
        if source == target or (source == F64 and target != F32):  # torch rounds doubles twice: see test_casts.py
            continue
        use_vector_paths(True)
        found, count, largest = native_cast(source.number, target.number, data)
        ours, theirs = as_torch(found, target), as_torch(data, source).to(TORCH[target])
        nan = theirs.isnan()
        assert torch.equal(ours.isnan(), nan), source
        unsigned = torch.int32 if target == F32 else torch.int16
        assert torch.equal(ours.view(unsigned)[~nan], theirs.view(unsigned)[~nan]), source
        wide = as_torch(data, source).double()
        lost = theirs.isinf() & wide.isfinite()
        assert count == int(lost.sum()), source
        assert largest == (float(wide[lost].abs().max()) if count else 0.0), source


@pytest.mark.parametrize("clamp", [False, True])
@pytest.mark.parametrize("target", [F32, F16, BF16], ids=str)
def test_all_paths_give_the_same_bits(target: DType, clamp: bool) -> None:
    assert has_vector_paths() in (True, False)
    for source, data in inputs():
        if source == target:
            continue
        data = data[: 1 << 20]
        use_vector_paths(False)
        portable = native_cast(source.number, target.number, data, clamp)
        use_vector_paths(True)
        assert native_cast(source.number, target.number, data, clamp) == portable, source
        assert reference_cast(data, source, target, "little", clamp) == portable, source
        if clamp:
            out, wide = as_torch(portable[0], target), as_torch(data, source).double()
            assert not (out.isinf() & wide.isfinite()).any()


def test_a_cast_in_a_move_reports_its_overflows(engine: dict[str, object], tmp_path: Path) -> None:
    values = np.array([1.0, 70000.0, -1e30, np.inf, np.nan, 65504.0] * 1000, "<f4")
    store = source_file(tmp_path / "s", values.tobytes())
    output, to = one_file(values.size * 2)
    pair = (whole("x", (6000,), F32, store), whole("x", (6000,), F16, to))
    report = run(Plan(((output, to),), [pair]), str(tmp_path), **engine)
    assert list(report.overflows.values()) == [(2000, float(np.float32(1e30)))]
    (tmp_path / "out").unlink()
    run(Plan(((output, to),), [pair]), str(tmp_path), **engine, overflow="clamp")
    clamped = np.frombuffer((tmp_path / "out").read_bytes(), "<f2")[:6]
    assert clamped[[1, 2, 3]].tolist() == [65504.0, -65504.0, np.inf]


def test_no_cast_of_integers(tmp_path: Path) -> None:
    store = source_file(tmp_path / "s", bytes(8))
    output, to = one_file(4)
    pair = (whole("x", (1,), BY_NAME["I64"], store), whole("x", (1,), F32, to))
    with pytest.raises(UnsupportedError):
        run(Plan(((output, to),), [pair]), str(tmp_path))
    assert not (tmp_path / "out").exists()


def test_the_core_numbers_dtypes_alike() -> None:
    for dtype in dtypes.ALL:
        if dtype.kind == "float" and dtype != F32:
            assert len(native_cast(dtype.number, F32.number, bytes(8 * dtype.itemsize))[0]) == 32


@given(a=st.binary(max_size=300), b=st.binary(max_size=300))
def test_crc(a: bytes, b: bytes) -> None:
    assert crc32(a) == crc32(memoryview(a)) == zlib.crc32(a)
    assert crc32_combine(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)


# ---- faults --------------------------------------------------------------------------------------------------------


def job(tmp_path: Path) -> tuple[Plan, bytes]:
    data = os.urandom(64 << 10)
    store = source_file(tmp_path / "s", data)
    output, to = one_file(len(data))
    return Plan(((output, to),), [(whole("x", (16384,), F32, store), whole("x", (16384,), F32, to))]), data


@pytest.mark.parametrize("nth", [1, 2, 5, 12])
@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
@pytest.mark.parametrize("kind", [-2, errno.EINTR], ids=["short", "EINTR"])
def test_short_counts_and_signals_do_no_harm(write: bool, kind: int, nth: int, tmp_path: Path) -> None:
    plan, data = job(tmp_path)
    inject(write, nth, kind)
    run(plan, str(tmp_path), engine="native", window=4096)
    assert (tmp_path / "out").read_bytes() == data


@pytest.mark.parametrize("nth", [1, 2, 5, 12])
def test_errors_of_the_disk_are_told(nth: int, tmp_path: Path) -> None:
    plan, _ = job(tmp_path)
    inject(False, nth, errno.EIO)
    with pytest.raises(CorruptError) as caught:
        run(plan, str(tmp_path), engine="native", window=4096)
    assert caught.value.file == str(tmp_path / "s") and caught.value.byte_offset is not None
    (tmp_path / "out").unlink()
    inject(True, nth, errno.ENOSPC)
    with pytest.raises(OutputError, match="full"):
        run(plan, str(tmp_path), engine="native", window=4096)


def test_a_source_that_shrank(engine: dict[str, object], tmp_path: Path) -> None:
    plan, data = job(tmp_path)
    store = plan.pairs[0][0].fragments[0].store
    before = os.stat(store.path)
    os.truncate(store.path, len(data) - 100)
    os.utime(store.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(CorruptError, match="ends too early"):
        run(plan, str(tmp_path), **engine)


def test_a_source_that_changed(engine: dict[str, object], tmp_path: Path) -> None:
    plan, data = job(tmp_path)
    (tmp_path / "s").write_bytes(data)
    os.utime(tmp_path / "s", ns=(1, 1))
    with pytest.raises(InconsistentError, match="changed"):
        run(plan, str(tmp_path), **engine)


def child(code: str, *arguments: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


CHILD = """
    import os, sys
    from zckpt.core.catalog import TensorEntry
    from zckpt.core.dtypes import F32
    from zckpt.storage.location import locate
    from zckpt.core.fragments import Fragment
    from zckpt.core.stores import FileStore
    from zckpt.engine.move import run
    from zckpt.core.plan import OutputFile, Plan
    root, megabytes = sys.argv[1], int(sys.argv[2])
    source = os.path.join(root, "s")
    with open(source, "wb") as file:
        file.truncate(megabytes << 20)
    numel = (megabytes << 20) // 4
    store, to = locate(source).store(), FileStore("out", megabytes << 20)
    entry = lambda s: TensorEntry("x", (numel,), F32, "parameter", (Fragment(s, 0, 0, numel),))
    plan = Plan(((OutputFile("out", megabytes << 20), to),), [(entry(store), entry(to))])
"""


def test_a_limit_on_the_size_of_files_is_named(tmp_path: Path) -> None:
    code = (
        CHILD
        + """
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))
    try:
        run(plan, root)
    except Exception as error:
        print(type(error).__name__, error.what, error.found, error.expected, error.remedy, sep="|")
    """
    )
    (tmp_path / "s").touch()
    out, err = child(
        code.replace("file.truncate(megabytes << 20)", "file.truncate(8 << 20)"), tmp_path, 8
    ).communicate()
    kind, what, found, expected, remedy = out.strip().split("|")
    assert (kind, what) == ("OutputError", "a file would be larger than allowed"), err
    assert found == "a limit of 4.19 MB for this process's files (ulimit -f)"
    assert "8.39 MB" in expected and "ulimit -f" in remedy


@pytest.mark.parametrize(
    ("number", "what"),
    [(errno.ENOSPC, "full"), (errno.EDQUOT, "quota"), (errno.EFBIG, "larger than"), (errno.EIO, "cannot be")],
)
def test_what_is_wrong_with_an_output(number: int, what: str, tmp_path: Path) -> None:
    with pytest.raises(OutputError) as error:
        output_failed(OSError(number, os.strerror(number)), str(tmp_path), Plan((), ()))
    assert what in error.value.what and (os.strerror(number) in error.value.found) == (number != errno.ENOSPC)
    assert error.value.found.endswith(" free") == (number == errno.ENOSPC)


def test_ctrl_c_stops_it(tmp_path: Path) -> None:
    code = (
        CHILD
        + """
    import signal
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may have it ignored
    def progress(n):
        if n:
            os.kill(os.getpid(), signal.SIGINT)
    try:
        run(plan, root, progress=progress, window=4096, threads=1, bytes_per_s=4 << 20)
    except KeyboardInterrupt:
        print("stopped")
    """
    )
    out, err = child(code, tmp_path, 256).communicate(timeout=HANG_S)
    assert out.strip() == "stopped", err


def test_memory_does_not_grow_with_the_job(tmp_path: Path) -> None:
    code = (
        CHILD
        + """
    run(plan, root, threads=4)
    print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
    """
    )
    peaks = []
    for megabytes in (20, 400):
        directory = tmp_path / str(megabytes)
        directory.mkdir()
        out, err = child(code, directory, megabytes).communicate()
        peaks.append(int(out or -1))
        assert peaks[-1] > 0, err
    assert peaks[1] - peaks[0] < 24 << 10
    assert peaks[1] < 150 << 10


def test_more_sources_than_descriptors(tmp_path: Path) -> None:
    code = """
    import os, resource, sys
    resource.setrlimit(resource.RLIMIT_NOFILE, (700, 700))
    from zckpt.core.catalog import TensorEntry
    from zckpt.core.dtypes import F32
    from zckpt.storage.location import locate
    from zckpt.core.fragments import Fragment
    from zckpt.core.stores import FileStore
    from zckpt.engine.move import run
    from zckpt.core.plan import OutputFile, Plan
    root, n = sys.argv[1], 1500
    stores = []
    for i in range(n - 1):
        path = os.path.join(root, f"s{i}")
        open(path, "wb").write(i.to_bytes(4, "little"))
        stores.append(locate(path).store())
    order = [*range(511), 0, *range(511, n - 1)]  # the second batch begins with a source of the first one's
    stores = [stores[i] for i in order]
    source = TensorEntry("x", (n,), F32, "parameter", tuple(Fragment(s, 0, i, 1) for i, s in enumerate(stores)))
    to = FileStore("out", 4 * n)
    target = TensorEntry("x", (n,), F32, "parameter", (Fragment(to, 0, 0, n),))
    run(Plan(((OutputFile("out", 4 * n), to),), [(source, target)]), root)
    data = open(os.path.join(root, "out"), "rb").read()
    print(data == b"".join(i.to_bytes(4, "little") for i in order))
    """
    out, err = child(code, tmp_path).communicate()
    assert out.strip() == "True", err


def test_more_outputs_than_descriptors(tmp_path: Path) -> None:
    code = """
    import os, resource, sys
    resource.setrlimit(resource.RLIMIT_NOFILE, (700, 700))
    from zckpt.core.catalog import TensorEntry
    from zckpt.core.dtypes import F32
    from zckpt.storage.location import locate
    from zckpt.core.fragments import Fragment
    from zckpt.core.stores import FileStore
    from zckpt.engine.move import run
    from zckpt.core.plan import Checksum, OutputFile, Plan
    root, n = sys.argv[1], 1500
    path = os.path.join(root, "source")
    open(path, "wb").write(b"".join(i.to_bytes(4, "little") for i in range(n)))
    files = [
        (OutputFile(f"o{i}", 9, ((0, b"*"),), (Checksum(1, 4, (5,)),)), FileStore(f"o{i}", 9)) for i in range(n)
    ]
    source = TensorEntry("x", (n,), F32, "parameter", (Fragment(locate(path).store(), 0, 0, n),))
    target = tuple(Fragment(store, 1, i, 1) for i, (_, store) in enumerate(files))
    run(Plan(tuple(files), [(source, TensorEntry("x", (n,), F32, "parameter", target))]), root)
    import zlib
    wanted = [i.to_bytes(4, "little") for i in range(n)]
    wanted = [b"*" + w + zlib.crc32(w).to_bytes(4, "little") for w in wanted]
    print([open(os.path.join(root, f"o{i}"), "rb").read() for i in range(n)] == wanted)
    """
    out, err = child(code, tmp_path).communicate()
    assert out.strip() == "True", err


@pytest.mark.parametrize("every", [2, 3, 5])
@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_nth_column_turned(every: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Gate and up columns in turn, taken apart and turned: elements of a row of the source are apart."""
    root = tmp_path_factory.mktemp("t")
    rows, columns = data.draw(st.integers(2, 300)), data.draw(st.integers(2, 300))
    target, order = data.draw(st.sampled_from([F32, BF16])), data.draw(st.sampled_from(["little", "big"]))
    numbers = np.random.default_rng(rows * columns).normal(0, 1, (rows, columns * every)).astype(np.float32)
    store = source_file(root / "s", bytes(3) + numbers.astype("<f4" if order == "little" else ">f4").tobytes(), order)
    turned = transpose_fragments((Fragment(store, 3, 0, numbers.size),), rows, columns * every, 4)
    pairs = []
    file, to = one_file(numbers.size * target.itemsize)
    for n in range(every):
        part = place(turned, Block(n * rows, rows, columns, every * rows, every * rows, 1), 0, rows, 4)
        at = n * rows * columns * target.itemsize
        shape = (columns, rows)
        pairs.append((TensorEntry(f"t{n}", shape, F32, "parameter", part), whole(f"t{n}", shape, target, to, at)))
    plan = Plan(((file, to),), pairs)
    assert columns <= every or sum(1 for _ in plan.moves()) == every
    expected = b"".join(numbers.T[n::every].tobytes() for n in range(every))
    expected, _, _ = reference_cast(expected, F32, target, "little", False)
    for threads in (1, 3):
        out = root / str(threads)
        out.mkdir()
        run(plan, str(out), threads=threads, window=4096, engine="native")
        assert (out / file.path).read_bytes() == expected

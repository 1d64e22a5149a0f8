"""Drives the engine through all that it does, for builds of it that watch themselves: `make sanitize`.

    python tests/sanitized.py CORE

CORE is the module that was built with sanitizers, which end the process where they see something. What comes out is also
held to the reference engine, byte by byte.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import itertools
import os
import shutil
import struct
import sys
import tempfile
import threading
import time
import zlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any


def load(path: str) -> ModuleType:
    """The module from that file, as everybody's `zckpt._core`."""
    spec = importlib.util.spec_from_file_location("zckpt._core", path)
    assert spec is not None and spec.loader is not None
    core = importlib.util.module_from_spec(spec)
    sys.modules["zckpt._core"] = core
    spec.loader.exec_module(core)
    return core


core = load(sys.argv[1])

import numpy as np  # noqa: E402

from zckpt.base.errors import ZckptError  # noqa: E402
from zckpt.containers import load_pickle  # noqa: E402
from zckpt.core.catalog import Replica, TensorEntry  # noqa: E402
from zckpt.core.dtypes import ALL, BF16, F8_E4M3, F16, F32, F64, DType  # noqa: E402
from zckpt.core.folds import MatrixBlocks, NumberGrid  # noqa: E402
from zckpt.core.fragments import Fragment  # noqa: E402
from zckpt.core.plan import Checksum, OutputFile, Plan  # noqa: E402
from zckpt.core.recipes import derive_entry, mean_of, moving_average_of, weighted_sum_of  # noqa: E402
from zckpt.core.stores import FileStore, MemoryStore  # noqa: E402
from zckpt.engine import batches  # noqa: E402
from zckpt.engine.independent import derived_again  # noqa: E402
from zckpt.engine.kernels import NativeKernels, ReferenceKernels  # noqa: E402
from zckpt.engine.kernels_ggml import TYPES  # noqa: E402
from zckpt.engine.kernels_to_ggml import KINDS  # noqa: E402
from zckpt.engine.move import Mode, run  # noqa: E402
from zckpt.engine.rounding import cast  # noqa: E402
from zckpt.engine.scan import scan  # noqa: E402
from zckpt.engine.scan_requests import CrcRange, comparisons, request_of  # noqa: E402
from zckpt.engine.tensor_statistics import Relation  # noqa: E402
from zckpt.layouts.dcp.chunks import FINISHERS, row_kinds  # noqa: E402
from zckpt.naming.merged_matrix import MergedMatrix, Update  # noqa: E402
from zckpt.storage.location import locate  # noqa: E402

RNG = np.random.default_rng(0)
TARGETS = (F32, F16, BF16)


def entry(store: Any, dtype: DType, shape: tuple[int, ...], offset: int = 0, *fragments: Fragment) -> TensorEntry:
    """A tensor that lies there in one piece, or as these fragments."""
    return TensorEntry("x", shape, dtype, "parameter", fragments or (Fragment(store, offset, 0, int(np.prod(shape))),))


def casts() -> None:
    """Every pair of dtypes, of any length, with and without vectors."""
    for source, target, numel in itertools.product(ALL, TARGETS, (1, 7, 8, 15, 33, 1000, 4099)):
        if source.kind != "float" or source == target:
            continue
        data = RNG.bytes(numel * source.itemsize)
        for vector, clamp in ((True, False), (False, False), (True, True)):
            core.use_vector_paths(vector)
            assert core.cast(source.number, target.number, data, clamp) == cast(data, source, target, "little", clamp)
    core.use_vector_paths(True)
    for numel in range(200):
        data = RNG.bytes(numel)
        assert core.crc32_combine(
            core.crc32(data[: numel // 2]), core.crc32(data[numel // 2 :]), numel - numel // 2
        ) == core.crc32(data)


def plans(root: Path) -> list[Plan]:
    """Moves of every geometry: whole, cut, pitched, transposed, broadcast, foreign, across windows, cast or not."""
    rows, columns = 120, 103
    numel = rows * columns
    made = []
    for source, target in ((F32, F32), (F32, BF16), (F64, F16), (BF16, F32), (F64, F64)):
        size, out = source.itemsize, target.itemsize
        path = root / f"{source}-{target}"
        path.write_bytes(
            b"pad" + RNG.standard_normal(numel).astype("<f8" if source == F64 else "<f4").tobytes()[: numel * size]
        )
        for byteorder in ("little", "big"):
            store = locate(path).store(byteorder)
            to = FileStore("out", 7 * numel * out + 99)
            cut = [Fragment(store, 3 + size * n, n, min(5001, numel - n)) for n in range(0, numel, 5001)]
            pitched = [Fragment(store, 3 + size * k, k, 1, (numel + 2 - k) // 3, 3, 3) for k in range(3)]
            turned = [Fragment(store, 3 + r * size, r * columns, 1, columns, 1, rows) for r in range(rows)]
            box = [Fragment(store, 3, 0, columns, rows, columns, 1, rows)]
            halves = [
                Fragment(store, 3 + k * size, k * columns, columns, rows // 2, 2 * columns, 2, rows) for k in (0, 1)
            ]
            same = [Fragment(store, 3 + 5 * size, 0, 1, numel, 1, 0)]
            shape = (rows, columns)
            sources = [
                entry(store, source, shape, 3),
                *(entry(store, source, shape, 0, *f) for f in (cut, pitched, turned, box, halves, same)),
            ]
            pairs = [(one, entry(to, target, shape, 50 + n * numel * out)) for n, one in enumerate(sources)]
            checks = (Checksum(50, numel * out, (1, 9)),)
            literals = ((0, b"x" * 50), (50 + 7 * numel * out, b"y" * 49))
            made.append(Plan(((OutputFile("out", to.size, literals, checks), to),), pairs))
    return made


def moves(root: Path) -> None:
    """All plans, on many threads and with small windows, against the reference engine."""
    for number, plan in enumerate(plans(root)):
        wanted = root / f"wanted{number}"
        wanted.mkdir()
        run(plan, str(wanted), engine="reference")
        for threads, window in ((1, 1 << 20), (4, 4096), (7, 65536)):
            found = root / f"found{number}-{threads}"
            found.mkdir()
            run(plan, str(found), engine="native", threads=threads, window=window, progress=lambda _: None)
            assert (found / "out").read_bytes() == (wanted / "out").read_bytes()
            shutil.rmtree(found)
        shutil.rmtree(wanted)


def memory() -> None:
    """From memory to memory, in rows that lie apart."""
    a, b = RNG.standard_normal(60_000).astype("<f4"), np.zeros(120_000, "<f4")
    source = MemoryStore(a.ctypes.data, a.nbytes, a)
    target = MemoryStore(b.ctypes.data, b.nbytes, b)
    apart = Fragment(target, 0, 0, 100, 600, 100, 200)
    run(
        Plan((), [(entry(source, F32, (60_000,)), entry(target, F32, (60_000,), 0, apart))]),
        "",
        engine="native",
        threads=4,
        window=4096,
    )
    assert (b.reshape(600, 200)[:, :100] == a.reshape(600, 100)).all()


def folds(root: Path) -> None:
    """Tensors that are taken up one after another, in pieces, of every dtype, into files and memory."""
    numel, inputs = 150_001, []
    for number, (dtype, byteorder) in enumerate(((F32, "little"), (BF16, "little"), (F16, "big"), (F8_E4M3, "little"))):
        size, fragments = dtype.itemsize, []
        for low, high in itertools.pairwise((0, 1, 70_000, numel)):
            path = root / f"fold{number}-{low}"
            path.write_bytes(b"odd" + RNG.bytes((high - low) * size))
            fragments.append(Fragment(locate(path).store(byteorder), 3, low, high - low))  # type: ignore[arg-type]
        inputs.append(entry(None, dtype, (numel,), 0, *fragments))
    weights = (0.5, 2.0, -1.0)
    for n, recipe in enumerate(
        (
            mean_of(tuple(inputs)),
            moving_average_of(tuple(inputs), 0.9),
            weighted_sum_of(tuple(inputs), weights, moves_base=True),
        )
    ):
        total = derive_entry("x", (numel,), F32, recipe)
        for dtype, at in ((F32, 5), (BF16, 8)):
            store = FileStore("out", at + numel * dtype.itemsize)
            plan = Plan(
                ((OutputFile("out", store.size, ((0, b"x" * at),)), store),),
                [(total, entry(store, dtype, (numel,), at))],
            )
            found = []
            for engine, threads, window in (("reference", 1, None), ("native", 4, 4096), ("native", 2, 1 << 20)):
                out = root / f"folded{n}{dtype}{engine}{threads}"
                out.mkdir()
                run(plan, str(out), engine=engine, threads=threads, window=window)  # type: ignore[arg-type]
                found.append(np.frombuffer((out / "out").read_bytes()[at:], "<f4" if dtype == F32 else "<u2"))
                shutil.rmtree(out)
            for one in found[1:]:
                assert dtype == BF16 or ((one == found[0]) | (np.isnan(one) & np.isnan(found[0]))).all()
                assert dtype == F32 or (one == found[0]).all()
        array = np.zeros(numel, "<f4")
        run(
            Plan((), [(total, entry(MemoryStore(array.ctypes.data, array.nbytes, array), F32, (numel,)))]),
            "",
            threads=3,
        )


def products(root: Path) -> None:
    """LoRAs added while weights are read: ranks and rows that no tile divides, every set of instructions, threads that share."""

    def matrix(dtype: DType, rows: int, columns: int) -> TensorEntry:
        path, data = root / f"m{RNG.integers(1 << 60)}", RNG.standard_normal(rows * columns).astype("<f4").tobytes()
        path.write_bytes(data if dtype == F32 else core.cast(F32.number, dtype.number, data, False)[0])
        return entry(locate(path).store(), dtype, (rows, columns))

    for rows, columns, ranks in ((60, 1100, (7, 1)), (301, 1000, (65,)), (5, 17, (3, 2, 16))):
        base = matrix(BF16, rows, columns)
        updates = tuple(Update(matrix(F32, r, columns), matrix(F16, rows, r), r, 0.3) for r in ranks)
        total = derive_entry("x", (rows, columns), F32, MergedMatrix(base, updates, columns))
        store = FileStore("out", rows * columns * 4)
        plan = Plan(((OutputFile("out", store.size), store),), [(total, entry(store, F32, (rows, columns)))])
        found = []
        for paths, threads in (((True, True), 1), ((True, True), 5), ((True, False), 3), ((False, False), 2)):
            core.use_vector_paths(*paths)
            out = root / "product"
            out.mkdir()
            run(plan, str(out), engine="native", threads=threads, window=4096)
            found.append((out / "out").read_bytes())
            shutil.rmtree(out)
        core.use_vector_paths(True)
        assert len({*found}) == 1


def rows_of_pickles() -> None:
    """Metadata in columns: as they are, cut off, and with bytes that are others."""
    for name in ("mcore/buckets_tp2_pp2_dp2/checkpoint/iter_0000002", "torchtitan/llama3_0_3_0_w3/checkpoint/step-2"):
        data = (Path(__file__).parents[1] / "fixtures" / name / ".metadata").read_bytes()
        load_pickle(data, file="f", finishers=FINISHERS, rows=row_kinds())
        for _ in range(150):
            at = int(RNG.integers(len(data)))
            for bad in (data[:at], data[:at] + RNG.bytes(1) + data[at + 1 :]):
                with contextlib.suppress(ZckptError):
                    load_pickle(bad, file="f", finishers=FINISHERS, rows=row_kinds())


def many_files(root: Path) -> tuple[Plan, bytes]:
    """Twelve outputs of one source, in interleaved rows."""
    data = RNG.standard_normal(120_000).astype("<f4")
    (root / "many").write_bytes(data.tobytes())
    store, files, pairs = locate(root / "many").store(), [], []
    for n in range(12):
        to = FileStore(f"f{n}", 40_000)
        files.append((OutputFile(to.path, to.size), to))
        odd = tuple(Fragment(store, 40_000 * n + 4 * k, k, 1, 5000, 2, 2) for k in (0, 1))
        pairs.append((entry(store, F32, (10_000,), 0, *odd), entry(to, F32, (10_000,))))
    return Plan(tuple(files), pairs), data.tobytes()


def sinks(root: Path) -> None:
    """Sinks on many files at once; some keep what they are handed, some raise, some runs are stopped."""
    plan, data = many_files(root)
    taken: dict[str, bytearray] = {output.path: bytearray() for output, _ in plan.files}
    hand = {name: got.extend for name, got in taken.items()}
    run(plan, "", consumers=hand, mode=Mode.STREAMED, engine="native", threads=6, window=4096)
    assert b"".join(taken[f"f{n}"] for n in range(12)) == data
    kept: list[Any] = []
    for name in ("f0", "f7"):
        with contextlib.suppress(ZckptError):
            run(
                plan,
                "",
                consumers={**hand, name: lambda view: kept.append(np.frombuffer(view[:64], "u1"))},
                mode=Mode.STREAMED,
                threads=6,
                window=4096,
            )
            raise AssertionError("a view was kept")
    assert all(one.sum() > 0 for one in kept)

    def refuse(view: memoryview) -> None:
        raise LookupError(threading.current_thread().name)

    with contextlib.suppress(LookupError):
        run(plan, "", consumers=dict.fromkeys(hand, refuse), mode=Mode.STREAMED, threads=6, window=4096)

    def stop(written: int) -> None:
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        run(plan, "", consumers=hand, mode=Mode.STREAMED, threads=6, window=4096, progress=stop)


def faults(root: Path) -> None:
    """The n-th read or write is short, interrupted, refused as direct, or fails."""
    plan, data = many_files(root)
    for write, kind in itertools.product((False, True), (-2, errno.EINTR, errno.EIO, errno.ENOSPC, errno.EINVAL)):
        for nth in (1, 3, 9):
            out = root / "out"
            out.mkdir()
            core.inject(write, nth, kind)
            with contextlib.suppress(ZckptError):
                run(plan, str(out), engine="native", threads=4, window=4096)
                assert b"".join((out / f"f{n}").read_bytes() for n in range(12)) == data
            shutil.rmtree(out)
    core.inject(False, 0, 0)
    core.inject(True, 0, 0)


def scans(root: Path) -> None:
    """What there is to count, of one tensor and of two, on many threads."""
    data = RNG.standard_normal(70_000).astype("<f4")
    (root / "a").write_bytes(b"pad" + data.tobytes())
    (root / "b").write_bytes(b"pad" + cast(data.tobytes(), F32, BF16, "little", False)[0])
    a, b = locate(root / "a").store(), locate(root / "b").store()
    odd = tuple(Fragment(a, 3 + 4 * k, k, 1, 35_000, 2, 2) for k in (0, 1))
    wide, narrow = entry(a, F32, (70_000,), 0, *odd), entry(b, BF16, (70_000,), 3)
    for relation in (Relation(rounded=True), Relation(atol=1e-3, rtol=1e-2), Relation()):
        one = scan(comparisons(wide, narrow, 0), relation=relation, spreads=True, engine="native", threads=6)
        two = scan(comparisons(wide, narrow, 0), relation=relation, spreads=True, engine="reference")
        assert one.spreads == two.spreads
        assert (
            one.statistics[0].differ == two.statistics[0].differ
            and one.statistics[0].nonzero == two.statistics[0].nonzero
        )
    whole = scan((request_of(one, wide.dtype, 0) for one in wide.fragments), engine="native", threads=6)
    assert whole.statistics[0].count == 70_000


def early(root: Path) -> None:
    """What is read early, to its end or until it is stopped; a file that ends before it should."""
    data = RNG.standard_normal(300_000).astype("<f4")
    data[200_000] = np.inf
    (root / "early").write_bytes(data.tobytes())
    for wait_s, size in itertools.product((0, 0.0005, 0.05), (data.nbytes, 2 * data.nbytes)):
        fd = os.open(root / "early", os.O_RDONLY)
        reader = core.EarlyReader(struct.pack("=qQqQ", fd, data.nbytes, fd, size), 1 << 18)
        time.sleep(wait_s)
        packed, finite = reader.stop()
        os.close(fd)
        for number, crc in enumerate(np.frombuffer(packed, np.uint32)):
            window = data[number % 5 * 65_536 : (number % 5 + 1) * 65_536]
            assert (crc, finite[number]) == (zlib.crc32(window.tobytes()), np.isfinite(window).all())


def confirmations(root: Path) -> None:
    """Tensors of every geometry against what was written of them, with copies, and with bits that are wrong; disks that fail."""
    for number, plan in enumerate(plans(root)):
        out = root / f"written{number}"
        out.mkdir()
        run(plan, str(out), engine="native", threads=4, window=4096)
        path = out / plan.files[0][0].path
        for damage in (False, True):
            if damage:
                data = bytearray(path.read_bytes())
                data[60] ^= 1
                path.write_bytes(data)
            store = locate(path).store()
            pairs = []
            for source, target in plan.pairs:
                assert isinstance(source, TensorEntry) and isinstance(target, TensorEntry)
                moved = tuple(replace(f, store=store) for f in target.fragments)
                pairs.append((source, replace(target, fragments=moved)))
            sums = [CrcRange(store, 0, store.size)]
            copies = {n: [Replica(a.dtype, pairs[0][0].fragments)] for n, (a, _) in enumerate(pairs) if n < 2}
            bad = derived_again(pairs, copies, sums, threads=4)[0]
            assert bool(bad) == damage, (number, bad)
            for nth, kind in itertools.product((1, 2, 5), (-2, errno.EINTR, errno.EIO)):
                core.inject(False, nth, kind)
                with contextlib.suppress(ZckptError):
                    assert derived_again(pairs, threads=4, keep_cache=True)[0] == bad
            core.inject(False, 0, 0)
    for source, target, numel in itertools.product(ALL, TARGETS, (1, 7, 33, 1025)):
        if source.kind == "float" and source != target:
            data = RNG.bytes(numel * source.itemsize)
            made = cast(data, source, target, "little", False)[0]
            assert core.judge(0, source.number, target.number, data, made) == (0, 0)
            assert core.judge(2, source.number, target.number, data, RNG.bytes(len(made)))[0] <= numel


def kernels() -> None:
    """Loops of recipes: odd lengths, nothing at all, and numbers of every kind."""
    for count in (0, 1, 7, 100_003):
        x = RNG.integers(0, 2**32, count, np.uint32).view(np.float32)
        total, expected = np.ones(count, np.float32), np.ones(count, np.float32)
        NativeKernels().accumulate(total, x, 0.3)
        ReferenceKernels().accumulate(expected, x, 0.3)
        NativeKernels().approach(total, x, 3.0)
        ReferenceKernels().approach(expected, x, 3.0)
        NativeKernels().blend(total, x, 0.9, 0.2)
        ReferenceKernels().blend(expected, x, 0.9, 0.2)
        assert np.array_equal(total, expected, equal_nan=True), "accumulate, approach, blend"
        y = RNG.normal(size=count).astype(np.float32)
        assert NativeKernels().products(y, y[::-1].copy()) == ReferenceKernels().products(y, y[::-1].copy()), "products"
        blocks = MatrixBlocks(1, count, 1, 64)
        found, other = np.empty(count // 64 + 1, np.float32), np.empty(count // 64 + 1, np.float32)
        NativeKernels().largest(y, blocks, found)
        ReferenceKernels().largest(y, blocks, other)
        bits, others = np.empty(count, np.uint8), np.empty(count, np.uint8)
        other[other == 0] = 1
        found[found == 0] = 1
        table = RNG.normal(size=256).astype(np.float32)
        for grid, vectors in itertools.product(NumberGrid, (False, True)):
            core.use_vector_paths(vectors)
            one = NativeKernels().to_codes(grid, x, blocks, found, bits)
            two = ReferenceKernels().to_codes(grid, x, blocks, other, others)
            assert np.array_equal(bits, others) and repr(one) == repr(two), "to_codes"
            few, own, its = table * (np.arange(256) < 16), np.empty(count, np.float32), np.empty(count, np.float32)
            for known, zeros in itertools.product((table, few), (None, found)):
                codes = bits if known is table else bits & 15
                NativeKernels().of_codes(codes, known, blocks, zeros, found, own)
                ReferenceKernels().of_codes(codes, known, blocks, zeros, found, its)
                assert np.array_equal(own, its, equal_nan=True), "of_codes"
        for bits_of, vectors in itertools.product((2, 3, 4, 5, 6, 8), (False, True)):
            core.use_vector_paths(vectors)
            groups = count // 32
            for numbers in (x, y):
                packed = [np.empty(groups * 4 * bits_of, np.uint8) for _ in range(2)]
                both = [np.empty((2, groups), np.float32) for _ in range(2)]
                each = zip((NativeKernels(), ReferenceKernels()), packed, both, strict=True)
                bad = [
                    one.to_affine(numbers[: groups * 32], 32, bits_of, codes, *beside) for one, codes, beside in each
                ]
                assert bad[0] == bad[1], "to_affine"
            assert np.array_equal(*packed) and np.array_equal(*both), "to_affine"
        NativeKernels().multiply_blocks(y, blocks, found)
    for width in range(1, 9):
        raw, one, two = RNG.bytes(7 * 41), np.empty((7, 41), np.uint8), np.empty((7, 41), np.uint8)
        for kernels, codes in ((NativeKernels(), one), (ReferenceKernels(), two)):
            kernels.split_codes(np.frombuffer(raw, np.uint8), width, codes, high_first=width == 4)
        assert np.array_equal(one, two), "split_codes"
        NativeKernels().join_codes(one, 0, np.empty((7, 21), np.uint8))
        words = np.frombuffer(RNG.bytes(4 * 3 * 9), "<u4").reshape(3, 9)
        NativeKernels().split_down(words, 4, tuple(range(0, 32, 4)), 1, np.empty((23, 9), np.uint8))
    for kind, (nbytes, numbers, _) in TYPES.items():
        blocks, own, its = np.frombuffer(RNG.bytes(nbytes * 3), np.uint8), *np.empty((2, numbers * 3), np.float32)
        NativeKernels().of_ggml(kind, blocks, own)
        ReferenceKernels().of_ggml(kind, blocks, its)
        assert np.array_equal(own, its, equal_nan=True), kind
    for kind in KINDS:
        nbytes, numbers, _ = TYPES[kind]
        for columns, weights in ((numbers * 5, None), (numbers * 3, RNG.random(numbers * 3, np.float32))):
            x = (RNG.standard_normal((4, columns)) * 0.1).astype(np.float32)
            blocks, others = np.empty((2, 4 * columns // numbers * nbytes), np.uint8)
            NativeKernels().to_ggml(kind, x.reshape(-1), columns, weights, blocks)
            ReferenceKernels().to_ggml(kind, x.reshape(-1), columns, weights, others)
            assert np.array_equal(blocks, others), f"to {kind}"
    for count in (0, 1, 300):
        x = RNG.integers(0, 2**32, count * 32, np.uint32).view(np.float32)
        blocks, others = np.zeros(count * 34, np.uint8), np.zeros(count * 34, np.uint8)
        NativeKernels().to_q8_0(x, blocks)
        ReferenceKernels().to_q8_0(x, others)
        assert np.array_equal(blocks, others), "to_q8_0"
        y, z = np.zeros(count * 32, np.float32), np.zeros(count * 32, np.float32)
        NativeKernels().of_q8_0(blocks, y)
        ReferenceKernels().of_q8_0(blocks, z)
        assert np.array_equal(y, z, equal_nan=True), "of_q8_0"


def differences() -> None:
    """Zstd blocks of differences of any length and density, read by zstandard."""
    import zstandard

    for nbytes, density in itertools.product((1, 63, 64, 65, 4097, 131_071, 131_073, 300_000), (0, 0.001, 0.1, 0.5, 1)):
        for values in (2, 130, 256):
            old = RNG.integers(0, 256, nbytes).astype(np.uint8)
            found = np.where(RNG.random(nbytes) < density, RNG.integers(0, values, nbytes), 0).astype(np.uint8)
            new = old ^ found
            made = set()
            for paths in ((False, False), (True, False), (True, True)):
                core.use_vector_paths(*paths)
                made.add(core.difference(old.ctypes.data, new.ctypes.data, nbytes, 1, True))
            ((blocks, changed),) = made
            frame = b"\x28\xb5\x2f\xfd\xc0\x38" + nbytes.to_bytes(8, "little") + blocks
            assert changed == np.count_nonzero(found)
            assert zstandard.ZstdDecompressor().decompress(frame) == found.tobytes(), (nbytes, density, values)
            for vectors in (False, True):
                core.use_vector_paths(vectors)
                again = old.copy()
                assert core.renew(blocks, again.ctypes.data, nbytes) == (len(blocks), nbytes, True), (
                    nbytes,
                    density,
                    values,
                )
                assert np.array_equal(again, new)
                for _ in range(20):
                    damaged = bytearray(blocks)
                    damaged[RNG.integers(0, len(damaged))] = RNG.integers(0, 256)
                    core.renew(bytes(damaged[: RNG.integers(1, len(damaged) + 1)]), again.ctypes.data, nbytes)


def main() -> None:
    batches.LEAST_BYTES = 0
    root = Path(tempfile.mkdtemp(prefix="zckpt-sanitized-"))
    try:
        for work in (
            lambda _: casts(),
            lambda _: kernels(),
            moves,
            folds,
            products,
            lambda _: rows_of_pickles(),
            lambda _: memory(),
            lambda _: differences(),
            sinks,
            faults,
            scans,
            early,
            confirmations,
        ):
            work(root)
    finally:
        shutil.rmtree(root)
    print(f"{os.path.basename(os.path.dirname(sys.argv[1]))}: nothing found")


main()

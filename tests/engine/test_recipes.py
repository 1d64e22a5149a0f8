"""Elements that are computed on their way: both engines give the same bits, for any cut into parts, and nothing else changes."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from zckpt._core import use_vector_paths
from zckpt.base.errors import CorruptError, InconsistentError
from zckpt.containers.gguf_file import PACKED, GgmlType
from zckpt.core import plan as plans
from zckpt.core.catalog import TensorEntry
from zckpt.core.claims import ByteSpan
from zckpt.core.dtypes import BF16, F8_E4M3, F8_E5M2, F16, F32, F64
from zckpt.core.folds import DRAWS, Sparsity, Thinned, Tools
from zckpt.core.fragments import Fragment
from zckpt.core.plan import OutputFile, Plan
from zckpt.core.recipes import DerivedStore, derive_entry, mean_of, moving_average_of, point_between, weighted_sum_of
from zckpt.core.stores import FileStore, MemoryStore
from zckpt.engine.bringing import Bringer
from zckpt.engine.choice import threads_for
from zckpt.engine.elements import ElementReader, elements
from zckpt.engine.kernels import NativeKernels, ReferenceKernels
from zckpt.engine.move import run
from zckpt.engine.prefetch import Fetched
from zckpt.engine.scan import scan
from zckpt.engine.scan_requests import comparisons
from zckpt.naming import merged_matrix
from zckpt.naming.merged_matrix import MergedMatrix, Update
from zckpt.storage.location import locate

SHAPE = (300, 1000)
SMALL = (60, 1100)
SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 3.4e38, 1.0, 65504.0], np.float32)


def numbers(seed: int, count: int) -> Any:
    """Random bits of fp32, of all magnitudes, with the special ones among them."""
    found = np.random.default_rng(seed).integers(0, 2**32, count, np.uint32).view(np.float32)
    found[: len(SPECIAL)] = SPECIAL
    return found


def same(a: Any, b: Any) -> bool:
    """Whether these are the same bits, or both are NaN."""
    return bool(((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))).all())


@pytest.mark.parametrize("weight", [0.3, 1.0, -1e-30, 0.0])
def test_accumulating_is_the_same_in_both(weight: float) -> None:
    total, x = numbers(0, 100_003), numbers(1, 100_003)[::-1].copy()
    other = total.copy()
    NativeKernels().accumulate(total, x, weight)
    ReferenceKernels().accumulate(other, x, weight)
    assert same(total, other)
    with np.errstate(all="ignore"):
        assert same(other, numbers(0, 100_003) + np.float32(weight) * x)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 100_003])
def test_products_and_steps_are_the_same_in_both(count: int) -> None:
    a, b = (np.random.default_rng(seed).normal(size=count).astype(np.float32) for seed in (0, 1))
    assert NativeKernels().products(a, b) == ReferenceKernels().products(a, b)
    assert NativeKernels().products(a, b)[0] == pytest.approx(float(a.astype(float) @ b.astype(float)))
    x = numbers(3, count) if count > len(SPECIAL) else a.copy()
    y = x.copy()
    for kernels, total in ((NativeKernels(), x), (ReferenceKernels(), y)):
        kernels.approach(total, b, 3.0)
        kernels.blend(total, a, 0.9, 1 - 0.9)
    assert same(x, y)


@pytest.mark.parametrize("paths", [(True, True), (True, False), (False, False)])
def test_a_thin_product_is_the_same_in_both(paths: tuple[bool, bool]) -> None:
    """Of usual numbers, of random bits, and of numbers that cancel; every number of rows and columns that tiles leave over."""
    use_vector_paths(*paths)
    try:
        for rows, columns, rank in ((1, 1, 1), (3, 17, 2), (9, 65, 7), (66, 130, 33)):
            for kind in range(3):
                parts = [
                    thin(kind, seed, count) for seed, count in enumerate((rows * columns, rows * rank, rank * columns))
                ]
                total, left, right = parts
                other = total.copy()
                NativeKernels().add_low_rank(total, left, right, rank, 0.3)
                ReferenceKernels().add_low_rank(other, left, right, rank, 0.3)
                assert same(total, other)
    finally:
        use_vector_paths(True)


@pytest.mark.parametrize("vector", [True, False])
@pytest.mark.parametrize("kind", range(3))
def test_thinned_differences_are_the_same_in_both(vector: bool, kind: int) -> None:
    """Large ones, those drawn, all and none; with an election of signs or without, of weights that add up to nothing too."""
    use_vector_paths(vector)
    try:
        base, *others = (thin(kind, seed, 3001) for seed in range(4))
        with np.errstate(all="ignore"):
            bits = (others[0] - base).view(np.uint32) & 0x7FFFFFFF
        least = int(np.median(bits))
        low, high, found, other = least - (1 << 22), least + (1 << 22), *np.empty((2, 3001), np.uint32)
        above, near = NativeKernels().select_near(others[0], base, low, high, found)
        assert (above, near) == ReferenceKernels().select_near(others[0], base, low, high, other)
        assert near and np.array_equal(found[:near], other[:near])
        kept = (
            Thinned(int(bits[1500]), 5000, weight=0.7),
            Thinned(key=9, draws=DRAWS // 3, scale=2.9, weight=-0.7),
            Thinned(0x7FFFFFFF),
        )
        for elects, normalises, those in ((True, True, kept), (False, True, kept[:2]), (True, False, (Thinned(),) * 3)):
            for one in those:
                lengths = [
                    kernels.lengths(others[0], base, one, 3500) for kernels in (NativeKernels(), ReferenceKernels())
                ]
                assert np.array_equal(*lengths, equal_nan=True)
            how = Sparsity((), (), elects=elects, normalises=normalises, factor=0.3)
            x, y = base.copy(), base.copy()
            for kernels, total in ((NativeKernels(), x), (ReferenceKernels(), y)):
                kernels.move_sparsely(total, others[: len(those)], those, 3500, how)
            assert same(x, y)
    finally:
        use_vector_paths(True)


def thin(kind: int, seed: int, count: int) -> Any:
    """Numbers for a product: about 1, any bits, or of many magnitudes."""
    random = np.random.default_rng(seed)
    if kind == 1:
        return numbers(seed, max(count, len(SPECIAL)))[:count]
    return (random.normal(size=count) * 10.0 ** (random.integers(-12, 12, count) * (kind // 2))).astype(np.float32)


def test_a_thin_product_is_rounded_as_processors_fuse() -> None:
    """Against exact arithmetic: each sum of a product is rounded once."""
    random = np.random.default_rng(3)
    left, right = (random.normal(size=12).astype(np.float32) for _ in range(2))
    total = np.zeros(9, np.float32)
    ReferenceKernels().add_low_rank(total, left, right, 4, 1.0)
    for row, column in np.ndindex(3, 3):
        wanted = np.float32(0)
        for k in range(4):
            exact = Fraction(float(left[row * 4 + k])) * Fraction(float(right[k * 3 + column])) + Fraction(
                float(wanted)
            )
            near = [np.nextafter(np.float32(float(exact)), np.float32(way)) for way in (-np.inf, np.inf)]
            near.append(np.float32(float(exact)))
            wanted = min(near, key=lambda number: abs(Fraction(float(number)) - exact))
        assert total[row * 3 + column] == wanted
    with pytest.raises(ValueError, match="rank 5"):
        NativeKernels().add_low_rank(total, left, right, 5, 1.0)


@pytest.fixture(params=[True, False])
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whether the C++ loops use what not every processor has."""
    use_vector_paths(request.param)
    yield
    use_vector_paths(True)


@pytest.mark.usefixtures("instructions")
def test_blocks_are_those_of_gguf() -> None:
    """Both engines give the bits of the gguf package, halves away from zero too, and equal ones for what it leaves open."""
    from gguf.quants import Q8_0

    random = np.random.default_rng(3)
    x = (random.normal(size=(1000, 32)) * np.exp(random.normal(size=(1000, 1)) * 8)).astype(np.float32)
    x[0], x[1, 5] = 0, -0.0
    x[2:300] = random.integers(-254, 255, (298, 32)) / 2
    x[2:300, 0] = 127
    with np.errstate(all="ignore"):
        wanted = Q8_0.quantize_blocks(x)
        floats = Q8_0.dequantize_blocks(wanted)
    wild = numbers(4, 32_000)
    of_wild = []
    for kernels in (NativeKernels(), ReferenceKernels()):
        blocks, back = np.empty(34_000, np.uint8), np.empty(32_000, np.float32)
        kernels.to_q8_0(x.reshape(-1), blocks)
        assert (blocks.reshape(-1, 34) == wanted).all()
        kernels.of_q8_0(blocks, back)
        assert same(back, floats.reshape(-1))
        kernels.to_q8_0(wild, blocks)
        kernels.of_q8_0(blocks, back)
        of_wild.append((blocks.tobytes(), back))
        of_bf16 = np.empty(34_000, np.uint8)
        bf16 = (wild.view(np.uint32) >> 16).astype(np.uint16)
        kernels.to_q8_0(bf16, of_bf16)
        kernels.to_q8_0((bf16.astype(np.uint32) << 16).view(np.float32), blocks)
        assert (of_bf16 == blocks).all()
    assert of_wild[0][0] == of_wild[1][0] and same(of_wild[0][1], of_wild[1][1])


@pytest.mark.parametrize("kind", PACKED)
def test_numbers_of_packed_blocks_are_those_of_gguf(kind: GgmlType) -> None:
    """Any bytes are blocks."""
    import gguf

    blocks = np.random.default_rng(5).integers(0, 256, (600, kind.nbytes)).astype(np.uint8)
    with np.errstate(all="ignore"):
        wanted = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind.name]).astype(np.float32).reshape(-1)
    for kernels in (NativeKernels(), ReferenceKernels()):
        found = np.empty(600 * kind.block, np.float32)
        kernels.of_ggml(kind.name, blocks.reshape(-1), found)
        assert same(found, wanted)
        with pytest.raises(ValueError, match="bytes of"):
            kernels.of_ggml(kind.name, blocks.reshape(-1)[1:], found)


def stored(path: Path, seed: int, dtype: Any = np.float32) -> tuple[TensorEntry, Any]:
    """A matrix in a file, in two pieces that lie the other way round, and its numbers."""
    of = {np.float32: F32, np.float16: F16, np.float64: F64}[dtype]
    array = np.random.default_rng(seed).normal(size=SHAPE).astype(dtype)
    head, tail = array[:120].tobytes(), array[120:].tobytes()
    path.write_bytes(tail + head)
    state = path.stat()
    store = FileStore(str(path), state.st_size, (state.st_dev, state.st_ino, state.st_mtime_ns))
    rows = (Fragment(store, len(tail), 0, 120_000), Fragment(store, 0, 120_000, 180_000))
    return TensorEntry(path.name, SHAPE, of, "parameter", rows), array


def written(
    tmp_path: Path,
    source: TensorEntry,
    engine: Literal["native", "reference"],
    dtype: Any = F32,
    at: int = 8,
    **how: Any,
) -> bytes:
    """What a plan writes of a tensor."""
    root = tmp_path / f"{engine}{len(list(tmp_path.iterdir()))}"
    root.mkdir()
    store = FileStore("out", source.numel * dtype.itemsize + at)
    entry = TensorEntry(source.name, source.shape, dtype, "parameter", (Fragment(store, at, 0, source.numel),))
    run(
        Plan(((OutputFile("out", store.size, ((0, b"beginning"[:at]),)), store),), [(source, entry)]),
        str(root),
        engine=engine,
        **how,
    )
    return (root / "out").read_bytes()[at:]


def test_a_sum_is_the_same_for_any_engine_threads_and_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [stored(tmp_path / "a", 0), stored(tmp_path / "b", 1, np.float16), stored(tmp_path / "c", 2, np.float64)]
    weights = (0.5, 0.3, 0.2)
    expected = np.zeros(SHAPE, np.float32)
    for (_, array), weight in zip(found, weights, strict=True):
        expected += np.float32(weight) * array.astype(np.float32)
    total = derive_entry("x", SHAPE, F32, weighted_sum_of(tuple(entry for entry, _ in found), weights))
    assert written(tmp_path, total, "native") == expected.tobytes()
    assert written(tmp_path, total, "reference") == expected.tobytes()
    assert ElementReader().read(elements(total, 119_990, 120_010)) == expected.reshape(-1)[119_990:120_010].tobytes()
    for slab in (4, 1000, 70_000):
        monkeypatch.setattr(plans, "COMPUTED_BYTES", slab * 4)
        if slab > 4:
            assert written(tmp_path, total, "native", threads=3) == expected.tobytes()
    half = written(tmp_path, total, "native", F16)
    assert half == expected.astype(np.float16).tobytes()
    again = derive_entry("x", SHAPE, F32, weighted_sum_of((total, total), (1.0, 1.0)))  # a recipe of recipes
    assert written(tmp_path, again, "native") == (expected + expected).tobytes()


def test_sums_are_compared_without_being_written(tmp_path: Path) -> None:
    a, numbers_a = stored(tmp_path / "a", 0)
    b, numbers_b = stored(tmp_path / "b", 1)
    total = derive_entry("x", SHAPE, F32, weighted_sum_of((a, b), (1.0, 1.0)))
    (tmp_path / "sum").write_bytes((numbers_a + numbers_b).tobytes())
    state = (tmp_path / "sum").stat()
    store = FileStore(str(tmp_path / "sum"), state.st_size, (state.st_dev, state.st_ino, state.st_mtime_ns))
    plain = TensorEntry("x", SHAPE, F32, "parameter", (Fragment(store, 0, 0, 300_000),))
    for engine in ("native", "reference"):
        assert scan(comparisons(total, plain, 0), engine=engine).of(0).differ == 0  # type: ignore[arg-type]
        assert scan(comparisons(a, plain, 0), engine=engine).of(0).differ  # type: ignore[arg-type]


@dataclass(frozen=True)
class Rows:
    """A recipe that computes whole rows only, and says which."""

    inputs: tuple[TensorEntry, ...]
    asked: list[tuple[int, int]]
    unit: int = 1000
    facts: tuple[object, ...] = ()

    def compute(self, start: int, stop: int, tools: Any) -> Any:
        """Twice the input."""
        self.asked.append((start, stop))
        return tools.read_floats(self.inputs[0], start, stop) * np.float32(2)


def test_a_recipe_is_asked_for_whole_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, array = stored(tmp_path / "a", 0)
    recipe = Rows((a,), [])
    monkeypatch.setattr(plans, "COMPUTED_BYTES", 17_500 * 4)
    assert written(tmp_path, derive_entry("x", SHAPE, F32, recipe), "native") == (array * 2).tobytes()
    assert all(start % 1000 == 0 and stop % 1000 == 0 for start, stop in recipe.asked)
    assert sum(stop - start for start, stop in recipe.asked) == 300_000, "each element is computed once"


def test_bf16_comes_as_its_bits(tmp_path: Path) -> None:
    (tmp_path / "h").write_bytes(np.arange(16_000, 16_010, dtype=np.uint16).tobytes())
    state = (tmp_path / "h").stat()
    store = FileStore(str(tmp_path / "h"), 20, (state.st_dev, state.st_ino, state.st_mtime_ns))
    entry = TensorEntry("h", (10,), BF16, "parameter", (Fragment(store, 0, 0, 10),))
    total = derive_entry("x", (10,), F32, weighted_sum_of((entry,), (1.0,)))
    bits = np.arange(16_000, 16_010, dtype=np.uint32) << 16
    assert written(tmp_path, total, "native") == bits.view(np.float32).tobytes()


def scattered(tmp_path: Path, seed: int, dtype: Any, byteorder: Literal["little", "big"] = "little") -> TensorEntry:
    """A matrix of any bits in three files, of which each begins at an odd byte; fp8 where `dtype` has one byte."""
    size, numel = dtype.itemsize, SMALL[0] * SMALL[1]
    bits = np.random.default_rng(seed).integers(0, 256, numel * size, np.uint8)
    fragments, bounds = [], (0, 7, 40_001, numel)
    for number, (low, high) in enumerate(itertools.pairwise(bounds)):
        path = tmp_path / f"{seed}-{number}"
        path.write_bytes(b"odd" + bits[low * size : high * size].tobytes() + b"more")
        fragments.append(Fragment(locate(path).store(byteorder), 3, low, high - low))
    return TensorEntry("x", SMALL, dtype, "parameter", tuple(fragments))


def folds(tmp_path: Path) -> list[Any]:
    """Recipes of every kind, over tensors of every dtype and byte order that fp32 holds."""
    dtypes = ((F32, "little"), (BF16, "little"), (F16, "big"), (F32, "big"), (F8_E4M3, "little"), (F8_E5M2, "little"))
    inputs = tuple(scattered(tmp_path, seed, *how) for seed, how in enumerate(dtypes))  # type: ignore[arg-type]
    weights = (0.5, -0.25, 1e300, 0.0, 3.0, 1e-3)
    return [
        mean_of(inputs),
        moving_average_of(inputs, 0.9),
        weighted_sum_of(inputs, weights),
        weighted_sum_of(inputs, weights[1:], moves_base=True),
    ]


def test_engines_take_up_one_tensor_after_another_alike(tmp_path: Path) -> None:
    """The native engine while it reads, in windows of any size, at odd bytes, into memory; the reference with numpy."""
    for recipe in folds(tmp_path):
        total = derive_entry("x", SMALL, F32, recipe)
        assert isinstance(total.fragments[0].store, DerivedStore) and total.fragments[0].store.steps
        assert threads_for(None, [total]) == 2 * threads_for(None, recipe.inputs)
        wanted = np.frombuffer(ElementReader().read(elements(total, 0, total.numel)), np.float32)
        assert same(np.frombuffer(written(tmp_path, total, "reference"), np.float32), wanted)
        for how in ({"threads": 1}, {"threads": 5, "window": 4096}, {"threads": 3, "window": 65536, "at": 5}):
            assert same(np.frombuffer(written(tmp_path, total, "native", **how), np.float32), wanted), how
        assert written(tmp_path, total, "native", BF16) == written(tmp_path, total, "reference", BF16)
        turned = derive_entry("x", SMALL[::-1], F32, recipe)
        columns = Fragment(turned.fragments[0].store, 0, 0, SMALL[0], SMALL[1], SMALL[0], 1, SMALL[1])
        turned = TensorEntry("x", SMALL[::-1], F32, "parameter", (columns,))
        expected = wanted.reshape(SMALL).T.ravel()
        for engine in ("native", "reference"):
            assert same(np.frombuffer(written(tmp_path, turned, engine), np.float32), expected)  # type: ignore[arg-type]
        memory = np.zeros(total.numel, np.float32)
        place = Fragment(MemoryStore(memory.ctypes.data, memory.nbytes, memory), 0, 0, total.numel)
        run(Plan((), [(total, TensorEntry("x", SMALL, F32, "parameter", (place,)))]), "", engine="native")
        assert same(memory, wanted)


def matrix(tmp_path: Path, dtype: Any, *shape: int, byteorder: Literal["little", "big"] = "little") -> TensorEntry:
    """A matrix of numbers of about 1 in two files."""
    seed, numel = len(list(tmp_path.iterdir())), math.prod(shape)
    floats = np.random.default_rng(seed).normal(size=numel).astype(np.float32)
    raw = (floats.view(np.uint32) >> 16).astype("u2") if dtype == BF16 else floats.astype(dtype.numpy)
    raw = raw.byteswap() if byteorder == "big" else raw
    fragments = []
    for low, high in ((0, numel // 3), (numel // 3, numel)):
        path = tmp_path / f"{seed}-{low}"
        path.write_bytes(b"odd" + raw[low:high].tobytes())
        fragments.append(Fragment(locate(path).store(byteorder), 3, low, high - low))
    return TensorEntry("x", shape, dtype, "parameter", tuple(fragments))


def merges(tmp_path: Path) -> dict[str, MergedMatrix]:
    """Weights with LoRAs: of a Linear, a Conv1D, experts in either order of their dimensions; several LoRAs of one."""
    base = matrix(tmp_path, BF16, 60, 1100)

    def update(rank: int, rows: int, columns: int, experts: int = 1, *, turned: bool = False) -> Update:
        inputs, outputs = (rows, columns) if turned else (columns, rows)
        a = matrix(tmp_path, F32, experts * rank, inputs, byteorder="big" if rank == 7 else "little")
        return Update(a, matrix(tmp_path, F16, outputs, rank * experts), rank, 0.3, turned)

    one = update(7, 60, 1100)
    return {
        "linear": MergedMatrix(base, (one,), 1100),
        "conv1d": MergedMatrix(base, (update(5, 60, 1100, turned=True),), 1100),
        "several": MergedMatrix(base, (one, update(1, 60, 1100), update(65, 60, 1100)), 1100),
        "experts": MergedMatrix(base, (update(3, 20, 1100, 3),), 1100, 3),
        "experts of inputs": MergedMatrix(base, (update(3, 20, 1100, 3, turned=True),), 1100, 3),
        "long": MergedMatrix(matrix(tmp_path, F32, 300, 1000), (update(2, 300, 1000),), 1000),
    }


@pytest.mark.parametrize("paths", [(True, True), (True, False), (False, False)])
def test_adapters_are_merged_while_weights_are_read(paths: tuple[bool, bool], tmp_path: Path) -> None:
    """By all of the processor's vector units; windows begin and end within rows, and threads share factors."""
    for name, recipe in merges(tmp_path).items():
        total = derive_entry("x", recipe.base.shape, F32, recipe)
        assert isinstance(total.fragments[0].store, DerivedStore) and total.fragments[0].store.steps, name
        wanted = written(tmp_path, total, "reference")
        use_vector_paths(*paths)
        try:
            for how in ({"threads": 1}, {"threads": 5, "window": 4096}, {"threads": 3, "window": 65536, "at": 5}):
                assert written(tmp_path, total, "native", **how) == wanted, (name, how)
        finally:
            use_vector_paths(True)
        whole = np.empty(total.numel, np.float32)
        place = Fragment(MemoryStore(whole.ctypes.data, whole.nbytes, whole), 0, 0, total.numel)
        run(Plan((), [(total, TensorEntry("x", total.shape, F32, "parameter", (place,)))]), "", engine="native")
        assert whole.tobytes() == wanted


def test_factors_without_room_are_kept_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either way gives the same bits; several matrices with factors of which not all are kept at once, too."""
    a, b = matrix(tmp_path, F16, 900, 4096), matrix(tmp_path, F32, 12, 900)
    recipes = [MergedMatrix(matrix(tmp_path, F16, 12, 4096), (Update(a, b, 900, 0.5),), 4096) for _ in range(3)]
    store = FileStore("out", sum(recipe.base.numel for recipe in recipes) * 4)
    files, outputs = ((OutputFile("out", store.size, ()), store),), []
    for most in (a.numel, a.numel - 1):
        monkeypatch.setattr(merged_matrix, "_MOST_TURNED", most)
        pairs = []
        for number, recipe in enumerate(recipes):
            total = derive_entry("x", recipe.base.shape, F32, recipe)
            assert bool(recipe.steps) is (most == a.numel)
            place = Fragment(store, number * total.numel * 4, 0, total.numel)
            pairs.append((total, TensorEntry("x", total.shape, F32, "parameter", (place,))))
        root = tmp_path / f"out{most}"
        root.mkdir()
        run(Plan(files, pairs), str(root), engine="native", threads=3, window=4096)
        outputs.append((root / "out").read_bytes())
    assert outputs[0] == outputs[1]


def test_impossible_products_are_none(tmp_path: Path) -> None:
    base, a, b = (matrix(tmp_path, F32, *shape) for shape in ((6, 8), (2, 8), (6, 2)))
    total = derive_entry("x", (6, 8), F32, MergedMatrix(base, (Update(a, b, 3, 1.0),), 8))
    with pytest.raises(ValueError, match="a product with impossible numbers"):
        written(tmp_path, total, "native")


def test_elements_of_some_places_are_computed_beforehand(tmp_path: Path) -> None:
    """Of doubles, of rows that lie apart, and of other recipes: the native engine does not read these itself."""
    (a, x), (b, y) = stored(tmp_path / "a", 0, np.float64), stored(tmp_path / "b", 1)
    store = b.fragments[0].store
    apart = TensorEntry("b", (100, 1000), F32, "parameter", (Fragment(store, 0, 0, 500, 200, 500, 700),))
    for inputs, numel in (((a, b), 300_000), ((apart, apart), 100_000)):
        total = derive_entry("x", (numel,), F32, weighted_sum_of(inputs, (1.0, 1.0)))
        twice = derive_entry("x", (numel,), F32, weighted_sum_of((total, total), (1.0, 1.0)))
        for one in (total, twice):
            place = one.fragments[0].store
            assert isinstance(place, DerivedStore) and not place.steps
            assert written(tmp_path, one, "native") == written(tmp_path, one, "reference")
    assert (
        written(tmp_path, derive_entry("x", SHAPE, F32, mean_of((a, b))), "native")
        == (x.astype(np.float32) + (y - x.astype(np.float32)) / np.float32(2)).tobytes()
    )


def test_inputs_that_fail_are_named(tmp_path: Path) -> None:
    a, b = scattered(tmp_path, 0, BF16), scattered(tmp_path, 1, F32)
    total = derive_entry("x", SMALL, F32, mean_of((a, b)))
    path = tmp_path / "1-2"
    state = path.stat()
    os.truncate(path, 50_000)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    for engine in ("native", "reference"):
        with pytest.raises(CorruptError) as caught:
            written(tmp_path, total, engine)  # type: ignore[arg-type]
        assert caught.value.file == str(path)
    path.touch()
    with pytest.raises(InconsistentError, match="changed while"):
        written(tmp_path, total, "native")


def test_the_sum_says_what_it_depends_on(tmp_path: Path) -> None:
    a, _ = stored(tmp_path / "a", 0)
    assert weighted_sum_of((a,), (0.5,)).facts != weighted_sum_of((a,), (0.25,)).facts


def test_a_base_is_moved_by_differences(tmp_path: Path) -> None:
    (base, x), (a, y), (b, z) = (stored(tmp_path / name, seed) for seed, name in enumerate("xyz"))
    moved = derive_entry("x", SHAPE, F32, weighted_sum_of((base, a, b), (0.5, 2.0), moves_base=True))
    expected = x + np.float32(0.5) * (y - x)
    expected = expected + np.float32(2) * (z - x)
    for engine in ("native", "reference"):
        assert written(tmp_path, moved, engine) == expected.tobytes()  # type: ignore[arg-type]
    assert (
        written(
            tmp_path, derive_entry("x", SHAPE, F32, weighted_sum_of((base, base), (0.7,), moves_base=True)), "native"
        )
        == x.tobytes()
    )


def test_points_on_an_arc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The formula of Shoemake (1985), in fp64; the same bits whoever computes which part."""
    (a, x), (b, y) = (stored(tmp_path / name, seed) for seed, name in enumerate("xy"))
    found = written(tmp_path, derive_entry("x", SHAPE, F32, point_between((a, b), 0.3)), "native")
    p, q = x.astype(float).ravel(), y.astype(float).ravel()
    angle = np.arccos(p @ q / np.linalg.norm(p) / np.linalg.norm(q))
    expected = (np.sin(0.7 * angle) * p + np.sin(0.3 * angle) * q) / np.sin(angle)
    assert np.allclose(np.frombuffer(found, np.float32), expected, rtol=1e-5, atol=1e-6)
    assert found == written(tmp_path, derive_entry("x", SHAPE, F32, point_between((a, b), 0.3)), "reference")
    monkeypatch.setattr(plans, "COMPUTED_BYTES", 4000)
    assert found == written(tmp_path, derive_entry("x", SHAPE, F32, point_between((a, b), 0.3)), "native", threads=4)
    for t, expected in ((0.0, x), (1.0, y)):
        got = np.frombuffer(
            written(tmp_path, derive_entry("x", SHAPE, F32, point_between((a, b), t)), "native"), np.float32
        )
        assert (got.reshape(SHAPE) == expected).all()
    line = written(tmp_path, derive_entry("x", SHAPE, F32, point_between((a, a), 0.3)), "native")
    assert np.allclose(np.frombuffer(line, np.float32).reshape(SHAPE), x, rtol=1e-6)


def test_two_threads_do_parts_that_one_waits_for() -> None:
    """What is found comes in the order of the parts; who helps gets no help; after an error no part is begun."""
    both = threading.Barrier(2, timeout=60)
    begun: list[int] = []

    def work(part: int, tools: Tools) -> tuple[int, list[int]]:
        if part < 2:
            both.wait()  # two threads are in here
        return part, tools.each(lambda inner, _: inner + part, range(3))

    def fail(part: int, _: Tools) -> None:
        begun.append(part)
        raise OSError("a disk")

    with Bringer("native", 2, give_back=False, spend=lambda _: None) as bringer:
        assert bringer.tools().each(work, range(5)) == [(n, [n, n + 1, n + 2]) for n in range(5)]
        assert bringer.tools().each(work, ()) == []
        with pytest.raises(OSError, match="a disk"):
            bringer.tools().each(fail, range(1000))
    assert len(begun) <= 2
    with Bringer("native", 1, give_back=False, spend=lambda _: None) as bringer:
        assert bringer.tools().each(lambda part, _: part, range(5)) == list(range(5))


def test_byproducts_are_computed_after_what_they_come_from(tmp_path: Path) -> None:
    """Scales are known once elements have been divided by them; computed beside these, they would be found a second time."""
    done: list[str] = []

    class Numbers:
        inputs, facts, unit = (), (), 1

        def __init__(self, name: str, *, is_byproduct: bool) -> None:
            self.name, self.is_byproduct = name, is_byproduct

        def compute(self, start: int, stop: int, tools: Tools) -> Any:
            if not self.is_byproduct:
                time.sleep(0.05)
            done.append(self.name)
            return np.zeros(stop - start, np.float32)

    entries = [
        derive_entry(name, (100,), F32, Numbers(name, is_byproduct=name.startswith("scale")))
        for name in ("scale 1", "weight 1", "scale 2", "weight 2")
    ]
    with Bringer("native", 2, give_back=False, spend=lambda _: None) as bringer:
        spans = [ByteSpan(entry.fragments[0].store, 0, 400) for entry in entries]
        found = bringer.bring(spans, Fetched())
    assert [len(block) for block, _ in found] == [100] * 4
    assert sorted(done[:2]) == ["weight 1", "weight 2"]
    assert sorted(done[2:]) == ["scale 1", "scale 2"]

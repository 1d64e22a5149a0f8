"""Numbers are rounded once, to nearest even, by every engine: whatever the process that they work for has set."""

from __future__ import annotations

import ctypes
import math
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from zckpt._core import cast as native_cast
from zckpt._core import use_vector_paths
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import BF16, F16, F32, F64, DType
from zckpt.core.fragments import Fragment
from zckpt.core.plan import OutputFile, Plan
from zckpt.core.stores import FileStore
from zckpt.engine.elements import ElementReader
from zckpt.engine.move import run
from zckpt.engine.replicas import first_difference
from zckpt.engine.rounding import cast as reference_cast
from zckpt.engine.rounding import is_rounded, number, rounded_bits
from zckpt.engine.scan import scan
from zckpt.engine.scan_requests import comparisons
from zckpt.engine.tensor_statistics import Relation
from zckpt.storage.location import locate


def value(bits: np.ndarray, dtype: DType) -> np.ndarray:
    """What bits of a half mean; of infinity, the power of two that is first too large."""
    mantissa, bias = (10, 15) if dtype == F16 else (7, 127)
    exponent, fraction = (bits >> mantissa).astype(int), (bits & ((1 << mantissa) - 1)).astype(float)
    normal = (fraction + (1 << mantissa)) * 2.0 ** (exponent - bias - mantissa)
    return np.where(exponent == 0, fraction * 2.0 ** (1 - bias - mantissa), normal)


def round_to(double: float, dtype: DType) -> float:
    """A number rounded to a dtype, once and to nearest even; what is too large becomes infinite."""
    return number(rounded_bits(double, dtype), dtype)


def neighbourhoods(dtype: DType) -> tuple[np.ndarray, np.ndarray]:
    """Doubles at and just beside every half, and every middle between two; and the bits of the half that each must become."""
    infinity = 0x7C00 if dtype == F16 else 0x7F80
    bits = np.arange(infinity, dtype=np.uint16)
    here, above = value(bits, dtype), value(bits + 1, dtype)
    middle = (here + above) / 2
    even = bits + (bits & 1)
    known = [
        (here, bits), (np.nextafter(here, np.inf), bits), (np.nextafter(middle, 0), bits), (middle, even),
        (np.nextafter(middle, np.inf), bits + 1), (np.nextafter(above, 0), bits + 1),
    ]  # fmt: skip
    doubles, wanted = (np.concatenate(parts) for parts in zip(*known))
    return np.concatenate([doubles, -doubles]), np.concatenate([wanted, wanted | 0x8000]).astype("<u2")


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_every_double_beside_every_half(dtype: DType) -> None:
    doubles, wanted = neighbourhoods(dtype)
    data = doubles.astype("<f8").tobytes()
    lost = (wanted & 0x7FFF) == (0x7C00 if dtype == F16 else 0x7F80)
    expected = (wanted.tobytes(), int(lost.sum()), float(np.abs(doubles[lost]).max()))
    assert native_cast(F64.number, dtype.number, data) == expected
    assert reference_cast(data, F64, dtype, "little", False) == expected
    infinity = 0x7C00 if dtype == F16 else 0x7F80
    values = [*value(np.arange(infinity), dtype).tolist(), math.inf]
    for double, half in list(zip(doubles.tolist(), wanted.tolist()))[::3]:
        magnitude = values[half & 0x7FFF]
        assert round_to(double, dtype) == (-magnitude if half & 0x8000 else magnitude), double.hex()


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_every_single_beside_every_half(dtype: DType) -> None:
    """The singles that are nearest to the doubles above, in blocks for the vector paths and one by one."""
    doubles, _ = neighbourhoods(dtype)
    with np.errstate(all="ignore"):
        singles = doubles.astype("<f4")
    singles = singles[np.isfinite(singles)]
    expected = reference_cast(singles.astype("<f8").tobytes(), F64, dtype, "little", False)
    for vector in (True, False):
        use_vector_paths(vector)
        try:
            assert native_cast(F32.number, dtype.number, singles.tobytes()) == expected
        finally:
            use_vector_paths(True)
    assert reference_cast(singles.tobytes(), F32, dtype, "little", False) == expected
    bits, wanted = singles.view("<u4")[::7], np.frombuffer(expected[0], "<u2")[::7]
    for one, half in zip(bits.tolist(), wanted.tolist()):
        assert is_rounded(one, F32, half, dtype) and not is_rounded(one, F32, half ^ 1, dtype)


def test_doubles_to_singles_are_numpys() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 64, 1 << 18, dtype=np.uint64)
    bits[::2] = (bits[::2] & 0x801FFFFFFFFFFFFF) | (rng.integers(860, 1160, len(bits[::2])).astype(np.uint64) << 52)
    doubles = bits.view("<f8")
    doubles = doubles[~np.isnan(doubles)]
    with np.errstate(all="ignore"):
        wanted = doubles.astype("<f4").tobytes()
    assert native_cast(F64.number, F32.number, doubles.tobytes())[0] == wanted
    assert reference_cast(doubles.tobytes(), F64, F32, "little", False)[0] == wanted
    singles = np.frombuffer(wanted, "<f4").tolist()
    assert [round_to(d, F32) for d in doubles[:20000].tolist()] == singles[:20000]


# ---- whatever the host has set -----------------------------------------------------------------------------------------

MODES = {"down": 0x400, "up": 0x800, "towards zero": 0xC00, "flush": None}


@pytest.fixture(params=MODES)
def host(request: pytest.FixtureRequest) -> Iterator[None]:
    """This thread rounds otherwise, or flushes what is subnormal to zero; at the end of the test it must still do so."""
    if platform.machine() != "x86_64" or sys.platform != "linux":
        pytest.skip("the numbers of the modes are those of this machine")
    libm = ctypes.CDLL("libm.so.6")
    mode = MODES[request.param]
    tiny = np.array([1e-310])
    try:
        if mode is None:
            assert torch.set_flush_denormal(True)
        else:
            assert libm.fesetround(mode) == 0
        yield
        assert libm.fegetround() == (mode or 0)
        assert ((tiny * 1.0)[0] == 0) == (mode is None)
    finally:
        libm.fesetround(0)
        torch.set_flush_denormal(False)


def numbers() -> dict[DType, np.ndarray]:
    """Among them many that are subnormal where they come from, or where they go."""
    rng = np.random.default_rng(3)
    doubles = np.concatenate([rng.standard_normal(2000) * 2.0**e for e in range(-150, 130, 4)])
    with np.errstate(all="ignore"):
        singles = np.concatenate([doubles.astype("<f4"), np.arange(1, 4000, dtype="<u4").view("<f4")])
    return {F64: doubles.astype("<f8"), F32: singles}


NUMBERS = numbers()
WANTED = {
    (source, target): native_cast(source.number, target.number, data.tobytes())[0]
    for source, data in NUMBERS.items()
    for target in (F32, F16, BF16)
    if source != target
}


TINY = {
    F64: np.concatenate([np.arange(1, 9, dtype="<u8").view("<f8"), np.ldexp(np.arange(-9.0, 9), -149)]),
    F32: np.arange(1, 30, dtype="<u4").view("<f4"),
}
TINY_COPIES = {
    (source, target): data.tobytes() if source == target
    else data.astype("<f8").tobytes() if target == F64
    else native_cast(source.number, target.number, data.tobytes())[0]
    for source, data in TINY.items() for target in (F64, F32, F16, BF16)
}  # fmt: skip


@pytest.mark.parametrize("pair", WANTED, ids=lambda pair: f"{pair[0]}-{pair[1]}")
@pytest.mark.parametrize("engine", ["native", "reference"])
def test_moves_round_alike(engine: str, pair: tuple[DType, DType], host: None, tmp_path: Path) -> None:
    source, target = pair
    data = NUMBERS[source]
    (tmp_path / "s").write_bytes(data.tobytes())
    store, to = locate(tmp_path / "s").store(), FileStore("out", len(data) * target.itemsize)
    entries = [
        TensorEntry("x", (len(data),), dtype, "parameter", (Fragment(place, 0, 0, len(data)),))
        for place, dtype in ((store, source), (to, target))
    ]
    run(Plan(((OutputFile("out", to.size), to),), [(entries[0], entries[1])]), str(tmp_path), engine=engine)
    assert (tmp_path / "out").read_bytes() == WANTED[pair]
    assert native_cast(source.number, target.number, data.tobytes())[0] == WANTED[pair]


def test_scans_measure_alike(host: None, tmp_path: Path) -> None:
    """Differences of numbers so small that a host which flushes them sees none."""
    a = np.arange(1, 5000, dtype="<u4").view("<f4")
    (tmp_path / "a").write_bytes(a.tobytes())
    (tmp_path / "b").write_bytes(np.roll(a, 1).tobytes())
    entries = [
        TensorEntry(name, (len(a),), F32, "parameter", (Fragment(locate(tmp_path / name).store(), 0, 0, len(a)),))
        for name in ("a", "b")
    ]
    found = scan(comparisons(entries[0], entries[1], 0), relation=Relation(atol=0.0, rtol=0.5), engine="native")
    statistics = found.statistics[0]
    assert statistics.nonzero == len(a) and statistics.max_rel > 0.9 and statistics.max_abs == math.ldexp(4998, -149)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_replicas_round_alike(dtype: DType, host: None) -> None:
    unit = {F32: -149, F16: -24, BF16: -133}[dtype]
    for whole in range(1, 40):  # powers of two by `ldexp`: `2.0**-149` is not exact in every mode
        assert round_to(math.ldexp(whole, unit), dtype) == math.ldexp(whole, unit)
        assert round_to(math.ldexp(2 * whole + 1, unit - 1), dtype) == math.ldexp(whole + whole % 2, unit)
        assert round_to(math.ldexp(4 * whole + 3, unit - 2), dtype) == math.ldexp(whole + 1, unit)
    assert round_to(1.7e308, dtype) == np.inf and round_to(-1.7e308, dtype) == -np.inf


@pytest.mark.parametrize("source", [F64, F32], ids=str)
@pytest.mark.parametrize("target", [F64, F32, F16, BF16], ids=str)
def test_replicas_are_compared_alike(source: DType, target: DType, host: None, tmp_path: Path) -> None:
    """Small numbers that a host flushes to zero are neither the same as others, nor different from themselves."""
    masters, copies = TINY[source], TINY_COPIES[source, target]
    numel, others = len(masters), bytearray(copies)
    others[-target.itemsize] ^= 2  # the last number is another, but as small
    for name, data in {"m": masters.tobytes(), "c": copies, "other": others}.items():
        (tmp_path / name).write_bytes(data)
    m, c, other = ((Fragment(locate(tmp_path / name).store(), 0, 0, numel),) for name in ("m", "c", "other"))
    with ElementReader() as reader:
        assert first_difference(reader, (m, source), (c, target), [(0, numel)]) is None
        assert first_difference(reader, (m, source), (other, target), [(0, numel)]) is not None

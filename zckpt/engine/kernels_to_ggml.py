"""Numbers as blocks of ggml's types, in numpy: the reference that `csrc/to_ggml.cpp` must equal; `verify` uses it.

For `kernels`, and for `layouts.gguf.blocks`. [Note: search] A step and a least number are searched for groups of numbers: each
trial rounds the numbers, and takes those that have the smallest weighted error for these codes; the best trial is kept, and the
next one begins with its least number. Sums are taken in fp32 in the order of the numbers, and nothing is fused: other orders give
other blocks. Here numbers are rows, and groups are columns, so that each step of a sum is one for all groups.
Source: ggml, src/ggml-quants.c (`quantize_row_*_ref`; `quantize_row_*_impl` with an importance matrix).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zckpt.engine.kernels_ggml import TYPES

if TYPE_CHECKING:
    from zckpt.core.folds import Bytes, Floats

_AT_ONCE = 1 << 16
_ROUNDER = 12582912.0
_NOTHING = 1e-15
_HUGE = 2.0**60
"""More than any block with halves holds; it ends the search for sums of squares."""
_OF_32 = {"Q4_0": (8, False), "Q5_0": (16, True), "Q4_1": (15, False), "Q5_1": (31, True)}
"""Half of the codes, or the largest one; and whether there are fifth bits."""
_OF_256 = {"Q4_K": (15, -1.0, 20), "Q5_K": (31, -0.5, 15)}
"""The largest code, and the first and the number of trials without an importance matrix."""
KINDS = ("MXFP4", *_OF_32, *_OF_256, "Q6_K")
"""Types that are written, beside Q8_0."""


def to_ggml(kind: str, numbers: Floats, columns: int, weights: Floats | None, blocks: Bytes) -> int:
    import numpy as np

    _, rows = check(kind, numbers, columns, weights, blocks)
    nbytes, width, _ = TYPES[kind]
    held, out = numbers.reshape(rows, columns), blocks.reshape(rows, columns // width, nbytes)
    step, unsound = max(1, _AT_ONCE // max(1, columns)), 0
    with np.errstate(all="ignore"):
        for first in range(0, rows, step):
            part = held[first : first + step]
            groups = part.reshape(-1, width)
            found = _encode(kind, groups, part, weights)
            out[first : first + step] = found.reshape(len(part), -1, nbytes)
            most = np.float32(np.inf if kind == "MXFP4" else _HUGE)
            unsound += int((~(abs(groups) < most).all(axis=1) | _is_unsound(kind, found)).sum())
    return unsound


def check(kind: str, numbers: Floats, columns: int, weights: Floats | None, blocks: Bytes) -> tuple[int, int]:
    """The number that `csrc/blocks.h` has for a type, and how many rows there are; ValueError if they are not those blocks."""
    nbytes, width, _ = TYPES[kind]
    rows = len(numbers) // columns if columns else 0
    fits = kind in KINDS and columns % width == 0 and rows * columns == len(numbers)
    if not fits or len(blocks) * width != len(numbers) * nbytes or (weights is not None and len(weights) != columns):
        raise ValueError(f"{len(blocks)} bytes of {kind} for {len(numbers)} numbers in rows of {columns}")
    return [*TYPES].index(kind), rows


def _is_unsound(kind: str, found: Any) -> Any:
    """Which blocks have a scale that fp16 does not hold."""
    import numpy as np

    places = {"MXFP4": (), "Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,)}.get(kind, (0, 2))
    wrong = np.zeros(len(found), bool)
    for at in places:
        wrong |= found[:, at + 1] & 0x7C == 0x7C
    return wrong


def _encode(kind: str, groups: Any, rows: Any, weights: Any) -> Any:
    """The blocks of numbers, one for each row of `groups`."""
    import numpy as np

    columns = None if weights is None else np.broadcast_to(weights, rows.shape).reshape(groups.shape)
    if kind == "MXFP4":
        return _mxfp4(groups)
    if kind == "Q6_K":
        return _q6_k(groups, columns)
    if kind in _OF_256:
        return _q45_k(kind, groups, columns)
    size, has_fifth = _OF_32[kind]
    is_ranged = kind.endswith("1")
    if columns is not None:
        square = _sum(rows.T * rows.T) / np.float32(rows.shape[1])
        each = np.repeat(square, rows.shape[1] // 32)
        matter = columns.T * np.sqrt(each + groups.T * groups.T)
        if is_ranged:
            step, least, codes = _search_range(groups.T, matter, size, -0.9, 0.05, 36)
            halves = [step, -least]
        else:
            step, codes = _search_scale(groups.T, matter, size)
            halves = [step]
    elif is_ranged:
        least, most = _ends(groups.T)
        step = (most - least) / np.float32(size)
        codes = _truncate((groups.T - least) * _reciprocal(step) + np.float32(0.5), size)
        halves = [step, least]
    else:
        step = _first_largest(groups.T)[0] / np.float32(-size)
        codes = _truncate(groups.T * _reciprocal(step) + np.float32(size + 0.5), 2 * size - 1)
        halves = [step]
    return np.concatenate([*(_half(each) for each in halves), _pack_32(codes.T, has_fifth)], axis=1)


def _sum(terms: Any) -> Any:
    """The sums of columns, in the order of rows."""
    total = terms[0].copy()
    for row in terms[1:]:
        total += row
    return total


def _nearest(numbers: Any) -> Any:
    """Whole numbers, rounded as ggml rounds: of a number that is too large, the low bits are left."""
    import numpy as np

    return ((numbers + np.float32(_ROUNDER)).view(np.int32) & 0x7FFFFF) - 0x400000


def _reciprocal(step: Any) -> Any:
    import numpy as np

    return np.where(step != 0, np.float32(1) / step, np.float32(0))


def _truncate(numbers: Any, most: int) -> Any:
    """The whole part, in one byte; 0 for a number that is too large for an integer."""
    import numpy as np

    sound = abs(numbers) < np.float32(2**31)
    return np.minimum(np.where(sound, numbers, 0).astype(np.int32).astype(np.int8), most).astype(np.uint8)


def _half(numbers: Any) -> Any:
    import numpy as np

    return numbers.astype("<f2").view(np.uint8).reshape(len(numbers), 2)


def _ends(x: Any) -> tuple[Any, Any]:
    """The least and the largest numbers of each column; the first of equal zeros."""
    import numpy as np

    least, most = x[0], x[0]
    for row in x[1:]:
        least, most = np.where(row < least, row, least), np.where(row > most, row, most)
    return least, most


def _first_largest(x: Any) -> tuple[Any, Any]:
    """The first number of the largest magnitude in each column, and its magnitude."""
    import numpy as np

    at = abs(x).argmax(axis=0)
    largest = np.take_along_axis(x, at[None], axis=0)[0]
    largest = np.where(largest == 0, np.float32(0), largest)
    return largest, abs(largest)


def _search_range(x: Any, w: Any, top: int, first: float, apart: float, steps: int) -> tuple[Any, Any, Any]:
    """Steps, least numbers with their sign changed, and codes, of groups in columns; see [Note: search]."""
    import numpy as np

    least, most = _ends(x)
    sum_w, sum_x = _sum(w), _sum(w * x)
    least = np.where(least > 0, np.float32(0), least)
    sound = most > least

    def encode(factor: Any) -> Any:
        return np.clip(_nearest(factor * (x - least)), 0, top).astype(np.float32)

    def error_of(scale: Any, low: Any, held: Any) -> Any:
        off = (scale * held + low) - x
        return _sum(w * (off * off))

    factor = np.float32(top) / (most - least)
    scale = np.float32(1) / factor
    codes = encode(factor)
    error = error_of(scale, least, codes)
    for step in range(steps + 1):
        tried = np.float32(np.float32(first) + np.float32(apart) * np.float32(step)) + np.float32(top)
        held = encode(tried / (most - least))
        wl = w * held
        sum_l, sum_ll, sum_xl = _sum(wl), _sum(wl * held), _sum(wl * x)
        parted = sum_w * sum_ll - sum_l * sum_l
        own, low = (sum_w * sum_xl - sum_x * sum_l) / parted, (sum_ll * sum_x - sum_l * sum_xl) / parted
        over = low > 0
        own, low = np.where(over, sum_xl / sum_ll, own), np.where(over, np.float32(0), low)
        found = error_of(own, low, held)
        better = (parted > 0) & (found < error)
        error, scale, least = np.where(better, found, error), np.where(better, own, scale), np.where(better, low, least)
        codes = np.where(better, held, codes)
    codes = np.where(sound, codes, 0).astype(np.uint8)
    return np.where(sound, scale, np.float32(0)), -least, codes


def _search_scale(x: Any, w: Any, top: int) -> tuple[Any, Any]:
    """Scales and codes of groups in columns, with codes from -top to top - 1, which are stored `top` higher."""
    import numpy as np

    largest, size = _first_largest(x)
    nothing = size < np.float32(_NOTHING)
    largest = np.where(nothing, np.float32(1), largest)
    wx = w * x
    scale: Any = None
    best: Any = None
    codes: Any = None
    for step in (0, *range(-9, 0), *range(1, 10)):
        factor = -(np.float32(top) + np.float32(0.1) * np.float32(step)) / largest
        held = np.clip(_nearest(factor * x), -top, top - 1).astype(np.float32)
        sum_xl, sum_ll = _sum(wx * held), _sum(w * held * held)
        own = np.where(sum_ll != 0, sum_xl / sum_ll, np.float32(0))
        if codes is None:
            scale, best, codes = own, own * sum_xl, held
        else:
            better = (sum_ll > 0) & (sum_xl * sum_xl > best * sum_ll)
            scale, best = np.where(better, own, scale), np.where(better, own * sum_xl, best)
            codes = np.where(better, held, codes)
    codes = np.where(nothing, 0, codes + np.float32(top)).astype(np.uint8)
    return np.where(nothing, np.float32(0), scale), codes


def _whole_scales(x: Any, w: Any) -> tuple[Any, Any]:
    """One number for groups in columns, and the whole numbers to 63 by which their scales are multiples of it."""
    import numpy as np

    top, most = 63, np.maximum(x.max(axis=0), np.float32(0))
    sound = most >= np.float32(_NOTHING)
    most = np.where(sound, most, np.float32(1))

    def error_of(factor: Any, cut: bool) -> Any:
        held = _nearest(factor * x)
        off = x - np.float32(1) / factor * (np.minimum(held, top) if cut else held & 255).astype(np.float32)
        return _sum(w * off * off)

    factor = np.float32(top) / most
    error = error_of(factor, False)
    for step in (-4, -3, -2, -1, 1, 2, 3, 4):
        tried = (np.float32(0.1) * np.float32(step) + np.float32(top)) / most
        found = error_of(tried, True)
        error, factor = np.where(found < error, found, error), np.where(found < error, tried, factor)
    codes = np.minimum(_nearest(factor * x), top).astype(np.uint8).astype(np.float32)
    sum_xl, sum_ll = _sum(w * x * codes), _sum(w * codes * codes)
    going = sound.copy()
    for _ in range(5):
        changed = np.zeros_like(going)
        for i in range(len(x)):
            xl, ll = sum_xl - w[i] * x[i] * codes[i], sum_ll - w[i] * codes[i] * codes[i]
            may = going & (xl > 0) & (ll > 0)
            held = np.minimum(_nearest(x[i] * ll / xl), top).astype(np.float32)
            may &= held != codes[i]
            xl, ll = xl + w[i] * x[i] * held, ll + w[i] * held * held
            may &= xl * xl * sum_ll > sum_xl * sum_xl * ll
            codes[i] = np.where(may, held.astype(np.int32) & 255, codes[i])
            sum_xl, sum_ll = np.where(may, xl, sum_xl), np.where(may, ll, sum_ll)
            changed |= may
        going &= changed
    codes = np.where(sound, codes, 0).astype(np.uint8)
    return np.where(sound & (sum_ll > 0), sum_xl / sum_ll, np.float32(0)), codes


def _q45_k(kind: str, groups: Any, columns: Any) -> Any:
    import numpy as np

    top, first, steps = _OF_256[kind]
    count = len(groups)
    x = np.ascontiguousarray(groups.reshape(-1, 32).T)
    if columns is None:
        w = np.sqrt(_sum(x * x) / np.float32(32)) + abs(x)
        scales, minima, codes = _search_range(x, w, top, first, 0.1, steps)
        pairs = []
        for each in (scales.reshape(count, 8), minima.reshape(count, 8)):
            most = np.maximum(each.max(axis=1), np.float32(0))
            factor = np.where(most > 0, np.float32(63) / most, np.float32(0))
            whole = np.minimum(_nearest(factor[:, None] * each).astype(np.uint8), 63)
            pairs.append((most / np.float32(63), whole))
    else:
        squares = np.float32(2) * _sum(groups.T * groups.T) / np.float32(256)
        w = columns.reshape(-1, 32).T * np.sqrt(np.repeat(squares, 8) + x * x)
        scales, minima, codes = _search_range(x, w, top, -0.9, 0.05, 36)
        sums = _sum(w).reshape(count, 8).T
        found = [_whole_scales(each.reshape(count, 8).T, sums) for each in (scales, minima)]
        pairs = [(number, np.minimum(whole.T, 63)) for number, whole in found]
    (step, s), (least, m) = pairs
    held_step, held_least = step.astype(np.float16).astype(np.float32), least.astype(np.float16).astype(np.float32)
    by = (held_step[:, None] * s.astype(np.float32)).reshape(-1)
    more = (held_least[:, None] * m.astype(np.float32)).reshape(-1)
    again = np.clip(_nearest((x + more) / by), 0, top).astype(np.uint8)
    codes = np.where(by != 0, again, codes).T.reshape(count, 4, 2, 32)
    low, high = codes[:, :, 0], codes[:, :, 1]
    both = [s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4]
    parts = [_half(step), _half(least), *both]
    if top == 31:
        shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
        parts.append(np.bitwise_or.reduce(low >> 4 << shifts | high >> 4 << shifts + np.uint8(1), axis=1))
    parts.append((low & 15 | (high & 15) << 4).reshape(count, 128))
    return np.concatenate(parts, axis=1)


def _q6_k(groups: Any, columns: Any) -> Any:
    import numpy as np

    count = len(groups)
    x = np.ascontiguousarray(groups.reshape(-1, 16).T)
    w = x * x if columns is None else columns.reshape(-1, 16).T
    found, codes = _search_scale(x, w, 32)
    scales = found.reshape(count, 16)
    largest, size = _first_largest(scales.T)
    nothing = size < np.float32(_NOTHING)
    factor = np.float32(-128) / np.where(nothing, np.float32(1), largest)
    step = np.float32(1) / factor
    whole = np.minimum(_nearest(factor[:, None] * scales), 127).astype(np.int8)
    by = (step.astype(np.float16).astype(np.float32)[:, None] * whole.astype(np.float32)).reshape(-1)
    again = (np.clip(_nearest(x / by), -32, 31) + 32).astype(np.uint8)
    codes = np.where(by != 0, again, codes).T.reshape(count, 2, 4, 32)
    low = (codes[:, :, :2] & 15 | (codes[:, :, 2:] & 15) << 4).reshape(count, 128)
    high = np.bitwise_or.reduce(codes >> 4 << np.arange(0, 8, 2, dtype=np.uint8)[:, None], axis=2).reshape(count, 64)
    blocks = np.concatenate([low, high, whole.view(np.uint8), _half(step)], axis=1)
    return np.where(nothing[:, None], np.uint8(0), blocks)


def _mxfp4(groups: Any) -> Any:
    """The power of two by which the largest number becomes 4 to 8; of two numbers that are as near, the smaller one."""
    import numpy as np

    size = abs(groups)
    top = size.max(axis=1)
    power = np.floor(np.log2(top.astype(np.float64)).astype(np.float32)) + np.float32(125)
    e = np.where((top > 0) & (power > 0) & np.isfinite(top), power, 0).astype(np.uint32)
    half = np.where(e < 2, np.uint32(0x00200000) << e, (e - np.uint32(1)) << np.uint32(23)).astype(np.uint32)
    middles = half.view(np.float32)[:, None] * np.array([0.5, 1.5, 2.5, 3.5, 5, 7, 10], np.float32)
    codes = (size[:, :, None] > middles[:, None]).sum(axis=2).astype(np.uint8)
    codes |= ((codes != 0) & (groups < 0)).astype(np.uint8) << np.uint8(3)
    return np.concatenate([e.astype(np.uint8)[:, None], _pack_32(codes, False)], axis=1)


def _pack_32(codes: Any, has_fifth: bool) -> Any:
    """Codes of 32 numbers: two in a byte, 16 apart, and before them the fifth bits of all."""
    import numpy as np

    packed = codes[:, :16] & 15 | (codes[:, 16:] & 15) << 4
    if not has_fifth:
        return packed
    return np.concatenate([np.packbits(codes >> 4 & 1, axis=1, bitorder="little"), packed], axis=1)

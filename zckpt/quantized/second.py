"""Quantised weights as numbers, a second time: by other rules of names, element by element, and with exact products.

For `verify`, which compares an output with these, and not with what `unpack` and `plain` made from the same tensors. Nothing of
those is used here. A row of a matrix is computed from the bits that its elements have by their numbers: place, shift and mask.
Products are those of fp64, which are exact for codes and one scale, and are rounded once.
Source: vLLM 0.11, model_executor/layers/quantization (gptq.py, awq.py, modelopt.py, mxfp4.py); OCP Microscaling formats 1.0, 5.3.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import F32, U8
from zckpt.core.folds import Tools
from zckpt.core.recipes import DerivedStore, Formula, derive_entry
from zckpt.quantized.forms import forms_of_packages

if TYPE_CHECKING:
    from zckpt.core.folds import Array

Tensors = Mapping[str, TensorEntry]
Rows = Callable[[int, int, Tools], Any]
"""(first row, last row, tools) -> the numbers of rows of the stack of matrices."""

_AT_ONCE = 1 << 18
_AWQ_NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of each of eight columns."""


_AGAIN = "again"
"""The first of the facts of the recipes here."""


def _rows_again(inputs: tuple[TensorEntry, ...], width: int, rows: Rows) -> Formula:
    """The recipe of rows of so many elements that a function computes."""
    unit = max(1, width)

    def compute(start: int, stop: int, tools: Tools) -> Array:
        import numpy as np

        found = np.empty(stop - start, np.float32)
        step = max(1, _AT_ONCE // unit)
        last = -(-stop // unit)
        with np.errstate(all="ignore"):
            for row in range(start // unit, last, step):
                at = row * unit - start
                numbers = rows(row, min(row + step, last), tools).reshape(-1)
                found[at : at + len(numbers)] = numbers[: len(found) - at].astype(np.float32)
        return found

    return Formula(inputs, (_AGAIN, width), compute, unit)


def stored_again(entry: TensorEntry, own: Tensors) -> dict[str, TensorEntry]:
    """Those of the output's tensors for a quantised one (`own`) that hold it as stored, by what `derive_again` found for
    it; their bytes are those of the source's.
    """
    recipes = [f.store.recipe for f in entry.fragments if isinstance(f.store, DerivedStore)]
    if len(recipes) != 1 or recipes[0].facts[:1] != (_AGAIN,):
        return {}
    places = {"": 0, "_packed": 0, "_scale": 1, "_scale_inv": 1, "_global_scale": 2}
    found: dict[str, TensorEntry] = {}
    for name, one in own.items():
        place = places.get(name.removeprefix(entry.name), len(recipes[0].inputs))
        if place < len(recipes[0].inputs):
            stored = recipes[0].inputs[place]
            found[name] = replace(stored, name=name, shape=one.shape)
    return found


def derive_again(
    tensors: Tensors, config: Mapping[str, Any], values: Callable[[TensorEntry], Any]
) -> dict[str, TensorEntry]:
    """The tensors of quantised ones' numbers, by their plain names; the config is what a model's says of quantisation, and
    `values` reads a small tensor whole.
    """
    found: dict[str, TensorEntry] = {}
    if any(entry.dtype.kind == "power" for entry in tensors.values()):
        tensors = {n: replace(one, dtype=U8) if one.dtype.kind == "power" else one for n, one in tensors.items()}
    of_packages = [(form.codes, form.again) for form in forms_of_packages(tensors.keys()) if form.again is not None]
    for name, entry in tensors.items():
        for end, read in (*of_packages, *_ENDS):
            if (
                name.endswith(end)
                and (made := read(tensors, name.removesuffix(end), entry, config, values)) is not None
            ):
                plain, shape, inputs, width, rows = made
                found[plain] = derive_entry(plain, shape, F32, _rows_again(inputs, width, rows), entry.role)
                break
    return found


Made = tuple[str, tuple[int, ...], tuple[TensorEntry, ...], int, Rows]
"""The plain name, its shape, what is read, the width of a row, and the function of rows."""


def _window(entry: TensorEntry, width: int, rows: tuple[int, int], columns: tuple[int, int], tools: Tools) -> Any:
    """A part of a stored matrix of `width` columns."""
    import numpy as np

    (top, bottom), (left, right) = rows, columns
    if (left, right) == (0, width):
        return tools.read(entry, top * width, bottom * width).reshape(bottom - top, width)
    return np.stack([tools.read(entry, row * width + left, row * width + right) for row in range(top, bottom)])


def _bits(words: Any, size: int, places: Any, bits: int) -> Any:
    """The codes at bit positions `places`, of streams along the first dimension of words of `size` bits."""
    import numpy as np

    wide = (
        np.concatenate([words, np.zeros((1, *words.shape[1:]), words.dtype)]).view(f"<u{size // 8}").astype(np.uint64)
    )
    first, shift = places // size, (places % size).astype(np.uint64).reshape(-1, *(1,) * (words.ndim - 1))
    both = wide[first] | wide[first + 1] << np.uint64(size)
    return (both >> shift & np.uint64((1 << bits) - 1)).astype(np.int64)


def _bytes_of(tools: Tools, entry: TensorEntry, first: int, last: int, width: int) -> Any:
    """Rows of `width` bytes of a tensor of any dtype."""
    import numpy as np

    size = entry.dtype.itemsize
    stop = min(last * width // size, entry.numel)
    raw = tools.read(entry, first * width // size, stop).view(np.uint8)
    return np.concatenate([raw, np.zeros((last - first) * width - len(raw), np.uint8)]).reshape(last - first, width)


def _e2m1(codes: Any, *, has_minus_zero: bool = True) -> Any:
    import numpy as np

    power, half = codes >> 1 & 3, codes & 1
    size = np.where(power == 0, half * 0.5, np.ldexp(1 + half * 0.5, power - 1))
    return np.where(codes >= 8, np.where((size == 0) & (not has_minus_zero), 0.0, -size), size)


def _e4m3(codes: Any) -> Any:
    import numpy as np

    power, digits = codes >> 3 & 15, codes & 7
    size = np.where(power == 0, np.ldexp(digits * 1.0, -9), np.ldexp(digits + 8.0, power - 10))
    return np.where(codes & 127 == 127, np.nan, np.where(codes >= 128, -size, size))


def _fp4(
    name: str, codes: TensorEntry, scales: TensorEntry, second: TensorEntry | None, group: int, divides: bool
) -> Made:
    """Two codes of E2M1 in a byte."""
    import numpy as np

    shape = (*codes.shape[:-1], codes.shape[-1] * 2)
    columns = shape[-1]

    def rows(first: int, last: int, tools: Tools) -> Any:
        each = np.arange(columns)
        raw = _bytes_of(tools, codes, first, last, columns // 2)
        numbers = _e2m1(
            raw[:, each // 2].astype(np.int64) >> 4 * (each % 2) & 15, has_minus_zero=second is None or divides
        )
        across = columns // group
        if scales.dtype.kind == "float":
            own = tools.read_floats(scales, first * across, last * across).astype(np.float64)
        else:
            own = np.ldexp(1.0, tools.read(scales, first * across, last * across).astype(np.int64) - 127)
        own = own.reshape(last - first, across)
        if second is not None:
            whole = tools.read_floats(second, 0, second.numel).astype(np.float64)
            of_row = whole[np.arange(first, last) * len(whole) // math.prod(shape[:-1])][:, None]
            own = (own / of_row if divides else own * of_row).astype(np.float32).astype(np.float64)
        return numbers * own[:, each // group]

    return name, shape, (codes, scales, *(() if second is None else (second,))), columns, rows


def _fp4_down(name: str, codes: TensorEntry, scales: TensorEntry, second: TensorEntry) -> Made:
    """Two codes of E2M1 in a byte, for two rows; a scale for 16 of them."""
    import numpy as np

    *lead, half, width = codes.shape
    across = scales.shape[-2]

    def rows(first: int, last: int, tools: Tools) -> Any:
        row = np.arange(first, last)
        matrix, inside = row // (2 * half), row % (2 * half)
        held, of = matrix * half + inside // 2, matrix * across + inside // 16
        raw = _window(codes, width, (int(held[0]), int(held[-1]) + 1), (0, width), tools)[held - held[0]].astype(
            np.int64
        )
        low, high = int(of[0]), int(of[-1]) + 1
        own = tools.read_floats(scales, low * width, high * width).astype(np.float64).reshape(-1, width)[of - low]
        whole = tools.read_floats(second, 0, second.numel).astype(np.float64)
        own = own * whole[matrix if len(whole) > 1 else matrix * 0][:, None]
        return _e2m1(raw >> 4 * (row % 2)[:, None] & 15, has_minus_zero=False) * own.astype(np.float32).astype(
            np.float64
        )

    return name, (*lead, 2 * half, width), (codes, scales, second), width, rows


def powers_again(entry: TensorEntry) -> tuple[TensorEntry, TensorEntry] | None:
    """The numbers of a tensor of MXFP4 that `derive_again` found, with a row of blocks for each row, and its powers; None
    for another tensor.
    """
    recipes = [f.store.recipe for f in entry.fragments if isinstance(f.store, DerivedStore)]
    if len(recipes) != 1 or recipes[0].facts[:1] != (_AGAIN,) or len(recipes[0].inputs) != 2:
        return None
    codes, scales = recipes[0].inputs
    if scales.dtype.name != "U8" or scales.numel * 32 != entry.numel or codes.nbytes * 2 != entry.numel:
        return None
    if len(codes.shape) < 4:
        return entry, scales
    each = math.prod(scales.shape[:-1])
    flat = replace(codes, shape=(each, codes.numel // each)), replace(scales, shape=(each, scales.shape[-1]))
    _, shape, inputs, width, rows = _fp4(entry.name, *flat, None, 32, divides=False)
    return derive_entry(entry.name, shape, F32, _rows_again(inputs, width, rows), entry.role), flat[1]


def _by_packed(tensors: Tensors, stem: str, entry: TensorEntry, config: Mapping[str, Any], values: Any) -> Made | None:
    import numpy as np

    scales, whole = tensors.get(stem + "_scale"), tensors.get(stem + "_global_scale")
    if scales is None or entry.dtype.name == "U8":
        return None if scales is None else _fp4(stem, entry, scales, whole, 32 if whole is None else 16, divides=True)
    if (told := tensors.get(stem + "_shape")) is None:
        return None
    shape = tuple(int(extent) for extent in values(told))
    columns, words, height = shape[-1], entry.shape[-1], shape[-2]
    groups = config.get("config_groups") if isinstance(config.get("config_groups"), Mapping) else {}
    said = [int(g["weights"]["num_bits"]) for g in groups.values() if g.get("weights")] if groups else []
    bits = next(b for b in (*said, 4, 8, 2, 3, 5, 6, 7, 1) if -(-columns * b // 32) == words)
    points, order = tensors.get(stem + "_zero_point"), tensors.get(stem + "_g_idx")
    is_by_rows = len(scales.shape) > 1
    per_row = scales.shape[-1] if is_by_rows else 1
    half = 1 << bits - 1

    def rows(first: int, last: int, tools: Tools) -> Any:
        places = np.arange(columns) * bits
        codes = _bits(_window(entry, words, (first, last), (0, words), tools).T, 32, places, bits).T
        group = np.arange(columns) * per_row // columns
        if order is not None:
            own: Any = tools.read(order, 0, columns)
            group = own if (own >= 0).any() else group
        factors = (
            tools.read_floats(scales, first * per_row, last * per_row)
            if is_by_rows
            else tools.read_floats(scales, 0, 1)
        )
        numbers = (codes - half).astype(np.float64)
        if points is not None and points.dtype.name == "I8":
            zeros: Any = tools.read(points, first * per_row, last * per_row).astype(np.int64)
            numbers -= zeros.reshape(-1, per_row)[:, group]
        elif points is not None:
            tall = -(-height * bits // 32)
            held = _window(points, per_row, (first // height * tall, -(-last // height) * tall), (0, per_row), tools)
            row = np.arange(first, last) - first // height * height
            zeros = _bits(held, 32, row // height * tall * 32 + row % height * bits, bits)
            numbers -= (zeros - half)[:, group]
        return numbers * factors.astype(np.float64).reshape(-1, per_row)[:, group]

    return stem, shape, tuple(e for e in (entry, scales, points, order) if e is not None), columns, rows


def _weight(tensors: Tensors, stem: str, entry: TensorEntry, config: Mapping[str, Any], values: Any) -> Made | None:
    """The numbers of elements with scales beside them, by name: one element a byte, or two."""
    name = entry.name
    beside = [name + end for end in ("_scale_inv", "_scale", "_weight_scale")] + [
        f"{name[: -len('weight')]}qscale_weight"
    ]
    scales = next((tensors[one] for one in beside if one in tensors), None)
    is_fp8 = entry.dtype.kind == "float" and entry.dtype.itemsize == 1
    if scales is None or not (is_fp8 or entry.dtype.name in ("U8", "I8")):
        return None
    if entry.dtype.name == "U8":
        whole = next((tensors[name + end] for end in ("_scale_2", "_weight_scale_2") if name + end in tensors), None)
        if whole is None and scales.dtype.name != "U8":
            return None
        is_turned = len(entry.shape) > 2 and scales.shape[-2:] == (entry.shape[-2] // 8, entry.shape[-1])
        if is_turned and whole is not None:
            return _fp4_down(name, entry, scales, whole)
        return _fp4(name, entry, scales, whole, entry.numel * 2 // max(scales.numel, 1), divides=False)
    return _bytes(name, entry, scales, tensors.get(name + "_zero_point"), config)


def _bytes(
    name: str, entry: TensorEntry, scales: TensorEntry, points: TensorEntry | None, config: Mapping[str, Any]
) -> Made | None:
    import numpy as np

    shape = entry.shape
    height, columns = shape[-2:] if len(shape) > 1 else (1, math.prod(shape))
    matrices = math.prod(shape[:-2])
    block = config.get("weight_block_size") or next(
        (g["weights"]["block_structure"] for g in (config.get("config_groups") or {}).values()
         if g.get("weights") and g["weights"].get("block_structure")), (128, 128),
    )  # fmt: skip
    block = [int(one) for one in block.split("x")] if isinstance(block, str) else block
    own = scales.shape[len(shape) - 2 :] if scales.numel > matrices else ()
    own = own[::2] if len(own) == 4 else own
    if scales.dtype.name == "U8" and (*scales.shape[:-1], *(32 * one for one in scales.shape[-1:])) == shape:
        tall, wide = 1, 32
    elif scales.numel in (1, matrices):
        tall, wide = height, columns
    elif own in ((height,), (height, 1)):
        tall, wide = 1, columns
    elif len(own) == 2 and own == (-(-height // block[0]), -(-columns // block[1])):
        tall, wide = block
    elif len(own) == 2 and own[0] == height:
        tall, wide = 1, columns // own[1]
    else:
        return None
    down, across = -(-height // max(tall, 1)), -(-columns // max(wide, 1))

    def rows(first: int, last: int, tools: Tools) -> Any:
        kind = entry.dtype.kind == "float"
        raw: Any = (tools.read_floats if kind else tools.read)(entry, first * columns, last * columns)
        numbers = raw.reshape(last - first, columns).astype(np.float64)
        row = np.arange(first, last)
        band = np.minimum(row // height, scales.numel // max(down * across, 1) - 1) * down + row % height // tall
        low, high = int(band.min()), int(band.max()) + 1
        group = np.arange(columns) // wide
        if points is not None:
            zeros: Any = tools.read(points, low * across, high * across)
            numbers -= zeros.reshape(-1, across)[band - low][:, group]
        if scales.dtype.name == "U8":
            factors: Any = np.ldexp(1.0, tools.read(scales, low * across, high * across).astype(np.int64) - 127)
        else:
            factors = tools.read_floats(scales, low * across, high * across).astype(np.float64)
        return numbers * factors.reshape(-1, across)[band - low][:, group]

    return name, shape, (entry, scales, *(() if points is None else (points,))), columns, rows


def _blocks(tensors: Tensors, stem: str, entry: TensorEntry, config: Mapping[str, Any], values: Any) -> Made | None:
    import numpy as np

    scales = tensors.get(stem + "_scales")
    if scales is None or len(entry.shape) < 3:
        return None
    *lead, width, across, _ = entry.shape
    height = across * 32

    def rows(first: int, last: int, tools: Tools) -> Any:
        parts = []
        for matrix in range(first // height, -(-last // height)):
            top, bottom = max(first - matrix * height, 0), min(last - matrix * height, height)
            own = matrix * width, (matrix + 1) * width
            row = np.arange(top, bottom)
            held = _window(entry, across * 16, own, (top // 2, -(-bottom // 2)), tools).astype(np.int64)
            codes = held[:, row // 2 - top // 2] >> 4 * (row % 2) & 15
            power = _window(scales, across, own, (0, across), tools).astype(np.int64)[:, row // 32]
            parts.append((_e2m1(codes) * np.ldexp(1.0, power - 127)).T)
        return np.concatenate(parts)

    return stem, (*lead, height, width), (entry, scales), width, rows


def _qweight(tensors: Tensors, stem: str, entry: TensorEntry, config: Mapping[str, Any], values: Any) -> Made | None:
    import numpy as np

    scales, points, order = (tensors.get(stem + end) for end in ("scales", "qzeros", "g_idx"))
    if scales is None or len(entry.shape) != 2:
        return None
    groups, height = scales.shape
    is_awq = entry.shape[1] * 8 == height and entry.shape[1] != height
    packed = points.shape[1] if points is not None else 0
    bits = 4 if is_awq else packed * 32 // height if points is not None else int(config.get("bits") or 4)
    columns = entry.shape[0] if is_awq else entry.shape[0] * 32 // bits
    said = str(config.get("checkpoint_format") or config.get("format") or "").lower()
    is_told = config.get("quant_method", "gptq" if "bits" in config else "") == "gptq"
    more: Any = 0 if is_awq or said == "gptq_v2" else 1

    def nibbles(held: Any, first: int, last: int) -> Any:
        row = np.arange(first, last)
        return (
            held.view(np.uint32)[:, row // 8 - first // 8] >> (4 * np.array(_AWQ_NIBBLE)[row % 8]).astype(np.uint32)
            & 15
        )

    def rows(first: int, last: int, tools: Tools) -> Any:
        group = np.arange(columns) * groups // columns if order is None else tools.read(order, 0, columns)
        factors = np.stack([tools.read_floats(scales, g * height + first, g * height + last) for g in range(groups)])
        zeros: Any = np.full((groups, 1), 1 << bits - 1)
        if is_awq:
            part = first // 8, -(-last // 8)
            codes = nibbles(_window(entry, height // 8, (0, columns), part, tools), first, last)
            zeros = nibbles(_window(points, height // 8, (0, groups), part, tools), first, last)  # type: ignore[arg-type]
        else:
            held = _window(entry, height, (0, len(range(0, columns * bits, 32))), (first, last), tools)
            codes = _bits(held, 32, np.arange(columns) * bits, bits)
            if points is not None:
                held = _window(points, packed, (0, groups), (0, packed), tools)
                zeros = _bits(held.T, 32, np.arange(first, last) * bits, bits).T
                zeros += (
                    more
                    if is_told or config.get("packing_format") == "auto_round:auto_gptq"
                    else (1 << bits - 1) - zeros
                )
        numbers = (codes.astype(np.int64) - zeros.astype(np.int64)[group]) * factors.astype(np.float64)[group]
        return numbers.T

    inputs = tuple(one for one in (entry, scales, points, order) if one is not None)
    return f"{stem}weight", (height, columns), inputs, columns, rows


def _four_bits(tensors: Tensors, stem: str, entry: TensorEntry, config: Mapping[str, Any], values: Any) -> Made | None:
    import numpy as np

    codes, scales, table = (tensors.get(stem + end) for end in ("", ".absmax", ".quant_map"))
    if codes is None or scales is None or table is None:
        return None
    said = json.loads(bytes(values(entry)))
    size, shape = int(said["blocksize"]), tuple(said["shape"])
    of_scales, own = tensors.get(stem + ".nested_absmax"), tensors.get(stem + ".nested_quant_map")

    def rows(first: int, last: int, tools: Tools) -> Any:
        raw = _bytes_of(tools, codes, first, last, size // 2).astype(np.int64)
        each = np.arange(size)
        numbers = tools.read_floats(table, 0, 16)[raw[:, each // 2] >> 4 * (1 - each % 2) & 15]
        if of_scales is None or own is None:
            factors = tools.read_floats(scales, first, last)
        else:
            known: Any = tools.read(scales, first, last)
            wide = tools.read_floats(of_scales, 0, of_scales.numel)[
                np.arange(first, last) // int(said["nested_blocksize"])
            ]
            factors = (tools.read_floats(own, 0, 256)[known].astype(np.float64) * wide).astype(np.float32)
            factors = factors + np.float32(said["nested_offset"])
        return numbers.astype(np.float64) * factors.astype(np.float64)[:, None]

    inputs = tuple(one for one in (codes, scales, table, of_scales, own) if one is not None)
    return stem, shape, inputs, size, rows


def _scb(tensors: Tensors, stem: str, entry: TensorEntry, config: Mapping[str, Any], values: Any) -> Made | None:
    import numpy as np

    codes = tensors.get(stem + "weight")
    if codes is None or codes.dtype.name != "I8":
        return None
    columns = codes.shape[-1]

    def rows(first: int, last: int, tools: Tools) -> Any:
        raw = tools.read(codes, first * columns, last * columns).reshape(-1, columns).astype(np.float64)
        scaled = (raw * tools.read_floats(entry, first, last).astype(np.float64)[:, None]).astype(np.float32)
        return scaled.astype(np.float64) * np.float64(np.float32(1 / 127))

    return codes.name, codes.shape, (codes, entry), columns, rows


def _qdata(tensors: Tensors, stem: str, entry: TensorEntry, config: Mapping[str, Any], values: Any) -> Made | None:
    sign = entry.name[len(stem)]
    scales, points = (tensors.get(f"{stem}{sign}{end}") for end in ("scale", "zero_point"))
    if scales is None or entry.dtype.name not in ("I8", "F8_E4M3"):
        return None
    module, dot, last = stem.rpartition(".")
    return _bytes(f"{module}{dot}{last.lstrip('_')}", entry, scales, points, {})


def _mlx(tensors: Tensors, stem: str, entry: TensorEntry, config: Mapping[str, Any], values: Any) -> Made | None:
    import numpy as np

    scales, biases = tensors.get(stem + "scales"), tensors.get(stem + "biases")
    if scales is None or entry.dtype.name != "U32" or (biases is None) != (scales.dtype.name == "U8"):
        return None
    own = config.get(stem[:-1])
    said = own if isinstance(own, Mapping) else config
    bits = int(said["bits"]) if biases is not None else 8 if said["mode"] == "mxfp8" else 4
    words, across = entry.shape[-1], scales.shape[-1]
    columns = words * 32 // bits

    def rows(first: int, last: int, tools: Tools) -> Any:
        held: Any = tools.read(entry, first * words, last * words)
        codes = _bits(held.reshape(-1, words).T, 32, np.arange(columns) * bits, bits).T
        group = np.arange(columns) * across // columns
        if biases is None:
            powers: Any = (
                tools.read(scales, first * across, last * across).astype(np.int64).reshape(-1, across)[:, group]
            )
            factors = _e4m3(powers) if said["mode"] == "nvfp4" else np.ldexp(1.0, powers - 127)
            return (_e4m3(codes) if bits == 8 else _e2m1(codes)) * factors
        factors, more = (
            tools.read_floats(one, first * across, last * across).astype(np.float64).reshape(-1, across)[:, group]
            for one in (scales, biases)
        )
        return (codes * factors).astype(np.float32).astype(np.float64) + more

    inputs = (entry, scales, *(() if biases is None else (biases,)))
    return entry.name, (*entry.shape[:-1], columns), inputs, columns, rows


_ENDS: tuple[tuple[str, Callable[..., Made | None]], ...] = (
    ("_packed", _by_packed), ("_blocks", _blocks), ("qweight", _qweight), ("SCB", _scb), ("_qdata", _qdata), (":qdata", _qdata),
    (".quant_state.bitsandbytes__nf4", _four_bits), (".quant_state.bitsandbytes__fp4", _four_bits), ("weight", _mlx),
    ("", _weight),
)  # fmt: skip
"""Ends of tensors' names -> the function that reads such tensors."""

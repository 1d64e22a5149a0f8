"""Packed weights as the tensors that they stand for: one reader for each form that zckpt knows, which checks how its parts fit.

For `jobs.opened`. `forms` says by what a form is known, `coded` how codes become numbers; here is which tensor is which of these.
Sources are those of `forms`; bitsandbytes 0.50, functional.py (`QuantState.from_dict`, `dequantize_4bit`) and _ops.py
(`int8_vectorwise_dequant`); GPTQModel 7.7, nn_modules/qlinear/__init__.py (`dequantize_weight`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from zckpt.base.errors import COPY_AGAIN, CorruptError, InconsistentError
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.dtypes import BF16, F8_E4M3, F16, F32, I8, I32, I64, U8, U32, DType
from zckpt.core.recipes import derive_entry
from zckpt.quantized.coded import (
    BlockScales,
    Coded,
    Codes,
    Nested,
    Zeros,
    e2m1,
    file_of,
    floats_of_8_bits,
    signed_codes,
    turn,
    unsigned_codes,
)
from zckpt.quantized.configs import BLOCK, Quantization
from zckpt.quantized.grids import Grid, as_matrices, grid_of, in_dtype
from zckpt.quantized.packed import Packed, Part

_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
_INTO_INT8 = 0.007874015718698502
"""1 / 127 in fp32, as bitsandbytes has it."""
_MOST_VALUES = 1 << 16
"""The most bytes of a shape, or of a state in JSON."""

Values = Mapping[str, Any]
"""Name -> the elements of the tensors that tell how others are packed."""
Reader = Callable[[Part, Quantization, Values], Coded | None]


def unpack(
    catalog: Catalog, packed: Packed, quantization: Quantization | None, dtype: DType | None
) -> dict[str, TensorEntry]:
    """The tensors of packed ones' numbers: name of the codes -> the tensor. Forms that zckpt does not read are left out.
    `dtype`: that numbers are rounded to; None for fp32.

    Raises:
        InconsistentError: parts do not fit each other.
        CorruptError: what says how they are packed cannot be read.
    """
    parts = [part for part in packed.parts if part.form.read]
    values = _read_values(entry for part in parts for entry in _telling(part))
    known = quantization or Quantization("", "", is_read=False)
    found: dict[str, TensorEntry] = {}
    for part in parts:
        read = part.form.read
        recipe = (_READERS[read] if isinstance(read, str) else read)(part, known, values)
        if recipe is None:
            continue
        shape, name = recipe.shape, recipe.name
        if name in catalog.tensors and name not in part.names:
            raise InconsistentError(
                f"there are two tensors {name!r}, one of them packed", file=catalog.source.path,
                found=f"{name!r} and {part.codes.name!r}", expected="one of them",
                remedy="Leave the other out of the checkpoint.",
            )  # fmt: skip
        role = "frozen" if part.codes.role == "buffer" else part.codes.role
        wide = derive_entry(name, shape, F32, recipe, role)
        found[part.codes.name] = wide if dtype is None else in_dtype(wide, dtype, recipe.unit)
    return found


def _telling(part: Part) -> Iterable[TensorEntry]:
    """The tensors with elements that tell how others are packed."""
    if part.form.read == "bnb4":
        yield part.codes
    yield from (part.others[end] for end in ("_shape", "weight_format") if end in part.others)


def _read_values(entries: Iterable[TensorEntry]) -> Values:
    import numpy as np

    from zckpt.engine.elements import ElementReader, elements

    wanted = [entry for entry in entries if entry.dtype.numpy and entry.nbytes <= _MOST_VALUES]
    with ElementReader() as reader:
        reader.fetch_ahead([elements(entry, 0, entry.numel) for entry in wanted])
        return {
            entry.name: np.frombuffer(reader.read(elements(entry, 0, entry.numel)), entry.dtype.numpy)
            for entry in wanted
        }


def _misfit(part: Part, what: str, entry: TensorEntry, expected: str) -> InconsistentError:
    return InconsistentError(
        f"the {what} of tensor {part.codes.name!r} do not fit it", file=file_of(entry),
        found=f"{entry.name!r}, {entry.dtype} {list(entry.shape)}, for {part.codes.dtype} {list(part.codes.shape)} "
        f"({part.form.about})", expected=expected,
        remedy="Copy the checkpoint again, with the config.json that belongs to it; if it is intact, dequantise it with the "
        "library that wrote it.",
    )  # fmt: skip


# ---- E2M1 and powers of two -----------------------------------------------------------------------------------------------


def _nvfp4(part: Part, known: Quantization, values: Values) -> Coded:
    """A stack of experts of gpt-oss or Llama 4 is turned: a byte holds two rows, and each 16 rows of a column have a scale."""
    codes, scales, second = part.codes, *part.beside
    *lead, half, width = codes.shape if len(codes.shape) > 2 else (0, 0)
    if lead and scales.shape == (*lead, half // 8, width) and half % 8 == 0 and second.numel in (1, math.prod(lead)):
        packing = Codes(codes, 4, 2 * half, width, width, downwards=True)
        grid = Grid(math.prod(lead), 2 * half, width, 16, 1)
        return Coded(
            part.stem, (*lead, 2 * half, width), packing, e2m1(has_minus_zero=False), grid, BlockScales(scales, second)
        )
    across = scales.shape[-1] if scales.shape else 0
    groups = sorted(
        known.groups_of_nvfp4, key=lambda one: (not codes.shape or one * across != 2 * codes.shape[-1], one)
    )
    return _in_groups(part, part.stem, 4, e2m1(has_minus_zero=False), groups[0], second)


def _nvfp4_divided(part: Part, known: Quantization, values: Values) -> Coded:
    return _in_groups(part, part.stem, 4, e2m1(), 16, part.beside[1], divides=True)


def _mxfp4(part: Part, known: Quantization, values: Values) -> Coded:
    return _in_groups(part, part.stem, 4, e2m1(), 32)


def _mxfp8(part: Part, known: Quantization, values: Values) -> Coded:
    return _in_groups(part, part.stem, 8, floats_of_8_bits(part.codes.dtype), 32)


def _fp8_by_powers(part: Part, known: Quantization, values: Values) -> Coded:
    return _of_bytes(part, part.stem, grid_of(part.codes.shape, part.beside[0].shape, known.block), "")


def _in_groups(
    part: Part,
    name: str,
    bits: int,
    table: tuple[float, ...],
    group: int,
    second: TensorEntry | None = None,
    *,
    divides: bool = False,
) -> Coded:
    """The numbers of rows of bytes, with a scale for every `group` elements."""
    codes, scales = part.codes, part.beside[0]
    *lead, stored = codes.shape or (1,)
    columns = stored * 8 // bits
    if columns % group or scales.shape != (*lead, columns // group):
        raise _misfit(
            part,
            "scales",
            scales,
            f"{[*lead, -(-columns // group)]}: one for {group} elements; a row is a multiple of them",
        )
    if second is not None and second.numel not in (1, math.prod(lead[:-1])):
        raise _misfit(part, "scales", second, "one, or one for each matrix")
    rows = codes.numel * 8 // bits // group
    factors = BlockScales(scales, second, divides)
    packing = Codes(codes, bits, rows, group, group * bits // 8)
    return Coded(name, (*lead, columns), packing, table, Grid(1, rows, group, 1, group), factors)


def _gpt_oss(part: Part, known: Quantization, values: Values) -> Coded:
    codes, scales = part.codes, part.beside[0]
    if codes.shape != (*scales.shape, 16) or len(scales.shape) < 2:
        raise _misfit(part, "scales", scales, "one for each 16 bytes")
    *lead, rows, across, _ = codes.shape
    matrices = math.prod(lead)
    turned, factors = turn(codes, matrices, rows, 16 * across), turn(scales, matrices, rows, across)
    packing = Codes(turned, 4, 32 * across, rows, rows, downwards=True)
    grid = Grid(matrices, 32 * across, rows, 32, 1)
    name = codes.name.removesuffix("_blocks")
    return Coded(name, (*lead, 32 * across, rows), packing, e2m1(), grid, BlockScales(factors))


# ---- whole numbers --------------------------------------------------------------------------------------------------------


def _packed_integers(part: Part, known: Quantization, values: Values) -> Coded | None:
    codes, scales = part.codes, part.beside[0]
    told, order = part.others.get("_shape"), part.others.get("_g_idx")
    if told is None or told.name not in values:
        return None
    shape = tuple(map(int, values[told.name]))
    if len(shape) < 2 or shape[:-1] != codes.shape[:-1] or shape[-1] < 1:
        raise _misfit(part, "shape", told, f"{list(codes.shape[:-1])} and the number of columns, not {list(shape)}")
    matrices, rows, columns = as_matrices(shape)
    fits = {bits for bits in range(1, 9) if -(-columns * bits // 32) == codes.shape[-1]}
    said = [one for one in known.weights if one.get("type") == "int"]
    groups = [one for one in said if one.get("num_bits") in fits]
    if said and not groups:
        raise _misfit(part, "codes", codes, f"{columns} columns of {said[0].get('num_bits')} bits, as config.json says")
    if len(fits) > 1:
        fits &= {int(one["num_bits"]) for one in groups} or {4, 8}
    if len(fits) != 1:
        raise _misfit(
            part,
            "codes",
            told,
            f"words for columns of 1 to 8 bits, or a config that says how many; {columns} columns are told",
        )
    bits = fits.pop()
    grid = _grid_of_groups(part, shape, scales, [one for one in groups if one["num_bits"] == bits])
    offset = 1 << bits - 1
    zeros = part.others.get("_zero_point")
    points = None
    _check_zeros(part, zeros, groups)
    if zeros is not None and (zeros.dtype, zeros.shape) == (I8, scales.shape):  # before 0.9
        points = Zeros(Codes(zeros, 8, grid.down, grid.across, grid.across), 0, is_signed=True)
    elif zeros is not None:
        whole = (*shape[:-2], -(-grid.down * bits // 32), grid.across)
        if zeros.shape != whole or zeros.dtype not in (I32, U32):
            raise _misfit(part, "zero points", zeros, f"{list(whole)}: {bits} bits, packed along the rows")
        points = Zeros(Codes(zeros, bits, grid.down, grid.across, grid.across, downwards=True), -offset)
    packing = Codes(codes, bits, rows, columns, codes.shape[-1])
    ordered = Grid(matrices, rows, columns, 1, 1) if order is not None else grid
    if order is not None and (order.shape != (columns,) or order.dtype not in (I32, I64)):
        raise _misfit(part, "groups of columns", order, f"I32 {[columns]}")
    return Coded(
        part.stem,
        shape,
        packing,
        unsigned_codes(bits, offset),
        ordered,
        BlockScales(scales),
        points,
        order,
        grid.across,
        may_lack_order=True,
    )


def _check_zeros(part: Part, zeros: TensorEntry | None, said: Sequence[Mapping[str, Any]]) -> None:
    """Checks that zero points are there if a config says so; raises InconsistentError."""
    if zeros is None and said and all(one.get("symmetric") is False for one in said):
        raise _misfit(
            part, "zero points", part.codes, "weight_zero_point beside it, since config.json says symmetric: false"
        )


def _check_groups(part: Part, known: Quantization, columns: int, groups: int) -> None:
    """Checks that there are as many groups as GPTQ's or AWQ's config says for all modules; raises InconsistentError."""
    said = known.facts.get("group_size", known.facts.get("q_group_size"))
    if not isinstance(said, int) or known.facts.get("dynamic") or known.facts.get("extra_config"):
        said = 0
    if columns < 1 or groups < 1 or (said > 0 and -(-columns // said) != groups) or (said == -1 and groups != 1):
        raise _misfit(
            part, "scales", part.beside[-1], f"groups of {said or 1} columns or more, of {columns}, as the config says"
        )


def _grid_of_groups(part: Part, shape: tuple[int, ...], scales: TensorEntry, said: list[Mapping[str, Any]]) -> Grid:
    """The grid of scales for one tensor (a row each) or for groups of columns, as the config has it, if it says
    anything.
    """
    grid = grid_of(shape, scales.shape, BLOCK, has_groups=True)
    if grid is None:
        raise _misfit(
            part, "scales", scales, f"one, one for each row, or one for groups of equal size, of {list(shape)}"
        )
    sizes = {one.get("group_size") or -1 for one in said}
    if said and scales.numel == 1 != math.prod(shape[:-1]) and all(one.get("strategy") != "tensor" for one in said):
        raise _misfit(part, "scales", scales, "one for each row or group, as config.json says")
    width = grid.block_columns if grid.across > 1 else grid.columns
    if sizes and width not in sizes and not (-1 in sizes and grid.across == 1):
        raise _misfit(
            part, "scales", scales, f"groups of {' or '.join(map(str, sorted(sizes)))} columns, as config.json says"
        )
    return grid


def _int8(part: Part, known: Quantization, values: Values) -> Coded:
    shape = part.codes.shape
    said = [one for one in known.weights if one.get("type") == "int"]
    if (known.weights and not said) or str(known.facts.get("quant_algo")).startswith("FP8"):
        raise _misfit(part, "codes", part.codes, "floats of 8 bits, as config.json says")
    _check_zeros(part, part.others.get("_zero_point"), said)
    if said and all(one.get("strategy") == "channel" for one in said) and part.beside[0].numel != math.prod(shape[:-1]):
        raise _misfit(part, "scales", part.beside[0], "one for each row, as config.json says")
    return _of_bytes(part, part.stem, grid_of(shape, part.beside[0].shape, known.block, has_groups=True), "_zero_point")


def _of_torchao(part: Part, known: Quantization, values: Values) -> Coded | None:
    scales = part.beside[0]
    if not scales.name.endswith("scale") or scales.dtype.kind != "float" or part.codes.dtype not in (I8, F8_E4M3):
        return None
    module, _, last = part.stem.rpartition(".")
    name = f"{module}.{last.removeprefix('_')}" if module else last.removeprefix("_")
    ends = [end for end in part.others if end.endswith("zero_point")]
    return _of_bytes(
        part, name, grid_of(part.codes.shape, scales.shape, BLOCK, has_groups=True), ends[0] if ends else ""
    )


def _of_bytes(part: Part, name: str, grid: Grid | None, zeros: str) -> Coded:
    """The numbers of elements of one byte, with scales and perhaps zero points for blocks."""
    codes, scales, points = part.codes, part.beside[0], part.others.get(zeros)
    if grid is None:
        raise _misfit(part, "scales", scales, "one, one for each row, or one for each block")
    if points is not None and (points.shape != scales.shape or points.dtype != I8):
        raise _misfit(part, "zero points", points, f"I8 {list(scales.shape)}")
    own = None if points is None else Zeros(Codes(points, 8, grid.down, grid.across, grid.across), 0, is_signed=True)
    packing = Codes(codes, 8, grid.rows, grid.columns, grid.columns)
    return Coded(name, codes.shape, packing, floats_of_8_bits(codes.dtype), grid, BlockScales(scales), own)


def _gptq(part: Part, known: Quantization, values: Values) -> Coded | None:
    codes, scales, zeros = part.codes, part.beside[-1], part.others.get("qzeros")
    order = part.beside[0] if len(part.beside) > 1 else None
    if len(codes.shape) != 2 or len(scales.shape) != 2 or scales.shape[1] != codes.shape[1]:
        raise _misfit(part, "scales", scales, "a matrix with as many columns")
    (words, rows), (groups, _) = codes.shape, scales.shape
    version = known.version_of_gptq
    if version not in ("gptq", "gptq_v2", ""):
        return None
    if known.otherwise:
        raise InconsistentError(
            f"two files say otherwise of the zero points of tensor {codes.name!r}", file=file_of(codes),
            found=f"{version!r} in config.json, and {known.otherwise}", expected="one of them in both",
            remedy="Leave the wrong one out of the directory: of GPTQModel's outputs, both say the same.",
        )  # fmt: skip
    if zeros is not None and len(zeros.shape) == 2:
        bits = zeros.shape[1] * 32 // rows
    elif zeros is not None or not known.is_symmetric:
        return None  # nothing says what zero points are
    else:
        bits = words * 32 // max(1, order.numel) if order is not None else known.bits
        if not bits:
            return None
    columns = words * 32 // bits if bits else 0
    if bits not in (2, 3, 4, 8) or columns * bits != words * 32:
        raise _misfit(part, "zero points", zeros or scales, "words of 2, 3, 4 or 8 bits for each column")
    if order is not None and order.shape != (columns,):
        raise _misfit(part, "groups of columns", order, f"{[columns]}")
    if (other := part.others.get("g_idx")) is not None:
        raise _misfit(part, "groups of columns", other, f"I32 {[columns]}")
    _check_groups(part, known, columns, groups)
    if order is None and known.facts.get("desc_act") is True:
        raise _misfit(part, "groups of columns", codes, "g_idx beside it, since the config says desc_act")
    if order is None and columns % groups:
        raise _misfit(part, "scales", scales, f"groups of equal size, of {columns} columns")
    points = None
    if zeros is not None:
        if zeros.shape != (groups, rows * bits // 32) or zeros.dtype not in (I32, U32):
            raise _misfit(part, "zero points", zeros, f"{[groups, rows * bits // 32]}")
        stored = turn(zeros, 1, *zeros.shape)
        own = Codes(stored, bits, rows, groups, groups, downwards=True)
        by_version = {"gptq": Zeros(own, 1, refused=(1 << bits) - 1), "gptq_v2": Zeros(own, 0)}
        points = by_version.get(version, Zeros(own, 0, middle=1 << bits - 1))
    packing = Codes(turn(codes, 1, words, rows), bits, rows, columns, words)
    grid = Grid(1, rows, columns, 1, 1 if order is not None else columns // groups)
    table = unsigned_codes(bits, 0 if zeros is not None else 1 << bits - 1)
    factors = BlockScales(turn(scales, 1, groups, rows))
    return Coded(f"{part.stem}weight", (rows, columns), packing, table, grid, factors, points, order, groups)


def _awq(part: Part, known: Quantization, values: Values) -> Coded | None:
    codes, scales, zeros = part.codes, part.beside[0], part.others.get("qzeros")
    if known.version_of_awq != "gemm" or zeros is None:
        return None
    (columns, words), groups = codes.shape, scales.shape[0]
    _check_groups(part, known, columns, groups)
    if columns % groups:
        raise _misfit(part, "scales", scales, f"groups of equal size, of {columns} columns")
    if zeros.shape != (groups, words) or zeros.dtype not in (I32, U32):
        raise _misfit(part, "zero points", zeros, f"{[groups, words]}")
    rows = 8 * words
    packing = Codes(turn(codes, 1, columns, words), 4, rows, columns, columns, downwards=True, order=_AWQ)
    points = Zeros(Codes(turn(zeros, 1, groups, words), 4, rows, groups, groups, downwards=True, order=_AWQ), 0)
    grid, factors = Grid(1, rows, columns, 1, columns // groups), BlockScales(turn(scales, 1, groups, rows))
    return Coded(f"{part.stem}weight", (rows, columns), packing, unsigned_codes(4), grid, factors, points)


def _mlx(part: Part, known: Quantization, values: Values) -> Coded | None:
    """Groups with a scale and a bias; a config says for each module, or for all others, how wide codes and groups are."""
    codes, scales, biases = part.codes, part.beside[0], part.others.get("biases")
    own = known.facts.get(part.stem.removesuffix("."))
    said = own if isinstance(own, Mapping) else known.facts
    bits, group, mode = said.get("bits"), said.get("group_size"), said.get("mode", "affine")
    if mode in _MLX_MODES and biases is None and scales.dtype == U8:
        (bits, group, dtype), table = _MLX_MODES[mode], e2m1() if mode != "mxfp8" else floats_of_8_bits(F8_E4M3)
        scales = replace(scales, dtype=dtype)
    elif biases is None or mode != "affine" or scales.dtype.kind != "float":
        return None
    else:
        table = unsigned_codes(bits) if isinstance(bits, int) and 1 <= bits <= 8 else ()
    if not isinstance(bits, int) or not isinstance(group, int) or not 1 <= bits <= 8 or group < 1:
        return None
    *lead, words = codes.shape
    columns = words * 32 // bits
    if words * 32 % bits or columns % group or scales.shape != (*lead, columns // group):
        raise _misfit(part, "scales", scales, f"one for {group} columns of {bits} bits, as config.json says")
    if biases is not None and (biases.shape, biases.dtype) != (scales.shape, scales.dtype):
        raise _misfit(part, "biases", biases, f"{list(scales.shape)} of {scales.dtype}, as scales are")
    rows = math.prod(lead)
    packing, grid = Codes(codes, bits, rows, columns, words), Grid(1, rows, columns, 1, group)
    shape = (*lead, columns)
    return Coded(codes.name, shape, packing, table, grid, BlockScales(scales), biases=biases)


# ---- bitsandbytes ---------------------------------------------------------------------------------------------------------


def _bnb_4_bits(part: Part, known: Quantization, values: Values) -> Coded | None:
    codes, scales, table = (part.others.get(end) for end in ("", ".absmax", ".quant_map"))
    if codes is None or scales is None or table is None:
        return None
    try:
        said = json.loads(bytes(values[part.codes.name]))
        shape, size = tuple(map(_as_size, said["shape"])), _as_size(said["blocksize"])
        rows = -(-math.prod(shape) // size)
        nested = None
        if (of_scales := part.others.get(".nested_absmax")) is not None:
            own, step = part.others[".nested_quant_map"], _as_size(said["nested_blocksize"])
            nested = Nested(own, of_scales, step, float(said["nested_offset"]))
    except (KeyError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise CorruptError(
            f"the state of tensor {part.stem!r} cannot be read", file=file_of(codes),
            found=f"{type(error).__name__}: {error}", expected="JSON with a shape and the size of blocks", remedy=COPY_AGAIN,
        ) from error  # fmt: skip
    width = codes.dtype.itemsize
    if (
        size % (2 * width)
        or -(-math.prod(shape) // (2 * width)) * width != codes.nbytes
        or codes.dtype not in (U8, I8, BF16, F16, F32)
    ):
        raise _misfit(part, "codes", codes, f"two in a byte, for {list(shape)} in blocks of {size}")
    if scales.numel != rows or table.numel != 16 or (nested and nested.scales.numel != -(-rows // nested.size)):
        raise _misfit(part, "scales", scales, f"one for {size} elements of {list(shape)}, and a table of 16")
    for one, numel in (
        (table, 16),
        *(((nested.table, 256), (nested.scales, nested.scales.numel)) if nested else ((scales, rows),)),
    ):
        if one.numel != numel or one.dtype not in (F32, F16, BF16):
            raise _misfit(part, "scales", one, f"floats, {numel} of them")
    if nested is not None and scales.dtype != U8:
        raise _misfit(part, "scales", scales, "U8, places in a table")
    packing = Codes(codes, 4, rows, size, size // 2 // width, high_first=True)
    return Coded(part.stem, shape, packing, table, Grid(1, rows, size, 1, size), BlockScales(scales, nested=nested))


def _as_size(said: object) -> int:
    """A size in a state. Raises ValueError if it is no whole number from 1 on."""
    if type(said) is not int or said < 1:
        raise ValueError(f"{said!r:.40} is no size")
    return said


def _bnb_int8(part: Part, known: Quantization, values: Values) -> Coded | None:
    told = part.others.get("weight_format")
    if told is not None and (told.name not in values or values[told.name].any()):
        return None
    codes, scales = part.codes, part.beside[0]
    *lead, columns = codes.shape
    if scales.numel != math.prod(lead):
        raise _misfit(part, "scales", scales, f"one for each row of {list(codes.shape)}")
    rows = scales.numel
    grid, packing = Grid(1, rows, columns, 1, max(1, columns)), Codes(codes, 8, rows, columns, columns)
    return Coded(codes.name, codes.shape, packing, signed_codes(8), grid, BlockScales(scales), last=_INTO_INT8)


_MLX_MODES: Mapping[str, tuple[int, int, DType]] = {
    "mxfp4": (4, 32, U8),
    "mxfp8": (8, 32, U8),
    "nvfp4": (4, 16, F8_E4M3),
}
"""Modes of MLX without biases -> bits of a code, columns of a scale, and what the bytes of scales are.

Source: mlx 0.32.4, backend/cpu/quantized.cpp (`fp_quantize`).
"""

_READERS: Mapping[str, Reader] = {
    "nvfp4": _nvfp4, "nvfp4, divided": _nvfp4_divided, "mxfp4": _mxfp4, "mxfp8": _mxfp8, "gpt-oss": _gpt_oss,
    "fp8 by powers": _fp8_by_powers,
    "packed integers": _packed_integers, "int8": _int8, "torchao": _of_torchao, "gptq": _gptq, "awq": _awq,
    "bnb4": _bnb_4_bits, "bnb8": _bnb_int8, "mlx": _mlx,
}  # fmt: skip

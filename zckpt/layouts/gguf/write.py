"""Lays a model out in GGUF files.

For `jobs.to_gguf`. Which type a tensor gets is as llama.cpp's converter has it: what has one dimension, norms, biases and the
weights of routers stay fp32, and rows not a multiple of a block's elements become F16. What its quantiser makes of such a
file has a mixture of types, as `llama-quantize` chooses them.
[Note: more bits] Of layers, the first eighth, the last one, and every third one between are worth more bits. The
index of a layer is that of the tensor among its kind, in the order in which the quantiser writes them; with experts it is the
number in the name.
Source: llama.cpp, convert_hf_to_gguf.py `prepare_tensors`; gguf-py 0.19.0, gguf_writer.py (splits); src/llama-quant.cpp
(`llama_tensor_get_type_impl`, `tensor_type_fallback`, of 2026), llama-model-loader.h (`weight_name_comparer`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UnsupportedError
from zckpt.base.sizes import group_by_size
from zckpt.containers.gguf_file import BY_DTYPE, BY_NAME, Q8_0, GgmlType, GgufSpec, GgufValue, skeleton
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import BF16, F16, F32
from zckpt.core.fragments import Fragment
from zckpt.core.plan import OutputFile, Pair, Plan
from zckpt.core.stores import FileStore
from zckpt.layouts.gguf.blocks import in_blocks
from zckpt.layouts.gguf.importance import ImportanceMatrix

BASES = {
    "q4_0": "Q4_0", "q4_1": "Q4_1", "q5_0": "Q5_0", "q5_1": "Q5_1", "q4_k_m": "Q4_K", "q5_k_m": "Q5_K", "q6_k": "Q6_K",
    "mxfp4": "MXFP4",
}  # fmt: skip
"""The types that a user can ask for -> the type of most matrices."""

_INSTEAD = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""Types of 256 numbers -> types of 32, for rows that are not a multiple of 256."""
_LAYER = re.compile(r"blk\.(\d+)\.")
_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
_HEAD = "output.weight"


@dataclass(frozen=True, slots=True)
class Mixed:
    """The facts of the model that decide the choice, beside names and shapes.

    Attributes:
        layers: of the model.
        experts: of each layer; 0 for none.
        is_70b: whether it is what llama.cpp calls a 70B: several heads share their values.
        weighted: whether there is an importance matrix.
    """

    layers: int
    experts: int = 0
    is_70b: bool = False
    weighted: bool = False


def in_order(names: Sequence[str]) -> list[str]:
    """Names of tensors in the order in which llama.cpp's quantiser writes them: without a layer, then layer by layer."""
    return sorted(names, key=lambda name: (_layer_of(name), name.encode()))


def mixed_types(shapes: Sequence[tuple[str, tuple[int, ...]]], kind: str, model: Mixed) -> dict[str, GgmlType]:
    """The types of matrices.

    Args:
        shapes: names and shapes of all matrices that may be quantised, in the order of `in_order`.
        kind: what was asked for.
        model: what else it depends on.
    """
    names = [name for name, _ in shapes]
    values, is_tied = sum("attn_v.weight" in name for name in names), _HEAD not in names
    seen_values = seen_down = 0
    found: dict[str, GgmlType] = {}
    for name, shape in shapes:
        chosen, base = BASES[kind], BY_NAME[BASES[kind]]
        if name == _HEAD or (is_tied and name in _EMBEDDINGS):
            chosen = "Q8_0" if kind == "mxfp4" or shape[-1] % base.block else "Q6_K"
        elif kind == "mxfp4":
            chosen = "MXFP4" if len(shape) > 2 and shape[0] > 1 else "Q8_0"
        elif "attn_v.weight" in name:
            chosen = _of_values(chosen, kind, more_bits(seen_values, values), model)
            seen_values += 1
        elif "attn_k.weight" in name and model.experts == 8:
            chosen = "Q8_0"
        elif "ffn_down" in name:
            layer = _layer_of(name) if model.experts > 1 else seen_down
            if kind in ("q4_k_m", "q5_k_m") and more_bits(layer, model.layers):
                chosen = "Q6_K"
            elif kind in ("q4_0", "q5_0") and model.weighted and layer < model.layers // 8:
                chosen = chosen[:-1] + "1"
            seen_down += 1
        elif "attn_output.weight" in name and model.experts == 8 and kind == "q4_k_m":
            chosen = "Q5_K"
        found[name] = _that_fits(chosen, shape[-1])
    return found


def more_bits(layer: int, layers: int) -> bool:
    """Whether a layer is worth more bits; see [Note: more bits]."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _of_values(chosen: str, kind: str, more: bool, model: Mixed) -> str:
    """The type for the values of attention."""
    if model.experts == 8:
        return "Q8_0"
    if more and kind in ("q4_k_m", "q5_k_m"):
        return "Q6_K"
    return "Q5_K" if model.is_70b and chosen == "Q4_K" else chosen


def _that_fits(chosen: str, columns: int) -> GgmlType:
    """The chosen type if it fits the columns, or one with smaller blocks, or fp16."""
    for name in (chosen, _INSTEAD.get(chosen, chosen)):
        if columns % BY_NAME[name].block == 0:
            return BY_NAME[name]
    return BY_NAME["F16"]


def _layer_of(name: str) -> int:
    match = _LAYER.match(name)
    return -1 if match is None else int(match[1])


TYPES: dict[str, GgmlType] = {
    "f32": BY_DTYPE[F32],
    "f16": BY_DTYPE[F16],
    "bf16": BY_DTYPE[BF16],
    "q8_0": Q8_0,
    **{asked: BY_NAME[name] for asked, name in BASES.items()},
}
"""The types that a user can ask for."""

FILE_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q4_k_m": 15, "q5_k_m": 17, "q6_k": 18, "bf16": 32,
    "mxfp4": 38,
}  # fmt: skip
"""The numbers of `general.file_type`."""

_KEPT = ("_norm.weight", ".ffn_gate_inp.weight", ".ffn_gate_inp_shexp.weight")
_MOST_PARTS = 65535
"""The number of parts is stored in 16 bits."""


def types_of(tensors: Sequence[TensorEntry], asked: str, model: Mixed) -> dict[str, GgmlType]:
    """The type that each tensor gets, in the order in which they are written.

    Args:
        tensors: under GGUF's names, in the converter's order.
        asked: one of `TYPES`.
        model: what a mixture of types depends on.
    """
    matrices = {entry.name: entry.shape for entry in tensors if not _is_kept(entry)}
    if asked not in BASES:
        kind = TYPES[asked]
        fits = {name: TYPES["f16"] if shape[-1] % kind.block else kind for name, shape in matrices.items()}
        return {entry.name: fits.get(entry.name, TYPES["f32"]) for entry in tensors}
    names = in_order([entry.name for entry in tensors])
    mixed = mixed_types([(name, matrices[name]) for name in names if name in matrices], asked, model)
    return {name: mixed.get(name, TYPES["f32"]) for name in names}


def _is_kept(entry: TensorEntry) -> bool:
    """Whether a tensor is always fp32."""
    return len(entry.shape) < 2 or entry.name.endswith(_KEPT) or not entry.name.endswith(".weight")


def as_written(metadata: Mapping[str, GgufValue], asked: str, matrix: ImportanceMatrix | None) -> dict[str, GgufValue]:
    """The metadata in the order of the program that writes such a type: llama.cpp's quantiser puts the type last."""
    if asked not in BASES:
        return dict(metadata)
    last = {key: metadata[key] for key in ("general.quantization_version", "general.file_type")}
    first = {key: value for key, value in metadata.items() if key not in last}
    return {**first, **last, **({} if matrix is None else matrix.facts)}


def lay_out(
    tensors: Sequence[TensorEntry],
    types: Mapping[str, GgmlType],
    metadata: Mapping[str, GgufValue],
    stem: str,
    most_bytes: int | None = None,
    matrix: ImportanceMatrix | None = None,
) -> Plan:
    """Lays out the files.

    Args:
        tensors: under GGUF's names; shapes as in torch.
        types: of each, in the order in which they are written.
        metadata: of the model.
        stem: the files' name without suffix and number.
        most_bytes: of tensors in one part; None for a single file.
        matrix: an importance matrix; None for none.

    Raises:
        UnsupportedError: GGUF cannot hold a tensor, or so many parts.
    """
    shapes = {entry.name: entry.shape for entry in tensors}
    specs = [GgufSpec(name, kind, shapes[name]) for name, kind in types.items()]
    parts = _split_parts(specs, most_bytes)
    if len(parts) > _MOST_PARTS:
        raise UnsupportedError(
            "the model would have too many parts", found=f"{len(parts):,}", expected=f"at most {_MOST_PARTS:,}",
            remedy="Use a greater --split-max-size.",
        )  # fmt: skip
    entries = {entry.name: entry for entry in tensors}
    files: list[tuple[OutputFile, FileStore]] = []
    pairs: list[Pair] = []
    for number, part in enumerate(parts):
        values = dict(metadata) if number == 0 else {}
        name = f"{stem}.gguf"
        if len(parts) > 1:
            name = f"{stem}-{number + 1:05d}-of-{len(parts):05d}.gguf"
            values["split.no"] = GgufValue("u16", number)
            values["split.count"] = GgufValue("u16", len(parts))
            values["split.tensors.count"] = GgufValue("i32", len(specs))
        frame = skeleton(part, values)
        store = FileStore(name, frame.size)
        files.append((OutputFile(name, frame.size, frame.literals), store))
        for spec in part:
            source = entries[spec.name]
            if spec.type.block > 1:
                weighting = None if matrix is None else matrix.of(spec.name, spec.shape)
                source = in_blocks(source, spec.type, weighting)
            numel = 1
            for extent in spec.stored:
                numel *= extent
            place = (Fragment(store, frame.offsets[spec.name], 0, numel),)
            to = replace(source, shape=spec.stored, dtype=spec.type.dtype, fragments=place, replicas=())
            pairs.append((source, to))
    return Plan(tuple(files), pairs)


def _split_parts(specs: Sequence[GgufSpec], most_bytes: int | None) -> list[list[GgufSpec]]:
    """The tensors of each part: as many as fit, and at least one."""
    if most_bytes is None:
        return [list(specs)]
    return group_by_size(((spec, spec.nbytes) for spec in specs), most_bytes) or [[]]

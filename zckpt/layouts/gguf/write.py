"""Lays a model out in GGUF files.

For `jobs.to_gguf`. Which type a tensor gets is as llama.cpp's converter has it: what has one dimension, norms, biases and the
weights of routers stay fp32, and rows that are no multiple of a block's elements become F16.
Source: llama.cpp, convert_hf_to_gguf.py `prepare_tensors`; gguf-py 0.19.0, gguf_writer.py (splits).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UnsupportedError
from zckpt.containers.gguf_file import BY_DTYPE, Q8_0, GgmlType, GgufSpec, GgufValue, skeleton
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import BF16, F16, F32
from zckpt.core.fragments import Fragment
from zckpt.core.plan import OutputFile, Pair
from zckpt.core.stores import FileStore
from zckpt.layouts.gguf.blocks import in_blocks

TYPES = {"f32": BY_DTYPE[F32], "f16": BY_DTYPE[F16], "bf16": BY_DTYPE[BF16], "q8_0": Q8_0}
"""Types that can be asked for."""

FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}
"""The numbers of `general.file_type`."""

_KEPT = ("_norm.weight", ".ffn_gate_inp.weight", ".ffn_gate_inp_shexp.weight")
_MOST_PARTS = 65535
"""The number of parts is stored in 16 bits."""


def type_of(entry: TensorEntry, asked: GgmlType) -> GgmlType:
    """The type that a tensor gets."""
    if len(entry.shape) < 2 or entry.name.endswith(_KEPT) or not entry.name.endswith(".weight"):
        return TYPES["f32"]
    return TYPES["f16"] if entry.shape[-1] % asked.block else asked


@dataclass(frozen=True, slots=True)
class GgufLayout:
    """Files to be written, and each tensor's source and place in them."""

    files: tuple[tuple[OutputFile, FileStore], ...]
    pairs: tuple[Pair, ...]


def lay_out(
    tensors: Sequence[TensorEntry],
    asked: GgmlType,
    metadata: Mapping[str, GgufValue],
    stem: str,
    most_bytes: int | None = None,
) -> GgufLayout:
    """Lays out the files.

    Args:
        tensors: under GGUF's names, in order; shapes as in torch.
        asked: the type of what is not kept in fp32.
        metadata: of the model.
        stem: the files' name without suffix and number.
        most_bytes: of tensors in one part; None for a single file.

    Raises:
        UnsupportedError: GGUF cannot hold a tensor, or so many parts.
    """
    specs = [GgufSpec(entry.name, type_of(entry, asked), entry.shape) for entry in tensors]
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
            if spec.type is Q8_0:
                source = in_blocks(source)
            numel = 1
            for extent in spec.stored:
                numel *= extent
            place = (Fragment(store, frame.offsets[spec.name], 0, numel),)
            to = replace(source, shape=spec.stored, dtype=spec.type.dtype, fragments=place, replicas=())
            pairs.append((source, to))
    return GgufLayout(tuple(files), tuple(pairs))


def _split_parts(specs: Sequence[GgufSpec], most_bytes: int | None) -> list[list[GgufSpec]]:
    """The tensors of each part: as many as fit, and at least one."""
    parts: list[list[GgufSpec]] = [[]]
    held = 0
    for spec in specs:
        if most_bytes is not None and parts[-1] and held + spec.nbytes > most_bytes:
            parts.append([])
            held = 0
        parts[-1].append(spec)
        held += spec.nbytes
    return parts

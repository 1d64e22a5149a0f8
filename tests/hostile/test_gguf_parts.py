"""GGUF of each type whose index says another type, shape or place of a tensor: an error names one, or no file tells."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import proofs
import pytest

import zckpt
from zckpt.containers.gguf_file import BY_NUMBER, GgmlType
from zckpt.engine.elements import ElementReader, elements

NAMES = ("blk.0.attn_q.weight", "blk.0.attn_v.weight", "output.weight")
SHAPE, ALIGNMENT = (6, 512), 32


def write(path: Path, kind: GgmlType) -> bytes:
    """A file of three matrices, by the gguf package."""
    writer, dice = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    for name in NAMES:
        blocks = dice.integers(0, 60, (SHAPE[0], SHAPE[1] // kind.block * kind.nbytes)).astype(np.uint8)
        writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType[kind.name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def numbers(path: Path) -> dict[str, tuple[tuple[int, ...], bytes]]:
    with zckpt.open_checkpoint(path) as opened, ElementReader() as reader:
        catalog = opened.catalog
        return {
            name: (one.shape, bytes(reader.read(elements(one, 0, one.numel))) if one.numel else b"")
            for name, one in catalog.tensors.items()
        }


def room(kind: GgmlType, shape: tuple[int, ...]) -> int:
    """The bytes that a tensor takes in a file; -1 where rows are no whole blocks."""
    if shape[-1] % kind.block:
        return -1
    return -(-int(np.prod(shape)) // kind.block * kind.nbytes // ALIGNMENT) * ALIGNMENT


def mutations(kind: GgmlType, number: int) -> Iterator[tuple[str, GgmlType, tuple[int, ...], int]]:
    """What an index may say: a word for it, and type, shape and offset."""
    rows, columns = SHAPE
    own = room(kind, SHAPE)
    for other in BY_NUMBER.values():
        if other is not kind:
            yield f"as {other.name}", other, SHAPE, number * own
    for what, shape in {
        "half the columns": (rows, columns // 2), "columns doubled": (rows, columns * 2), "half the rows": (rows // 2, columns),
        "a row less": (rows - 1, columns), "a row more": (rows + 1, columns), "rows doubled": (rows * 2, columns),
        "no rows": (0, columns), "transposed": (columns, rows), "flat": (rows * columns,), "a stack": (2, rows // 2, columns),
    }.items():  # fmt: skip
        yield what, kind, shape, number * own
    for what, offset in {
        "earlier": -ALIGNMENT,
        "later": ALIGNMENT,
        "elsewhere": (1 if number == 0 else -number) * own,
    }.items():
        if number * own + offset >= 0:
            yield what, kind, SHAPE, number * own + offset


@proofs.MORE
@pytest.mark.parametrize("kind", BY_NUMBER.values(), ids=lambda kind: kind.name)
def test_an_index_that_is_not_what_it_was(tmp_path: Path, kind: GgmlType) -> None:
    whole = write(tmp_path / "sound.gguf", kind)
    wanted = numbers(tmp_path / "sound.gguf")
    places = [whole.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name) for name in NAMES]
    length = struct.calcsize("<I2QIQ")  # what is said of a matrix
    end = places[-1] + length
    data, said, path = whole[-(-end // ALIGNMENT) * ALIGNMENT :], 0, tmp_path / "other.gguf"
    every = [(number, *one) for number in range(len(NAMES)) for one in mutations(kind, number)]
    for number, what, other, shape, offset in every if proofs.IS_WHOLE else every[len(kind.name) % 3 :: 3]:
        info = struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), other.number, offset)
        index = whole[: places[number]] + info + whole[places[number] + length : end]
        path.write_bytes(index + bytes(-len(index) % ALIGNMENT) + data)
        try:
            found = numbers(path)
        except zckpt.ZckptError as error:
            said += 1
            assert any(one in str(error) for one in NAMES), (what, str(error))
            continue
        cannot_tell = offset == number * room(kind, SHAPE) and room(other, shape) == room(kind, SHAPE)
        assert found == wanted or cannot_tell, (NAMES[number], what)
    assert said > len(every) // 6

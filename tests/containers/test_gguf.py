"""The GGUF format: what is written is read by the gguf package and by zckpt, and damage is found."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from zckpt.base import limits
from zckpt.base.errors import CorruptError, UnsupportedError
from zckpt.containers import open_container
from zckpt.containers.gguf_file import BLOCKS, BY_DTYPE, Q8_0, GgufSpec, GgufValue, skeleton
from zckpt.core.dtypes import BF16, F16, F32, I64

VALUES = {
    "general.architecture": GgufValue("string", "llama"),
    "a.number": GgufValue("u32", 7),
    "a.fraction": GgufValue("f32", 0.5),
    "a.yes": GgufValue("bool", True),
    "a.large": GgufValue("u64", 2**63),
    "some.words": GgufValue("array", ["é", "", "b"], "string", 3),
    "some.bytes": GgufValue("array", [b"\xe2\x96\x81", b"x"], "string", 2),
    "some.numbers": GgufValue("array", [1, -2], "i32", 2),
}
SPECS = [
    GgufSpec("a", BY_DTYPE[F32], (3,)),
    GgufSpec("b", Q8_0, (2, 64)),
    GgufSpec("c", BY_DTYPE[BF16], (2, 3, 5)),
    GgufSpec("d", BY_DTYPE[F16], (1,)),
    GgufSpec("e", BY_DTYPE[I64], (2, 2)),
]


def written(path: Path) -> Path:
    """A file of these, whose every element is 1 in every byte."""
    frame = skeleton(SPECS, VALUES)
    data = bytearray(b"\x01" * frame.size)
    for offset, literal in frame.literals:
        data[offset : offset + len(literal)] = literal
    path.write_bytes(data)
    return path


def test_the_package_reads_what_is_written(tmp_path: Path) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(written(tmp_path / "x.gguf"))
    assert reader.get_field("a.large").contents() == 2**63  # type: ignore[union-attr]
    assert reader.get_field("some.words").contents() == ["é", "", "b"]  # type: ignore[union-attr]
    assert reader.get_field("some.bytes").contents() == ["▁", "x"]  # type: ignore[union-attr]
    assert reader.get_field("some.numbers").contents() == [1, -2]  # type: ignore[union-attr]
    found = {t.name: (t.tensor_type.name, tuple(int(n) for n in reversed(t.shape))) for t in reader.tensors}
    assert found == {spec.name: (spec.type.name, spec.shape) for spec in SPECS}
    assert all((t.data.view(np.uint8) == 1).all() for t in reader.tensors), (
        "no padding in a tensor, nothing else either"
    )


def test_it_is_read_back(tmp_path: Path) -> None:
    found = open_container(written(tmp_path / "x.gguf"))
    assert found.kind == "gguf" and isinstance(found.root, dict)
    words = {key: value.value for key, value in found.values.items()}  # type: ignore[attr-defined]
    assert words == {**{key: value.value for key, value in VALUES.items()}, "some.bytes": ["▁", "x"]}
    for spec in SPECS:
        ref = found.root[spec.name]
        assert (ref.dtype, ref.shape) == (spec.type.dtype, spec.stored)
        assert (ref.attributes == {BLOCKS: "Q8_0"}) == (spec.type is Q8_0)


def test_long_lists_are_left_out(tmp_path: Path) -> None:
    values = {
        "words": GgufValue("array", ["x"] * 5000, "string", 5000),
        "n": GgufValue("array", [1] * 5000, "i32", 5000),
    }
    frame = skeleton(SPECS[:1], values)
    (tmp_path / "x.gguf").write_bytes(frame.literals[0][1] + bytes(frame.size - len(frame.literals[0][1])))
    found = open_container(tmp_path / "x.gguf").values
    assert found == {"words": GgufValue("array", None, "string", 5000), "n": GgufValue("array", None, "i32", 5000)}


def head(tensors: int = 0, entries: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries)


def text(words: bytes) -> bytes:
    return struct.pack("<Q", len(words)) + words


def info(name: bytes, *shape: int, kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


HUGE = 2**62
BROKEN: dict[str, tuple[bytes, type[Exception], str]] = {
    "tensors without end": (head(HUGE) + bytes(99), CorruptError, "so many as fit"),
    "entries without end": (head(0, HUGE) + bytes(99), CorruptError, "so many as fit"),
    "a long key": (head(0, 1) + struct.pack("<Q", HUGE) + bytes(99), CorruptError, "ends before"),
    "a long string": (head(0, 1) + text(b"k") + struct.pack("<IQ", 8, HUGE) + bytes(99), CorruptError, "ends before"),
    "a long list": (head(0, 1) + text(b"k") + struct.pack("<IIQ", 9, 8, HUGE) + bytes(99), CorruptError, "ends before"),
    "long numbers": (head(0, 1) + text(b"k") + struct.pack("<IIQ", 9, 5, HUGE) + bytes(99), CorruptError, "ends before"),
    "lists of lists": (head(0, 1) + text(b"k") + struct.pack("<IIQ", 9, 9, 1) + bytes(99), UnsupportedError, "arrays of arrays"),
    "an unknown kind": (head(0, 1) + text(b"k") + struct.pack("<I", 99) + bytes(99), CorruptError, "kind 99"),
    "no text": (head(0, 1) + text(b"\xff") + struct.pack("<II", 4, 1) + bytes(99), CorruptError, "Unicode"),
    "a key twice": (head(0, 2) + (text(b"k") + struct.pack("<II", 4, 1)) * 2, CorruptError, "twice"),
    "a tensor twice": (head(2) + info(b"t", 1) * 2 + bytes(99), CorruptError, "twice"),
    "many dimensions": (head(1) + info(b"t", *[1] * 5) + bytes(99), CorruptError, "5 dimensions"),
    "a large shape": (head(1) + info(b"t", HUGE, 2) + bytes(99), CorruptError, "2^63"),
    "a short file": (head(1) + info(b"t", 1000) + bytes(99), CorruptError, "ends before"),
    "behind the end": (head(1) + info(b"t", 1, offset=HUGE) + bytes(99), CorruptError, "ends before"),
    "not aligned": (head(1) + info(b"t", 1, offset=4) + bytes(99), CorruptError, "a multiple of 32"),
    "overlapping": (head(2) + info(b"s", 16) + info(b"t", 16, offset=32) + bytes(199), CorruptError, "behind tensor 's'"),
    "a hole": (head(2) + info(b"s", 16) + info(b"t", 16, offset=96) + bytes(199), CorruptError, "behind tensor 's'"),
    "more than its tensors": (head(1) + info(b"t", 8) + bytes(199), CorruptError, "behind the last tensor, 't'"),
    "rows that are not blocks": (head(1) + info(b"t", 33, kind=8) + bytes(99), CorruptError, "rows of 32s"),
    "an alignment": (
        head(0, 1) + text(b"general.alignment") + struct.pack("<II", 4, 12) + bytes(99), CorruptError, "power of two",
    ),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), UnsupportedError, "big-endian"),
    "an old version": (head(version=1), UnsupportedError, "version 1"),
    "another type": (head(1) + info(b"t", 32, kind=15) + bytes(99), UnsupportedError, "Q8_K"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_damage_is_found(tmp_path: Path, name: str) -> None:
    data, error, words = BROKEN[name]
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(error) as caught:
        open_container(tmp_path / "x.gguf")
    assert words in str(caught.value)


def test_a_header_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEADER_BYTES", 100)
    with pytest.raises(UnsupportedError, match="too large"):
        open_container(written(tmp_path / "x.gguf"))


def test_what_the_format_cannot_hold() -> None:
    for shape in ((), (1,) * 5, (3, 0)):
        with pytest.raises(UnsupportedError, match="dimensions"):
            skeleton([GgufSpec("t", BY_DTYPE[F32], shape)], {})

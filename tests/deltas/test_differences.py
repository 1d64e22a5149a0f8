"""The frames that the engine makes of differences: what zstandard reads in them, and how large they are."""

from __future__ import annotations

import io
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import pytest
import zstandard

from zckpt import _core
from zckpt.core.dtypes import BY_NAME
from zckpt.deltas import encode
from zckpt.deltas.encode import Encoder
from zckpt.deltas.form import FRAME, DeltaForm

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

FORM = DeltaForm(1, 0)
BLOCK = 128 << 10
WIDTHS = {1: "U8", 2: "BF16", 4: "F32", 8: "F64", 16: "C128"}
CHANGES = np.random.default_rng(5)


def frame(difference: Bytes, width: int, pieces: int, directory: Path) -> tuple[bytes, int]:
    """The frame of a difference, fed in so many pieces, and how many elements changed."""
    old = CHANGES.integers(0, 256, len(difference), np.uint8)
    encoder = Encoder("x", len(old) // width, BY_NAME[WIDTHS[width]], FORM, str(directory))
    step = max(1, len(old) // pieces // width) * width
    for start in range(0, len(old), step):
        encoder.feed(old[start : start + step], (old ^ difference)[start : start + step])
    made = encoder.finish()
    try:
        return (made.data.read() if made.data else b""), made.changed
    finally:
        made.close()


def differences(nbytes: int) -> list[Bytes]:
    """Sparse and dense ones, of few values and of all; with runs of every length between changes; and of one value only."""
    found = []
    for density in (0, 1e-4, 0.01, 0.2, 0.9, 1):
        for values in (2, 130, 256):
            changed = CHANGES.integers(0, values, nbytes).astype(np.uint8)
            found.append(np.where(CHANGES.random(nbytes) < density, changed, 0).astype(np.uint8))
    skewed = np.minimum(CHANGES.geometric(0.3, nbytes) * 17 % 256, 255).astype(np.uint8)
    stairs = np.zeros(nbytes, np.uint8)
    stairs[np.cumsum(np.arange(int(nbytes**0.5)))] = 1
    return [*found, skewed, stairs, np.full(nbytes, 7, np.uint8)]


@pytest.mark.parametrize("nbytes", [16, 63, 64, 65, 1008, BLOCK - 1, BLOCK + 65])
def test_every_processor_makes_the_same_blocks(nbytes: int) -> None:
    for difference in differences(nbytes):
        old = CHANGES.integers(0, 256, nbytes, np.uint8)
        new, made = old ^ difference, set()
        try:
            for paths in ((False, False), (True, False), (True, True)):
                _core.use_vector_paths(*paths)
                made.add(_core.difference(old.ctypes.data, new.ctypes.data, nbytes, 1, ends=True))
        finally:
            _core.use_vector_paths(True)
        assert len(made) == 1


def renewed(blocks: bytes, old: Bytes) -> tuple[Bytes, int, bool]:
    """What the engine makes of old bytes, of which blocks it read how many bytes, and whether the last was one of them."""
    guarded = np.concatenate([np.full(128, 77, np.uint8), old, np.full(128, 77, np.uint8)])
    used, made, ended = _core.renew(blocks, guarded.ctypes.data + 128, len(old))
    assert used <= len(blocks)
    assert np.all(guarded[:128] == 77)
    assert np.array_equal(guarded[128 + made : -128], old[made:])
    assert np.all(guarded[-128:] == 77)
    return guarded[128 : 128 + made], used, ended


@pytest.mark.parametrize("nbytes", [16, 63, 65, 1008, BLOCK - 1, BLOCK + 65])
def test_every_processor_reads_its_blocks(nbytes: int) -> None:
    for difference in differences(nbytes):
        old = CHANGES.integers(0, 256, nbytes, np.uint8)
        new = old ^ difference
        blocks, _ = _core.difference(old.ctypes.data, new.ctypes.data, nbytes, 1, ends=True)
        try:
            for vectors in (False, True):
                _core.use_vector_paths(vectors)
                made, used, ended = renewed(blocks, old)
                assert np.array_equal(made, new)
                assert used == len(blocks)
                assert ended
        finally:
            _core.use_vector_paths(True)


def test_of_damaged_blocks_nothing_is_read_that_zstandard_reads_otherwise() -> None:
    read = 0
    for nbytes in (300, 5000, 70_000, BLOCK + 65):
        for difference in differences(nbytes):
            old = CHANGES.integers(0, 256, nbytes, np.uint8)
            blocks, _ = _core.difference(old.ctypes.data, (old ^ difference).ctypes.data, nbytes, 1, ends=True)
            for _ in range(8):
                damaged = bytearray(blocks)
                for at in CHANGES.integers(0, min(len(blocks), CHANGES.choice([20, 200, 200_000])), 2):
                    damaged[at] = CHANGES.choice([damaged[at] ^ 1 << CHANGES.integers(0, 8), CHANGES.integers(0, 256)])
                made, _, _ = renewed(bytes(damaged[: CHANGES.choice([len(blocks), max(1, len(blocks) // 2)])]), old)
                frame = FRAME + nbytes.to_bytes(8, "little") + damaged
                found = b""
                with (
                    zstandard.ZstdDecompressor().stream_reader(io.BytesIO(frame)) as stream,
                    suppress(zstandard.ZstdError),
                ):
                    while part := stream.read(len(made) - len(found)):
                        found += part
                assert (made ^ old[: len(made)]).tobytes()[: len(found)] == found
                read += bool(found)
    assert read > 50


@pytest.mark.parametrize("nbytes", [16, 48, 64, 80, 1008, 16_384, BLOCK - 16, BLOCK, BLOCK + 16, 3 * BLOCK])
def test_zstandard_reads_every_frame(nbytes: int, tmp_path: Path) -> None:
    for number, difference in enumerate(differences(nbytes)):
        width, pieces = (1, 2, 4, 8, 16)[number % 5], 1 + number % 3
        made, changed = frame(difference, width, pieces, tmp_path)
        assert changed == np.count_nonzero(difference.reshape(-1, width).any(axis=1))
        if not changed:
            assert made == b""
            continue
        assert zstandard.get_frame_parameters(made).content_size == nbytes
        assert zstandard.ZstdDecompressor().decompress(made) == difference.tobytes(), number
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(made)) as stream:
            assert stream.read() == difference.tobytes()
        assert len(made) <= nbytes + 14 + 3 * (nbytes // BLOCK + 2 * pieces)


@pytest.mark.skipif(encode._core is None, reason="level 1 of zstd is larger")
@pytest.mark.parametrize("rate", [1e-6, 1e-5, 1e-4])
def test_a_step_of_training_takes_at_most_half_as_much_again_as_its_entropy(rate: float, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    masters = random.standard_normal(1 << 20, np.float32) * np.float32(0.02)
    stepped = masters - np.float32(rate) * random.standard_normal(1 << 20, np.float32).clip(-1, 1)
    old, new = ((x.view(np.uint32) + 0x8000 >> 16).astype(np.uint16) for x in (masters, stepped))
    _, counts = np.unique(old ^ new, return_counts=True)
    entropy = -(counts * np.log2(counts / len(old))).sum() / 8
    made, _ = frame((old ^ new).view(np.uint8), 2, 1, tmp_path)
    assert len(made) <= 1.5 * entropy


@pytest.mark.skipif(encode._core is None, reason="level 1 of zstd is larger")
@pytest.mark.parametrize("part", [0.01, 0.1, 0.3, 0.45, 0.6])
def test_however_many_numbers_change_it_is_hardly_more(part: float, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    changes = np.where(random.random(1 << 20) < part, random.geometric(0.5, 1 << 20).clip(1, 127), 0).astype(np.uint16)
    _, counts = np.unique(changes, return_counts=True)
    entropy = -(counts * np.log2(counts / len(changes))).sum() / 8
    made, _ = frame(changes.view(np.uint8), 2, 1, tmp_path)
    assert len(made) <= 1.5 * entropy


def test_a_change_in_a_block_of_none_costs_no_more(tmp_path: Path) -> None:
    half = np.zeros(1 << 16, np.uint8)
    half[: 1 << 15] = CHANGES.integers(0, 4, 1 << 15)
    made, _ = frame(half, 1, 1, tmp_path)
    assert len(made) <= 1.1 * (1 << 15) / 4  # the other half is one run of zeros


def test_without_the_engine_the_difference_is_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(encode, "_core", None)
    for difference in differences(1008):
        made, changed = frame(difference, 2, 2, tmp_path)
        assert changed == np.count_nonzero(difference.view(np.uint16))
        assert (zstandard.ZstdDecompressor().decompress(made) if made else bytes(1008)) == difference.tobytes()

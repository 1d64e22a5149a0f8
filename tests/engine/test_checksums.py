"""The CRC of a range from shares of its parts, which whoever writes them reports as one number."""

from __future__ import annotations

import random
import zlib

import pytest

from zckpt.engine import checksums


@pytest.mark.parametrize("seed", range(20))
def test_shares_of_parts_give_the_crc_of_the_range(seed: int) -> None:
    chance = random.Random(seed)
    nbytes = chance.choice([0, 1, 7, 1000, 100_003])
    data = bytearray(nbytes)
    cuts = sorted(chance.randint(0, nbytes) for _ in range(chance.randint(0, 12)))
    parts = [
        (a, b) for a, b in zip([0, *cuts], [*cuts, nbytes], strict=True) if chance.random() < 0.7
    ]  # others stay zeros
    chance.shuffle(parts)
    crc = checksums.of_zeros(nbytes)
    for a, b in parts:
        data[a:b] = chance.randbytes(b - a)
        crc ^= checksums.share((50 + a, b - a, zlib.crc32(data[a:b])), 50 + nbytes)
    assert crc == zlib.crc32(data)

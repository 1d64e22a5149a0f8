"""Writes past the page cache: what is in the file afterwards, and in the page cache."""

from __future__ import annotations

import errno
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from zckpt.storage import descriptors
from zckpt.storage.descriptors import write_past_cache

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 3 << 20


@pytest.mark.parametrize("apart", [0, 1], ids=["pages", "no pages"])
@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, 1 << 20), (1, 1 << 20), (4095, (1 << 20) + 2), (777, 300_000), (9, 5)]
)
def test_every_byte_is_written_where_it_belongs(
    offset: int, nbytes: int, refuses: bool, apart: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = np.frombuffer(mmap.mmap(-1, SIZE), np.uint8)
    data = room[offset % 4096 + apart :][:nbytes]
    data[:] = np.random.default_rng(offset).integers(0, 256, nbytes, np.uint8)
    path = tmp_path / "file"
    path.write_bytes(b"\7" * SIZE)
    asked: list[tuple[int, int]] = []
    # Stands in for a descriptor for direct I/O, which not every file system has: it takes whole pages alone, or none.
    direct = os.open(path, os.O_WRONLY)
    write = os.pwrite

    def written(fd: int, part: memoryview, at: int) -> int:
        if fd == direct:
            address = np.frombuffer(part, np.uint8).ctypes.data
            assert not (at % 4096 or len(part) % 4096 or address % 4096)
            asked.append((at, len(part)))
            if refuses:
                raise OSError(errno.EINVAL, "refused")
        return write(fd, part, at)

    monkeypatch.setattr(descriptors.os, "pwrite", written)
    fd = os.open(path, os.O_WRONLY)
    write_past_cache((fd, direct), data, offset)
    os.close(fd)
    os.close(direct)
    found = np.frombuffer(path.read_bytes(), np.uint8)
    assert np.array_equal(found[offset : offset + nbytes], data)
    assert np.all(found[:offset] == 7)
    assert np.all(found[offset + nbytes :] == 7)
    assert bool(asked) == (nbytes > 4096 and not apart)
    assert sum(size for _, size in asked) > nbytes - 2 * 4096 or apart

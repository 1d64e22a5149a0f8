"""Bytes of tensors, the slow and obvious way."""

import os
import zlib
from pathlib import Path

import pytest
import torch


def _elements(ref):
    """The elements of a TensorRef, row-major, as its fragments say; in the machine's (little) byte order."""
    size = ref.dtype.itemsize
    with open(ref.store.path, "rb") as file:
        elements = {}
        for fragment in ref.fragments():
            for row in range(fragment.rows):
                for column in range(fragment.count):
                    place = fragment.byte_offset + (row * fragment.store_pitch + column * fragment.step) * size
                    number = fragment.start + row * fragment.pitch + column
                    assert number not in elements
                    elements[number] = os.pread(file.fileno(), size, place)
    assert sorted(elements) == list(range(ref.numel))
    data = b"".join(elements[number] for number in range(ref.numel))
    if ref.store.byteorder == "big":
        part = ref.dtype.component
        data = b"".join(data[at : at + part][::-1] for at in range(0, len(data), part))
    return data


def _bytes_of(tensor):
    """The bytes of a torch tensor, row-major."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _fill(skeleton, elements, path):
    """Writes the file of a skeleton, as the mover would."""
    with open(path, "wb") as file:
        file.truncate(skeleton.size)
        for offset, literal in skeleton.literals:
            file.seek(offset)
            file.write(literal)
        for name, data in elements.items():
            file.seek(skeleton.offsets[name])
            file.write(data)
    whole = Path(path).read_bytes()
    with open(path, "r+b") as file:
        for checksum in skeleton.checksums:
            crc = zlib.crc32(whole[checksum.start : checksum.start + checksum.nbytes])
            for slot in checksum.slots:
                file.seek(slot)
                file.write(crc.to_bytes(4, "little"))
    return str(path)


@pytest.fixture
def elements():
    return _elements


@pytest.fixture
def bytes_of():
    return _bytes_of


@pytest.fixture
def fill():
    return _fill

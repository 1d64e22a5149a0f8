"""Headers of as many tiny objects as the limits on bytes allow: each is refused, or costs less memory than `limits` promises."""

from __future__ import annotations

import string
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice, product
from pathlib import Path

import proofs
import pytest

MOST_MIB = 600
"""As `base.limits` says of one file, the interpreter and zckpt itself included."""

CHILD = """
import sys
from zckpt.base import limits
from zckpt.base.errors import ZckptError
from zckpt.jobs.inspection import inspect_checkpoint
from zckpt.layouts.dcp import metadata
part = int(sys.argv[2])
for name in ("PICKLE_BYTES", "PICKLE_COST", "DIRECTORY_BYTES", "HEADER_BYTES", "JSON_MEMORY_BYTES", "GGUF_MEMORY_BYTES"):
    setattr(limits, name, getattr(limits, name) // part)
metadata.LARGE_BYTES //= part
def kib(key):
    return next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1]
print(kib("VmRSS"))
try:
    found = inspect_checkpoint(sys.argv[1])
    said = "read" if found.exportable.ok else found.exportable.reason
except ZckptError as error:
    said = str(error)
print(kib("VmHWM"))
print(said)
"""  # VmHWM, since maxrss is also the parent's


def names() -> Iterator[str]:
    """Short and all different."""
    return map("".join, product(string.ascii_letters + string.digits, repeat=4))


def gguf(tensors: int, entries: int, parts: Iterator[bytes]) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, entries) + b"".join(parts) + bytes(64)


def key(name: str) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode()


def gguf_tensors(count: int) -> bytes:
    info = struct.pack("<IQIQ", 1, 0, 0, 0)
    return gguf(count, 0, (key(name) + info for name in islice(names(), count)))


def gguf_entries(count: int) -> bytes:
    return gguf(0, count, (key(name) + struct.pack("<IB", 0, 1) for name in islice(names(), count)))


def gguf_arrays(count: int, kind: int, item: bytes) -> bytes:
    array = struct.pack("<IIQ", 9, kind, 1024) + item * 1024
    return gguf(0, count, (key(name) + array for name in islice(names(), count)))


def safetensors(header: str) -> bytes:
    return len(header.encode()).to_bytes(8, "little") + header.encode()


def safetensors_tensors(count: int) -> bytes:
    tensor = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    return safetensors("{" + ",".join(f'"{name}":{tensor}' for name in islice(names(), count)) + "}")


def safetensors_texts(count: int) -> bytes:
    return safetensors('{"__metadata__":{' + ",".join(f'"{name}":"ab"' for name in islice(names(), count)) + "}}")


def weight_map(count: int) -> bytes:
    return ('{"weight_map":{' + ",".join(f'"{name}":"ab"' for name in islice(names(), count)) + "}}").encode()


def zip_file(records: list[tuple[str, bytes]], padding: int = 0) -> bytes:
    """A zip file by hand, since `zipfile` takes a minute; `padding` empty records follow."""
    body, directory = bytearray(), bytearray()
    every = [*records, *(("x/" + name, b"") for name in islice(names(), padding))]
    for name, data in every:
        sizes = struct.pack("<3L2H", 0, len(data), len(data), len(name), 0)
        directory += b"PK\x01\x02" + struct.pack("<6H", 20, 20, 0, 0, 0, 0) + sizes
        directory += struct.pack("<3H2L", 0, 0, 0, 0, len(body)) + name.encode()
        body += b"PK\x03\x04" + struct.pack("<5H", 20, 0, 0, 0, 0) + sizes + name.encode() + data
    at, count = len(body), len(every)
    body += directory
    end = len(body)
    body += b"PK\x06\x06" + struct.pack("<Q2H2L4Q", 44, 45, 45, 0, 0, count, count, len(directory), at)
    body += b"PK\x06\x07" + struct.pack("<LQL", 0, end, 1)
    return bytes(body + b"PK\x05\x06" + struct.pack("<4H2LH", 0, 0, 0xFFFF, 0xFFFF, len(directory), at, 0))


def torch_zip(data: bytes, padding: int = 0) -> bytes:
    return zip_file([("x/data.pkl", data), ("x/byteorder", b"little")], padding)


def many(item: bytes, nbytes: int) -> bytes:
    """A pickle of a list of the same small thing."""
    return b"\x80\x04](" + item * (nbytes // len(item)) + b"e."


CASES: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "gguf tensors": ("x.gguf", lambda part: gguf_tensors(1_500_000 // part)),
    "gguf tensors, just enough": ("x.gguf", lambda part: gguf_tensors(280_000 // part)),
    "gguf entries": ("x.gguf", lambda part: gguf_entries(2_500_000 // part)),
    "gguf texts": ("x.gguf", lambda part: gguf_arrays(4300 // part, 8, key("\u4e00"))),
    "gguf numbers": ("x.gguf", lambda part: gguf_arrays(24_000 // part, 2, struct.pack("<H", 777))),
    "safetensors tensors": ("x.safetensors", lambda part: safetensors_tensors(900_000 // part)),
    "safetensors tensors, just enough": ("x.safetensors", lambda part: safetensors_tensors(230_000 // part)),
    "safetensors texts": ("x.safetensors", lambda part: safetensors_texts(1_700_000 // part)),
    "index": ("model.safetensors.index.json", lambda part: weight_map(1_700_000 // part)),
    "records of a zip file": ("x.pt", lambda part: torch_zip(many(b"N", 8), 470_000 // part)),
    "records and lists": ("x.pt", lambda part: torch_zip(many(b"]", (8 << 20) // part), 470_000 // part)),
    "pickled lists": ("x.pt", lambda part: torch_zip(many(b"]", (16 << 20) // part))),
    "pickled sets": ("x.pt", lambda part: torch_zip(many(b"\x8f", (16 << 20) // part))),
    "pickled tuples": ("x.pt", lambda part: torch_zip(many(b"K\x01K\x02\x86", (16 << 20) // part))),
    "pickled texts": ("x.pt", lambda part: torch_zip(many(b"\x8c\x03\xe4\xb8\x80", (16 << 20) // part))),
    "pickled lists, older form": ("x.pt", lambda part: many(b"]", (16 << 20) // part)),
    "metadata of lists": ("dcp/.metadata", lambda part: many(b"]", (8 << 20) // part)),
    "metadata of sets": ("dcp/.metadata", lambda part: many(b"\x8f", (12 << 20) // part)),
    "metadata of dicts in dicts": ("dcp/.metadata", lambda part: many(b"}K\x01}s", (24 << 20) // part)),
}
"""Name -> file, and what makes its bytes, or a part of them."""
ALIKE = (
    "gguf numbers", "safetensors texts", "records and lists", "pickled sets", "pickled tuples", "pickled texts",
    "pickled lists, older form", "metadata of dicts in dicts", "metadata of lists",
)  # fmt: skip
"""Whose neighbours go the same way, or which two others prove together: for `make proofs`.

So are dicts in dicts, of which the first reading leaves most until the second has ended: only whole they show it.
"""

DEAR = (
    "gguf tensors, just enough", "safetensors tensors, just enough", "index", "pickled lists", "metadata of sets",
)  # fmt: skip
"""Which take 4 to 11 s. Without proofs they are a quarter as large, the limits too, and so is the memory that they may take."""


@proofs.MORE
@pytest.mark.parametrize("name", [name for name in CASES if name not in ALIKE or proofs.IS_WHOLE])
def test_objects_are_counted(tmp_path: Path, name: str) -> None:
    file, make = CASES[name]
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    part = 4 if name in DEAR and not proofs.IS_WHOLE else 1
    path.write_bytes(make(part))
    if path.name == ".metadata":
        (path.parent / "__0_0.distcp").write_bytes(b"")
    place = path if path.suffix in (".gguf", ".pt", ".safetensors") else path.parent
    command = [sys.executable, "-c", CHILD, place, str(part)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    begun, used, said = done.stdout.split("\n", 2)
    more = MOST_MIB * 1024 - int(begun)
    assert int(used) - int(begun) < more / part, said
    assert ("just enough" in name) == said.startswith("read")

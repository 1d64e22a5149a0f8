"""One file's bytes: which kind of container it is, and where each tensor is in it.

For the layouts, which know what a family of files means. The kind of a file is known by its first bytes, and by its name only
if these are damaged. Opening a file reads its index only, runs none of its code, and reads no tensor.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from zckpt.base.errors import IncompleteError, NotACheckpointError, UnsupportedError
from zckpt.containers import safetensors_file, torch_zip
from zckpt.containers.container import Container, Input, open_input
from zckpt.containers.inert import NumpyArray, Placeholder, brief, enum_value, list_at, mapping_at, value_at
from zckpt.containers.pickles import load_pickle
from zckpt.containers.skeleton import Skeleton, TensorSpec
from zckpt.containers.tensor_ref import StorageRef, TensorRef

if TYPE_CHECKING:
    from zckpt.containers.alike import AlikePickles

__all__ = [
    "Container", "NumpyArray", "Placeholder", "Skeleton", "StorageRef", "TensorRef",
    "TensorSpec", "brief", "enum_value", "is_torch_zip", "list_at", "load_pickle", "mapping_at", "open_container", "value_at",
]  # fmt: skip

_COMPRESSED = {
    b"\x1f\x8b": ("gzip", "gunzip"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
    b"\xfd7zXZ\0": ("xz", "unxz"),
    b"BZh": ("bzip2", "bunzip2"),
}

_OTHERS = {
    b"\x89HDF": "an HDF5 file (Keras)",
    b"\x93NUMPY": "a numpy array",
    b"PK\x05\x06": "an empty zip file",
}

_LFS_POINTER = b"version https://git-lfs.github.com/spec/v1"


def open_container(path: str | os.PathLike[str], alike: AlikePickles | None = None) -> Container:
    """Opens a file: its inert object, with a `TensorRef` for each tensor.

    Args:
        path: of the file.
        alike: reads torch's zip files with pickles that are nearly the same, such as those of several ranks.

    Raises:
        CorruptError: the file is damaged or cut short.
        IncompleteError: it is a Git LFS pointer to the file.
        NotACheckpointError: it is of another kind, or cannot be read.
        UnsafeError: loading it would run code.
        UnsupportedError: its kind is known, but cannot be read.
    """
    with open_input(path) as file:
        head = file.peek(0, 512)
        if head.startswith(b"PK\x03\x04"):
            return torch_zip.read_input(file, alike)
        if head.startswith(b"GGUF"):
            from zckpt.containers import gguf_file  # few files are of this kind

            return gguf_file.read_input(file)
        if head[8:9] == b"{":
            return safetensors_file.read_input(file)
        if head[257:262] == b"ustar":
            from zckpt.containers import torch_legacy

            return torch_legacy.read_tar(file)
        if _has_header(file, head):
            return safetensors_file.read_input(file)
        if head.startswith((b"\x80", b"L1195470371")):  # a pickle; protocols 0 and 1 spell the magic number in decimal
            from zckpt.containers import torch_legacy

            return torch_legacy.read_stream(file)
        raise _unknown(file, head)


def _has_header(file: Input, head: bytes) -> bool:
    """Whether a file named `.safetensors` begins with a length that a header may have: then its header is damaged."""
    if not file.path.endswith(".safetensors") or len(head) < 9 or head.startswith(tuple(_COMPRESSED)):
        return False
    return 0 < int.from_bytes(head[:8], "little") <= safetensors_file.MAX_HEADER_BYTES


def is_torch_zip(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as torch's zip files do."""
    with open_input(path) as file:
        return file.peek(0, 4) == b"PK\x03\x04"


def _unknown(file: Input, head: bytes) -> Exception:
    """The error for a file of another kind."""
    if not head.strip(b"\0"):
        what = "begins with zeros" if file.size else "the file is empty"
        return file.damaged(what, f"{file.size:,} bytes", "a torch or safetensors file", 0)
    if head.startswith(_LFS_POINTER):
        return IncompleteError(
            "is a Git LFS pointer, and not the file itself", file=file.path, found=f"{file.size:,} bytes of text",
            remedy="Run `git lfs pull` in its repository.",
        )  # fmt: skip
    for magic, (name, tool) in _COMPRESSED.items():
        if head.startswith(magic):
            return UnsupportedError(
                f"is compressed with {name}", file=file.path, remedy=f"Unpack it with {tool} first."
            )
    found = next((name for magic, name in _OTHERS.items() if head.startswith(magic)), "") or _looks(head)
    return NotACheckpointError(
        "is not a checkpoint file", file=file.path, found=found, expected="a torch or safetensors file",
        remedy="Give a .pt, .bin, .safetensors or .gguf file, or the directory of a checkpoint.",
    )  # fmt: skip


def _looks(head: bytes) -> str:
    if head.lstrip().lower().startswith((b"<!doctype", b"<html")):
        return "a web page, such as the error page of a download that failed"
    start = head[:40]
    if start.isascii() and all(char.isprintable() or char.isspace() for char in start.decode()):
        return f"text that begins with {start.decode().strip().partition(chr(10))[0]!r}"
    return f"bytes {head[:8].hex(' ')} ..."

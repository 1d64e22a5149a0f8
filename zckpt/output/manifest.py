"""`zckpt.json`: what an output was made from, and the size and checksum of each of its files.

For `convert`, which writes one beside every output, and `verify`, which checks an output against it. It lies in a directory
of weights as `zckpt.json`, beside a single file as `model.bin.zckpt.json`. Its bytes follow from the input and the options
alone: no times, no paths of the machine, nothing that depends on threads. The checksums are CRC-32s, taken while the files
were written: they find what disks and copies do to files, not what an enemy does.

Which job made an output, paths and times of its sources included, is an attribute of the file (`user.zckpt.job`) and not in it:
it means something only on the machine that it was made on. File systems that have no such attributes go without.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

from zckpt.base.errors import CorruptError, IncompleteError, UnsafeError
from zckpt.output.journal import Finished
from zckpt.storage.fsync_queue import make_durable
from zckpt.storage.json_files import read_json
from zckpt.storage.location import Location

NAME = "zckpt.json"

_MOST_BYTES = 64 << 20
_JOB = "user.zckpt.job"


@dataclass(frozen=True, slots=True)
class Manifest:
    """The facts of an output.

    Attributes:
        version: of zckpt.
        source: what it was made from: layout, tag, step, framework and its version, ranks per axis.
        dtype: that floating parameters were given, e.g. "bf16".
        options: what was asked for beyond that and changes the tensors: selection, names, overflow.
        tensors: how many; tied names count once.
        numel: elements in them.
        files: all files of the output but the manifest itself.
    """

    version: str
    source: Mapping[str, object]
    dtype: str
    options: Mapping[str, object]
    tensors: int
    numel: int
    files: tuple[Finished, ...]

    def as_bytes(self) -> bytes:
        """The file's contents."""
        facts = {
            "zckpt": self.version,
            "source": dict(self.source),
            "dtype": self.dtype,
            "options": dict(self.options),
            "tensors": self.tensors,
            "numel": self.numel,
            "files": [
                {"path": file.path, "bytes": file.nbytes, "crc32": f"{file.crc32:08x}"}
                for file in sorted(self.files, key=lambda file: file.path)
            ],
        }
        return (json.dumps(facts, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")


def path_for(out: str, *, single: bool) -> str:
    """Where the manifest of an output lies."""
    return f"{out.rstrip(os.sep)}.{NAME}" if single else os.path.join(out, NAME)


def write(path: str, contents: bytes, job: str) -> None:
    """Writes a manifest, durably, and marks it with the fingerprint of the job, if there is one."""
    with open(path, "wb") as file:
        file.write(contents)
        file.flush()
        if job:
            with contextlib.suppress(OSError, AttributeError):
                os.setxattr(file.fileno(), _JOB, job.encode())
        make_durable(file.fileno())


def job_of(path: str) -> str:
    """The fingerprint of the job that wrote a manifest; "" where that is not known."""
    with contextlib.suppress(OSError, AttributeError):
        return os.getxattr(path, _JOB, follow_symlinks=False).decode(errors="replace")
    return ""


def find(place: Location) -> Location | None:
    """The manifest that belongs to a directory or file, if there is one."""
    found = place / NAME if place.is_dir() else place.parent / f"{place.name}.{NAME}"
    return found if found.is_file() else None


def read(path: str | os.PathLike[str]) -> Manifest:
    """A manifest, checked.

    Raises:
        CorruptError: it is none.
        UnsafeError: it names files outside its directory.
    """
    match read_json(path, _MOST_BYTES, "a manifest"):
        case {
            "zckpt": str(version),
            "source": dict(source),
            "dtype": str(dtype),
            "options": dict(options),
            "tensors": int(tensors),
            "numel": int(numel),
            "files": list(entries),
        }:
            listed = tuple(_file(entry, os.fspath(path)) for entry in entries)
        case _:
            raise CorruptError(
                "is not a manifest of zckpt", file=path, found="other entries", remedy="Copy it again from the output."
            )
    if not listed:
        raise IncompleteError(
            "names no files", file=path, remedy="Make the output again, or verify it without this manifest."
        )
    return Manifest(version, source, dtype, options, tensors, numel, listed)


def _file(entry: object, manifest: str) -> Finished:
    match entry:
        case {"path": str(path), "bytes": int(nbytes), "crc32": str(crc)} if nbytes >= 0 and len(crc) == 8:
            parts = path.split("/")
            if os.path.isabs(path) or "\0" in path or any(part in ("", ".", "..") for part in parts):
                raise UnsafeError(
                    "names a file outside its directory",
                    file=manifest,
                    found=f"{path!r:.80}",
                    remedy="Do not use this manifest; if you know its author, report it.",
                )
            try:
                return Finished(path, nbytes, int(crc, 16))
            except ValueError:
                pass
    raise CorruptError(
        "is not a manifest of zckpt",
        file=manifest,
        found="an entry that is not a file",
        remedy="Copy it again from the output.",
    )

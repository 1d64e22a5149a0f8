"""The manifest `zckpt.json`: what an output was made from, and the size and checksum of each of its files.

For `convert`, which writes a manifest with every output, and `verify`, which checks an output against it. In a directory of
weights its name is `zckpt.json`, beside a single file `model.bin.zckpt.json`. Its bytes depend only on the input and the
options, not on times, paths or threads. The checksums are CRC-32s, computed while the files were written: they detect damage by
disks and copies, but no deliberate change.

The fingerprint of the job, which covers paths and times of its sources, is in an extended attribute of the file
(`user.zckpt.job`), because it means something only on the machine that made the output. If the file system has no such
attributes, it is not stored.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from operator import attrgetter

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import CorruptError, IncompleteError, UnsafeError
from zckpt.core.plan import WrittenFile
from zckpt.storage.identity import stays_inside
from zckpt.storage.location import Location

NAME = "zckpt.json"
SIGNATURE = "model.sig"
"""The file with the signature of a directory that has one (`signature`); that of one file is beside it."""

_MOST_BYTES = 64 << 20
_JOB = "user.zckpt.job"


@dataclass(frozen=True, slots=True)
class Manifest:
    """The facts of an output.

    Attributes:
        version: of zckpt.
        source: what it was made from: layout, tag, step, framework and its version, ranks per axis.
        dtype: of floating parameters, such as "bf16".
        options: further options that change the tensors: selection, names, overflow.
        tensors: how many; tied names count once.
        numel: elements in them.
        files: all files of the output, without the manifest itself and the signature, which signs the manifest too.
        signature: name of the file with the signature; empty if there is none.
        left_out: name, kind and reason of each tensor of the source that is not in the output.
    """

    version: str
    source: Mapping[str, object]
    dtype: str
    options: Mapping[str, object]
    tensors: int
    numel: int
    files: tuple[WrittenFile, ...]
    signature: str = ""
    left_out: tuple[Mapping[str, str], ...] = ()

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
                for file in sorted(self.files, key=attrgetter("path"))
            ],
            **({"left_out": list(map(dict, self.left_out))} if self.left_out else {}),
            **({"signature": self.signature} if self.signature else {}),
        }
        return (json.dumps(facts, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")


def path_for(out: str, *, single: bool) -> str:
    """The path of an output's manifest."""
    return f"{out.rstrip(os.sep)}.{NAME}" if single else os.path.join(out, NAME)


def signature_for(name: str) -> str:
    """The name of the signature that belongs to a manifest of this name."""
    return SIGNATURE if name == NAME else f"{name.removesuffix(NAME)}sig"


def write(path: str, contents: bytes, job: str) -> None:
    """Writes a manifest, and stores the fingerprint `job`, if it is not empty, in its attribute."""
    with open(path, "wb") as file:
        file.write(contents)
        if job:
            with contextlib.suppress(OSError, AttributeError):
                os.setxattr(file.fileno(), _JOB, job.encode())


def job_of(path: str) -> str:
    """The fingerprint of the job that wrote a manifest; "" if it is not known."""
    with contextlib.suppress(OSError, AttributeError):
        return os.getxattr(path, _JOB, follow_symlinks=False).decode(errors="replace")
    return ""


def find(place: Location) -> Location | None:
    """The manifest that belongs to a directory or file; None if there is no such file."""
    found = place / NAME if place.is_dir() else place.parent / f"{place.name}.{NAME}"
    return found if found.is_file() else None


def read(path: str | os.PathLike[str]) -> Manifest:
    """Reads and checks a manifest. Raises CorruptError if it is not a manifest, IncompleteError if it lists no files,
    UnsafeError if it names files outside its directory.
    """
    from zckpt.storage.json_files import read_json

    facts = read_json(path, _MOST_BYTES, "a manifest")
    match facts:
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
    own = signature_for(os.path.basename(os.fspath(path)))
    signature = own if facts.get("signature") == own else ""
    left_out = facts.get("left_out")
    named = tuple(one for one in left_out if isinstance(one, dict)) if isinstance(left_out, list) else ()
    return Manifest(version, source, dtype, options, tensors, numel, listed, signature, named)


def _file(entry: object, manifest: str) -> WrittenFile:
    match entry:
        case {"path": str(path), "bytes": int(nbytes), "crc32": str(crc)} if nbytes >= 0 and len(crc) == 8:
            if not stays_inside(path):
                raise UnsafeError(
                    "names a file outside its directory",
                    file=manifest,
                    found=f"{path!r:.80}",
                    remedy="Do not use this manifest; if you know its author, report it.",
                )
            try:
                return WrittenFile(path, nbytes, int(crc, 16))
            except ValueError:
                pass
    raise CorruptError(
        "is not a manifest of zckpt",
        file=manifest,
        found="an entry that is not a file",
        remedy="Copy it again from the output.",
    )

"""The form of a delta directory: names, the index's metadata, checksums.

For all that writes and reads deltas. A directory `weight_v000007` holds safetensors files in which each changed tensor is a
vector of bytes: its difference from the tensor of the version before, one zstd frame of level 1. The header's metadata maps each
tensor to the checksum of its new bytes. `model.safetensors.index.json` says which file has which tensor, and in its metadata
what kind of delta it is. Tensors that did not change are absent.

[Note: encodings] xor: the new bytes XOR the old ones, as many as the tensor has. overwrite: how many bytes changed, as four
bytes; their positions, four bytes each; then the new bytes at these positions. All numbers are little-endian.

[Note: unchanged tensors] The form says nothing about tensors that did not change. zckpt adds a file with the checksums of these,
so that all of a new version can be proved; SGLang does not read it.
Source: sglang (source of November 2026), srt/weight_sync/local_checkpoint.py `_apply_delta`; slime 0.3, utils/disk_delta.py
and backends/megatron_utils/update_weight/update_weight_from_disk_delta.py.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Literal, Protocol, get_args

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import CorruptError, UnsupportedError, UsageError, ZckptError
from zckpt.base.words import join_words
from zckpt.storage.json_files import read_json
from zckpt.storage.location import Location

Encoding = Literal["xor", "overwrite"]
Checksum = Literal["xxh3-128", "blake3", "adler32"]
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)
CHECKSUMS: tuple[Checksum, ...] = get_args(Checksum)

INDEX = "model.safetensors.index.json"
UNCHANGED = "zckpt-unchanged.json"
"""The file that zckpt adds; see [Note: unchanged tensors]."""
MOST_BYTES = 256 << 20
"""The most bytes of an index."""
MOST_POSITIONS = 2**32
"""Bytes of a tensor that positions of four bytes can name."""

FRAME = b"\x28\xb5\x2f\xfd\xc0\x38"
"""How a frame begins, before its size in eight bytes: with a window of 128 KiB, and without a checksum."""

_DIRECTORY = re.compile(r"weight_v(\d{6})")
_MOST_VERSION = 999_999


@dataclass(frozen=True, slots=True)
class DeltaForm:
    """The kind of a delta.

    Attributes:
        version: of the new weights.
        base_version: of the weights that the delta changes.
        encoding: of each tensor's difference.
        checksum: of each tensor's new bytes.
    """

    version: int
    base_version: int
    encoding: Encoding = "xor"
    checksum: Checksum = "xxh3-128"

    def __post_init__(self) -> None:
        if not 0 <= self.base_version < self.version <= _MOST_VERSION:
            raise UsageError(
                "the versions of the delta are impossible", found=f"version {self.version} on {self.base_version}",
                expected=f"a version from 1 to {_MOST_VERSION:,}, and an older base", remedy="Change --version.",
            )  # fmt: skip
        for value, known in ((self.encoding, ENCODINGS), (self.checksum, CHECKSUMS)):
            if value not in known:
                raise UsageError(
                    f"{value!r} is not a form of a delta", expected=join_words(known),
                    remedy="Pass one of these as --encoding or --checksum.",
                )  # fmt: skip

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of the index."""
        return {
            "version": f"{self.version:06d}",
            "base_version": f"{self.base_version:06d}",
            "delta_encoding": self.encoding,
            "compression_format": "zstd",
            "checksum_format": self.checksum,
        }


def form_of(metadata: Mapping[str, object], file: str) -> DeltaForm:
    """The form by the metadata of an index; `file` is the index, for errors. Raises CorruptError if an entry is
    missing, or is not a version; UnsupportedError if zckpt does not know the encoding, the compression or the checksum.
    """
    texts = {key: metadata.get(key) for key in DeltaForm(1, 0).metadata}
    versions = [texts["version"], texts["base_version"]]
    numbers = [int(v) for v in versions if isinstance(v, str) and v.isascii() and v.isdecimal() and len(v) <= 6]
    if len(numbers) < 2 or numbers[0] <= numbers[1]:
        raise CorruptError(
            "the index does not say which versions the delta is between", file=file, found=f"{versions}"[:80],
            expected="a version, and an older base_version, of six digits",
            remedy="Copy the delta's directory again.",
        )  # fmt: skip
    known = {"delta_encoding": ENCODINGS, "compression_format": ("zstd",), "checksum_format": CHECKSUMS}
    for key, values in known.items():
        if texts[key] not in values:
            raise UnsupportedError(
                f"the index names a {key} that zckpt does not know", file=file, found=f"{texts[key]!r:.80}",
                expected=join_words(values), remedy="Make the delta again in one of these forms.",
            )  # fmt: skip
    encoding = next(value for value in ENCODINGS if value == texts["delta_encoding"])
    checksum = next(value for value in CHECKSUMS if value == texts["checksum_format"])
    return DeltaForm(numbers[0], numbers[1], encoding, checksum)


def version_in(name: str) -> int | None:
    """The version in a directory's name, as in `weight_v000007`; None if there is none."""
    found = _DIRECTORY.fullmatch(name)
    return int(found[1]) if found else None


def index_of(form: DeltaForm, weight_map: Mapping[str, str]) -> bytes:
    """The index; `weight_map` is tensor -> file."""
    return (json.dumps({"metadata": form.metadata, "weight_map": dict(weight_map)}, indent=2) + "\n").encode()


class Hasher(Protocol):
    """A checksum that is being computed."""

    def update(self, data: memoryview) -> object:
        """Takes the next bytes."""

    def hexdigest(self) -> str:
        """The checksum of all bytes so far, in hexadecimal digits."""


class _Adler32:
    def __init__(self) -> None:
        self._value = 1

    def update(self, data: memoryview) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def hasher_of(checksum: Checksum) -> Callable[[], Hasher]:
    """The function that begins a checksum of this kind. Raises UnsupportedError if its package is not installed."""
    if checksum == "adler32":
        return _Adler32
    try:
        if checksum == "xxh3-128":
            import xxhash

            return xxhash.xxh3_128
        import blake3

        return blake3.blake3
    except ImportError as error:
        raise missing(str(error.name)) from error


def missing(package: str) -> UnsupportedError:
    """The error for a package that deltas need and that is not installed."""
    return UnsupportedError(
        f"deltas need the package {package}, which is not installed", remedy="Run: pip install 'zckpt[delta]'."
    )


def is_delta(metadata: object) -> bool:
    """Whether an index with this metadata is that of a delta."""
    return isinstance(metadata, Mapping) and "delta_encoding" in metadata


def is_delta_directory(place: Location) -> bool:
    """Whether a directory has the index of a delta; False if that cannot be read."""
    try:
        index = place / INDEX
        said = read_json(index, MOST_BYTES, "an index") if index.is_file() else None
    except ZckptError:
        return False
    return isinstance(said, Mapping) and is_delta(said.get("metadata"))

"""Reads a delta directory: its form, and where each tensor's difference is. Nothing of it is trusted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import CorruptError, IncompleteError, NotACheckpointError, UnsafeError
from zckpt.base.words import examples
from zckpt.containers import TensorRef, open_container
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import BY_NAME, DType
from zckpt.deltas.decode import Decoder, decoder_of
from zckpt.deltas.form import CHECKSUMS, INDEX, MOST_BYTES, UNCHANGED, DeltaForm, form_of, is_delta
from zckpt.storage.json_files import read_json
from zckpt.storage.location import Location, location_of

_DIGEST = re.compile(r"[0-9a-f]{8,64}")
_AGAIN = "Copy the delta's directory again."


@dataclass(frozen=True, slots=True)
class DeltaDirectory:
    """A delta.

    Attributes:
        place: its directory.
        form: what kind of delta it is.
        changed: tensor -> its compressed difference, a vector of bytes.
        digests: tensor -> checksum of its new bytes, for these.
        unchanged: tensor -> checksum of its bytes, for those that did not change; empty if the delta does not say.
        names: all files, for fingerprints.
    """

    place: Location
    form: DeltaForm
    changed: Mapping[str, TensorRef]
    digests: Mapping[str, str]
    unchanged: Mapping[str, str] = field(default_factory=dict[str, str])
    names: tuple[str, ...] = ()

    @contextmanager
    def open_difference(self, name: str) -> Iterator[Callable[[int, int], bytes]]:
        """What reads the compressed difference of a changed tensor, given how many bytes at most and the offset in it."""
        where = self.changed[name]
        with location_of(where.store).open() as file:
            yield lambda nbytes, at: file.read(where.byte_offset + at, min(nbytes, where.nbytes - at))

    @contextmanager
    def decoder(self, name: str, entry: TensorEntry, dtype: DType) -> Iterator[Decoder]:
        """The decoder of a changed tensor; `dtype` is that of its bytes."""
        nbytes, path = entry.numel * dtype.itemsize, self.changed[name].store.path
        with self.open_difference(name) as read:
            yield decoder_of(self.form.encoding, nbytes, read, path, name)

    def digest_of(self, name: str) -> str | None:
        """The checksum of a tensor in the new version; None if the delta does not have it."""
        return self.digests.get(name, self.unchanged.get(name))


def read_delta(place: Location) -> DeltaDirectory:
    """Reads a delta's index, and the headers of its files. Raises NotACheckpointError if there is no index, or it is
    none of a delta; IncompleteError, CorruptError, UnsafeError, UnsupportedError if it is damaged, or of a form that
    zckpt does not know.
    """
    index = place / INDEX
    if not index.is_file():
        raise NotACheckpointError(
            "is not a delta", file=place, found=f"no {INDEX}",
            expected="a directory that `zckpt delta` or a trainer wrote for SGLang",
            remedy="Give the directory of one version, such as weight_v000001.",
        )  # fmt: skip
    said = read_json(index, MOST_BYTES, "the index of a delta")
    match said:
        case {"metadata": dict(metadata), "weight_map": dict(weight_map)} if is_delta(metadata):
            pass
        case _:
            raise NotACheckpointError(
                "is not a delta", file=place, found="an index of consolidated weights",
                expected="an index with a delta_encoding in its metadata",
                remedy="Give the directory of a delta; consolidated weights need none.",
            )  # fmt: skip
    form = form_of(metadata, index.path)
    files: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file or "/" in file or "\0" in file or file in (".", ".."):
            raise UnsafeError(
                "the index names a file outside its directory", file=index, found=f"{file!r:.80}",
                remedy="Do not use this delta; if you know its author, report it.",
            )  # fmt: skip
        files.setdefault(file, set()).add(name)
    changed: dict[str, TensorRef] = {}
    digests: dict[str, str] = {}
    for file, names in sorted(files.items()):
        for name, ref, digest in _in_file(place / file, names):
            changed[name], digests[name] = ref, digest
    known = _unchanged_digests(place / UNCHANGED, form) if (place / UNCHANGED).is_file() else {}
    unchanged = {name: digest for name, digest in known.items() if name not in changed}
    return DeltaDirectory(
        place, form, changed, digests, unchanged, (INDEX, *sorted(files), *([UNCHANGED] if known else []))
    )


def _in_file(file: Location, names: set[str]) -> Iterator[tuple[str, TensorRef, str]]:
    if not file.is_file():
        raise IncompleteError(
            "a file of the delta is missing", file=file, expected=f"a file with {examples(sorted(names))}, as the index says",
            remedy=_AGAIN,
        )  # fmt: skip
    container = open_container(file)
    root = container.root
    if container.kind != "safetensors" or not isinstance(root, Mapping) or root.keys() != names:
        raise CorruptError(
            "the file does not hold the tensors that the index says", file=file,
            found=examples(sorted(map(str, root))) if isinstance(root, Mapping) else container.kind,
            expected=examples(sorted(names)), remedy=_AGAIN,
        )  # fmt: skip
    for name, ref in root.items():
        digest = container.metadata.get(name, "")
        if (
            not isinstance(ref, TensorRef)
            or ref.dtype != BY_NAME["U8"]
            or len(ref.shape) != 1
            or not _DIGEST.fullmatch(digest)
        ):
            raise CorruptError(
                f"the difference of tensor {name!r} is not of the form of a delta", file=file,
                found=f"checksum {digest!r:.80}", expected="a vector of bytes, and a checksum in the header", remedy=_AGAIN,
            )  # fmt: skip
        yield name, ref, digest


def _unchanged_digests(file: Location, form: DeltaForm) -> dict[str, str]:
    match read_json(file, MOST_BYTES, "checksums of unchanged tensors"):
        case {"checksum_format": str(kind), "tensors": dict(tensors)} if kind == form.checksum and kind in CHECKSUMS:
            if all(isinstance(digest, str) and _DIGEST.fullmatch(digest) for digest in tensors.values()):
                return tensors
        case _:
            pass
    raise CorruptError("does not hold checksums of tensors", file=file, found="other entries", remedy=_AGAIN)

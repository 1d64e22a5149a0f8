"""Torch files of one tensor each, that differ in nothing but its elements: one is read, the others are the same at other places.

For the items of torch.distributed.checkpoint: a save has tens of thousands. [Note: what may differ] Reading a torch zip
file looks at its directory, at the local headers, and at `data.pkl` and `byteorder`. It looks at no checksum, at no contents of
other records, and at nothing between a record's end and what follows. If two files have the same length, and the same bytes
wherever reading looks, they hold the same tensor, each at its own place. Any other file is read by itself.
Source of the checksums' places: PKWARE APPNOTE 6.3.10, 4.3.
"""

from __future__ import annotations

from array import array
from functools import partial

from zckpt.containers import torch_zip
from zckpt.containers.alike import AlikeLengths
from zckpt.containers.container import Input
from zckpt.containers.tensor_ref import TensorRef
from zckpt.containers.zip_directory import Directory, checksums_of

try:
    from zckpt._core import which_alike
except ImportError:
    which_alike = None  # type: ignore[assignment]

_MOST_BYTES = 1 << 13
"""Of a file around its tensor: those that torch writes for one tensor have 1,500."""

_MOST_KNOWN, _MOST_LENGTHS = 16, 1024
"""Files that others are compared with: of one length, and lengths."""

_LOOKED_AT = ("data.pkl", "byteorder")


class AlikeItems:
    """Reads one small torch file after another."""

    def __init__(self) -> None:
        self._alike = AlikeLengths()
        self._known: dict[int, list[AlikeTensor]] = {}

    def root(self, item: Input) -> object:
        """The inert object in a torch file; errors as in `torch_zip.read_input`."""
        known = self._known.get(item.size)
        for other in known or ():
            if (ref := other.of(item)) is not None:
                return ref
        root = torch_zip.read_input(item, self._alike).root
        if known is None and len(self._known) < _MOST_LENGTHS:
            known = self._known.setdefault(item.size, [])
        if known is not None and len(known) < _MOST_KNOWN and (made := _known_of(item, root)) is not None:
            known.append(made)
        return root

    def which(self, source: Input, places: array[int]) -> list[AlikeTensor | None]:
        """What the small file at each of these (offset, bytes) holds; None where nothing known is alike, or where it takes more
        than the descriptor of a file to say so.
        """
        descriptor = getattr(source.file, "descriptor", None)
        if which_alike is None or descriptor is None:
            return [None] * (len(places) // 2)
        known = [one for nbytes in {*places[1::2]} for one in self._known.get(nbytes, ())]
        ends = [one.ends for one in known]
        found = array("q", which_alike(descriptor, source.file.size, places.tobytes(), ends))
        return [None if number < 0 else known[number] for number in found]


class AlikeTensor:
    """The tensor of a small torch file that was read, with which others are compared.

    Args:
        ref: the tensor.
        item: the file.
        free: (start, stop) of bytes that may be any in other files.
        start, stop: of the tensor's bytes.

    Attributes:
        distance: bytes from where the file begins to the tensor's elements.
        ends: what the C++ compares: what is before and behind the tensor's bytes.
    """

    __slots__ = ("_parts", "distance", "ends", "ref")

    def __init__(self, ref: TensorRef, item: Input, free: list[tuple[int, int]], start: int, stop: int) -> None:
        self.ref = ref
        self.distance = ref.byte_offset - item.base
        before, behind = item.read(0, start, "an item"), item.read(stop, item.size - stop, "an item")
        masks = _mask(free, 0, start), _mask(free, stop, item.size)
        self.ends = (item.size, before, masks[0], stop, behind, masks[1])
        self._parts = [
            (at, len(data), _as_number(mask), _as_number(data) & _as_number(mask))
            for at, data, mask in ((0, before, masks[0]), (stop, behind, masks[1]))
        ]

    def of(self, item: Input) -> TensorRef | None:
        """The tensor of another file of the same length; None if that is not alike."""
        for at, nbytes, mask, wanted in self._parts:
            data = item.peek(at, nbytes)
            if len(data) < nbytes or _as_number(data) & mask != wanted:
                return None
        ref = self.ref
        moved = item.base + self.distance - ref.byte_offset
        return TensorRef(
            item.store(ref.store.byteorder), ref.byte_offset + moved, ref.dtype, ref.shape, ref.stride, ref.storage_key,
            ref.storage_offset, ref.storage_nbytes, ref.storage_byte_offset + moved,
        )  # fmt: skip


def _known_of(item: Input, root: object) -> AlikeTensor | None:
    """A file with which others can be compared; None for one that holds more than a plain tensor."""
    if type(root) is not TensorRef or root.attributes is not None:
        return None
    directory = Directory(item)
    start = root.storage_byte_offset - item.base
    free = [(at, at + 4) for at in checksums_of(item)]
    behind = item.size
    for record in directory.records.values():
        begins = directory.data_offset(record.name)
        ends = begins + record.nbytes
        free += [(record.header_offset + 14, record.header_offset + 18), (ends, record.limit)]
        if begins == start:
            behind = ends
        elif record.name.partition("/")[2] not in _LOOKED_AT:
            free.append((begins, ends))
    if start + item.size - behind > _MOST_BYTES:
        return None
    return AlikeTensor(root, item, free, start, behind)


def _mask(free: list[tuple[int, int]], start: int, stop: int) -> bytes:
    """A mask for the bytes of a file from `start` to `stop`: zero for those that may be any."""
    mask = bytearray(b"\xff" * (stop - start))
    for begins, ends in free:
        begins, ends = max(begins, start) - start, min(ends, stop) - start
        if begins < ends:
            mask[begins:ends] = bytes(ends - begins)
    return bytes(mask)


_as_number = partial(int.from_bytes, byteorder="little")
"""Bytes as a number: `&` with a mask leaves those that are compared."""

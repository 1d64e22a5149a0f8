"""Opens the items of a torch.distributed.checkpoint save, and makes tensors of their chunks.

For `dcp`. Each item is a torch file within a data file; only its headers are read. A chunk is a box of its tensor: its
fragments are those of the torch file's tensor, embedded once per dimension that is cut.
Source: torch/distributed/checkpoint/{filesystem,planner_helpers,default_planner}.py (2.13).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from zckpt.base.errors import COPY_AGAIN, OTHER_SAVE, CorruptError, IncompleteError, InconsistentError, UnsupportedError
from zckpt.base.words import count, examples, ranks
from zckpt.containers import Placeholder, TensorRef, brief
from zckpt.containers.alike_items import AlikeItems
from zckpt.containers.container import open_input
from zckpt.containers.tensor_ref import MAX_FRAGMENTS
from zckpt.core.catalog import Role, TensorEntry
from zckpt.core.fragments import Fragment
from zckpt.core.overlaps import embed, shift, tile
from zckpt.layouts.dcp import rank_of
from zckpt.layouts.dcp.chunks import Chunks, DcpChunk, ItemPlace
from zckpt.layouts.dcp.cut_rows import fragments_of_rows
from zckpt.layouts.dcp.metadata import BytesItem, InertValue, Metadata, TensorItem
from zckpt.layouts.save.listing import Listing


def _places(item: TensorItem | BytesItem) -> list[ItemPlace]:
    """The torch files of an item."""
    if isinstance(item, BytesItem):
        return [item.place] if isinstance(item.place, ItemPlace) else []
    if isinstance(item.chunks, Chunks):
        return list(item.chunks.places())
    return [chunk.place for chunk in item.chunks if isinstance(chunk.place, ItemPlace) and chunk.numel]


def stored_in(metadata: Metadata) -> dict[str, dict[ItemPlace, str]]:
    """Data file -> each torch file in it, in their order, and the first item in that torch file."""
    found: dict[ItemPlace, str] = {}
    for item in metadata.items.values():
        for place in _places(item):
            found.setdefault(place, item.name)
    files: dict[str, dict[ItemPlace, str]] = {}
    for place in sorted(found):
        files.setdefault(place.file, {})[place] = found[place]
    return files


def files_of(metadata: Metadata) -> set[str]:
    """The data files that the metadata name."""
    found: set[str] = set()
    lists: dict[int, Sequence[str]] = {}  # most tensors have the same one
    for item in metadata.items.values():
        if isinstance(item, TensorItem) and isinstance(item.chunks, Chunks):
            lists[id(item.chunks.files)] = item.chunks.files
        else:
            found.update(place.file for place in _places(item))
    return found.union(*lists.values())


MAX_CUT_DIMS = 12
"""The most dimensions in which one tensor may be cut. A mesh has a few axes; each dimension doubles the corners of a
box.
"""

_MOST_COMPARED = 1000
"""The most chunks among which two overlapping ones are looked for, to be named in an error."""


class Items:
    """The items of one save; each is opened once, when it is first used.

    Args:
        listing: the files.
        file: where the items were described, for errors.
    """

    def __init__(self, listing: Listing, file: str) -> None:
        self.listing = listing
        self.file = file
        self._roots: dict[ItemPlace, object] = {}
        self._fragments = 0
        self._alike = AlikeItems()

    def open(self, places: Iterable[ItemPlace]) -> dict[ItemPlace, object]:
        """The inert object in each of these torch files, by place, without those in files that are known to be missing.
        Raises IncompleteError if data files are missing; CorruptError if one ends too early, or holds another object
        there.
        """
        wanted = sorted({place for place in places if place.file not in self.listing.absent} - self._roots.keys())
        self._check_there({place.file for place in wanted})
        for file, here in itertools.groupby(wanted, key=lambda place: place.file):
            with open_input(self.listing.where(file).path) as source:
                for place in here:
                    part = source.part(place.offset, place.length, "an item")
                    self._roots[place] = self._alike.root(part)
        return self._roots

    def open_all(self, items: Iterable[TensorItem | BytesItem]) -> None:
        """Opens all torch files of these items, data file by data file; later calls do not open them again."""
        self.open(place for item in items for place in _places(item))

    def has(self, item: TensorItem | BytesItem) -> bool:
        """Whether no part of an item is in a file that is known to be missing."""
        return all(place.file not in self.listing.absent for place in _places(item))

    def value(self, item: TensorItem | BytesItem) -> object:
        """The inert value of a pickled object, or of a tensor that was not cut. Raises UnsupportedError if a tensor was
        cut, IncompleteError if no file holds it.
        """
        if isinstance(item, BytesItem) and isinstance(item.place, InertValue):
            return item.place.value
        if isinstance(item, TensorItem) and len(item.chunks) == 1:
            (chunk,) = item.chunks
            if chunk.sizes == item.size and isinstance(chunk.place, TensorRef):
                return chunk.place
        places = _places(item)
        if len(places) != 1 or (isinstance(item, TensorItem) and item.chunks[0].sizes != item.size):
            kind = UnsupportedError if places else IncompleteError
            raise kind(f"an item {item.name!r} in {len(places)} pieces", file=self.file, expected="one is needed")
        if not self.has(item):
            raise IncompleteError(
                f"an item {item.name!r} is in a file that is missing",
                file=self.file,
                found=f"no file {places[0].file!r}",
                remedy="Copy that file here from the node that wrote it, or use another save.",
            )
        return self.open(places)[places[0]]

    def _check_there(self, files: set[str]) -> None:
        missing = sorted(file for file in files if not self.listing.where(file).is_file())
        if missing:
            lost = sorted({rank for rank in map(rank_of, missing) if rank is not None})
            there = [file for file in self.listing.files if file.endswith(".distcp")]
            raise IncompleteError(
                "data files are missing",
                file=self.listing.directory,
                found=f"{count(len(there), 'file')}, without {examples(missing)}",
                expected=f"{count(len(there) + len(missing), 'file')}, as the metadata say",
                remedy=f"Copy {f'those of {ranks(lost)}' if lost else 'them'} from the nodes that wrote them "
                "(--also DIR lays further directories over this one), or use another save.",
            )

    def tensors(self, items: Mapping[str, TensorItem], roles: Mapping[str, Role]) -> dict[str, TensorEntry]:
        """The tensors, put together from their chunks, by name; those without a role in `roles` are parameters. Raises
        IncompleteError, InconsistentError if the chunks do not cover a tensor, or cover it twice; UnsupportedError if zckpt
        does not read a tensor of this kind, or in millions of pieces.
        """
        cut = fragments_of_rows(items, self.listing, self._alike)
        self.open_all(item for name, item in items.items() if name not in cut)
        return {
            name: TensorEntry(name, item.shape, item.dtype, roles.get(name, "parameter"), cut[name])
            if name in cut
            else self._tensor(name, item, roles.get(name, "parameter"))
            for name, item in items.items()
        }

    def _tensor(self, name: str, item: TensorItem, role: Role) -> TensorEntry:
        chunks = [chunk for chunk in item.chunks if chunk.numel]
        self._check_cover(item, chunks)
        fragments: list[Fragment] = []
        for chunk in chunks:
            fragments += self._embedded(item, chunk)
        return TensorEntry(name, item.shape, item.dtype, role, tuple(fragments))

    def _ref(self, item: TensorItem, chunk: DcpChunk) -> TensorRef:
        if isinstance(chunk.place, ItemPlace) and chunk.place.file in self.listing.absent:
            # its place is taken to be that of its torch file, of which the first bytes are a header
            return self.listing.absent_tensor(chunk.place.file, chunk.place.offset, item.dtype, chunk.sizes)
        ref = chunk.place if isinstance(chunk.place, TensorRef) else self._roots[chunk.place]
        if isinstance(ref, Placeholder):
            from zckpt.layouts.save.cut_tensors import dense_in

            ref = dense_in(ref, item.dtype, chunk.sizes)
        file = self.file if isinstance(chunk.place, TensorRef) else self.listing.where(chunk.place.file).path
        if not isinstance(ref, TensorRef):
            kind = f"the kind of tensor {item.name!r} is not supported"
            if isinstance(ref, Placeholder):
                remedy = "Save it again as a dense tensor."
                raise UnsupportedError(
                    kind, file=file, found=str(ref), expected="a dense, strided tensor", remedy=remedy
                )
            raise CorruptError(
                f"holds another object instead of {item.name!r}", file=file, found=brief(ref), remedy=COPY_AGAIN
            )
        if (ref.shape, ref.dtype) != (chunk.sizes, item.dtype):
            raise InconsistentError(
                f"the data of {item.name!r} is not what the metadata say", file=file,
                found=f"{ref.dtype} of {list(ref.shape)}", expected=f"{item.dtype} of {list(chunk.sizes)}",
                remedy="Copy the metadata and the data files of one save again.",
            )  # fmt: skip
        return ref

    def chunk_fragments(self, item: TensorItem, chunk: DcpChunk) -> Sequence[Fragment]:
        """The elements of a chunk of an opened item, numbered from the chunk's first."""
        return self._ref(item, chunk).fragments()

    def _embedded(self, item: TensorItem, chunk: DcpChunk) -> Sequence[Fragment]:
        """A chunk's fragments, as fragments of its tensor."""
        fragments: Sequence[Fragment] = self._ref(item, chunk).fragments()
        shape = list(chunk.sizes)
        for dim in reversed(range(len(shape))):
            if shape[dim] == item.size[dim]:
                continue
            pieces = len(fragments) * (1 if all(f.rows == 1 for f in fragments) else math.prod(shape[:dim]))
            if self._fragments + pieces > MAX_FRAGMENTS:
                raise UnsupportedError(
                    f"tensor {item.name!r} is scattered over too many pieces",
                    file=self.file,
                    found=f"a chunk {list(chunk.sizes)} of {list(item.size)}, {self._fragments + pieces:,} pieces so far",
                    remedy="Save it again as a full state dict, or with another sharding.",
                )
            if not dim:  # rows, one after the other
                fragments = shift(fragments, chunk.offsets[0] * math.prod(shape[1:]))
                break
            fragments = embed(fragments, shape, dim, chunk.offsets[dim], item.size[dim], item.dtype.itemsize)
            shape[dim] = item.size[dim]
        self._fragments += len(fragments) if len(fragments) > 1 else 0
        return fragments

    def _check_cover(self, item: TensorItem, chunks: Sequence[DcpChunk]) -> None:
        """Checks that every element of a tensor is in exactly one chunk."""
        numel, held = math.prod(item.size), sum(chunk.numel for chunk in chunks)
        cut = [d for d, extent in enumerate(item.size) if any(chunk.sizes[d] != extent for chunk in chunks)]
        if len(cut) > MAX_CUT_DIMS:
            raise UnsupportedError(
                f"tensor {item.name!r} is cut in {len(cut)} dimensions",
                file=self.file,
                remedy="Save it again as a full state dict, or with fewer sharded dimensions.",
                expected="a cut in at most two dimensions",
            )
        boxes = ([(chunk.offsets[d], chunk.offsets[d] + chunk.sizes[d]) for d in cut] for chunk in chunks)
        if not numel or (held == numel and tile(boxes, [item.size[d] for d in cut])):
            return
        for a, b in itertools.combinations(chunks[:_MOST_COMPARED], 2):
            if all(x < y + n and y < x + m for x, m, y, n in zip(a.offsets, a.sizes, b.offsets, b.sizes)):
                raise InconsistentError(
                    f"chunks of tensor {item.name!r} overlap", file=self.file,
                    found=f"sizes {list(a.sizes)} at {list(a.offsets)}, and {list(b.sizes)} at {list(b.offsets)}",
                    expected="each element in one chunk", remedy=OTHER_SAVE,
                )  # fmt: skip
        raise IncompleteError(
            f"elements of tensor {item.name!r} are missing",
            file=self.file,
            found=f"{held:,} of {numel:,} elements, in {count(len(chunks), 'chunk')}",
            expected=f"all elements of shape {list(item.size)}",
            remedy="Copy the metadata and data files of all ranks here, or use another save.",
        )

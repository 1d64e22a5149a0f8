"""Reads what Orbax saves of a tree of arrays: MaxText's, Levanter's and other programs of JAX, in directories or in OCDBT.

`_METADATA` names the leaves of the tree; an array is one of Zarr (`zarr`), called as the keys on the way to it with dots between.
Its files lie in a directory of this name, or all arrays' are values of one OCDBT store (`containers.ocdbt`). A chunk that is not
there counts as zeros for Zarr; here it is an error, unless the save says that zeros were not stored.
What is below `opt_state` or `optimizer`, at the top of the tree or below one key, is the optimizer's, and not read; neither are
`step`, single numbers and texts.
Source: orbax-checkpoint 0.12.8, _src/metadata/tree.py, _src/metadata/array_metadata_store.py, _src/serialization/
{tensorstore_utils,jax_array_handlers}.py, _src/path/{atomicity,step}.py.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Iterable, Iterator, Mapping

from zckpt.base.errors import COPY_AGAIN, OTHER_SAVE, CorruptError, IncompleteError, InconsistentError
from zckpt.base.words import count, examples
from zckpt.containers import TensorRef, brief, ocdbt
from zckpt.containers.tensor_ref import contiguous_stride
from zckpt.core.catalog import Catalog, Role, Source, TensorEntry
from zckpt.core.evidence import Evidence
from zckpt.core.stores import FileStore, MemoryStore, Store
from zckpt.layouts.dcp.chunks import DcpChunk
from zckpt.layouts.dcp.items import Items
from zckpt.layouts.dcp.metadata import TensorItem
from zckpt.layouts.save.family import Record
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.module_states import as_mapping
from zckpt.layouts.save.trainers import UNFINISHED
from zckpt.layouts.weights_alone import ORBAX, zarr
from zckpt.layouts.weights_alone.unpacking import UnpackedChunks, unpack_later, zeros
from zckpt.storage.json_files import read_json

_MOST_BYTES = 256 << 20
_MOST_METADATA = 1 << 20
"""Of one array."""
_MOST_ZEROS = 1 << 16
"""Chunks of one array that were not stored, being zero."""
_CHECKPOINT = "_CHECKPOINT_METADATA"
_OPTIMIZERS = ("opt_state", "opt_states", "optimizer_state", "optimizer_states")
_IN_OPTIMIZER = re.compile(
    r"\d+|opt_states?|states?|param_states|mu|nu|m|v|v_row|v_col|count|steps?|trace|momentum|velocity|exp_avg(?:_sq)?|ema|"
    r"inner_(?:opt_)?states?|acc_grads|mini_step|gradient_step|hyperparams|accumulators?|sum_of_squares"
)
"""Keys below `optimizer` that Optax and its kin have; a model may have a module of that name, with weights."""
_NO_ARRAYS = ("string", "scalar", "None")
_STEP = re.compile(r"(?:[A-Za-z]+[_-])?0*(\d{1,18})")
_COPY = "Copy the whole directory of the save again (--also DIR lays further directories over this one)."

Place = tuple[Store, int, int]
"""Bytes of a store: which, from where on, and how many."""


class SavedKeys:
    """The keys of a save, and the bytes that they stand for.

    Args:
        listing: its files.

    Raises:
        CorruptError, IncompleteError, UnsupportedError: the store of OCDBT cannot be read.
    """

    def __init__(self, listing: Listing) -> None:
        self._listing = listing
        self._stores: dict[str, FileStore] = {}
        self._values: Mapping[str, ocdbt.StoredValue] = {}
        self.is_store = ocdbt.MANIFEST in listing.files
        if self.is_store:
            self._values = ocdbt.read_keys(self._read)
        self.names: Iterable[str] = self._values if self.is_store else listing.files

    def __contains__(self, key: str) -> bool:
        return key in self.names

    def place(self, key: str) -> Place:
        """Where the bytes of a key are; raises CorruptError where they are behind the end of a file."""
        if not self.is_store:
            store = self._store(key)
            return store, 0, store.size
        value = self._values[key]
        if value.inline is not None:
            address = ctypes.cast(ctypes.c_char_p(value.inline), ctypes.c_void_p).value or 0
            file = self._listing.files[value.file].path
            return MemoryStore(address, value.nbytes, value.inline, place=f"{file}[{key}]"), 0, value.nbytes
        store = self._store(value.file)
        if value.offset + value.nbytes > store.size:
            raise CorruptError(
                f"ends before the end of {key!r}", file=store.path, found=f"{store.size:,} bytes",
                expected=f"{value.offset + value.nbytes:,} bytes or more", remedy=COPY_AGAIN, byte_offset=store.size,
            )  # fmt: skip
        return store, value.offset, value.nbytes

    def read(self, key: str, start: int, nbytes: int) -> bytes:
        """Some bytes of a key; fewer only at their end."""
        if not self.is_store:
            return self._listing.files[key].read(nbytes, start)
        value = self._values[key]
        if value.inline is not None:
            return value.inline[start : start + nbytes]
        return self._read(value.file, value.offset + start, max(0, min(nbytes, value.nbytes - start)))

    def _store(self, file: str) -> FileStore:
        if file not in self._stores:
            self._check(file)
            self._stores[file] = self._listing.files[file].store()
        return self._stores[file]

    def _read(self, file: str, offset: int, nbytes: int | None) -> bytes:
        self._check(file)
        return self._listing.files[file].read(nbytes, offset)

    def _check(self, file: str) -> None:
        if file not in self._listing.files:
            raise IncompleteError(
                "a data file is missing", file=self._listing.directory, found=f"no {file!r}",
                expected=f"the files that {ocdbt.MANIFEST!r} names", remedy=_COPY,
            )  # fmt: skip


def read(listing: Listing, *, allow_unknown: bool = False) -> Catalog:
    """The catalog of a save.

    Args:
        listing: its files.
        allow_unknown: take chunks that are not there for zeros, where the save does not say that zeros were stored.

    Raises:
        IncompleteError: the save was not finished, or files are missing. InconsistentError: files are of several saves.
        CorruptError: metadata cannot be read, or do not fit the files. UnsupportedError: arrays are stored in another way.
    """
    _check_finished(listing)
    (leaves, stores_zeros), keys = _read_tree(listing), SavedKeys(listing)
    stored = sorted(
        name.removesuffix(f"/{end}") for name in keys.names for end in (zarr.V2, zarr.V3) if name.endswith(f"/{end}")
    )
    wanted = [name for name, kind in leaves.items() if kind not in ("string", "None")]
    if lacking := sorted({*wanted} - {*stored}):
        raise IncompleteError(
            f"{count(len(lacking), 'array is', 'arrays are')} missing", file=listing.directory, found=f"no {examples(lacking)}",
            expected=f"the arrays that {ORBAX!r} names", remedy=_COPY,
        )  # fmt: skip
    if odd := sorted({*stored} - leaves.keys()):
        raise InconsistentError(
            "holds arrays of another save", file=listing.directory, found=examples(odd),
            expected=f"those that {ORBAX!r} names", remedy=OTHER_SAVE,
        )  # fmt: skip
    states = [name for name in wanted if is_state(name)]
    names = [name for name in wanted if leaves[name] not in _NO_ARRAYS and name not in {*states}]
    tensors = _Arrays(listing, keys, stores_zeros, allow_unknown=allow_unknown)
    found = {name: tensors.entry(name) for name in names}
    rest = [name for name, kind in leaves.items() if kind in _NO_ARRAYS and kind != "None" and not is_state(name)]
    notes = [*tensors.notes()]
    if states:
        notes.append(f"Optimizer states are left out: {count(len(states), 'array')}, such as {examples(states, 1)}.")
    if rest:
        notes.append(f"Numbers and texts beside the arrays are left out: {examples(rest)}.")
    step = next((found for found in map(_STEP.fullmatch, _names_above(listing)) if found), None)
    source = Source("Orbax", listing.directory.path, listing.tag, ("Orbax", ""), notes=tuple(notes),
                    global_steps=int(step[1]) if step else None)  # fmt: skip
    return Catalog(
        found, source, Evidence("metadata", f"{ORBAX}, which names every array, and the grids of their chunks")
    )


def unread_states(listing: Listing) -> str:
    """Optimizer states of a save, which are not read, in words; empty if there are none."""
    states = [name for name, kind in _read_tree(listing)[0].items() if kind not in _NO_ARRAYS and is_state(name)]
    return f"{count(len(states), 'array')}, such as {examples(states, 1)}" if states else ""


def records(listing: Listing) -> Iterator[tuple[str, list[Record]]]:
    """The data files, which have no checksums that zckpt reads."""
    yield from ((file.path, list[Record]()) for name, file in listing.files.items() if "/" in name)


def is_state(name: str) -> bool:
    """Whether a leaf is an optimizer's, by its name; so is the number of steps beside the weights."""
    first, *rest = keys = name.split(".")
    if name == "step" or any(key in _OPTIMIZERS for key in keys[:2]):
        return True
    below = rest if first == "optimizer" else rest[1:] if rest[:1] == ["optimizer"] else ()
    return any(map(_IN_OPTIMIZER.fullmatch, below[:2]))


def state_bytes(listing: Listing) -> Iterator[tuple[str, int]]:
    """(file, bytes) of each part of the optimizer's states."""
    keys = SavedKeys(listing)
    states = set(filter(is_state, _read_tree(listing)[0]))
    for key in keys.names:
        if key.partition("/")[0] in states:
            store, _, nbytes = keys.place(key)
            if isinstance(store, FileStore):
                yield store.path, nbytes


def _names_above(listing: Listing) -> list[str]:
    """Names of the directory of the save and of that above it, which may be called as its step."""
    here = listing.directory.absolute()
    return [here.name, here.parent.name]


def _check_finished(listing: Listing) -> None:
    """Raises IncompleteError for a save that was not finished."""
    name = next((name for name in _names_above(listing) if UNFINISHED in name), "")
    if not name and _CHECKPOINT in listing.files and "commit_success.txt" not in listing.files:
        said = read_json(listing.files[_CHECKPOINT].path, _MOST_BYTES, "Orbax's metadata of a save")
        if isinstance(said, dict) and said.get("init_timestamp_nsecs") and not said.get("commit_timestamp_nsecs"):
            name = _CHECKPOINT
    if name or ORBAX not in listing.files:
        raise IncompleteError(
            "was not finished", file=listing.directory, found=f"{name!r}, a name that Orbax gives a save while it is written"
            if UNFINISHED in name else f"{name!r} without the time of its end" if name else f"no {ORBAX!r}",
            expected="a save that was committed", remedy="Use the step before it.",
        )  # fmt: skip


def _read_tree(listing: Listing) -> tuple[dict[str, str], bool]:
    """Name -> kind of value of each leaf, as `_METADATA` says it, and whether chunks of zeros were stored too."""
    file = listing.files[ORBAX].path if ORBAX in listing.files else ""
    said = as_mapping(read_json(file, _MOST_BYTES, "Orbax's metadata of a tree"), "its content", file)
    leaves: dict[str, str] = {}
    try:
        for leaf in as_mapping(said.get("tree_metadata"), "'tree_metadata'", file).values():
            path = [str(key["key"]) for key in leaf["key_metadata"]]  # type: ignore[index]
            value = leaf["value_metadata"]  # type: ignore[index]
            if value.get("skip_deserialize") or not path:
                continue
            name = ".".join(path)
            if any(not part or part in ("..", "/") or "\0" in part or "/" in part for part in path):
                raise ValueError(f"a key {brief(name)}")
            if name in leaves:
                raise ValueError(f"{brief(name)} twice")
            leaves[name] = str(value["value_type"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptError(
            "does not describe a tree", file=file, found=f"{type(error).__name__}: {error}"[:200],
            expected="'key_metadata' and 'value_metadata' of each leaf", remedy=COPY_AGAIN,
        ) from error  # fmt: skip
    return leaves, said.get("store_array_data_equal_to_fill_value") is True


class _Arrays:
    """The arrays of a save.

    Args:
        listing: its files.
        keys: the keys in it.
        stores_zeros: whether chunks of zeros were stored too.
        allow_unknown: as for `read`.
    """

    def __init__(self, listing: Listing, keys: SavedKeys, stores_zeros: bool, *, allow_unknown: bool) -> None:
        self._listing, self._keys, self._stores_zeros = listing, keys, stores_zeros
        self._may_lack = not stores_zeros and (keys.is_store or allow_unknown)
        self._items = Items(listing, listing.files[ORBAX].path)
        self._scratch = UnpackedChunks()
        self._zeros: list[str] = []
        self._places = set[tuple[str, int]]()
        self._said = _read_chunk_shapes(listing)

    def notes(self) -> Iterator[str]:
        """What was taken for granted."""
        if self._zeros:
            yield f"{count(len(self._zeros), 'chunk was', 'chunks were')} not stored, and are zeros: {examples(self._zeros)}."

    def entry(self, name: str) -> TensorEntry:
        """A tensor; raises as `read`."""
        end = zarr.V2 if f"{name}/{zarr.V2}" in self._keys else zarr.V3
        key = f"{name}/{end}"
        file = str(self._keys.place(key)[0]) if self._keys.is_store else self._listing.files[key].path
        grid = zarr.parse(
            self._keys.read(key, 0, _MOST_METADATA), f"{file}/{end}" if self._keys.is_store else file, name
        )
        said = self._said.get(name)
        if said is not None and said != grid.inner:
            raise InconsistentError(
                f"does not fit array {name!r}", file=file, found=f"chunks of {list(grid.inner)}",
                expected=f"of {list(said)}, as 'array_metadatas' says", remedy=OTHER_SAVE,
            )  # fmt: skip
        self._check_count(name, grid)
        chunks = [chunk for at in grid.chunks() for chunk in self._chunks(name, grid, at)]
        role: Role = "parameter" if grid.dtype.kind in ("float", "complex") else "buffer"
        item = TensorItem(name, (name,), grid.dtype, grid.shape, chunks)
        return self._items.tensors({name: item}, {name: role})[name]

    def _check_count(self, name: str, grid: zarr.ZarrGrid) -> None:
        """Raises IncompleteError where an array has more chunks than there are files, before they are counted one by one."""
        total = math.prod(grid.counts)
        held = sum(key.startswith(f"{name}/") for key in self._keys.names) - 1 if total > _MOST_ZEROS else total
        if total > max(held, _MOST_ZEROS if self._may_lack else 0) or math.prod(grid.inner_counts) > _MOST_ZEROS:
            raise IncompleteError(
                f"chunks of array {name!r} are missing", file=self._listing.directory, found=count(held, "chunk"),
                expected=count(total * math.prod(grid.inner_counts), "chunk"), remedy=_COPY,
            )  # fmt: skip

    def _chunks(self, name: str, grid: zarr.ZarrGrid, at: tuple[int, ...]) -> Iterator[DcpChunk]:
        """The boxes of an array that a chunk holds."""
        key = f"{name}/{grid.key(at)}"
        begin = tuple(number * own for number, own in zip(at, grid.chunk, strict=True))
        if key not in self._keys:
            yield self._absent(grid, key, begin, grid.chunk)
            return
        place = self._keys.place(key)
        if not grid.is_sharded:
            yield self._held(grid, key, place, begin)
            return
        for inner, where in zip(grid.inner_chunks(), self._index(key, grid, place), strict=True):
            first = tuple(own + number * size for own, number, size in zip(begin, inner, grid.inner, strict=True))
            if any(low >= extent for low, extent in zip(first, grid.shape, strict=True)):
                continue
            part = f"{key}, part {'.'.join(map(str, inner)) or '0'}"
            yield (
                self._absent(grid, part, first, grid.inner) if where is None else self._held(grid, part, where, first)
            )

    def _index(self, key: str, grid: zarr.ZarrGrid, place: Place) -> Iterator[Place | None]:
        """Where the chunks in a chunk are; None for one that is not there."""
        store, offset, nbytes = place
        number = math.prod(grid.inner_counts)
        size = 16 * number + 4
        data = self._keys.read(key, 0 if grid.index_first else max(0, nbytes - size), size)
        if len(data) != size or ocdbt.crc32c(data[:-4]) != int.from_bytes(data[-4:], "little"):
            raise CorruptError(
                f"has no places of the parts of {key!r}", file=str(store), found="another length or checksum",
                expected=f"{size:,} bytes that say them", remedy=COPY_AGAIN,
            )  # fmt: skip
        words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, size - 4, 8)]
        for start, length in zip(words[::2], words[1::2], strict=True):
            if start == length == 2**64 - 1:
                yield None
            elif start + length > nbytes:
                raise CorruptError(
                    f"ends before the end of a part of {key!r}", file=str(store), found=f"{nbytes:,} bytes",
                    expected=f"{start + length:,} bytes or more", remedy=COPY_AGAIN,
                )  # fmt: skip
            else:
                yield store, offset + start, length

    def _absent(self, grid: zarr.ZarrGrid, key: str, begin: tuple[int, ...], chunk: tuple[int, ...]) -> DcpChunk:
        if not self._may_lack:
            raise IncompleteError(
                "a chunk of an array is missing", file=self._listing.directory, found=f"no {key!r}",
                expected="all chunks, since the save says that those of zeros were stored too" if self._stores_zeros
                else "a file for each chunk: nothing says whether this one was left out as zeros, or lost",
                remedy=_COPY if self._stores_zeros
                else f"{_COPY} If none was lost, pass --allow-unknown-layout, which takes them for zeros.",
            )  # fmt: skip
        self._zeros.append(key)
        return self._box(grid, zeros(key, math.prod(chunk), grid.dtype), 0, begin, chunk)

    def _held(self, grid: zarr.ZarrGrid, key: str, place: Place, begin: tuple[int, ...]) -> DcpChunk:
        store, offset, nbytes = place
        if (known := (str(store), offset)) in self._places and nbytes:
            raise InconsistentError(
                f"two chunks are the same bytes, one of them {key!r}", file=str(store), found=f"bytes from {offset:,} on",
                expected="bytes of its own for each", remedy=COPY_AGAIN,
            )  # fmt: skip
        self._places.add(known)
        numel = math.prod(grid.inner)
        if grid.packed:
            return self._box(grid, unpack_later(key, place, numel, grid.dtype, self._scratch), 0, begin, grid.inner)
        if nbytes != numel * grid.dtype.itemsize:
            raise CorruptError(
                f"does not fit chunk {key!r}", file=str(store), found=f"{nbytes:,} bytes",
                expected=f"{numel * grid.dtype.itemsize:,} bytes: {grid.dtype} of {list(grid.inner)}", remedy=COPY_AGAIN,
            )  # fmt: skip
        return self._box(grid, store, offset, begin, grid.inner)

    def _box(
        self, grid: zarr.ZarrGrid, store: Store, offset: int, begin: tuple[int, ...], chunk: tuple[int, ...]
    ) -> DcpChunk:
        sizes = tuple(min(own, extent - low) for own, extent, low in zip(chunk, grid.shape, begin, strict=True))
        nbytes = math.prod(chunk) * grid.dtype.itemsize
        ref = TensorRef(store, offset, grid.dtype, sizes, contiguous_stride(chunk), "", 0, nbytes, offset)  # type: ignore[arg-type]
        return DcpChunk(begin, sizes, ref)


def _read_chunk_shapes(listing: Listing) -> dict[str, tuple[int, ...]]:
    """The shape of each array's chunks, as the processes that wrote them say; nothing where they do not.

    Raises:
        CorruptError: it cannot be read.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name in listing.files:
        if not name.startswith("array_metadatas/"):
            continue
        file = listing.files[name].path
        said = as_mapping(read_json(file, _MOST_BYTES, "Orbax's metadata of arrays"), "its content", file)
        try:
            for one in said["array_metadatas"]:  # type: ignore[attr-defined]
                array = one["array_metadata"]
                found[str(array["param_name"])] = tuple(array["chunk_shape"])
        except (KeyError, TypeError) as error:
            raise CorruptError(
                "does not describe arrays", file=file, found=f"{type(error).__name__}: {error}"[:200],
                expected="'param_name' and 'chunk_shape' of each", remedy=COPY_AGAIN,
            ) from error  # fmt: skip
    return found

"""Where a pickled tensor's elements are in its file, found without reading them, and what tensors use of their storages.

For the readers of this package, which make them, and the layouts, which turn them into fragments.
A torch tensor is a strided view of a storage: element (i, j, ..) is `storage_offset + i*stride[0] + j*stride[1] + ..`
elements behind its start. A `TensorRef` exists only if that view stays inside its storage, and the storage inside its file.
`torch.save` writes a view with the whole storage that it is a view of, so a storage may be larger than all tensors of the file
that are views of it: the rest is waste, which `slim` and `du` count.
Source: torch/_utils.py `_rebuild_tensor_v2`, `_rebuild_tensor_v3` (2.13).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import TypeGuard

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import COPY_AGAIN, CorruptError, UnsupportedError
from zckpt.containers.inert import Placeholder, brief
from zckpt.core.dtypes import DType
from zckpt.core.fragments import Block, Fragment, fragment_of
from zckpt.core.stores import FileStore

MAX_NUMBER = 2**63 - 1
"""torch's shapes, strides and offsets are signed 64-bit numbers."""

MAX_DIMS = 128
"""torch has no limit, and real tensors have at most 6 dimensions; this limit bounds the arithmetic."""

MAX_FRAGMENTS = 1 << 20
"""The most fragments of a tensor, about 150 bytes each. A (1024, 1024, 3, 3) convolution in channels-last order needs so many."""


def is_count(value: object) -> TypeGuard[int]:
    """Whether an object of a file is a number that counts elements or bytes."""
    return type(value) is int and 0 <= value <= MAX_NUMBER


def as_shape(value: object) -> tuple[int, ...]:
    """The shape that a file says, in a list or tuple of counts. Raises ValueError for anything else."""
    if not isinstance(value, tuple | list) or len(value) > MAX_DIMS or not all(map(is_count, value)):
        raise ValueError(f"{brief(value)} instead of a shape")
    return tuple(value)


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage: one run of bytes in a file that tensors are views of.

    Attributes:
        key: its name in the file.
        dtype: of its elements; None for torch's `UntypedStorage`, which is bytes.
        numel: elements in it; bytes when it is untyped.
        store: the file.
        byte_offset: of its first byte.
    """

    key: str
    dtype: DType | None
    numel: int
    store: FileStore
    byte_offset: int

    @property
    def nbytes(self) -> int:
        """Bytes in it."""
        return self.numel * (self.dtype.itemsize if self.dtype else 1)

    def view(
        self, storage_offset: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: DType | None = None
    ) -> TensorRef:
        """A tensor in it; `storage_offset` and `stride` count elements of `dtype`, by default the storage's own. Raises
        CorruptError if such a tensor is impossible.
        """
        if len(shape) != len(stride) or len(shape) > MAX_DIMS:
            raise self._bad_view("impossible", f"{len(shape)} dimensions, {len(stride)} strides")
        for number in (storage_offset, *shape, *stride):
            if not is_count(number):
                what = "size" if number in shape else "stride" if number in stride else "offset"
                raise self._bad_view("impossible", f"{what} {brief(number)}", "whole numbers from 0 to 2^63 - 1")
        dtype = dtype or self.dtype
        if dtype is None:
            raise self._bad_view("without a dtype", "an untyped storage")
        return TensorRef(
            store=self.store,
            byte_offset=self.byte_offset + storage_offset * dtype.itemsize,
            dtype=dtype,
            shape=shape,
            stride=stride,
            storage_key=self.key,
            storage_offset=storage_offset,
            storage_nbytes=self.nbytes,
            storage_byte_offset=self.byte_offset,
        )

    def like(self, tensor: TensorRef) -> TensorRef:
        """The tensor that is in this storage what another one is in a storage of this key, dtype and size."""
        return TensorRef(
            self.store, self.byte_offset + tensor.byte_offset - tensor.storage_byte_offset, tensor.dtype, tensor.shape,
            tensor.stride, self.key, tensor.storage_offset, tensor.storage_nbytes, self.byte_offset,
        )  # fmt: skip

    def _bad_view(self, how: str, found: str, expected: str = "") -> CorruptError:
        what = f"the view of storage {self.key!r} is {how}"
        return CorruptError(what, file=self.store.path, found=found, expected=expected, remedy=COPY_AGAIN)


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor in a file.

    Attributes:
        store: the file.
        byte_offset: of the tensor's first element, from the start of the file.
        dtype: of its elements.
        shape: in elements.
        stride: elements of the storage from one index to the next, per dimension.
        storage_key: which storage it is a view of.
        storage_offset: elements from the storage's start to the tensor's first.
        storage_nbytes: bytes in the storage.
        storage_byte_offset: of the storage's first byte, from the start of the file.
        attributes: those that Python code set on it, such as DeepSpeed's `ds_id`; None for none.
    """

    store: FileStore
    byte_offset: int
    dtype: DType
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_key: str
    storage_offset: int
    storage_nbytes: int
    storage_byte_offset: int
    attributes: Mapping[object, object] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if 0 in self.shape:
            return
        if math.prod(self.shape) > MAX_NUMBER:
            raise CorruptError(
                f"the shape of a tensor in storage {self.storage_key!r} is impossible", file=self.store.path,
                found=f"{self.shape[0]:,} rows in {len(self.shape)} dimensions", expected="at most 2^63 elements",
                remedy=COPY_AGAIN,
            )  # fmt: skip
        last = self.storage_offset
        for dim, step in zip(self.shape, self.stride):
            last += (dim - 1) * step
        if (last + 1) * self.dtype.itemsize > self.storage_nbytes:
            raise CorruptError(
                f"storage {self.storage_key!r} is too small for its tensor", file=self.store.path,
                found=f"{self.storage_nbytes:,} bytes", expected=f"{(last + 1) * self.dtype.itemsize:,} bytes or more",
                byte_offset=self.storage_byte_offset, remedy=COPY_AGAIN,
            )  # fmt: skip

    @property
    def numel(self) -> int:
        """Elements in it; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, each counted once for each index."""
        return self.numel * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements are row-major without gaps, as for `torch.Tensor.is_contiguous`."""
        folded = self._folded()
        return self.numel == 0 or not folded or (len(folded) == 1 and folded[0][1] == 1)

    @property
    def place(self) -> tuple[object, ...]:
        """Equal for two names of the same tensor, and only for these."""
        return self.store.path, self.storage_key, self.storage_offset, self.dtype, self.shape, self.stride

    @property
    def byte_stop(self) -> int:
        """One past its last byte in the file; where it begins if it has no elements."""
        last = sum((dim - 1) * step for dim, step in zip(self.shape, self.stride))
        return self.byte_offset + (last + 1) * self.dtype.itemsize if self.numel else self.byte_offset

    @property
    def repeats(self) -> bool:
        """Whether some of its elements may share a place, as those of an expanded tensor do."""
        reach = 0
        for dim, step in sorted(zip(self.shape, self.stride), key=lambda pair: pair[1]):
            if dim > 1 and step <= reach:
                return True
            reach += (dim - 1) * step
        return False

    def box(self, first: Sequence[int], sizes: tuple[int, ...]) -> TensorRef:
        """The part of it that begins at an index and has these sizes. Raises ValueError if it is not within the tensor."""
        if len(first) != len(self.shape) or any(
            a + n > whole for a, n, whole in zip(first, sizes, self.shape, strict=True)
        ):
            raise ValueError(f"a piece {list(sizes)} at {list(first)} of {list(self.shape)}")
        step = sum(index * stride for index, stride in zip(first, self.stride, strict=True))
        offset = self.byte_offset + step * self.dtype.itemsize
        return replace(self, shape=sizes, byte_offset=offset, storage_offset=self.storage_offset + step)

    def fragments(self) -> tuple[Fragment, ...]:
        """Its elements as pitched runs, in order; see [Note: the geometry of a fragment].

        A fragment has up to two dimensions. Each index of those before them makes another fragment. Raises
        UnsupportedError if it would take more than `MAX_FRAGMENTS`.
        """
        if self.numel == 0:
            return ()
        dims = self._folded()
        count, step = dims.pop() if dims else (1, 1)
        rows, row_step = dims.pop() if dims else (1, 0)
        blocks = math.prod(dim for dim, _ in dims)
        if blocks > MAX_FRAGMENTS:
            raise UnsupportedError(
                f"one of its tensors is scattered over {blocks:,} pieces", file=self.store.path,
                found=f"shape {list(self.shape)}, strides {list(self.stride)}", expected=f"at most {MAX_FRAGMENTS:,} pieces",
                remedy="Call .contiguous() on it before saving.",
            )  # fmt: skip
        offsets = map(sum, itertools.product(*([index * step for index in range(dim)] for dim, step in dims)))
        return tuple(
            fragment_of(
                self.store,
                self.byte_offset + offset * self.dtype.itemsize,
                Block(number * rows * count, count, rows, count, row_step, step),
            )
            for number, offset in enumerate(offsets)
        )

    def _folded(self) -> list[tuple[int, int]]:
        """(extent, stride) of the fewest dimensions with the same elements: (2, 3, 4) with (12, 4, 1) is (24,) with (1,)."""
        folded: list[tuple[int, int]] = []
        for dim, step in zip(self.shape, self.stride):
            if dim == 1:
                continue
            if folded and folded[-1][1] == dim * step:
                folded[-1] = (folded[-1][0] * dim, step)
            else:
                folded.append((dim, step))
        return folded


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a dense tensor in torch; a dimension of 0 counts as 1."""
    stride = [1]
    for dim in reversed(shape[1:]):
        stride.append(stride[-1] * max(dim, 1))
    return tuple(reversed(stride)) if shape else ()


_MOST_DEPTH = 40


def tensors_in(value: object, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], TensorRef]]:
    """The tensors in an inert value, nested at most 40 deep, with the keys that lead to each."""
    if isinstance(value, TensorRef):
        yield names, value
    elif len(names) < _MOST_DEPTH:
        for key, item in _items(value):
            yield from tensors_in(item, (*names, key))


def placeholders_in(value: object, depth: int = 0) -> Iterator[Placeholder]:
    """The objects of classes in an inert value, the outermost ones."""
    if isinstance(value, Placeholder):
        yield value
    elif depth < _MOST_DEPTH:
        for _, item in _items(value):
            yield from placeholders_in(item, depth + 1)


def _items(value: object) -> Iterable[tuple[str, object]]:
    """What an inert value holds; what has no key has an empty one."""
    if isinstance(value, Mapping):
        return [(str(key), item) for key, item in value.items()]
    if isinstance(value, Placeholder):
        return [("", value.args), ("", value.state), ("", value.kwargs), ("", value.items)]
    return [("", item) for item in value] if isinstance(value, list | tuple) else []


def waste_of(refs: Iterable[TensorRef]) -> int:
    """Bytes of storages that none of these tensors uses."""
    storages: dict[tuple[str, int, int], set[tuple[int, int]]] = {}
    for ref in refs:
        if ref.numel:
            storage = (ref.store.path, ref.storage_byte_offset, ref.storage_nbytes)
            storages.setdefault(storage, set()).add((ref.byte_offset, ref.byte_stop))
    return sum(nbytes - _count_covered(spans) for (_, _, nbytes), spans in storages.items())


def _count_covered(spans: Iterable[tuple[int, int]]) -> int:
    """Bytes in any of these ranges."""
    covered = last = 0
    for begin, end in sorted(spans):
        covered += max(0, end - max(begin, last))
        last = max(last, end)
    return covered

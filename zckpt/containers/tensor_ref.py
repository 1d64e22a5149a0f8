"""Where a pickled tensor's elements lie in its file, without reading one of them.

For the readers of this package, which make them, and the layouts, which turn them into fragments.
A torch tensor is a strided view of a storage: element (i, j, ..) lies `storage_offset + i*stride[0] + j*stride[1] + ..`
elements into it. A `TensorRef` exists only if that view stays inside its storage, and the storage inside its file.
Source: torch/_utils.py `_rebuild_tensor_v2`, `_rebuild_tensor_v3` (2.13).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from zckpt.base.errors import CorruptError, UnsupportedError
from zckpt.containers.inert import brief
from zckpt.core.dtypes import DType
from zckpt.core.fragments import FileStore, Fragment

MAX_NUMBER = 2**63 - 1
"""torch's shapes, strides and offsets are signed 64-bit numbers."""

MAX_DIMS = 128
"""torch has no limit, real tensors have at most 6; this one bounds the arithmetic."""

MAX_FRAGMENTS = 1 << 20
"""Each costs about 150 bytes. A (1024, 1024, 3, 3) convolution in channels-last order needs exactly so many."""


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage: one run of bytes in a file that tensors are views of.

    Attributes:
        key: its name in the file.
        dtype: of its elements; None for torch's `UntypedStorage`, which is bytes.
        numel: elements in it; bytes when it is untyped.
        location: the device it was saved from. Irrelevant to its bytes.
        store: the file.
        byte_offset: of its first byte.
    """

    key: str
    dtype: DType | None
    numel: int
    location: str
    store: FileStore
    byte_offset: int

    @property
    def nbytes(self) -> int:
        """Bytes in it."""
        return self.numel * (self.dtype.itemsize if self.dtype else 1)

    def view(
        self, storage_offset: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: DType | None = None
    ) -> TensorRef:
        """A tensor in it; `storage_offset` and `stride` count elements of `dtype`, by default the storage's own.

        Raises:
            CorruptError: no such tensor can be.
        """
        if len(shape) != len(stride) or len(shape) > MAX_DIMS:
            raise self._bad_view("an impossible view", f"{len(shape)} dimensions, {len(stride)} strides")
        for what, numbers in (("offset", (storage_offset,)), ("size", shape), ("stride", stride)):
            if (bad := next((number for number in numbers if not _is_count(number)), None)) is not None:
                raise self._bad_view("an impossible view", f"{what} {brief(bad)}", "whole numbers from 0 to 2^63 - 1")
        dtype = dtype or self.dtype
        if dtype is None:
            raise self._bad_view("a tensor without dtype", "an untyped storage")
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

    def _bad_view(self, what: str, found: str, expected: str = "") -> CorruptError:
        return CorruptError(f"{what} of storage {self.key!r}", file=self.store.path, found=found, expected=expected)


def _is_count(number: object) -> bool:
    return type(number) is int and 0 <= number <= MAX_NUMBER


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor that lies in a file.

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

    def __post_init__(self) -> None:
        if 0 in self.shape:
            return
        if math.prod(self.shape) > MAX_NUMBER:
            raise CorruptError(
                f"an impossible shape of a tensor in storage {self.storage_key!r}",
                file=self.store.path,
                found=f"{self.shape[0]:,} rows in {len(self.shape)} dimensions",
                expected="at most 2^63 elements",
            )
        last = self.storage_offset + sum((dim - 1) * step for dim, step in zip(self.shape, self.stride))
        if (last + 1) * self.dtype.itemsize > self.storage_nbytes:
            raise CorruptError(
                f"a tensor that reaches beyond its storage {self.storage_key!r}",
                file=self.store.path,
                found=f"its last element would end at byte {(last + 1) * self.dtype.itemsize:,}",
                expected=f"the storage has {self.storage_nbytes:,}",
                byte_offset=self.storage_byte_offset,
            )

    @property
    def numel(self) -> int:
        """Elements in it; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, each counted once per index."""
        return self.numel * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie row-major without gaps, as `torch.Tensor.is_contiguous` says."""
        folded = self._folded()
        return self.numel == 0 or not folded or (len(folded) == 1 and folded[0][1] == 1)

    @property
    def place(self) -> tuple[object, ...]:
        """Two names with the same place are literally the same tensor."""
        return self.store.path, self.storage_key, self.storage_offset, self.dtype, self.shape, self.stride

    @property
    def byte_stop(self) -> int:
        """One past its last byte in the file; where it begins when it has no elements."""
        last = sum((dim - 1) * step for dim, step in zip(self.shape, self.stride))
        return self.byte_offset + (last + 1) * self.dtype.itemsize if self.numel else self.byte_offset

    @property
    def repeats(self) -> bool:
        """Whether elements of it may lie in the same place, as those of an expanded tensor do."""
        reach = 0
        for dim, step in sorted(zip(self.shape, self.stride), key=lambda pair: pair[1]):
            if dim > 1 and step <= reach:
                return True
            reach += (dim - 1) * step
        return False

    def fragments(self) -> tuple[Fragment, ...]:
        """Its elements as pitched runs, in order; see [Note: the geometry of a fragment].

        One fragment is up to two dimensions: rows of contiguous elements, or a column of single ones. The dimensions
        before these are walked, index by index.

        Raises:
            UnsupportedError: it would be millions of fragments.
        """
        if self.numel == 0:
            return ()
        dims = self._folded()
        count = dims.pop()[0] if dims and dims[-1][1] == 1 else 1
        rows, row_step = dims.pop() if dims else (1, 0)
        blocks = math.prod(dim for dim, _ in dims)
        if blocks > MAX_FRAGMENTS:
            raise UnsupportedError(
                f"a tensor of {blocks:,} scattered pieces",
                file=self.store.path,
                found=f"shape {list(self.shape)}, strides {list(self.stride)}",
                remedy="Call .contiguous() on it before saving.",
            )
        pitch = count if rows > 1 else 0
        offsets = map(sum, itertools.product(*([index * step for index in range(dim)] for dim, step in dims)))
        return tuple(
            Fragment(
                store=self.store,
                byte_offset=self.byte_offset + offset * self.dtype.itemsize,
                start=number * rows * count,
                count=count,
                rows=rows,
                pitch=pitch,
                store_pitch=row_step if rows > 1 else 0,
            )
            for number, offset in enumerate(offsets)
        )

    def _folded(self) -> list[tuple[int, int]]:
        """(extent, stride) of as few dimensions as give the same walk: (2, 3, 4) with (12, 4, 1) is (24,) with (1,)."""
        folded: list[tuple[int, int]] = []
        for dim, step in zip(self.shape, self.stride):
            if dim == 1:
                continue
            if folded and folded[-1][1] == dim * step:
                folded[-1] = (folded[-1][0] * dim, step)
            else:
                folded.append((dim, step))
        return folded

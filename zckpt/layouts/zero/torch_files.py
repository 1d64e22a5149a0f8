"""A torch file that is being laid out: any inert object, and for each tensor in it the source of its elements.

For the layouts that write checkpoints. The file is known to the last byte before an element is moved: its records'
places, the moves into them, and zeros where a vector is padded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UnsupportedError
from zckpt.containers import NumpyArray, Placeholder, TensorRef, TensorSpec, torch_zip
from zckpt.core.catalog import TensorEntry, TensorPart
from zckpt.core.dtypes import U8, DType
from zckpt.core.fragments import Fragment
from zckpt.core.plan import OutputFile, Pair, Plan
from zckpt.core.stores import FileStore
from zckpt.layouts.save.module_states import whole


@dataclass(frozen=True, slots=True)
class Inline:
    """A small tensor with known bytes, such as a step counter."""

    dtype: DType
    shape: tuple[int, ...]
    data: bytes


class Filling(NamedTuple):
    """Elements [start, start + count) of `source`, which go to element `at` of a vector."""

    source: TensorEntry | TensorPart
    start: int
    count: int  # type: ignore[assignment]  # tuple's method of this name is not needed
    at: int


_LOOKED_AT = 64
"""The most parts of a record, and pieces of each, that decide where in a page it begins."""


class TorchFile:
    """One file that is being laid out. `path`: relative to the output directory."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._specs: list[TensorSpec] = []
        self._fillings: dict[str, list[Filling]] = {}
        self._data: dict[str, bytes] = {}

    def _spec(self, dtype: DType, shape: tuple[int, ...]) -> TensorSpec:
        spec = TensorSpec(str(len(self._specs)), dtype, shape)
        self._specs.append(spec)
        return spec

    def tensor(self, source: TensorEntry | TensorPart, dtype: DType | None = None) -> TensorSpec:
        """A whole tensor, perhaps cast. Used in several places of the object, it is one storage."""
        spec = self._spec(dtype or source.dtype, source.shape)
        self._fillings[spec.name] = [Filling(source, 0, source.numel, 0)]
        return spec

    def vector(self, fillings: Iterable[Filling], numel: int, dtype: DType) -> TensorSpec:
        """A vector of `numel` elements, made from parts of tensors in this order; the rest is zeros."""
        spec = self._spec(dtype, (numel,))
        self._fillings[spec.name] = list(fillings)
        return spec

    def adopt(self, value: Any, take: Callable[[TensorRef], TensorSpec] | None = None) -> Any:
        """An inert value of another file, with its tensors as tensors of this one, each as `take` adds it, or whole. Raises
        UnsupportedError if the value contains itself.
        """
        return self._adopt(value, take or (lambda ref: self.tensor(whole("", ref, "buffer"))), set())

    def _adopt(self, value: Any, take: Callable[[TensorRef], TensorSpec], above: set[int]) -> Any:
        if isinstance(value, TensorRef):
            return take(value)
        if isinstance(value, TensorEntry):
            return self.tensor(value)
        if isinstance(value, Inline):
            spec = self._spec(value.dtype, value.shape)
            self._data[spec.name] = value.data
            return spec
        if not isinstance(value, dict | list | tuple | Mapping | Placeholder | NumpyArray):
            return value
        if id(value) in above:
            raise UnsupportedError(
                "cannot write a value that contains itself",
                found=type(value).__name__,
                remedy="Remove it from what the checkpoint saves beside its tensors, or convert the weights alone (to-fp32).",
            )
        above.add(id(value))
        try:
            if isinstance(value, Mapping):
                return {key: self._adopt(item, take, above) for key, item in value.items()}
            if isinstance(value, list):
                return [self._adopt(item, take, above) for item in value]
            if type(value) is tuple:
                return tuple(self._adopt(item, take, above) for item in value)
            if isinstance(value, Placeholder):
                parts = (value.args, value.state, value.kwargs, value.items)
                args, state, kwargs, items = (self._adopt(part, take, above) for part in parts)
                return replace(value, args=args, state=state, kwargs=kwargs, items=items)
            if isinstance(value, NumpyArray):
                return replace(value, objects=self._adopt(value.objects, take, above))
            return value
        finally:
            above.discard(id(value))

    def finish(self, root: object) -> Plan:
        """The file's plan, in the order of its bytes."""
        prefix = torch_zip.prefix_of(self.path)
        skeleton = torch_zip.skeleton_of(root, self._specs, phases=self._phases(), prefix=prefix)
        store = FileStore(self.path, skeleton.size)
        pairs: list[Pair] = []
        literals = list(skeleton.literals)
        for spec in self._specs:
            offset, itemsize = skeleton.offsets[spec.name], spec.dtype.itemsize
            if spec.name in self._data:
                literals.append((offset, self._data[spec.name]))
                continue
            filled = 0
            for source, start, count, at in self._fillings[spec.name]:
                if at > filled:
                    literals.append((offset + filled * itemsize, bytes((at - filled) * itemsize)))
                if count:
                    fragment = Fragment(store, offset + at * itemsize, start, count)
                    pairs.append((source, TensorPart(source.name, source.shape, spec.dtype, (fragment,))))
                filled = at + count
            if spec.numel > filled:
                literals.append((offset + filled * itemsize, bytes((spec.numel - filled) * itemsize)))
        output = OutputFile(self.path, skeleton.size, tuple(literals), skeleton.checksums)
        return Plan(((output, store),), pairs)

    def _phases(self) -> dict[str, int]:
        """The places in a page at which long records begin: those of most of their elements in the source files."""
        return {
            spec.name: phase
            for spec in self._specs
            if spec.nbytes >= torch_zip.LONG and (phase := _phase(spec, self._fillings.get(spec.name, ())))
        }


def plan_copy(path: str, store: FileStore) -> Plan:
    """A file that is a copy of another one."""
    made = FileStore(path, store.size)
    if not store.size:
        return Plan(((OutputFile(path, 0), made),), ())
    pair = tuple(
        TensorEntry(path, (store.size,), U8, "buffer", (Fragment(each, 0, 0, store.size),)) for each in (store, made)
    )
    return Plan(((OutputFile(path, store.size), made),), [(pair[0], pair[1])])


def _phase(spec: TensorSpec, fillings: Sequence[Filling]) -> int:
    """The place in a page at which most bytes of a record could be shared with sources; 0 where none could."""
    found: Counter[int] = Counter()
    for source, start, count, at in fillings[:_LOOKED_AT]:
        if source.dtype != spec.dtype:
            continue
        for held in source.fragments[:_LOOKED_AT]:
            first, last = max(held.start, start), min(held.start + held.numel, start + count)
            if first < last and held.rows == 1 and held.step == 1 and isinstance(held.store, FileStore):
                there = held.byte_offset + (first - held.start) * spec.dtype.itemsize
                here = (at + first - start) * spec.dtype.itemsize
                found[(there - here) % torch_zip.PAGE] += last - first
    phase = max(found, key=found.__getitem__, default=0)
    return 0 if phase % torch_zip.ALIGNMENT else phase

"""Tensors that torch cut over ranks, as one rank's file holds them: DTensors and ShardedTensors.

For `fsdp`, and for families with files that may hold such tensors whole. A pickle holds the rank's own elements and
the facts from
which torch knows their place: for a DTensor the mesh, the rank's coordinate in it and a placement for each dimension of the
mesh; for a ShardedTensor the offsets themselves.

[Note: strided shards] Placements apply from left to right: with `(Shard(0), Shard(0))` on a mesh of 2 x 2, the first dimension
of the mesh halves the rows, and the second halves each half. FSDP over tensor parallelism is the other way round: the
tensor-parallel dimension, which is the last of the mesh, cuts first. torch writes that as `_StridedShard(0, split_factor=2)` for
the first one: it applies after the dimensions to its right with sizes that multiply to `split_factor`. Each rank's
elements are a box either way.
Source: torch 2.13, distributed/tensor/placement_types.py, _dtensor_spec.py (`shard_order`), device_mesh.py, _tensor.py
(`_rebuild_from_type_v2`); distributed/_shard/sharded_tensor/api.py (`__getstate__`). Until 2.7 a mesh had a tensor `mesh`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import COPY_AGAIN, CorruptError, InconsistentError, UnsupportedError
from zckpt.containers import Placeholder, TensorRef, brief
from zckpt.containers.tensor_ref import as_shape
from zckpt.core.dtypes import DType
from zckpt.core.fragments import Box

T = TypeVar("T")
Shape = tuple[int, ...]
Order = tuple[tuple[int, tuple[int, ...]], ...]
"""(dimension of a tensor, dimensions of the mesh in the order in which they cut it)."""

DENSE = "Save it again as a dense tensor."


@dataclass(frozen=True, slots=True)
class CutTensor:
    """One rank's part of a tensor.

    Attributes:
        dtype: of its elements.
        size: shape of the whole tensor.
        boxes: (offsets in the whole tensor, elements) of what this rank has; boxes without elements are left out.
        axes: name -> size of each dimension of the mesh; empty for a ShardedTensor.
    """

    dtype: DType
    size: Shape
    boxes: tuple[tuple[Shape, TensorRef], ...]
    axes: Mapping[str, int]

    @property
    def whole(self) -> TensorRef | None:
        """The whole tensor, if this rank has all of its elements."""
        return self.boxes[0][1] if len(self.boxes) == 1 and self.boxes[0][1].shape == self.size else None


Placement = tuple[str, object, object]
"""What one dimension of a mesh does to a tensor: "Shard", "_StridedShard", "Replicate", or torch's name of another one, which is
refused; the dimension of the tensor that it cuts; and the split factor, see [Note: strided shards].
"""


def class_of(value: object) -> str:
    """The class name of an object, or of the subclass of Tensor that a function rebuilds; empty for other values."""
    if not isinstance(value, Placeholder):
        return ""
    first = value.args[0] if value.args else None
    named = first if "_rebuild" in value.name and isinstance(first, Placeholder) else value
    return named.name.rpartition(".")[2]


def dense_in(value: object, dtype: DType, shape: Shape) -> object:
    """The dense tensor in a wrapper of torchao's that casts a weight while it is used; any other value as it is.

    In float8 training, a parameter is such a wrapper: it holds the weight that is trained, as it is, and how it will be cast.
    Quantised tensors are of other classes.
    Source: torchao 0.14, float8/fsdp_utils.py `WeightWithDynamicFloat8CastTensor`, prototype/moe_training/tensor.py.

    Args:
        value: of a pickle.
        dtype: of the weight.
        shape: of the weight, or of its part.
    """
    if not isinstance(value, Placeholder) or not isinstance(kind := value.args[0] if value.args else None, Placeholder):
        return value
    if "_rebuild" not in value.name or not f"{kind.module}.".startswith(_CASTING):
        return value
    held = [one for one in _attributes(value).values() if isinstance(one, TensorRef) and one.numel > 1]
    return held[0] if len(held) == 1 and (held[0].dtype, held[0].shape) == (dtype, shape) else value


_CASTING = ("torchao.float8.", "torchao.prototype.moe_training.")
"""Modules with classes of tensors that are cast while they are used."""


KnownFacts = dict[tuple[object, ...], Any]
"""What is read once for many tensors of a save: facts in objects that they share (meshes, placements, sizes), by the kind of
fact and the object's id, beside the object; and boxes, by the facts that they follow from.
"""


def cut_tensor(value: object, name: str, file: str, known: KnownFacts | None = None) -> CutTensor | None:
    """The rank's part of a tensor; None for a value that is not a tensor cut over ranks.

    Args:
        value: of a pickle.
        name: of the tensor, for errors.
        file: that holds it, for errors.
        known: of other tensors of the same save.

    Raises:
        CorruptError: it contradicts itself. UnsupportedError: it is sparse, or a sum that was not made yet.
    """
    kind = class_of(value)
    if kind not in ("DTensor", "ShardedTensor"):
        return None
    assert isinstance(value, Placeholder)
    reader = CutReader(name, file, known)
    try:
        return reader.of_dtensor(value) if kind == "DTensor" else reader.of_sharded_tensor(value)
    except (TypeError, ValueError, LookupError) as error:
        raise reader.corrupt(str(error)) from error


class CutReader:
    """Reads one tensor; ValueError and its kin mean that the file is damaged.

    Args:
        name: of the tensor, for errors.
        file: that holds it, for errors.
    """

    def __init__(self, name: str, file: str, known: KnownFacts | None = None) -> None:
        self.name = name
        self.file = file
        self.known: KnownFacts = {} if known is None else known

    def _known(self, kind: str, value: object, make: Callable[[Any], T]) -> T:
        """The facts that `make` finds in an object."""
        known = self.known.get((kind, id(value)))
        if known is None:
            known = self.known[kind, id(value)] = value, make(value)  # with the object, whose id stays its own so
        found: T = known[1]
        return found

    def corrupt(self, found: str) -> CorruptError:
        """The error for a tensor with facts that do not fit each other."""
        return CorruptError(
            f"tensor {self.name!r} contradicts itself", file=self.file, found=found[:200], remedy=COPY_AGAIN
        )

    def _facts(self, args: tuple[Any, ...]) -> tuple[DType, Shape]:
        """The dtype and whole shape in the arguments of `_rebuild_wrapper_subclass`."""
        _, dtype, size, *rest = args
        layout = rest[2] if len(rest) > 2 else None
        if isinstance(layout, Placeholder) and layout.args not in ((), ("torch.strided",)):
            raise UnsupportedError(
                f"tensor {self.name!r} is sparse", file=self.file, found=brief(layout.args[0]), remedy=DENSE
            )
        if not isinstance(dtype, DType):
            raise UnsupportedError(
                f"the dtype of tensor {self.name!r} is unknown", file=self.file, found=brief(dtype),
                remedy="Save that tensor in another dtype.",
            )  # fmt: skip
        return dtype, as_shape(size)

    def _elements(self, value: object, dtype: DType, size: Shape) -> TensorRef:
        value = dense_in(value, dtype, size)
        if isinstance(value, TensorRef) and (value.dtype, value.shape) == (dtype, size):
            return value
        if isinstance(value, TensorRef):
            raise InconsistentError(
                f"the rank's part of {self.name!r} is not what its placement says", file=self.file,
                found=f"{value.dtype} {list(value.shape)}", expected=f"{dtype} {list(size)}", remedy=COPY_AGAIN,
            )  # fmt: skip
        raise UnsupportedError(
            f"the kind of tensor {self.name!r} is not supported", file=self.file, found=brief(value),
            expected="dense elements in the rank's part", remedy=DENSE,
        )  # fmt: skip

    # -- DTensors ----------------------------------------------------------------------------------------------------

    def of_dtensor(self, value: Placeholder) -> CutTensor:
        """A pickled DTensor."""
        dtype, size = self._known("facts", value.args, self._facts)
        held = _attributes(value)
        spec = _attributes(held["_spec"])
        extents, coordinate, axes = self._known("mesh", spec["mesh"], _mesh)
        placements = self._known("placements", spec["placements"], _placements)
        order = self._known("order", spec.get("shard_order"), _explicit)
        key = (size, placements, extents, coordinate, order)
        part: Box | None = self.known.get(key)
        if part is None:
            part = self.known[key] = self.part(size, placements, extents, coordinate, order)
        return self.cut(dtype, size, [(part, held["_local_tensor"])], axes)

    def cut(self, dtype: DType, size: Shape, parts: Sequence[tuple[Box, object]], axes: Mapping[str, int]) -> CutTensor:
        """The tensor with these parts; raises if a part's elements do not have its size and dtype."""
        refs = [(part.offsets, self._elements(value, dtype, part.sizes)) for part, value in parts]
        return CutTensor(dtype, size, tuple(box for box in refs if box[1].numel or not math.prod(size)), axes)

    def part(
        self, size: Shape, placements: Sequence[Placement], extents: Shape, coordinate: Shape, order: Order = ()
    ) -> Box:
        """The box that the rank at `coordinate` of a mesh of `extents` has of a tensor.

        Raises:
            ValueError: these contradict each other. UnsupportedError: it is not cut by rows or columns.
        """
        if not len(placements) == len(extents) == len(coordinate):
            raise ValueError(f"{len(placements)} placements on a mesh {list(extents)}, rank at {list(coordinate)}")
        if not all(0 <= at < extent for at, extent in zip(coordinate, extents, strict=True)):
            raise ValueError(f"a rank at {list(coordinate)} of a mesh {list(extents)}")
        offsets, local = [0] * len(size), list(size)
        for dim, mesh_dim in self._cuts(placements, extents, len(size), order):
            step = -(-local[dim] // extents[mesh_dim])
            first = min(step * coordinate[mesh_dim], local[dim])
            offsets[dim] += first
            local[dim] = min(step, local[dim] - first)
        return Box(tuple(offsets), tuple(local))

    def _cuts(self, placements: Sequence[Placement], extents: Shape, dims: int, order: Order) -> list[tuple[int, int]]:
        """(dimension of the tensor, dimension of the mesh) of each cut, in the order in which they apply."""
        by_dim: dict[int, list[int]] = {}
        for mesh_dim in reversed(range(len(placements))):
            kind, dim, factor = placements[mesh_dim]
            if kind == "Replicate":
                continue
            if kind not in ("Shard", "_StridedShard"):
                raise UnsupportedError(
                    f"tensor {self.name!r} is not cut by rows or columns", file=self.file, found=f"placement {kind}",
                    expected="Shard or Replicate", remedy="Reduce it to whole values before you save it: full_tensor().",
                )  # fmt: skip
            if type(dim) is not int or not -dims <= dim < dims:
                raise ValueError(f"a cut of dimension {brief(dim)} of {dims}")
            cuts = by_dim.setdefault(dim % dims, [])
            cuts.insert(_after(cuts, extents, factor if kind == "_StridedShard" else 1), mesh_dim)
        for dim, mesh_dims in order:
            if sorted(by_dim.get(dim, ())) != sorted(mesh_dims):
                raise ValueError(f"dimension {dim} is cut by {by_dim.get(dim)}, and in the order {list(mesh_dims)}")
            by_dim[dim] = list(mesh_dims)
        return [(dim, mesh_dim) for dim, mesh_dims in by_dim.items() for mesh_dim in mesh_dims]

    # -- ShardedTensors ----------------------------------------------------------------------------------------------

    def of_sharded_tensor(self, value: Placeholder) -> CutTensor:
        """A pickled ShardedTensor."""
        dtype, size = self._facts(value.args)
        state = value.state
        if not isinstance(state, tuple | list) or not isinstance(state[0], list | tuple):
            raise ValueError(f"its state is {brief(state)}")
        parts: list[tuple[Box, object]] = []
        for shard in map(_attributes, state[0]):
            facts = _attributes(shard["metadata"])
            offsets, sizes = as_shape(facts["shard_offsets"]), as_shape(facts["shard_sizes"])
            if not len(offsets) == len(sizes) == len(size):
                raise ValueError(f"a shard of {list(sizes)} at {list(offsets)} in {list(size)}")
            parts.append((Box(offsets, sizes), shard["tensor"]))
        return self.cut(dtype, size, parts, {})


def _mesh(value: object) -> tuple[Shape, Shape, Mapping[str, int]]:
    """The extents of a mesh, the rank's coordinate in it, and name -> extent of each dimension."""
    mesh = _attributes(value)
    extents = _mesh_shape(mesh)
    names = mesh.get("_mesh_dim_names", mesh.get("mesh_dim_names"))
    named = names if isinstance(names, tuple | list) and len(names) == len(extents) else range(len(extents))
    axes = {str(name): extent for name, extent in zip(named, extents, strict=True)}
    return extents, as_shape(mesh.get("_coordinate_on_dim")), axes


def _placements(value: object) -> tuple[Placement, ...]:
    if not isinstance(value, tuple | list):
        raise ValueError(f"placements {brief(value)}")
    return tuple(map(_placement, value))


def _placement(value: object) -> Placement:
    """A placement as torch pickles it."""
    fields = _attributes(value)
    return class_of(value), fields.get("dim", 0), fields.get("split_factor", 1)


def _attributes(value: object) -> Mapping[str, object]:
    """An object's attributes: its `__dict__`, with its slots where it has some."""
    state = value.state if isinstance(value, Placeholder) else None
    if isinstance(state, dict):
        return state
    parts = [part for part in state if isinstance(part, Mapping)] if isinstance(state, tuple) else []
    if len(parts) == 1:
        return parts[0]
    return {key: value for part in parts for key, value in part.items()}


def _after(cuts: Sequence[int], extents: Shape, factor: object) -> int:
    """How many of the cuts come before one that applies to `factor` parts; see [Note: strided shards]."""
    parts = 1
    for number, mesh_dim in enumerate(cuts):
        if parts == factor:
            return number
        parts *= extents[mesh_dim]
    if parts != factor:
        raise ValueError(f"split_factor {brief(factor)} among cuts into {parts} parts")
    return len(cuts)


def _explicit(order: object) -> Order:
    """(dimension, dimensions of the mesh in the order in which they cut it), if a spec gives it."""
    found: list[tuple[int, tuple[int, ...]]] = []
    for entry in order if isinstance(order, tuple | list) else ():
        dim, mesh_dims = entry.args if isinstance(entry, Placeholder) else entry
        if type(dim) is not int:
            raise ValueError(f"an order of cuts of dimension {brief(dim)}")
        found.append((dim, as_shape(mesh_dims)))
    return tuple(found)


def _mesh_shape(mesh: Mapping[str, object]) -> Shape:
    """The size of each dimension of a mesh."""
    for key in ("mesh", "_mesh"):
        if isinstance(ranks := mesh.get(key), TensorRef):
            return ranks.shape
    layout = _attributes(mesh["_layout"])
    axes = layout.get("axes")
    shape = [_attributes(axis)["shape"] for axis in axes] if isinstance(axes, tuple | list) else layout["shape"]
    if isinstance(shape, int):
        return (shape,)
    if not isinstance(shape, tuple | list):
        raise ValueError(f"a mesh of shape {brief(shape)}")
    return tuple(extent if isinstance(extent, int) else math.prod(as_shape(extent)) for extent in shape)

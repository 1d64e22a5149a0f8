"""What a DeepSpeed `*_model_states.pt` file records, as one checked value; state dicts that hold several models.

For the ZeRO layouts and the unsharded one. Nothing here knows how masters are partitioned. State dicts in one save may be models
of their own, such as a policy and its reference: which is meant, only a person knows.
Source: DeepSpeed runtime/engine.py `_common_checkpoint_state`, `_get_zero_param_shapes`, `_get_shared_params` (0.19.8);
`param_shapes` was one plain dict before 0.3.17; `frozen_*` and `shared_params` came later and may be absent.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from itertools import combinations
from typing import TYPE_CHECKING

from zckpt.base import limits
from zckpt.base.dataclass import dataclass
from zckpt.base.errors import COPY_AGAIN, CorruptError, InconsistentError, UnsupportedError, UsageError
from zckpt.base.words import count, examples
from zckpt.containers import Placeholder, TensorRef, brief, mapping_at, open_container
from zckpt.core.catalog import Replica, Role, TensorEntry, Topology
from zckpt.core.claims import ByteSpan
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.state_names import WRAPPERS, match_names

if TYPE_CHECKING:
    from zckpt.layouts.save.cut_tensors import CutTensor


Shape = tuple[int, ...]

_OURS = frozenset((
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",),
    *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps",),
    *("global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version",),
    *("sparse_tensor_module_names", "csr_tensor_module_names", "checkpoint_parallel_dimensions",),
    *("num_experts", "ds_autoep_layers", "folding", "universal_checkpoint_info", "zckpt",),
))  # fmt: skip


OF_WEIGHTS = frozenset((
    *("module", "optimizer", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments",),
    *("shared_params", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions",),
))  # fmt: skip
"""Entries that follow from the weights and their sharding; a writer computes them again."""

RESERVED = _OURS | OF_WEIGHTS
"""Names that a client state may not use."""


@dataclass(frozen=True, slots=True)
class ModelStates:
    """One model states file.

    Attributes:
        file: its path.
        module: name -> tensor of the model's state dict; under ZeRO-3 the parameters are empty placeholders.
        buffer_names: names of buffers; old versions list non-persistent ones too.
        param_shapes: per optimizer group, name -> shape in flat order; empty without ZeRO.
        frozen_shapes: name -> shape of parameters that no optimizer owns.
        frozen_fragments: name -> their values (ZeRO-3: this rank's piece).
        shared: dropped name -> kept name.
        root: the whole inert object.
        notes: for a person.
        others: what stands in the state dict and is not a tensor, mappings too.
        state_names: name in `module` -> in the state dict, of those that it gives another name than the parameter has.
    """

    file: str
    module: Mapping[str, TensorRef]
    buffer_names: frozenset[str]
    param_shapes: tuple[Mapping[str, Shape], ...]
    frozen_shapes: Mapping[str, Shape]
    frozen_fragments: Mapping[str, TensorRef]
    shared: Mapping[str, str]
    root: Mapping[str, object]
    notes: tuple[str, ...] = field(default=())
    others: Mapping[str, object] = field(default_factory=dict[str, object])
    state_names: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def version(self) -> str:
        """DeepSpeed's version, or an empty string where it was not recorded."""
        return str(self.root.get("ds_version") or "")

    @property
    def config(self) -> Mapping[str, object]:
        """The training run's DeepSpeed config, or an empty mapping."""
        return mapping_at(self.root, "ds_config")

    @property
    def zero_config(self) -> Mapping[str, object]:
        """Its `zero_optimization` section, or an empty mapping."""
        return mapping_at(self.config, "zero_optimization")

    @property
    def shapes(self) -> dict[str, Shape]:
        """Name -> shape of all parameters, trained and frozen ones."""
        return {name: shape for group in (*self.param_shapes, self.frozen_shapes) for name, shape in group.items()}

    @property
    def unlisted(self) -> dict[str, TensorRef]:
        """What the state dict has under names that are in no list."""
        listed = {*self.shapes, *self.shared, *self.shared.values(), *self.buffer_names}
        return {name: ref for name, ref in self.module.items() if name not in listed}

    @property
    def has_experts(self) -> bool:
        """Whether there are experts, which have files and names of their own."""
        return bool(self.root.get("num_experts") or self.root.get("ds_autoep_layers"))

    @property
    def extras(self) -> dict[str, object]:
        """The caller's client state: every entry that is not DeepSpeed's own."""
        return {key: value for key, value in self.root.items() if key not in _OURS}

    @property
    def rest(self) -> dict[str, object]:
        """What a resumed run needs of this file beside weights: counters, schedule, config, client state."""
        return {key: value for key, value in self.root.items() if key not in OF_WEIGHTS}

    def number(self, key: str) -> int | None:
        """A whole number such as `global_steps`; None if it is absent."""
        value = self.root.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def ranks(self, key: str) -> int | None:
        """As `number`, for a number of ranks. Raises UnsupportedError if there cannot be so many."""
        return rank_count(self.number(key), key, self.file)

    @property
    def also_frozen(self) -> tuple[str, ...]:
        """Parameters that an optimizer owns, and that were frozen when the save was written."""
        return tuple(name for group in self.param_shapes for name in group if name in self.frozen_shapes)

    def is_zero(self) -> bool:
        """Whether the optimizer was sharded, so that masters are in other files."""
        return self.root.get("param_shapes") is not None

    def topology(self, dp: int) -> Topology:
        """The ranks per axis as recorded, with `dp` data-parallel ranks."""
        dims = mapping_at(self.root, "checkpoint_parallel_dimensions")
        tp, pp = (n if isinstance(n, int) and n > 0 else 1 for n in (dims.get("tp_degree"), dims.get("pp_degree")))
        rank_count(tp * pp, "tp_degree x pp_degree", self.file)
        return Topology(dp, tp, pp)


def rank_count(count: int | None, what: str, file: str) -> int | None:
    """A number of ranks that a file records, within limits. Raises UnsupportedError if there cannot be so many."""
    if count is not None and count > limits.RANKS:
        raise UnsupportedError(
            "records an impossible number of ranks", file=file, found=f"{what} {count:,}", expected=f"at most {limits.RANKS:,}",
            remedy=limits.REMEDY,
        )  # fmt: skip
    return count


def read_model_states(listing: Listing, name: str, *, module: Mapping[str, TensorRef] | None = None) -> ModelStates:
    """A `*_model_states.pt` file, checked.

    Args:
        listing: all files.
        name: of this one.
        module: the weights, where they are in other files (a pipeline's layer files).

    Raises:
        CorruptError: it is not what its name says.
        UnsupportedError: DeepSpeed's version is too old to have recorded what is needed.
    """
    file, root = listing.files[name].path, root_of(listing, name)
    if "module" not in root:
        raise CorruptError("is not a model states file", file=file, found="no entry 'module'", remedy=COPY_AGAIN)
    notes: list[str] = []
    others: dict[str, object] = {}
    if module is None:
        module = flatten(as_mapping(root["module"], "the module's state dict", file), notes, others=others)
    shapes = root.get("param_shapes")
    groups = shapes if isinstance(shapes, list | tuple) else [] if shapes is None else [shapes]
    if "buffer_names" not in root:
        notes.append("This file does not say which tensors are buffers (DeepSpeed before 0.3.16): all are kept.")
    if shapes is None and "param_shapes" not in root and root.get("optimizer") is None:
        notes.append("This file does not say how parameters were grouped (DeepSpeed before 0.3.16).")
    param_shapes = tuple(_shapes(group, file) for group in groups)
    frozen_shapes = _shapes(root.get("frozen_param_shapes") or {}, file)
    names = root.get("buffer_names")
    buffer_names = frozenset(map(str, names)) if isinstance(names, list | tuple | set | frozenset) else frozenset[str]()
    is_listed = any((*param_shapes, frozen_shapes))
    if not is_listed:  # nothing but the buffers' names says what torch's wrappers have put into names
        bare = {WRAPPERS.sub("", name) for name in buffer_names}
        buffer_names |= {name for name in module if WRAPPERS.sub("", name) in bare}
    model = ModelStates(
        file=file,
        module=module,
        buffer_names=buffer_names,
        param_shapes=param_shapes,
        frozen_shapes=frozen_shapes,
        frozen_fragments={
            str(n): as_tensor(ref, f"frozen parameter {n!r}", file)
            for n, ref in as_mapping(root.get("frozen_param_fragments") or {}, "frozen_param_fragments", file).items()
        },
        shared=_read_shared(root.get("shared_params"), file),
        root=root,
        notes=tuple(notes),
        others=others,
    )
    return _with_listed_names(model) if is_listed and model.unlisted else model


def _with_listed_names(model: ModelStates) -> ModelStates:
    """The file with the names of its lists in place of those of its state dict. Raises InconsistentError if there are
    experts, and no name tells which is which.
    """
    here = model.shapes
    if model.has_experts:  # a name of theirs is in no state dict; a layer beside them must not be taken for it
        here = {name: shape for name, shape in here.items() if _EXPERTS.isdisjoint(name.split("."))}
    renamed = match_names(model.module, here, model.buffer_names, model.shared)
    more = model.unlisted.keys() - renamed.keys()
    lacking = here.keys() - model.module.keys() - {*renamed.values()} - model.frozen_shapes.keys()
    if more and lacking and model.has_experts:
        raise renamed_experts(model.file, examples(sorted(more)), examples(sorted(lacking)))
    if not renamed:
        return model
    own, name = next(iter(renamed.items()))
    note = (
        f"The model's state_dict() has other names for {count(len(renamed), 'tensor')} than the module, such as {own!r} for "
        f"{name!r}: those of the module are used, as in DeepSpeed's own lists."
    )
    return replace(
        model,
        module={renamed.get(name, name): ref for name, ref in model.module.items()},
        notes=(*model.notes, note),
        state_names={name: own for own, name in renamed.items()},
    )


def without_shapes(model: ModelStates) -> UnsupportedError:
    """The error for a model file of a ZeRO run that records no parameter shapes."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", model.version)
    if numbers and tuple(map(int, numbers.groups())) >= (0, 3, 16):
        return UnsupportedError(
            "records no parameter shapes", file=model.file,
            found=f"no 'param_shapes', written by DeepSpeed {model.version}",
            expected="the shapes, which DeepSpeed writes where its engine has an optimizer",
            remedy="Save from an engine with an optimizer. If the entry was taken out, copy the file as it was written.",
        )  # fmt: skip
    return UnsupportedError(
        "is of a DeepSpeed too old to record parameter shapes", file=model.file,
        found=f"version {model.version or 'not recorded'}, and no 'param_shapes'",
        expected="version 0.3.16 or later",
        remedy="Load it with the DeepSpeed that wrote it and save it with a newer one.",
    )  # fmt: skip


def whole(
    name: str, ref: TensorRef, role: Role, shape: Shape | None = None, replicas: tuple[Replica, ...] = ()
) -> TensorEntry:
    """A tensor that one file holds whole, perhaps recorded under another shape with as many elements."""
    return TensorEntry(name, ref.shape if shape is None else shape, ref.dtype, role, ref.fragments(), replicas)


def own_tensors(refs: Mapping[str, TensorRef]) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The tensors that one file holds, and the further names of those that have several."""
    tensors: dict[str, TensorEntry] = {}
    aliases: dict[str, str] = {}
    places: dict[object, str] = {}
    for name, ref in refs.items():
        kept = places.setdefault(ref.place, name) if ref.numel else name
        if kept == name:
            tensors[name] = whole(name, ref, "parameter" if ref.dtype.kind in ("float", "complex") else "buffer")
        else:
            aliases[name] = kept
    return tensors, aliases


def with_frozen(tensors: Mapping[str, TensorEntry], trained: Container[str]) -> dict[str, TensorEntry]:
    """The tensors; parameters that are not trained are frozen."""
    return {
        name: replace(entry, role="frozen") if entry.role == "parameter" and name not in trained else entry
        for name, entry in tensors.items()
    }


def label_of(value: object) -> str:
    """The `ds_id` that DeepSpeed's swapper gave a vector, by which its file is called; empty for any other value."""
    label = (value.attributes or {}).get("ds_id") if isinstance(value, TensorRef) else None
    return label if isinstance(label, str) else ""


def views_of(refs: Iterable[TensorRef]) -> Iterator[ByteSpan]:
    """Bytes of storages that several of these tensors are views of, or one more than once, by the file itself.

    Tensors that are views of one storage side by side share nothing. Those in the same place are tied, and are not views.
    """
    storages: dict[tuple[str, int], dict[object, TensorRef]] = {}
    for ref in refs:
        if ref.numel:
            storages.setdefault((ref.store.path, ref.storage_byte_offset), {})[ref.place] = ref
    for held in storages.values():
        if len(held) == 1 and next(iter(held.values())).is_contiguous:
            continue
        first: TensorRef | None = None
        stop, count = 0, 0
        for ref in sorted(held.values(), key=lambda ref: ref.byte_offset):
            if first is None or ref.byte_offset >= stop:
                if first is not None and count > 1:
                    yield ByteSpan(first.store, first.byte_offset, stop)
                first, stop, count = ref, ref.byte_stop, 0
            stop = max(stop, ref.byte_stop)
            count += 2 if ref.repeats else 1
        if first is not None and count > 1:
            yield ByteSpan(first.store, first.byte_offset, stop)


def replicas_of(name: str, shape: Shape, model: ModelStates) -> tuple[Replica, ...]:
    """The module's own weight, as a replica of the master of this name, where the model file holds it."""
    weight = model.module.get(name)
    return () if weight is None or weight.shape != shape else (Replica(weight.dtype, weight.fragments()),)


_DEEPEST = 64
"""The most dots in a name. State dicts nest a few levels; a dict that holds itself would nest for ever."""


def flatten(
    state: Mapping[str, object], notes: list[str], prefix: str = "", others: dict[str, object] | None = None
) -> dict[str, TensorRef]:
    """A state dict's tensors under dotted names.

    Args:
        state: the state dict.
        notes: what is not a tensor is left out, with a sentence here.
        prefix: of the names.
        others: what is not a tensor is added, mappings too.
    """
    tensors: dict[str, TensorRef] = {}
    for key, value in state.items():
        name = f"{prefix}{key}"
        if others is not None and not isinstance(value, TensorRef):
            others[name] = value
        if isinstance(value, TensorRef):
            tensors[name] = value
        elif isinstance(value, Mapping) and name.count(".") < _DEEPEST:
            tensors.update(flatten(value, notes, name + ".", others))
        elif (cut := _cut_tensor(value, name)) is not None and cut.whole is not None:
            tensors[name] = cut.whole
            if others is not None:
                del others[name]
        elif isinstance(value, Placeholder) and "_rebuild" in value.name:
            raise UnsupportedError(
                f"has a tensor of a kind that zckpt does not read, {name!r}",
                found=str(value),
                expected="dense, strided tensors",
                remedy="Save it as a dense tensor.",
            )
        else:
            notes.append(f"{name!r} in the state dict is not a tensor ({type(value).__name__}): left out.")
    return tensors


def _cut_tensor(value: object, name: str) -> CutTensor | None:
    from zckpt.layouts.save.cut_tensors import cut_tensor

    return cut_tensor(value, name, "") if isinstance(value, Placeholder) else None


def as_mapping(value: object, what: str, file: str) -> Mapping[str, object]:
    """The value, which must be a mapping."""
    if not isinstance(value, Mapping):
        raise CorruptError(f"{what} is not a mapping", file=file, found=type(value).__name__, remedy=COPY_AGAIN)
    return value


def root_of(listing: Listing, name: str) -> Mapping[str, object]:
    """The mapping that a file of a save holds. Raises CorruptError for anything else."""
    return as_mapping(listing.open(name).root, "its content", listing.files[name].path)


def as_tensor(value: object, what: str, file: str) -> TensorRef:
    """The value, which must be a tensor."""
    if not isinstance(value, TensorRef):
        raise CorruptError(f"{what} is not a tensor", file=file, found=type(value).__name__, remedy=COPY_AGAIN)
    return value


_EXPERTS = frozenset(("experts", "deepspeed_experts"))
"""The parts of names of experts, which have files of their own."""


def renamed_experts(file: str, found: str, expected: str) -> InconsistentError:
    """The error for a save of a model with experts and a state dict that has other names than the lists of parameters."""
    return InconsistentError(
        "the state dict of a model with experts has other names than its parameters", file=file,
        found=f"{found} in the state dict", expected=f"{expected}, as in the list of parameters",
        remedy="Save the model again without the hook or wrapper that renames its state dict.",
    )  # fmt: skip


def _shapes(value: object, file: str) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for name, shape in as_mapping(value, "param_shapes", file).items():
        if not isinstance(shape, tuple | list) or not {int}.issuperset(map(type, shape)):
            raise CorruptError(
                f"records a shape of {name!r} that is not a list of whole numbers",
                file=file,
                found=brief(shape),
                remedy=COPY_AGAIN,
            )
        shapes[str(name)] = tuple(shape)
    return shapes


def _read_shared(value: object, file: str) -> dict[str, str]:
    """The shared parameters, which a file records as a mapping or as a list of pairs."""
    if isinstance(value, list | tuple):
        value = {pair[0]: pair[1] for pair in value if isinstance(pair, list | tuple) and len(pair) == 2}
    return {str(dropped): str(kept) for dropped, kept in as_mapping(value or {}, "shared_params", file).items()}


_SMALL_BYTES = 1 << 16
"""The most bytes of tensors that travel with the index: step counters, random generators."""


def index_of(path: str) -> tuple[int, list[tuple[int, bytes]]]:
    """A file's size, and all its bytes except those of large tensors of weights and states, at their offsets."""
    root = open_container(path).root
    size = os.path.getsize(path)
    free = {key: value for key, value in root.items() if key not in RESERVED} if isinstance(root, dict) else {}
    needed = {ref.storage_byte_offset for ref in _refs(free)}
    skipped = sorted(
        {
            (ref.storage_byte_offset, ref.storage_nbytes)
            for ref in _refs(root)
            if ref.storage_nbytes > _SMALL_BYTES and ref.storage_byte_offset not in needed
        }
    )
    parts: list[tuple[int, bytes]] = []
    at = 0
    with open(path, "rb") as file:
        for offset, nbytes in (*skipped, (size, 0)):
            if offset > at:
                file.seek(at)
                parts.append((at, file.read(offset - at)))
            at = offset + nbytes
    return size, parts


def _refs(value: object) -> Iterator[TensorRef]:
    """All tensors in an inert value."""
    todo: list[object] = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, TensorRef):
            yield item
        elif isinstance(item, Mapping):
            todo += item.values()
        elif isinstance(item, list | tuple | set | frozenset):
            todo += item
        elif isinstance(item, Placeholder):
            todo += [item.args, item.state, item.kwargs, item.items]


_HALVES = {"encoder", "decoder"}
"""Keys of the halves of one model, which may have tensors of the same names."""


def models_among(states: Mapping[str, Mapping[str, Shape]]) -> list[str]:
    """The keys of all state dicts if two have most of their tensors in common; empty if all are parts of one model.
    `states`: key -> name -> shape.
    """
    for (one, first), (other, second) in combinations(states.items(), 2):
        common = sum(second.get(name) == shape for name, shape in first.items())
        if 2 * common > min(len(first), len(second)) and {one, other} != _HALVES:
            return list(states)
    return []


def several_models(file: str | os.PathLike[str], keys: Sequence[str]) -> UsageError:
    """The error for a save of several models, under these keys."""
    return UsageError(
        "holds several models, and no key says which is meant", file=file, found=examples(keys, 6), expected="--key",
        remedy=f"Pass --key with one of them, such as --key {keys[0]}.",
    )  # fmt: skip

"""Catalogs: tensors, and the places of their elements.

A checkpoint on disk, a checkpoint to be written and a live model are all a `Catalog`. Layouts make catalogs, the router carries
one into another. All values are frozen: select, rename and cast return new catalogs. Constructing a value checks it: the
fragments of a tensor must cover its shape exactly once, so a missing rank, a short file or a doubled partition is found here,
for every layout. The tensors of a catalog must not read the same bytes (see `claims`), so a reader that looks for them in the
wrong places is found here too.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from operator import eq
from typing import Literal, NamedTuple, Protocol, get_args

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import COPY_AGAIN, CorruptError, IncompleteError, InconsistentError
from zckpt.core.claims import ByteSpan, Claim, Claims
from zckpt.core.dtypes import F32, DType
from zckpt.core.evidence import Evidence
from zckpt.core.fragments import Fragment
from zckpt.core.overlaps import first_gap
from zckpt.core.stores import FileStore

Role = Literal["parameter", "frozen", "buffer"]
_ROLES = frozenset(get_args(Role))

MAX_NUMEL = 2**63 - 1
"""The most elements of a tensor: torch counts them in signed 64-bit numbers."""


def numel_of(shape: tuple[int, ...], *, name: str, file: str | None = None) -> int:
    """The number of elements in a shape. Raises CorruptError if a dimension is negative, or the product overflows 63
    bits.
    """
    numel = math.prod(shape)
    if numel > MAX_NUMEL or (shape and min(shape) < 0):
        raise CorruptError(
            f"the shape of tensor {name!r} is impossible", file=file, found=str(list(shape)), expected="at most 2^63 elements",
            remedy=COPY_AGAIN,
        )  # fmt: skip
    return numel


@dataclass(frozen=True, slots=True)
class Replica:
    """Another place that must hold the same tensor, perhaps in a narrower dtype; only checks read it.

    Attributes:
        dtype: of its elements.
        fragments: cover the tensor's shape.
        rank: the rank that holds it, for errors; empty for the module's own weight.
        whole: whether a check compares every element, instead of those at both ends of each fragment.
    """

    dtype: DType
    fragments: tuple[Fragment, ...]
    rank: str = ""
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Padding:
    """Elements that belong to no tensor.

    Attributes:
        dtype: of its elements.
        fragments: their places; their `start`s have no meaning.
        why: the reason, for a person.
        zero: whether the layout says that they are zero.
    """

    dtype: DType
    fragments: tuple[Fragment, ...]
    why: str = "alignment"
    zero: bool = True


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Some of a tensor's elements and their places: those that one rank holds, or that go into one file.

    Attributes:
        name: as in the model's state dict.
        shape: of the whole tensor, in elements, row-major.
        dtype: of the elements in the stores.
        fragments: sorted by their first element; each element is in at most one.
        flat: whether every fragment is a single row of elements.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    fragments: tuple[Fragment, ...]
    flat: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _put_in_order(self)

    @property
    def numel(self) -> int:
        """Elements in the whole tensor; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of these elements, in their own dtype."""
        return sum(fragment.numel for fragment in self.fragments) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor and the places of all its elements.

    Attributes:
        name: as in the model's state dict.
        shape: in elements, row-major.
        dtype: of the elements in the stores.
        role: parameter (trainable), frozen (parameter without optimizer state) or buffer.
        fragments: cover the shape exactly once; sorted by their first element.
        replicas: other places that must hold the same numbers.
        flat: whether every fragment is a single row of elements.

    Raises:
        IncompleteError: some elements have no place. InconsistentError: some have two. CorruptError: some are beyond the end
            of their file. TypeError: an argument is of another type, or no such role.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    role: Role
    fragments: tuple[Fragment, ...]
    replicas: tuple[Replica, ...] = ()
    flat: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.role not in _ROLES:
            raise TypeError(f"role of {self.name!r} is {self.role!r}, not one of {sorted(_ROLES)}")
        numel = _put_in_order(self)
        try:
            gap = first_gap(self.fragments, numel, self.dtype.itemsize)
        except InconsistentError as error:
            error.what = f"{error.what}, in tensor {self.name!r}"
            raise
        if gap is not None:
            raise IncompleteError(
                f"elements of tensor {self.name!r} are missing",
                found=f"no file with elements {gap[0]:,}-{gap[1] - 1:,}",
                expected=f"all {numel:,} elements of shape {list(self.shape)}",
                remedy="Copy the missing or shortened rank files again, or choose another tag.",
            )

    @property
    def numel(self) -> int:
        """Elements in the tensor; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in its own dtype."""
        return self.numel * self.dtype.itemsize

    @property
    def own_copy(self) -> Replica | None:
        """The module's own weight beside the master weight, if it is a replica; None otherwise."""
        return next((replica for replica in self.replicas if not replica.rank), None)

    def as_in(self, copy: Replica) -> TensorEntry:
        """The tensor as one of its replicas holds it: in that one's dtype and places, without others."""
        return replace(self, dtype=copy.dtype, fragments=copy.fragments, replicas=())


def held_by(tensors: Iterable[tuple[str, TensorEntry]], padding: Iterable[Padding]) -> Iterator[Claim]:
    """The claims of tensors and their replicas, and of elements that belong to no tensor."""
    for name, entry in tensors:
        yield Claim(name, 0, entry.dtype.itemsize, entry.fragments)
        for number, replica in enumerate(entry.replicas, 1):
            yield Claim(name, number, replica.dtype.itemsize, replica.fragments)
    for pad in padding:
        yield Claim(f"padding ({pad.why})", 0, pad.dtype.itemsize, pad.fragments)


_WHOLE = {int}


def _put_in_order(held: TensorPart | TensorEntry) -> int:
    """Checks the shape, and that the fragments are inside their stores; sorts them and sets `flat`. Returns the elements."""
    if not isinstance(held.shape, tuple) or not _WHOLE.issuperset(map(type, held.shape)):
        raise TypeError(f"shape of {held.name!r} is {held.shape!r}, not a tuple of int")
    if not isinstance(held.dtype, DType) or not isinstance(held.fragments, tuple):
        raise TypeError(
            f"{held.name!r} has dtype {held.dtype!r} and fragments {held.fragments!r:.80}, not a DType and a tuple"
        )
    numel = numel_of(held.shape, name=held.name)
    itemsize = held.dtype.itemsize
    flat = in_order = True
    last = 0
    for fragment in held.fragments:
        if fragment.rows == 1:
            end = fragment.byte_offset + fragment.count * itemsize if fragment.count else 0
        else:
            end = fragment.nbytes_end(itemsize)
            flat = False
        if end > fragment.store.size:
            raise CorruptError(
                f"ends before the end of tensor {held.name!r}", file=str(fragment.store),
                found=f"{fragment.store.size:,} bytes", expected=f"{end:,} bytes or more, as its index says",
                remedy=COPY_AGAIN, byte_offset=fragment.byte_offset,
            )  # fmt: skip
        start = fragment.start
        in_order = in_order and start >= last
        last = start
    if not in_order:
        object.__setattr__(held, "fragments", tuple(sorted(held.fragments, key=lambda fragment: fragment.start)))
    object.__setattr__(held, "flat", flat)
    return numel


@dataclass(frozen=True, slots=True)
class Topology:
    """How many ranks share the work, per axis: data, tensor, pipeline, expert.

    Attributes:
        dp: data-parallel ranks.
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        ep: expert-parallel ranks, which are some of the data-parallel ones.
        experts: layer of experts -> expert-parallel rank -> its experts, and the ranks that hold them: data-parallel ranks, or
            data x tensor if experts are spread over both.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    experts: tuple[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """Where a catalog comes from; `inspect` prints it beside the tensors.

    Attributes:
        layout: name of the layout that read it ("zero2", "unsharded", ...).
        path: the directory or file.
        tag: the save's tag; empty for a single file.
        framework: ("DeepSpeed", "0.19.8"), or empty strings.
        zero_stage: 0-3, or None for layouts without stages.
        global_steps: optimizer steps at the save, or None if it is not recorded.
        optimizer_states: names of per-element optimizer states, e.g. ("exp_avg", "exp_avg_sq").
        notes: sentences for the user (a fallback taken, a prefix stripped).
        prefix: the beginning of all names that the trainer's own wrapper of the model gave them; empty for none.
        details: further facts of the run, as (label, text): rows that `inspect` prints, and `details` of its JSON.
        part: what it is a part of, if it is not a whole save: "one of 2 files"; empty for a whole one.
    """

    layout: str
    path: str
    tag: str = ""
    framework: tuple[str, str] = ("", "")
    zero_stage: int | None = None
    global_steps: int | None = None
    optimizer_states: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    prefix: str = ""
    details: tuple[tuple[str, str], ...] = ()
    part: str = ""

    def as_json(self, topology: Topology) -> dict[str, object]:
        """The facts that an output records of its source; no path and no host."""
        return {
            "layout": self.layout,
            "tag": self.tag,
            "step": self.global_steps,
            "framework": " ".join(self.framework).strip(),
            "topology": {"dp": topology.dp, "tp": topology.tp, "pp": topology.pp, "ep": topology.ep},
            **({"part": self.part} if self.part else {}),
        }


class Names(Protocol):
    """Names by their numbers, and numbers by names; below zero where there is none."""

    def names(self, start: int, stop: int) -> list[str]:
        """The names with these numbers."""

    def find(self, name: str) -> int:
        """The number of a name."""

    def in_order(self) -> bytes:
        """The numbers, each in four bytes, by the names' code points."""


class TensorForm(NamedTuple):
    """What tensors have in common."""

    shape: tuple[int, ...]
    dtype: DType
    role: Role


class TensorColumns(Mapping[str, TensorEntry]):
    """A million small tensors, each one run of elements in a file, as numbers: nobody keeps an object for each.

    An entry that is asked for by name, or by `values` or `items`, is made once and kept, so that it is the same object each time.
    `passing` and `alike` keep none.

    Args:
        names: of the tensors.
        prefix: the beginning of all names there, which is left out.
        forms: of the tensors, and for each tensor the number of its form.
        stores: the files, and for each tensor the number of its file.
        places: for each tensor, the byte at which it begins. Who makes this has checked that each ends in its file, and before
            the next one begins.
    """

    def __init__(
        self, names: Names, prefix: str, forms: tuple[Sequence[TensorForm], Sequence[int]],
        stores: tuple[Sequence[FileStore], Sequence[int]], places: Sequence[int],
    ) -> None:  # fmt: skip
        self.names, self._prefix, self.places = names, prefix, places
        self.forms, self.form = forms
        self.stores, self._store = stores
        self._made: dict[int, TensorEntry] = {}

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _BATCH):
            yield from self.named(start, start + _BATCH)

    def named(self, start: int, stop: int) -> list[str]:
        """The names with these numbers."""
        cut = len(self._prefix)
        return [name[cut:] for name in self.names.names(start, stop)]

    def in_order(self) -> array[int]:
        """The numbers by the names' code points."""
        return array("I", self.names.in_order())

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.names.find(self._prefix + name) >= 0

    def __getitem__(self, name: str) -> TensorEntry:
        number = self.names.find(self._prefix + name)
        if number < 0:
            raise KeyError(name)
        if number not in self._made:
            self._made[number] = self._entry(number, name)
        return self._made[number]

    def at(self, number: int) -> TensorEntry:
        """The tensor with this number, which nobody keeps."""
        return self._made.get(number) or self._entry(number, *self.named(number, number + 1))

    def _entry(self, number: int, name: str) -> TensorEntry:
        shape, dtype, role = self.forms[self.form[number]]
        numel = math.prod(shape)
        own = (Fragment(self.stores[self._store[number]], self.places[number], 0, numel),) if numel else ()
        return TensorEntry(name, shape, dtype, role, own)

    def passing(self) -> Iterator[TensorEntry]:
        """The entries, which nobody keeps."""
        known = self._made.get
        for number, name in enumerate(self):
            yield known(number) or self._entry(number, name)

    def alike(self) -> Iterator[tuple[TensorEntry, int]]:
        """One tensor of each form, and how many there are."""
        for form, count in Counter(self.form).items():
            number = self.form.index(form)
            yield self._entry(number, *self.named(number, number + 1)), count

    def moved(
        self, dtypes: Sequence[DType], stores: tuple[Sequence[FileStore], Sequence[int]], places: array[int]
    ) -> TensorColumns:
        """The same tensors at other places, in these dtypes, one for each form."""
        forms = [form._replace(dtype=dtype) for form, dtype in zip(self.forms, dtypes, strict=True)]
        return TensorColumns(self.names, self._prefix, (forms, self.form), stores, places)


_BATCH = 1 << 12
"""Names that are made at once."""


def alike(tensors: Mapping[str, TensorEntry]) -> Iterable[tuple[TensorEntry, int]]:
    """Tensors by what they have in common, shape, dtype and role: one of them, and how many there are."""
    return tensors.alike() if isinstance(tensors, TensorColumns) else ((entry, 1) for entry in tensors.values())


def usual_dtype(tensors: Mapping[str, TensorEntry]) -> DType:
    """The dtype that most floating elements have, fp32 where there are none; those of one byte are of a quantisation."""
    numels: Counter[DType] = Counter()
    for entry, number in alike(tensors):
        if entry.dtype.kind == "float" and entry.dtype.itemsize > 1:
            numels[entry.dtype] += entry.numel * number
    return numels.most_common(1)[0][0] if numels else F32


def named_forms(tensors: Mapping[str, TensorEntry]) -> Iterable[tuple[str, TensorEntry | TensorForm]]:
    """The name of each tensor, and what has its shape, dtype and role."""
    if isinstance(tensors, TensorColumns):
        return zip(tensors, map(tensors.forms.__getitem__, tensors.form), strict=True)
    return ((entry.name, entry) for entry in tensors.values())


def passing(tensors: Mapping[str, TensorEntry]) -> Iterable[TensorEntry]:
    """The entries of tensors, for a caller that keeps none, and does not ask which object one is."""
    return tensors.passing() if isinstance(tensors, TensorColumns) else tensors.values()


@dataclass(frozen=True, slots=True)
class Catalog(Mapping[str, TensorEntry]):
    """Tensors by name, their aliases, and their origin.

    Attributes:
        tensors: name -> entry, in the model's order.
        aliases: dropped name -> kept name, for tied weights; kept names are in `tensors`, dropped ones are not.
        topology: ranks per axis.
        source: where it comes from.
        evidence: what proves that it is the whole model.
        extras: inert values from beside the tensors (client state, scheduler, configs).
        padding: elements between and behind the tensors that belong to no tensor.
        views: bytes that a file's own index gives to several tensors: views of one storage.
        claims: the bytes that all tensors and the padding read; reused by a catalog of the same tensors.
    """

    tensors: Mapping[str, TensorEntry]
    source: Source
    evidence: Evidence
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    topology: Topology = Topology()
    extras: Mapping[str, object] = field(default_factory=dict[str, object])
    padding: tuple[Padding, ...] = ()
    views: tuple[ByteSpan, ...] = ()
    claims: Claims = field(default_factory=Claims, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Checks aliases and claims; those of `TensorColumns` were checked by who made these. Raises InconsistentError if two
        tensors read the same bytes, or tied names do not fit the tensors.
        """
        for dropped, kept in self.aliases.items():
            if kept not in self.tensors or dropped in self.tensors:
                raise InconsistentError(
                    f"the tied weights {dropped!r} and {kept!r} do not fit the tensors", file=self.source.path,
                    found=f"a tensor {dropped!r}" if kept in self.tensors else f"no tensor {kept!r}",
                    expected=f"a tensor {kept!r}, and {dropped!r} only as another name of it",
                )  # fmt: skip
        if isinstance(self.tensors, TensorColumns) and not self.padding:
            return
        if not self.claims.include(self._held()):
            object.__setattr__(self, "claims", Claims(self._held(), self.views))

    def _held(self) -> Iterator[Claim]:
        return held_by(self.tensors.items(), self.padding)

    def source_facts(self) -> dict[str, object]:
        """What an output records of its source, and of what proves that it is whole; no path and no host."""
        return {**self.source.as_json(self.topology), "evidence": self.evidence.as_json()}

    def __getitem__(self, name: str) -> TensorEntry:
        return self.tensors[self.aliases.get(name, name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def numel(self) -> int:
        """Elements in all tensors, tied ones once."""
        return sum(entry.numel * count for entry, count in alike(self.tensors))

    @property
    def zeros(self) -> tuple[Padding, ...]:
        """The padding that is zero, as the layout says."""
        return tuple(pad for pad in self.padding if pad.zero)

    def stores(self) -> set[FileStore]:
        """The files that hold elements."""
        if isinstance(self.tensors, TensorColumns):
            return {*self.tensors.stores}
        return {
            fragment.store
            for entry in self.tensors.values()
            for fragment in entry.fragments
            if isinstance(fragment.store, FileStore)
        }

    def select(self, keep: Callable[[TensorEntry], bool]) -> Catalog:
        """The tensors for which `keep` is true; a tied weight is kept if it is true for any of its names.

        If it is true for a dropped name but not for the kept one, the dropped name becomes the kept one.
        """
        if not self.aliases and all(map(keep, self.tensors.values())):
            return self
        tensors: dict[str, TensorEntry] = {}
        aliases: dict[str, str] = {}
        names: dict[str, list[str]] = {}
        for dropped, kept in self.aliases.items():
            names.setdefault(kept, []).append(dropped)
        for name, entry in self.tensors.items():
            wanted = [alias for alias in (name, *names.get(name, ())) if keep(replace_name(entry, alias))]
            if wanted:
                tensors[wanted[0]] = replace_name(entry, wanted[0])
                aliases.update(dict.fromkeys(wanted[1:], wanted[0]))
        return replace(self, tensors=tensors, aliases=aliases)

    def rename(self, new_name: Callable[[str], str]) -> Catalog:
        """The same tensors, with `new_name` applied to every name and alias. Raises InconsistentError if two names
        become the same.
        """
        names = {name: new_name(name) for name in (*self.tensors, *self.aliases)}
        if all(map(eq, names, names.values())):
            return self
        tensors: dict[str, TensorEntry] = {}
        for name, entry in self.tensors.items():
            renamed = names[name]
            if renamed in tensors:
                raise InconsistentError(
                    f"two tensors would both be called {renamed!r}", file=self.source.path,
                    found=f"{name!r} and another tensor", remedy="Change --rename or --strip-prefix.",
                )  # fmt: skip
            tensors[renamed] = replace_name(entry, renamed)
        aliases = {names[dropped]: names[kept] for dropped, kept in self.aliases.items()}
        return replace(self, tensors=tensors, aliases={d: k for d, k in aliases.items() if d != k})


def replace_name(entry: TensorEntry, name: str) -> TensorEntry:
    """The same tensor under another name; the same object if the name is its own. Its places are not checked again."""
    if entry.name == name:
        return entry
    named = object.__new__(TensorEntry)
    for one in TensorEntry.__slots__:
        object.__setattr__(named, one, getattr(entry, one))
    object.__setattr__(named, "name", name)
    return named

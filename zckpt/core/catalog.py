"""Catalogs: tensors, and the places their elements live.

A checkpoint on disk, a checkpoint to be written and a live model are all a `Catalog`. Layouts make them, the router
carries one into another. All values are frozen: select, rename and cast return new catalogs. Constructing one is the
check: a tensor whose fragments do not cover its shape exactly once does not exist, so a missing rank, a short file or a
doubled partition is found here, in one place, for every layout. Nor does a catalog in which two tensors read the same bytes
(see `claims`), so a reader that looks for them in the wrong places is found here too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from zckpt.base.errors import CorruptError, IncompleteError, InconsistentError
from zckpt.core.claims import Claims, Held, Span
from zckpt.core.dtypes import DType
from zckpt.core.fragments import FileStore, Fragment
from zckpt.core.overlaps import first_gap

Role = Literal["parameter", "frozen", "buffer"]

MAX_NUMEL = 2**63 - 1
"""torch counts elements in signed 64-bit numbers: a shape beyond this is no shape."""


def numel_of(shape: tuple[int, ...], *, name: str, file: str | None = None) -> int:
    """Elements in a shape.

    Raises:
        CorruptError: a dimension is negative, or the product overflows 63 bits.
    """
    numel = math.prod(shape)
    if any(dim < 0 for dim in shape) or numel > MAX_NUMEL:
        raise CorruptError(
            f"an impossible shape of tensor {name!r}",
            file=file,
            found=str(list(shape)),
            expected="at most 2^63 elements",
        )
    return numel


@dataclass(frozen=True, slots=True)
class Replica:
    """Another place that must hold the same tensor, perhaps in a narrower dtype: checks read it.

    Attributes:
        dtype: of its elements.
        fragments: cover the tensor's shape.
        rank: who holds it, for errors; empty for the module's own weight.
        whole: whether a check of both ends of each fragment is not enough: every element is compared.
    """

    dtype: DType
    fragments: tuple[Fragment, ...]
    rank: str = ""
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Padding:
    """Elements that belong to no tensor, where the layout says that there are such.

    Attributes:
        dtype: of its elements.
        fragments: their places; numbers of elements mean nothing here.
        why: they are there, for a person.
        zero: whether the layout says that they are zero.
    """

    dtype: DType
    fragments: tuple[Fragment, ...]
    why: str = "alignment"
    zero: bool = True


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Some of a tensor's elements and where they lie: what one rank holds, or what goes into one file.

    Attributes:
        name: as in the model's state dict.
        shape: of the whole tensor, in elements, row-major.
        dtype: of the elements in the stores.
        fragments: sorted by their first element; none holds an element that another does.
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
        """Bytes of the elements held, in their own dtype."""
        return sum(fragment.numel for fragment in self.fragments) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor and where all its elements lie.

    Attributes:
        name: as in the model's state dict.
        shape: in elements, row-major.
        dtype: of the elements in the stores.
        role: parameter (trainable), frozen (parameter without optimizer state) or buffer.
        fragments: cover the shape exactly once; sorted by their first element.
        replicas: other places that must hold the same numbers.
        flat: whether every fragment is a single row of elements.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    role: Role
    fragments: tuple[Fragment, ...]
    replicas: tuple[Replica, ...] = ()
    flat: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _put_in_order(self)
        numel = self.numel
        try:
            gap = first_gap(self.fragments, numel, self.dtype.itemsize)
        except InconsistentError as error:
            error.what = f"{error.what}, of tensor {self.name!r}"
            raise
        if gap is not None:
            raise IncompleteError(
                f"elements that no file holds, of tensor {self.name!r}",
                found=f"{gap[0]:,}-{gap[1] - 1:,} of {numel:,} are missing",
                expected=f"its shape is {list(self.shape)}",
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
        """What the module itself holds beside a master; not what other ranks do."""
        return next((replica for replica in self.replicas if not replica.rank), None)


def held_by(tensors: Iterable[tuple[str, TensorEntry]]) -> Iterator[Held]:
    """What tensors and their replicas read."""
    for name, entry in tensors:
        yield Held(name, 0, entry.dtype.itemsize, entry.fragments)
        for number, replica in enumerate(entry.replicas, 1):
            yield Held(name, number, replica.dtype.itemsize, replica.fragments)


def held_as_padding(padding: Iterable[Padding]) -> Iterator[Held]:
    """What belongs to no tensor."""
    return (Held(f"padding ({pad.why})", 0, pad.dtype.itemsize, pad.fragments) for pad in padding)


def _put_in_order(held: TensorPart | TensorEntry) -> None:
    """Makes sure that the shape is one and the fragments lie inside their stores; sorts them and sets `flat`."""
    numel_of(held.shape, name=held.name)
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
                f"tensor {held.name!r} reaches beyond the end of its file",
                file=str(fragment.store),
                found=f"the file ends at byte {fragment.store.size:,}",
                expected=f"its index says {end:,}",
                remedy="The copy was cut short. Copy that file again.",
                byte_offset=fragment.byte_offset,
            )
        start = fragment.start
        in_order = in_order and start >= last
        last = start
    if not in_order:
        object.__setattr__(held, "fragments", tuple(sorted(held.fragments, key=lambda fragment: fragment.start)))
    object.__setattr__(held, "flat", flat)


@dataclass(frozen=True, slots=True)
class Topology:
    """How many ranks share the work, per axis: data, tensor, pipeline, expert.

    Attributes:
        dp: data-parallel ranks.
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        ep: expert-parallel ranks, of those of data.
        experts: layer of experts -> expert-parallel rank -> its experts, and the ranks that hold them: of data, or of
            data x tensor where experts are spread over both.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    experts: tuple[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """Where a catalog comes from: what `inspect` tells beside the tensors.

    Attributes:
        layout: name of the layout that read it ("zero2", "unsharded", ...).
        path: the directory or file.
        tag: the save's tag; empty for a single file.
        framework: ("DeepSpeed", "0.19.8"), or empty strings.
        zero_stage: 0-3, or None where the word has no meaning.
        global_steps: optimizer steps at the save, or None when not recorded.
        optimizer_states: names of per-element optimizer states, e.g. ("exp_avg", "exp_avg_sq").
        notes: sentences a person should see (a fallback taken, a prefix stripped).
    """

    layout: str
    path: str
    tag: str = ""
    framework: tuple[str, str] = ("", "")
    zero_stage: int | None = None
    global_steps: int | None = None
    optimizer_states: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def as_json(self, topology: Topology) -> dict[str, object]:
        """What an output says of its source; nothing of the machine it lies on."""
        return {
            "layout": self.layout,
            "tag": self.tag,
            "step": self.global_steps,
            "framework": " ".join(self.framework).strip(),
            "topology": {"dp": topology.dp, "tp": topology.tp, "pp": topology.pp, "ep": topology.ep},
        }


@dataclass(frozen=True, slots=True)
class Catalog(Mapping[str, TensorEntry]):
    """Tensors by name, their aliases, and what is known of their origin.

    Attributes:
        tensors: name -> entry, in the model's order.
        aliases: dropped name -> kept name, for tied weights; kept names are in `tensors`, dropped ones are not.
        topology: ranks per axis.
        source: where it comes from.
        extras: inert values found beside the tensors (client state, scheduler, configs).
        padding: elements between and behind the tensors that belong to none.
        views: bytes that a file's own index gives to several tensors: views of one storage.
        claims: what all tensors and the padding read; made anew when these are others.
    """

    tensors: Mapping[str, TensorEntry]
    source: Source
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    topology: Topology = Topology()
    extras: Mapping[str, object] = field(default_factory=dict[str, object])
    padding: tuple[Padding, ...] = ()
    views: tuple[Span, ...] = ()
    claims: Claims = field(default_factory=Claims, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Checks it.

        Raises:
            InconsistentError: two tensors read the same bytes, or tied names do not fit the tensors.
        """
        for dropped, kept in self.aliases.items():
            if kept not in self.tensors or dropped in self.tensors:
                raise InconsistentError(
                    f"tied weights {dropped!r} and {kept!r} that do not fit the tensors",
                    file=self.source.path,
                    found=f"{kept!r} is {'there' if kept in self.tensors else 'missing'}",
                    expected=f"{kept!r} should be there and {dropped!r} should not",
                )
        held = [*held_by(self.tensors.items()), *held_as_padding(self.padding)]
        if not self.claims.include(held):
            object.__setattr__(self, "claims", Claims(held, self.views))

    def __getitem__(self, name: str) -> TensorEntry:
        return self.tensors[self.aliases.get(name, name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def numel(self) -> int:
        """Elements in all tensors, tied ones once."""
        return sum(entry.numel for entry in self.tensors.values())

    @property
    def zeros(self) -> tuple[Padding, ...]:
        """Padding that the layout says is zero."""
        return tuple(pad for pad in self.padding if pad.zero)

    def stores(self) -> set[FileStore]:
        """The files that hold elements."""
        return {
            fragment.store
            for entry in self.tensors.values()
            for fragment in entry.fragments
            if isinstance(fragment.store, FileStore)
        }

    def select(self, keep: Callable[[TensorEntry], bool]) -> Catalog:
        """Only the tensors that `keep` wants; a tied weight stays when any of its names is wanted.

        When the kept name is unwanted and a dropped one is wanted, the dropped name becomes the kept one.
        """
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
        """Every name, alias or not, through `new_name`.

        Raises:
            InconsistentError: two names become one.
        """
        tensors: dict[str, TensorEntry] = {}
        for name, entry in self.tensors.items():
            renamed = new_name(name)
            if renamed in tensors:
                raise InconsistentError(
                    f"two tensors that would both be called {renamed!r}",
                    file=self.source.path,
                    found=f"one of them is {name!r}",
                    remedy="Change --rename or --strip-prefix.",
                )
            tensors[renamed] = replace_name(entry, renamed)
        aliases = {new_name(dropped): new_name(kept) for dropped, kept in self.aliases.items()}
        return replace(self, tensors=tensors, aliases={d: k for d, k in aliases.items() if d != k})


def replace_name(entry: TensorEntry, name: str) -> TensorEntry:
    """The same tensor under another name; nothing is checked twice when the name is its own."""
    return entry if entry.name == name else replace(entry, name=name)

"""What became of every tensor of a source: a trained tensor is written, or it is named; none is dropped without a word.

For `jobs`, which close the ledger of each output, and `checks`, which look at the source again. Names change on the way and rows
are cut, fused and computed, so what became of a tensor is found by its bytes: one that the output reads no byte of
was left out, and has a fate that says why. A source without one is an error of the step that lost it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from zckpt.base.errors import InconsistentError
from zckpt.base.words import count, examples
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.claims import ByteSpan, Claim, Claims
from zckpt.core.fragments import ComputedStore, Fragment
from zckpt.core.recipes import DerivedStore

Kind = Literal["option", "rule"]

RULES: Mapping[str, str] = {
    "adapter": "it belongs to an adapter that is not merged",
    "base": "the run did not train it, and the base model has it",
    "whole": "an adapter has a tensor of its own in its place",
    "copy": "it is equal to a tensor that is written",
    "original": "it is the base's copy of a module that the adapter replaces",
    "class": "the class that the adapter was trained in has no place for it",
    "buffer": "the model computes it itself",
    "form": "the form that is written has no place for it",
    "packed": "it is packed, and the base model has these weights as plain numbers",
    "not adapter": "it is not a tensor of the adapter",
}
"""Why a tensor is left out that no option names: rule -> the reason, for a person."""


class Fate(NamedTuple):
    """Why a tensor of the source is not in the output.

    Attributes:
        name: in the source.
        kind: an option of the user's left it out, or a rule of `RULES`.
        why: the option, or the rule.
    """

    name: str
    kind: Kind
    why: str

    @property
    def reason(self) -> str:
        """The reason, as a clause for a person."""
        return f"by {self.why}" if self.kind == "option" else f"since {RULES[self.why]}"

    def as_json(self) -> dict[str, str]:
        """The fields, under the names that `zckpt.json` has."""
        return {"name": self.name, "kind": self.kind, "why": self.why}


def names_unread(source: Catalog, made: Mapping[str, TensorEntry]) -> list[str]:
    """The tensors of a source that an output reads no element of; those without elements count if their name is
    missing.

    A copy that is compared with a written tensor in every element is read too: a tied embedding that two stages hold.

    Args:
        source: a catalog.
        made: the tensors of the output; their elements lie in the source's files, or are computed from them.
    """
    if made is source.tensors:
        return []
    same = {id(entry.fragments) for entry in made.values()}
    rest = [name for name, entry in source.tensors.items() if id(entry.fragments) not in same]
    if not rest:
        return []
    read = [claim for name, entry in made.items() for claim in _claims(name, entry.dtype.itemsize, entry.fragments)]
    copies = [(name, one) for name, entry in made.items() for one in entry.replicas if one.whole]
    read += [claim for name, one in copies for claim in _claims(name, one.dtype.itemsize, one.fragments)]
    stores = dict.fromkeys(fragment.store for claim in read for fragment in claim.fragments)
    shared = [ByteSpan(store, 0, store.size) for store in stores]  # an output may hold a tensor under several names
    claims = Claims(read, shared)
    return [name for name in rest if not _is_read(source.tensors[name], name, made, claims)]


class TrainedTensor(NamedTuple):
    """A tensor that a run trained, and how a merge uses it.

    Attributes:
        adapter: the one that it belongs to; "" for one that was trained beside all adapters.
        entry: under the name that its file gives it.
        how: "merged", "rows" or "whole": the output is computed with it, has its rows, or has it as it is.
        why: the rule of `RULES` by which it is left out, if there is one.
    """

    adapter: str
    entry: TensorEntry
    how: str
    why: str = ""


def trace(tensors: Sequence[TrainedTensor], made: Mapping[str, TensorEntry]) -> Iterator[list[str]]:
    """For each tensor the names of those of an output that read it; arguments as for `names_unread`."""
    spans: dict[object, list[tuple[int, int, str]]] = {f.store: [] for one in tensors for f in one.entry.fragments}
    for name, entry in made.items():
        claims = _claims(name, entry.dtype.itemsize, entry.fragments)
        for one, size in ((f, claim.itemsize) for claim in claims for f in claim.fragments if f.store in spans):
            spans[one.store].append((one.byte_offset, one.byte_offset + one.numel * size, name))
    for tensor in tensors:
        found = ((f.byte_offset, span) for f in tensor.entry.fragments if f.numel for span in spans[f.store])
        yield sorted({name for at, (low, high, name) in found if low <= at < high})


def _claims(name: str, itemsize: int, fragments: Sequence[Fragment]) -> Iterator[Claim]:
    """The elements that a tensor reads, in files and memory: of computed ones, those that they are computed from."""
    computed = {f.store for f in fragments if isinstance(f.store, ComputedStore | DerivedStore)}
    yield Claim(name, 0, itemsize, [f for f in fragments if f.store not in computed])
    for store in computed:
        if isinstance(store, DerivedStore):
            for entry in store.recipe.inputs:
                yield from _claims(name, entry.dtype.itemsize, entry.fragments)
        else:
            for own, size in store.sources:
                yield from _claims(name, size, own)


def _is_read(entry: TensorEntry, name: str, made: Mapping[str, TensorEntry], claims: Claims) -> bool:
    if not entry.numel:
        return name in made
    firsts = [
        ByteSpan(fragment.store, fragment.byte_offset, fragment.byte_offset + claim.itemsize)
        for claim in _claims(name, entry.dtype.itemsize, entry.fragments)
        for fragment in claim.fragments
        if fragment.numel
    ]
    return sum(1 for _ in claims.unused(firsts)) < len(firsts)


def close(source: Catalog, made: Mapping[str, TensorEntry], fate_of: Callable[[str], Fate | None]) -> tuple[Fate, ...]:
    """The fates of the tensors that an output reads nothing of.

    Args:
        source: a catalog.
        made: the tensors of the output, as for `names_unread`.
        fate_of: why a tensor is not in the output, by its name; None where nothing says it.

    Raises:
        InconsistentError: of some tensors nothing says it; nothing was written.
    """
    unread = names_unread(source, made)
    fates = tuple(fate for name in unread if (fate := fate_of(name)) is not None)
    check_closed(source, unread, fates)
    return fates


def check_closed(source: Catalog, unread: Iterable[str], fates: Sequence[Fate]) -> None:
    """Checks that each tensor that an output reads nothing of has a fate. Raises InconsistentError if some have none;
    nothing was written.
    """
    lost = sorted({*unread} - {fate.name for fate in fates})
    if lost:
        raise InconsistentError(
            f"{count(len(lost), 'tensor')} would be lost: no step of the conversion writes it, and none says why"
            if len(lost) == 1
            else f"{count(len(lost), 'tensor')} would be lost: no step of the conversion writes them, and none says why",
            file=source.source.path, found=examples(lost), expected="every tensor in the output, or left out by an option",
            remedy="Leave it out on purpose with --exclude, and report this: it is a mistake of zckpt's.",
        )  # fmt: skip

"""Compares the places of a catalog's tensors with those that the family's second reader finds.

For `verify`. What is compared is where an element belongs in the whole tensor, not where a part begins in its file: parts that
are joined in another order of ranks are found too. Every element that the catalog reads must be where the second reader says
that this element is. Names are compared both ways.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from zckpt import layouts
from zckpt.base.errors import ZckptError
from zckpt.base.words import count, examples
from zckpt.containers import TensorRef
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.fragments import ComputedStore, Fragment
from zckpt.core.recipes import DerivedStore
from zckpt.layouts.run.training import Training
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.second import BesideMaster, SecondLook, StoredRows, UnprovedFamily, hold_whole


class Places(NamedTuple):
    """Whether a second reader found the tensors' places.

    Attributes:
        by: what proves them.
        found: how many tensors were found again.
        why: why places are not proved; empty where they are.
        problems: tensors that are elsewhere, and names that only one of the readers has.
    """

    by: Literal["second reader", "none"]
    found: int
    why: str
    problems: tuple[str, ...] = ()

    def as_answer(self) -> str:
        """The answer of `verify` after "places"."""
        if self.by == "none":
            return f"not found a second time: {self.why}; a mistake of zckpt's own reader would not be noticed"
        return f"a second reader, which shares no code with the first, finds {count(self.found, 'tensor')} in the same places"


def as_unproved(why: str, found: int = 0) -> Places:
    """The result when nothing proves the places."""
    return Places("none", found, why)


def look_again(listing: Listing) -> SecondLook | Places:
    """The second reader's result for the save, or why there is none."""
    try:
        family = layouts.family_of(listing)
        if isinstance(family.second, UnprovedFamily):
            return as_unproved(family.second.why)
        return family.second(listing)
    except ZckptError as error:
        return as_unproved(f"the second reader stops at the files ({error.what})")
    except _STRANGE as error:
        return as_unproved(f"the second reader does not understand the files ({type(error).__name__}: {error})")


_STRANGE = (
    ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, StopIteration, TypeError, ValueError,
)  # fmt: skip
"""The exceptions that a second reader may raise for files in a form that it does not know."""


def compare_places(listing: Listing, catalog: Catalog) -> Places:
    """Compares the places of the catalog's tensors, under the names that the files have, with those of the second
    reader.
    """
    look = look_again(listing)
    if isinstance(look, Places):
        return look
    problems = list(_compare_names(look, catalog))
    wanted = {(name, ""): entry for name, entry in catalog.tensors.items()}
    return _compare(look, wanted, {(old, ""): (new, "") for old, new in catalog.aliases.items()}, problems)


def compare_states(listing: Listing, training: Training, masters: Mapping[str, TensorEntry]) -> Places:
    """Compares the places of the optimizer's states; `masters` are the catalog's tensors, beside which unnamed states
    must lie.
    """
    look = look_again(listing)
    if isinstance(look, Places):
        return look
    wanted = {(name, state): entry for name, own in training.states.items() for state, entry in own.items()}
    return _compare(look, wanted, {}, [], masters)


Key = tuple[str, str]
"""A tensor's name and a state's."""


def _compare_names(look: SecondLook, catalog: Catalog) -> Iterator[str]:
    copies = _copies_in(catalog) if look.loose else {}
    for name, shape in look.names.items():
        if (entry := catalog.get(name)) is None:
            if name not in look.loose or not _is_copy(look.loose[name], copies):
                yield f"{name!r} is in the files, and is not read from them"
        elif shape is not None and shape != entry.shape:
            yield f"{name!r} is read as {list(entry.shape)}, in the files it is {list(shape)}"
    for name in catalog.tensors:
        if name not in look.names:
            yield f"{name!r} is read, and is not a name of the files"


Copies = Mapping[tuple[str, int], Sequence[tuple[TensorEntry, Sequence[Fragment]]]]
"""File and first byte -> what a catalog reads there as a tensor or as a copy of one."""


def _copies_in(catalog: Catalog) -> Copies:
    found: dict[tuple[str, int], list[tuple[TensorEntry, Sequence[Fragment]]]] = {}
    for entry in catalog.tensors.values():
        for fragments in (entry.fragments, *(copy.fragments for copy in entry.replicas)):
            if fragments:
                found.setdefault((str(fragments[0].store), fragments[0].byte_offset), []).append((entry, fragments))
    return found


def _is_copy(ref: TensorRef, copies: Copies) -> bool:
    """Whether the catalog reads just these elements, as a tensor of this shape or as a copy of it."""
    held = [run.run for run in hold_whole("", "", ref)]
    return any(
        entry.shape == ref.shape and _are_at(fragments, held, ref.dtype.itemsize)
        for entry, fragments in copies.get((ref.store.path, ref.byte_offset), ())
    )


def _compare(
    look: SecondLook,
    wanted: Mapping[Key, TensorEntry],
    aliases: Mapping[Key, Key],
    problems: list[str],
    masters: Mapping[str, TensorEntry] | None = None,
) -> Places:
    held: dict[Key, list[StoredRows]] = {}
    try:
        for name, state, run in look.runs if masters is None else itertools.chain(look.runs, look.states):
            key = (name, state)
            own = held.get(aliases.get(key, key))
            if own is None:
                held[aliases.get(key, key)] = [run]
            else:
                own.append(run)
        lines = _lines_of(look.beside) if masters is not None else None
    except ZckptError as error:
        return as_unproved(f"the second reader stops at the files ({error.what})")
    except _STRANGE as error:
        return as_unproved(f"the second reader does not understand the files ({type(error).__name__}: {error})")
    found, missed = 0, list[str]()
    for key, entry in wanted.items():
        what = f"{key[1]} of {key[0]!r}" if key[1] else repr(key[0])
        master = masters.get(key[0]) if masters is not None else None
        if not entry.numel or (key in held and _is_at(entry, held[key])):
            found += 1
        elif key in held and not (look.by_copy and _is_copied(entry, held[key])):
            problems.append(f"{what} is not read where the files have it")
        elif key in held:
            found += 1
        elif lines is None or master is None or not (beside := _beside(lines, master, key[1])):
            missed.append(f"{key[1]} of {key[0]}" if key[1] else key[0])
        elif any(_is_at(entry, own) for own in beside):
            found += 1
        else:
            problems.append(f"{what} is not read beside its master")
    if missed and not problems:
        why = look.unproved or "the files do not say twice where they are"
        return as_unproved(f"{examples(missed)}: {why}", found)
    return Places("second reader", found, "", tuple(problems))


def _is_copied(entry: TensorEntry, held: Sequence[StoredRows]) -> bool:
    """Whether the module's own weight is there: the masters, which have no names, are compared with it element by
    element.
    """
    copy = entry.own_copy
    return copy is not None and _all_at(copy.fragments, held, copy.dtype.itemsize)


def _is_at(entry: TensorEntry, held: Sequence[StoredRows]) -> bool:
    return _all_at(entry.fragments, held, entry.dtype.itemsize)


def _all_at(fragments: Sequence[Fragment], held: Sequence[StoredRows], size: int) -> bool:
    return all(_are_at(own, held, itemsize) for own, itemsize in _sources(fragments, size))


def _sources(fragments: Sequence[Fragment], size: int) -> Iterator[tuple[Sequence[Fragment], int]]:
    """The places in files, with the bytes of an element there; for computed elements, those of each input."""
    store = fragments[0].store if fragments else None
    if isinstance(store, ComputedStore):
        yield from store.sources
    elif isinstance(store, DerivedStore) and not store.place:
        for entry in store.recipe.inputs:
            yield from _sources(entry.fragments, entry.dtype.itemsize)
    else:
        yield fragments, size


def _are_at(fragments: Sequence[Fragment], held: Sequence[StoredRows], size: int) -> bool:
    """Whether all elements of the fragments are where `held` has the same elements."""
    if len(fragments) == len(held) and all(map(_is_same, fragments, held)):
        return True
    said = set(held)
    rest = [rows for rows in map(_rows_of, fragments) if rows.count and rows not in said]
    if not rest:
        return True
    runs: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for rows in held:
        for offset, start, number in _dense_runs(rows, size):
            runs.setdefault((rows.path, offset - start * size), []).append((offset, offset + number * size))
    merged = {place: _merge(own) for place, own in runs.items()}
    for rows in rest:
        for offset, start, number in _dense_runs(rows, size):
            own = merged.get((rows.path, offset - start * size), [])
            at = bisect_right(own, offset, key=lambda span: span[0]) - 1
            if at < 0 or own[at][1] < offset + number * size:
                return False
    return True


def _is_same(fragment: Fragment, rows: StoredRows) -> bool:
    """Whether a single row of elements is the same one, which is the most common and cheapest case."""
    path, offset, start, number, several, *_ = rows
    return (
        fragment.byte_offset == offset and fragment.start == start and fragment.count == number
        and fragment.rows == several == 1 and str(fragment.store) == path
    )  # fmt: skip


def _rows_of(fragment: Fragment) -> StoredRows:
    start, number, rows, pitch, store_pitch, step = fragment.block()
    return StoredRows(str(fragment.store), fragment.byte_offset, start, number, rows, pitch, store_pitch, step)


def _dense_runs(rows: StoredRows, size: int) -> Iterator[tuple[int, int, int]]:
    """Byte, first element and elements of each run without gaps."""
    for row in range(rows.rows):
        offset, start = rows.offset + row * rows.store_pitch * size, rows.start + row * rows.pitch
        if rows.step == 1 or rows.count == 1:
            yield offset, start, rows.count
        else:
            yield from ((offset + n * rows.step * size, start + n, 1) for n in range(rows.count))


def _merge(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes, in order, with adjacent spans joined."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged


Lines = Mapping[str, Sequence[BesideMaster]]
"""File -> the vectors of masters without names in it, and the states beside them, in their order."""


def _lines_of(beside: Iterable[BesideMaster]) -> Lines:
    lines: dict[str, list[BesideMaster]] = {}
    for pair in beside:
        lines.setdefault(pair.master.store.path, []).append(pair)
    for line in lines.values():
        line.sort(key=lambda pair: pair.master.byte_offset)
    return lines


def _beside(lines: Lines, master: TensorEntry, state: str) -> list[list[StoredRows]]:
    """The places where a state must be, by the master or a rank's copy of it; empty where they are not known."""
    copies = (copy.fragments for copy in master.replicas if copy.dtype == master.dtype)
    found = (_states_beside(lines, fragments, state) for fragments in (master.fragments, *copies))
    return [rows for rows in found if rows]


def _states_beside(lines: Lines, fragments: Sequence[Fragment], state: str) -> list[StoredRows]:
    found: list[StoredRows] = []
    for rows in (_rows_of(fragment) for own, _ in _sources(fragments, 1) for fragment in own):
        line = lines.get(rows.path, [])
        at = bisect_right(line, rows.offset, key=lambda pair: pair.master.byte_offset)
        for pair in reversed(line[:at]):
            if pair.master.byte_stop <= rows.offset:
                break
            if pair.state == state:
                first = (rows.offset - pair.master.byte_offset) // pair.master.dtype.itemsize
                offset = pair.held.byte_offset + first * pair.held.dtype.itemsize
                found.append(rows._replace(path=pair.held.store.path, offset=offset))
                break
    return found

"""How two checkpoints or weights files differ, in any layouts: in names, shapes, dtypes and values.

For `zckpt diff`. Both sides are read once, in constant memory: the router maps one catalog's tensors to the other's, and the
scan compares elements where a conversion would copy them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from zckpt.base.dataclass import dataclass, public
from zckpt.base.pace import DEFAULT_PACE, Pace
from zckpt.base.progress import Progress, watch_progress
from zckpt.base.words import Printed, count, examples, wrap_text
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.dtypes import DType
from zckpt.engine.scan import scan
from zckpt.engine.scan_requests import ScanRequest, comparisons
from zckpt.engine.tensor_statistics import Relation, Spread, Statistics
from zckpt.jobs.groups import Form, Reading
from zckpt.jobs.open import open_catalog
from zckpt.jobs.steps import open_model, reform
from zckpt.layouts.gguf import METADATA
from zckpt.layouts.save.listing import ReadOptions

_MOST_LISTED = 20

_COLUMNS = "    {:<28}{:>10}{:>11}{:>11}{:>13}"
"""Below a tensor's name: how many elements differ, the number of the first, the largest absolute and relative difference."""


_SIGNIFICANT_BITS = {"BF16": 8, "F16": 11, "F8_E4M3": 4, "F8_E5M2": 3}
"""Dtype -> significant bits of its numbers, the leading one included: rounding changes a number by at most 2**-bits of
it.
"""


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """One tensor that both sides have.

    Attributes:
        name: of the tensor.
        shapes: on both sides.
        dtypes: on both sides.
        statistics: what the comparison counted; None where shapes or kinds of numbers differ, so that nothing was compared.
        same: whether it is the same on both sides.
        spread: how far its numbers are apart; None where that was not wanted or nothing was compared.
    """

    name: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[DType, DType]
    statistics: Statistics | None
    same: bool
    spread: Spread | None = None

    def as_json(self) -> dict[str, object]:
        """One object for programs; infinite and undefined numbers are text."""
        facts: dict[str, object] = {
            "name": self.name,
            "same": self.same,
            "shapes": [list(shape) for shape in self.shapes],
            "dtypes": [dtype.name for dtype in self.dtypes],
        }
        if self.statistics is not None:
            facts |= {
                "differing": self.statistics.differ,
                "first": self.statistics.first,
                "max_abs": _json_number(self.statistics.max_abs),
                "max_rel": _json_number(self.statistics.max_rel),
                "cosine": _json_number(self.statistics.cosine),
                "nan": [self.statistics.nan, self.statistics.other_nan],
                "inf": [self.statistics.inf, self.statistics.other_inf],
            }
        return facts

    def rows(self, width: int | None = None) -> Iterator[str]:
        """The name and the facts that need no values, and below them the numbers under `_COLUMNS`."""
        facts = [
            f"{what}{shown[0]} in A, {shown[1]} in B"
            for what, shown in (("shape ", [str(list(shape)) for shape in self.shapes]), ("", self.dtypes))
            if shown[0] != shown[1]
        ]
        yield from wrap_text(f"{self.name} ({'; '.join(facts)})" if facts else self.name, width, "    ")
        if self.statistics is None or not self.statistics.differ:
            return
        s = self.statistics
        of = f"{s.differ:,} of {s.count:,}"
        yield _COLUMNS.format(of, f"{s.first:,}", f"{s.max_abs:.3g}", f"{s.max_rel:.3g}", f"{s.cosine:.9g}")
        if (s.nan, s.inf) != (s.other_nan, s.other_inf):
            yield f"    {s.nan:,} NaN and {s.inf:,} infinite in A, {s.other_nan:,} NaN and {s.other_inf:,} infinite in B"


def _json_number(value: float) -> float | str:
    return value if abs(value) < float("inf") else repr(value)


@public
@dataclass(frozen=True, slots=True, repr=False)
class Diff(Printed):
    """How two checkpoints differ.

    Attributes:
        only_a: names that only the first has.
        only_b: names that only the second has.
        tensors: those that both have, in the first one's order; tensors with several names once.
        notes: sentences for a person; none of them is a difference.
        exact: whether numbers had to be the same bit for bit.
    """

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    tensors: tuple[TensorDiff, ...]
    notes: tuple[str, ...] = ()
    exact: bool = True

    def __repr__(self) -> str:
        differ = sum(not tensor.same for tensor in self.tensors) + len(self.only_a) + len(self.only_b)
        return f"<zckpt.Diff of {count(len(self.tensors), 'tensor')}: {f'{differ:,} differ' if differ else 'the same'}>"

    @property
    def same(self) -> bool:
        """Whether there is no difference."""
        return not self.only_a and not self.only_b and all(tensor.same for tensor in self.tensors)

    def as_json(self, *, tensors: bool = False) -> dict[str, object]:
        """One object for programs; with `tensors`, it lists also those that are the same."""
        return {
            "same": self.same,
            "compared": len(self.tensors),
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
            "tensors": [t.as_json() for t in self.tensors if tensors or not t.same],
            "notes": list(self.notes),
        }

    def lines(self, *, tensors: bool = False, width: int | None = None) -> Iterator[str]:
        """The differences as lines for a person: of tensors that are the same too, if `tensors` is set; `width` as in
        `words.row`.
        """
        for only, side in ((self.only_a, "A"), (self.only_b, "B")):
            if only:
                names = ", ".join(only) if tensors else examples(only)
                yield from wrap_text(f"only in {side}: {names}", width, "    ")
        listed = [t for t in self.tensors if tensors or not t.same]
        shown = listed if tensors else listed[:_MOST_LISTED]
        if any(t.statistics is not None and t.statistics.differ for t in shown):
            yield "tensor"
            yield _COLUMNS.format("elements that differ", "first", "max abs", "max rel", "cosine")
        for tensor in shown:
            yield from tensor.rows(width)
        if len(listed) > len(shown):
            yield f"and {len(listed) - len(shown):,} more tensors (--tensors lists all)"
        yield from wrap_text(self._verdict(), width)

    def _verdict(self) -> str:
        worst = max((t.statistics.max_abs for t in self.tensors if t.statistics is not None), default=0.0)
        if self.same:
            how = "bit for bit" if self.exact else f"equal within the tolerance (max abs {worst:.3g})"
            return f"the same: {count(len(self.tensors), 'tensor')}, {how}"
        differ = sum(not t.same for t in self.tensors)
        words = [f"{differ:,} of {count(len(self.tensors), 'tensor')} that both have"] if self.tensors else []
        sides = (("A", self.only_a), ("B", self.only_b))
        words += [f"{count(len(only), 'name')} only in {side}" for side, only in sides if only]
        return f"different: {', '.join(words)}{self._tolerance()}"

    def _tolerance(self) -> str:
        """The tolerance at which they are equal, if rounding to another dtype explains every difference."""
        told = [t for t in self.tensors if not t.same]
        coarse = [_SIGNIFICANT_BITS[d.name] for t in told for d in t.dtypes if d.name in _SIGNIFICANT_BITS]
        if self.only_a or self.only_b or not coarse:
            return ""
        rtol = 2.0 ** -min(coarse)
        most = rtol / (1 + rtol)  # of the larger number, which is `rtol` of the other at most
        if any(t.statistics is None or t.dtypes[0] == t.dtypes[1] or not t.statistics.max_rel <= most for t in told):
            return ""
        return (
            f". The dtypes differ; with --rtol {rtol:g}, which is what rounding to them may change, they are the same"
        )


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    atol: float | None = None,
    rtol: float | None = None,
    read_options: ReadOptions | None = None,
    as_part: bool = False,
    spreads: bool = False,
    pace: Pace | None = None,
    progress: Progress = None,
) -> Diff:
    """Compares two checkpoints, weights files or directories, tensor by tensor.

    Without tolerances, numbers of one dtype must be the same bit for bit, and the dtypes must be the same. With one,
    |a - b| <= atol + rtol |b| is the same, as are NaN and NaN, and dtypes may differ.

    Args:
        a: anything zckpt reads.
        b: anything zckpt reads, in any other layout.
        atol: absolute tolerance.
        rtol: relative tolerance.
        read_options: how tensor- and pipeline-parallel files are joined, where they do not say it themselves.
        as_part: take one part of a save (a shard, one rank's file or directory) as a side.
        spreads: count for each tensor how far its numbers are apart.
        pace: threads, bytes per second, and whether the page cache keeps what is read; None for each default.
        progress: as for `zckpt.convert`, with the bytes read so far.

    Returns:
        What differs. Its `same` says whether nothing does; `lines()` and `as_json()` say what.

    Raises:
        ZckptError: one of them cannot be read.

    Example:
        >>> _ = zckpt.convert("run", "weights/", progress=False)
        >>> zckpt.diff("run", "weights/", progress=False).same
        True
    """
    (left, notes_a), (right, notes_b) = _both(a, b, Reading(read_options=read_options, as_part=as_part))
    names_a, names_b = [*left, *left.aliases], {*right, *right.aliases}
    pairs: dict[tuple[int, int], tuple[str, TensorEntry, TensorEntry]] = {}
    for name in names_a:
        if name in names_b:
            x, y = left[name], right[name]
            pairs.setdefault((id(x), id(y)), (name, x, y))
    relation = Relation(atol=atol, rtol=rtol)
    compared = [_are_comparable(x, y) for _, x, y in pairs.values()]

    def looks() -> Iterator[ScanRequest]:
        for number, ((_, x, y), can_be) in enumerate(zip(pairs.values(), compared, strict=True)):
            if can_be:
                yield from comparisons(x, y, number)

    total = sum(x.nbytes + y.nbytes for _, x, y in pairs.values())
    with watch_progress(progress, total, "diff") as watch:
        report = scan(
            looks(), relation=relation, spreads=spreads, total_bytes=total, progress=watch, **(pace or DEFAULT_PACE)
        )
    tensors: list[TensorDiff] = []
    for number, ((name, x, y), can_be) in enumerate(zip(pairs.values(), compared, strict=True)):
        statistics = report.of(number) if can_be else None
        dtypes_fit = x.dtype == y.dtype or relation.is_tolerant
        same = statistics is not None and not statistics.differ and dtypes_fit
        spread = report.spreads.get(number, Spread()) if spreads and can_be else None
        tensors.append(TensorDiff(name, (x.shape, y.shape), (x.dtype, y.dtype), statistics, same, spread))
    only_a = tuple(name for name in names_a if name not in names_b)
    only_b = tuple(name for name in (*right, *right.aliases) if name not in set(names_a))
    notes = (*(f"A: {n}" for n in notes_a), *(f"B: {n}" for n in notes_b))
    return Diff(only_a, only_b, tuple(tensors), notes, exact=not relation.is_tolerant)


def _both(
    a: str | os.PathLike[str], b: str | os.PathLike[str], reading: Reading
) -> tuple[tuple[Catalog, tuple[str, ...]], tuple[Catalog, tuple[str, ...]]]:
    """The tensors and notes of both sides; if only one is GGUF, its tensors get transformers' names."""
    left, right = _open_side(a, reading), _open_side(b, reading)
    if (METADATA in left[0].extras) == (METADATA in right[0].extras):
        return left, right
    if METADATA in left[0].extras:
        return _open_side(a, reading, with_hub_names=True), right
    return left, _open_side(b, reading, with_hub_names=True)


def _open_side(
    path: str | os.PathLike[str], reading: Reading, *, with_hub_names: bool = False
) -> tuple[Catalog, tuple[str, ...]]:
    model = open_model(open_catalog(os.fspath(path), reading))
    model = reform(model, Form(), to_directory=False) if with_hub_names else model
    return model.catalog, model.notes


def _are_comparable(x: TensorEntry, y: TensorEntry) -> bool:
    return x.shape == y.shape and x.dtype.kind == y.dtype.kind

"""How two checkpoints differ, as a page for a browser: totals, the largest differences first, a histogram of each tensor.

For `zckpt diff --html`. Everything is in the HTML: the page can be read without its script, which searches, sorts and shows
the tensors in parts.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence

from zckpt.base.words import count
from zckpt.engine.tensor_statistics import Spread
from zckpt.jobs.diff import Diff, TensorDiff
from zckpt.pictures.histogram import Axis, large, small
from zckpt.pictures.page import asset, page, text

_AT_ONCE = 100
"""The most rows that are shown together; `differences.js` gets this number."""


def differences_page(found: Diff, a: str, b: str, *, tolerance: str = "") -> str:
    """Makes the HTML that shows where two sets of weights differ: a comparison with `spreads`, of `a` and `b` as the user named
    them. `tolerance`: which numbers count as equal, in words; empty if they must be the same bit for bit.
    """
    apart = sorted((tensor for tensor in found.tensors if _is_row(tensor)), key=_rank)
    spreads = [tensor.spread for tensor in apart if tensor.spread is not None]
    axis = Axis.of(spreads)
    body = "".join(
        (
            '<a class="skip" href="#tensors">Skip to the tensors</a>',
            _head(found, a, b, tolerance),
            '<main class="wrap">',
            _totals(found, apart),
            _all_differences(axis, spreads),
            _table(axis, apart),
            _names("Only in A", "names", found.only_a),
            _names("Only in B", "names", found.only_b),
            _names("The same on both sides", "same", [t.name for t in found.tensors if not _is_row(t)]),
            "</main>",
        )
    )
    data = {"at_once": _AT_ONCE, "keys": [_keys(tensor) for tensor in apart]}
    return page(f"zckpt diff: {a} and {b}", body, data, styles=("differences.css",), scripts=("differences.js",))


def _is_row(tensor: TensorDiff) -> bool:
    return not tensor.same or bool(tensor.statistics is not None and tensor.statistics.max_abs)


def _rank(tensor: TensorDiff) -> tuple[bool, float]:
    """A sort key: tensors that could not be compared come first, then those with the largest difference."""
    return tensor.statistics is not None, -tensor.statistics.max_abs if tensor.statistics is not None else 0.0


def _keys(tensor: TensorDiff) -> list[float | None]:
    """The sort keys of a row, larger first: distance, relative distance, the part that differs, 1 - cosine.

    What could not be compared is None. JSON has no infinity: the largest double stands for it.
    """
    s = tensor.statistics
    if s is None:
        return [None, None, None, None]
    finite = [min(x, sys.float_info.max) for x in (s.max_abs, s.max_rel)]
    return [*finite, s.differ / s.count if s.count else 0.0, 2.0 if math.isnan(s.cosine) else 1.0 - s.cosine]


def _head(found: Diff, a: str, b: str, tolerance: str) -> str:
    kind, word = ("good", "the same") if found.same else ("bad", "different")
    equal = text(tolerance) if tolerance else "Numbers are equal if they are the same bit for bit."
    notes = "".join(f"<li>{text(note)}</li>" for note in found.notes)
    notes = f'<ul class="soft notes">{notes}</ul>' if notes else ""
    return asset("differences_head.html").format(kind=kind, word=word, a=text(a), b=text(b), equal=equal, notes=notes)


def _totals(found: Diff, apart: Sequence[TensorDiff]) -> str:
    compared = [t.statistics for t in found.tensors if t.statistics is not None]
    numbers, differ = sum(s.count for s in compared), sum(s.differ for s in compared)
    facts = [
        ("tensors that both have", f"{len(found.tensors):,}", ""),
        ("of them different", f"{sum(not t.same for t in found.tensors):,}", ""),
        ("numbers that differ", f"{differ:,}", f"of {numbers:,} ({_part(differ, numbers)})"),
    ]
    worst = max((t for t in apart if t.statistics is not None), key=lambda t: -_rank(t)[1], default=None)
    if worst is not None and worst.statistics is not None:
        name = f"in <bdi>{text(worst.name)}</bdi>"
        facts.append(("largest difference", _number(worst.statistics.max_abs), name))
    facts.append(("only in A", f"{len(found.only_a):,}", ""))
    facts.append(("only in B", f"{len(found.only_b):,}", ""))
    missed = sum(t.statistics is None for t in found.tensors)
    if missed:
        facts.append(("not compared", f"{missed:,}", "shapes or kinds of numbers differ"))
    cards = "".join(f"<div><dt>{what}</dt><dd>{value}<small>{more}</small></dd></div>" for what, value, more in facts)
    title = '<h2 id="totals" class="unseen">Totals</h2>'
    return f'<section aria-labelledby="totals">{title}<dl class="card facts">{cards}</dl></section>'


def _all_differences(axis: Axis | None, spreads: Sequence[Spread]) -> str:
    if axis is None:
        return ""
    whole = functools.reduce(Spread.__add__, spreads, Spread())
    rows = "".join(
        f'<tr><td>{text(axis.words(low))}</td><td class="number">{pairs:,}</td></tr>'
        for low, pairs in axis.bars_of(whole).items()
        if pairs
    )
    return (
        '<section class="card" aria-labelledby="far"><h2 id="far">How far numbers are apart</h2>'
        '<p class="soft">|a - b| of all pairs of finite numbers that are not equal, on an axis of powers of two.</p>'
        f"{large(axis, whole)}"
        '<details><summary>The same as a table</summary><table aria-labelledby="far"><thead><tr><th>|a - b|</th>'
        f'<th class="number">pairs of numbers</th></tr></thead><tbody>{rows}</tbody></table></details></section>'
    )


_SORTS = ("largest difference", "largest relative difference", "part that differs", "least cosine")

_COLUMNS = ("differ", "first", "max abs", "max rel", "cosine")


def _table(axis: Axis | None, apart: Sequence[TensorDiff]) -> str:
    if not apart:
        return '<p id="tensors" class="card">No tensor differs.</p>'
    options = "".join(f'<option value="{i}">{name}</option>' for i, name in enumerate(_SORTS))
    heads = "".join(f'<th scope="col" class="number">{name}</th>' for name in _COLUMNS)
    rows = "".join(_row(tensor, axis, hidden=i >= _AT_ONCE) for i, tensor in enumerate(apart))
    ends = f"{2.0**axis.low:.1g} to {2.0 ** (axis.low + axis.bars * axis.step):.1g}" if axis else ""
    return asset("differences_table.html").format(options=options, heads=heads, ends=text(ends), rows=rows)


def _row(tensor: TensorDiff, axis: Axis | None, *, hidden: bool) -> str:
    cells = "".join(
        f'<td class="number" data-of="{name}">{value}</td>'
        for name, value in zip(_COLUMNS, _cells(tensor), strict=True)
    )
    facts = ". ".join(_facts(tensor))
    drawn = (
        small(axis, tensor.spread) if axis is not None and tensor.spread is not None and tensor.spread.counts else ""
    )
    return (
        f'<tr{" hidden" if hidden else ""}><th scope="row"><bdi class="mono">{text(tensor.name)}</bdi><small>{facts}</small></th>'
        f"{cells}<td>{drawn}</td></tr>"
    )


def _cells(tensor: TensorDiff) -> Iterable[str]:
    s = tensor.statistics
    if s is None:
        return ("not compared", "", "", "", "")
    differ = f"{s.differ:,}<small>{_part(s.differ, s.count)}</small>"
    first = "" if s.first is None else f"{s.first:,}"
    return (
        differ,
        first,
        _number(s.max_abs),
        _number(s.max_rel),
        "undefined" if math.isnan(s.cosine) else f"{s.cosine:.7g}",
    )


def _facts(tensor: TensorDiff) -> Iterator[str]:
    shapes, dtypes = [text(list(shape)) for shape in tensor.shapes], tensor.dtypes
    apart = [f"{x} in A, {y} in B" for x, y in (shapes, dtypes) if x != y]
    same = [str(x) for x, y in (shapes, dtypes) if x == y]
    yield " ".join(same)
    yield from (f'<b class="warn">{text(fact)}</b>' for fact in apart)
    s = tensor.statistics
    if s is not None and (s.nan, s.inf) != (s.other_nan, s.other_inf):
        sides = ((s.nan, s.inf, "A"), (s.other_nan, s.other_inf, "B"))
        yield (
            '<b class="warn">'
            + ", ".join(f"{nan:,} NaN and {inf:,} infinite in {side}" for nan, inf, side in sides)
            + "</b>"
        )
    if tensor.same:
        yield "within the tolerance"


def _names(title: str, ident: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    items = "".join(f"<li><bdi>{text(name)}</bdi></li>" for name in names)
    return (
        f'<section class="card"><details><summary><h2>{title} <span class="soft">{count(len(names), "name")}</span></h2>'
        "</summary>"
        f'<ul class="mono {ident}">{items}</ul></details></section>'
    )


def _number(value: float) -> str:
    return "infinite" if math.isinf(value) else f"{value:.3g}"


def _part(some: int, of: int) -> str:
    """A part in percent; 0 % stands for none, and 100 % for all."""
    if not of or some in (0, of):
        return "100 %" if some else "0 %"
    percent = 100 * some / of
    return "< 0.01 %" if percent < 0.01 else "> 99.99 %" if percent > 99.99 else f"{percent:.3g} %"

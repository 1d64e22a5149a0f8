"""Finds which tensors of a checkpoint an output leaves out, and why: the ledger of a job, closed before anything is
written.

For the jobs that write weights; the manifest records it, and a dry run prints it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from zckpt.base.words import matches
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.ledger import Fate, check_closed, names_unread
from zckpt.jobs.groups import Selecting


def find_left_out(
    source: Catalog,
    written: Mapping[str, TensorEntry],
    selecting: Selecting,
    *,
    selectable: Mapping[str, TensorEntry] | None = None,
    rules: Mapping[str, str] | None = None,
) -> tuple[Fate, ...]:
    """The tensors of a checkpoint that an output reads nothing of, each with the option or the rule that left it out.

    Args:
        source: the checkpoint.
        written: the tensors of the output.
        selecting: what was asked for.
        selectable: the tensors from which `include` and `exclude` chose; None for the checkpoint's.
        rules: name of a tensor -> the key of `RULES` that left it out.

    Raises:
        InconsistentError: a tensor would be lost that no option and no rule leaves out.
    """
    unread = names_unread(source, written)
    if not unread:
        return ()
    lost = set[str]() if selectable is None else set(names_unread(source, selectable))
    fates = tuple(_fates(source, unread, selecting, lost, rules or {}))
    check_closed(source, unread, fates)
    return fates


def _fates(
    source: Catalog, unread: Sequence[str], selecting: Selecting, lost: set[str], rules: Mapping[str, str]
) -> Iterator[Fate]:
    for name in unread:
        if name in rules:
            yield Fate(name, "rule", rules[name])
        elif selecting.exclude_frozen and source.tensors[name].role == "frozen":
            yield Fate(name, "option", "--exclude-frozen")
        elif matches(name, selecting.exclude) or (name not in lost and selecting.exclude):
            yield Fate(name, "option", "--exclude")
        elif name not in lost and selecting.include:
            yield Fate(name, "option", "--include")

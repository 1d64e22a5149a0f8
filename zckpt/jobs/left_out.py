"""Which tensors of a checkpoint an output leaves out, and why: the ledger of a job, closed before anything is written.

For the jobs that write weights; the manifest records it, and a dry run prints it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.ledger import Fate, check_closed, names_unread
from zckpt.jobs.options import Options
from zckpt.naming.transform import matches


def find_left_out(
    source: Catalog,
    written: Mapping[str, TensorEntry],
    options: Options,
    *,
    selectable: Mapping[str, TensorEntry] | None = None,
    rules: Mapping[str, str] | None = None,
) -> tuple[Fate, ...]:
    """The tensors of a checkpoint of which an output reads nothing, each with the option or the rule that left it out.

    Args:
        source: the checkpoint.
        written: the tensors of the output.
        options: what was asked for.
        selectable: the tensors from which `include` and `exclude` chose; None for the checkpoint's.
        rules: name of a tensor -> the key of `RULES` that left it out.

    Raises:
        InconsistentError: a tensor would be lost that no option and no rule leaves out.
    """
    unread = names_unread(source, written)
    if not unread:
        return ()
    lost = set[str]() if selectable is None else set(names_unread(source, selectable))
    fates = tuple(_fates(source, unread, options, lost, rules or {}))
    check_closed(source, unread, fates)
    return fates


def _fates(
    source: Catalog, unread: Sequence[str], options: Options, lost: set[str], rules: Mapping[str, str]
) -> Iterator[Fate]:
    for name in unread:
        if name in rules:
            yield Fate(name, "rule", rules[name])
        elif options.exclude_frozen and source.tensors[name].role == "frozen":
            yield Fate(name, "option", "--exclude-frozen")
        elif matches(name, options.exclude) or (name not in lost and options.exclude):
            yield Fate(name, "option", "--exclude")
        elif name not in lost and options.include:
            yield Fate(name, "option", "--include")

"""Resolves the options for names and tensors for one checkpoint: the prefix of `auto`, and options that match nothing.

For the jobs that take `--strip-prefix`, `--rename`, `--include` and `--exclude`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import replace

from zckpt.base.errors import UsageError
from zckpt.base.words import examples, matches
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.jobs.groups import Naming, Selecting
from zckpt.jobs.opened import Opened

AUTO = "auto"
"""The value of `strip_prefix` for which the prefix is found; a prefix of this word would be `auto.`."""

_WRAPPERS = ("module.", "_forward_module.", "_orig_mod.", "_fsdp_wrapped_module.", "base_model.model.", "pl_module.")
"""The prefixes that DDP, DeepSpeed's and Lightning's engines, torch.compile, FSDP and PEFT put before all names."""

_BODIES = frozenset(
    ("model", "transformer", "gpt_neox", "language_model", "bert", "roberta", "encoder", "decoder", "backbone")
)
"""The names that models give the part with their layers: a prefix that belongs to them."""


def resolve_selection(
    catalog: Catalog, selecting: Selecting, naming: Naming, before: Iterable[str] = ()
) -> tuple[Naming, tuple[str, ...]]:
    """The options for names with the prefix that `auto` finds, and sentences on it and on wishes that match nothing.

    Args:
        catalog: the tensors, under the names that the options are about.
        selecting: which tensors are wanted.
        naming: what they are called.
        before: names that the tensors had earlier, which `exclude` may name too.
    """
    if selecting == Selecting() and not naming.strip_prefix and not naming.rename:
        return naming, ()
    names = [*catalog, *catalog.aliases]
    notes: list[str] = []
    if naming.strip_prefix == AUTO:
        prefix = common_prefix(names)
        naming = replace(naming, strip_prefix=prefix)
        notes.append(
            f"The leading {prefix!r} was stripped from the names (--strip-prefix auto)."
            if prefix
            else f"--strip-prefix auto stripped nothing: no prefix is known to wrap all names, such as {examples(names)}."
        )
    elif naming.strip_prefix and not any(name.startswith(naming.strip_prefix) for name in names):
        notes.append(f"--strip-prefix {naming.strip_prefix!r} is at the start of no name, such as {examples(names)}.")
    known = {"include": names, "exclude": [*names, *before]}
    for option, among in known.items():
        for glob in getattr(selecting, option):
            if not any(matches(name, [glob]) for name in among):
                notes.append(f"--{option} {glob!r} matches no tensor: names look like {examples(names)}.")
    return naming, (*notes, *_unused_renames(names, naming))


def _unused_renames(names: Collection[str], naming: Naming) -> Iterable[str]:
    """Sentences on patterns of `rename` that replace nothing in any name; `select` refuses invalid patterns."""
    renamed = [name.removeprefix(naming.strip_prefix) for name in names]
    for text, new in naming.rename:
        try:
            pattern = re.compile(text)
            if not any(pattern.search(name) for name in renamed):
                yield f"--rename {text!r} matches no name, such as {examples(renamed)}."
            renamed = [pattern.sub(new, name) for name in renamed]
        except re.error:
            return


def select(catalog: Catalog, selecting: Selecting, naming: Naming | None = None) -> Catalog:
    """The tensors that are wanted, under their new names.

    Raises:
        UsageError: none is left, or a wish makes no sense. InconsistentError: two would have one name.
    """
    naming = naming or Naming()
    selected = catalog
    if selecting != Selecting() or naming.strip_prefix or naming.rename:
        selected = _rename(catalog.select(lambda entry: is_wanted(entry, selecting)), naming)
    if not selected.tensors:
        raise UsageError(
            "there is nothing to convert", file=catalog.source.path, found=f"none of {len(catalog):,} tensors selected",
            remedy=f"Check --include and --exclude; names look like {examples(catalog)}.",
        )  # fmt: skip
    if odd := [name for name in selected.tensors if not name or "\0" in name]:
        if odd[0] in catalog.tensors:
            raise UsageError(
                "a tensor has a name that no file of weights can hold", file=catalog.source.path, found=repr(odd[0]),
                expected="at least one character, and no zero byte", remedy="Name it with --rename, such as --rename '^$=NAME'.",
            )  # fmt: skip
        raise UsageError(
            "--rename or --strip-prefix would leave a tensor without a name", remedy="Change these options."
        )
    return selected


def _rename(catalog: Catalog, naming: Naming) -> Catalog:
    """The tensors without the prefix, and with what `rename` replaces in their names; errors as in `select`."""
    try:
        patterns = [(re.compile(pattern), new) for pattern, new in naming.rename]

        def renamed(name: str) -> str:
            name = name.removeprefix(naming.strip_prefix)
            for pattern, new in patterns:
                name = pattern.sub(new, name)
            return name

        return catalog.rename(renamed)
    except re.error as error:
        raise UsageError(
            "--rename is not a regular expression", found=str(error),
            remedy="Write --rename as PATTERN=REPLACEMENT, in the syntax of Python's re.",
        ) from error  # fmt: skip


def is_wanted(entry: TensorEntry, selecting: Selecting) -> bool:
    """Whether an output has this tensor."""
    if selecting.exclude_frozen and entry.role == "frozen":
        return False
    if selecting.include and not matches(entry.name, selecting.include):
        return False
    return not matches(entry.name, selecting.exclude)


def check_wanted(opened: Opened, catalog: Catalog, selecting: Selecting) -> None:
    """Makes sure that nothing that is wanted is packed, before a form of names meets tensors that it cannot understand.
    `catalog`: without what wrappers put into names. Raises UnsupportedError, which names the quantisation.
    """
    opened.check_read(entry for entry in catalog.tensors.values() if is_wanted(entry, selecting))


def check_whole(chosen: Catalog, catalog: Catalog) -> None:
    """Makes sure that weights beside which optimizer states are written are all there, under their own names. Raises
    UsageError if they are not.
    """
    if chosen.tensors.keys() != catalog.tensors.keys():
        raise UsageError(
            "the optimizer states would not fit the weights",
            found="--include, --exclude, --exclude-frozen, --strip-prefix or --rename",
            remedy="Leave these options out, or leave --optimizer out.",
        )


def common_prefix(names: Collection[str]) -> str:
    """The prefix that wraps all names: known wrappers' prefixes, and further parts that all names begin with.

    A part that models themselves call their body, such as `model.`, stays where the layers are directly below it.
    """
    found = ""
    while names:
        inner = [name.removeprefix(found) for name in names]
        prefix = next((p for p in _WRAPPERS if all(name.startswith(p) for name in inner)), "")
        prefix = prefix or _common_part(inner)
        if not prefix or any(name == prefix for name in inner):
            break
        found += prefix
    return found


def _common_part(names: Collection[str]) -> str:
    """The first part of all names with its dot, if it does not belong to the model."""
    parts = {name.partition(".")[0] for name in names}
    if len(parts) != 1 or any("." not in name for name in names):
        return ""
    (part,) = parts
    below = {name.split(".")[1] for name in names}
    is_list = part.isdecimal() or all(name.isdecimal() for name in below)
    is_layer = all(name.count(".") == 1 for name in names)
    if is_list or is_layer or (part in _BODIES and not below & _BODIES):
        return ""
    return f"{part}."

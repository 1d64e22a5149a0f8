"""What the options for names and tensors mean for one checkpoint: the prefix that `auto` finds, and wishes that match nothing.

For the jobs that take `--strip-prefix`, `--rename`, `--include` and `--exclude`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TypeVar

from zckpt.base.words import examples
from zckpt.core.catalog import Catalog
from zckpt.jobs.options import Options
from zckpt.naming.transform import matches

AUTO = "auto"
"""The value of `strip_prefix` for which the prefix is found; a prefix of this word would be `auto.`."""

_WRAPPERS = ("module.", "_forward_module.", "_orig_mod.", "_fsdp_wrapped_module.", "base_model.model.", "pl_module.")
"""What DDP, DeepSpeed's engine and Lightning's, torch.compile, FSDP and PEFT put before all names."""

_BODIES = frozenset(
    ("model", "transformer", "gpt_neox", "language_model", "bert", "roberta", "encoder", "decoder", "backbone")
)
"""What models call the part that holds their layers: a prefix that belongs to them."""

O_co = TypeVar("O_co", bound=Options)


def settled(catalog: Catalog, options: O_co, before: Iterable[str] = ()) -> tuple[O_co, tuple[str, ...]]:
    """The options with the prefix that `auto` finds, and sentences on it and on wishes that match nothing.

    Args:
        catalog: the tensors, under the names that the options are about.
        options: what was asked for.
        before: names that the tensors had earlier, which `exclude` may name too.
    """
    names = [*catalog, *catalog.aliases]
    notes: list[str] = []
    if options.strip_prefix == AUTO:
        prefix = common_prefix(names)
        options = replace(options, strip_prefix=prefix)
        notes.append(
            f"The leading {prefix!r} was stripped from the names (--strip-prefix auto)."
            if prefix
            else f"--strip-prefix auto stripped nothing: no prefix is known to wrap all names, such as {examples(names)}."
        )
    elif options.strip_prefix and not any(name.startswith(options.strip_prefix) for name in names):
        notes.append(f"--strip-prefix {options.strip_prefix!r} is at the start of no name, such as {examples(names)}.")
    known = {"include": names, "exclude": [*names, *before]}
    for option, among in known.items():
        for glob in getattr(options, option):
            if not any(matches(name, [glob]) for name in among):
                notes.append(f"--{option} {glob!r} matches no tensor: names look like {examples(names)}.")
    return options, (*notes, *_unused_renames(names, options))


def _unused_renames(names: Collection[str], options: Options) -> Iterable[str]:
    """Sentences on patterns of `rename` that replace nothing in any name; what is no pattern, `convert.select` refuses."""
    renamed = [name.removeprefix(options.strip_prefix) for name in names]
    for text, new in options.rename:
        try:
            pattern = re.compile(text)
            if not any(pattern.search(name) for name in renamed):
                yield f"--rename {text!r} matches no name, such as {examples(renamed)}."
            renamed = [pattern.sub(new, name) for name in renamed]
        except re.error:
            return


def common_prefix(names: Collection[str]) -> str:
    """What wraps all names: prefixes of known wrappers, and further parts that all of them begin with.

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

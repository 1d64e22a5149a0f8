"""What a family of files means: the families that zckpt reads, and the choice among them.

Each family is a package that exports one value, `FAMILY`: see `save.family`, and docs/extending.md for how to add one. Other
packages bring families of their own by entry points of the group `zckpt.layouts`; the name of each is a pattern of
file names.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from zckpt.base.errors import InconsistentError, NotACheckpointError, UnsupportedError, UsageError
from zckpt.base.extensions import Extension, extensions
from zckpt.core.catalog import Catalog
from zckpt.core.evidence import BY_MANIFEST
from zckpt.layouts import (
    dcp,
    fairscale,
    fsdp,
    gguf,
    megatron_core,
    megatron_legacy,
    moe,
    numbered,
    parallel,
    plain,
    torch_checkpointing,
    universal,
    weights_alone,
    zero,
)
from zckpt.layouts.run import usage
from zckpt.layouts.run.values import refuse_odd_values
from zckpt.layouts.save.family import Family
from zckpt.layouts.save.listing import Listing

if TYPE_CHECKING:
    from zckpt.layouts.run.training import Training

FAMILIES: tuple[Family, ...] = (
    universal.FAMILY,
    moe.FAMILY,
    parallel.FAMILY,
    zero.FAMILY,
    megatron_core.FAMILY,
    dcp.FAMILY,
    torch_checkpointing.FAMILY,
    megatron_legacy.FAMILY,
    fairscale.FAMILY,
    fsdp.FAMILY,
    fsdp.ANY_NAME,
    torch_checkpointing.WITHOUT_METADATA,
    *weights_alone.FAMILIES,
    numbered.FAMILY,
    gguf.FAMILY,
    plain.FAMILY,
)
"""The families in the order in which they are asked; the first that knows the files reads them.

The first four have the same files, each is a special case of those after it, and `zero` would take all of their saves. `plain`
takes any single file, so it is last.
"""


_admitted: set[Extension] = set()


def admit(names: Collection[str]) -> None:
    """Adds families of other packages that have files of these names, before those here that take any file.

    Nothing is imported where a family here knows the names: it reads them then. Raises UnsupportedError if such a
    package does not work.
    """
    global FAMILIES
    for one in extensions("zckpt.layouts"):
        if one in _admitted or not any(fnmatchcase(name, one.name) for name in names):
            continue
        if any(family.is_save(names) for family in FAMILIES if not family.fallback):
            return
        family = one.load(Family)
        if family.name in {other.name for other in FAMILIES}:
            raise one.broken(f"there is a layout {family.name!r} already")
        at = next(n for n, other in enumerate(FAMILIES) if other.fallback)
        FAMILIES = (*FAMILIES[:at], family, *FAMILIES[at:])
        _admitted.add(one)


def is_of_save(name: str) -> bool:
    """Whether a file of this name belongs to a save of some family, plain weights aside."""
    return any(family.owns(name) for family in FAMILIES if not family.fallback)


def is_save(names: Sequence[str]) -> bool:
    """Whether a directory with entries of these names is a save of some family, plain weights aside."""
    admit(names)
    return any(family.is_save(names) for family in FAMILIES if not family.fallback)


def family_of(listing: Listing) -> Family:
    """The first family that knows the files; some families have to open a file to know. Raises NotACheckpointError if
    there is none; lists why not, ZckptError if a file that had to be opened is damaged.
    """
    refusals: list[str] = []
    for family in FAMILIES:
        refusal = family.match(listing)
        if refusal is None:
            return family
        refusals.append(f"{family.name}: {refusal}")
    raise NotACheckpointError(
        "holds nothing that zckpt can read",
        file=listing.directory,
        found="; ".join(refusals),
        remedy="Give the directory that holds 'latest', a tag directory such as global_step500, or a weights file.",
    )


def family_by_names(listing: Listing) -> Family:
    """The first family that has files of these names, for a save that cannot be read: opens nothing.

    Of DeepSpeed's families, only universal checkpoints are distinguished from the others.
    """
    if listing.directory in listing.files.values():  # one file
        return FAMILIES[-1]
    for family in FAMILIES[:-1]:
        if family.directory:
            is_there = any(name.startswith(f"{family.directory}/") for name in listing.files)
        else:
            is_there = any(map(family.owns, listing.files))
        if is_there:
            return family
    return FAMILIES[-1]


def read(listing: Listing, *, allow_unknown: bool = False, as_part: bool = False) -> Catalog:
    """The catalog of a save, by the first family that knows its files.

    Args:
        listing: its files.
        allow_unknown: go on though files hold what zckpt does not know.
        as_part: go on though the model's config says that tensors are missing.

    Raises:
        NotACheckpointError: there is none.
        InconsistentError: elements of master weights are used by no tensor, or by two; or a file bears another one's name.
        IncompleteError: the model's config says that tensors, or rows of them, are missing.
        UsageError: a key was given for a save that has no keys.
    """
    family = family_of(listing)
    if listing.options.key and not family.has_keys:
        raise UsageError(
            "holds one state dict, so --key has nothing to choose from", file=listing.directory,
            found=f"{family.name}, --key {listing.options.key}",
            remedy="Leave --key out: it is for saves of torch.distributed.checkpoint and plain files that hold several.",
        )  # fmt: skip
    catalog = family.read(listing, allow_unknown=allow_unknown)
    for prove in (_prove_use, _prove_names, _prove_whole):
        catalog = prove(catalog, listing, family, allow_unknown, as_part)
    return catalog


def _prove_use(catalog: Catalog, listing: Listing, *_: object) -> Catalog:
    """The catalog, if each element of the master weights is used once."""
    usage.check(listing, usage.masters_in(listing), catalog.claims)
    catalog.claims.forget()
    return catalog


def _prove_names(catalog: Catalog, listing: Listing, family: Family, allow_unknown: bool, *_: object) -> Catalog:
    """The catalog of files that bear the names under which they were written, or with a note that some do not."""
    error = _find_misnamed(listing, family)
    if error is None:
        return catalog
    if not allow_unknown:
        raise error
    notes = (*catalog.source.notes, f"{error.found}: taken by the names as they are.")
    return replace(catalog, source=replace(catalog.source, notes=notes))


def _prove_whole(catalog: Catalog, listing: Listing, _: Family, allow_unknown: bool, as_part: bool) -> Catalog:
    """The catalog with what the model's config says of tensors that may be missing, where the files do not say it."""
    by_index = catalog.source.layout == "plain" and catalog.evidence.by != BY_MANIFEST
    if not listing.part and (catalog.evidence.level == "unknown" or by_index):
        from zckpt.layouts.save.whole import prove_by_config

        return prove_by_config(catalog, listing, as_part=as_part or allow_unknown)
    if catalog.evidence.doubt and catalog.source.layout != "plain":
        from zckpt.layouts.save.whole import find_left_out

        return find_left_out(catalog, listing)
    return catalog


def _find_misnamed(listing: Listing, family: Family) -> InconsistentError | None:
    """The error of files that were written under other names; None where there are none, as far as files say it."""
    misnamed = listing.find_misnamed(of_parts=family is not FAMILIES[-1])
    if not misnamed:
        return None
    (name, written), *others = misnamed
    return InconsistentError(
        "bears the name of another part of the model", file=listing.where(name),
        found=f"{name!r} was written as {written!r}" + (f", and {len(others)} more under others' names" if others else ""),
        expected="each file under the name that it was written under",
        remedy="Give the files their own names back, or copy the save again. If they are right as they are named, pass "
        "--allow-unknown-layout.",
    )  # fmt: skip


def read_training(listing: Listing, *, allow_unknown: bool = False, any_shape: bool = False) -> Training:
    """What a run needs beside the weights of a save.

    Args:
        listing: its files.
        allow_unknown: go on though optimizer files hold keys that zckpt does not know.
        any_shape: states may have other shapes than their parameters (`Training.other_shapes`), as quantised ones do.

    Raises:
        UnsupportedError: this kind of save does not hold it, or zckpt does not read it.
        InconsistentError: its files are not of one run, or one bears another one's name.
    """
    from zckpt.layouts.run import agreement

    family = family_of(listing)
    if family.read_training is None:
        raise UnsupportedError(
            "holds no optimizer states that zckpt can read",
            file=listing.directory,
            found=family.name,
            expected="a checkpoint with optimizer states",
            remedy="Convert its weights alone: zckpt to-fp32, to-bf16.",
        )
    with refuse_odd_values(listing):
        agreement.check(listing)
        training = family.read_training(listing, allow_unknown=allow_unknown)
    if not allow_unknown and (error := _find_misnamed(listing, family)) is not None:
        raise error
    if training.other_shapes and not any_shape:
        name, (state, entry) = next((n, next(iter(own.items()))) for n, own in training.other_shapes.items())
        raise UnsupportedError(
            f"optimizer state {state!r} has another shape than its parameter {name!r}", file=listing.directory,
            found=f"{list(entry.shape)}, as of a quantised optimizer", expected="a number for each element of the parameter",
            remedy="Convert the weights alone (to-fp32), or write the states as they are (to-states).",
        )  # fmt: skip
    usage.check(listing, usage.states_in(listing), training.claims)
    training.claims.forget()
    return training

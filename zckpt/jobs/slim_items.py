"""Smaller saves of torch.distributed.checkpoint: without the items of the optimizer, all others as they are.

For `slim`. What is left is loaded by `torch.distributed.checkpoint.load`, on any number of ranks, by a state dict without the
optimizer. accelerate keeps the optimizer in a directory beside the model's; that one is left out. Megatron-Core's saves keep the
fp32 weights, which are items of its optimizer, and every file beside the data files; Megatron-Core loads them with
--no-load-optim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UnsupportedError
from zckpt.base.words import count, examples
from zckpt.core.plan import Plan, literal_file
from zckpt.jobs.declarations import Asked
from zckpt.jobs.open import Opened
from zckpt.jobs.own_groups import Slim
from zckpt.jobs.slim_files import is_copied
from zckpt.layouts import dcp, family_of, megatron_core
from zckpt.layouts.dcp.metadata import read_metadata
from zckpt.layouts.dcp.smaller import nbytes_of, of_optimizers, without
from zckpt.layouts.megatron_core.contents import moments_of, sorted_items
from zckpt.layouts.run.steps import OF_MEGATRON, TRACKER, read_tracker
from zckpt.layouts.save.accelerate import optimizer_beside
from zckpt.layouts.save.listing import list_files
from zckpt.layouts.zero.torch_files import plan_copy


@dataclass(frozen=True, slots=True)
class FewerItems:
    """The files of a smaller save.

    Attributes:
        plan: of them.
        dropped: what is left out -> bytes.
        nbytes: of the save that it is made from, the optimizer beside it included.
        left_out: files that are links out of the save, and not copied.
    """

    plan: Plan
    dropped: Mapping[str, int]
    nbytes: int
    left_out: Sequence[str]


def fewer_items(opened: Opened, asked: Asked[Slim]) -> FewerItems | None:
    """The files without what `options` leave out; None for a save of another kind.

    Raises:
        UnsupportedError: the options leave out something else than the optimizer, or the save is of several
        `.metadata` files.
    """
    listing, family = opened.place.listing, family_of(opened.place.listing)
    if family not in (dcp.FAMILY, megatron_core.FAMILY):
        return None
    if {*asked.own.drop} - {"optimizer"} or ".metadata" not in listing.files:
        raise UnsupportedError(
            "slim leaves the optimizer out of such saves, and nothing else", file=listing.directory,
            found=f"{family.name}, --drop {' '.join(asked.own.drop)}" if ".metadata" in listing.files else "no .metadata",
            expected="--drop optimizer, of a save with one .metadata: there are no module weights beside masters, and no "
            "record of what is frozen", remedy="Write the weights alone: zckpt to-dcp, with --exclude-frozen or --exclude.",
        )  # fmt: skip
    metadata = read_metadata(listing)
    nbytes = sum(file.size() for file in listing.files.values())
    is_megatron = family is megatron_core.FAMILY
    owned = frozenset[str]()
    if "optimizer" in asked.own.drop:
        if is_megatron and (buckets := sorted_items(metadata).buckets):
            raise UnsupportedError(
                "the fp32 weights would be lost with the optimizer, because its items do not name parameters",
                file=listing.directory, found=f"{count(len(buckets), 'item')} such as {examples(buckets)}",
                expected="states by name, as --dist-ckpt-optim-fully-reshardable writes them",
                remedy="Keep the save whole, or write the model's own weights alone: zckpt to-dcp.",
            )  # fmt: skip
        owned = moments_of(metadata) if is_megatron else of_optimizers(metadata)
    dropped = nbytes_of(metadata, owned)
    home, beside = "", optimizer_beside(listing.directory)
    if beside is not None and opened.place.home != listing.directory:
        home = f"{listing.directory.name}/"
        if "optimizer" in asked.own.drop and beside.is_dir():
            dropped += (more := sum(file.size() for file in list_files(beside, "").files.values()))
            nbytes += more
    if is_megatron and OF_MEGATRON.fullmatch(listing.directory.absolute().name):
        home = f"{listing.directory.absolute().name}/"
    left_out = [name for name in listing.files if not is_copied(opened.place, name)]
    plan = without(listing, metadata, owned, home)
    if is_megatron:
        written = {file.path for file, _ in plan.files}
        named = (n for n in listing.files if not n.endswith(".distcp") and n != ".metadata" and home + n not in written)
        copies = (plan_copy(home + n, listing.files[n].store()) for n in named if n not in left_out)
        plan = Plan.of([plan, *copies])
    if home and is_megatron:
        plan = plan.with_files(literal_file(TRACKER, read_tracker(listing.directory.absolute().name).encode()))
    return FewerItems(plan, {"optimizer": dropped} if dropped else {}, nbytes, left_out)

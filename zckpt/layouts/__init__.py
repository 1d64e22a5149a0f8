"""What a family of files means: the list of layouts, and the choice among them.

A layout is a module with `match(listing)`, which says None or why not, and `read(listing)`, which gives a catalog.
"""

from __future__ import annotations

from typing import Protocol

from zckpt.base.errors import NotACheckpointError, UnsupportedError, UsageError
from zckpt.core.catalog import Catalog
from zckpt.layouts.dcp import read as dcp
from zckpt.layouts.moe import read as moe
from zckpt.layouts.parallel import read as model_parallel
from zckpt.layouts.plain import read as huggingface
from zckpt.layouts.run import agreement, usage
from zckpt.layouts.run.training import Training
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.universal import read as universal
from zckpt.layouts.zero import unsharded, unsharded_training, zero3, zero12


class Layout(Protocol):
    """What a module of this package offers."""

    def match(self, listing: Listing) -> str | None:
        """None when it reads these files; otherwise why not."""

    def read(self, listing: Listing, *, allow_unknown: bool = False) -> Catalog:
        """The catalog of these files."""


class TrainingLayout(Layout, Protocol):
    """A layout whose saves hold what a run needs to go on."""

    def read_training(self, listing: Listing, *, allow_unknown: bool = False) -> Training:
        """What is there beside the weights."""


LAYOUTS: dict[str, Layout] = {
    "universal": universal,
    "mixture of experts": moe,
    "model parallel": model_parallel,
    "ZeRO-3": zero3,
    "ZeRO-1/2": zero12,
    "DeepSpeed without ZeRO": unsharded,
    "torch.distributed.checkpoint": dcp,
    "plain weights": huggingface,
}


WITH_TRAINING: dict[str, TrainingLayout] = {
    "universal": universal,
    "mixture of experts": moe,
    "model parallel": model_parallel,
    "ZeRO-3": zero3,
    "ZeRO-1/2": zero12,
    "DeepSpeed without ZeRO": unsharded_training,
    "torch.distributed.checkpoint": dcp,
}


def read(listing: Listing, *, allow_unknown: bool = False) -> Catalog:
    """The catalog of a save, by the first layout that knows its files.

    Raises:
        NotACheckpointError: none does; lists each layout's refusal.
        InconsistentError: elements of master weights are used by no tensor, or by two.
        UsageError: a key is asked for of a layout that has no keys.
    """
    name = _detect(listing)
    if listing.wishes.key and LAYOUTS[name] is not dcp:
        raise UsageError(
            "a key of a checkpoint that has none", file=listing.directory, found=f"{name}, --key {listing.wishes.key}",
            remedy="Leave --key out: only saves of torch.distributed.checkpoint hold several state dicts.",
        )  # fmt: skip
    catalog = LAYOUTS[name].read(listing, allow_unknown=allow_unknown)
    usage.check_masters(listing, catalog.claims)
    catalog.claims.forget()
    return catalog


def read_training(listing: Listing, *, allow_unknown: bool = False) -> Training:
    """What a run needs beside the weights of a save.

    Raises:
        UnsupportedError: this kind of save does not hold it, or zckpt does not read it.
        InconsistentError: its files are not of one run.
    """
    name = _detect(listing)
    if name not in WITH_TRAINING:
        raise UnsupportedError(
            "a checkpoint without optimizer states that zckpt could read",
            file=listing.directory,
            found=name,
            expected=f"{', '.join(WITH_TRAINING)} have them",
        )
    agreement.check(listing)
    training = WITH_TRAINING[name].read_training(listing, allow_unknown=allow_unknown)
    usage.check_states(listing, training.claims)
    training.claims.forget()
    return training


def _detect(listing: Listing) -> str:
    """The first layout that knows the files."""
    refusals: list[str] = []
    for name, layout in LAYOUTS.items():
        refusal = layout.match(listing)
        if refusal is None:
            return name
        refusals.append(f"{name}: {refusal}")
    raise NotACheckpointError(
        "nothing that zckpt can read",
        file=listing.directory,
        found="; ".join(refusals),
        remedy="Give the directory that holds 'latest', a tag directory such as global_step500, or a weights file.",
    )

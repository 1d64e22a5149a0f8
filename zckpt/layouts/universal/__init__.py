"""DeepSpeed's universal checkpoints, read and written."""

from dataclasses import replace

from zckpt.layouts import zero
from zckpt.layouts.save.family import later
from zckpt.layouts.save.listing import UNIVERSAL, Listing

HOME = f"{UNIVERSAL}/"
MASTER = "fp32"


def match(listing: Listing) -> str | None:
    """None when this layout reads the files; otherwise why not."""
    if any(name.startswith(HOME) and name.endswith(f"/{MASTER}.pt") for name in listing.files):
        return None
    return f"no {HOME}<parameter>/{MASTER}.pt"


def is_state(name: str) -> bool:
    """Whether a file holds a state of one parameter, or its step: all in its directory but the fp32 weights."""
    directory, _, file = name.removeprefix(HOME).rpartition("/")
    return name.startswith(HOME) and bool(directory) and file.endswith(".pt") and file != f"{MASTER}.pt"


FAMILY = replace(
    zero.FAMILY,
    name="universal",
    match=match,
    read=later("universal.read", "read"),
    second=later("universal.second", "find_again"),
    read_training=later("universal.read", "read_training"),
    directory=UNIVERSAL,
    keeps_model_files=True,
    every_rank=False,  # its model files are copies of those of the run that it was made from, whatever its ranks were
)

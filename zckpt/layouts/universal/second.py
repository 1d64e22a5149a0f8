"""Finds each parameter of a universal checkpoint a second time: it is in files of its own, in a directory of its name.

`zero/<parameter>/fp32.pt` and a file for each state hold it whole: as `param` in a mapping, or from stage 3 as a bare vector,
with its shape in the model files. Buffers and frozen parameters are in these.
Source: DeepSpeed 0.19.8, checkpoint/ds_to_universal.py, checkpoint/universal_checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from zckpt.containers import TensorRef
from zckpt.layouts.parallel.second import ranks_of
from zckpt.layouts.save.listing import UNIVERSAL, Listing
from zckpt.layouts.save.second import HeldRun, SecondLook, Shape, hold_whole
from zckpt.layouts.zero.second import hold_all, tensors_of

_MASTER, _OTHERS = "fp32", ("step", "optimizer_state")


def find_again(listing: Listing) -> SecondLook:
    """The model's tensors and the optimizer's states."""
    names: dict[str, Shape | None] = {}
    runs: list[HeldRun] = []
    for file in listing.files:
        home, _, last = file.rpartition("/")
        state = last.removesuffix(".pt")
        if not home.startswith(f"{UNIVERSAL}/") or state == last or state in _OTHERS:
            continue
        root = listing.open(file).root
        ref = root.get("param") if isinstance(root, Mapping) else root
        if not isinstance(ref, TensorRef):
            raise TypeError(f"no tensor in {file!r}")
        name = home.removeprefix(f"{UNIVERSAL}/")
        names[name] = ref.shape if isinstance(root, Mapping) else None
        runs += hold_whole(name, "" if state == _MASTER else state, ref)
    ranks = ranks_of(listing)
    rest = tensors_of(listing, min(ranks))
    sliced = {name for name, shape in names.items() if len(ranks) > 1 and rest.shapes.get(name) != shape}
    names = {**rest.shapes, **{name: shape for name, shape in names.items() if shape or name not in rest.shapes}}
    loose = rest.loose if len(ranks) == 1 else {}
    return SecondLook(names, [*runs, *(run for run in hold_all(rest) if run.tensor not in sliced)], loose=loose)

"""Saves what only one rank has in its own file: gradients of the micro batches since the last step, and its buffers.

For saving and loading. DeepSpeed's files have no place for either, and its loader does not look at this one. A rank writes it
only if it has something: a save after a step, of a model with buffers that are equal on all ranks, has no such file.
[Note: buffers of ranks] A buffer that the forward changes (BatchNorm's) differs from rank to rank. Files of stage 3 hold every
rank's; of the other stages, and of groups of ranks that write nothing (MiCS), they hold rank 0's. A rank with buffers that
differ from rank 0's, by a digest, then writes them here.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from zckpt.base.errors import InconsistentError
from zckpt.containers import TensorRef
from zckpt.core.plan import Plan
from zckpt.layouts.save.listing import Listing, rank_file
from zckpt.layouts.zero.torch_files import TorchFile
from zckpt.live.plain_values import mapping, to_inert
from zckpt.runtime.saves.run_state import RunState
from zckpt.runtime.sharding import gradients
from zckpt.runtime.training_run import TrainingRun

MOMENT = ("global_steps", "micro_steps")
"""Counters that distinguish the saves of a run."""


RankStates = tuple[Mapping[str, TensorRef], "Mapping[str, Mapping[str, TensorRef]] | None"]
"""Of a rank's file, with elements that are still in it: buffers by name, if they differ from rank 0's; and the gradients of the
micro batches since the last step, from `gradients.take_gradients`, None if not of a run in this shape.
"""


def digest_of(buffers: Mapping[str, torch.Tensor]) -> str:
    """A digest that is equal on two ranks if their buffers are equal bit by bit."""
    digest = hashlib.blake2b(digest_size=16)
    for name, buffer in buffers.items():
        data = buffer.detach().cpu().contiguous()
        digest.update(f"{name} {data.dtype} {tuple(data.shape)}".encode())
        size = data.numel() * data.element_size()
        if size:
            digest.update((ctypes.c_char * size).from_address(data.data_ptr()))
    return digest.hexdigest()


def lay_out(state: RunState, place: str, *, copied: bool) -> Plan | None:
    """A rank's file, in a directory of the name `place`; None if it has nothing of its own. `copied` as for `to_inert`."""
    run = state.run
    has_model_file = run.settings.zero.stage == 3 and run.global_rank < run.sharded.size
    has_buffers = run.global_rank in state.differing and not has_model_file
    between = bool(state.gradients) or state.counters["pending_micro_steps"] > 0
    if not has_buffers and not between:
        return None
    root: dict[str, Any] = {
        "zckpt": {"version": 1, "moment": {key: state.counters[key] for key in MOMENT}, "shape": _shape(run)},
        "global_steps": state.counters["global_steps"],
        "dp_world_size": run.world_size,
    }
    if has_buffers:
        root["buffers"] = to_inert(state.buffers, "buffers", copied=copied)
    if between:
        root["gradients"] = to_inert(state.gradients, "gradients", copied=copied)
    file = TorchFile(f"{place}/{rank_file(run.global_rank)}")
    return file.finish(file.adopt(root))


def read(run: TrainingRun, listing: Listing, moment: Mapping[str, Any], called: Mapping[str, str]) -> RankStates:
    """What the file of this rank has, in a listing of the save as this rank sees it; nothing if there is none. `moment` is what
    the other files say of `global_steps` and `micro_steps` when it was saved; `called`: for each name of the checkpoint, what the
    model calls it. Raises InconsistentError if it is of another save.
    """
    name = rank_file(run.global_rank)
    if name not in listing.files:
        return {}, None
    root = mapping(listing.open(name).root)
    own = mapping(root.get("zckpt"))
    if own.get("moment") != dict(moment):
        raise InconsistentError(
            "belongs to another save than the other files", file=listing.files[name].path,
            found=_count_text(mapping(own.get("moment"))), expected=f"{_count_text(moment)}, as in the other files",
            remedy="Copy all files of one save into this directory, or remove this file; an unfinished step then begins again.",
        )  # fmt: skip
    if root.get("dp_world_size") != run.world_size:
        return {}, None
    found: dict[str, dict[str, Any]] | None = None
    if "gradients" in root:
        found = {
            str(kind): {called.get(name, name): grad for name, grad in mapping(grads).items()}
            for kind, grads in mapping(root["gradients"]).items()
        }
        if own.get("shape") != _shape(run) or not gradients.fits(run.module, run.sharded.parameters, found):
            found = None
    buffers = {called.get(str(name), str(name)): ref for name, ref in mapping(root.get("buffers")).items()}
    return buffers, found


def _count_text(moment: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {moment.get(name)}" for name in MOMENT)


def _shape(run: TrainingRun) -> list[Any]:
    """The facts that a run which restores gradients must share with the run that made them."""
    settings = run.settings
    return [settings.zero.stage, run.world_size, run.sharded.size, settings.config.precision, run.batch.accumulation]

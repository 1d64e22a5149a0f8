"""What one rank alone has, in a file of its own: gradients of the micro batches since the last step, and its buffers.

For saving and loading. DeepSpeed's files have no place for either, and its loader does not look at this one. A rank writes it
only where it has something: a save after a step, of a model whose buffers are equal on all ranks, has no such file.
[Note: buffers of ranks] A buffer that the forward changes (BatchNorm's) differs from rank to rank. Files of stage 3 hold every
rank's; of the other stages, and of groups of ranks that write nothing (MiCS), they hold rank 0's. A rank whose buffers are
others than rank 0's, as a digest says, then writes them here.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zckpt.base.errors import InconsistentError
from zckpt.containers import TensorRef
from zckpt.layouts.save.listing import Listing, rank_file
from zckpt.layouts.zero.torch_files import Laid, TorchFile
from zckpt.runtime import gradients
from zckpt.runtime.engine import Engine
from zckpt.runtime.inert import to_inert
from zckpt.runtime.state import RunState

MOMENT = ("global_steps", "micro_steps")
"""Counters that tell the saves of a run apart."""


@dataclass(frozen=True, slots=True)
class RankStates:
    """What a rank's file holds; its elements are still in the file.

    Attributes:
        buffers: by name, where they are others than rank 0's.
        gradients: of the micro batches since the last step, as `gradients.taken` gave them; None where they are not of a run
            in this shape.
    """

    buffers: Mapping[str, TensorRef]
    gradients: Mapping[str, Mapping[str, TensorRef]] | None


def digest_of(buffers: Mapping[str, torch.Tensor]) -> str:
    """Equal on two ranks whose buffers are equal bit by bit."""
    digest = hashlib.blake2b(digest_size=16)
    for name, buffer in buffers.items():
        data = buffer.detach().cpu().contiguous()
        digest.update(f"{name} {data.dtype} {tuple(data.shape)}".encode())
        size = data.numel() * data.element_size()
        if size:
            digest.update((ctypes.c_char * size).from_address(data.data_ptr()))
    return digest.hexdigest()


def lay_out(state: RunState, place: str) -> Laid | None:
    """A rank's file, in a directory of the name `place`; None where it has nothing of its own."""
    has_model_file = state.stage == 3 and state.rank < state.shard_size
    has_buffers = state.rank in state.differing and not has_model_file
    between = bool(state.gradients) or state.counters["pending_micro_steps"] > 0
    if not has_buffers and not between:
        return None
    root: dict[str, Any] = {
        "zckpt": {"version": 1, "moment": {key: state.counters[key] for key in MOMENT}, "shape": _shape(state)},
        "global_steps": state.counters["global_steps"],
        "dp_world_size": state.world_size,
    }
    if has_buffers:
        root["buffers"] = to_inert(state.buffers, "buffers")
    if between:
        root["gradients"] = to_inert(state.gradients, "gradients")
    file = TorchFile(f"{place}/{rank_file(state.rank)}")
    made, pairs = file.finish(file.adopt(root))
    return Laid((made,), tuple(pairs))


def _shape(state: RunState) -> list[Any]:
    """What a run that takes up gradients must have in common with the one that made them."""
    return [state.stage, state.world_size, state.shard_size, state.precision, state.accumulation]


def _shape_of(engine: Engine) -> list[Any]:
    mesh, config = engine.sharded.mesh, engine.settings.config
    sizes = [engine.zero_optimization_stage(), engine.world_size, mesh["shard"].size()]
    return [*sizes, config.precision, engine.gradient_accumulation_steps()]


def read(
    engine: Engine, listing: Listing, moment: Mapping[str, object], called: Mapping[str, str]
) -> RankStates | None:
    """The file of this rank, where there is one.

    Args:
        engine: the run.
        listing: the save as this rank sees it.
        moment: `global_steps` and `micro_steps` when it was saved, as the other files say.
        called: for each name of the checkpoint, what the model calls it.

    Raises:
        InconsistentError: it is of another save.
    """
    name = rank_file(engine.global_rank)
    if name not in listing.files:
        return None
    root = _mapping(listing.open(name).root)
    own = _mapping(root.get("zckpt"))
    if own.get("moment") != dict(moment):
        raise InconsistentError(
            "a rank's file of another save",
            file=listing.files[name],
            found=f"{own.get('moment')}",
            expected=f"{dict(moment)} in the other files",
            remedy="Copy the files of one save.",
        )
    if root.get("dp_world_size") != engine.world_size:
        return None
    found: dict[str, dict[str, Any]] | None = None
    if "gradients" in root:
        found = {
            str(kind): {called.get(name, name): grad for name, grad in _mapping(grads).items()}
            for kind, grads in _mapping(root["gradients"]).items()
        }
        if own.get("shape") != _shape_of(engine) or not gradients.fits(engine.module, engine.sharded.held, found):
            found = None
    buffers = {called.get(str(name), str(name)): ref for name, ref in _mapping(root.get("buffers")).items()}
    return RankStates(buffers, found)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}

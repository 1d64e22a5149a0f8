"""The directories of Lightning's, Composer's and transformers' runs: which entry of them is the newest save, or the one wanted.

For `places`. [Note: what they write] Lightning: `lightning_logs/version_3/checkpoints/epoch=0-step=100.ckpt`, where a save is a
file (a state dict under `state_dict`), a directory of torch.distributed.checkpoint with `meta.pt`, or a directory that DeepSpeed
wrote with the tag `checkpoint`; `last.ckpt` is the newest one again, or a link to it, and `last-v1.ckpt` that of a later run.
Composer: `ep0-ba100-rank0.pt`, or a directory `ep0-ba100/` of torch.distributed.checkpoint; `latest-rank0.pt` is a link to the
newest. Either has the model at `state.model`.
Source: lightning 2.6, pytorch/callbacks/model_checkpoint.py, pytorch/strategies/{fsdp,model_parallel,deepspeed}.py; composer
0.32, callbacks/checkpoint_saver.py, utils/checkpoint.py `_save_checkpoint`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from zckpt.base.patterns import compile_late
from zckpt.storage.location import Location

FOLDER = compile_late(r"checkpoint-\d+")
"""Folders of transformers' Trainer; with DeepSpeed, `checkpoint-2` holds the tag `global_step2`."""

FSDP_MODEL = compile_late(r"pytorch_model_fsdp_(?P<number>\d+)")
"""Directories of models that accelerate's `save_state` leaves of an FSDP run; see `accelerate`."""

STEP = compile_late(r"(?:(?:global_step|iter|step)[_-]?)?0*(?P<number>\d+)|release")
"""Directories of a run's steps, of verl and Megatron."""

ROLES = ("actor", "critic", "ref", "model", "weights", "dist_ckpt", "params", "default", "items", "state")
"""The directories, in a step of a run, that hold one of its models: verl has the first three, Orbax's managers the last four,
others only one."""

UNFINISHED = ".orbax-checkpoint-tmp"
"""In the name of a directory that Orbax is still writing, or has left behind."""

INNER = "dist_ckpt"
"""The directory within one of `ROLES` that holds the save, as in verl's saves that Megatron-Core wrote."""

_OTHER_STATE = compile_late(
    r"optim|opt_state|\.orbax-checkpoint-tmp|sched|rng|random|loader|tokenizer|dataset|logs?$|wandb|runs$|tensorboard",
    re.IGNORECASE,
)

_LAST = compile_late(r"last(?:-v(?P<number>\d+))?\.ckpt")
_COMPOSER = compile_late(r"ep(?P<epoch>\d+)-ba(?P<number>\d+)-rank0\.pt")
_LATEST = "latest-rank0.pt"
_STEP = compile_late(r"step=(?P<number>\d+)")
_VERSION = compile_late(r"version_(?P<number>\d+)")


def folder_of(names: Sequence[str]) -> str:
    """The directory of a Lightning run to search next, among entries of these names; empty if there is none."""
    shown = [name for name in names if not name.startswith(".")]
    versions = [name for name in shown if _VERSION.fullmatch(name)]
    if "lightning_logs" in shown:
        return "lightning_logs"
    if versions and len(versions) == len(shown):
        return max(versions, key=lambda name: _number(_VERSION, name))
    is_version = "checkpoints" in shown and (len(shown) == 1 or {"hparams.yaml", "metrics.csv"} & {*shown})
    return "checkpoints" if is_version else ""


def folder_with(path: Location, folders: Sequence[str], tag: str) -> tuple[str, str | None] | None:
    """The folder of transformers' Trainer that a tag means, and the tag in it: the folder's name, a tag in one, or both.

    Args:
        path: the directory of the folders.
        folders: their names, the oldest first.
        tag: `checkpoint-2`, `global_step2` or `checkpoint-2/global_step2`.
    """
    folder, _, inner = tag.partition("/")
    if folder in folders:
        return folder, inner or None
    if "/" in tag or "\\" in tag or tag in ("", ".", ".."):
        return None
    return next(((name, tag) for name in reversed(folders) if (path / name / tag).is_dir()), None)


def saves_of(names: Sequence[str]) -> list[str]:
    """The entries that are saves of Lightning, or whole models of Composer."""
    return [name for name in names if name.endswith(".ckpt") or name == _LATEST or _COMPOSER.fullmatch(name)]


def may_hold_model(name: str) -> bool:
    """Whether a directory of a run may hold a model, by its name: not an optimizer's, a tokenizer's or a log's."""
    return not name.startswith(".") and not _OTHER_STATE.search(name)


def newest_of(saves: Sequence[str]) -> str:
    """The newest of several saves: the one that the trainer calls the last, or with the greatest step; empty if no name
    says it.
    """
    if _LATEST in saves:
        return _LATEST
    if last := [name for name in saves if _LAST.fullmatch(name)]:
        return max(last, key=lambda name: _number(_LAST, name))
    if len(saves) == 1:
        return saves[0]
    for pattern in (_STEP, _COMPOSER):
        steps = {_number(pattern, name): name for name in saves}
        if len(steps) == len(saves) and -1 not in steps:
            return steps[max(steps)]
    return ""


def _number(pattern: re.Pattern[str], name: str) -> int:
    """The number in a name; -1 if it has none, but 0 for `last.ckpt`."""
    match = pattern.search(name)
    return -1 if match is None else int(match["number"] or 0)

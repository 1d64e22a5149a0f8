"""The directories of Lightning's, Composer's and transformers' runs: which entry is the newest save, the one wanted, or the best.

For `places`. [Note: what they write] Lightning: `lightning_logs/version_3/checkpoints/epoch=0-step=100.ckpt`, where a save is a
file (a state dict under `state_dict`), a directory of torch.distributed.checkpoint with `meta.pt`, or a directory that DeepSpeed
wrote with the tag `checkpoint`; `last.ckpt` is the newest one again, or a link to it, and `last-v1.ckpt` that of a later run.
Composer: `ep0-ba100-rank0.pt`, or a directory `ep0-ba100/` of torch.distributed.checkpoint; `latest-rank0.pt` is a link to the
newest. Either has the model at `state.model`.
[Note: the best] transformers records in the `trainer_state.json` of each `checkpoint-N` and, after training, of the output
directory which save is the best, by its own evaluations. The path in it is of the machine that trained: its last part counts.
Source: transformers trainer_callback.py `TrainerState.best_model_checkpoint`; lightning 2.6,
pytorch/callbacks/model_checkpoint.py, pytorch/strategies/{fsdp,model_parallel,deepspeed}.py; accelerate 1.15, utils/fsdp_utils.py
`save_fsdp_model`, `save_fsdp_optimizer`; composer 0.32, callbacks/checkpoint_saver.py, utils/checkpoint.py `_save_checkpoint`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from zckpt.base.errors import ZckptError
from zckpt.base.patterns import compile_late
from zckpt.layouts.save.folder import Folder
from zckpt.storage.json_files import read_json
from zckpt.storage.location import Location

FOLDER = compile_late(r"checkpoint-\d+")
"""Folders of transformers' Trainer; with DeepSpeed, `checkpoint-2` holds the tag `global_step2`."""

FSDP_MODEL = compile_late(r"pytorch_model_fsdp_(?P<number>\d+)")
"""Directories of models that accelerate's `save_state` leaves of an FSDP run."""

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


STATE = "trainer_state.json"
_MOST_BYTES = 64 << 20


def name_best(folder: Folder) -> str | None:
    """The name of the best save's folder, for a note; None where nothing says it, or what says it cannot be read."""
    try:
        return best_in(folder)
    except ZckptError:
        return None


def best_in(folder: Folder) -> str | None:
    """The name of the best save's folder, by the run's newest record; None where there is no record, or none that says it."""
    inner = (folder.inside(name) for name in reversed(folder.directories(FOLDER)))
    home = next((home for home in (folder, *inner) if home is not None and home.has_file(STATE)), None)
    if home is None:
        return None
    said = read_json(home.path / STATE, _MOST_BYTES, "a trainer's state")
    best = said.get("best_model_checkpoint") if isinstance(said, dict) else None
    name = re.split(r"[/\\]", best.rstrip("/\\"))[-1] if isinstance(best, str) else ""
    return name if FOLDER.fullmatch(name) else None


FSDP_PARTS = compile_late(r"(?:pytorch_model_fsdp|optimizer|model|optim)_\d+")
"""The pattern of directories of a model or an optimizer, which are parts of a save."""

FIRST_MODEL = "pytorch_model_fsdp_0"
FIRST_OPTIMIZER = "optimizer_0"

_OF_ADAMW: dict[str, object] = {
    "amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None,
    "decoupled_weight_decay": True,
}  # fmt: skip
"""Settings of torch's AdamW that DeepSpeed's Adam has not, as `torch.optim.AdamW(params)` has them."""


def complete_settings(settings: Mapping[str, object], states: Collection[str]) -> dict[str, object]:
    """A group's settings with all those that accelerate requires; DeepSpeed's Adam has fewer."""
    if {"exp_avg", "exp_avg_sq"} <= {*states} and "lr" in settings:
        return {**_OF_ADAMW, "initial_lr": settings["lr"], **settings}
    return dict(settings)


def optimizer_beside(model: Location) -> Location | None:
    """The optimizer's directory beside a model's; None for directories of other names."""
    match = FSDP_MODEL.fullmatch(model.name)
    return None if match is None else model.absolute().parent / f"optimizer_{match['number']}"

"""Finds the items of a torch.distributed.checkpoint save that are a model's weights, and an optimizer's states.

For `dcp`. A save is one state dict, nested as its writer liked: `{"model": .., "optim": ..}`, `{"app": {"model": ..}}`, the
weights on top with `optimizer` beside them (torchtitan), or nothing but weights. Pure functions on `Metadata`.

[Note: the forms of an optimizer] `get_state_dict` gives `state` (parameter -> state -> tensor) and `param_groups` (a list of
settings with `params`); flattened, the names are joined: `state.<parameter>.<state>`, `param_groups.<parameter>.<setting>`.
Dotted, both look alike but for `param_groups`. An optimizer is where `param_groups` is.
Source: torch/distributed/checkpoint/state_dict.py `_flatten_optim_state_dict`, `_nested_dict.py` (2.1 - 2.13).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import NotACheckpointError, UsageError
from zckpt.base.words import count, examples
from zckpt.layouts.dcp.metadata import BytesItem, Metadata, Path, TensorItem
from zckpt.layouts.save.module_states import Shape, models_among, several_models

MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
"""What writers call the model: torch's own examples and accelerate, DistributedDataParallel users, older trainers, Lightning."""


@dataclass(frozen=True, slots=True)
class DcpModel:
    """The weights that were chosen.

    Attributes:
        key: the dotted key of the state dict they are in; empty for the top.
        items: name in the model -> tensor.
        notes: sentences on what was chosen and left out.
    """

    key: str
    items: dict[str, TensorItem]
    notes: tuple[str, ...]


@dataclass(slots=True)
class DcpOptimizer:
    """An optimizer's items.

    Attributes:
        key: the dotted key it is under; empty for the top.
        states: (path after `state`, item): parameter, state, or both joined.
        settings: (path after `param_groups`, item).
    """

    key: str
    states: list[tuple[Path, TensorItem | BytesItem]] = field(default_factory=list[tuple[Path, TensorItem | BytesItem]])
    settings: list[tuple[Path, TensorItem | BytesItem]] = field(
        default_factory=list[tuple[Path, TensorItem | BytesItem]]
    )


def join_path(path: Iterable[str | int]) -> str:
    """A path with dots, as torch writes it."""
    return ".".join(map(str, path))


def paths_of(metadata: Metadata) -> dict[str, Path]:
    """Name -> path. Where no paths are recorded, names are split at the dots before a part that torch names."""
    if metadata.nested:
        return {name: item.path for name, item in metadata.items.items()}
    heads = {name.split("param_groups")[0].rstrip(".") for name in metadata.items if _is_part(name, "param_groups")}
    paths: dict[str, Path] = {}
    for name in metadata.items:
        head = next((head for head in heads if head and name.startswith(head + ".")), "")
        first = name.partition(".")[0]
        if head:
            paths[name] = (head, name[len(head) + 1 :])
        elif any(heads) and first in MODEL_KEYS and first != name:
            paths[name] = (first, name[len(first) + 1 :])
        else:
            paths[name] = (name,)
    return paths


def _is_part(name: str, part: str) -> bool:
    return f".{part}." in f".{name}."


def optimizers_of(metadata: Metadata) -> dict[str, DcpOptimizer]:
    """The optimizers of a save by their keys, in its order."""
    paths = paths_of(metadata)
    homes: dict[Path, DcpOptimizer] = {}
    for path in paths.values():
        at = next(_parts_at(path, "param_groups"), None)
        if at is not None:
            homes.setdefault(path[:at], DcpOptimizer(join_path(path[:at])))
    for name, path in paths.items() if homes else ():
        for part in ("state", "param_groups"):
            at = next((at for at in _parts_at(path, part) if path[:at] in homes), None)
            if at is None:
                continue
            head = str(path[at])
            rest = (*((head[len(part) + 1 :],) if head != part else ()), *path[at + 1 :])
            optimizer = homes[path[:at]]
            (optimizer.states if part == "state" else optimizer.settings).append((rest, metadata.items[name]))
            break
    return {optimizer.key: optimizer for optimizer in homes.values()}


def _parts_at(path: Path, part: str) -> Iterator[int]:
    """The indices in a path of this key, or of one that begins with it and a dot. Composer puts everything under a key
    `state`.
    """
    return (at for at, key in enumerate(path) if key == part or (type(key) is str and key.startswith(part + ".")))


def model_of(metadata: Metadata, key: str, optimizers: Mapping[str, DcpOptimizer]) -> DcpModel:
    """The weights: those under `key`, or, if it is empty, those under a key that names a model; `optimizers`: of the save. Raises
    UsageError if there is nothing under `key`, or there are several models, and no key; NotACheckpointError if there are no
    weights.
    """
    owned = {item.name for o in optimizers.values() for _, item in (*o.states, *o.settings)}
    paths = paths_of(metadata)
    tensors = {n: i for n, i in metadata.items.items() if isinstance(i, TensorItem) and n not in owned}
    if not tensors:
        raise NotACheckpointError(
            "holds no weights",
            file=metadata.file,
            found=f"{len(owned):,} items of an optimizer" if owned else f"{len(metadata.items):,} items, no tensor",
            expected="the tensors of a model",
            remedy="Give the directory that has them; it may be beside this one, such as pytorch_model_fsdp_0.",
        )
    if key:
        chosen = {
            join_path(paths[n])[len(key) + 1 :]: i
            for n, i in tensors.items()
            if join_path(paths[n]).startswith(key + ".")
        }
        if not chosen:
            raise UsageError(
                "the checkpoint does not have this key", file=metadata.file, found=f"--key {key}",
                expected=f"one of {examples(dict.fromkeys(map(_section, (paths[n] for n in tensors))), 6)}",
                remedy="Pass one of these with --key.",
            )  # fmt: skip
        return DcpModel(key, chosen, ())
    paths = {name: paths[name] for name in tensors}
    if models := _alike(paths, tensors):
        raise several_models(metadata.file, models)
    section, alone = _choose(paths, tensors)
    chosen = {join_path(path[len(section) :]): tensors[name] for name, path in paths.items()
              if path[: len(section)] == section and not (alone and len(path) > 1)}  # fmt: skip
    taken = {item.name for item in chosen.values()}
    left: dict[str, list[str]] = {}
    for name in (name for name in tensors if name not in taken):
        left.setdefault(_section(paths[name]), []).append(name)
    several = not section and not alone and any(len(paths[name]) > 1 for name in tensors)
    return DcpModel(join_path(section), chosen, tuple(_notes(section, left, several)))


def _section(path: Path) -> str:
    """The key that a tensor is under; empty for one on top."""
    return join_path(path[:1]) if len(path) > 1 else ""


def _alike(paths: Mapping[str, Path], tensors: Mapping[str, TensorItem]) -> list[str]:
    """The keys of several models where none is called the model: sections with one name in different places, or with
    the same tensors.
    """
    named = _named_sections(paths)
    first = [key for key in named if _preference(key)[:2] == _preference(named[0])[:2]]
    if len(first) > 1:
        return [join_path(key) for key in first]
    if named or any(len(path) == 1 for path in paths.values()):
        return []
    shapes: dict[str, dict[str, Shape]] = {}
    for name, path in paths.items():
        if len(path) > 1:
            shapes.setdefault(join_path(path[:1]), {})[join_path(path[1:])] = tuple(tensors[name].size)
    return models_among(shapes)


def _named_sections(paths: Mapping[str, Path]) -> list[Path]:
    """The sections with a name of `MODEL_KEYS`, the one first that is preferred."""
    named = {
        path[: at + 1]
        for path in paths.values()
        for at, key in enumerate(path[:2])
        if key in MODEL_KEYS and at + 1 < len(path)
    }
    return sorted(named, key=_preference)


def _preference(section: Path) -> tuple[int, int, str]:
    return len(section), MODEL_KEYS.index(str(section[-1])), join_path(section)


def _choose(paths: Mapping[str, Path], tensors: Mapping[str, TensorItem]) -> tuple[Path, bool]:
    """The section that holds the model, and whether only its top level is meant.

    That is the one with a name of `MODEL_KEYS`; or the top, if it has most of the elements; or the only one. If there are
    several and none has such a name, all are taken.
    """
    if named := _named_sections(paths):
        return named[0], False
    sections = {path[:1] for path in paths.values() if len(path) > 1}
    if len(sections) == 1 and all(len(path) > 1 for path in paths.values()):
        return sections.pop(), False
    on_top = sum(math.prod(tensors[name].size) for name, path in paths.items() if len(path) == 1)
    everywhere = sum(math.prod(tensors[name].size) for name in paths)
    return (), bool(sections) and 2 * on_top > everywhere


def section_of(keys: Path) -> Path:
    """The section that holds the model, as in `model_of`, where all tensors of a save are under these keys."""
    named = [keys[: at + 1] for at, key in enumerate(keys[:2]) if key in MODEL_KEYS]
    return min(named, key=_preference) if named else keys[:1]


def notes_on(section: Path) -> Iterator[str]:
    """Sentences on a section that holds all tensors of a save."""
    return _notes(section, {}, several=False)


def _notes(section: Path, left: Mapping[str, Sequence[str]], several: bool) -> Iterator[str]:
    if section and (left or section != ("model",)):
        yield f"The weights under the key {join_path(section)!r} are taken."
    if several:
        yield "No key says which state dict is the model: all are taken, under their full names. --key takes one of them."
    for key, names in left.items():
        what = count(len(names), "tensor")
        if key:
            yield f"Left out: {what} under {key!r}; --key {key} takes that instead."
        else:
            yield f"Left out: {what} under no key, {examples(names)}."

"""Which tensors of a torch file are a model's weights, and what lies beside them.

For `read`. Training scripts write what they like: weights at the top or under a key, and beside them the optimizer's states,
random states and counters, which are not the model.
Source: torch 2.13, optim/optimizer.py `state_dict` (`state`, `param_groups`); ATen/CPUGeneratorImpl.cpp (a random state of the
processor is a vector of 5,056 bytes), CUDAGeneratorImpl.cpp (16 bytes).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from zckpt.base.errors import NotACheckpointError, UnsupportedError, UsageError
from zckpt.base.patterns import compile_late
from zckpt.base.words import count, examples
from zckpt.containers import Container, TensorRef, mapping_at
from zckpt.layouts.save.module_states import flatten, models_among, several_models

_USUAL = ("state_dict", "model_state_dict", "module", "model")
_COMPOSER = "integrations"
"""The key beside Composer's `state.model` for libraries with models that it wraps, such as huggingface."""
_RANDOM = compile_late(r"(?:[^.]*_)?(?:rng|random|generator|cpu|cuda|torch)(?:_[^.]*)?", re.I)
"""Keys of random states; a parameter's name has dots."""
_MANY_NOTES = 3


def model_in(container: Container, file: str, notes: list[str], wanted: str) -> dict[str, TensorRef]:
    """The tensors of a file's state dict, or of that under the key `wanted`; notes say what is left out. Raises
    NotACheckpointError if there is none, or only what a run needs beside its weights; UsageError if there are several
    models and no key, or nothing under the key.
    """
    root = _chosen_root(container.root, file, wanted, notes)
    if isinstance(root, Mapping) and not _has_tensors(root):
        inside = {key: flatten(value, []) for key, value in root.items() if isinstance(value, Mapping)}
        shapes = {key: {name: ref.shape for name, ref in state.items()} for key, state in inside.items() if state}
        if models := models_among(shapes):
            raise several_models(file, models)
    if not isinstance(root, Mapping):
        raise NotACheckpointError(
            "holds no state dict", file=file, found=type(root).__name__,
            remedy="Save the model's state_dict() with torch.save, and give that file.",
            expected="a dict of names and tensors",
        )  # fmt: skip
    others: list[str] = []
    try:
        state = flatten(root, others)
    except UnsupportedError as error:
        error.file = error.file or file
        raise
    if not state or (not wanted and all(ref.shape == () for ref in state.values())):
        raise NotACheckpointError(
            "holds no weights", file=file, found=_contents(container.root, state),
            remedy="Give the directory of the checkpoint, or the file with the model's state_dict().",
            expected="a dict of names and tensors",
        )  # fmt: skip
    for key, names in left_out_of(container.root, wanted).items():
        what = f"Left out: {count(len(names), 'tensor')} under {key!r} in the file ({examples(names, 2)})"
        notes.append(f"{what}: --key {key} gives them.")
    notes += others[:_MANY_NOTES]
    if more := len(others[_MANY_NOTES:]):
        notes.append(f"{count(more, 'more entry', 'more entries')} of this kind: left out.")
    return state


def _chosen_root(root: object, file: str, wanted: str, notes: list[str]) -> object:
    """The part of a file's content that holds the model: what is under `wanted`, or under a usual key, or all of it.

    Without `wanted`, what a run needs beside its weights is not in it.
    """
    if wanted:
        return _under(root, wanted, file)
    root = _without_training(composers_state(root).get("model", root))
    for key in _USUAL:
        if isinstance(root, Mapping) and isinstance(root.get(key), Mapping) and not _has_tensors(root):
            root = _without_training(root[key])
    while isinstance(root, Mapping):
        held = [key for key, value in root.items() if _any_tensor(value)]
        if len(held) != 1 or not _is_flat(root[held[0]]):
            break
        root = _without_training(root[held[0]])
        notes.append(f"The model is what the file has under {held[0]!r}.")
    return root


def _without_training(root: object) -> object:
    """A mapping without optimizers and random states, and without the single numbers, such as a loss, beside state dicts."""
    if not isinstance(root, Mapping):
        return root
    if is_optimizer(root):
        return {}
    has_states = any(map(_is_flat, root.values()))
    return {
        key: value
        for key, value in root.items()
        if not _is_of_training(key, value) and not (has_states and isinstance(value, TensorRef) and value.shape == ())
    }


def left_out_of(root: object, wanted: str = "") -> dict[str, list[str]]:
    """The names of tensors under each key beside the model that is read: another model, an average, or a part of it.

    Args:
        root: a file's content.
        wanted: the key that was asked for; then nothing is left out that was not meant to be.
    """
    state = _without_training(root)
    if wanted or not isinstance(state, Mapping) or composers_state(root) or _has_tensors(state):
        return {}
    chosen = next((key for key in _USUAL if isinstance(state.get(key), Mapping)), "")
    beside = {str(key): value for key, value in state.items() if key != chosen}
    found = {key: list(flatten(value, [])) for key, value in beside.items() if isinstance(value, Mapping)}
    return {key: [f"{key}.{name}" for name in names] for key, names in found.items() if names} if chosen else {}


def composers_state(root: object) -> Mapping[str, Any]:
    """The mapping that Composer keeps under `state` in a file of a whole model, which rank 0 writes; empty for other
    files.
    """
    state = root.get("state") if isinstance(root, Mapping) else None
    if isinstance(state, Mapping) and isinstance(state.get("model"), Mapping) and _COMPOSER in state:
        return state
    return {}


def composers_prefix(root: object) -> str:
    """The prefix that Composer's wrapper of a transformers model puts before all names; empty for others."""
    known = composers_state(root).get(_COMPOSER)
    return "model." if isinstance(known, Mapping) and "huggingface" in known else ""


def is_optimizer(value: object) -> bool:
    """Whether a value is the state dict of an optimizer, or holds nothing but such state dicts."""
    if not isinstance(value, Mapping):
        return False
    if isinstance(value.get("param_groups"), list) and isinstance(value.get("state"), Mapping):
        return True
    inside = [one for one in value.values() if _any_tensor(one)]
    return bool(inside) and all(is_optimizer(one) for one in inside)


def _is_of_training(key: object, value: object) -> bool:
    """Whether an entry is an optimizer's or a random state."""
    if isinstance(value, TensorRef):
        return value.dtype.name == "U8" and len(value.shape) == 1 and bool(_RANDOM.fullmatch(str(key)))
    return is_optimizer(value)


def _any_tensor(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_any_tensor, value.values()))
    return isinstance(value, TensorRef)


def _is_flat(state: object) -> bool:
    """Whether a value has the form of `state_dict()`: tensors under names with dots, not mappings of mappings."""
    if not isinstance(state, Mapping):
        return False
    tensors = [str(key) for key, value in state.items() if isinstance(value, TensorRef)]
    return any("." in name for name in tensors) and not any(isinstance(value, Mapping) for value in state.values())


def _contents(root: object, state: Mapping[str, TensorRef]) -> str:
    """The contents of a file without weights, in words."""
    if is_optimizer(root):
        return "the states of an optimizer"
    if state:
        return f"single numbers alone ({examples(state, 2)})"
    held = mapping_at(root)
    kinds = [f"{key!r}" for key, value in held.items() if _is_of_training(key, value)]
    return f"states of training alone ({examples(kinds, 3)})" if kinds else f"{len(held):,} other entries"


def _under(root: object, key: str, file: str) -> object:
    """The value under a key with dotted parts; a key may have dots itself."""
    if not isinstance(root, Mapping):
        root = {}
    if key in root:
        return root[key]
    for head in root:
        if isinstance(head, str) and key.startswith(f"{head}."):
            return _under(root[head], key[len(head) + 1 :], file)
    known = [key for key, value in root.items() if isinstance(value, Mapping)]
    raise UsageError(
        "the checkpoint does not have this key", file=file, found=f"--key {key}",
        expected=f"one of {examples(known, 6)}" if known else "a file with several state dicts",
        remedy="Pass one of these with --key." if known else "Leave --key out.",
    )  # fmt: skip


def _has_tensors(root: Mapping[str, object]) -> bool:
    return any(isinstance(value, TensorRef) for value in root.values())

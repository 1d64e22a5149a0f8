"""What a run needs beside its weights, from a save without ZeRO: it has states by number, for which names are found here.

For resharding and for the trainer. An optimizer numbers its parameters group by group and keeps no names. They are known
where the trainer wrote the file, where a run says them, where masters tell them (see `unsharded`), and where all parameters
are in a single group: then the order is the model's.
Source: DeepSpeed 0.19.8, runtime/fp16/{fused,unfused}_optimizer.py `state_dict`; torch/optim/optimizer.py `state_dict`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zckpt.base.errors import COPY_AGAIN, IncompleteError, InconsistentError, UnsupportedError
from zckpt.containers import TensorRef, mapping_at
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import F16
from zckpt.layouts.run.training import ParameterGroup, Training, new_scaler
from zckpt.layouts.run.vectors import unflatten
from zckpt.layouts.save.listing import MODEL_NAME, Listing
from zckpt.layouts.save.module_states import ModelStates, as_mapping, as_tensor, read_model_states, whole
from zckpt.layouts.zero import unsharded

Names = Sequence[Sequence[str]]


def read_training(listing: Listing, names: Names | None = None) -> Training:
    """What the run needs beside its weights.

    Args:
        listing: the files.
        names: the parameters of each group of the optimizer, in its order, if a run knows them.

    Raises:
        IncompleteError: the file holds no optimizer.
        UnsupportedError: the parameters of the states cannot be found.
    """
    return training_of(read_model_states(listing, listing.matching(MODEL_NAME)[0]), names)


def training_of(model: ModelStates, names: Names | None = None) -> Training:
    """As `read_training`, from a model file."""
    optimizer = mapping_at(model.root, "optimizer")
    inner = mapping_at(optimizer.get("optimizer_state_dict", optimizer))
    if "param_groups" not in inner:
        raise IncompleteError(
            "holds no optimizer states", file=model.file,
            remedy="Load its weights alone: load_module_only=True.",
        )  # fmt: skip
    is_flat = "fp32_groups_flat" in optimizer
    settings = [as_mapping(group, "a parameter group", model.file) for group in inner["param_groups"]]
    counts = None if is_flat else [len(group["params"]) for group in settings]  # type: ignore[arg-type]
    named = _names(model, optimizer, counts, len(settings), names)
    numbers = iter(range(1 << 62))
    groups: list[ParameterGroup] = []
    states: dict[str, dict[str, TensorEntry]] = {}
    held = inner.get("state") or {}
    for group, members in zip(settings, named, strict=True):
        own = [held.get(next(numbers)) or {} for _ in ([members] if is_flat else members)]
        first = as_mapping(own[0] if own else {}, "a state", model.file)
        per_element = tuple(n for n, value in first.items() if isinstance(value, TensorRef) and _is_of(value, n))
        shapes = [_shape(model, name) for name in members]
        if is_flat:
            states |= dict(_cut_states(model, members, shapes, first, per_element))
        else:
            for name, shape, state in zip(members, shapes, own, strict=True):
                states[name] = {
                    key: whole(name, as_tensor(value, key, model.file), "parameter", shape)
                    for key, value in as_mapping(state, "a state", model.file).items()
                    if isinstance(value, TensorRef) and _is_of(value, key)
                }
        groups.append(
            ParameterGroup(
                tuple(members),
                {key: value for key, value in group.items() if key != "params"},
                {key: value for key, value in first.items() if key not in per_element},
                per_element,
            )
        )
    trained = {name for members in named for name in members}
    precision = next((ref.dtype for name, ref in model.module.items() if name in trained))
    return Training(tuple(groups), states, _scaler(optimizer), model.rest, precision)


_ONE_NUMBER = frozenset(("step", "eta", "mu", "mu_product"))


def _is_of(value: TensorRef, name: str) -> bool:
    """Whether a state has a number for each element."""
    return name not in _ONE_NUMBER or bool(value.shape)


def _shape(model: ModelStates, name: str) -> tuple[int, ...]:
    if name not in model.module:
        raise InconsistentError(
            f"the parameter {name!r} is missing", file=model.file,
            remedy=COPY_AGAIN,
            found="its optimizer states",
        )  # fmt: skip
    return model.module[name].shape


def _names(
    model: ModelStates, optimizer: Mapping[str, Any], counts: Sequence[int] | None, groups: int, given: Names | None
) -> list[list[str]]:
    """The names of the parameters in each group. Raises UnsupportedError if they cannot be found."""
    own = model.root.get("zckpt")
    candidates: list[Names] = []
    if isinstance(own, Mapping) and isinstance(own.get("groups"), list):
        candidates.append(own["groups"])
    if "fp32_groups" in optimizer or "fp32_groups_flat" in optimizer:
        candidates.append(unsharded.masters_by_group(model))
    if given is not None:
        candidates.append(given)
    if groups == 1:
        candidates.append([_parameters(model)])
    for names in candidates:
        if len(names) == groups and (counts is None or [len(members) for members in names] == list(counts)):
            return [list(members) for members in names]
    raise UnsupportedError(
        "optimizer states without names cannot be told apart", file=model.file,
        found=f"{groups} groups" + (f" of {', '.join(map(str, counts))} parameters" if counts else ""),
        remedy="Load it in a run with the same parameter groups, or load its weights alone (load_module_only=True).",
    )  # fmt: skip


def _parameters(model: ModelStates) -> list[str]:
    """The floating-point tensors that are not buffers, tied ones once."""
    places: dict[object, str] = {}
    for name, ref in model.module.items():
        if name not in model.buffer_names and ref.dtype.kind == "float" and ref.numel:
            places.setdefault(ref.place, name)
    return list(places.values())


def _cut_states(
    model: ModelStates, names: Sequence[str], shapes: Sequence[tuple[int, ...]], state: Mapping[str, object],
    per_element: Sequence[str],
) -> Iterator[tuple[str, dict[str, TensorEntry]]]:  # fmt: skip
    """The states of a group with parameters that lie end to end in one vector."""
    refs = {key: as_tensor(state[key], key, model.file) for key in per_element}
    held = {key: unflatten(dict(zip(names, shapes, strict=True)), [(ref, ref.numel)]) for key, ref in refs.items()}
    for name in names:
        yield name, {key: entries[name] for key, entries in held.items()}


def _scaler(optimizer: Mapping[str, Any]) -> dict[str, object]:
    """The loss scaler in the form of the ZeRO optimizers."""
    kept: dict[str, object] = {key: optimizer[key] for key in ("clip_grad", "dynamic_loss_scale") if key in optimizer}
    if "cur_scale" in optimizer and optimizer.get("dynamic_loss_scale"):
        scaler = new_scaler(F16)
        state = as_mapping(scaler.state, "a loss scaler", "")
        scaler.state = {**state, **{key: optimizer[key] for key in state if key in optimizer and key != "dtype"}}
        kept |= {"loss_scaler": scaler, "overflow": False}
    return kept

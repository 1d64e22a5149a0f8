"""The facts on experts in a model file: AutoEP's placement of them, its second routers, and facts to be removed.

For the readers of saves with experts: `experts`, `mixture`, `universal`.
Source: DeepSpeed 0.19.8, runtime/engine.py `_save_moe_checkpoint`, module_inject/auto_ep_layer.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

from zckpt.base.errors import COPY_AGAIN, CorruptError
from zckpt.containers import brief
from zckpt.layouts.run.training import Training
from zckpt.layouts.save.module_states import ModelStates, as_mapping


def records(model: ModelStates) -> dict[int, Mapping[str, object]]:
    """AutoEP's records, by the layer's number. Raises CorruptError if a record does not name its layer."""
    listed = model.root.get("ds_autoep_layers")
    if listed is None:
        return {}
    found: dict[int, Mapping[str, object]] = {}
    for entry in listed if isinstance(listed, list | tuple) else [listed]:
        entry = as_mapping(entry, "AutoEP's record of a layer", model.file)
        number, prefix = entry.get("moe_layer_id"), entry.get("expert_key_prefix")
        if not isinstance(number, int) or not isinstance(prefix, str):
            raise CorruptError(
                "AutoEP's record of a layer has no number or name", file=model.file, found=brief(entry),
                remedy=COPY_AGAIN,
            )  # fmt: skip
        found[number] = entry
    return found


def modules(name: str) -> Iterator[str]:
    """The modules that contain a parameter, from the outermost on."""
    return itertools.accumulate(name.split(".")[:-1], "{}.{}".format)


def second_routers(model: ModelStates) -> Iterator[tuple[str, str]]:
    """Pairs of a router's names: AutoEP saves a layer's router under its former name too, without recording it."""
    homes = {str(entry["expert_key_prefix"]).rpartition(".")[0] for entry in records(model).values()}
    for name, ref in model.module.items():
        for home in homes.intersection(modules(name)):
            child, _, rest = name.removeprefix(f"{home}.").partition(".")
            kept = model.module.get(f"{home}.router.{rest}")
            if kept is None or child in ("router", "experts", "shared_experts"):
                continue
            if (kept.shape, kept.dtype) == (ref.shape, ref.dtype):
                yield name, f"{home}.router.{rest}"


_OF_EXPERTS = frozenset(("num_experts", "ds_autoep_layers", "folding", "universal_checkpoint_info"))


def without_experts(training: Training) -> Training:
    """The run without its files' facts on experts, which are wrong once experts are ordinary parameters."""
    groups = (
        replace(group, settings={key: value for key, value in group.settings.items() if key != "moe"})
        for group in training.groups
    )
    model = {key: value for key, value in training.model.items() if key not in _OF_EXPERTS}
    return replace(training, groups=tuple(groups), model=model)

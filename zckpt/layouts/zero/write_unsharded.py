"""How a save without ZeRO is laid out: DeepSpeed's one file, with masters and states in its `optimizer`.

For the trainer. fp32 runs keep torch's own state dict there; half-precision runs a state dict of DeepSpeed's unfused
optimizer: the same, beside masters and the loss scale.
Source: DeepSpeed 0.19.8, runtime/engine.py `_common_checkpoint_state`; runtime/fp16/unfused_optimizer.py `state_dict`.
"""

from __future__ import annotations

from collections.abc import Mapping

from zckpt.core.catalog import Catalog
from zckpt.core.dtypes import F32
from zckpt.core.plan import Plan
from zckpt.layouts.run.training import Training
from zckpt.layouts.zero.torch_files import TorchFile


def lay_out(catalog: Catalog, training: Training, tag: str, world_size: int) -> Plan:
    """The file of a save, without `latest`.

    Args:
        catalog: the weights; trainable parameters are the masters, with the module's own weights as replicas.
        training: all else; `scaler` has the numbers of the loss scale.
        tag: its directory.
        world_size: of the run.

    Raises:
        UnsupportedError: something in the client state cannot be written.
    """
    file = TorchFile(f"{tag}/mp_rank_00_model_states.pt")
    module: dict[str, object] = {}
    for name, entry in catalog.tensors.items():
        weight = entry
        for replica in entry.replicas:
            weight = entry.as_in(replica)
        module[name] = file.tensor(weight)
    module |= {dropped: module[kept] for dropped, kept in catalog.aliases.items()}
    root: dict[str, object] = {
        "module": module,
        "buffer_names": [name for name, entry in catalog.tensors.items() if entry.role == "buffer"],
        "optimizer": _optimizer(file, catalog, training) if training.groups else None,
        "param_shapes": None,
        "frozen_param_shapes": None,
        "shared_params": None,
        "frozen_param_fragments": None,
        **file.adopt(training.model),
        "dp_world_size": world_size,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
    }
    return file.finish(root)


def _optimizer(file: TorchFile, catalog: Catalog, training: Training) -> Mapping[str, object]:
    states: dict[int, object] = {}
    groups: list[object] = []
    for group in training.groups:
        numbers = range(len(states), len(states) + len(group.names))
        for number, name in zip(numbers, group.names, strict=True):
            vectors = {state: file.tensor(entry) for state, entry in training.states_of(name, group).items()}
            states[number] = {**file.adopt(group.scalars), **vectors}
        groups.append(file.adopt({**group.settings, "params": list(numbers)}))
    inner: dict[str, object] = {"state": {n: state for n, state in states.items() if state}, "param_groups": groups}
    if training.precision == F32:
        return inner
    masters = [[file.tensor(catalog.tensors[name], F32) for name in group.names] for group in training.groups]
    return {**training.scaler, "optimizer_state_dict": inner, "fp32_groups": masters}

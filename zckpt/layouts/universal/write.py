"""Lays out a universal checkpoint: the files that DeepSpeed's `ds_to_universal` writes, value for value.

For `zckpt to-universal`. What is in them, and in which form: [Note: two forms] in `universal`.
Source: DeepSpeed 0.19.8, checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace

from zckpt.base.errors import UnsafeError, UnsupportedError
from zckpt.containers import mapping_at, value_at
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.dtypes import F32, DType
from zckpt.core.plan import Plan
from zckpt.layouts.joining.slices import Joint, as_float, first_rows
from zckpt.layouts.moe.experts import is_own
from zckpt.layouts.run.training import Training
from zckpt.layouts.save.listing import LAYER_NAME, MODEL_NAME, SHARD_NAME, Listing
from zckpt.layouts.universal import HOME, MASTER
from zckpt.layouts.universal.read import STATE
from zckpt.layouts.zero.torch_files import TorchFile, plan_copy
from zckpt.layouts.zero.write import ZeroTarget, lay_out_model
from zckpt.storage.identity import stays_inside


def lay_out(catalog: Catalog, training: Training, listing: Listing, tag: str) -> Plan:
    """The files of a universal checkpoint, as DeepSpeed's own converter writes them, without `latest_universal`.

    Args:
        catalog: the weights, under the names they have in training.
        training: all else.
        listing: the source's files; the model files among them are copied.
        tag: the name of its directory.

    Raises:
        UnsafeError: a parameter's name is not a path below `zero/`.
        UnsupportedError: a parameter's name is too long for a directory, or DeepSpeed has no universal form for experts.
    """
    _check_experts(catalog)
    made: list[Plan] = []
    stage_3 = catalog.source.zero_stage == 3
    default = None if stage_3 and catalog.topology.tp * catalog.topology.pp == 1 else _END_TO_END
    for group in training.groups:
        for name in group.names:
            home = f"{tag}/{HOME}{_directory(name, catalog.source.path)}"
            joint = training.joined.get(name, default)
            for state, entry in {MASTER: catalog.tensors[name], **training.states_of(name, group)}.items():
                made.append(_tensor_file(f"{home}/{state}.pt", entry, joint))
            if "step" in group.scalars and not stage_3:
                file = TorchFile(f"{home}/step.pt")
                made.append(file.finish(file.adopt(group.scalars["step"])))
    if not stage_3 and not listing.matching(LAYER_NAME):  # a pipeline's are in its layer files
        for name, entry in _others(catalog):
            home = f"{tag}/{HOME}{_directory(name, catalog.source.path)}"
            made.append(_tensor_file(f"{home}/{MASTER}.pt", as_float(entry), _AS_IT_IS, F32))
    file = TorchFile(f"{tag}/{STATE}")
    made.append(file.finish(file.adopt(_without_partitions(training, stage_3, catalog.topology.dp))))
    if not catalog.source.zero_stage:  # of a run without ZeRO there are none that say whose parameters are whose
        return Plan.of([*made, lay_out_model(catalog, training, ZeroTarget(tag, 1, 1, training.precision))])
    for name, place in listing.files.items():
        if MODEL_NAME.fullmatch(name) or ((m := SHARD_NAME.fullmatch(name)) and m["kind"] == "model"):
            path = f"{tag}/{name}"
            made.append(_model_file(listing, name, path, stage_3) or plan_copy(path, place.store()))
    return Plan.of(made)


def _check_experts(catalog: Catalog) -> None:
    """Raises UnsupportedError for experts that DeepSpeed's engine could not load; see [Note: universal experts] in `read`."""
    topology = catalog.topology
    own = sum(is_own(name) for name in catalog.tensors)
    if topology.experts and (topology.tp * topology.pp > 1 or (own and topology.ep > 1)):
        raise UnsupportedError(
            "DeepSpeed has no universal form for these experts", file=catalog.source.path,
            found=f"tensors of DeepSpeed's own experts over {topology.ep} ranks" if own else "AutoEP under AutoTP",
            expected="AutoEP without tensor parallelism, or all experts on every rank",
            remedy="Use zckpt reshard, which makes experts ordinary parameters, or convert the weights alone (to-fp32).",
        )  # fmt: skip


_AS_IT_IS = Joint((), ())
_END_TO_END = Joint((), (), words={"cat_dim": 0})
"""The joint that DeepSpeed's converter records for a parameter that no rule names, also on one rank."""


def _directory(name: str, path: str) -> str:
    """A parameter's name as a path; DeepSpeed looks for exactly this path."""
    if not stays_inside(name):
        raise UnsafeError(
            "the name of a parameter is not a path", file=path, found=f"{name!r:.200}",
            remedy="Use zckpt reshard instead: a universal checkpoint names directories by parameters.",
        )  # fmt: skip
    if any(len(os.fsencode(part)) > _LONGEST for part in name.split("/")):
        raise UnsupportedError(
            "the name of a parameter is too long for a directory", file=path, found=f"{name!r:.100}",
            expected=f"at most {_LONGEST} bytes",
            remedy="Use zckpt reshard instead: a universal checkpoint names directories by parameters.",
        )  # fmt: skip
    return name


_LONGEST = 255
"""The most bytes of a file name, on every file system that is used for training."""


def _tensor_file(path: str, entry: TensorEntry, joint: Joint | None, dtype: DType | None = None) -> Plan:
    """A file of one tensor: with words on how it was joined, or, if there are none, bare and flat."""
    file = TorchFile(path)
    if joint is None:
        return file.finish(file.tensor(replace(entry, shape=(entry.numel,), replicas=()), dtype))
    return file.finish({**file.adopt(joint.words), "param": file.tensor(first_rows(entry, joint.keep), dtype)})


def _others(catalog: Catalog) -> Iterator[tuple[str, TensorEntry]]:
    """The module's tensors that the optimizer does not own, including tied names."""
    for name, entry in catalog.tensors.items():
        if entry.role != "parameter":
            yield name, entry
    for dropped, kept in catalog.aliases.items():
        entry = catalog.tensors[kept]
        if (copy := entry.own_copy) is not None:
            entry = entry.as_in(copy)
        yield dropped, entry


_SHARDED = ("base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups")


def _without_partitions(training: Training, stage_3: bool, ranks: int) -> dict[str, object]:
    """One rank's optimizer file without its partitions; at stage 3, with them.

    As DeepSpeed's converter does, it says of each group, of experts too, that all data-parallel ranks share it, without padding.
    """
    raw = training.raw
    groups = value_at(raw, "optimizer_state_dict" if stage_3 else "base_optimizer_state", "param_groups")
    if groups is None:
        groups = [{**group.settings, "params": [number]} for number, group in enumerate(training.groups) if group.names]
    kept = {key: value for key, value in raw.items() if stage_3 or key not in _SHARDED}
    for key, value in {"partition_count": ranks, "group_paddings": 0}.items():
        if not stage_3 and isinstance(listed := kept.get(key), list) and listed:
            kept[key] = [value] * len(listed)
    if not raw:  # a run without ZeRO
        kept = {"zero_stage": 1, "ds_version": training.model.get("ds_version"), **training.scaler}
    return {**kept, "param_groups": groups}


def _model_file(listing: Listing, name: str, path: str, stage_3: bool) -> Plan | None:
    """A model file of a run with AutoEP, with its record in the place where the engine looks for it; None for other
    runs.
    """
    root = listing.open(name).root
    if not isinstance(root, Mapping) or not isinstance(record := root.get("ds_autoep_layers"), list):
        return None
    if not stage_3:  # of which the converter keeps less
        record = [
            {key: entry[key] for key in _OF_LAYER if key in entry} for entry in record if isinstance(entry, Mapping)
        ]
    pattern = r".*\.experts\.w[123]$" if stage_3 else r"\.experts\.w[123]$"
    said = {"expert_parameter_patterns": [pattern], "ds_autoep_layers": record}
    info = {**mapping_at(root, "universal_checkpoint_info"), **said}
    file = TorchFile(path)
    return file.finish(file.adopt({**root, "universal_checkpoint_info": info}))


_OF_LAYER = ("moe_layer_id", "module_path", "expert_key_prefix", "num_experts", "num_local_experts", "ep_size")

"""Universal checkpoints: each parameter is whole, in files of its own, so that any number of ranks can load it.

For `layouts.FAMILIES`. A tag directory holds `zero/<parameter>/fp32.pt` and one such file per optimizer state,
`zero/optimizer_state.pt` with what is left of one rank's optimizer file, and copies of the model files, in which buffers and
frozen parameters lie.

[Note: two forms] From stages 1 and 2, and wherever slices of tensor-parallel ranks were joined, a file is a dict: `param`,
and how it was joined (`cat_dim`, ..). From stage 3 it is a bare vector: its shape is in the model files' `param_shapes`.
`step.pt`, of stages 1 and 2, is a bare number.

[Note: universal experts] DeepSpeed has a form for AutoEP's stacks, without tensor parallelism: whole, `is_expert_param` in the
file; the engine takes a rank's rows. Its own experts are files of their own under the number that an expert has *on
its rank*: so there is one only where every rank has all experts. Over several ranks its converter fails or mixes experts, and
its engine would give all ranks the same ones.
Source: DeepSpeed 0.19.8, checkpoint/ds_to_universal.py, checkpoint/universal_checkpoint.py, checkpoint/autoep_universal.py,
runtime/base_optimizer.py `load_hp_checkpoint_state_from_checkpoint_dir`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import COPY_AGAIN, OTHER_SAVE, CorruptError, IncompleteError, InconsistentError
from zckpt.containers import TensorRef, enum_value, list_at, mapping_at
from zckpt.core.catalog import Catalog, Role, TensorEntry, Topology
from zckpt.core.fragments import Fragment
from zckpt.layouts.moe.experts import second_routers, without_experts
from zckpt.layouts.run.training import ParameterGroup, Training
from zckpt.layouts.run.values import SCALER, step_of
from zckpt.layouts.save.listing import MODEL_NAME, SHARD_NAME, Listing
from zckpt.layouts.save.module_states import (
    ModelStates,
    Shape,
    read_model_states,
    replicas_of,
    root_of,
    whole,
)
from zckpt.layouts.universal import HOME, MASTER
from zckpt.layouts.zero.assembly import assemble, source_of
from zckpt.layouts.zero.optimizer_states import precision_of
from zckpt.layouts.zero.partition import in_original_order
from zckpt.layouts.zero.read import has_unknown_weights, match_by_values

STATE = f"{HOME}optimizer_state.pt"
_STEP = "step"


@dataclass(frozen=True, slots=True)
class _Save:
    """The files of a save.

    Attributes:
        listing: all files.
        parameters: parameter -> state -> name of its file.
        models: the first model file of each model-parallel rank.
        left: the rest of one rank's optimizer file.
    """

    listing: Listing
    parameters: Mapping[str, Mapping[str, str]]
    models: Sequence[ModelStates]
    left: Mapping[str, object]

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shapes of trainable parameters; of one rank's slices if there are several model-parallel ranks."""
        return {name: shape for model in self.models for group in model.param_shapes for name, shape in group.items()}

    @property
    def stage(self) -> int:
        """The run's ZeRO stage: as its optimizer names it, or 1 for the bf16 optimizer."""
        stage = enum_value(self.left.get("zero_stage"))
        return stage if isinstance(stage, int) else 1

    def states(self) -> tuple[str, ...]:
        """Names of the per-element optimizer states."""
        found = dict.fromkeys(state for name in self.shapes for state in self.parameters[name])
        return tuple(state for state in found if state not in (MASTER, _STEP))

    def entry(self, name: str, state: str, shape: Shape) -> TensorEntry:
        """The master weights or a state of a parameter. Raises IncompleteError if its file is missing; CorruptError,
        InconsistentError if the file holds another object.
        """
        file = self.parameters.get(name, {}).get(state)
        if file is None:
            raise IncompleteError(
                f"{state!r} of parameter {name!r} is missing", file=self.listing.directory,
                expected=f"{HOME}{name}/{state}.pt", remedy="Copy it again, or convert the original checkpoint again.",
            )  # fmt: skip
        ref = _tensor(self.listing, file)
        own = ref.shape if isinstance(self.listing.open(file).root, Mapping) else shape
        if ref.numel != math.prod(own) or (len(self.models) == 1 and own[1:] != shape[1:]):
            raise InconsistentError(
                f"its tensor has another shape than parameter {name!r}", file=self.listing.files[file].path,
                found=str(list(ref.shape)), expected=str(list(shape)),
                remedy=OTHER_SAVE,
            )  # fmt: skip
        return whole(name, ref, "parameter", own)


def _load(listing: Listing) -> _Save:
    parameters: dict[str, dict[str, str]] = {}
    for name in listing.files:
        path, _, file = name.rpartition("/")
        if name.startswith(HOME) and path != HOME[:-1] and file.endswith(".pt"):
            parameters.setdefault(path.removeprefix(HOME), {})[file.removesuffix(".pt")] = name
    models = list(_models(listing))
    if not models:
        raise IncompleteError(
            "the universal checkpoint has no model files", file=listing.directory, found=f"{HOME} only",
            expected="mp_rank_*_model_states.pt, or zero_pp_rank_*_model_states.pt, beside it",
            remedy="Copy them from the checkpoint that it was made from.",
        )  # fmt: skip
    left: Mapping[str, object] = {}
    if STATE in listing.files:
        left = root_of(listing, STATE)
    save = _Save(listing, parameters, models, left)
    if len(models) > 1 or not has_unknown_weights(models[0]):
        return save
    written = {name: shape for name, shape in save.shapes.items() if MASTER in parameters.get(name, {})}
    masters = {name: save.entry(name, MASTER, shape) for name, shape in written.items()}
    return replace(save, models=[match_by_values(models[0], masters)])


def _tensor(listing: Listing, file: str) -> TensorRef:
    """The tensor that a file of a parameter holds, in either form; see [Note: two forms]."""
    root = listing.open(file).root
    ref = root.get("param") if isinstance(root, Mapping) else root
    if not isinstance(ref, TensorRef):
        raise CorruptError("holds no tensor", file=listing.files[file].path, remedy=COPY_AGAIN)
    return ref


def beside(listing: Listing) -> dict[str, TensorRef]:
    """Frozen tensors and tied names in files of their own, which DeepSpeed may read; zckpt does not. Raises
    CorruptError if a file does not hold what its name says.
    """
    save = _load(listing)
    files = {name: states[MASTER] for name, states in save.parameters.items() if MASTER in states}
    return {name: _tensor(listing, file) for name, file in files.items() if name not in save.shapes}


def _models(listing: Listing) -> Iterator[ModelStates]:
    seen: set[int] = set()
    for name in listing.files:
        found = MODEL_NAME.fullmatch(name) or SHARD_NAME.fullmatch(name)
        if found and int(found["mp"]) not in seen:
            seen.add(int(found["mp"]))
            root = listing.open(name).root
            elsewhere = isinstance(root, Mapping) and root.get("module") is None  # a pipeline's: in layer files
            model = read_model_states(listing, name, module={} if elsewhere else None)
            yield replace(model, shared={**model.shared, **dict(second_routers(model))})


def read(listing: Listing, *, allow_unknown: bool = False) -> Catalog:
    """The catalog of a universal checkpoint. Raises IncompleteError if a parameter's file, or the model files, are
    missing; CorruptError, InconsistentError if a file is not what its name says.
    """
    del allow_unknown
    save = _load(listing)
    model = save.models[0]
    states = save.states() if all(name in save.parameters for name in save.shapes) else ()
    source = source_of(listing, model, save.stage, states, layout="universal")
    entries = (save.entry(name, MASTER, shape) for name, shape in save.shapes.items())
    # An entry's shape is that of the whole tensor, also where a model file holds a slice.
    masters = {one.name: replace(one, replicas=replicas_of(one.name, one.shape, model)) for one in entries}
    frozen = {
        name: entry for name, shape in model.frozen_shapes.items() if (entry := _frozen(listing, model, name, shape))
    }
    return assemble(model, masters, source, Topology(), {**dict(_elsewhere(save)), **frozen})


def _elsewhere(save: _Save) -> Iterator[tuple[str, TensorEntry]]:
    """Tensors that the model file lacks because they were in files of experts; in fp32, as all without an optimizer."""
    model = save.models[0]
    known = {*save.shapes, *model.module, *model.shared}
    for name, files in save.parameters.items():
        if name not in known and MASTER in files:
            role: Role = "frozen" if name in model.frozen_shapes else "buffer"
            yield name, whole(name, _tensor(save.listing, files[MASTER]), role)


def _frozen(listing: Listing, model: ModelStates, name: str, shape: Shape) -> TensorEntry | None:
    """A frozen parameter: whole in the model file, or at stage 3 in pieces in all ranks' files, one after another."""
    ref = model.frozen_fragments.get(name) or model.module.get(name)
    if ref is None:
        return None  # saved without frozen parameters
    if ref.shape == shape:
        return whole(name, ref, "frozen")
    numel = math.prod(shape)
    fragments: list[Fragment] = []
    start = 0
    for file in listing.shards("model").values():
        piece = read_model_states(listing, file).frozen_fragments.get(name)
        if piece is None or start == numel:
            break
        count = min(piece.numel, numel - start)
        fragments.append(Fragment(piece.store, piece.byte_offset, start, count))
        start += count
    return TensorEntry(name, shape, ref.dtype, "frozen", tuple(fragments))


def read_training(listing: Listing, *, allow_unknown: bool = False) -> Training:
    """What the run needs beside its weights; arguments and errors as in `read`."""
    del allow_unknown
    save = _load(listing)
    model, shapes = save.models[0], save.shapes
    states = {
        name: {
            state: save.entry(name, state, shape)
            for state in save.parameters.get(name, {})
            if state not in (MASTER, _STEP)
        }
        for name, shape in shapes.items()
    }
    listed = save.left.get("param_groups")
    settings = [group for group in listed if isinstance(group, Mapping)] if isinstance(listed, list | tuple) else []
    groups = tuple(
        ParameterGroup(
            names=tuple(names),
            settings={key: value for key, value in own.items() if key != "params"},
            scalars=_scalars(save, names),
            states=tuple(states[names[0]]) if names else (),
        )
        for names, own in zip(_names_by_group(save, settings), settings, strict=False)
    )
    training = Training(
        groups=groups,
        states=states,
        scaler={key: save.left[key] for key in SCALER if key in save.left},
        model=model.rest,
        precision=precision_of(model),
        form="zero" if "zero_stage" in save.left else "bf16",
        raw=save.left,
        state_names=model.state_names,
    )
    return without_experts(training) if model.root.get("num_experts") else training


def _names_by_group(save: _Save, settings: Sequence[Mapping[str, object]]) -> list[list[str]]:
    """Parameters per group: `param_shapes` lists them by group, at stage 3 by sub-group."""
    shapes = [model.param_shapes for model in save.models]
    if save.stage == 3:
        owners = [owner for owner, group in enumerate(settings) for _ in list_at(group.get("params"))]
        names: list[list[str]] = [[] for _ in settings] or [[]]
        for number, group in enumerate(shapes[0]):
            names[owners[number] if number < len(owners) else 0] += group
        return names
    count = max(map(len, shapes))
    by_number = ([group for own in shapes for group in own[number : number + 1]] for number in range(count))
    listed = [list(dict.fromkeys(name for group in groups for name in group)) for groups in by_number]
    model = save.models[0]
    if "zero_stage" in save.left and model.zero_config.get("round_robin_gradients"):
        return [list(in_original_order(names, model.ranks("dp_world_size") or 1)) for names in listed]
    return listed


def _scalars(save: _Save, names: Sequence[str]) -> dict[str, object]:
    """The step: from a file of each parameter, or from the rest of the optimizer file. Raises InconsistentError if
    parameters of one group have taken different numbers of steps.
    """
    files = [file for name in names if (file := save.parameters.get(name, {}).get(_STEP)) is not None]
    steps = {file: save.listing.open(file).root for file in files}
    for file, step in steps.items():
        if step_of(step) != step_of(steps[files[0]]):
            raise InconsistentError(
                "the step count differs from that of other parameters", file=save.listing.files[file].path,
                found=f"step {step_of(step)}", expected=f"step {step_of(steps[files[0]])}, as in {files[0]!r}",
                remedy=OTHER_SAVE,
            )  # fmt: skip
    if steps:
        return {_STEP: steps[files[0]]}
    states = mapping_at(save.left, "optimizer_state_dict", "state")
    first = mapping_at(next(iter(states.values()), None))
    return {_STEP: first[_STEP]} if _STEP in first else {}

"""From a Hugging Face model, or any other that a scheme of names knows, to a checkpoint of Megatron-Core.

For `zckpt to-mcore`. What is written is a run directory with one `torch_dist` save, `release`, which Megatron-Core loads at any
tensor, pipeline and expert parallel sizes.

The optimizer's states for a Megatron-Core save: Adam's moments and fp32 weights, under Megatron-Core's names.
States lie as the weights do, so they are renamed, fused, stacked and padded by the same rules. Megatron-Core's
optimizer has its own groups, made by rule: matrices decay, vectors and biases do not. Their settings are the run's.
Source: megatron-core 0.14 and 0.16.1, optimizer/distrib_optimizer.py `load_state_dict`; Megatron-LM, megatron/training/
{checkpointing,optimizer_param_scheduler}.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zckpt import layouts
from zckpt.base.errors import OTHER_SAVE, InconsistentError, UnsupportedError, ZckptError
from zckpt.base.progress import Progress
from zckpt.base.words import examples, join_words
from zckpt.core.catalog import Catalog, usual_dtype
from zckpt.core.dtypes import DType
from zckpt.jobs.casting import output_dtype, to_dtype
from zckpt.jobs.convert import PlannedConversion, order_for
from zckpt.jobs.declarations import TO_MCORE, Asked
from zckpt.jobs.open import open_asked, strip_wrappers
from zckpt.jobs.options import Options
from zckpt.jobs.own_groups import Megatron
from zckpt.jobs.planned import Report, carry_out, find_left_out, protected_places
from zckpt.jobs.selection import check_wanted, check_whole, resolve_selection, select
from zckpt.layouts.megatron_core.write import MegatronOptimizer, MegatronTensor, lay_out
from zckpt.layouts.places import Place
from zckpt.layouts.run.training import Training
from zckpt.layouts.run.values import single_value
from zckpt.layouts.save.companions import config_file, config_of, read_config
from zckpt.naming.megatron_arguments import check_computed, megatron_arguments, megatron_notes
from zckpt.naming.writers import NUMBERED, RenamedModel, SchemeNames, name_for_writer
from zckpt.output.checks import check_path
from zckpt.storage.location import locate

_MOMENTS = ("exp_avg", "exp_avg_sq")


def megatron_states(
    place: Place,
    chosen: Catalog,
    known: Mapping[str, str],
    model: RenamedModel,
    naming: SchemeNames,
    *,
    experts_apart: bool,
    allow_unknown: bool = False,
) -> tuple[MegatronOptimizer, tuple[str, ...]]:
    """Names the optimizer's states as Megatron-Core does; returns notes for a person beside them.

    Args:
        place: the checkpoint.
        chosen: all of its tensors, without wrappers' prefixes.
        known: their names -> those in the files.
        model: they, under Megatron-Core's names.
        naming: by which they were named.
        experts_apart: whether experts have an optimizer of their own.
        allow_unknown: go on though optimizer files hold keys that zckpt does not know.

    Raises:
        UnsupportedError: the states are not Adam's, or not those of all parameters.
        InconsistentError: parameters were updated in different numbers of steps.
    """
    training = layouts.read_training(place.listing, allow_unknown=allow_unknown)
    _check(training, chosen.source.path)
    weights = [entry for entry in model.catalog.tensors.values() if entry.role != "buffer"]
    places = [("param", entry) for entry in weights]
    for moment in _MOMENTS:
        held = {
            name: replace(training.state(known[name], moment), name=name) if entry.role == "parameter" else entry
            for name, entry in chosen.tensors.items()
            if entry.role != "frozen"  # a tied head is, in some saves
        }
        try:
            composed = name_for_writer(replace(chosen, tensors=held), place, naming).catalog
        except ZckptError as error:
            raise _untrained_error(chosen) or error from error
        states = [entry for entry in composed.tensors.values() if entry.role != "buffer"]
        if [entry.name for entry in states] != [entry.name for entry in weights]:
            raise _untrained_error(chosen) or InconsistentError(
                "the optimizer states have other names than the weights", file=chosen.source.path, remedy=OTHER_SAVE
            )
        places += [(moment, entry) for entry in states]
    settings, notes = _settings(training)
    step = _step(training, chosen.source.path)
    return MegatronOptimizer(tuple(places), settings, step, experts_apart), notes


def _check(training: Training, path: str) -> None:
    """Raises UnsupportedError for states that Megatron-Core's Adam does not have."""
    kinds = {state for group in training.groups for state in group.states}
    if kinds != set(_MOMENTS):
        raise UnsupportedError(
            "has states that are not those of Adam", file=path, found=join_words(sorted(kinds)) or "none",
            expected=join_words(list(_MOMENTS)), remedy="Leave --optimizer out, and write the weights alone.",
        )  # fmt: skip


def _untrained_error(weights: Catalog) -> UnsupportedError | None:
    """The error for parameters without states; None if every parameter has some."""
    frozen = [entry.name for entry in weights.tensors.values() if entry.role == "frozen"]
    return UnsupportedError(
        "some parameters were not trained, and have no states", file=weights.source.path, found=examples(frozen),
        remedy="Leave --optimizer out, and write the weights alone.",
    ) if frozen else None  # fmt: skip


def _settings(training: Training) -> tuple[dict[str, object], tuple[str, ...]]:
    """The settings that all of Megatron-Core's groups get, with notes where the run's groups differ."""
    decays = [
        number for group in training.groups if (number := _number(group.settings.get("weight_decay"))) is not None
    ]
    first = training.groups[0].settings
    several = [
        key for key in ("lr", "betas", "eps") if len({repr(group.settings.get(key)) for group in training.groups}) > 1
    ]
    betas = first.get("betas")
    found: dict[str, object] = {
        "lr": _number(first.get("lr")) or 0.0,
        "betas": tuple(betas) if isinstance(betas, list | tuple) and len(betas) == 2 else (0.9, 0.999),
        "eps": _number(first.get("eps")) or 1e-8,
        "weight_decay": max(decays, default=0.0),
    }
    note = f"The run's parameter groups differ in {join_words(several)}; Megatron-Core's have those of the first."
    return found, (note,) if several else ()


def _number(value: object) -> float | None:
    """A number, or the one in a tensor."""
    found = single_value(value)
    return float(found) if isinstance(found, int | float) else None


def _step(training: Training, path: str) -> int:
    """The number of steps of the optimizer."""
    steps: set[int] = set()
    for group in training.groups:
        scalars: Mapping[str, object] = group.scalars
        steps.add(int(_number(scalars.get("step")) or 0))
    if len(steps) != 1 or 0 in steps:
        raise InconsistentError(
            "the optimizer's step is not one", file=path,
            found=f"steps {join_words([str(step) for step in sorted(steps)])}",
            expected="the same step of all parameters, 1 or more",
            remedy="Leave --optimizer out, and write the weights alone.",
        )  # fmt: skip
    return steps.pop()


def to_mcore(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: str | DType | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    vocab_size: int | None = None,
    tensor_parallel: int = 1,
    make_vocab_size_divisible_by: int = 128,
    numbered_layers: bool = False,
    optimizer: bool = False,
    expert_parallel: int = 1,
    tag: str | None = None,
    also: Sequence[str | os.PathLike[str]] = (),
    options: Options | None = None,
    progress: Progress = None,
) -> Report:
    """Writes a model as a checkpoint that Megatron-Core loads (`torch_dist`), in constant memory.

    Args:
        checkpoint: as for `zckpt.convert`: a Hugging Face model, or a checkpoint with names in which a scheme of
        zckpt finds one.
        out: the run directory: `latest_checkpointed_iteration.txt`, `release/`, config.json and tokenizer files.
        dtype: "fp32", "fp16" or "bf16" for floating parameters; None leaves every tensor as the checkpoint has it.
        config: the model's config.json, if there is none beside the checkpoint.
        vocab_size: words of the vocabulary, behind which the input has padding; None for what config, run and tokenizer say.
        tensor_parallel: tensor-parallel ranks of the run; the vocabulary is padded for so many.
        make_vocab_size_divisible_by: as Megatron's option: the padded vocabulary is a multiple of this times `tensor_parallel`.
        numbered_layers: number layers in names (`non_homogeneous_layers`) instead of stacking them; without it they are
            numbered only where not all are alike.
        optimizer: write Adam's states too, as Megatron-Core's distributed optimizer loads them (`fully_reshardable`).
        expert_parallel: expert-parallel ranks of the run that loads these; with several, experts have an optimizer of their own.
        tag: which save, where there are several; by default the one that `latest` names.
        also: directories that hold other parts of the same checkpoint, such as other nodes' disks.
        options: everything else, such as `Options(overwrite=True)`; its dtype is overridden by `dtype`.
        progress: as for `zckpt.convert`, with the bytes written so far.

    Returns:
        What was written: files, tensors, bytes, seconds, and notes for a person.

    Raises:
        UnsupportedError: a tensor has no place in Megatron-Core's models; or `optimizer` is given, and there are no states of
            Adam that zckpt reads.
        UsageError: something is not recorded that must be known, such as the number of heads; pass `config`.
        OutputError: `out` exists (`Options(overwrite=True)` replaces it), cannot be written, or the disk is full.
        ZckptError: another kind says what is wrong. Whatever is raised, `out` is as it was before.

    Example:
        >>> zckpt.to_mcore("model", "megatron", progress=False).out
        'megatron'
    """
    asked = (options or Options()).split(
        TO_MCORE, dtype=None if dtype is None else to_dtype(dtype), tag=tag, also=also, config=config,
        vocab_size=vocab_size, tensor_parallel=tensor_parallel,
        make_vocab_size_divisible_by=make_vocab_size_divisible_by, numbered_layers=numbered_layers,
        optimizer=optimizer, expert_parallel=expert_parallel,
    )  # fmt: skip
    return carry_out(lambda: prepare(checkpoint, out, asked), progress, "to mcore")


def prepare(
    checkpoint: str | os.PathLike[str], out: str | os.PathLike[str], asked: Asked[Megatron]
) -> PlannedConversion:
    """Plans a conversion; arguments as for `to_mcore`. Writes nothing."""
    source, place = locate(checkpoint), locate(out)
    opened = open_asked(source, asked)
    inputs = protected_places(opened, source, beside=asked.publishing.beside, named=(asked.own.config,))
    check_path(place, single=False, overwrite=asked.publishing.overwrite, protected=inputs)
    stripped, notes = strip_wrappers(opened.catalog)
    multiple = asked.own.make_vocab_size_divisible_by * asked.own.tensor_parallel
    layers = NUMBERED if asked.own.numbered_layers else None
    own = asked.own.config
    given = config_of(own) if isinstance(own, str) else own if own is not None else read_config(opened.place.home)
    check_computed(given, opened.place.listing.directory.path)
    names = SchemeNames("megatron-core", asked.own.config, layers, multiple, asked.own.vocab_size)
    naming, said = resolve_selection(stripped, asked.selecting, asked.naming)
    asked = replace(asked, naming=naming)
    check_wanted(opened, stripped, asked.selecting)
    chosen = select(stripped, asked.selecting, naming)
    model = name_for_writer(chosen, opened.place, names)
    catalog = model.catalog
    states: MegatronOptimizer | None = None
    more: tuple[str, ...] = ()
    recorded = model.recorded
    if asked.own.optimizer:
        check_whole(chosen, stripped)
        known = dict(zip(stripped.tensors, opened.catalog.tensors, strict=True))
        states, more = megatron_states(
            opened.place, chosen, known, model, names, experts_apart=asked.own.expert_parallel > 1,
            allow_unknown=asked.reading.allow_unknown_layout,
        )  # fmt: skip
        recorded = {"form": {**recorded["form"], "optimizer": True}}
    spellings: dict[str, list[str]] = {}
    for spelling, name in catalog.aliases.items():
        spellings.setdefault(name, []).append(spelling)
    tensors = [
        MegatronTensor(
            entry, output_dtype(entry, asked.casting.dtype), model.stacked.get(name, 0), tuple(spellings.get(name, ()))
        )
        for name, entry in catalog.tensors.items()
    ]
    usual = asked.casting.dtype or usual_dtype(catalog.tensors)
    arguments = megatron_arguments(model.facts, model.parts, model.config, asked.own.make_vocab_size_divisible_by)
    arguments |= {
        "tensor_model_parallel_size": asked.own.tensor_parallel,
        "bf16": usual.torch_name == "bfloat16",
        "fp16": usual.torch_name == "float16",
    }
    if states is not None:
        arguments |= {"no_save_optim": False, "use_distributed_optimizer": True, "iteration": states.step}
    plan = lay_out(
        tensors, arguments, numbered_layers=model.facts.get("layers") == NUMBERED, max_file_bytes=asked.own.max_file_bytes,
        optimizer=states,
    )  # fmt: skip
    plan = plan.with_files(config_file(opened.config(model.config), usual))
    copies, left_out = opened.companions()
    fates = find_left_out(stripped, catalog.tensors, asked.selecting, selectable=stripped.tensors, rules=model.dropped)
    order = order_for(asked, plan, place, catalog, copies, recorded, fates)
    notes = (
        *opened.catalog.source.notes,
        *notes,
        *model.notes,
        *megatron_notes(arguments, model.config.get("model_type")),
        *left_out,
    )
    return PlannedConversion(opened, order, (*notes, *more, *said), asked)

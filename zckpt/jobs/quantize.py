"""From any checkpoint to quantised weights, in one pass.

For `zckpt quantize` and its short form `zckpt to-fp8`, and for `verify`, which derives such an output again. What is quantised
are the weights of linear layers; everything else becomes half precision.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import field, replace
from itertools import pairwise
from typing import Any

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import IncompleteError, UnsupportedError, UsageError
from zckpt.base.progress import Progress
from zckpt.base.words import count, examples, matches
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.dtypes import BF16, F32, DType
from zckpt.core.plan import Plan
from zckpt.jobs.casting import output_dtype, to_dtype
from zckpt.jobs.convert import PlannedConversion, order_for
from zckpt.jobs.convert import prepare as prepare_copy
from zckpt.jobs.declarations import QUANTIZE, TO_FP8, Asked
from zckpt.jobs.groups import Casting
from zckpt.jobs.open import Opened, open_catalog
from zckpt.jobs.opened import WorkingModel, dequantise
from zckpt.jobs.options import Options
from zckpt.jobs.own_groups import Fp8, Quantize
from zckpt.jobs.planned import Report, carry_out, find_left_out, protected_places
from zckpt.jobs.selection import check_wanted, select
from zckpt.jobs.steps import open_model, reform
from zckpt.layouts.plain.write import WeightsTarget, lay_out
from zckpt.layouts.save.companions import config_file
from zckpt.naming.linear import LinearLayers, layers_of
from zckpt.naming.schemes import families
from zckpt.output.publish import check_output
from zckpt.quantized.configs import BLOCK, OWN_FILES, RECORDED, Scheme, quantization_config, without
from zckpt.quantized.grids import Grid, as_matrices, blocks_of
from zckpt.quantized.plain import find_scaled
from zckpt.quantized.quantise import (
    Quantiser,
    as_stack,
    carried_entries,
    carried_fp8,
    is_in_form,
    powers_of,
    quantise_entry,
    scales,
    target_entries,
)
from zckpt.quantized.targets import TARGETS, Second, Target, order_of
from zckpt.storage.fsspec_io import is_page
from zckpt.storage.location import locate


@dataclass(frozen=True, slots=True)
class Fp8Weights:
    """The tensors of an output.

    Attributes:
        catalog: elements, scales and all others.
        dtypes: of each tensor in the output.
        quantisers: of each quantised tensor, by its name.
        kept: modules with matrices that are not quantised.
        carried: names of tensors that are as the source has them, quantised already.
        notes: sentences for a person.
        has_stacks: whether stacks of MXFP4 become ModelOpt's.
    """

    catalog: Catalog
    dtypes: Mapping[str, DType]
    quantisers: Mapping[str, Quantiser]
    kept: tuple[str, ...]
    carried: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    has_stacks: bool = False


@dataclass(frozen=True, slots=True)
class PlannedFp8(PlannedConversion):
    """A quantisation that is planned but not begun; further attributes as in `Planned`.

    Attributes:
        quantisers: as in `Fp8Weights`.
        others: how many tensors are not quantised.
        carried: how many are written as the source has them, quantised already.
    """

    quantisers: Mapping[str, Quantiser] = field(kw_only=True)
    others: int = field(kw_only=True)
    carried: int = field(kw_only=True)

    def tensors(self) -> list[dict[str, object]]:
        """The effect of quantising on each tensor, for `--json`; numbers are None where others made some of the
        elements.
        """
        return [_describe_quantiser(name, self.quantisers[name]) for name in self.quantisers]

    def lossless(self) -> tuple[int, int] | None:
        """Of the matrices of MXFP4, how many kept each number, and how many there are; None where that is not known."""
        found = [tensor["lossless"] for tensor in self.tensors() if "lossless" in tensor]
        return (sum(map(bool, found)), len(found)) if found and None not in found else None


def _describe_quantiser(name: str, quantiser: Quantiser) -> dict[str, object]:
    found = quantiser.measured
    is_whole = found.elements == quantiser.entry.numel
    numbers = {
        "largest": found.largest, "max_error": found.error,
        "max_relative_error": found.error / found.largest if found.largest else 0.0,
        "saturated": found.saturated, "underflowed": found.underflowed,
    }  # fmt: skip
    shape: dict[str, object] = {"name": name, "shape": list(quantiser.entry.shape)}
    if quantiser.powers is not None:
        shape["lossless"] = found.error == 0 if is_whole else None
    return {**shape, **(numbers if is_whole else dict.fromkeys(numbers))}


def to_fp8(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    scheme: Scheme = "block128",
    quantize: Sequence[str] = (),
    keep: Sequence[str] = (),
    dtype: str | DType = "bf16",
    tag: str | None = None,
    also: Sequence[str | os.PathLike[str]] = (),
    options: Options | None = None,
    progress: Progress = None,
) -> Report:
    """Writes weights of fp8 (E4M3) with scales, which transformers, vLLM and compressed-tensors load, in constant memory.

    The weights of linear layers are quantised, each divided by scale = largest magnitude / 448 and rounded to nearest even.
    Embeddings, norms, biases, routers and the head are not.

    Args:
        checkpoint: as for `zckpt.convert`, with the model's config.json beside it.
        out: the directory for shards of safetensors and a config.json with its `quantization_config`.
        scheme: "block128": a scale for each 128 x 128 elements, as DeepSeek has it; "channel": one for each row; "tensor": one
            for each tensor; the last two in the form of compressed-tensors.
        quantize: globs of names; only matrices that match one are quantised. A model that zckpt does not know needs them.
        keep: globs of names; matrices that match one are not quantised.
        dtype: of what is not quantised: "bf16", "fp16" or "fp32".
        tag: which save, where there are several; by default the one that `latest` names.
        also: directories that hold other parts of the same checkpoint, such as other nodes' disks.
        options: everything else, such as `Options(overwrite=True)`; its dtype is overridden by `dtype`.
        progress: a function that is called with the bytes written so far, and with the total if it takes a second argument;
            None shows a bar in a terminal or notebook, False shows none.

    Raises:
        UnsupportedError: it is not known which tensors of the model are weights of linear layers; `quantize` names them.
        CastError: a weight is NaN or infinite.
        OutputError: `out` exists (`Options(overwrite=True)` replaces it), cannot be written, or the disk is full.
        ZckptError: another kind says what is wrong. Whatever is raised, `out` is as it was before.

    Example:
        >>> zckpt.to_fp8("model", "fp8/", scheme="channel", progress=False).out
        'fp8/'
    """
    asked = (options or Options()).split(
        TO_FP8, dtype=to_dtype(dtype), scheme=scheme, quantize=tuple(quantize), keep=tuple(keep),
        tag=tag, also=also,
    )  # fmt: skip
    return carry_out(lambda: prepare(checkpoint, out, asked), progress, "to fp8")


def quantize(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    to: str = "fp8",
    group_size: int | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    dtype: str | DType = "bf16",
    tag: str | None = None,
    also: Sequence[str | os.PathLike[str]] = (),
    options: Options | None = None,
    progress: Progress = None,
) -> Report:
    """Writes quantised weights that vLLM, transformers and compressed-tensors load, in constant memory.

    The weights of linear layers are quantised. Scales are those that compressed-tensors computes; elements become the nearest
    numbers, in one rounding. Weights that the checkpoint has in this very form already are written as they are.

    Args:
        checkpoint: as for `zckpt.convert`, with the model's config.json beside it.
        out: the directory for shards of safetensors and a config.json with its `quantization_config`.
        to: "nvfp4", "mxfp4", "mxfp8", "int4", "int8", or "fp8", which is `zckpt.to_fp8` with blocks of 128 x 128 elements.
        group_size: columns that share a scale, for "int4"; None for 128.
        include: globs of names; only matrices that match one are quantised. A model that zckpt does not know needs them.
        exclude: globs of names; matrices that match one are written as they are, in `dtype`.
        dtype: of what is not quantised: "bf16", "fp16" or "fp32".
        tag: as for `zckpt.to_fp8`.
        also: as for `zckpt.to_fp8`.
        options: as for `zckpt.to_fp8`.
        progress: as for `zckpt.to_fp8`.

    Raises:
        UnsupportedError: it is not known which tensors of the model are weights of linear layers; `include` names them.
        UsageError: groups do not divide the columns of a matrix.
        CastError: a weight is NaN or infinite.
        OutputError: `out` exists (`Options(overwrite=True)` replaces it), cannot be written, or the disk is full.
        ZckptError: another kind says what is wrong. Whatever is raised, `out` is as it was before.

    Example:
        >>> zckpt.quantize("model", "nvfp4/", to="nvfp4", progress=False).tensors
        57
    """
    asked = (options or Options()).split(
        QUANTIZE, dtype=to_dtype(dtype), target=to, group_size=group_size, quantize=tuple(include), keep=tuple(exclude),
        tag=tag, also=also,
    )  # fmt: skip
    return carry_out(lambda: prepare(checkpoint, out, asked), progress, f"to {to}")


def open_model_for(
    checkpoint: str | os.PathLike[str], out: str | os.PathLike[str], asked: Asked[Any], why: str
) -> tuple[Opened, WorkingModel]:
    """Opens a checkpoint for a job that writes a directory with a config; `why` says what is wrong if there is none.

    Returns:
        The checkpoint as it is stored; and what was chosen of the model, in the numbers that quantised tensors stand for, under
        the names that were asked for and with its config.
    """
    source, place = locate(checkpoint), locate(out)
    if is_page(place.path) or place.name.endswith((".safetensors", ".bin", ".pt")):
        raise UsageError(
            "the output must be a directory", file=place, expected="a directory, which holds config.json beside the weights",
            remedy="Write to a directory, and load or push it as a whole.",
        )  # fmt: skip
    stored = open_catalog(source, asked.reading, as_stored=True)
    opened = dequantise(stored, keeps_dtypes=asked.casting.dtype is None)
    inputs = protected_places(
        opened, source, beside=asked.publishing.beside, named=(asked.naming.form.config, asked.naming.form.layer_names)
    )
    check_output(
        place, single=False, overwrite=asked.publishing.overwrite, protected=inputs, merge=asked.publishing.merge
    )
    bare = open_model(opened)
    check_wanted(opened, bare.catalog, asked.selecting)
    formed = reform(bare, asked.naming.form, to_directory=True, exclude=tuple(asked.selecting.exclude))
    catalog = select(formed.catalog, asked.selecting, asked.naming)
    opened.check_read(catalog.tensors.values())
    config = opened.config(formed.config)
    if config is None:
        raise IncompleteError(
            why, file=opened.place.home,
            found="no config.json", expected="the model's config.json beside the checkpoint",
            remedy="Copy the model's config.json there, or pass --to hf if zckpt can make one.",
        )  # fmt: skip
    return stored, replace(formed, catalog=catalog, config=config, selectable=formed.catalog.tensors)


def prepare(
    checkpoint: str | os.PathLike[str], out: str | os.PathLike[str], asked: Asked[Fp8 | Quantize]
) -> PlannedFp8:
    """Plans a quantisation; arguments as for `to_fp8`. Writes nothing."""
    stored, model = open_model_for(
        checkpoint, out, asked, "there is no config.json, which must say that the weights are quantised"
    )
    if (copied := _as_stored(checkpoint, out, asked, stored, model)) is not None:
        return copied
    opened, catalog, config = model.opened, model.catalog, model.config or {}
    weights = fp8_weights(
        catalog, config, asked.own.scheme, asked.own.quantize, asked.own.keep, asked.casting.dtype or BF16,
        asked.own.group_size, asked.own.flags, _powers(catalog) if asked.own.scheme == "nvfp4" else {},
    )  # fmt: skip
    wanted = [(entry, weights.dtypes[name]) for name, entry in weights.catalog.tensors.items()]
    target = WeightsTarget(
        "safetensors", max_shard_size=asked.sharding.max_shard_size, order=order_of(asked.own.scheme)
    )
    destination = lay_out(wanted, weights.catalog.aliases, target)
    config = {
        **without(config),
        "quantization_config": quantization_config(
            "stacks" if weights.has_stacks else asked.own.scheme, weights.kept, asked.own.group_size
        ),
    }
    file = config_file(config, asked.casting.dtype or BF16)
    copies, left_out = opened.companions()
    destination = replace(destination, files=(*destination.files, *([file] if file else [])))
    pairs = [(weights.catalog.tensors[name], entry) for name, entry in destination.entries.items()]
    recorded = {
        "scheme": asked.own.scheme, "quantize": list(asked.own.quantize), "keep": list(asked.own.keep),
        "group_size": asked.own.group_size, "carried": list(weights.carried),
        "powers": [name for name, one in weights.quantisers.items() if one.powers is not None],
    }  # fmt: skip
    fates = find_left_out(
        model.source, weights.catalog.tensors, asked.selecting, selectable=model.selectable, rules=model.given_up
    )
    order = order_for(
        asked, Plan(destination.files, pairs), locate(out), weights.catalog, copies,
        {**model.recorded, RECORDED: {key: value for key, value in recorded.items() if value}}, fates,
    )  # fmt: skip
    notes = (*model.notes, *weights.notes, *left_out)
    of_quantised = replace(catalog, tensors={name: catalog.tensors[name] for name in weights.quantisers}, aliases={})
    return PlannedFp8(
        opened, order, notes, asked, sources=(of_quantised,), quantisers=weights.quantisers,
        others=len(catalog) - len(weights.quantisers) - len(weights.carried), carried=len(weights.carried),
    )  # fmt: skip


def _as_stored(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    asked: Asked[Fp8 | Quantize],
    stored: Opened,
    model: WorkingModel,
) -> PlannedFp8 | None:
    """The plan of a copy, if all that the checkpoint has quantised has this form: scales, those of activations and of the cache
    too, and what its config says stay as they are. None for another checkpoint, or where tensors are chosen.
    """
    own = asked.own
    beside = [(home, name) for name in OWN_FILES if (home := stored.place.home / name).is_file()]
    is_said = stored.quantization is not None or bool(beside)  # else a loader of the copy would take codes for numbers
    if own.quantize or own.keep or not (model.opened.is_plain and is_said):
        return None
    scaled = find_scaled(stored.catalog, stored.quantization, () if stored.packed is None else stored.packed.members)
    grids = {name: _grid(one.entry.shape, own.scheme) for name, one in scaled.items() if isinstance(own, Fp8)}
    target = target_of(own.scheme, own.group_size)
    if not is_in_form(stored.packed, scaled, grids, own.scheme, target.group if target is not None else 0):
        return None
    planned = prepare_copy(checkpoint, out, replace(asked, casting=Casting(dtype=None)), stored)
    carried = len(scaled) + (len(stored.packed.parts) if stored.packed is not None else 0)
    return PlannedFp8(
        stored, replace(planned.order, copies=(*planned.order.copies, *beside)), (*planned.notes, _COPIED), asked,
        sources=planned.sources, quantisers={}, others=len(model.catalog) - carried, carried=carried,
    )  # fmt: skip


_COPIED = "The weights are in this form already: the output is a copy, with all scales and the config of the source."


def fp8_weights(
    catalog: Catalog,
    config: Mapping[str, Any],
    scheme: Scheme,
    quantize: Sequence[str],
    keep: Sequence[str],
    dtype: DType,
    group_size: int | None = None,
    flags: tuple[str, str] = Fp8.flags,
    powers: Mapping[str, tuple[TensorEntry, TensorEntry]] | None = None,
) -> Fp8Weights:
    """The tensors of an output, from those of a Hugging Face model.

    Args:
        catalog: the model's tensors.
        config: its config.
        scheme: as for `to_fp8`.
        quantize: as for `to_fp8`.
        keep: as for `to_fp8`.
        dtype: as for `to_fp8`.
        group_size: as for `quantize`.
        flags: the options for `quantize` and `keep`, for errors.
        powers: of tensors of MXFP4 that become NVFP4, their numbers and powers, as of `powers_of`.

    Raises:
        UnsupportedError: the model is not known and `quantize` is empty, or experts cannot be quantised in this scheme.
        UsageError: a glob matches nothing, nothing is left, or groups do not divide columns.
    """
    layers, powers = layers_of(catalog.tensors, config), powers or {}
    turned = {name for name in powers if catalog.tensors[name].shape[:-2]}
    chosen, left = _choose_matrices(catalog, config, layers, quantize, keep, flags, turned)
    notes: list[str] = []
    stacks = {name for name in chosen if catalog.tensors[name].shape[:-2]}
    if scheme != "block128" and stacks - turned:
        raise UnsupportedError(
            f"compressed-tensors has no form for stacks of experts ({scheme})", file=catalog.source.path,
            found=f"{count(len(stacks), 'stack')} such as {examples(sorted(stacks))}",
            remedy="Use `zckpt to-fp8` with --scheme block128, or with --to hf, if it takes these experts apart; or leave them "
            f"with {flags[1]}.",
        )  # fmt: skip
    tensors: dict[str, TensorEntry] = {}
    dtypes: dict[str, DType] = {}
    quantisers: dict[str, Quantiser] = {}
    of_scales = F32 if scheme == "block128" else BF16
    ragged: list[str] = []
    target, carried = target_of(scheme, group_size), []
    if target is not None:
        _check_groups(catalog, chosen - turned, target)
    seconds = _seconds(catalog, chosen, layers, powers) if target is not None and target.has_second else {}
    for name, entry in catalog.tensors.items():
        if name not in chosen:
            tensors[name] = entry
            is_precise = layers is not None and name in layers.precise and entry.dtype == F32
            dtypes[name] = F32 if is_precise else output_dtype(entry, dtype)
            continue
        if target is not None:
            own = carried_entries(entry, target)
            if own is not None:
                carried.append(name)
            else:
                second = seconds.get(name)
                numbers, of = powers[name] if second is not None and second.powers else (entry, None)
                rows, columns = numbers.shape
                grid = Grid(1, rows, columns, 1, target.group or columns)
                quantisers[name] = Quantiser(numbers, grid, target.scales or dtype, target, second, of)
                own = target_entries(quantisers[name], target)
                own = as_stack(own, entry) if name in turned else own
            tensors |= own
            dtypes |= {one: made.dtype for one, made in own.items()}
            continue
        grid = _grid(entry.shape, scheme)
        beside = f"{name}_scale_inv" if scheme == "block128" else f"{name}_scale"
        if (same := carried_fp8(entry, grid, of_scales)) is not None:
            carried.append(name)
            tensors[name], tensors[beside] = (replace(one, name=to) for one, to in zip(same, (name, beside)))
        else:
            quantiser = quantisers[name] = Quantiser(entry, grid, of_scales)
            tensors[name] = quantise_entry(entry, quantiser)
            tensors[beside] = scales(beside, _scales_shape(entry.shape, grid, scheme), quantiser)
        dtypes[name], dtypes[beside] = tensors[name].dtype, of_scales
        if (grid.down > 1 and grid.rows % grid.block_rows) or (grid.across > 1 and grid.columns % grid.block_columns):
            ragged.append(name)
    if ragged:
        notes.append(
            f"{count(len(ragged), 'matrix is', 'matrices are')} not a whole number of blocks, such as {examples(ragged)}. "
            "Without a GPU, transformers 5 refuses such matrices or takes other blocks; --keep leaves them in half precision."
        )
    if layers is not None:
        notes += _of_joined(layers, chosen, catalog, scheme)
    if carried:
        notes.append(f"{count(len(carried), 'matrix is', 'matrices are')} in this form already, and written as stored.")
    if doubled := [name for name, one in quantisers.items() if one.powers is not None]:
        notes.append(
            f"{count(len(doubled), 'matrix', 'matrices')} of MXFP4: codes and powers of two are kept, so nothing is lost where a "
            "scale is at least 2^-17 of the largest one."
        )
    modules = [name.removesuffix(".weight") for name in left]
    if layers is not None and layers.head and f"{layers.head}.weight" not in chosen:
        modules.append(layers.head)
    modules += sorted({name.partition(".experts.")[0] + ".experts" for name in left if ".experts." in name})
    made = replace(catalog, tensors=tensors)
    return Fp8Weights(
        made, dtypes, quantisers, tuple(dict.fromkeys(modules)), tuple(carried), tuple(notes), bool(turned)
    )


def _powers(catalog: Catalog) -> dict[str, tuple[TensorEntry, TensorEntry]]:
    found = {name: powers_of(entry) for name, entry in catalog.tensors.items()}
    return {name: one for name, one in found.items() if one is not None}


def target_of(scheme: str, group_size: int | None) -> Target | None:
    """The form of compressed-tensors to write; None for fp8."""
    target = TARGETS.get(scheme)
    return target if target is None or group_size is None else replace(target, group=group_size)


def _check_groups(catalog: Catalog, chosen: Iterable[str], target: Target) -> None:
    """Checks that groups divide the columns of all matrices; raises UsageError."""
    ragged = [name for name in sorted(chosen) if target.group and catalog.tensors[name].shape[-1] % target.group]
    if ragged:
        raise UsageError(
            f"{count(len(ragged), 'matrix is', 'matrices are')} not a whole number of groups of {target.group} columns",
            file=catalog.source.path,
            found=f"{catalog.tensors[ragged[0]].shape[-1]} columns in {ragged[0]!r}" + (" and others" if ragged[1:] else ""),
            expected=f"multiples of {target.group}",
            remedy=f"Leave them as they are with --exclude: {examples(ragged)}"
            + (", or pass another --group-size." if not target.is_float else "."),
        )  # fmt: skip


def _seconds(
    catalog: Catalog,
    chosen: Collection[str],
    layers: LinearLayers | None,
    powers: Mapping[str, tuple[TensorEntry, TensorEntry]],
) -> dict[str, Second]:
    """The scale of scales of each matrix: one for those that servers of models join, as vLLM wants it."""
    groups = [[name] for name in chosen]
    groups += [[name for name in group if name in chosen] for group in (layers.joined if layers is not None else ())]
    found: dict[str, Second] = {}
    for group in filter(None, groups):
        of = [powers[name][1] for name in group if name in powers]
        entries = tuple(powers[name][0] if name in powers else catalog.tensors[name] for name in group)
        found |= dict.fromkeys(group, Second(entries, tuple(of) if len(of) == len(group) else ()))
    for one, following in pairwise(dict.fromkeys(found[name] for name in catalog.tensors if name in found)):
        one.following = following
    return found


def _of_joined(layers: LinearLayers, chosen: Collection[str], catalog: Catalog, scheme: Scheme) -> Iterator[str]:
    """Sentences on matrices that servers join, and refuse as they are.

    Source: vLLM 0.11, layers/quantization/utils/quant_utils.py (`is_layer_skipped`) and fp8_utils.py
    (`validate_fp8_block_shape`: of joined matrices, all but the last have whole blocks of rows).
    """
    groups = [group for group in layers.joined if any(name in chosen for name in group)]
    if mixed := [group[0] for group in groups if not all(name in chosen for name in group)]:
        yield (
            f"{count(len(mixed), 'matrix is', 'matrices are')} quantised or left otherwise than those that vLLM and SGLang join "
            f"with it, such as {examples(mixed)}. They load the model if --quantize and --keep take all or none of queries, keys "
            "and values, and of gate and up."
        )
    if scheme != "block128":
        return
    cut = [name for group in groups for name in group[:-1] if catalog.tensors[name].shape[-2] % BLOCK[0]]
    if cut:
        yield (
            f"{count(len(cut), 'matrix has', 'matrices have')} no whole number of blocks of 128 rows, such as {examples(cut)}. "
            "vLLM and SGLang join them with others, and refuse that. --scheme channel has no blocks; --keep leaves matrices in "
            "half precision."
        )


def _choose_matrices(
    catalog: Catalog,
    config: Mapping[str, Any],
    layers: LinearLayers | None,
    quantize: Sequence[str],
    keep: Sequence[str],
    flags: tuple[str, str],
    turned: Set[str],
) -> tuple[set[str], list[str]]:
    """The names of the tensors that are quantised, and of other matrices of linear layers; stacks alone, if some are turned."""
    matrices = [name for name, entry in catalog.tensors.items() if _is_matrix(entry)]
    if layers is None and not quantize and not turned:
        raise UnsupportedError(
            "it is not known which tensors are the weights of linear layers", file=catalog.source.path,
            found=f"model_type {config.get('model_type')!r}", expected=f"a model of one of {', '.join(families())}",
            remedy=f"Name them with {flags[0]} GLOB; names look like {examples(matrices or catalog)}.",
        )  # fmt: skip
    tied = set(catalog.aliases.values())
    can = sorted(turned) or [
        name for name in matrices if (layers is None or name in layers.linear) and name not in tied
    ]
    for option, globs in zip(flags, (quantize, keep)):
        for glob in globs:
            if not any(matches(name, (glob,)) for name in can):
                raise UsageError(
                    f"{option} {glob!r} matches no weight of a linear layer", file=catalog.source.path,
                    found=f"{count(len(can), 'such weight')}: {examples(can)}", remedy=f"Change {option}, or leave it out.",
                )  # fmt: skip
    chosen = {
        name for name in can if (not quantize or matches(name, tuple(quantize))) and not matches(name, tuple(keep))
    }
    if not chosen:
        raise UsageError(
            "there is nothing to quantise", file=catalog.source.path, found=f"none of {count(len(can), 'weight')} chosen",
            remedy=f"Change {flags[0]}, {flags[1]} or what else chooses tensors.",
        )  # fmt: skip
    _check_experts(chosen, can, catalog.source.path, flags)
    others = frozenset(matrices) if layers is None else layers.other | (layers.linear if turned else frozenset())
    left = [
        name
        for name in matrices
        if name not in chosen and (name in others or name in can) and not name.endswith("bias")
    ]
    return chosen, left


def _is_matrix(entry: TensorEntry) -> bool:
    return entry.dtype.kind == "float" and len(entry.shape) in (2, 3) and entry.numel > 0 and entry.role != "buffer"


def _check_experts(chosen: Iterable[str], can: Iterable[str], path: str, flags: tuple[str, str]) -> None:
    """Checks that either all or none of a layer's experts are quantised: loaders keep them in one tensor."""
    mixed: dict[str, set[bool]] = defaultdict(set)
    is_chosen = set(chosen)
    for name in can:
        if ".experts." in name:
            mixed[name.partition(".experts.")[0]].add(name in is_chosen)
    if bad := [layer for layer, kinds in mixed.items() if len(kinds) > 1]:
        raise UsageError(
            "some experts of a layer would be quantised and others not", file=path,
            found=f"both in {examples(f'{layer}.experts' for layer in bad)}", expected="all experts of a layer, or none",
            remedy=f"Let {flags[0]} and {flags[1]} match all experts of a layer, such as '*.experts.*'.",
        )  # fmt: skip


def _grid(shape: tuple[int, ...], scheme: Scheme) -> Grid:
    _, rows, columns = as_matrices(shape)
    return blocks_of(shape, {"channel": (1, columns), "tensor": (rows, columns)}.get(scheme, BLOCK))


def _scales_shape(shape: tuple[int, ...], grid: Grid, scheme: Scheme) -> tuple[int, ...]:
    return (1,) if scheme == "tensor" else (*shape[:-2], grid.down, grid.across)

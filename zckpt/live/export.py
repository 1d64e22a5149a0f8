"""Saves the consolidated weights of a model while it trains, without gathering them on one rank.

For training scripts, called on every rank. `save_pretrained` writes a directory that `transformers` loads: rank 0 plans it,
makes the files and writes those without weights; every rank casts its elements and writes them at their places in the shared
files. `consolidate` returns the state dict on rank 0. A rank needs three times `assignment.PIECE_BYTES` beside the model.

[Note: the protocol] 1. Ranks offer the elements they have (`parts`), and agree who contributes which (`assignment`). 2. Rank 0
checks the output, makes its files and tells all where tensors go; each rank reports whether it sees the files. 3. Ranks that see
them write; others send their pieces to rank 0. All sync. 4. Rank 0 publishes and reports the result. An error on any rank is
raised on every rank, and nothing is published.
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zckpt.base.errors import OutputError, UsageError
from zckpt.base.version import __version__
from zckpt.base.words import examples
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import F32, SHORT_NAMES, DType
from zckpt.core.plan import Plan, WrittenFile, literal_file
from zckpt.engine.checksums import element_ranges, of_zeros
from zckpt.jobs.casting import output_dtype, to_dtype
from zckpt.layouts.plain.write import Format, WeightsTarget, lay_out
from zckpt.layouts.save.companions import with_dtype
from zckpt.live.assignment import ElementPlace, assign, contributions, digest_of_names
from zckpt.live.carry import Brought, Files, Sums, bring, put_into
from zckpt.live.parts import LocalModel, local_model, unwrap
from zckpt.live.ranks import Ranks
from zckpt.output.checks import check_path, check_space
from zckpt.output.contents import replacement
from zckpt.output.local_destination import LocalDestination
from zckpt.output.manifest import Manifest
from zckpt.output.order import Overflow, overflow_error
from zckpt.storage.location import LocalPath
from zckpt.team import partition
from zckpt.team.meeting import attempt, first_error

_WEIGHTS = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")


def consolidate(
    engine_or_model: nn.Module, dtype: str | DType | torch.dtype | None = None, *, exclude_frozen: bool = False
) -> dict[str, torch.Tensor]:
    """Returns the whole state dict on rank 0. Call it on every rank.

    Args:
        engine_or_model: as for `save_pretrained`.
        dtype: of floating parameters; None keeps each as it is trained (fp32 for the optimizer's master weights).
        exclude_frozen: leave out parameters that are not trained.

    Returns:
        On rank 0, tensors by name in CPU memory; tied names have the same object. On other ranks an empty dict.

    Raises:
        CastError: numbers too large for `dtype`.
        InconsistentError: some ranks did not call it within a minute; it names them.
        ZckptError: another kind says what is wrong; every rank raises it.
    """
    wanted = None if dtype is None else to_dtype(_name(dtype))
    given = attempt(lambda: local_model(engine_or_model))
    world = Ranks("consolidate", digest_of_names(given))
    mine, tensors = assign(world, given if isinstance(given, Exception) else given.offers)
    state: dict[str, torch.Tensor] = {}

    def plan() -> dict[str, ElementPlace]:
        entries = _choose_tensors(tensors, exclude_frozen)
        for name, entry in entries.items():
            state[name] = torch.empty(entry.shape, dtype=getattr(torch, _dtype_of(entry, wanted).torch_name))
        return {name: ElementPlace(i, 0, _dtype_of(one, wanted)) for i, (name, one) in enumerate(entries.items())}

    places = world.tell(attempt(plan) if world.rank == 0 else None)
    assert isinstance(given, LocalModel)
    sink = put_into(list(state.values())) if world.rank == 0 else None
    brought = bring(world, given, contributions(mine, places), sink, range(1, world.size))
    _end(world, brought, lambda sums: None, "error", wanted)
    state.update((dropped, state[kept]) for dropped, kept in given.aliases.items() if kept in state)
    return state


def save_pretrained(
    engine_or_model: nn.Module,
    out_dir: str | os.PathLike[str],
    dtype: str | DType | torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    *,
    exclude_frozen: bool = False,
    overflow: Overflow = "error",
    file: str = "",
) -> None:
    """Writes a directory that `from_pretrained` loads. Call it on every rank, between two steps; nothing is gathered.

    Args:
        engine_or_model: a model, plain or under `fully_shard`; zckpt's engine; or DeepSpeed's, of stages 1 to 3. Trained
            parameters are saved from the optimizer's fp32 master weights.
        out_dir: made if it is missing. In an existing one, weights that its `zckpt.json` lists are replaced and other files
            stay; it is refused if it has other weights of a model.
        dtype: of floating parameters ("bf16", torch.bfloat16, ..); None keeps each as it is trained.
        max_shard_size: of a weights file.
        exclude_frozen: leave out parameters that are not trained.
        overflow: what to do with numbers too large for `dtype`: "error", "inf" or "clamp".
        file: the name of the only weights file; one ending in .bin or .pt is torch's format.

    Warns:
        UserWarning: some ranks do not see `out_dir`, and send their elements to rank 0.

    Raises:
        CastError: numbers too large for `dtype`.
        InconsistentError: some ranks did not call it within a minute; it names them.
        OutputError: the directory cannot be written.
        ZckptError: another kind says what is wrong. Every rank raises it, and nothing was published.
    """
    if os.path.basename(file) != file:
        raise UsageError(
            "the name of the weights file contains a directory", found=repr(file), expected="a name such as 'model.safetensors'",
            remedy="Pass the directory as out_dir, and only the file's name as file.",
        )  # fmt: skip
    wanted = None if dtype is None else to_dtype(_name(dtype))
    container: Format = "bin" if file.endswith((".bin", ".pt")) else "safetensors"
    target = WeightsTarget(container, file=file, max_shard_size=max_shard_size)
    with contextlib.ExitStack() as stack:
        given = attempt(lambda: local_model(engine_or_model))
        world = Ranks("save_pretrained", digest_of_names(given))
        mine, tensors = assign(world, given if isinstance(given, Exception) else given.offers)
        work: tuple[Plan, LocalDestination, Manifest] | None = None

        def plan() -> _Share:
            nonlocal work
            aliases = given.aliases if isinstance(given, LocalModel) else {}
            entries = _choose_tensors(tensors, exclude_frozen)
            small = small_files(engine_or_model, wanted or _usual(entries))
            laid, staging, places = _plan_export(entries, aliases, os.fspath(out_dir), wanted, target, small)
            stack.enter_context(staging)
            staging.begin()
            staging.keep({})
            partition.begin(laid, staging.directory)
            work = laid, staging, _manifest(entries.values(), wanted)
            outputs = [output for output, _ in laid.files]
            paths = [os.path.join(staging.directory, output.path) for output in outputs]
            return paths, [list(element_ranges(output)) for output in outputs], places

        paths, ranges, places = world.tell(attempt(plan) if world.rank == 0 else None)
        assert isinstance(given, LocalModel)
        sees = world.rank == 0 or all(map(os.path.exists, paths))
        far = world.fold([] if sees else [world.rank], operator.add) or []
        if far:
            warnings.warn(
                f"{len(far):,} of {world.size:,} ranks do not see {os.fspath(out_dir)!r}. Rank 0 writes their weights for them. "
                "A file system that all ranks share is faster.",
                stacklevel=2,
            )
        sink = stack.enter_context(Files(paths, ranges)) if sees else None
        brought = bring(world, given, contributions(mine, places), sink, far, clamp=overflow == "clamp")
        _end(world, brought, lambda sums: _publish(*work, sums) if work else None, overflow, wanted)


def _name(dtype: str | DType | torch.dtype) -> str | DType:
    return str(dtype) if isinstance(dtype, torch.dtype) else dtype


def _choose_tensors(tensors: Mapping[str, TensorEntry] | Exception, exclude_frozen: bool) -> dict[str, TensorEntry]:
    if isinstance(tensors, Exception):
        raise tensors
    chosen = {name: entry for name, entry in tensors.items() if not (exclude_frozen and entry.role == "frozen")}
    if not chosen:
        raise UsageError(
            "the model has no weights to save", found="no parameter and no buffer",
            remedy="Pass the model itself; with exclude_frozen=True only parameters that are trained count.",
        )  # fmt: skip
    return chosen


def _dtype_of(entry: TensorEntry, wanted: DType | None) -> DType:
    return entry.dtype if wanted is None else output_dtype(entry, wanted)


def _usual(entries: Mapping[str, TensorEntry]) -> DType:
    """The dtype that most parameters have."""
    sizes: dict[DType, int] = {}
    for entry in entries.values():
        if entry.dtype.kind == "float" and entry.role != "buffer":
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.numel
    return max(sizes, key=lambda dtype: sizes[dtype], default=F32)


_Share = tuple[list[str], list[list[tuple[int, int]]], dict[str, ElementPlace]]
"""The plan that rank 0 sends to all ranks: the files' paths, their ranges of elements, and where tensors go."""


def _plan_export(
    tensors: Mapping[str, TensorEntry],
    aliases: Mapping[str, str],
    out: str,
    wanted: DType | None,
    target: WeightsTarget,
    small: Mapping[str, str],
) -> tuple[Plan, LocalDestination, dict[str, ElementPlace]]:
    """The files, their staging, and where tensors go in them."""
    aliases = {dropped: kept for dropped, kept in aliases.items() if kept in tensors}
    entries = [(entry, _dtype_of(entry, wanted)) for entry in tensors.values()]
    laid = lay_out(entries, aliases, target)
    files = (*laid.files, *(literal_file(name, text.encode()) for name, text in small.items()))
    if os.path.lexists(out) and not os.path.isdir(out):
        check_path(LocalPath(out), single=False, overwrite=False, protected=())
    check_space(LocalPath(out), sum(output.size for output, _ in files))
    number = {id(store): index for index, (_, store) in enumerate(files)}
    places = {
        name: ElementPlace(number[id(fragment.store)], fragment.byte_offset, entry.dtype)
        for name, entry in laid.entries.items()
        for fragment in entry.fragments
    }
    names = {output.path for output, _ in files}
    if os.path.isdir(out):
        _refuse_other_weights(out, names)
    staging = LocalDestination(out, single=False, names=names, merge=True)
    return Plan(files, ()), staging, places


def _manifest(tensors: Collection[TensorEntry], dtype: DType | None) -> Manifest:
    """What is known of the output before its files are written."""
    kind, numel = SHORT_NAMES.get(dtype, "") if dtype else "", sum(entry.numel for entry in tensors)
    source: dict[str, object] = {"layout": "live"}
    return Manifest(__version__, source, kind, options={}, tensors=len(tensors), numel=numel, files=())


def _refuse_other_weights(out: str, names: Collection[str]) -> None:
    """Refuses a directory that would hold weights of two models: a loader takes one of them, or shards of both.

    Weights that the directory's own zckpt.json lists, and files of the new names, are replaced instead. Raises
    OutputError if there are other weights.
    """
    others = [name for name in replacement(LocalPath(out), names, merge=True).rivals if _WEIGHTS.fullmatch(name)]
    if others:
        raise OutputError(
            "has weights that zckpt did not write", file=out, found=examples(others),
            expected="no weights that a loader might take instead of the new ones",
            remedy="Move them away, or choose another directory. Nothing was changed.",
        )  # fmt: skip


def small_files(model: nn.Module, dtype: str | DType) -> dict[str, str]:
    """The names and texts of the files that make a directory of weights loadable: `config.json`, with the dtype of the weights,
    and `generation_config.json`; none for a model without a config as transformers' have it.
    """
    files: dict[str, str] = {}
    model = unwrap(model)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_json_string") and hasattr(config, "to_dict"):
        facts = json.loads(config.to_json_string())
        if not facts.get("architectures"):
            kinds = [kind.__name__ for kind in type(model).__mro__ if not kind.__name__.startswith("FSDP")]
            facts["architectures"] = kinds[:1]
        files["config.json"] = json.dumps(with_dtype(facts, to_dtype(dtype)), indent=2, ensure_ascii=False) + "\n"
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "to_json_string"):
        files["generation_config.json"] = generation.to_json_string()
    return files


def _end(
    world: Ranks,
    outcome: Brought | Exception,
    publish: Callable[[Sums], None],
    overflow: Overflow,
    dtype: DType | None,
) -> None:
    """Rank 0 publishes if no rank failed, with the checksums of all ranks; every rank learns the result. Raises the
    first rank's error on every rank.
    """
    together = world.fold(outcome, lambda one, later: attempt(lambda: Brought.and_of(*first_error([one, later]))))

    def conclude() -> None:
        [brought] = first_error([together])
        assert brought is not None
        if brought.lost and overflow == "error" and dtype is not None:
            error = overflow_error(brought.lost, [dtype])
            error.remedy = "Choose bf16, or pass overflow='clamp' or overflow='inf'. Nothing was written."
            raise error
        publish(brought.sums)

    world.tell(attempt(conclude) if world.rank == 0 else None)


def _publish(plan: Plan, staging: LocalDestination, manifest: Manifest, sums: Sums) -> None:
    """Fills in checksums, and gives the files their names in place of an earlier save's weights."""
    finished = []
    for number, (output, _) in enumerate(plan.files):
        shares = sums.get(number, {})
        ranges = enumerate(element_ranges(output))
        parts = None if shares is None else [(at, n, of_zeros(n) ^ shares.get(i, 0)) for i, (at, n) in ranges]
        crc, _ = partition.seal(plan, output, staging.directory, parts)
        finished.append(WrittenFile(output.path, output.size, crc))
    staging.seal(replace(manifest, files=tuple(finished)))
    staging.commit()
    for note in staging.notes:
        warnings.warn(note, stacklevel=2)

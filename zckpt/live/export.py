"""Saves the whole weights of a model while it trains, without gathering them on one rank.

For training scripts, called on every rank. `save_pretrained` writes a directory that `transformers` loads: rank 0 plans it,
makes the files and writes those without weights; every rank casts its elements and writes them at their places in the shared
files. `consolidate` returns the state dict on rank 0. A rank needs three times `assignment.PIECE_BYTES` beside the model.

[Note: the protocol] 1. Ranks offer the elements they have (`parts`); rank 0 assigns contributions (`assignment`), checks the
output and makes its files. 2. Each rank gets its share, and reports whether it sees the files. 3. Ranks that see them write;
others send their pieces to rank 0. All sync. 4. Rank 0 publishes and reports the result. An error on any rank is raised on every
rank, and nothing is published.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zckpt.base.errors import OutputError, UsageError
from zckpt.base.version import __version__
from zckpt.base.words import examples
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import F32, SHORT_NAMES, DType
from zckpt.core.plan import Plan, literal_file
from zckpt.engine.checksums import Partial
from zckpt.jobs.options import output_dtype, to_dtype
from zckpt.layouts.plain import read as huggingface
from zckpt.layouts.save.companions import with_dtype
from zckpt.live.assignment import Contribution, ElementPlace, SharedTensor, assign, contributions
from zckpt.live.carry import Brought, Files, Lost, Memory, bring
from zckpt.live.parts import LocalModel, local_model, unwrap
from zckpt.live.ranks import Ranks
from zckpt.output.checks import check_path, check_space
from zckpt.output.contents import replacement
from zckpt.output.journal import Finished
from zckpt.output.manifest import Manifest
from zckpt.output.order import Overflow, overflow_error
from zckpt.output.staging import Staging
from zckpt.storage.location import LocalPath
from zckpt.team import part_move
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
    world = Ranks("consolidate")
    wanted = None if dtype is None else to_dtype(_name(dtype))
    given = attempt(lambda: local_model(engine_or_model))
    said = world.gather(given if isinstance(given, Exception) else given.offers)
    state: dict[str, torch.Tensor] = {}

    def plan() -> list[list[Contribution]]:
        tensors = _chosen(assign(first_error(said)), exclude_frozen)
        for name, tensor in tensors.items():
            torch_name = _dtype_of(tensor.entry, wanted).torch_name
            state[name] = torch.empty(tensor.entry.shape, dtype=getattr(torch, torch_name))
        places = {n: ElementPlace(i, 0, _dtype_of(t.entry, wanted)) for i, (n, t) in enumerate(tensors.items())}
        return contributions(tensors, places, world.size)

    shares = attempt(plan) if world.rank == 0 else []
    mine = world.scatter(shares)
    assert isinstance(given, LocalModel)
    sink = Memory(list(state.values())) if world.rank == 0 else None
    senders = [] if isinstance(shares, Exception) else list(enumerate(shares))[1:]
    brought = bring(world, given, mine, sink, senders)
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
    world = Ranks("save_pretrained")
    wanted = None if dtype is None else to_dtype(_name(dtype))
    container: huggingface.Format = "bin" if file.endswith((".bin", ".pt")) else "safetensors"
    target = huggingface.WeightsTarget(container, file=file, max_shard_size=max_shard_size)
    with contextlib.ExitStack() as stack:
        given = attempt(lambda: local_model(engine_or_model))
        said = world.gather(given if isinstance(given, Exception) else given.offers)
        work: _Work | None = None

        def plan() -> list[_Share]:
            nonlocal work
            aliases = given.aliases if isinstance(given, LocalModel) else {}
            tensors = _chosen(assign(first_error(said)), exclude_frozen)
            small = small_files(engine_or_model, wanted or _usual(tensors))
            work = _planned(tensors, aliases, os.fspath(out_dir), wanted, target, small, world.size)
            stack.enter_context(work.staging)
            work.staging.keep(())
            part_move.begin(work.plan, work.staging.directory)
            paths = [os.path.join(work.staging.directory, output.path) for output, _ in work.plan.files]
            return [_Share(paths, share) for share in work.shares]

        share = world.scatter(attempt(plan) if world.rank == 0 else [])
        assert isinstance(given, LocalModel)
        sees = world.rank == 0 or all(os.path.exists(path) for path in share.paths)
        far = [rank for rank, seen in enumerate(first_error(world.gather(sees))) if not seen]
        if far:
            warnings.warn(
                f"{len(far):,} of {world.size:,} ranks do not see {os.fspath(out_dir)!r}. Rank 0 writes their weights for them. "
                "A file system that all ranks share is faster.",
                stacklevel=2,
            )
        senders = [(rank, work.shares[rank]) for rank in far] if work else []
        sink = stack.enter_context(Files(share.paths)) if sees else None
        brought = bring(world, given, share.contributions, sink, senders, clamp=overflow == "clamp")
        _end(world, brought, lambda sums: _publish(work, sums) if work else None, overflow, wanted)


def _name(dtype: str | DType | torch.dtype) -> str | DType:
    return str(dtype) if isinstance(dtype, torch.dtype) else dtype


def _chosen(tensors: Mapping[str, SharedTensor], exclude_frozen: bool) -> dict[str, SharedTensor]:
    chosen = {n: t for n, t in tensors.items() if not (exclude_frozen and t.entry.role == "frozen")}
    if not chosen:
        raise UsageError(
            "the model has no weights to save", found="no parameter and no buffer",
            remedy="Pass the model itself; with exclude_frozen=True only parameters that are trained count.",
        )  # fmt: skip
    return chosen


def _dtype_of(entry: TensorEntry, wanted: DType | None) -> DType:
    return entry.dtype if wanted is None else output_dtype(entry, wanted)


def _usual(tensors: Mapping[str, SharedTensor]) -> DType:
    """The dtype that most parameters have."""
    sizes: dict[DType, int] = {}
    for tensor in tensors.values():
        if tensor.entry.dtype.kind == "float" and tensor.entry.role != "buffer":
            sizes[tensor.entry.dtype] = sizes.get(tensor.entry.dtype, 0) + tensor.entry.numel
    return max(sizes, key=lambda dtype: sizes[dtype], default=F32)


@dataclass(frozen=True, slots=True)
class _Share:
    """What rank 0 sends to a rank: the paths of all files, and the rank's contributions."""

    paths: list[str]
    contributions: list[Contribution]


@dataclass(frozen=True, slots=True)
class _Work:
    """What rank 0 plans: the files, their staging, and the contributions of each rank."""

    plan: Plan
    staging: Staging
    shares: list[list[Contribution]]
    dtype: DType | None
    tensors: int
    numel: int


def _planned(
    tensors: Mapping[str, SharedTensor],
    aliases: Mapping[str, str],
    out: str,
    wanted: DType | None,
    target: huggingface.WeightsTarget,
    small: Mapping[str, str],
    size: int,
) -> _Work:
    aliases = {dropped: kept for dropped, kept in aliases.items() if kept in tensors}
    entries = [(t.entry, _dtype_of(t.entry, wanted)) for t in tensors.values()]
    laid = huggingface.lay_out(entries, aliases, target)
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
    numel = sum(tensor.entry.numel for tensor in tensors.values())
    names = {output.path for output, _ in files}
    if os.path.isdir(out):
        _refuse_other_weights(out, names)
    staging = Staging(out, single=False, names=names, merge=True)
    return _Work(Plan(files, ()), staging, contributions(tensors, places, size), wanted, len(tensors), numel)


def _refuse_other_weights(out: str, names: Collection[str]) -> None:
    """Refuses a directory that would hold weights of two models: a loader takes one of them, or shards of both.

    Weights that the directory's own zckpt.json lists, and files of the new names, are replaced instead.

    Raises:
        OutputError: there are other weights.
    """
    others = [name for name in replacement(LocalPath(out), names, merge=True).rivals if _WEIGHTS.fullmatch(name)]
    if others:
        raise OutputError(
            "has weights that zckpt did not write", file=out, found=examples(others),
            expected="no weights that a loader might take instead of the new ones",
            remedy="Move them away, or choose another directory. Nothing was changed.",
        )  # fmt: skip


def small_files(model: nn.Module, dtype: str | DType) -> dict[str, str]:
    """What makes a directory of weights loadable: `config.json`, with the dtype of the weights, and `generation_config.json`.

    Args:
        model: one with a config as transformers' have it; others give nothing.
        dtype: of the weights.

    Returns:
        File name -> text.
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


Sums = dict[int, "list[Partial] | None"]


def _end(
    world: Ranks,
    outcome: Brought | Exception,
    publish: Callable[[Sums], None],
    overflow: Overflow,
    dtype: DType | None,
) -> None:
    """Rank 0 publishes if no rank failed, with the checksums of all ranks; every rank learns the result.

    Raises:
        ZckptError: the first rank's error, on every rank.
    """
    outcomes = world.gather(outcome)

    def conclude() -> list[None]:
        lost: Lost = {}
        sums: Sums = {}
        for one in first_error(outcomes):
            for name, (count, largest) in one.lost.items():
                before = lost.get(name, (0, 0.0))
                lost[name] = (before[0] + count, max(before[1], largest))
            for place, parts in one.sums.items():
                known = sums.setdefault(place, [])
                sums[place] = None if parts is None or known is None else known + parts
        if lost and overflow == "error" and dtype is not None:
            error = overflow_error(lost, [dtype])
            error.remedy = "Choose bf16, or pass overflow='clamp' or overflow='inf'. Nothing was written."
            raise error
        publish(sums)
        return [None] * world.size

    world.scatter(attempt(conclude) if world.rank == 0 else [])


def _publish(work: _Work, sums: Sums) -> None:
    """Fills in checksums, and gives the files their names in place of an earlier save's weights."""
    finished = []
    for number, (output, _) in enumerate(work.plan.files):
        crc, _ = part_move.seal(work.plan, output, work.staging.directory, sums.get(number, []))
        finished.append(Finished(output.path, output.size, crc))
    manifest = Manifest(
        version=__version__,
        source={"layout": "live"},
        dtype=SHORT_NAMES.get(work.dtype, "") if work.dtype else "",
        options={},
        tensors=work.tensors,
        numel=work.numel,
        files=tuple(finished),
    )
    work.staging.commit(manifest)
    for note in work.staging.notes:
        warnings.warn(note, stacklevel=2)

"""One model out of several checkpoints of it: an average, an exponential average, task vectors on a base, a point on an arc.

For `zckpt average` and `zckpt.average`. Every number is computed in fp32 in a fixed order, once, on its way to the
output, and
the output's bytes depend on no number of threads. All checkpoints are read in one pass (`slerp` reads them twice),
in constant memory.

Sources: torch.optim.swa_utils (averages and EMA), Ilharco et al. 2023 (task vectors), Shoemake 1985 and mergekit (slerp),
mergekit (TIES and DARE; `mergekit` reads its YAML).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from zckpt.base.errors import InconsistentError, UsageError
from zckpt.base.progress import Progress
from zckpt.base.words import count, examples
from zckpt.core.catalog import Catalog, TensorEntry, replace_name, usual_dtype
from zckpt.core.dtypes import CAST_TARGETS, F32, DType, is_lossless
from zckpt.core.evidence import weakest
from zckpt.core.folds import Sparsity
from zckpt.core.recipes import Recipe, derive_entry, mean_of, moving_average_of, point_between, weighted_sum_of
from zckpt.core.task_vectors import SparseSum
from zckpt.engine.scan import scan
from zckpt.engine.scan_requests import comparisons
from zckpt.jobs.casting import to_dtype
from zckpt.jobs.convert import PlannedConversion
from zckpt.jobs.convert import prepare as prepare_conversion
from zckpt.jobs.declarations import AVERAGE, Asked
from zckpt.jobs.open import open_asked, strip_wrappers
from zckpt.jobs.options import Options
from zckpt.jobs.own_groups import Average, SparseMethod
from zckpt.jobs.planned import Report, carry_out, protected_places
from zckpt.jobs.selection import check_wanted
from zckpt.layouts.run_saves import saves_of
from zckpt.output.checks import keep_apart
from zckpt.storage.location import locate

if TYPE_CHECKING:
    from zckpt.jobs.mergekit import Mergekit


def average(
    checkpoints: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    weights: Sequence[float] | None = None,
    ema: float | None = None,
    last: int | None = None,
    task_vector: str | os.PathLike[str] | None = None,
    slerp: float | None = None,
    method: SparseMethod | None = None,
    density: Sequence[float] | None = None,
    seed: int = 0,
    dtype: str | DType | None = None,
    options: Options | None = None,
    progress: Progress = None,
) -> Report:
    """Writes one model out of several checkpoints of the same model, of any layouts.

    With none of the options that say how, all checkpoints count the same. Their mean and `ema` are what torch.optim.swa_utils
    computes (get_swa_avg_fn, get_ema_avg_fn) on fp32 numbers in the order given.

    Args:
        checkpoints: each as for `zckpt.convert`; `PATH:TAG` names one save of several. Or a YAML of mergekit alone.
        out: a file or a directory, as for `zckpt.convert`. Config and tokenizer come from the last checkpoint.
        weights: what each checkpoint counts: the sum of weight times checkpoint is written as it is.
        ema: the checkpoints, oldest first, as an exponential moving average: each time `ema` of the average so far stays.
        last: take the last so many tags of a single checkpoint directory.
        task_vector: a base model: base + sum of weight * (checkpoint - base) is written; weights are 1 unless given.
        slerp: of two checkpoints, the point at this fraction of the way along the arc between each two tensors.
        method: with `task_vector`: "ties", "dare_ties" or "dare_linear", which thin out the differences, as mergekit has them.
        density: the part of each difference that stays; one number for all, or one for each checkpoint.
        seed: of DARE's random choice.
        dtype: "fp32", "fp16" or "bf16"; None for the one that most of the last checkpoint's elements have.
        options: everything else, such as `Options(overwrite=True)`; its dtype is overridden by `dtype`.
        progress: as for `zckpt.convert`, with the bytes written so far.

    Returns:
        What was written. Its notes name the tensors that cannot be averaged (integers): the last checkpoint's were taken.

    Raises:
        UsageError: options contradict each other, or their number is not that of the checkpoints.
        InconsistentError: the checkpoints are of different models; the first tensor is named.
        ZckptError: another kind says what is wrong. Whatever is raised, `out` is as it was before.

    Example:
        >>> zckpt.average(["run", "run"], "mean.safetensors", weights=[0.25, 0.75], progress=False).tensors
        11
    """
    asked = (options or Options()).split(
        AVERAGE, dtype=None if dtype is None else to_dtype(dtype), ema=ema, last=last, slerp=slerp,
        weights=None if weights is None else tuple(weights), task_vector=task_vector,
        method=method, density=None if density is None else tuple(density), seed=seed,
    )  # fmt: skip
    return carry_out(lambda: prepare(checkpoints, out, asked), progress, "average")


def prepare(
    checkpoints: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str], asked: Asked[Average]
) -> PlannedConversion:
    """Plans an average, made from checkpoints in the order in which they count, a base first; arguments as for `average`.
    Writes nothing.
    """
    said = _yaml_of(checkpoints, asked.own)
    named = (
        [_split_tag(os.fspath(path)) for path in checkpoints] if said is None else [(path, None) for path in said.paths]
    )
    if asked.own.last is not None:
        named = _last_of(named, asked.own.last)
    base = [] if asked.own.task_vector is None else [_split_tag(os.fspath(asked.own.task_vector))]
    weights = None if said else _weights(len(named), asked.own, os.fspath(out))
    sparsity = _sparsity(len(named), asked.own, weights)
    opened = [open_asked(path, asked.having(tag=tag)) for path, tag in (*base, *named)]
    for (path, _), one in zip((*base, *named), opened, strict=True):
        keep_apart(locate(out), protected_places(one, locate(path), beside=asked.publishing.beside))
    bare = [strip_wrappers(one.catalog)[0] for one in opened]
    for one, tensors_of in zip(opened, bare, strict=True):
        check_wanted(one, tensors_of, asked.selecting)
    last = bare[-1]
    aliases = {name: kept for name, kept in last.aliases.items() if all(_is_tied(name, kept, one) for one in bare)}
    names = [name for name in (*last.tensors, *last.aliases) if name not in aliases]
    _check_same(bare, names)
    layers = said.check_layers(names) if said else 0
    tensors: dict[str, TensorEntry] = {}
    copied: list[tuple[TensorEntry, ...]] = []
    for name in names:
        inputs = tuple(one[name] for one in bare)
        if inputs[-1].dtype.kind == "float":
            recipe = (
                said.recipe(inputs, layers, asked.own.seed) if said else _recipe(inputs, asked.own, weights, sparsity)
            )
            tensors[name] = derive_entry(name, inputs[-1].shape, F32, recipe, inputs[-1].role)
        else:
            tensors[name] = replace_name(inputs[-1], name)
            copied.append(inputs)
    usual = usual_dtype(last.tensors)
    wanted = asked.casting.dtype or (to_dtype(said.dtype) if said and said.dtype else None)
    how = asked.having(dtype=wanted or (usual if usual in CAST_TARGETS else F32))
    computed = replace(
        opened[-1], catalog=Catalog(tensors, last.source, weakest(one.evidence for one in bare), aliases)
    )
    planned = prepare_conversion(named[-1][0], out, how, computed)
    facts = {
        "of": [one.catalog.source_facts() for one in opened],
        "task_vector": bool(base), "weights": weights, "ema": asked.own.ema, "slerp": asked.own.slerp,
        **({} if sparsity is None else {"method": asked.own.method, "density": sparsity.densities, "seed": sparsity.seed}),
        **({} if said is None else {"mergekit": said.facts, "seed": asked.own.seed}),
    }  # fmt: skip
    order = replace(planned.order, options={**planned.order.options, "average": facts})
    notes = (
        *(said.notes if said else ()),
        *(note for one in opened[:-1] for note in one.catalog.source.notes),
        *planned.notes,
        *_differing(copied),
        *_note_narrowed(last, how.casting.dtype if wanted is None else None),
    )
    sources = tuple(one.catalog for one in opened)
    return PlannedConversion(computed, order, tuple(dict.fromkeys(notes)), how, sources=sources, inputs=tuple(opened))


def _is_tied(name: str, kept: str, catalog: Catalog) -> bool:
    """Whether a tensor is `kept` itself: an alias of it, or a name that does not exist."""
    return name not in catalog.tensors and catalog.aliases.get(name, kept) == kept


def _split_tag(path: str) -> tuple[str, str | None]:
    """`PATH:TAG` as path and tag, unless there is something of the whole name, or it is an address without a tag."""
    head, colon, tail = path.rpartition(":")
    whole = locate(path)
    if not colon or not head or not tail or "/" in tail or whole.is_file() or whole.is_dir():
        return path, None
    return head, tail


def _last_of(named: Sequence[tuple[str, str | None]], wanted: int) -> list[tuple[str, str | None]]:
    """The last saves of the only checkpoint directory. Raises UsageError if there are several directories, or fewer
    saves.
    """
    if len(named) != 1 or named[0][1] is not None:
        raise UsageError(
            "--last takes the newest saves of one directory", found=count(len(named), "checkpoint"),
            remedy="Give one directory that holds several saves, or leave out --last.",
        )  # fmt: skip
    path = named[0][0]
    saves, _ = saves_of(locate(path))
    if wanted < 1 or len(saves) < wanted:
        raise UsageError(
            "--last wants another number of saves than there is", file=path,
            found=f"--last {wanted}, {count(len(saves), 'save')}",
            expected=f"a number from 1 to {len(saves)}" if saves else "a directory with several saves",
            remedy="Change --last, or name the saves: CKPT:TAG.",
        )  # fmt: skip
    return [(save.path.path, None) for save in saves[-wanted:]]


def _weights(number: int, how: Average, out: str) -> tuple[float, ...] | None:
    """The weight of each checkpoint; None if none is given. Raises UsageError if options contradict each other or the
    number of checkpoints.
    """
    given = {
        "--weights": how.weights is not None, "--ema": how.ema is not None,
        "--slerp": how.slerp is not None, "--task-vector": how.task_vector is not None,
    }  # fmt: skip
    if how.method is not None and how.task_vector is None:
        raise UsageError(
            f"--method {how.method} moves a base",
            found="no --task-vector",
            remedy="Name the base with --task-vector BASE.",
        )
    wanted = [name for name, is_given in given.items() if is_given]
    if len(wanted) > 1 and wanted != ["--weights", "--task-vector"]:
        raise UsageError(
            "options for an average contradict each other", found=" and ".join(wanted),
            expected="one of them, or --weights with --task-vector", remedy="Leave out all but one.",
        )  # fmt: skip
    least = 1 if how.task_vector is not None else 2
    if number < least or (how.slerp is not None and number != 2):
        raise UsageError(
            "the number of checkpoints does not fit", found=count(number, "checkpoint"),
            expected="two, for --slerp" if how.slerp is not None else f"{least} or more",
            remedy=f"The last path is always OUT, so {out!r} was taken for OUT. Add a name for OUT at the end."
            if os.path.exists(out)
            else "Name the checkpoints one after another, before OUT.",
        )  # fmt: skip
    for name, value in (("--ema", how.ema), ("--slerp", how.slerp)):
        if value is not None and not 0 <= value <= 1:
            raise UsageError(
                f"{name} is impossible", found=str(value), expected="a number from 0 to 1", remedy=f"Change {name}."
            )
    weights = how.weights
    if weights is None:
        return (1.0,) * number if how.task_vector is not None else None
    if len(weights) != number or not all(map(math.isfinite, weights)):
        raise UsageError(
            "--weights does not fit the checkpoints", found=f"{', '.join(map(str, weights))} for {count(number, 'checkpoint')}",
            expected="a finite number for each checkpoint", remedy="Change --weights, such as --weights 0.7,0.3.",
        )  # fmt: skip
    return tuple(weights)


def _yaml_of(checkpoints: Sequence[str | os.PathLike[str]], how: Average) -> Mergekit | None:
    """The YAML of mergekit, if it was given in place of checkpoints. Raises UsageError if it does not stand there
    alone, or options say how too.
    """
    paths = [os.fspath(path) for path in checkpoints]
    found = [path for path in paths if path.endswith((".yaml", ".yml")) and locate(path).is_file()]
    if not found:
        return None
    from zckpt.jobs.mergekit import read_mergekit

    if len(checkpoints) > 1 or replace(how, seed=0) != type(how)():
        raise UsageError(
            "checkpoints or options stand beside a YAML of mergekit", file=found[0],
            found=count(len(checkpoints), "path") + " before OUT", expected="the YAML and OUT",
            remedy="Leave out the others, or write them into the YAML; --seed, --dtype and options of the output may stay.",
        )  # fmt: skip
    return read_mergekit(found[0])


def _sparsity(number: int, how: Average, weights: tuple[float, ...] | None) -> Sparsity | None:
    """The rule by which differences from the base are thinned out; None for no thinning. Raises UsageError if the
    densities do not fit.
    """
    if how.method is None:
        if how.density is not None:
            raise UsageError("--density is of use only with --method", found="no --method", remedy="Add --method ties.")
        return None
    densities = how.density or (1.0,)
    densities = densities * number if len(densities) == 1 else densities
    if len(densities) != number or not all(0 <= density <= 1 for density in densities):
        raise UsageError(
            "--density does not fit the checkpoints", found=f"{', '.join(map(str, densities))} for {count(number, 'checkpoint')}",
            expected="numbers from 0 to 1: one, or one for each checkpoint", remedy="Change --density, such as --density 0.5.",
        )  # fmt: skip
    is_random = how.method != "ties"
    return Sparsity(
        weights or (1.0,) * number, densities, is_random=is_random, elects=how.method != "dare_linear",
        normalises=not is_random, rescales=is_random, seed=how.seed,
    )  # fmt: skip


def _recipe(
    inputs: tuple[TensorEntry, ...], how: Average, weights: tuple[float, ...] | None, sparsity: Sparsity | None
) -> Recipe:
    if sparsity is not None:
        return SparseSum(inputs, sparsity)
    if how.slerp is not None:
        return point_between((inputs[0], inputs[1]), how.slerp)
    if how.ema is not None:
        return moving_average_of(inputs, how.ema)
    if weights is None:
        return mean_of(inputs)
    return weighted_sum_of(inputs, weights, moves_base=how.task_vector is not None)


def _check_same(catalogs: Sequence[Catalog], names: Sequence[str]) -> None:
    """Makes sure that all catalogs hold tensors of these names, and of the same shapes. Raises InconsistentError if one
    does not.
    """
    last = catalogs[-1]
    for one in catalogs[:-1]:
        more = [name for name in one.tensors if name not in last]
        lacking = [name for name in names if name not in one]
        if more or lacking:
            held, bare = (one, last) if more else (last, one)
            name = (more or lacking)[0]
            raise InconsistentError(
                f"the checkpoints are of different models: tensor {name!r} is missing", file=bare.source.path,
                found=f"{len(bare):,} other names such as {examples(bare)}", expected=f"{name!r}, as in {held.source.path!r}",
                remedy="Average checkpoints of one model.",
            )  # fmt: skip
        for name in names:
            a, b = one[name], last[name]
            if a.shape != b.shape or (a.dtype.kind == "float") != (b.dtype.kind == "float"):
                raise InconsistentError(
                    f"the checkpoints are of different models: tensor {name!r} differs", file=one.source.path,
                    found=f"{a.dtype} of shape {list(a.shape)}",
                    expected=f"{b.dtype} of shape {list(b.shape)}, as in {last.source.path!r}",
                    remedy="Average checkpoints of one model.",
                )  # fmt: skip


def _note_narrowed(last: Catalog, dtype: DType | None) -> Iterator[str]:
    """A sentence on tensors that lose bits although nobody asked for a dtype: most of the last checkpoint has another one."""
    lost = [
        name
        for name, entry in last.tensors.items()
        if dtype and entry.role != "buffer" and entry.dtype.kind == "float" and not is_lossless(entry.dtype, dtype)
    ]
    if lost and dtype:
        yield (
            f"{count(len(lost), 'tensor')} of the last checkpoint, such as {lost[0]!r}, had more bits than {dtype.torch_name}, "
            "which most of its weights have: --dtype fp32 keeps them."
        )


def _differing(copied: Sequence[tuple[TensorEntry, ...]]) -> Iterator[str]:
    """A sentence on tensors that cannot be averaged and differ among the checkpoints."""
    requests = (
        request
        for number, inputs in enumerate(copied)
        for other in inputs[:-1]
        if other.dtype == inputs[-1].dtype
        for request in comparisons(other, inputs[-1], number)
    )
    report = scan(requests)
    differ = [
        inputs[-1].name
        for number, inputs in enumerate(copied)
        if report.of(number).differ or any(other.dtype != inputs[-1].dtype for other in inputs)
    ]
    if differ:
        yield (
            f"{count(len(differ), 'tensor')} of whole numbers cannot be averaged and differ; the last checkpoint's are taken: "
            f"{examples(differ)}."
        )

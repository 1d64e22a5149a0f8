"""The adapter of a PEFT model, alone: what `PeftModel.save_pretrained` would write, out of a checkpoint of the whole model.

For `zckpt to-peft` and `zckpt.to_peft`. Only the adapter's own elements are read; the base model's may be there, be huge,
or be missing.

Source: PEFT 0.21.2, peft_model.py `save_pretrained` (files and sub-directories).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace

from zckpt.base.dataclass import dataclass, public
from zckpt.base.errors import UnsupportedError
from zckpt.base.progress import Progress, watch_progress
from zckpt.base.words import count, examples
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.dtypes import DType
from zckpt.core.plan import Plan, literal_file
from zckpt.jobs.adapters import (
    CONFIG,
    WEIGHTS,
    choose_adapter,
    config_path,
    find_adapter,
    made_config,
    read_adapter_config,
)
from zckpt.jobs.casting import output_dtype, to_dtype
from zckpt.jobs.convert import PlannedConversion, order_for
from zckpt.jobs.declarations import TO_PEFT, Asked
from zckpt.jobs.open import open_asked, strip_wrappers
from zckpt.jobs.own_groups import Adapter
from zckpt.jobs.planned import Report, execute, find_left_out, protected_places
from zckpt.layouts.plain.write import LaidOutFiles, WeightsTarget, lay_out
from zckpt.layouts.save.companions import is_own, note_of_links
from zckpt.naming.adapter_names import adapters_in, is_adapter_file, only_adapter
from zckpt.output.checks import check_path
from zckpt.storage.location import locate

_BORN_ZERO = re.compile(r".*\.(?:lora_B\.weight|lora_embedding_A)")
"""The LoRA matrices that begin as zeros, so that the adapter changes nothing; zeros after training mean that nothing
was learned.
"""

_TYPES = frozenset((
    *("LORA", "ADALORA", "LOHA", "LOKR", "IA3", "OFT", "BOFT", "HRA", "MISS", "C3A", "LN_TUNING", "TRAINABLE_TOKENS"),
    *("VERA", "ROAD", "WAVEFT", "GRALORA", "DELORA", "PROMPT_TUNING", "PREFIX_TUNING"),
))  # fmt: skip
"""Methods with tensors that are saved as they are in the model; tests compare each with what PEFT itself writes."""


@dataclass(frozen=True, slots=True)
class PlannedAdapter(PlannedConversion):
    """An adapter that is planned but not begun; further attributes as in `PlannedConversion`. `adapter`: its name in
    the checkpoint.
    """

    adapter: str


@public
@dataclass(frozen=True, slots=True, repr=False)
class AdapterReport(Report):
    """What was written; further attributes as in `Report`.

    Attributes:
        adapter: its name in the checkpoint.
        untrained: LoRA matrices that begin as zeros and are still all zeros.
    """

    adapter: str = ""
    untrained: tuple[str, ...] = ()


def to_peft(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    adapter: str | None = None,
    dtype: str | DType = "fp32",
    tag: str | None = None,
    also: Sequence[str | os.PathLike[str]] = (),
    overwrite: bool = False,
    progress: Progress = None,
) -> AdapterReport:
    """Writes the adapter of a checkpoint as a directory that `PeftModel.from_pretrained` loads.

    Args:
        checkpoint: a checkpoint of a PEFT model, with or without the base model's weights.
        out: the directory for `adapter_model.safetensors` and `adapter_config.json`.
        adapter: which one, where there are several.
        dtype: "fp32", "fp16" or "bf16".
        tag: which save, where there are several; by default the one that `latest` names.
        also: directories that hold other parts of the same checkpoint, such as other nodes' disks.
        overwrite: replace an existing output: the files that its `zckpt.json` lists.
        progress: as for `zckpt.convert`, with the bytes written so far.

    Returns:
        What was written, and which of its LoRA matrices are still all zeros.

    Raises:
        UsageError: there is no adapter, or several and none was chosen.
        OutputError: `out` exists, cannot be written, or the disk is full.
        ZckptError: another kind says what is wrong. Whatever is raised, `out` is as it was before.

    Example:
        >>> zckpt.to_peft("lora-run", "adapter/", progress=False).adapter
        'default'
    """
    began = time.perf_counter()
    asked = TO_PEFT.ask(dtype=to_dtype(dtype), adapter=adapter, tag=tag, also=also, overwrite=overwrite)
    planned = prepare(checkpoint, out, asked)
    with watch_progress(progress, planned.plan.bytes_written, "to peft") as watch:
        return replace(carry_out(planned, watch), seconds=time.perf_counter() - began)


def prepare(checkpoint: str | os.PathLike[str], out: str | os.PathLike[str], asked: Asked[Adapter]) -> PlannedAdapter:
    """Plans the adapter's output. Writes nothing."""
    source, place = locate(checkpoint), locate(out)
    whole = open_asked(source, asked)
    opened = find_adapter(whole)
    shielded = protected_places(opened, source, beside=asked.publishing.beside)
    check_path(place, single=False, overwrite=asked.publishing.overwrite, protected=shielded)
    catalog, stripped = strip_wrappers(opened.catalog)
    found = adapters_in(catalog)
    names = ["default"] if is_adapter_file(catalog) else sorted({whose for whose, _ in found.values()})
    adapter = choose_adapter(asked.own.adapter, names, catalog)
    said = config_path(opened, adapter, alone=len(names) == 1)
    copies, left_out = opened.companions()
    if said and not is_own(locate(said), opened.place.home, opened.place.named):
        said, left_out = None, (*left_out, *note_of_links([CONFIG]))
    config = read_adapter_config(said) if said else {}
    _check_method(adapter, found, config, catalog.source.path)
    bias = str(config.get("bias") or "none")
    own, others = only_adapter(catalog, adapter, bias)
    selected = own.tensors
    wanted = [(entry, output_dtype(entry, asked.casting.dtype)) for entry in selected.values()]
    destination = lay_out(wanted, {}, WeightsTarget("safetensors", file=WEIGHTS))
    made = None if said else made_config(opened, adapter, selected, found)
    if said:
        destination = _with_config(destination, locate(said).read())
    elif made:
        destination = _with_config(destination, made[1].encode())
    notes = [*opened.catalog.source.notes, *stripped, *_loose(catalog, found, others), *left_out]
    if not said:
        notes.append(made[0] if made else _without_config(adapter, selected))
    rules = dict.fromkeys(others, "not adapter")
    fates = find_left_out(catalog, selected, asked.selecting, selectable=own.tensors, rules=rules)
    if opened is not whole:
        beside = strip_wrappers(whole.catalog)[0]
        rules = dict.fromkeys(beside.tensors, "not adapter")
        fates = (*fates, *find_left_out(beside, selected, asked.selecting, selectable=own.tensors, rules=rules))
    pairs = [(selected[name], entry) for name, entry in destination.entries.items()]
    form = {"form": {"adapter": adapter, "bias": bias}}
    order = order_for(asked, Plan(destination.files, pairs), place, own, copies, form, fates)
    return PlannedAdapter(opened, order, tuple(notes), asked, adapter)


def carry_out(
    planned: PlannedAdapter,
    progress: Callable[[int], None] | None = None,
    on_note: Callable[[str], None] = lambda note: None,
) -> AdapterReport:
    """Checks, moves and commits, and checks whether the adapter was trained; arguments as for `planned.execute`."""
    report = execute(planned, progress, on_note)
    untrained = tuple(_zeros(planned))
    notes = report.notes
    if untrained:
        notes += (
            f"{count(len(untrained), 'LoRA matrix is', 'LoRA matrices are')} all zeros, without any effect: this adapter was "
            f"not trained, or something else was saved: {examples(untrained)}.",
        )
    return AdapterReport(**{**asdict(report), "notes": notes}, adapter=planned.adapter, untrained=untrained)


def _with_config(destination: LaidOutFiles, text: bytes) -> LaidOutFiles:
    return LaidOutFiles((*destination.files, literal_file(CONFIG, text)), destination.entries)


def _check_method(adapter: str, found: Mapping[str, tuple[str, str]], config: Mapping[str, object], path: str) -> None:
    """Refuses methods with files that are computed from the model's tensors. Raises UnsupportedError if this is one."""
    method = config.get("peft_type")
    ranks = config.get("rank_pattern") if method == "ADALORA" else None
    encoder = [name for name, (whose, saved) in found.items() if whose == adapter and not saved]
    if (method is not None and method not in _TYPES) or ranks or encoder:
        raise UnsupportedError(
            f"the file of adapter {adapter!r} is computed, not copied, by PEFT", file=path,
            found=f"peft_type {method}" + (", with ranks that were pruned" if ranks else "")
            + (f", with {examples(encoder)}" if encoder else ""),
            remedy="Take the whole model with to-fp32, load it into the PEFT model, and save that with save_pretrained.",
        )  # fmt: skip


def _loose(catalog: Catalog, found: Mapping[str, tuple[str, str]], others: Sequence[str]) -> Iterator[str]:
    """A sentence on trained parameters that belong to no adapter."""
    if not catalog.source.zero_stage:
        return
    loose = [name for name in others if name not in found and catalog.tensors[name].role == "parameter"]
    if loose:
        yield f"{len(loose):,} parameters were trained but are of no adapter, and stay out: {examples(loose)}."


def _without_config(adapter: str, selected: Mapping[str, TensorEntry]) -> str:
    """A sentence on the config that a person has to write, with what the tensors tell about it."""
    facts = ""
    ranks = sorted({e.shape[0] for n, e in selected.items() if n.endswith(".lora_A.weight") and e.shape})
    if ranks:
        modules = sorted({n.split(".lora_A.")[0].rpartition(".")[2] for n in selected if ".lora_A." in n})
        facts = f" The tensors say r = {', '.join(map(str, ranks))} and target_modules = {modules}; lora_alpha is not in them."
    return f"There is no {CONFIG} of {adapter!r} beside the checkpoint: PEFT needs one in OUT to load it.{facts}"


def _zeros(prepared: PlannedConversion) -> Iterator[str]:
    """The LoRA matrices that are still zeros. Reading a matrix ends at its first other number."""
    with open(os.path.join(prepared.out, WEIGHTS), "rb") as file:
        for _, entry in prepared.plan.pairs:
            if _BORN_ZERO.fullmatch(entry.name) and entry.fragments:
                file.seek(entry.fragments[0].byte_offset)
                left = entry.nbytes
                while left and not any(block := file.read(min(left, 1 << 16))):
                    left -= len(block)
                if not left:
                    yield entry.name

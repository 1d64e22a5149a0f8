"""From any layout to a directory of torch.distributed.checkpoint, which FSDP loads at any number of ranks.

For `zckpt to-dcp`. Weights are put under one key of the state dict, the optimizer's states under another if they are
wanted; the steps are those of every conversion.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zckpt import layouts
from zckpt.base.errors import OTHER_SAVE, InconsistentError, UsageError
from zckpt.base.progress import Progress
from zckpt.containers import TensorRef
from zckpt.core.catalog import Catalog, usual_dtype
from zckpt.core.dtypes import F32, DType
from zckpt.core.plan import Plan
from zckpt.jobs.casting import output_dtype, to_dtype
from zckpt.jobs.convert import PlannedConversion, order_for
from zckpt.jobs.declarations import TO_DCP, Asked
from zckpt.jobs.groups import Form, Naming
from zckpt.jobs.open import Opened, open_asked, strip_wrappers
from zckpt.jobs.options import Options
from zckpt.jobs.own_groups import Dcp
from zckpt.jobs.planned import Report, carry_out, find_left_out, protected_places
from zckpt.jobs.selection import check_wanted, check_whole, resolve_selection, select
from zckpt.layouts.dcp.metadata import Path
from zckpt.layouts.dcp.state import join_path
from zckpt.layouts.dcp.write import DcpWriter
from zckpt.layouts.run.training import ParameterGroup, Training
from zckpt.layouts.run.values import single_value
from zckpt.layouts.save.companions import config_file, run_files
from zckpt.layouts.save.module_states import whole
from zckpt.layouts.save.trainers import FIRST_MODEL, FIRST_OPTIMIZER, complete_settings
from zckpt.naming.transform import Formed, apply_form
from zckpt.naming.writers import SchemeNames, name_for_writer
from zckpt.output.checks import check_path
from zckpt.storage.location import locate

NO_SCHEDULE = (
    "The Trainer's directory has no scheduler.pt, because DeepSpeed had the schedule in its own files. Without that file the "
    "Trainer loads no optimizer under FSDP: save a new schedule's state there, at the same step."
)


def to_dcp(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: str | DType | None = None,
    under: str = "model",
    optimizer: str | None = None,
    accelerate: bool = False,
    names: str | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    vocab_size: int | None = None,
    tag: str | None = None,
    also: Sequence[str | os.PathLike[str]] = (),
    options: Options | None = None,
    progress: Progress = None,
) -> Report:
    """Writes a checkpoint as a directory that `torch.distributed.checkpoint.load` reads.

    Args:
        checkpoint: as for `zckpt.convert`.
        out: the directory.
        dtype: "fp32", "fp16" or "bf16" for floating parameters; None leaves every tensor as the checkpoint has it.
        under: the state dict's key for the weights, by default what torch's examples and accelerate call it; empty for its top.
        optimizer: its key for the optimizer's states and groups; None leaves them out.
        accelerate: write `pytorch_model_fsdp_0/` and `optimizer_0/`, from which accelerate's `load_state` and transformers'
            `Trainer.train(resume_from_checkpoint=OUT)` go on under FSDP; not together with `under`, `optimizer` or `names`.
        names: the program with the names that the tensors get: "torchtitan", "megatron-core" or another scheme, "hf"
        or "hf:NAME"; None keeps them.
        config: the model's config.json for `names`, if there is none beside the checkpoint.
        vocab_size: words of the vocabulary, behind which the input has rows of padding, for `names`.
        tag: which save, where there are several; by default the one that `latest` names.
        also: directories that hold other parts of the same checkpoint, such as other nodes' disks.
        options: everything else, such as `Options(overwrite=True)`; its dtype is overridden by `dtype`.
        progress: as for `zckpt.convert`, with the bytes written so far.

    Returns:
        What was written: files, tensors, bytes, seconds, and notes for a person.

    Raises:
        UnsupportedError: `optimizer` is given, and the checkpoint has no optimizer states that zckpt reads.
        OutputError: `out` exists (`Options(overwrite=True)` replaces it), cannot be written, or the disk is full.
        ZckptError: another kind says what is wrong. Whatever is raised, `out` is as it was before.

    Example:
        >>> [path for path, nbytes in zckpt.to_dcp("run", "dcp", progress=False).files]
        ['__0_0.distcp', '.metadata', 'config.json', 'generation_config.json']
    """
    asked = (options or Options()).split(
        TO_DCP, dtype=None if dtype is None else to_dtype(dtype), under=under, optimizer=optimizer,
        accelerate=accelerate, names=names, config=config, vocab_size=vocab_size, tag=tag, also=also,
    )  # fmt: skip
    return carry_out(lambda: prepare(checkpoint, out, asked), progress, "to dcp")


def prepare(checkpoint: str | os.PathLike[str], out: str | os.PathLike[str], asked: Asked[Dcp]) -> PlannedConversion:
    """Plans a conversion; arguments as for `to_dcp`. Writes nothing."""
    source, place = locate(checkpoint), locate(out)
    opened = open_asked(source, asked)
    inputs = protected_places(opened, source, beside=asked.publishing.beside, named=(asked.own.config,))
    check_path(place, single=False, overwrite=asked.publishing.overwrite, protected=inputs)
    stripped, notes = strip_wrappers(opened.catalog)
    check_wanted(opened, stripped, asked.selecting)
    form, naming = _rename(stripped, opened, asked)
    asked = replace(asked, naming=naming)
    catalog = form.catalog
    save = other = DcpWriter(asked.own.max_file_bytes)
    if asked.own.accelerate:
        save = DcpWriter(asked.own.max_file_bytes, directory=FIRST_MODEL)
        other = DcpWriter(asked.own.max_file_bytes, directory=FIRST_OPTIMIZER)
    key = _path(asked.own.under)
    for name, entry in catalog.tensors.items():
        save.tensor((*key, name), entry, output_dtype(entry, asked.casting.dtype))
    for dropped, kept in catalog.aliases.items():
        save.again((*key, dropped), (*key, kept))
    optimizer = "optimizer" if asked.own.accelerate else asked.own.optimizer
    if optimizer is not None:
        _add_optimizer(other, _path(optimizer), key, opened, stripped, catalog, asked)
    usual = asked.casting.dtype or usual_dtype(catalog.tensors)
    saves = [save] if other is save else [save, other]
    plan = Plan.of(each.finish() for each in saves).with_files(config_file(opened.config(form.config), usual))
    home = opened.place.home
    copies, said = run_files(home, map(locate, asked.reading.also), named=opened.place.named)
    small, left_out = opened.companions()
    copies = [*small, *copies]
    notes += said + left_out
    fates = find_left_out(
        stripped, form.catalog.tensors, asked.selecting, selectable=stripped.tensors, rules=form.dropped
    )
    order = order_for(asked, plan, place, catalog, copies, form.recorded, fates)
    notes += form.notes
    carried = {name for _, name in copies}
    if asked.own.accelerate and "trainer_state.json" in carried and "scheduler.pt" not in carried:
        notes += (NO_SCHEDULE,)
    return PlannedConversion(opened, order, opened.catalog.source.notes + notes, asked)


def _rename(catalog: Catalog, opened: Opened, asked: Asked[Dcp]) -> tuple[Formed, Naming]:
    """The tensors that are wanted, under the names that are wanted, with the option for the prefix that was found.
    Raises UsageError if the optimizer's states are wanted too, or no scheme is called so.
    """
    names = asked.own.names
    if names is None:
        if asked.own.vocab_size is not None:
            raise UsageError(
                "--vocab-size is of use only with --names", found="--vocab-size without --names",
                remedy="Add --names, or leave out --vocab-size.",
            )  # fmt: skip
        naming, said = resolve_selection(catalog, asked.selecting, asked.naming)
        return Formed(select(catalog, asked.selecting, naming), notes=said), naming
    if asked.own.optimizer is not None:
        raise UsageError(
            "optimizer states would keep names that the weights do not have", found=f"--optimizer with --names {names}",
            remedy="Leave one of these out.",
        )  # fmt: skip
    if names == "hf" or names.startswith("hf:"):
        form = Form(names, asked.own.config, None, asked.own.vocab_size)
        found = apply_form(catalog, opened.place, form, to_directory=True, exclude=asked.selecting.exclude)
        naming, said = resolve_selection(found.catalog, asked.selecting, asked.naming, before=catalog)
        return replace(
            found, catalog=select(found.catalog, asked.selecting, naming), notes=(*found.notes, *said)
        ), naming
    naming, said = resolve_selection(catalog, asked.selecting, asked.naming)
    model = name_for_writer(
        select(catalog, asked.selecting, naming),
        opened.place,
        SchemeNames(names, asked.own.config, vocab_size=asked.own.vocab_size),
    )
    said = (*model.notes, *said)
    return Formed(model.catalog, model.config, said, model.recorded, dropped=model.dropped), naming


def _path(key: str) -> Path:
    parts = tuple(key.split(".")) if key else ()
    if not all(parts):
        raise UsageError(
            f"{key!r} is not a key",
            found="an empty part",
            expected="names separated by single dots, such as model or app.model",
            remedy="Change --under or --optimizer.",
        )
    return parts


def _add_optimizer(
    save: DcpWriter,
    key: Path,
    model_key: Path,
    opened: Opened,
    stripped: Catalog,
    catalog: Catalog,
    asked: Asked[Dcp],
) -> None:
    """Adds the optimizer in the form of `get_optimizer_state_dict`: parameter -> state, and a list of groups. Raises
    UsageError if it would be among the weights, or the weights are not all there under their own names;
    UnsupportedError if the checkpoint has no optimizer that zckpt reads.
    """
    if model_key and (key == model_key[: len(key)] or model_key == key[: len(model_key)]):
        raise UsageError(
            "one of two keys is inside the other",
            found=f"--under {join_path(model_key)}, --optimizer {join_path(key)}",
            remedy="Choose keys side by side, such as --under model --optimizer optim.",
        )
    check_whole(catalog, stripped)
    training = layouts.read_training(opened.place.listing, allow_unknown=asked.reading.allow_unknown_layout)
    names = dict(zip(opened.catalog.tensors, stripped.tensors, strict=True))
    for group in training.groups:
        _add_states(save, key, group, training, names)
    if not key or any(name.startswith(f"{join_path(key)}.") for name in catalog if not model_key):
        raise UsageError(
            "the optimizer would be among the weights",
            found=f"--optimizer {join_path(key)!r}",
            remedy="Pass --under, such as --under model, or another --optimizer.",
        )
    complete = asked.own.accelerate and layouts.family_of(opened.place.listing).tagged
    for number, group in enumerate(training.groups):
        for setting, value in _settings(group, complete=complete).items():
            _add_value(save, (*key, "param_groups", number, setting), value)
        save.value((*key, "param_groups", number, "params"), [names[name] for name in group.names])


def _settings(group: ParameterGroup, *, complete: bool) -> dict[str, object]:
    """A group's settings without its parameters; `complete`: with all that accelerate requires, where DeepSpeed's Adam
    has fewer.
    """
    found = {setting: value for setting, value in group.settings.items() if setting != "params"}
    return complete_settings(found, group.states) if complete else found


def _add_states(
    save: DcpWriter, key: Path, group: ParameterGroup, training: Training, names: Mapping[str, str]
) -> None:
    """Adds each parameter's states; a value for the whole group is in the files once."""
    known: dict[str, Path] = {}
    for name in group.names:
        for state in group.states:
            entry = training.state(name, state)
            save.tensor((*key, "state", names[name], state), entry, entry.dtype)
        for state, value in group.scalars.items():
            path = (*key, "state", names[name], state)
            if state in known:
                save.again(path, known[state])
                continue
            known[state] = path
            if state == "step":
                save.number(path, F32, struct.pack("<f", _number(value)))
            else:
                _add_value(save, path, value)


def _number(value: object) -> float:
    found = single_value(value)
    if not isinstance(found, int | float):
        raise InconsistentError("the step counter is not a number", found=type(found).__name__, remedy=OTHER_SAVE)
    return float(found)


def _add_value(save: DcpWriter, path: Path, value: object) -> None:
    """Adds a setting: a tensor as a tensor, any other value pickled."""
    if isinstance(value, TensorRef):
        save.tensor(path, whole(str(path[-1]), value, "buffer"), value.dtype)
    else:
        save.value(path, value)

"""What is done to a checkpoint's catalog before it is laid out, in steps: each made from one group of options.

For `convert`, and for `verify`, which applies the same steps to the source by the records of a manifest. A step changes names,
rows and dtypes, and never bytes. What a step needs is imported when something asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from zckpt.base.errors import UsageError
from zckpt.base.words import examples, matches
from zckpt.core.ledger import names_unread
from zckpt.jobs.declarations import CONVERT, Asked
from zckpt.jobs.groups import Casting, Form, LoraMerge, Merging, Naming, Selecting, know_family
from zckpt.jobs.open import Opened, strip_wrappers
from zckpt.jobs.opened import WorkingModel, dequantise, opened_as_stored, with_form, working_model
from zckpt.jobs.selection import check_wanted, is_wanted, resolve_selection, select
from zckpt.layouts.save.companions import read_config, read_own_config

ModelStep = Callable[[WorkingModel], WorkingModel]
"""One change of a model; it records in the model what it did."""


def steps_of(asked: Asked[object], *, to_directory: bool, is_read: bool = False) -> tuple[ModelStep, ...]:
    """The steps of a conversion, in the order in which they are applied.

    Args:
        asked: the options.
        to_directory: whether the output is one that `from_pretrained` loads.
        is_read: whether the tensors are numbers already, or are to stay as they are stored.
    """
    lora, base = asked.merging.lora, asked.merging.base
    steps: list[ModelStep] = []
    if not is_read:
        steps.append(partial(take_numbers, keeps_dtypes=asked.casting.dtype is None))
    steps.append(unwrap)
    if lora is None:
        steps.append(partial(take_as_saved, asked=asked, to_directory=to_directory))
    if asked.merging != Merging():
        from zckpt.jobs.merge_steps import complete, merge_given

        steps.append(partial(complete, base=base) if lora is None else partial(merge_given, lora=lora))
    exclude = tuple(asked.selecting.exclude)
    steps.append(partial(reform, form=asked.naming.form, to_directory=to_directory, exclude=exclude))
    steps.append(partial(select_wanted, selecting=asked.selecting, naming=asked.naming))
    if asked.casting.keep_dtype:
        steps.append(partial(check_kept, casting=asked.casting))
    steps.append(partial(check_numbers, asked=asked))
    return (*steps, partial(add_companions, asked=asked)) if to_directory else tuple(steps)


def open_model(opened: Opened) -> WorkingModel:
    """A checkpoint as a model, without what wrappers put into its names."""
    return unwrap(working_model(opened))


def take_numbers(model: WorkingModel, keeps_dtypes: bool) -> WorkingModel:
    """Takes the numbers that quantised tensors stand for; `keeps_dtypes`: in bf16, and not in fp32."""
    opened = dequantise(opened_as_stored(model.catalog, model.place), keeps_dtypes=keeps_dtypes)
    return replace(model, catalog=opened.catalog, opened=opened)


def unwrap(model: WorkingModel) -> WorkingModel:
    """Takes off what wrappers put into the names."""
    catalog, notes = strip_wrappers(model.catalog)
    return replace(model, catalog=catalog, source=catalog, notes=(*model.catalog.source.notes, *notes))


def is_copy(opened: Opened, asked: Asked[object]) -> bool:
    """Whether quantised tensors are copied as they are, and so are as good as what they are copied from."""
    return opened.quantization is not None and asked.casting.dtype is None


def take_as_saved(model: WorkingModel, asked: Asked[object], to_directory: bool) -> WorkingModel:
    """Takes weights as the checkpoint has them: refuses what no later step understands, and notes adapters.

    Args:
        model: as it was opened.
        asked: the options; packed numbers that are wanted are refused, and an adapter alone where a model is written.
        to_directory: as in `reform`.
    """
    catalog = model.catalog
    if not is_copy(model.opened, asked):
        check_wanted(model.opened, catalog, asked.selecting)
    may_be_adapter = to_directory and asked.naming.form == Form()
    if not may_be_adapter and not any(".lora_" in name for name in (*catalog, *catalog.aliases)):
        return model
    from zckpt.naming.adapter_names import is_adapter_file, note_unmerged

    if may_be_adapter and is_adapter_file(catalog):
        raise UsageError(
            "is an adapter of PEFT, and no model", file=model.opened.place.named,
            found=f"tensors such as {examples(catalog)}", expected="a model, or an adapter and its base",
            remedy="Use to-peft, which writes the adapter with its config; or --merge-lora --base MODEL for merged "
            "weights; or give OUT the name of one file.",
        )  # fmt: skip
    note = note_unmerged(catalog)
    return replace(model, notes=(*model.notes, note)) if note else model


def reform(model: WorkingModel, form: Form, to_directory: bool, exclude: tuple[str, ...] = ()) -> WorkingModel:
    """Gives tensors other names and rows.

    Args:
        model: with the names of the checkpoint.
        form: which names and rows.
        to_directory: whether the output is one that `from_pretrained` loads; a single file keeps the model's own names.
        exclude: globs of tensors to leave out, which may have no place in another architecture.
    """
    if form == Form() and "gguf" not in model.catalog.extras:
        return _in_hub_form(model) if to_directory else model
    from zckpt.naming.transform import apply_form

    found = apply_form(model.catalog, model.place, form, to_directory=to_directory, exclude=exclude)
    return replace(
        model, catalog=found.catalog, config=found.config or model.config, notes=(*model.notes, *found.notes),
        recorded=with_form(model.recorded, found.recorded), given_up={**model.given_up, **found.dropped},
        left_out=(*model.left_out, *found.left_out), earlier=tuple(model.catalog),
    )  # fmt: skip


def _in_hub_form(model: WorkingModel) -> WorkingModel:
    """The model under the names that transformers gives it in a save, where its config says that these are others."""
    config = read_config(model.place.home)
    if config is None:
        return model
    from zckpt.naming.hub_form import in_hub_form

    found, notes = in_hub_form(model.catalog, config)
    recorded = {} if found is model.catalog else {"form": {"hub": True}}
    return replace(
        model,
        catalog=found,
        notes=(*model.notes, *notes),
        recorded=with_form(model.recorded, recorded),
        earlier=tuple(model.catalog),
    )


def select_wanted(model: WorkingModel, selecting: Selecting, naming: Naming) -> WorkingModel:
    """Leaves out tensors that are not wanted, and renames the rest."""
    before = model.catalog
    chosen, notes = resolve_selection(before, selecting, naming, before=model.earlier)
    catalog = select(before, selecting, chosen)
    kept = before if selecting == Selecting() else before.select(lambda one: is_wanted(one, selecting))
    dropped = () if kept is before else before.tensors.keys() - kept.tensors.keys() - kept.aliases.keys()
    return replace(
        model, catalog=catalog, notes=(*model.notes, *notes), selectable=before.tensors, naming=chosen,
        left_out=(*model.left_out, *dropped),
    )  # fmt: skip


def take_adapter(model: WorkingModel, adapter: str, bias: str) -> WorkingModel:
    """Leaves one adapter of the model, under PEFT's names; `bias`: which biases belong to it, as its config says."""
    from zckpt.jobs.adapters import find_adapter
    from zckpt.naming.adapter_names import only_adapter

    file = find_adapter(model.opened)
    catalog = model.catalog if file is model.opened else file.catalog
    own, others = only_adapter(catalog, adapter, bias)
    beside = () if file is model.opened else model.catalog.tensors
    return replace(model, catalog=own, left_out=(*model.left_out, *others, *beside))


def write_names(model: WorkingModel, recorded: Mapping[str, Any]) -> WorkingModel:
    """Gives tensors another program's names; `recorded`: the facts of it in a manifest."""
    from zckpt.naming.gguf_tensors import as_read
    from zckpt.naming.writers import GGUF, name_for_writer, naming_of

    if recorded.get("mmproj"):
        from zckpt.naming.gguf_vision import config_of_vision, vision_as_read

        config = recorded.get("config") or read_config(model.place.home)
        config = config_of_vision(model.catalog.tensors, model.place.home, config)
        tensors = vision_as_read(model.catalog.tensors, config, str(recorded["type"]), model.place.home)
        dropped = names_unread(model.catalog, tensors)
        catalog = replace(model.catalog, tensors=tensors, aliases={}, padding=())
        return replace(model, catalog=catalog, left_out=(*model.left_out, *dropped))
    found = name_for_writer(model.catalog, model.place, naming_of(recorded))
    is_gguf = recorded["names"] == GGUF
    catalog = as_read(found.catalog, found.config, recorded) if is_gguf else found.catalog
    return replace(model, catalog=catalog, config=found.config, notes=(*model.notes, *found.notes))


def take_states(model: WorkingModel, selecting: Selecting) -> WorkingModel:
    """Leaves only the optimizer's states that are wanted, and no weight."""
    from zckpt import layouts
    from zckpt.jobs.open import states_of

    opened = Opened(layouts.read(model.place.listing), model.place)
    states = select(states_of(opened).catalog(model.catalog), selecting)
    return replace(model, catalog=states, left_out=(*model.left_out, *model.catalog.tensors))


def check_numbers(model: WorkingModel, asked: Asked[object]) -> WorkingModel:
    """Refuses a model with packed numbers that zckpt does not read, unless they are copied as they are."""
    if not is_copy(model.opened, asked):
        model.opened.check_read(model.catalog.tensors.values())
    return model


def check_kept(model: WorkingModel, casting: Casting) -> WorkingModel:
    """Makes sure that every glob of `keep_dtype` matches a name. Raises UsageError if one does not."""
    for glob in casting.keep_dtype:
        if not any(matches(name, [glob]) for name in model.catalog.tensors):
            raise UsageError(
                f"--keep-dtype {glob!r} matches no tensor", found=f"names such as {examples(model.catalog.tensors)}",
                expected="a pattern that matches a name in the output", remedy="Correct --keep-dtype, or leave it out.",
            )  # fmt: skip
    return model


def add_companions(model: WorkingModel, asked: Asked[object]) -> WorkingModel:
    """Adds what a directory has beside weights, config, tokenizer and the like, and sentences on what a loader makes of it."""
    opened = model.opened
    config = opened.config(model.config)
    notes: tuple[str, ...] = ()
    if asked.selecting == Selecting() and asked.sharding.format in (None, "safetensors"):
        notes = _note_misfits(model, config)
    if opened.other_class:
        notes = (*notes, f"{_OTHER_CLASS} {opened.other_class}, which is written.")
    if model.is_merged:
        from zckpt.quantized.configs import without

        config = read_own_config(model.place.home, model.place.named) if config is None else config
        config = None if config is None else without(config)  # the numbers of a quantised base were taken for the merge
    copies, left_out = opened.companions() if model.copies is None else (model.copies, ())
    return replace(model, config=config, copies=tuple(copies), notes=(*model.notes, *left_out, *notes))


_OTHER_CLASS = "The config names a causal language model; the weights have the head of"


def _note_misfits(model: WorkingModel, config: Mapping[str, object] | None) -> tuple[str, ...]:
    """Sentences on tensors that a loader would miss or ignore, by the config; empty if most names are not the config's."""
    if config is None or model.opened.quantization is not None or model.opened.packed is not None:
        return ()
    from zckpt.naming.fits import find_misfits

    found = find_misfits(model.catalog, config)
    names = len(model.catalog.tensors)
    if found is None or not found.note or 2 * (len(found.missing) + len(found.ignored)) > names:
        return ()
    return (found.note,)


RECORDED = ("include", "exclude", "exclude_frozen", "strip_prefix", "rename", "overflow", "keep_dtype")
"""Fields of groups that a manifest records under their own names, in this order."""

OTHERS = ("wishes", "form", "base", "like", "fp8", "mlx", "states")
"""Other entries of a manifest: how the checkpoint was read, and what steps did."""


def record_of(asked: Asked[object]) -> dict[str, object]:
    """The manifest's record of the options: all that change tensors and differ from the defaults."""
    found: dict[str, object] = {}
    for name in RECORDED:
        group = next(group for group in (asked.selecting, asked.naming, asked.casting) if hasattr(group, name))
        value = getattr(group, name)
        if value and value != getattr(type(group)(), name):
            found[name] = value
    return found | ({} if asked.reading.read_options is None else {"wishes": asked.reading.read_options.as_json()})


def steps_again(recorded: Mapping[str, Any], given: LoraMerge | None) -> tuple[ModelStep, ...]:
    """The steps that made an output, by the record in its manifest.

    Args:
        recorded: the options in the manifest.
        given: the base and the adapters, where they are not in the checkpoint.

    Raises:
        TypeError, ValueError: it records what this version of zckpt does not know.
    """
    options = {name: value for name, value in recorded.items() if name not in OTHERS}
    options |= {"rename": [tuple(pair) for pair in options["rename"]]} if "rename" in options else {}
    asked = CONVERT.ask(**options)
    form = recorded.get("form")
    form = dict(form) if isinstance(form, Mapping) else {}
    lora = form.pop("lora", None)
    know_family(form.get("family"))
    steps: list[ModelStep] = []
    if isinstance(lora, Mapping) or recorded.get("base") is not None:
        from zckpt.jobs.merge_steps import complete, merge_given

        steps += [partial(merge_given, lora=given, recorded=lora)] if isinstance(lora, Mapping) else []
        base = given.base if given else None
        steps += [partial(complete, base=base)] if recorded.get("base") is not None else []
    chosen = partial(select_wanted, selecting=asked.selecting, naming=asked.naming)
    if recorded.get("states") is True:
        return (*steps, partial(take_states, selecting=asked.selecting))
    if "names" in form:  # here options mean the checkpoint's names
        return (*steps, chosen, partial(write_names, recorded=form))
    if "adapter" in form:
        steps.append(partial(take_adapter, adapter=str(form["adapter"]), bias=str(form.get("bias"))))
    elif form:
        wanted = Form(form.get("to"), form.get("config"), form.get("layer_names"), form.get("vocab_size"))
        exclude = tuple(asked.selecting.exclude)
        steps.append(partial(reform, form=wanted, to_directory=form.get("hub") is True, exclude=exclude))
    return (*steps, chosen)

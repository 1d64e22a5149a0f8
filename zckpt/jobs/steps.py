"""What is done to a checkpoint's catalog before it is laid out, in steps: each made from one group of options.

For `convert`, and for `verify`, which applies the same steps to the source by the records of a manifest. A step changes names,
rows and dtypes, and never bytes. What a step needs is imported when something asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UsageError
from zckpt.base.words import examples
from zckpt.core.ledger import names_unread
from zckpt.jobs.declarations import CONVERT, Asked
from zckpt.jobs.groups import Form, LoraMerge, Merging, Naming, Selecting, know_family
from zckpt.jobs.open import Opened, strip_wrappers
from zckpt.jobs.selection import check_wanted, is_wanted, resolve_selection, select
from zckpt.jobs.working_model import WorkingModel, with_form
from zckpt.layouts.save.companions import read_config


class ModelStep(Protocol):
    """One change of a model; it records in the model what it did."""

    def apply(self, model: WorkingModel) -> WorkingModel:
        """The changed model."""
        ...


def steps_of(asked: Asked[object], *, to_directory: bool) -> tuple[ModelStep, ...]:
    """The steps of a conversion, in the order in which they are applied."""
    first: tuple[ModelStep, ...] = (TakeAsSaved(asked, to_directory),)
    if asked.merging != Merging():
        from zckpt.jobs.merge_steps import Complete, Merge

        lora, base = asked.merging.lora, asked.merging.base
        first = (*first, Complete(base)) if lora is None else (Merge(lora),)
    form = Reform(asked.naming.form, to_directory, tuple(asked.selecting.exclude))
    return (*first, form, Select(asked.selecting, asked.naming))


def open_model(opened: Opened) -> WorkingModel:
    """A checkpoint as a model, without what wrappers put into its names."""
    catalog, notes = strip_wrappers(opened.catalog)
    return WorkingModel(catalog, opened.place, opened, notes=(*opened.catalog.source.notes, *notes))


def is_copy(opened: Opened, asked: Asked[object]) -> bool:
    """Whether quantised tensors are copied as they are, and so are as good as what they are copied from."""
    return opened.quantization is not None and asked.casting.dtype is None


@dataclass(frozen=True, slots=True)
class TakeAsSaved:
    """Takes weights as the checkpoint has them: refuses what no later step understands, and notes adapters.

    Attributes:
        asked: the options; packed numbers that are wanted are refused, and an adapter alone where a model is written.
        to_directory: as in `Reform`.
    """

    asked: Asked[object]
    to_directory: bool

    def apply(self, model: WorkingModel) -> WorkingModel:  # noqa: D102
        catalog = model.catalog
        if not is_copy(model.opened, self.asked):
            check_wanted(model.opened, catalog, self.asked.selecting)
        may_be_adapter = self.to_directory and self.asked.naming.form == Form()
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


@dataclass(frozen=True, slots=True)
class Reform:
    """Gives tensors other names and rows.

    Attributes:
        form: which.
        to_directory: whether the output is one that `from_pretrained` loads; a single file keeps the model's own names.
        exclude: globs of tensors to leave out, which may have no place in another architecture.
    """

    form: Form
    to_directory: bool
    exclude: tuple[str, ...] = ()

    def apply(self, model: WorkingModel) -> WorkingModel:  # noqa: D102
        if self.form == Form() and "gguf" not in model.catalog.extras:
            return self._in_hub_form(model) if self.to_directory else model
        from zckpt.naming.transform import apply_form

        found = apply_form(model.catalog, model.place, self.form, to_directory=self.to_directory, exclude=self.exclude)
        return replace(
            model, catalog=found.catalog, config=found.config or model.config, notes=(*model.notes, *found.notes),
            recorded=with_form(model.recorded, found.recorded), given_up={**model.given_up, **found.dropped},
            left_out=(*model.left_out, *found.left_out), earlier=tuple(model.catalog),
        )  # fmt: skip

    def _in_hub_form(self, model: WorkingModel) -> WorkingModel:
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


@dataclass(frozen=True, slots=True)
class Select:
    """Leaves out tensors that are not wanted, and renames the rest."""

    selecting: Selecting
    naming: Naming

    def apply(self, model: WorkingModel) -> WorkingModel:  # noqa: D102
        before = model.catalog
        naming, notes = resolve_selection(before, self.selecting, self.naming, before=model.earlier)
        catalog = select(before, self.selecting, naming)
        kept = before if self.selecting == Selecting() else before.select(lambda one: is_wanted(one, self.selecting))
        dropped = before.tensors.keys() - kept.tensors.keys() - kept.aliases.keys()
        return replace(
            model, catalog=catalog, notes=(*model.notes, *notes), selectable=before.tensors, naming=naming,
            left_out=(*model.left_out, *dropped),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TakeAdapter:
    """Leaves one adapter of the model, under PEFT's names.

    Attributes:
        adapter: its name.
        bias: which biases belong to it, as its config says.
    """

    adapter: str
    bias: str

    def apply(self, model: WorkingModel) -> WorkingModel:  # noqa: D102
        from zckpt.jobs.adapters import find_adapter
        from zckpt.naming.adapter_names import only_adapter

        file = find_adapter(model.opened)
        catalog = model.catalog if file is model.opened else file.catalog
        own, others = only_adapter(catalog, self.adapter, self.bias)
        beside = () if file is model.opened else model.catalog.tensors
        return replace(model, catalog=own, left_out=(*model.left_out, *others, *beside))


@dataclass(frozen=True, slots=True)
class WriteNames:
    """Gives tensors another program's names; attribute: the facts of it in a manifest."""

    recorded: Mapping[str, Any]

    def apply(self, model: WorkingModel) -> WorkingModel:  # noqa: D102
        from zckpt.naming.gguf_tensors import as_read
        from zckpt.naming.writers import GGUF, name_for_writer, naming_of

        if self.recorded.get("mmproj"):
            from zckpt.naming.gguf_vision import config_of_vision, vision_as_read

            config = self.recorded.get("config") or read_config(model.place.home)
            config = config_of_vision(model.catalog.tensors, model.place.home, config)
            tensors = vision_as_read(model.catalog.tensors, config, str(self.recorded["type"]), model.place.home)
            dropped = names_unread(model.catalog, tensors)
            catalog = replace(model.catalog, tensors=tensors, aliases={}, padding=())
            return replace(model, catalog=catalog, left_out=(*model.left_out, *dropped))
        found = name_for_writer(model.catalog, model.place, naming_of(self.recorded))
        is_gguf = self.recorded["names"] == GGUF
        catalog = as_read(found.catalog, found.config, self.recorded) if is_gguf else found.catalog
        return replace(model, catalog=catalog, config=found.config, notes=(*model.notes, *found.notes))


@dataclass(frozen=True, slots=True)
class TakeStates:
    """Leaves only the optimizer's states that are wanted, and no weight."""

    selecting: Selecting

    def apply(self, model: WorkingModel) -> WorkingModel:  # noqa: D102
        from zckpt import layouts
        from zckpt.jobs.open import states_of

        opened = Opened(layouts.read(model.place.listing), model.place)
        states = select(states_of(opened).catalog(model.catalog), self.selecting)
        return replace(model, catalog=states, left_out=(*model.left_out, *model.catalog.tensors))


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
        from zckpt.jobs.merge_steps import Complete, Merge

        steps += [Merge(given, lora)] if isinstance(lora, Mapping) else []
        steps += [Complete(given.base if given else None)] if recorded.get("base") is not None else []
    chosen = Select(asked.selecting, asked.naming)
    if recorded.get("states") is True:
        return (*steps, TakeStates(asked.selecting))
    if "names" in form:  # here options mean the checkpoint's names
        return (*steps, chosen, WriteNames(form))
    if "adapter" in form:
        steps.append(TakeAdapter(str(form["adapter"]), str(form.get("bias"))))
    elif form:
        wanted = Form(form.get("to"), form.get("config"), form.get("layer_names"), form.get("vocab_size"))
        steps.append(Reform(wanted, form.get("hub") is True, tuple(asked.selecting.exclude)))
    return (*steps, chosen)

"""The form that a model's tensors take in an output: under which names, and in which order of rows.

For `convert`, and for `verify`, which must look for the same. Layers of a pipeline get names (`--layer-names`); Megatron's
and GPT-NeoX's models become models of transformers (`--to hf:NAME`); what transformers keeps in another form in memory gets
that of the hub.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zckpt.base.errors import UsageError
from zckpt.core.catalog import Catalog
from zckpt.layouts.places import Place
from zckpt.layouts.save.companions import config_of, read_config
from zckpt.naming.adapter_names import only_adapter
from zckpt.naming.architectures import architecture, as_architecture, heads_of, names
from zckpt.naming.hub_form import in_hub_form
from zckpt.naming.layer_names import read_layer_names, with_layer_names
from zckpt.naming.model_config import check_config, make_config, origin_of, query_heads, run_arguments


@dataclass(frozen=True, slots=True)
class Form:
    """What a person wants to be done to names and rows.

    Attributes:
        to: "hf:gpt-neox", "hf:gpt2" or "hf:llama": the architecture that the tensors are to be in.
        config: the model's config or the path of its `config.json`, where the checkpoint does not say enough to make one.
        layer_names: names for a pipeline's layers, or the path of a file with them.
    """

    to: str | None = None
    config: str | Mapping[str, Any] | None = None
    layer_names: str | Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        """Raises UsageError for an architecture that there is not, before a checkpoint is looked at."""
        if self.to is not None and self.to not in (known := [f"hf:{name}" for name in names()]):
            raise UsageError("an unknown --to", found=repr(self.to), expected=f"{', '.join(known)} are known")


@dataclass(frozen=True, slots=True)
class Formed:
    """A catalog in the form that is wanted.

    Attributes:
        catalog: under its new names.
        config: the config that it then has; None for the one beside the checkpoint, if there is one.
        notes: sentences a person should see.
        recorded: what a manifest has to say so that `formed_again` finds the same.
        left_out: tensors of the checkpoint that are not in it.
    """

    catalog: Catalog
    config: Mapping[str, object] | None = None
    notes: tuple[str, ...] = ()
    recorded: Mapping[str, object] = field(default_factory=dict[str, object])
    left_out: tuple[str, ...] = ()


def matches(name: str, globs: Sequence[str]) -> bool:
    """Whether a name matches one of the globs."""
    return any(fnmatch.fnmatchcase(name, glob) for glob in globs)


def formed(catalog: Catalog, place: Place, form: Form, *, to_directory: bool, exclude: Sequence[str] = ()) -> Formed:
    """The catalog in the form that is wanted.

    Args:
        catalog: what was read.
        place: where.
        form: what is wanted.
        to_directory: whether the output is one that `from_pretrained` loads; a single file keeps the model's own names.
        exclude: globs; what has no place in another architecture can be left out before.

    Raises:
        UsageError: the wishes contradict each other, or name what there is not.
        UnsupportedError, InconsistentError: the tensors cannot be brought into the form.
    """
    if form.layer_names is not None:
        if form.to:
            raise UsageError("two ways to name layers", found="--layer-names and --to", remedy="Leave one of them out.")
        said = form.layer_names
        prefixes = read_layer_names(said) if isinstance(said, str) else said
        return Formed(with_layer_names(catalog, prefixes), recorded={"form": {"layer_names": dict(prefixes)}})
    if form.to is not None:
        return _converted(catalog, place, form.to, form.config, exclude)
    if form.config is not None:
        raise UsageError("a --config without --to", found="--config", remedy="Add --to hf:llama, or leave it out.")
    config = read_config(place.home) if to_directory else None
    if config is None:
        return Formed(catalog)
    found, notes = in_hub_form(catalog, config)
    return Formed(found, notes=notes, recorded={} if found is catalog else {"form": {"hub": True}})


def formed_again(catalog: Catalog, place: Place, recorded: Mapping[str, Any], exclude: Sequence[str] = ()) -> Formed:
    """The form that a manifest says an output of this catalog has; arguments and errors as in `formed`."""
    if "adapter" in recorded:
        own, others = only_adapter(catalog, str(recorded["adapter"]), str(recorded.get("bias")))
        return Formed(own, left_out=others)
    form = Form(recorded.get("to"), recorded.get("config"), recorded.get("layer_names"))
    return formed(catalog, place, form, to_directory=recorded.get("hub") is True, exclude=exclude)


def _converted(
    catalog: Catalog, place: Place, to: str, config: str | Mapping[str, Any] | None, exclude: Sequence[str]
) -> Formed:
    """As another architecture."""
    left_out = tuple(name for name in catalog.tensors if matches(name, exclude))
    catalog = catalog.select(lambda entry: entry.name not in left_out)
    wanted = architecture(to.removeprefix("hf:"))
    given = config_of(config) if isinstance(config, str) else config
    recorded = {"to": to, **({} if given is None else {"config": dict(given)})}
    if given is None:
        beside = read_config(place.home)
        if beside is not None and beside.get("model_type") == wanted.config["fixed"]["model_type"]:
            given = beside
    arguments = run_arguments(catalog, place.listing.directory)
    heads = heads_of(catalog, *query_heads(given or {}, arguments, catalog.source.path))
    vocabulary = (given or {}).get("vocab_size")
    origin = origin_of(catalog, place.listing.wishes.tp_rules or "")
    catalog = as_architecture(catalog, wanted, heads, origin, vocabulary if isinstance(vocabulary, int) else None)
    if given is None:
        given = make_config(wanted, catalog, heads, arguments)
    else:
        check_config(given, wanted, catalog)
    return Formed(catalog, given, recorded={"form": recorded}, left_out=left_out)

"""The names and the order of rows that a model's tensors get in an output.

For `convert`, and for `verify`, which must expect the same. Layers of a pipeline get names (`--layer-names`); Megatron's and
GPT-NeoX's models become models of transformers (`--to hf:NAME`); weights that transformers has in another form in memory get
the form of the hub.
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
    """Options: the names and rows of an output.

    Attributes:
        to: the architecture of the output: "hf:gpt-neox", "hf:gpt2" or "hf:llama".
        config: the model's config or the path of its `config.json`, if the checkpoint does not say enough to make one.
        layer_names: names for a pipeline's layers, or the path of a file with them.
    """

    to: str | None = None
    config: str | Mapping[str, Any] | None = None
    layer_names: str | Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        """Raises UsageError for an unknown architecture, before a checkpoint is opened."""
        if self.to is not None and self.to not in (known := [f"hf:{name}" for name in names()]):
            raise UsageError(
                "the architecture is unknown", found=f"--to {self.to}", expected=f"one of {', '.join(known)}",
                remedy="Pass one of these with --to.",
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Formed:
    """A catalog with the names and rows of the output.

    Attributes:
        catalog: with its new names.
        config: its config; None for the one beside the checkpoint, if there is one.
        notes: sentences for the user.
        recorded: facts for the manifest, from which `formed_again` finds the same.
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
    """The catalog in the form that the options ask for.

    Args:
        catalog: the checkpoint.
        place: where it is.
        form: the options.
        to_directory: whether the output is one that `from_pretrained` loads; a single file keeps the model's own names.
        exclude: globs of tensors to leave out, which may have no place in another architecture.

    Raises:
        UsageError: the options contradict each other, or do not fit the checkpoint.
        UnsupportedError, InconsistentError: the tensors do not fit the form.
    """
    if form.layer_names is not None:
        if form.to:
            raise UsageError(
                "layers would be named twice", found="--layer-names and --to", remedy="Leave one of these out."
            )
        said = form.layer_names
        prefixes = read_layer_names(said) if isinstance(said, str) else said
        return Formed(with_layer_names(catalog, prefixes), recorded={"form": {"layer_names": dict(prefixes)}})
    if form.to is not None:
        return _converted(catalog, place, form.to, form.config, exclude)
    if form.config is not None:
        raise UsageError(
            "--config is of use only with --to",
            found="--config without --to",
            remedy="Add --to, such as --to hf:llama, or leave out --config.",
        )
    config = read_config(place.home) if to_directory else None
    if config is None:
        return Formed(catalog)
    found, notes = in_hub_form(catalog, config)
    return Formed(found, notes=notes, recorded={} if found is catalog else {"form": {"hub": True}})


def formed_again(catalog: Catalog, place: Place, recorded: Mapping[str, Any], exclude: Sequence[str] = ()) -> Formed:
    """The form of an output, by the facts in its manifest; other arguments and errors as in `formed`."""
    if "adapter" in recorded:
        own, others = only_adapter(catalog, str(recorded["adapter"]), str(recorded.get("bias")))
        return Formed(own, left_out=others)
    form = Form(recorded.get("to"), recorded.get("config"), recorded.get("layer_names"))
    return formed(catalog, place, form, to_directory=recorded.get("hub") is True, exclude=exclude)


def _converted(
    catalog: Catalog, place: Place, to: str, config: str | Mapping[str, Any] | None, exclude: Sequence[str]
) -> Formed:
    """The catalog as another architecture."""
    left_out = tuple(name for name in catalog.tensors if matches(name, exclude))
    catalog = catalog.select(lambda entry: entry.name not in left_out)
    wanted = architecture(to.removeprefix("hf:"))
    given = config_of(config) if isinstance(config, str) else config
    recorded = {"to": to, **({} if given is None else {"config": dict(given)})}
    if given is None:
        beside = read_config(place.home)
        if beside is not None and beside.get("model_type") == wanted.config["fixed"]["model_type"]:
            given = beside
    arguments = run_arguments(catalog, place.listing.directory.path)
    heads = heads_of(catalog, *query_heads(given or {}, arguments, catalog.source.path))
    vocabulary = (given or {}).get("vocab_size")
    origin = origin_of(catalog, place.listing.options.tp_rules or "")
    catalog = as_architecture(catalog, wanted, heads, origin, vocabulary if isinstance(vocabulary, int) else None)
    if given is None:
        given = make_config(wanted, catalog, heads, arguments)
    else:
        check_config(given, wanted, catalog)
    return Formed(catalog, given, recorded={"form": recorded}, left_out=left_out)

"""The names and the order of rows that a model's tensors get in an output.

For `convert`, and for `verify`, which must expect the same. Layers of a pipeline get names (`--layer-names`); models of other
writers become Hugging Face models (`--to hf`); weights that transformers has in another form in memory get the hub's.

[Note: layer name files] A JSON object: a layer's number, a range of numbers, or `tied_modules.<key>` -> the new beginning of its
tensors' names, in which `{}` is the layer's number in its range, from 0. Layers that are not listed keep their names.
Example: {"0": "embed", "2-25": "blocks.{}", "27": "", "tied_modules.embed": "embed"}: `2.attn.bias` becomes `blocks.0.attn.bias`,
`27.weight` becomes `weight`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, Protocol

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UsageError
from zckpt.base.words import examples, matches
from zckpt.core.catalog import Catalog
from zckpt.layouts.gguf import METADATA
from zckpt.layouts.places import Place
from zckpt.layouts.save.companions import config_of, find_config, read_config
from zckpt.layouts.save.tied import as_untied, note_on, untied_heads
from zckpt.naming.compose import compose
from zckpt.naming.decompose import decompose_with_origins
from zckpt.naming.facts import facts_of, with_parts
from zckpt.naming.families import by_config, by_parts, check_config, make_config, model_types
from zckpt.naming.gguf_config import config_of_gguf, is_known
from zckpt.naming.hub_form import in_hub_form
from zckpt.naming.schemes import add_family, recorded_family, scheme, scheme_of
from zckpt.naming.vocabulary import recorded_vocabulary


class FormAsked(Protocol):
    """The names and rows that an output is to have: `jobs.groups.Form`."""

    @property
    def to(self) -> str | None: ...  # noqa: D102
    @property
    def config(self) -> str | Mapping[str, Any] | None: ...  # noqa: D102
    @property
    def layer_names(self) -> str | Mapping[str, str] | None: ...  # noqa: D102
    @property
    def vocab_size(self) -> int | None: ...  # noqa: D102
    @property
    def family(self) -> str | Mapping[str, Any] | None: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Formed:
    """A catalog with the names and rows of the output.

    Attributes:
        catalog: with its new names.
        config: its config; None for the one beside the checkpoint, if there is one.
        notes: sentences for the user.
        recorded: facts for the manifest, from which `verify` finds the same.
        left_out: tensors of the checkpoint that are not in it.
        dropped: those that no option left out -> the rule of `core.ledger` that did.
    """

    catalog: Catalog
    config: Mapping[str, object] | None = None
    notes: tuple[str, ...] = ()
    recorded: Mapping[str, object] = field(default_factory=dict[str, object])
    left_out: tuple[str, ...] = ()
    dropped: Mapping[str, str] = field(default_factory=dict[str, str])


def apply_form(
    catalog: Catalog, place: Place, form: FormAsked, *, to_directory: bool, exclude: Sequence[str] = ()
) -> Formed:
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
    if form.to is not None or form.family is not None or is_known(_mapping(catalog.extras.get(METADATA))):
        return _to_transformers(catalog, place, form, exclude)
    if form.vocab_size is not None:
        raise UsageError(
            "--vocab-size is of use only with --to",
            found="--vocab-size without --to",
            remedy="Add --to, such as --to hf, or leave out --vocab-size.",
        )
    if form.config is not None:
        raise UsageError(
            "--config is of use only with --to",
            found="--config without --to",
            remedy="Add --to, such as --to hf, or leave out --config.",
        )
    config = read_config(place.home) if to_directory else None
    if config is None:
        return Formed(catalog)
    found, notes = in_hub_form(catalog, config)
    return Formed(found, notes=notes, recorded={} if found is catalog else {"form": {"hub": True}})


def _to_transformers(catalog: Catalog, place: Place, form: FormAsked, exclude: Sequence[str]) -> Formed:
    """The catalog as a Hugging Face model."""
    to, config = form.to or "hf", form.config
    if form.family is not None and to == "hf":
        to = f"hf:{add_family(form.family)}"
    left_out = tuple(name for name in catalog.tensors if matches(name, exclude))
    catalog = catalog.select(lambda entry: entry.name not in left_out)
    given = config_of(config) if isinstance(config, str) else config
    said: dict[str, object] = {} if given is None else {"config": dict(given)}
    name = to.removeprefix("hf").removeprefix(":")
    notes: tuple[str, ...] = ()
    beside, where = (None, "--config") if given is not None else _config_beside(place)
    if given is None and beside is None and is_known(metadata := _mapping(catalog.extras.get(METADATA))):
        beside, where = config_of_gguf(catalog, metadata, name), "the file"
    known = beside if given is None else given
    if not name and known is not None:
        name, notes = by_config(known, where)
    if beside is not None and name and beside.get("model_type") in model_types(scheme(f"hf-{name}")):
        given = beside
    if heads := untied_heads(catalog, given):
        given = as_untied(given or {})
    directory, rules = place.listing.directory.path, place.listing.options.tp_rules or ""
    source = scheme_of(catalog.tensors, catalog.source.path, prefer=f"hf-{name}")
    facts = facts_of(catalog, given, directory, rules, home=place.home.path, vocab_size=form.vocab_size)
    found = decompose_with_origins(catalog, source, facts)
    said |= recorded_vocabulary(found.facts)
    facts = with_parts(found.facts, found.parts)
    if not name:
        name, notes = by_parts(found.parts, facts, found.origins)
    family = scheme(f"hf-{name}")
    whole = catalog.tensors if source.name == family.name else None
    tensors = compose(found.parts, family, found.facts, found.origins, whole)
    if given is None:
        given = make_config(family, found.parts, facts)
    else:
        check_config(given, family, found.parts, facts)
    recorded = {"form": {"to": f"hf:{name}", **said, **recorded_family(f"hf-{name}")}}
    left_out += found.left_out
    return Formed(tensors, given, (*notes, *found.notes, *note_on(heads)), recorded, left_out, found.rules)


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _config_beside(place: Place) -> tuple[dict[str, object] | None, str]:
    """The `config.json` in or beside a save, and where it is; (None, "") where there is none. Errors as in `read_config`."""
    save = place.listing.directory
    homes = [place.home] if save.is_file() else [place.home, save, save.parent]
    for home in homes:
        if (found := find_config(home)) is not None:
            return found[0], repr(found[1])
    return None, ""


_KEY = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+))?|tied_modules\.[^.]+")
_LAYER = re.compile(r"(?:sequential\.)?(?P<layer>\d+|tied_modules\.[^.]+)\.(?P<local>.+)")


def read_layer_names(path: str) -> dict[str, str]:
    """Reads a file of layer names: layer -> beginning of its names. Raises UsageError if the file cannot be understood."""
    try:
        with open(path, "rb") as file:
            listed = json.load(file)
        found: dict[str, str] = {}
        for key, prefix in listed.items():
            match = _KEY.fullmatch(key)
            if match is None or not isinstance(prefix, str):
                raise ValueError(f"{key!r}: {prefix!r}")
            if match["first"] is None:
                found[key] = prefix
                continue
            first, last = int(match["first"]), int(match["last"] or match["first"])
            if last - first >= 100_000:
                raise ValueError(f"{key!r}: too many layers")
            for layer in range(first, last + 1):
                if str(layer) in found:
                    raise ValueError(f"layer {layer} is listed twice")
                found[str(layer)] = prefix.replace("{}", str(layer - first))
    except OSError as error:
        raise UsageError(
            "the file of layer names cannot be read", file=path, found=error.strerror or str(error),
            remedy="Check the path that is given with --layer-names.",
        ) from error  # fmt: skip
    except (ValueError, AttributeError, RecursionError) as error:
        raise UsageError(
            "the file of layer names is not of the right form", file=path, found=str(error),
            expected='{"0": "embed", "2-25": "blocks.{}", "tied_modules.embed": "embed"}',
            remedy="Write it in this form: layers, or ranges of them, and the new beginnings of their names.",
        ) from error  # fmt: skip
    return found


def with_layer_names(catalog: Catalog, prefixes: Mapping[str, str]) -> Catalog:
    """The catalog with names for its layers, as `read_layer_names` returns them. Raises UsageError if the catalog has
    none of these layers, InconsistentError if two tensors would have the same name.
    """
    layers = {match["layer"] for name in (*catalog, *catalog.aliases) if (match := _LAYER.fullmatch(name))}
    if not layers & prefixes.keys():
        raise UsageError(
            "the layer names fit no layer of this checkpoint", file=catalog.source.path,
            found=f"layers {examples(sorted(prefixes))}",
            expected=f"layers {examples(sorted(layers))}" if layers else f"layers in names such as {examples(catalog)}",
            remedy="List this checkpoint's layers in the file of --layer-names; zckpt inspect prints the names.",
        )  # fmt: skip

    def new_name(name: str) -> str:
        match = _LAYER.fullmatch(name)
        if match is None or match["layer"] not in prefixes:
            return name
        return f"{prefixes[match['layer']]}.{match['local']}".removeprefix(".")

    return catalog.rename(new_name)

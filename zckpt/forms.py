"""The form that a model's tensors take in an output: under which names, and in which order of rows.

For `convert`. Layers of a pipeline get names (`--layer-names`); Megatron's and GPT-NeoX's models become models of transformers
(`--to hf:NAME`); what transformers keeps in another form in memory gets that of the hub.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from zckpt.catalog import Catalog
from zckpt.checkpoint import Opened
from zckpt.errors import UsageError
from zckpt.hub_form import in_hub_form
from zckpt.layouts.architectures import architecture, as_architecture, heads_of, names
from zckpt.layouts.layer_names import with_layer_names
from zckpt.model_config import check_config, make_config, origin_of, query_heads, read_config, run_arguments


@dataclass(frozen=True, slots=True)
class Form:
    """What a person wants to be done to names and rows.

    Attributes:
        to: "hf:gpt-neox", "hf:gpt2" or "hf:llama": the architecture that the tensors are to be in.
        config: path of the model's `config.json`, where the checkpoint does not say enough to make one.
        layer_names: path of a file with names for a pipeline's layers.
    """

    to: str | None = None
    config: str | None = None
    layer_names: str | None = None


@dataclass(frozen=True, slots=True)
class Formed:
    """A catalog in the form that is wanted.

    Attributes:
        catalog: under its new names.
        config: the config that it then has; None for the one beside the checkpoint, if there is one.
        notes: sentences a person should see.
    """

    catalog: Catalog
    config: dict[str, object] | None = None
    notes: tuple[str, ...] = ()


def formed(catalog: Catalog, opened: Opened, form: Form, *, to_directory: bool) -> Formed:
    """The catalog in the form that is wanted.

    Args:
        catalog: what was read.
        opened: where.
        form: what is wanted.
        to_directory: whether the output is one that `from_pretrained` loads; a single file keeps the model's own names.

    Raises:
        UsageError: the wishes contradict each other, or name what there is not.
        UnsupportedError, InconsistentError: the tensors cannot be brought into the form.
    """
    if form.layer_names:
        if form.to:
            raise UsageError("two ways to name layers", found="--layer-names and --to", remedy="Leave one of them out.")
        catalog = with_layer_names(catalog, form.layer_names)
    if form.to is None:
        if form.config:
            raise UsageError("a --config without --to", found=form.config, remedy="Add --to hf:llama, or leave it out.")
        path = os.path.join(opened.place.home, "config.json")
        if not to_directory or form.layer_names or not os.path.isfile(path):
            return Formed(catalog)
        catalog, notes = in_hub_form(catalog, read_config(path))
        return Formed(catalog, None, notes)
    kind, _, name = form.to.partition(":")
    if kind != "hf":
        known = ", ".join(f"hf:{n}" for n in names())
        raise UsageError("an unknown --to", found=repr(form.to), expected=known)
    wanted = architecture(name)
    given = read_config(form.config) if form.config else _own_config(opened, wanted.config["fixed"]["model_type"])
    arguments = run_arguments(catalog, opened.place.listing.directory)
    heads = heads_of(catalog, *query_heads(given or {}, arguments, catalog.source.path))
    vocabulary = (given or {}).get("vocab_size")
    catalog = as_architecture(
        catalog,
        wanted,
        heads,
        origin_of(catalog, opened.place.listing.wishes.tp_rules or ""),
        vocabulary if isinstance(vocabulary, int) else None,
    )
    if given is None:
        return Formed(catalog, make_config(wanted, catalog, heads, arguments))
    check_config(given, wanted, catalog)
    return Formed(catalog, given)


def _own_config(opened: Opened, model_type: str) -> dict[str, object] | None:
    """A config that lies beside the checkpoint already, if it is of this architecture."""
    path = os.path.join(opened.place.home, "config.json")
    config = read_config(path) if os.path.isfile(path) else {}
    return config if config.get("model_type") == model_type else None

"""Finds the adapter in a checkpoint that is meant, its config, and facts about its numbers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from zckpt.base.errors import CorruptError, UsageError
from zckpt.base.words import examples
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.engine.elements import ElementReader, elements
from zckpt.jobs.open import Opened, open_catalog
from zckpt.layouts.save.companions import read_config
from zckpt.naming.adapter_names import Found, found_in, is_adapter_file
from zckpt.naming.adapter_weights import AdapterWeights
from zckpt.naming.facts import facts_of
from zckpt.naming.foreign_adapters import META, config_of_meta, in_peft_form, is_foreign
from zckpt.storage.json_files import read_json

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_AT_ONCE = 1 << 20
"""Elements of an adapter that are read together."""


def choose_adapter(adapter: str | None, names: Sequence[str], catalog: Catalog) -> str:
    """The adapter to write. Raises UsageError if there is none, or none of that name, or several."""
    if not names:
        raise UsageError(
            "the checkpoint has no adapter", file=catalog.source.path,
            found=f"{len(catalog):,} tensors such as {examples(catalog)}",
            expected="names with 'lora_A.<adapter>', 'modules_to_save.<adapter>' or the like",
            remedy="Use to-bf16 for the whole model.",
        )  # fmt: skip
    if adapter is None and len(names) > 1:
        raise UsageError(
            "the checkpoint has several adapters", file=catalog.source.path, found=", ".join(map(repr, names)),
            remedy=f"Choose one of them, such as --adapter {names[0]}.",
        )  # fmt: skip
    if adapter is not None and adapter not in names:
        raise UsageError(
            f"there is no adapter {adapter!r}",
            file=catalog.source.path,
            found=", ".join(map(repr, names)),
            remedy="Pass one of these with --adapter.",
        )
    return adapter or names[0]


def find_adapter(opened: Opened) -> Opened:
    """The adapter by PEFT's names; in a directory with a model too, as torchtune's epochs are, that of `adapter_model.*`.

    Raises:
        IncompleteError: an adapter of torchtune or Megatron Bridge without what says how many heads its model has.
        UnsupportedError: an adapter of theirs for which there are no rules.
    """
    names = {name for name in opened.catalog if found_in(name)}
    directory = opened.place.listing.directory
    if is_foreign(opened.catalog):
        facts = facts_of(opened.catalog, read_config(opened.place.home), directory.path)
        return replace(opened, catalog=in_peft_form(opened.catalog, facts))
    if names or is_adapter_file(opened.catalog) or not (directory / CONFIG).is_file():
        return opened
    files = (directory / name for name in (WEIGHTS, "adapter_model.bin"))
    return next((open_catalog(file) for file in files if file.is_file()), opened)


def config_path(opened: Opened, adapter: str, *, alone: bool) -> str | None:
    """The path of the adapter's `adapter_config.json`, which is in a sub-directory of its name for any but the default
    one.
    """
    homes = dict.fromkeys((opened.place.home, opened.place.listing.directory))
    places = [home / adapter / CONFIG for home in homes if os.path.basename(adapter) == adapter]
    if alone or adapter == "default":
        places += [home / CONFIG for home in homes]
    return next((place.path for place in places if place.is_file()), None)


def read_adapter_config(path: str) -> Mapping[str, object]:
    """The contents of an `adapter_config.json`. Raises CorruptError if it is not a JSON object."""
    config = read_json(path, 16 << 20, f"an {CONFIG}")
    if not isinstance(config, dict):
        raise CorruptError(f"{CONFIG} is not an object", file=path, found=type(config).__name__)
    return config


def made_config(
    opened: Opened, adapter: str, selected: Mapping[str, TensorEntry], found: Mapping[str, Found]
) -> tuple[str, str] | None:
    """A sentence and a config, from what verl or Bridge keeps of a LoRA; None for nothing. Errors as in `config_of_meta`."""
    path = opened.place.listing.directory / META
    config = opened.catalog.extras.get("run_config")
    run = config.get("peft") if isinstance(config, Mapping) else None
    if isinstance(run, Mapping):  # of Megatron Bridge
        meta: object = {**run, "r": run.get("dim"), "lora_alpha": run.get("alpha"), "task_type": "CAUSAL_LM"}
        name, file = "run_config.yaml", opened.place.listing.directory.path
    elif path.is_file():
        meta, name, file = read_json(path.path, 1 << 20, f"a {META}"), META, path.path
    else:
        return None
    whole = [name for name, it in found.items() if it.adapter == adapter and ".modules_to_save." in name]
    made = config_of_meta(meta, file, selected, whole, opened.catalog)
    note = f"{CONFIG} is made from {name!r} and the tensors: it names no base model, and no lora_dropout."
    return note, json.dumps(made, indent=2) + "\n"


def looked_at(adapter: AdapterWeights) -> tuple[str, int, list[str]]:
    """Reads an adapter: a SHA-256 of it and the tensors beside it, how many tensors begin as zeros, and names of those
    still zero.
    """
    from hashlib import sha256

    begin_as_zeros = {(one.a if one.embedding else one.b).name: None for one in adapter.factors.values()}
    zeros: list[str] = []
    digest = sha256()
    with ElementReader() as reader:
        for name, entry in sorted((*adapter.tensors.items(), *adapter.beside.items())):
            digest.update(repr((name, entry.dtype.name, entry.shape)).encode("utf-8", "surrogatepass"))
            is_zero = entry.name in begin_as_zeros
            for start in range(0, entry.numel, _AT_ONCE):
                data = reader.read(elements(entry, start, min(entry.numel, start + _AT_ONCE)))
                digest.update(data if sys.byteorder == "little" else _swap_bytes(data, entry))
                is_zero = is_zero and data.count(0) == len(data)
            if is_zero:
                zeros.append(name)
    return digest.hexdigest(), len(begin_as_zeros), zeros


def _swap_bytes(data: bytes, entry: TensorEntry) -> bytes:
    width = entry.dtype.itemsize
    return b"".join(data[at : at + width][::-1] for at in range(0, len(data), width))

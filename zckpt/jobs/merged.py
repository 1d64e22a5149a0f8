"""A checkpoint with its adapters merged: which base, which adapters, and what the merged model is made from.

For `convert`, and for `verify`, which must expect the same. Adapters come from the checkpoint or from directories of PEFT, base
weights from the checkpoint or from `--base`; `naming.merge` says what the merged weights are.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import get_args

from zckpt.base.errors import IncompleteError, UsageError
from zckpt.base.words import count, examples, join_words
from zckpt.core.catalog import Catalog, TensorEntry, replace_name
from zckpt.core.ledger import TrainedTensor
from zckpt.jobs.adapters import (
    CONFIG,
    check_copies,
    choose_adapter,
    config_path,
    find_adapter,
    looked_at,
    made_config,
    read_adapter_config,
    trained_in,
    trained_with,
    without_copies,
)
from zckpt.jobs.groups import Combination, LoraMerge
from zckpt.jobs.open import Opened, open_catalog, strip_wrappers
from zckpt.jobs.opened import WorkingModel, with_form
from zckpt.layouts.save.companions import companions, read_config
from zckpt.naming.adapter_names import adapters_in, found_in, is_adapter_file, only_adapter
from zckpt.naming.adapter_weights import AdapterWeights, bare
from zckpt.naming.hub_form import in_form
from zckpt.naming.merge import base_of, merge_adapters
from zckpt.naming.merged_config import change_config
from zckpt.storage.location import Location, locate

_WEIGHTED = re.compile(r"(?P<path>.+):(?P<weight>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)")
_HUB_NAME = re.compile(r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?")


def merge(model: WorkingModel, lora: LoraMerge) -> WorkingModel:
    """The model with adapters merged.

    Args:
        model: with the checkpoint's tensors, under the model's own names.
        lora: which adapters, on which base.

    Raises:
        UsageError: there is no adapter, or it is not said which; or the base is not there.
        IncompleteError: base weights are missing, or an adapter was never trained.
        ZckptError: another kind says what does not fit.
    """
    opened, catalog = model.opened, model.catalog
    base = None if lora.base is None else open_base(lora.base)
    beside: Iterable[str] = ()
    if base is None:
        opened.check_read(catalog.tensors.values())
    else:
        catalog = opened.without_packed(catalog)
        if not lora.adapters and (file := find_adapter(opened)) is not opened:
            beside, opened, catalog = catalog, file, strip_wrappers(file.catalog)[0]
    adapters, others = _adapters(opened, catalog, lora, with_base=base is None)
    own = replace(catalog, tensors={}, aliases={}) if is_adapter_file(catalog) else base_of(catalog)
    weights = own if base is None else base_of(strip_wrappers(base.catalog)[0])
    changes = [f"{bare(module)}.weight" for one in adapters for module in (*one.factors, *one.products)]
    weights, undo = in_form(weights, [*changes, *(name for one in adapters for name in one.whole)])
    trained = {} if base is None or is_adapter_file(catalog) else trained_in(catalog, weights)
    config = read_config((base or opened).place.home)
    notes: list[str] = []
    with_files: list[AdapterWeights] = []  # and without copies of the base's tensors
    for adapter in adapters:
        other = next((one for one in others if one.place.listing.directory.path == adapter.file), None)
        there, sentences = ({}, []) if other is None else trained_with(adapter, other, weights)
        with_files.append(replace(without_copies(adapter, weights, config), beside=there))
        notes += sentences
    replaced = {name for adapter in with_files for name in (*adapter.whole, *adapter.beside)}
    beneath = {} if is_adapter_file(catalog) else {name: bare(name) for name in catalog.tensors if not found_in(name)}
    given_up = {
        name: "base" for name, its in beneath.items() if base is not None and its in weights and its not in trained
    }
    given_up |= {name: "whole" for name, its in beneath.items() if its in replaced}
    given_up |= {name: "base" for name in beside if name in weights} | {n: "whole" for n in beside if n in replaced}
    if base is None:
        _check_base(weights, adapters, opened)
    combined = _combine(with_files, lora)
    found = merge_adapters(weights, combined, config, trained, opened.place.listing.directory.path)
    check_copies(found.copies, adapters)
    unused = {id(copy.fragments): "copy" for copy, _ in found.copies}
    for adapter, kept in zip(adapters, with_files, strict=True):
        unused |= {id(entry.fragments): "base" for n, entry in adapter.tensors.items() if n not in kept.tensors}
    given_up |= {
        n: unused[id(entry.fragments)] for n, entry in catalog.tensors.items() if id(entry.fragments) in unused
    }
    mine = {one.name for one in adapters if one.file == opened.place.listing.directory.path}
    given_up |= {n: "adapter" for n in catalog if (it := found_in(n)) and it[0] not in mine}
    given_up |= {name: "class" for name, its in beneath.items() if its in found.dropped}
    notes += found.notes
    recorded: list[object] = []
    for adapter, with_more in zip(adapters, with_files, strict=True):
        digest, begin_as_zeros, empty = looked_at(replace(adapter, beside=with_more.beside))
        if (
            empty
            and len(empty) == begin_as_zeros
            and not (with_more.whole or with_more.beside or with_more.tokens)
            and not lora.allow_untrained
        ):
            raise IncompleteError(
                f"adapter {adapter.name!r} changes nothing: it was not trained, or something else was saved", file=adapter.file,
                found=f"{count(len(empty), 'matrix', 'matrices')} of zeros, such as {examples(empty)}",
                expected="numbers other than zero",
                remedy="Use the save of a trained adapter, or pass --allow-untrained to merge it all the same.",
            )  # fmt: skip
        if empty:
            notes.append(
                f"{count(len(empty), 'matrix', 'matrices')} of adapter {adapter.name!r} held zeros alone: {examples(empty)}."
            )
        inside = adapter.file == opened.place.listing.directory.path
        recorded.append({"in_checkpoint": inside, **_facts(adapter, digest)})
    said = join_words([repr(one.name) + ("" if one.weight == 1 else f" times {one.weight:g}") for one in adapters])
    changed = [name for name in found.changed if name not in trained]
    notes.insert(0, f"Adapter {said}: merged into {count(len(changed), 'tensor')} of the base model.")
    home = (base or opened).place.home
    notes += (note for one in adapters if base or one.file not in mine for note in _other_base(one, home))
    if trained:
        notes.append(
            f"{count(len(trained), 'tensor')} trained beside the adapters: written too, such as {examples(trained, 1)}."
        )
    if unmerged := sorted({whose for whose, _ in adapters_in(catalog).values()} - {one.name for one in adapters}):
        notes.append(f"{examples(unmerged)}: in the checkpoint, and not merged, since --adapter does not name it.")
    facts: dict[str, object] = {
        "adapters": recorded,
        "base": None if base is None else base.catalog.source_facts(),
        **({} if lora.combine is None else {"combine": lora.combine, "density": lora.density}),
    }
    places = {
        one.place.home: one.place.named for one in (*([base] if base else []), opened, *others[: len(others) == 1])
    }
    copies: dict[str, Location] = {}
    for home, named in places.items():
        small, more = companions(home, named)
        copies |= {name: file for file, name in small}
        notes += more
    place = opened.place if base is None else replace(opened.place, home=base.place.home, named=base.place.named)
    read = (catalog, *([weights] if base is not None else ()), *(one.catalog for one in others))
    views = tuple(view for one in read for view in one.views)
    whole = Catalog({}, opened.catalog.source, opened.catalog.evidence, views=views)
    sources = [weights, *(replace(whole, tensors=one.tensors) for one in adapters)]
    merged = undo(found.catalog)
    tensors, aliases = merged.tensors, merged.aliases
    is_other = bool(found.untied or found.kind or found.rows is not None)
    changed_config = None
    if config is not None and is_other:
        changed_config = change_config(
            config, untied=bool(found.untied), kind=found.kind, tensors=tensors, rows=found.rows
        )
    return replace(
        model,
        catalog=replace(catalog, tensors=tensors, aliases=aliases, padding=(), views=views),
        place=place,
        config=changed_config,
        notes=(*model.notes, *notes),
        recorded=with_form(model.recorded, {"form": {"lora": facts}}),
        copies=tuple((file, name) for name, file in sorted(copies.items())),
        sources=tuple(sources),
        made_from=(*([base] if base else []), *(one for one in others if one is not opened)),
        given_up={**model.given_up, **given_up},
        trained=tuple(_list_trained(adapters, with_files, trained, unused)),
        is_merged=True,
    )


def _other_base(adapter: AdapterWeights, home: Location) -> Iterator[str]:
    """A sentence on an adapter that was trained on a model of another name than the directory of the base: shapes may be equal.

    In the hub's cache a directory is called `models--OWNER--NAME`.
    """
    said = adapter.config.get("base_model_name_or_path")
    name = said.rstrip("/").rpartition("/")[2].lower() if isinstance(said, str) else ""
    parts = {part.rpartition("--")[2].lower() for part in home.resolved().path.split("/")}
    if name and name not in parts:
        yield (
            f"Adapter {adapter.name!r} says that it was trained on {said!r}; it is merged into {home.name!r}. "
            "If that is another model, so is the result: equal shapes do not show it."
        )


def _combine(adapters: list[AdapterWeights], lora: LoraMerge) -> list[AdapterWeights]:
    """The adapters, or one that combines them. Raises ZckptError if they cannot be combined so."""
    if lora.combine is None:
        if lora.density is not None:
            raise UsageError(
                "--density is of use only with --combine", found="no --combine", remedy="Add --combine ties."
            )
        return adapters
    from zckpt.naming.combined import combine

    return [combine(adapters, lora.combine, lora.density)]


def _list_trained(
    adapters: Sequence[AdapterWeights],
    with_files: Sequence[AdapterWeights],
    trained: Mapping[str, TensorEntry],
    unused: Mapping[int, str],
) -> Iterator[TrainedTensor]:
    """The tensors of adapters and those beside them, with how each is used, or why it is not."""
    for adapter, with_more in zip(adapters, with_files, strict=True):
        each = (dict.fromkeys(map(id, found.values()), how) for found, how in (
            (adapter.tokens, "rows"), (adapter.whole, "whole"), (adapter.twice, "whole"),
        ))  # fmt: skip
        hows = {number: how for one in each for number, how in one.items()}
        for name, entry in (*adapter.tensors.items(), *with_more.beside.items()):
            why = unused.get(id(entry.fragments), "original" if ".original_module." in name else "")
            how = "whole" if name in with_more.beside else hows.get(id(entry), "merged")
            yield TrainedTensor(adapter.name, replace_name(entry, name), how, why)
    for name, entry in trained.items():
        yield TrainedTensor("", replace_name(entry, name), "whole")


def lora_again(opened: Opened, facts: Mapping[str, object], lora: LoraMerge | None) -> LoraMerge:
    """Which adapters, on which base, an output with these facts of the merge in its manifest was made from. `lora`: those
    that are not in the checkpoint. Raises UsageError if it is not said where they are.
    """
    is_alone = is_adapter_file(find_adapter(opened).catalog)
    recorded = facts.get("adapters")
    adapters = [one for one in recorded if isinstance(one, dict)] if isinstance(recorded, list) else []
    weights = [weight if isinstance(weight := one.get("weight"), float) else 1.0 for one in adapters]
    both = zip(adapters, weights, strict=True)
    inside = [(str(one.get("name")), weight) for one, weight in both if one.get("in_checkpoint")]
    given = lora or LoraMerge()
    needs = [name for name, lacks in (
        ("--base", facts.get("base") is not None and given.base is None),
        ("--adapter", len(inside) < len(adapters) and not given.adapters and not is_alone),
    ) if lacks]  # fmt: skip
    if needs:
        raise UsageError(
            "the output was merged of more than the checkpoint", file=opened.place.listing.directory,
            found=f"no {join_words(needs)}", expected="the same base and adapters as when it was made",
            remedy=f"Pass {join_words(needs)} as to the command that made it.",
        )  # fmt: skip
    if not given.adapters and not is_alone:
        given = replace(given, adapters=tuple(inside))
    density = facts.get("density")
    how = next((one for one in get_args(Combination) if one == facts.get("combine")), None)
    return replace(given, allow_untrained=True, combine=how, density=density if isinstance(density, float) else None)


def _facts(adapter: AdapterWeights, digest: str) -> dict[str, object]:
    """The facts of an adapter for the manifest."""
    keys = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")
    config = {key: adapter.config[key] for key in keys if adapter.config.get(key)}
    return {"name": adapter.name, "weight": adapter.weight, **config, "tensors": len(adapter.tensors), "sha256": digest}


def _check_base(weights: Catalog, adapters: Sequence[AdapterWeights], opened: Opened) -> None:
    """Checks that there are base weights. Raises IncompleteError if there are none, and `--base` was not given."""
    first = next((one for one in adapters if one.factors or one.tokens), None)
    if first is None or weights.tensors.keys() & {
        f"{bare(module)}.weight" for module in (*first.factors, *first.tokens)
    }:
        return
    if any(name.startswith(f"{bare(module)}.") for module in first.factors for name in weights.tensors):
        return
    named = first.config.get("base_model_name_or_path")
    base = str(named) if named else "MODEL"
    module = next(iter((*first.factors, *first.tokens)))
    raise IncompleteError(
        f"the base model's weights are missing, such as {bare(module) + '.weight'!r}", file=opened.place.listing.directory,
        found=f"{count(len(weights.tensors), 'tensor')} beside the adapters", expected="the weights that they were trained on",
        remedy=f"Pass them with --base {base}, or write the adapter alone with to-peft.",
    )  # fmt: skip


def open_base(base: str | os.PathLike[str]) -> Opened:
    """The base model: a directory of weights in any layout, or a model in the local cache of the hub. Raises UsageError
    if it is neither, or it has adapters itself.
    """
    place = locate(find_model(os.fspath(base)))
    opened = open_catalog(place)
    opened.check_read(opened.catalog.tensors.values())
    if found := next((name for name in opened.catalog if found_in(name) or ".lora_A." in name), None):
        raise UsageError(
            "the base model has adapters itself", file=place, found=repr(found), expected="weights without adapters",
            remedy="Pass with --base the model that the adapters were trained on, or merge these first.",
        )  # fmt: skip
    return opened


def find_model(name: str, what: str = "the base model", said: str = "--base") -> str:
    """The path of a model: `name` itself, or its directory in the hub's cache on this machine; nothing is downloaded.
    Raises UsageError if it is not there, which says `what` it is and in which option it was `said`.
    """
    if locate(name).is_dir() or locate(name).is_file():
        return name
    found = _HUB_NAME.fullmatch(name)
    reason = "no such file or directory"
    if found:
        import huggingface_hub

        try:
            return str(
                huggingface_hub.snapshot_download(found["name"], revision=found["revision"], local_files_only=True)
            )
        except Exception as error:  # whatever the hub's client raises
            reason = f"{reason}, and no such model in the local cache ({type(error).__name__})"
    raise UsageError(
        f"{what} is not here", file=name, found=reason,
        expected="a directory of weights, or the name of a model in the hub's cache on this machine",
        remedy=f"Correct {said}, or fetch the model first with `hf download`.",
    )  # fmt: skip


def _adapters(
    opened: Opened, catalog: Catalog, lora: LoraMerge, *, with_base: bool
) -> tuple[list[AdapterWeights], list[Opened]]:
    """The adapters to merge, in order, and the checkpoints of those in directories of their own."""
    found = adapters_in(catalog)
    names = sorted({whose for whose, _ in found.values()})
    if not lora.adapters:
        if not names and is_adapter_file(catalog):
            return [_of_directory(opened, catalog, 1.0)], [opened]
        return [
            _of_checkpoint(opened, catalog, found, choose_adapter(None, names, catalog), 1.0, with_base=with_base)
        ], []
    adapters: list[AdapterWeights] = []
    others: list[Opened] = []
    if is_adapter_file(catalog):
        raise UsageError(
            "the checkpoint is an adapter itself", file=opened.place.listing.directory, found="--adapter beside it",
            remedy="Pass the base model as CKPT, and each adapter with --adapter.",
        )  # fmt: skip
    for said in lora.adapters:
        path, weight = _parse_weight(said, names)
        if path in names:
            adapters.append(_of_checkpoint(opened, catalog, found, path, weight, with_base=with_base))
            continue
        other = _opened_adapter(path, names)
        own, _ = strip_wrappers(other.catalog)
        there = adapters_in(own)
        if there:
            name = choose_adapter(None, sorted({whose for whose, _ in there.values()}), own)
            adapters.append(
                replace(_of_checkpoint(other, own, there, name, weight, with_base=False), name=other.place.home.name)
            )
        else:
            adapters.append(_of_directory(other, own, weight))
        others.append(other)
    return adapters, others


def _parse_weight(
    said: str | os.PathLike[str] | tuple[str | os.PathLike[str], float], names: Sequence[str]
) -> tuple[str, float]:
    """The path or name of an adapter, and its weight, from `out/style:0.5` or a pair."""
    if isinstance(said, tuple):
        return os.fspath(said[0]), float(said[1])
    text = os.fspath(said)
    match = _WEIGHTED.fullmatch(text)
    if match is None or text in names or locate(text).is_dir() or locate(text).is_file():
        return text, 1.0
    return match["path"], float(match["weight"])


def _opened_adapter(path: str, names: Sequence[str]) -> Opened:
    place = locate(path)
    if not place.is_dir() and not place.is_file():
        raise UsageError(
            "there is no such adapter", file=path, found=f"{examples(names) or 'none'} in the checkpoint",
            expected="a directory with adapter_model.safetensors, or the name of an adapter of the checkpoint",
            remedy="Correct --adapter.",
        )  # fmt: skip
    return find_adapter(open_catalog(place))


def _of_checkpoint(
    opened: Opened, catalog: Catalog, found: Mapping[str, tuple[str, str]], name: str, weight: float, *, with_base: bool
) -> AdapterWeights:
    """An adapter in a checkpoint of a PEFT model. Raises IncompleteError if there is no config of it."""
    names = {whose for whose, _ in found.values()}
    path = config_path(opened, name, alone=len(names) == 1)
    where = opened.place.listing.directory.path
    if path is not None:
        config: Mapping[str, object] = read_adapter_config(path)
        own, _ = only_adapter(catalog, name, str(config.get("bias") or "none"))
    else:
        own, _ = only_adapter(catalog, name)
        made = made_config(opened, name, own.tensors, found)
        if made is None:
            raise _no_config(name, where, opened.place.home.path)
        config = json.loads(made[1])
    return AdapterWeights(name, where, own.tensors, config, path or where, weight, with_base)


def _no_config(name: str, where: str, home: str) -> IncompleteError:
    return IncompleteError(
        f"there is no {CONFIG} of adapter {name!r}", file=where, found="its tensors alone, which do not say lora_alpha",
        expected=f"{CONFIG} in {home}", remedy="Save the run's LoraConfig there, with its save_pretrained.",
    )  # fmt: skip


def _of_directory(opened: Opened, catalog: Catalog, weight: float) -> AdapterWeights:
    """An adapter as PEFT saves it."""
    home = opened.place.home
    file = opened.place.listing.directory.path
    config = next(
        (place for place in (home / CONFIG, opened.place.listing.directory / CONFIG) if place.is_file()), None
    )
    if config is None and (made := made_config(opened, home.name, catalog.tensors, {})) is not None:
        return AdapterWeights(home.name, file, dict(catalog.tensors), json.loads(made[1]), file, weight)
    if config is None:
        raise _no_config(home.name, file, home.path)
    return AdapterWeights(home.name, file, dict(catalog.tensors), read_adapter_config(config.path), config.path, weight)

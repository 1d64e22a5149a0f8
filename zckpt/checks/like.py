"""Would a loader find every tensor of a model in weights? By headers and a config alone: `verify OUT --like MODEL`.

For `verify`. The reference is, in this order: transformers' own classes on the meta device, where it is installed and knows the
model; the headers of MODEL's own weights; shapes that zckpt knows by formula; the family's scheme of names. No element is read.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from zckpt.base.errors import (
    COPY_AGAIN,
    CorruptError,
    IncompleteError,
    InconsistentError,
    NotACheckpointError,
    UnsupportedError,
    UsageError,
    ZckptError,
)
from zckpt.base.words import count, examples
from zckpt.checks.on_meta import load_on_meta
from zckpt.checks.verdict import Check
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.jobs.groups import Reading
from zckpt.jobs.open import find_save, open_catalog, open_place
from zckpt.jobs.opened import Opened, dequantise
from zckpt.layouts.plain import PATTERNS
from zckpt.layouts.plain.files import named_data
from zckpt.layouts.save.companions import config_of, find_config, other_class
from zckpt.layouts.save.weight_files import is_weights
from zckpt.naming.fits import Misfits, compare_shapes, find_misfits
from zckpt.storage import fsspec_io
from zckpt.storage.json_files import check_size, read_json
from zckpt.storage.location import Location

_NO_NAMES = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "quantization_config")
"""Keys of a config without meaning for the tensors' names and shapes."""


class Likeness(NamedTuple):
    """What was found.

    Attributes:
        checks: the questions and answers.
        loads_as: the class that loads the weights, and by what that is known; empty where it does not.
        notes: sentences for a person.
        facts: all names, for programs.
    """

    checks: tuple[Check, ...]
    loads_as: str
    notes: tuple[str, ...]
    facts: Mapping[str, object]


def examine_likeness(out: Location, like: Location, reading: Reading) -> tuple[Catalog | None, Likeness]:
    """Whether a loader of MODEL finds every tensor in weights, and nothing else; and their catalog, where they can be read.

    Args:
        out: the weights.
        like: a model's directory, its config.json, or the address of one.
        reading: how the weights are read.

    Raises:
        NotACheckpointError: MODEL is not a model. UsageError: the weights are not plain ones.
        UnsupportedError: nothing says what the model's tensors are.
    """
    config, home = _read_model(like)
    try:
        opened = open_catalog(out, reading, as_stored=True)
    except (IncompleteError, InconsistentError, CorruptError) as error:
        try:  # what OUT's own config.json misses is missed below, by name
            opened = open_place(find_save(out, reading), replace(reading, as_part=True), as_stored=True)
        except ZckptError:
            return None, Likeness((Check("files", "", (str(error),)),), "", (), _facts(None))
    if opened.catalog.source.layout != "plain":
        raise UsageError(
            "is not a set of weights that a loader of models takes", file=out, found=f"the layout {opened.catalog.source.layout}",
            expected="a directory of safetensors or .bin files", remedy="Convert it, and give the output.",
        )  # fmt: skip
    checks = [_check_files(opened, out)]
    notes: list[str] = []
    tensors = _list_stored(opened)
    scales = Check("scales", "each quantised weight has its scales")
    try:
        plain = dequantise(opened)
        if plain is not opened and plain.catalog is not opened.catalog:
            tensors = _list_stored(plain)
            checks.append(scales)
    except ZckptError as error:
        checks.append(replace(scales, problems=(str(error),)))
    theirs = functools.cache(lambda: _own_shapes(home, as_stored=opened.packed is not None))
    loaded = _load(config, tensors, opened, theirs)
    if loaded.in_memory:
        loaded = loaded._replace(in_memory=[name for name in loaded.in_memory if name not in theirs()])
    checks += _as_checks(loaded, tensors, config)
    checks += _check_config(opened, config, tensors)
    if opened.place.listing.directory.is_dir() and find_config(opened.place.home) is None:
        notes.append("There is no config.json beside the weights: a loader needs MODEL's.")
    notes += _note_dtypes(tensors, config)
    if home is not None and not home.is_remote and (lacking := _not_here(theirs(), tensors, loaded)):
        notes.append(
            f"MODEL's own weights have {count(len(lacking), 'tensor')} that the class does not use and that are not here: "
            f"{examples(lacking)}."
        )
    good = all(check.ok for check in checks)
    return opened.catalog, Likeness(tuple(checks), loaded.by if good else "", tuple(notes), _facts(loaded, loads=good))


def _facts(loaded: Misfits | None, *, loads: bool = False) -> dict[str, object]:
    """The facts for a program: every name; empty for weights that cannot be read."""
    loaded = loaded or Misfits("", [], [], {})
    return {
        "loads": loads,
        "by": loaded.by,
        "missing": sorted(loaded.missing),
        "ignored": sorted(loaded.ignored),
        "shapes": {name: {"here": list(here), "model": list(own)} for name, (here, own) in loaded.shapes.items()},
        "dtypes": sorted(loaded.kinds),
        "in_memory": sorted(loaded.in_memory),
    }


def _read_model(like: Location) -> tuple[dict[str, Any] | None, Location | None]:
    """The model's config, and the directory of its weights; None for what is missing."""
    if like.is_file():
        return config_of(like.path), None
    if not like.is_dir():
        raise NotACheckpointError(
            "no such file or directory",
            file=like,
            remedy="Give --like a model's directory, its config.json, or hf://OWNER/NAME.",
        )
    found = find_config(like)
    return (None if found is None else found[0]), like


def _own_shapes(home: Location | None, *, as_stored: bool) -> dict[str, tuple[int, ...]]:
    """Name -> shape, by the headers of MODEL's own weights; empty where it has none."""
    found = (_shapes_at(home) if home is not None and home.is_remote else None) or {}
    if home is not None and not found:
        with contextlib.suppress(NotACheckpointError):  # a config alone
            opened = open_catalog(home, Reading(), as_stored=as_stored)
            found = {name: entry.shape for name, entry in _list_stored(opened).items()}
    return found


def _shapes_at(home: Location) -> dict[str, tuple[int, ...]] | None:
    """Name -> shape at an address, by a small request for each shard; None for anything but plain safetensors."""
    file, index = home / "model.safetensors", home / "model.safetensors.index.json"
    files = [file.path] if file.is_file() else []
    if not files and index.is_file():
        named = read_json(index.path, _MOST_BYTES, "an index")
        files = [(home / name).path for name in sorted(set(named["weight_map"].values()))]
    headers = fsspec_io.several(_header_at, files)
    found = {name: entry for header in headers for name, entry in header.items() if name != "__metadata__"}
    if any(entry["dtype"].startswith(("F8", "F4", "U", "I")) for entry in found.values()):
        return None  # these may be packed, which asks for more than shapes
    return {name: tuple(entry["shape"]) for name, entry in found.items()}


def _header_at(address: str) -> dict[str, Any]:
    """The header of a file of safetensors."""
    data = fsspec_io.read(address, 0, _FIRST_BYTES)
    nbytes = 8 + int.from_bytes(data[:8], "little")
    if _FIRST_BYTES < nbytes <= _MOST_BYTES:
        data += fsspec_io.read(address, _FIRST_BYTES, nbytes - _FIRST_BYTES)
    check_size(data[8:nbytes], address, "a header")
    try:
        found: dict[str, Any] = json.loads(data[8:nbytes])
    except ValueError as error:
        raise CorruptError("has no header of safetensors", file=address, found=str(error), remedy=COPY_AGAIN) from error
    return found


_FIRST_BYTES = 2 << 10
"""The bytes of a shard that are requested first: a header of some ten tensors."""

_MOST_BYTES = 64 << 20


def _list_stored(opened: Opened) -> dict[str, TensorEntry]:
    """The tensors in the files; for torch files, tied ones under all of their names."""
    catalog = opened.catalog
    found = dict(catalog.tensors)
    if not any(name.endswith(".safetensors") for name in opened.place.listing.files):
        found |= {dropped: catalog.tensors[kept] for dropped, kept in catalog.aliases.items()}
    return found


def _load(
    config: Mapping[str, Any] | None,
    tensors: Mapping[str, TensorEntry],
    opened: Opened,
    theirs: Callable[[], Mapping[str, tuple[int, ...]]],
) -> Misfits:
    """The result of loading the tensors, by the best reference that there is."""
    packed = opened.packed is not None
    if config is not None and not packed and (loaded := load_on_meta(config, tensors)) is not None:
        return loaded
    if known := theirs():
        own = opened.catalog.tensors if packed else tensors
        by = f"{_named_class(config) or 'a model'}, by MODEL's own weights"
        here = {name: entry.shape for name, entry in own.items()}
        tied = (config or {}).get("tie_word_embeddings") is not False
        return compare_shapes(here, known, by, tied=tied)
    if config is not None and not packed:
        catalog = Catalog(dict(tensors), opened.catalog.source, opened.catalog.evidence)
        if (found := find_misfits(catalog, config)) is not None:
            return found
    raise UnsupportedError(
        "what tensors the model has is not known", file=opened.place.listing.directory,
        found=f"weights packed as {opened.packed.about}" if opened.packed else f"{_named_class(config) or 'no config'}",
        expected="a class that transformers or zckpt knows, or MODEL's own weights",
        remedy="Give --like the model's directory with its weights, or install transformers.",
    )  # fmt: skip


def _named_class(config: Mapping[str, Any] | None) -> str:
    said = (config or {}).get("architectures")
    return str(said[0]) if isinstance(said, list) and said else str((config or {}).get("model_type") or "")


def _as_checks(loaded: Misfits, tensors: Mapping[str, TensorEntry], config: Mapping[str, Any] | None) -> list[Check]:
    """The checks for a result of loading."""
    hint = other_class(config, tensors)
    missing = sorted(loaded.missing)
    there = Check("missing", f"every tensor of {loaded.by} is there")
    if missing:
        random = f"a loader would initialise {count(len(missing), 'tensor')} at random: {_few(missing)}"
        head = (f"the weights have the head of {hint}",) if hint else ()
        there = replace(there, problems=(random, *head), wrong=len(missing))
    others = Check("ignored", "no others are there")
    if loaded.ignored:
        said = f"a loader would not read {count(len(loaded.ignored), 'tensor')}: {_few(loaded.ignored)}"
        others = replace(others, problems=(said,), wrong=len(loaded.ignored))
    if loaded.in_memory:
        said = (
            f"{count(len(loaded.in_memory), 'tensor has', 'tensors have')} names that a model has in memory, which other loaders "
            f"do not find: {_few(loaded.in_memory)}"
        )
        others = replace(others, problems=(*others.problems, said))
    shapes = Check("shapes", "as the config says")
    if loaded.shapes:
        wrong = tuple(
            f"{name!r} has shape {list(here)}, the model {list(own)}{_guess(here, own)}"
            for name, (here, own) in list(loaded.shapes.items())[:_MOST]
        )
        more = len(loaded.shapes) - len(wrong)
        shapes = replace(shapes, problems=(*wrong, *([f"and {more:,} more"] if more else [])), wrong=len(loaded.shapes))
    kinds = Check("dtypes", "floats where the model has floats")
    if loaded.kinds:
        kinds = replace(kinds, problems=(f"not of the model's kind of numbers: {_few(loaded.kinds)}",))
    stop = [Check("loader", "", (loaded.error,))] if loaded.error else []
    return [*stop, there, others, shapes, kinds]


_MOST = 8


def _few(names: Sequence[str]) -> str:
    return examples(names, _MOST)


def _guess(here: Sequence[int], own: Sequence[int]) -> str:
    """What may have happened to a shape, as a guess for a person."""
    if len(here) == len(own) >= 2 and here[-2:] == tuple(reversed(own[-2:])) and here[:-2] == own[:-2]:
        return " (transposed)"
    if len(here) == len(own) and here[1:] == own[1:]:
        return f" ({'fewer' if here[0] < own[0] else 'more'} rows)"
    return ""


def _check_files(opened: Opened, out: Location) -> Check:
    """Checks whether the index and the files agree, and have names that loaders look for."""
    listing = opened.place.listing
    check = Check("files", "the index and the files agree" if len(listing.files) > 1 else "one file")
    if not out.is_dir():
        return replace(check, answer="one file")
    usual = {pattern.format(suffix="") + suffix for pattern in PATTERNS.values() for suffix in ("", ".index.json")}
    problems: list[str] = []
    if not usual & listing.files.keys():
        odd = examples(name for name in sorted(listing.files) if is_weights(name))
        problems.append(f"no loader looks for {odd}, but for model.safetensors or its index")
    where: dict[str, str] = {}
    for name, entry in opened.catalog.tensors.items():
        if entry.fragments:
            where[name] = str(getattr(entry.fragments[0].store, "path", "")).rpartition("/")[2]
    said = {name: file for file, names in named_data(listing).items() for name in names}
    if said:
        gone = [name for name in said if name not in opened.catalog.tensors and name not in opened.catalog.aliases]
        moved = [name for name, file in said.items() if where.get(name, file) != file]
        unsaid = [name for name in where if name not in said]
        problems += [f"the index names tensors that no file has: {_few(gone)}"] if gone else []
        problems += [f"the index says another file than has them: {_few(moved)}"] if moved else []
        problems += [f"the index leaves out {_few(unsaid)}"] if unsaid else []
    return replace(check, problems=tuple(problems))


def _check_config(opened: Opened, config: Mapping[str, Any] | None, tensors: Mapping[str, TensorEntry]) -> list[Check]:
    """Checks whether the config beside the weights, if it differs from MODEL's, loads them too."""
    if not opened.place.listing.directory.is_dir():
        return []
    found = find_config(opened.place.home)
    if found is None or config is None:
        return []
    own = found[0]
    keys = [key for key in own.keys() | config.keys() if own.get(key) != config.get(key) and key not in _NO_NAMES]
    if not keys:
        return [Check("config", "as MODEL's")]
    problems = []
    if own.get("model_type") != config.get("model_type"):
        problems.append(
            f"its config.json says model_type {own.get('model_type')!r}, MODEL's {config.get('model_type')!r}"
        )
    loaded = load_on_meta(own, tensors)
    if loaded is not None and any((loaded.missing, loaded.ignored, loaded.shapes, loaded.kinds)):
        wrong = [*loaded.missing, *loaded.ignored, *loaded.shapes, *loaded.kinds]
        problems.append(
            f"its own config.json, in which {examples(sorted(keys), 6)} differ, does not fit: {_few(wrong)}"
        )
    return [Check("config", f"fits too; other values than MODEL's: {examples(sorted(keys), 6)}", tuple(problems))]


def _note_dtypes(tensors: Mapping[str, TensorEntry], config: Mapping[str, Any] | None) -> list[str]:
    """A note on floats of another dtype than the config's, which loaders cast."""
    said = (config or {}).get("dtype") or (config or {}).get("torch_dtype")
    kinds: dict[str, int] = {}
    for entry in tensors.values():
        if entry.dtype.kind == "float":
            kinds[entry.dtype.torch_name] = kinds.get(entry.dtype.torch_name, 0) + 1
    if not isinstance(said, str) or not kinds or kinds.keys() == {said}:
        return []
    has = ", ".join(f"{number:,} of {kind}" for kind, number in sorted(kinds.items()))
    return [f"MODEL's config says {said}; the tensors are {has}. Loaders cast them."]


def _not_here(names: Iterable[str], tensors: Mapping[str, TensorEntry], loaded: Misfits) -> list[str]:
    """Tensors of MODEL's own weights that are missing here, and that the class does without."""
    if loaded.missing or loaded.ignored or loaded.error:
        return []
    return sorted(name for name in names if name not in tensors and not name.endswith(("_scale_inv", "_scale")))

"""Finds the adapter in a checkpoint that is meant, its config, facts about its numbers, and what was trained beside it.

That is tensors of a checkpoint, and files beside an adapter; which copies are the base's own is found. PEFT saves the matrix
below a LoRA of the head or the embedding (`lm_head.base_layer.weight`) beside the LoRA, and all embeddings where
`save_embedding_layers` asks for it: most are the base's. What a run trains beside PEFT, its trainer saves: LLaVA's
`non_lora_trainables.bin`, `vit.safetensors` of ms-swift's example, LLaMA-Factory's value head.
Source: PEFT 0.21.2, utils/save_and_load.py `get_peft_model_state_dict`; LLaVA 1.2, train/train.py; ms-swift 3,
examples/train/multimodal/lora_llm_full_vit; LLaMA-Factory 0.9, extras/constants.py `V_HEAD_WEIGHTS_NAME`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from zckpt.base.errors import CorruptError, InconsistentError, UnsupportedError, UsageError
from zckpt.base.words import count, examples, join_words
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.dtypes import CAST_TARGETS, is_lossless
from zckpt.core.recipes import DerivedStore
from zckpt.engine.elements import ElementReader, elements
from zckpt.engine.independent import differences
from zckpt.jobs.open import Opened, open_catalog, strip_wrappers
from zckpt.layouts.save.companions import read_config
from zckpt.naming.adapter_names import adapters_in, found_in, is_adapter_file
from zckpt.naming.adapter_weights import AdapterWeights
from zckpt.naming.facts import facts_of
from zckpt.naming.foreign_adapters import META, config_of_meta, in_peft_form, is_foreign
from zckpt.naming.merge import base_of
from zckpt.naming.merge_places import ModelTensors
from zckpt.storage.json_files import read_json
from zckpt.storage.location import Location

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
    opened: Opened, adapter: str, selected: Mapping[str, TensorEntry], found: Mapping[str, tuple[str, str]]
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
    whole = [name for name, (whose, _) in found.items() if whose == adapter and ".modules_to_save." in name]
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


_TRAINED = re.compile(
    r"non_lora_trainables\.bin|non_lora_state_dict\.bin|vit\.safetensors|value_head\.(?:safetensors|bin)|mm_projector\.bin"
)
_OF_TRL = "pytorch_model.bin"
"""The file for the value head that TRL writes beside the adapter of a PEFT model. Source: TRL 0.29,
experimental/ppo/modeling_value_head.py.
"""
_WEIGHTS = re.compile(r"[\w.-]+\.(?:safetensors|bin|pt|pth|ckpt|pkl|npz|npy|msgpack|h5|gguf)")
_OTHER = re.compile(
    r"(?:adapter_model|optimizer|scheduler|scaler|rng_state|random_states|training_args|sampler|dl_state_dict|tokenizer)[\w.-]*"
)
"""Files that are read in another way, or are not weights."""


def trained_with(adapter: AdapterWeights, other: Opened, base: Catalog) -> tuple[Mapping[str, TensorEntry], list[str]]:
    """The trained tensors beside an adapter that has a place of its own, with sentences on what is used and what is not
    read.
    """
    catalog, _ = strip_wrappers(other.catalog)
    if adapters_in(catalog):
        found, unread = trained_in(catalog, base), list[str]()
    else:
        found, unread = _trained_files(other.place.home, adapter.tensors)
        unread += _directories_of_weights(other.place.home)
    here = f"beside adapter {adapter.name!r}"
    notes = (
        [f"{count(len(found), 'tensor')} {here}, trained whole: written too, such as {examples(found, 1)}."]
        if found
        else []
    )
    if unread:
        more = " A directory with an adapter can be named with --adapter." if any("/" in one for one in unread) else ""
        notes.append(
            f"{examples(unread, len(unread))} {here}: not read, since it is not known what such files hold.{more}"
        )
    return found, notes


def trained_in(catalog: Catalog, base: Catalog) -> dict[str, TensorEntry]:
    """The tensors of a checkpoint that were trained beside its adapters, by their names in the base model.

    Many checkpoints say which parameters were frozen. Of one that does not, all tensors count if it lacks some of the
    base's, since only what is trained was saved then. If it holds all of them, those count that the base lacks, and the
    others have to be the base's. Raises InconsistentError if the checkpoint holds another number in a tensor of the
    base, and does not say whether it trained it.
    """
    own = base_of(catalog)
    roles = {entry.role for entry in catalog.tensors.values()}
    trained = {n: e for n, e in own.tensors.items() if e.role != "frozen" and not _is_of_packed(n, base)}
    buffers = {name: entry for name, entry in trained.items() if entry.role == "buffer" and name in base}
    for name in buffers.keys() - set(unequal(buffers, base, rounded=True)):
        del trained[name]  # the base's, perhaps in the run's precision
    if catalog.source.zero_stage is not None or "frozen" in roles or base.tensors.keys() - {*own.tensors, *own.aliases}:
        return trained
    there = {name: entry for name, entry in trained.items() if name in base and entry.dtype.kind == "float"}
    if other := unequal(there, base):
        raise InconsistentError(
            f"the checkpoint and the base have other numbers in {count(len(other), 'tensor')}", file=catalog.source.path,
            found=f"{examples(other, len(other))}: the checkpoint does not say whether it trained them",
            expected="the numbers of --base in all that has no adapter",
            remedy="Leave out --base to merge into the checkpoint's own weights, or pass the base that it was trained on.",
        )  # fmt: skip
    return {name: entry for name, entry in trained.items() if name not in base}


def _is_of_packed(name: str, base: Catalog) -> bool:
    """Whether a tensor belongs to a quantised weight: `q_proj.weight.absmax`."""
    head = name.rpartition(".")[0]
    return head in base or (".weight." in name and name.partition(".weight.")[0] + ".weight" in base)


def _trained_files(home: Location, adapter: Mapping[str, TensorEntry]) -> tuple[dict[str, TensorEntry], list[str]]:
    """The tensors in files beside an adapter that are known to hold trained weights, and the names of other files of weights.

    Raises:
        UnsupportedError: such a file holds an adapter too. ZckptError: another kind says why it cannot be read.
    """
    found: dict[str, TensorEntry] = {}
    others: list[str] = []
    for name in sorted(home.file_names()):
        if not _WEIGHTS.fullmatch(name) or _OTHER.fullmatch(name):
            continue
        if not _TRAINED.fullmatch(name) and name != _OF_TRL:
            others.append(name)
            continue
        catalog = strip_wrappers(open_catalog(home / name).catalog)[0]
        if name == _OF_TRL and not all(own.startswith("v_head.") for own in catalog):
            others.append(name)
            continue
        places = {own: found_in(own) for own in catalog}
        saved = {own: place[1] if place else own for own, place in places.items() if ".lora_" in own or place}
        if more := [own for own, its in saved.items() if its not in adapter]:
            raise UnsupportedError(
                "holds an adapter beside the adapter", file=home / name, found=examples(more),
                expected="weights that were trained whole", remedy="Merge this adapter with the program that made it.",
            )  # fmt: skip
        weights = {own: entry for own, entry in catalog.tensors.items() if own not in saved}
        found |= base_of(replace(catalog, tensors=weights, aliases={}, padding=())).tensors
    return found, others


def _directories_of_weights(home: Location) -> list[str]:
    """The directories below an adapter's that hold weights: PEFT writes each further adapter into one of its name.

    Raises:
        UnsupportedError: one holds weights that were trained beside an adapter, and no adapter to which they belong.
    """
    directories = sorted(name for name, kind in home.kinds().items() if kind == "directory")
    found: dict[str, list[str]] = {}
    for path in home.file_names(below=directories):
        folder, _, name = path.rpartition("/")
        if folder and (_WEIGHTS.fullmatch(name) or name == "adapter_config.json"):
            found.setdefault(folder, []).append(name)
    for folder, names in found.items():
        alone = not any(name.startswith("adapter_") for name in names)
        if alone and (trained := next(filter(_TRAINED.fullmatch, names), None)):
            raise UnsupportedError(
                "holds weights that were trained beside an adapter, and lies below the adapter's directory",
                file=home / folder / trained, found=f"no adapter in {folder!r}", expected="both in one directory",
                remedy="Move the file beside adapter_model.safetensors if it belongs to that adapter, else somewhere else.",
            )  # fmt: skip
    return [f"{folder}/" for folder in sorted(found)]


def without_copies(adapter: AdapterWeights, base: Catalog, config: Mapping[str, object] | None) -> AdapterWeights:
    """The adapter without whole tensors that are equal to the base's: copies that PEFT saved, and no contribution. By
    `config`, the base's, a head may be the embedding.
    """
    model = ModelTensors(base, config)
    found = {name: model.find(name) for name in adapter.whole}
    same = {
        name: entry for name, entry in found.items() if entry is not None and entry.shape == adapter.whole[name].shape
    }
    there = {name: adapter.whole[name] for name in same}
    copies = {id(there[name]) for name in there.keys() - set(unequal(there, same))}
    if not copies:
        return adapter
    return replace(adapter, tensors={n: entry for n, entry in adapter.tensors.items() if id(entry) not in copies})


def check_copies(copies: Iterable[tuple[TensorEntry, TensorEntry]], adapters: Sequence[AdapterWeights]) -> None:
    """Checks that copies in adapters, which are not merged, equal the tensors that are, which stand behind them. Raises
    InconsistentError if one has other numbers.
    """
    pairs = {(copy.name, own.name): (copy, own) for copy, own in copies}
    copied, owns = (
        {str(key): copy for key, (copy, _) in pairs.items()},
        {str(key): own for key, (_, own) in pairs.items()},
    )
    other = set(unequal(copied, owns))
    if found := [key for key in pairs if str(key) in other]:
        raise InconsistentError(
            f"{count(len(found), 'tensor')} of an adapter should be another one once more, and differ from it"
            if len(found) > 1
            else "1 tensor of an adapter should be another one once more, and differs from it",
            file=join_words([one.file for one in adapters]), found=join_words([f"{copy!r} and {own!r}" for copy, own in found]),
            expected="equal numbers: these weights are tied in the model, or were saved twice",
            remedy="Use another save of the adapter; PEFT itself would take one of the two.",
        )  # fmt: skip


def unequal(tensors: Mapping[str, TensorEntry], base: Mapping[str, TensorEntry], *, rounded: bool = False) -> list[str]:
    """The names of tensors that are not equal, as numbers, to those of these names in the base, or to these `rounded`."""
    names = list(tensors)
    pairs = {name: pair for name in names if (pair := _comparable(base[name], tensors[name], rounded=rounded))}
    other = {list(pairs)[found.number] for found in differences(list(pairs.values()))} if pairs else set()
    return [name for name in names if name not in pairs or name in other]


def _comparable(a: TensorEntry, b: TensorEntry, *, rounded: bool) -> tuple[TensorEntry, TensorEntry] | None:
    """The two tensors, the one that can be cast to the other's dtype without rounding first; None where neither can."""
    for source, target in ((a, b), (b, a)):
        fits = is_lossless(source.dtype, target.dtype) or (rounded and source is a and _are_rounded(a, b))
        if a.shape == b.shape and fits and not any(_are_computed(target)):
            return replace(source, replicas=()), replace(target, replicas=())
    return None


def _are_rounded(a: TensorEntry, b: TensorEntry) -> bool:
    return a.dtype.kind == "float" and b.dtype in CAST_TARGETS


def _are_computed(entry: TensorEntry) -> Iterator[bool]:
    return (isinstance(fragment.store, DerivedStore) for fragment in entry.fragments)

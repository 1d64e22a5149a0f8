"""Which tensors of a save are one tied weight: FSDP saves a tied weight once under each of its names.

For `dcp` and the families that are read like it. Nothing in such a save says what was tied. Two tensors are taken for one weight
if the optimizer has taken steps with one of them and does not own the other, or if the model's config does not deny that the head
is the embedding; and if they hold the same numbers. Some of them are compared when the save is opened, and all before they are
written.
Source: torch 2.13, torch/distributed/checkpoint/state_dict.py (`get_model_state_dict` lists every name of a parameter,
`get_optimizer_state_dict` one); transformers 5.23, `tie_word_embeddings`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace

from zckpt.containers import value_at
from zckpt.core.catalog import Replica, TensorEntry
from zckpt.engine.elements import ElementReader
from zckpt.layouts.save.companions import config_near
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.tied import is_tied, samples

_EMBEDDINGS = ("embed", "wte", "shared")
"""Parts of names. Where no optimizer says which of two tied tensors is kept, the one with such a part is kept."""


def tied_copies(
    tensors: dict[str, TensorEntry], trained: AbstractSet[str], steps: int | None, listing: Listing
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The tensors that are kept, each with its copies as replicas, and dropped name -> kept name.

    Args:
        tensors: all of the save.
        trained: those that the optimizer owns.
        steps: that it has taken; None where the save does not say.
        listing: the save, beside which the model's config may be.
    """
    pairs = [*_by_optimizer(tensors, trained if steps else frozenset()), *_by_config(tensors, trained, listing)]
    if not pairs:
        return tensors, {}
    kept, aliases = dict(tensors), dict[str, str]()
    with ElementReader() as reader:
        for name, other in pairs:
            if {name, other} & aliases.keys() or name not in kept or other not in kept:
                continue
            if _alike(reader, tensors[name], tensors[other]):
                dropped = kept.pop(other)
                copy = Replica(dropped.dtype, dropped.fragments, f"the name {other!r}", whole=True)
                kept[name] = replace(kept[name], replicas=(*kept[name].replicas, copy))
                aliases[other] = name
    return kept, aliases


def _is_outside_layers(name: str) -> bool:
    """Whether a tensor is in no numbered layer; tied tensors hardly ever are, and layers have many of equal shape."""
    return not any(part.isdecimal() for part in name.split("."))


def _by_optimizer(tensors: Mapping[str, TensorEntry], trained: AbstractSet[str]) -> Iterator[tuple[str, str]]:
    """Pairs of a tensor that the optimizer owns and another of the same form that it does not own."""
    for name in tensors:
        if name not in trained or not _is_outside_layers(name):
            continue
        for other, entry in tensors.items():
            is_free = other not in trained and entry.dtype.kind == "float" and entry.numel > 1
            if is_free and _form(entry) == _form(tensors[name]) and _is_outside_layers(other):
                yield name, other


def may_be_tied(shapes: Iterable[tuple[int, ...]], listing: Listing) -> bool:
    """Whether tensors of these shapes, without an optimizer, may have copies under further names."""
    rows = _rows_by_config(listing)
    return rows is not None and any(len(shape) == 2 and shape[0] == rows for shape in shapes)


def _rows_by_config(listing: Listing) -> int | None:
    """The rows of a matrix with one for each token; None if no config says them, or it says that the head is another one."""
    known = config_near(listing.directory)
    rows = known.get("vocab_size", value_at(known, "text_config", "vocab_size"))
    return rows if isinstance(rows, int) and is_tied(known) is not False else None


def _by_config(
    tensors: Mapping[str, TensorEntry], trained: AbstractSet[str], listing: Listing
) -> Iterator[tuple[str, str]]:
    """Pairs of matrices with a row for each token, if a config is there and does not say that the head is another one."""
    rows = _rows_by_config(listing)
    if rows is None:
        return
    names = [name for name, entry in tensors.items() if len(entry.shape) == 2 and entry.shape[0] == rows]
    names = [name for name in names if tensors[name].dtype.kind == "float" and _is_outside_layers(name)]
    names.sort(key=lambda name: (name not in trained, not any(word in name for word in _EMBEDDINGS)))
    for number, name in enumerate(names):
        for other in names[number + 1 :]:
            if other not in trained and _form(tensors[name]) == _form(tensors[other]):
                yield name, other


def _form(entry: TensorEntry) -> tuple[object, ...]:
    return entry.shape, entry.dtype


def _alike(reader: ElementReader, a: TensorEntry, b: TensorEntry) -> bool:
    """Whether two tensors of one form hold the same numbers where they are compared, and not one number throughout."""
    seen: set[bytes] = set()
    for one, other in samples(reader, a, b):
        if one != other:
            return False
        seen.update(one[at : at + a.dtype.itemsize] for at in range(0, len(one), a.dtype.itemsize))
    return len(seen) > 1

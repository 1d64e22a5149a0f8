"""What the tensors in an inert value use of their storages.

For `slim` and `du`. `torch.save` writes a view with the whole storage that it is a view of, so a storage may be larger than all
tensors of the file that are views of it: the rest is waste.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from zckpt.containers.inert import Placeholder
from zckpt.containers.tensor_ref import TensorRef

_MOST_DEPTH = 40


def tensors_in(value: object, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], TensorRef]]:
    """The tensors in an inert value, nested at most 40 deep, with the keys that lead to each."""
    if isinstance(value, TensorRef):
        yield names, value
    elif len(names) < _MOST_DEPTH:
        for key, item in _items(value):
            yield from tensors_in(item, (*names, key))


def placeholders_in(value: object, depth: int = 0) -> Iterator[Placeholder]:
    """The objects of classes in an inert value, the outermost ones."""
    if isinstance(value, Placeholder):
        yield value
    elif depth < _MOST_DEPTH:
        for _, item in _items(value):
            yield from placeholders_in(item, depth + 1)


def _items(value: object) -> Iterable[tuple[str, object]]:
    """What an inert value holds; what has no key has an empty one."""
    if isinstance(value, Mapping):
        return [(str(key), item) for key, item in value.items()]
    if isinstance(value, Placeholder):
        return [("", value.args), ("", value.state), ("", value.kwargs), ("", value.items)]
    return [("", item) for item in value] if isinstance(value, list | tuple) else []


def waste_of(refs: Iterable[TensorRef]) -> int:
    """Bytes of storages that none of these tensors uses."""
    storages: dict[tuple[str, int, int], set[tuple[int, int]]] = {}
    for ref in refs:
        if ref.numel:
            storage = (ref.store.path, ref.storage_byte_offset, ref.storage_nbytes)
            storages.setdefault(storage, set()).add((ref.byte_offset, ref.byte_stop))
    return sum(nbytes - _count_covered(spans) for (_, _, nbytes), spans in storages.items())


def _count_covered(spans: Iterable[tuple[int, int]]) -> int:
    """Bytes in any of these ranges."""
    covered = last = 0
    for begin, end in sorted(spans):
        covered += max(0, end - max(begin, last))
        last = max(last, end)
    return covered

"""The torch files of a smaller save: each without what is left out, its tensors dense, and tied tensors once.

For `slim`. [Note: swap files] Of saves with an optimizer that was on NVMe, the masters stay in their swap files, and
the optimizer files
say which these are by the attribute `ds_id` of a vector without elements. Where DeepSpeed left a buffer's old elements in its
place (`pipeline_read`), it is written without them: only the swap file is right.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import field, replace

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UnsafeError, ZckptError
from zckpt.containers import Container, TensorRef, TensorSpec
from zckpt.containers.tensor_ref import tensors_in, waste_of
from zckpt.core.plan import Plan
from zckpt.layouts import is_of_save
from zckpt.layouts.places import Place
from zckpt.layouts.save.companions import is_own
from zckpt.layouts.save.listing import SHARD_NAME, Listing
from zckpt.layouts.save.module_states import whole
from zckpt.layouts.zero.torch_files import TorchFile

_MOST_DEPTH = 40
_LABEL = "ds_id"

BytePlace = tuple[str, int, int]
"""File, byte offset of the first element, byte offset behind the last."""


@dataclass(slots=True)
class Cut:
    """What is left out of the files, and what was.

    Attributes:
        optimizer: whether the optimizer's states are.
        frozen: whether frozen parameters are.
        places: what is left out -> places of its tensors.
        same: place of a tensor -> the tensor that is equal to it.
        bytes: what was left out -> bytes.
    """

    optimizer: bool
    frozen: bool
    places: dict[str, set[BytePlace]] = field(default_factory=dict[str, "set[BytePlace]"])
    same: dict[BytePlace, TensorRef] = field(default_factory=dict["BytePlace", TensorRef])
    bytes: dict[str, int] = field(default_factory=dict[str, int])

    def what(self, ref: TensorRef) -> str:
        """The reason why a tensor is left out; empty if it stays."""
        place = place_of(ref)
        return next((what for what, places in self.places.items() if place in places), "")

    def count(self, what: str, nbytes: int) -> None:
        """Adds bytes that were left out."""
        self.bytes[what] = self.bytes.get(what, 0) + nbytes


def place_of(ref: TensorRef) -> BytePlace:
    """Returns where a tensor's elements lie in its file."""
    return ref.store.path, ref.byte_offset, ref.byte_stop


class _SlimFile(TorchFile):
    """A torch file in which a tensor that has several names, or an equal copy, is one storage."""

    def __init__(self, path: str, same: Mapping[BytePlace, TensorRef], swapped: Callable[[str], bool]) -> None:
        super().__init__(path)
        self._same = same
        self._swapped = swapped
        self._made: dict[object, TensorSpec] = {}

    def _adopt(self, value: object, above: set[int]) -> object:
        if not isinstance(value, TensorRef):
            return super()._adopt(value, above)
        ref = self._same.get(place_of(value), value)
        label = label_of(value)
        key = (ref.place, label)
        if key not in self._made:
            if label and self._swapped(label):
                ref = replace(ref, shape=(0,), stride=(1,))  # see [Note: swap files]
            spec = self.tensor(whole("", ref, "buffer"))
            self._made[key] = replace(spec, attributes={_LABEL: label}) if label else spec
        return self._made[key]


def label_of(ref: TensorRef) -> str:
    """The name of a tensor's swap file; empty where it has none."""
    label = (ref.attributes or {}).get(_LABEL)
    return label if isinstance(label, str) else ""


def swapped_states(listing: Listing, containers: Mapping[str, Container]) -> set[str]:
    """The swap files of a save that hold moments: their labels are those of masters behind the name of a state."""
    found: set[str] = set()
    for name, container in containers.items():
        if match := SHARD_NAME.fullmatch(name):
            labels = {label_of(ref) for _, ref in tensors_in(container.root)}
            moments = (label for label in labels if label.partition("-")[2] in labels - {""})
            found.update(listing.swap_file(int(match["dp"]), int(match["mp"]), label) for label in moments)
    return found & listing.files.keys()


def swapped_in(listing: Listing, name: str) -> Callable[[str], bool]:
    """Whether a label of the optimizer file `name` is that of a swap file."""
    match = SHARD_NAME.fullmatch(name)
    if match is None:
        return lambda label: False
    return lambda label: listing.swap_file(int(match["dp"]), int(match["mp"]), label) in listing.files


def is_copied(place: Place, name: str) -> bool:
    """Whether a file of a save is copied as it is: not if it is a link out of it to something that is not a container.
    Raises UnsafeError if the save would be none without it.
    """
    file = place.listing.files[name]
    if is_own(file, place.home, place.named) or is_own(file, file.parent):
        return True
    try:
        place.listing.open(name)
    except ZckptError as error:
        if is_of_save(name) or "/" in name or name.endswith(".distcp"):
            raise UnsafeError(
                "is a link that leads out of the checkpoint, and would be copied byte for byte", file=file,
                found=f"a link to {os.path.realpath(file)!r}",
                remedy="Put the file itself there. Nothing was written.",
            ) from error  # fmt: skip
        return False
    return True


def slim_file(path: str, container: Container, cut: Cut, swapped: Callable[[str], bool]) -> Plan | None:
    """A file without what is left out and without waste; None if it has neither.

    Args:
        path: of the file, in the output.
        container: the file.
        cut: what is left out, and where it is counted.
        swapped: whether a label is that of a swap file.
    """
    refs = [ref for _, ref in tensors_in(container.root)]
    counted = dict(cut.bytes)
    root = _without(container.root, cut, 0)
    if counted == cut.bytes and not waste_of(refs) and not any(place_of(ref) in cut.same for ref in refs):
        return None
    file = _SlimFile(path, cut.same, swapped)
    return file.finish(file.adopt(root))


def _without(value: object, cut: Cut, depth: int) -> object:
    """An inert value without what is left out."""
    if depth > _MOST_DEPTH:
        return value
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_without(item, cut, depth + 1) for item in value)
    if not isinstance(value, Mapping):
        return value
    kept: dict[object, object] = {}
    for key, item in value.items():
        if isinstance(item, TensorRef) and (what := cut.what(item)):
            cut.count(what, item.nbytes)
        elif cut.frozen and key in ("frozen_param_shapes", "frozen_param_fragments"):
            _count_all(item, cut, "frozen")
            kept[key] = None  # as DeepSpeed writes it: its loader must not find an empty collection
        elif cut.optimizer and key == "state" and "param_groups" in value:
            _count_all(item, cut, "optimizer")
            kept[key] = {}
        elif cut.optimizer and key == "base_optimizer_state" and isinstance(item, list):
            _count_all(item, cut, "optimizer")
            kept[key] = [{} for _ in item]
        else:
            kept[key] = _without(item, cut, depth + 1)
    return kept


def _count_all(value: object, cut: Cut, what: str) -> None:
    """Counts the bytes of all tensors in a value, each once."""
    refs = {ref.place: ref.nbytes for _, ref in tensors_in(value)}
    if refs:
        cut.count(what, sum(refs.values()))

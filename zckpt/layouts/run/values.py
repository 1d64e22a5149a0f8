"""Values that files of any layout hold, and the errors for files that are missing.

For every family.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager

from zckpt.base.errors import COPY_AGAIN, CorruptError, IncompleteError, UnsupportedError, ZckptError
from zckpt.base.words import count, examples, ranks
from zckpt.containers import TensorRef, mapping_at
from zckpt.layouts.save.listing import Listing
from zckpt.storage.location import locate

SCALER = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
"""Entries of an optimizer file that are the loss scaler and what is kept beside it."""


def is_vector(value: object) -> bool:
    """Whether a state is a tensor with dimensions, and no single number."""
    return isinstance(value, TensorRef) and bool(value.shape)


def step_of(value: object) -> int | None:
    """A step counter as a whole number, whether it is a number or a tensor of one element; None for anything else."""
    if isinstance(value, TensorRef):
        value = number_in(value) if value.numel == 1 else None
    return int(value) if isinstance(value, int | float) and abs(value) < 2**53 else None


@contextmanager
def refuse_odd_values(listing: Listing) -> Iterator[None]:
    """Turns Python's errors in reading an optimizer's files into one that names the save.

    Such files are nested dicts and lists of any trainer, and of any damage: not every number, list and None is looked
    at before it is used. Raises CorruptError in place of an error of Python's.
    """
    try:
        yield
    except ZckptError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CorruptError(
            "the optimizer's part of its files is not as a trainer writes it", file=listing.directory,
            found=f"{type(error).__name__}: {error}"[:200], remedy=f"{COPY_AGAIN} The weights alone: to-fp32.",
        ) from error  # fmt: skip


_DEEPEST = 16
"""The depth to which a trainer's own lists and mappings are read."""


def is_plain(value: object, depth: int = 0) -> bool:
    """Whether a value consists of numbers, texts, lists and mappings alone, without tensors or a trainer's objects."""
    if value is None or isinstance(value, bool | int | float | str):
        return True
    if depth == _DEEPEST or not isinstance(value, list | tuple | dict):
        return False
    inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return all(is_plain(one, depth + 1) for one in inner)


_CODES = {"F64": "d", "F32": "f", "I64": "q", "I32": "i"}


def number_in(ref: TensorRef) -> int | float | bytes:
    """The number in a tensor of one element; its bytes for an unusual dtype. Raises CorruptError if the file ends
    before it.
    """
    data = locate(ref.store.fellow or ref.store.path).read(ref.dtype.itemsize, ref.byte_offset)
    if len(data) < ref.dtype.itemsize:
        raise CorruptError(
            "ends too early", file=ref.store.path, found=f"no byte at {ref.byte_offset:,}", remedy=COPY_AGAIN
        )
    order = "<" if ref.store.byteorder == "little" else ">"
    code = _CODES.get(ref.dtype.name)
    number: int | float | bytes = struct.unpack(order + code, data)[0] if code else data
    return number


def single_value(value: object) -> object:
    """The value; for a tensor of one element, its number, in whatever dtype it was saved. Errors as of `number_in`."""
    return number_in(value) if isinstance(value, TensorRef) and value.numel == 1 else value


def keep_alike(kept: dict[str, object], state: str, value: object, owner: str, file: str) -> None:
    """Records a state of one value, such as the step, and checks that all parameters of a group have the same. Raises
    UnsupportedError if `owner` has another one than the parameters before it.
    """
    known = kept.setdefault(state, value)
    a, b = (number_in(v) if isinstance(v, TensorRef) else v for v in (known, value))
    if a != b:
        raise UnsupportedError(
            f"parameters of one group have different values of {state!r}", file=file, found=f"{b} of {owner!r}",
            expected=f"{a}, as the parameters before it", remedy="Convert the weights alone (to-fp32).",
        )  # fmt: skip


def missing_ranks(
    listing: Listing, kind: str, found: list[int], missing: list[int], world_size: int, rescue: str = ""
) -> IncompleteError:
    """The error for rank files that are missing.

    Args:
        listing: the save.
        kind: what they hold, such as "optimizer".
        found: ranks.
        missing: ranks.
        world_size: how many there are.
        rescue: a sentence on what can be saved without these files.
    """
    whose = ranks(missing)
    files = count(world_size, f"{kind} file is", f"{kind} files are")
    return IncompleteError(
        f"{len(missing):,} of {files} missing ({whose})",
        file=listing.directory,
        found=f"{kind} files of {ranks(found)}" if found else f"no {kind} file",
        expected=f"world size {world_size}",
        remedy=f"Copy the {kind} files of {whose} from the nodes that wrote them (--also DIR lays another directory over this "
        "one), or choose another tag." + (f" {rescue}" if rescue else ""),
    )


def missing_model_file(listing: Listing, mp_rank: int = 0) -> IncompleteError:
    """The error for a save without a model states file, which names the files that a run of its stage has."""
    optimizers = listing.shards("optim", mp_rank)
    expected = (
        f"mp_rank_{mp_rank:02d}_model_states.pt (ZeRO-1, -2) or zero_pp_rank_*_model_states.pt (ZeRO-3) beside them"
    )
    remedy = "Copy it from the node that wrote it (--also DIR lays further directories over this one)."
    if optimizers:
        state = mapping_at(listing.entry(next(iter(optimizers.values())), "optimizer_state_dict"))
        if "fp32_flat_groups" in state:
            names = [f"zero_pp_rank_{rank}_mp_rank_{mp_rank:02d}_model_states.pt" for rank in optimizers]
            expected = examples(names) + " beside them" + (f", {len(names):,} files" if len(names) > 3 else "")
            remedy = "Copy them from the nodes that wrote them (--also DIR lays further directories over this one)."
        elif "single_partition_of_fp32_groups" in state:
            expected = f"mp_rank_{mp_rank:02d}_model_states.pt beside them"
    whose = f" of mp_rank {mp_rank:02d}" if len(listing.model_parallel_ranks()) > 1 else ""
    return IncompleteError(
        f"has no model states file{whose}", file=listing.directory, found="optimizer files only", expected=expected,
        remedy=remedy,
    )  # fmt: skip

"""Whether every element of the vectors that optimizers keep belongs to a parameter, or is padding that a layout names.

For `layouts`, which checks what any family gave. A family that skips a parameter, reads the vector of one rank for that of
another, or takes a parameter for padding leaves elements that nothing reads. What should be read is found here once more, by
the keys in DeepSpeed's files alone. Catalogs themselves check that nothing is read twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from zckpt.base.errors import OTHER_SAVE, InconsistentError
from zckpt.containers import TensorRef, list_at, mapping_at
from zckpt.core.claims import ByteSpan, Claims
from zckpt.layouts.save.listing import EXPERT_OPTIMIZER_NAME, MODEL_NAME, SHARD_NAME, SWAP_NAME, UNIVERSAL, Listing
from zckpt.layouts.save.module_states import label_of

_MASTERS = ("single_partition_of_fp32_groups", "fp32_flat_groups", "fp32_groups_flat", "fp32_groups")
_WRAPPED = ("base_optimizer_state", "optimizer_state_dict")


_Vector = tuple[TensorRef, str, tuple[int, int]]
"""A tensor of an optimizer file that holds elements of parameters; what it is, for errors; data- and model-parallel rank
of the file.
"""


def _span(ref: TensorRef) -> ByteSpan:
    return ByteSpan(ref.store, ref.byte_offset, ref.byte_stop)


def masters_in(listing: Listing) -> Iterator[_Vector]:
    """All fp32 masters of a save."""
    if any(name.startswith(f"{UNIVERSAL}/") for name in listing.files):
        return  # each parameter has a file of its own
    states = list(_shards(listing))
    if not states:  # files of experts repeat what model files say
        whole = listing.matching(EXPERT_OPTIMIZER_NAME) or listing.matching(MODEL_NAME)
        states = [((0, 0), mapping_at(listing.entry(name, "optimizer"))) for name in whole]
    for rank, state in states:
        for key in _MASTERS:
            for number, held in enumerate(list_at(state, key)):
                for ref in list_at(held) or [held]:
                    if isinstance(ref, TensorRef):
                        yield ref, f"group {number} of {key!r}", rank


def states_in(listing: Listing) -> Iterator[_Vector]:
    """All states of the elements of a ZeRO save."""
    for rank, state in _shards(listing) if not listing.matching(EXPERT_OPTIMIZER_NAME) else ():
        base = next((state[key] for key in _WRAPPED if key in state), None)
        held = base.get("state") if isinstance(base, Mapping) else base
        for number, own in held.items() if isinstance(held, Mapping) else enumerate(list_at(held)):
            for key, value in mapping_at(own).items():
                if isinstance(value, TensorRef) and value.shape:
                    yield value, f"{key!r} of group {number}", rank


def _shards(listing: Listing) -> Iterator[tuple[tuple[int, int], Mapping[str, object]]]:
    """Data- and model-parallel rank of each rank of a ZeRO run, and what its optimizer file keeps."""
    for name in listing.matching(SHARD_NAME):
        found = SHARD_NAME.fullmatch(name)
        state = mapping_at(listing.entry(name, "optimizer_state_dict")) if found and found["kind"] == "optim" else {}
        if found and state:
            yield (int(found["dp"]), int(found["mp"])), state


def _in_place_of(ref: TensorRef, rank: tuple[int, int], listing: Listing, claims: Claims) -> TensorRef:
    """All of the swap file that has the elements of a vector; the vector if there is none, or if an earlier run left it."""
    name = listing.swap_file(*rank, label) if (label := label_of(ref)) else ""
    if name not in listing.files or (ref.numel and next(claims.unused([_span(ref)]), None) is None):
        return ref
    store = listing.files[name].store()
    return TensorRef(store, 0, ref.dtype, (store.size // ref.dtype.itemsize,), (1,), name, 0, store.size, 0)


def check(listing: Listing, vectors: Iterable[_Vector], claims: Claims) -> None:
    """Makes sure that all elements of vectors are used. Raises InconsistentError if some are not."""
    found: dict[ByteSpan, tuple[TensorRef, str]] = {}
    is_swapped = bool(listing.matching(SWAP_NAME))
    for vector, what, rank in vectors:
        ref = _in_place_of(vector, rank, listing, claims) if is_swapped else vector
        if ref.numel:
            found[_span(ref)] = ref, what
    gap = next(claims.unused(found), None)
    if gap is None:
        return
    span = next(s for s in found if s.store is gap.store and s.start <= gap.start and gap.stop <= s.stop)
    ref, what = found[span]
    first, stop = ((at - span.start) // ref.dtype.itemsize for at in (gap.start, gap.stop))
    raise InconsistentError(
        "holds elements of an optimizer that no parameter has",
        file=span.store.path if hasattr(span.store, "path") else "",
        found=f"elements {first:,}-{stop - 1:,} of {what} ({ref.numel:,} elements) that no tensor uses",
        expected="only elements of parameters, and padding that the layout has",
        remedy=OTHER_SAVE,
    )

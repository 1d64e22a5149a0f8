"""Whether all layer files of a pipeline are there: gaps in their numbers alone say nothing, for some layers have none.

For `read`. Each stage lists its buffers and, under ZeRO, its parameters, under names that begin with the layer's number, or with
`tied_modules`.
Source: DeepSpeed 0.19.8, runtime/pipe/module.py `save_state_dict`; runtime/engine.py `_get_zero_param_shapes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Set

from zckpt.base.errors import IncompleteError
from zckpt.base.words import count, examples
from zckpt.containers import TensorRef, list_at, mapping_at, value_at
from zckpt.core.evidence import NO_LIST_OF_FROZEN, Evidence
from zckpt.layouts.save.listing import Listing


def check_numbered(listing: Listing, owned: Set[str], present: Set[int], tp_rank: int) -> None:
    """Checks that the layers with tensors that a stage lists have files.

    Args:
        listing: the files.
        owned: what the global names of the stage's parameters and buffers begin with.
        present: numbers of the layers with files.
        tp_rank: the tensor-parallel rank.

    Raises:
        IncompleteError: files are missing.
    """
    if lost := sorted({int(layer) for layer in owned if layer.isdigit()} - present):
        files = examples(f"layer_{layer:02d}-model_{tp_rank:02d}-model_states.pt" for layer in lost)
        raise _missing_error(listing, f"no {files}")


def check_tied(listing: Listing, tied: Iterable[str], held: Iterable[Collection[str]], tp_rank: int) -> None:
    """Checks that each parameter of a tied module is in a file of some stage.

    Args:
        listing: the files.
        tied: global names of these parameters.
        held: names of the tensors of each stage.
        tp_rank: the tensor-parallel rank.

    Raises:
        IncompleteError: a file is missing.
    """
    held = list(held)
    if lost := [name for name in tied if not any(name in names for names in held)]:
        more = sorted({name for names in held for name in names if name.split(".")[0].isdigit()} - {*tied})
        file = f"layer_NN-model_{tp_rank:02d}-model_states.pt"
        raise _missing_error(
            listing, f"no file {file} with {examples(lost)}, and files with {examples(more)}",
            "If no file is missing, the layers' state dicts have other names than their parameters: zckpt does not read "
            "such saves of several pipeline stages.",
        )  # fmt: skip


def _missing_error(listing: Listing, found: str, more: str = "") -> IncompleteError:
    return IncompleteError(
        "files of layers are missing", file=listing.directory, found=found,
        expected="a file of every layer with tensors that a pipeline stage lists",
        remedy="Copy them from the nodes that wrote them (--also DIR lays further directories over this one). "
        f"{more}".rstrip(),
    )  # fmt: skip


def evidence_without_lists(optimizers: Iterable[object], layers: Iterable[tuple[int, ...]]) -> Evidence:
    """What proves that all layer files of a run without ZeRO are there: its stages list no parameters, but train them.

    A tied module's parameters have states on each of its stages, and are in one layer file: there nothing can be proved.

    Args:
        optimizers: of each pipeline stage.
        layers: shapes of the tensors in the layer files that are not buffers.
    """
    trained: Counter[tuple[int, ...]] = Counter()
    for optimizer in optimizers:
        listed = [number for group in list_at(optimizer, "param_groups") for number in list_at(group, "params")]
        shapes = [_shape_in(value_at(optimizer, "state", number)) for number in listed]
        if not shapes or None in shapes:
            return Evidence("unknown", "nothing in the save lists the parameters of its layers")
        trained.update(shape for shape in shapes if shape is not None)
    if lost := trained - Counter(layers):
        many = count(lost.total(), "parameter")
        where = "of tied modules, or of layers without a file here"
        return Evidence("unknown", f"the optimizers have states of {many} that no layer file has: {where}")
    return Evidence("shapes", "the parameters that the stages' optimizers have states of", doubt=NO_LIST_OF_FROZEN)


def _shape_in(states: object) -> tuple[int, ...] | None:
    """The shape of a parameter by its states; None where they do not say it."""
    held = mapping_at(states).values()
    return max((value.shape for value in held if isinstance(value, TensorRef)), key=len, default=None)

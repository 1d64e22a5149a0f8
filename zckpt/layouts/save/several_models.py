"""State dicts in one save that are models of their own, such as a policy and its reference.

For the layouts that read state dicts which hold others. Exported together, under the save's own names, they are not a model that
anything loads; which is meant, only a person knows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import combinations

from zckpt.base.errors import UsageError
from zckpt.base.words import examples

Shape = tuple[int, ...]

_HALVES = {"encoder", "decoder"}
"""Keys of the halves of one model, which may have tensors of the same names."""


def models_among(states: Mapping[str, Mapping[str, Shape]]) -> list[str]:
    """The keys of all state dicts if two have most of their tensors in common; empty if all are parts of one model.
    `states`: key -> name -> shape.
    """
    for (one, first), (other, second) in combinations(states.items(), 2):
        common = sum(second.get(name) == shape for name, shape in first.items())
        if 2 * common > min(len(first), len(second)) and {one, other} != _HALVES:
            return list(states)
    return []


def several_models(file: str | os.PathLike[str], keys: Sequence[str]) -> UsageError:
    """The error for a save of several models, under these keys."""
    return UsageError(
        "holds several models, and no key says which is meant", file=file, found=examples(keys, 6), expected="--key",
        remedy=f"Pass --key with one of them, such as --key {keys[0]}.",
    )  # fmt: skip

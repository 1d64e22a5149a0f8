"""Several LoRAs as one, combined as PEFT's `add_weighted_adapter` does: factors are added, joined, or thinned out first.

For `jobs.merged`. Without a combination, updates are added one after the other, which is more exact. PEFT's "svd" cuts the sum
to a lower rank, and "dare_*" depends on torch's random numbers: neither is done.
Source: PEFT 0.21.2, tuners/lora/model.py `add_weighted_adapter`, utils/merge_utils.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

from zckpt.base.errors import InconsistentError, UnsupportedError, UsageError
from zckpt.base.words import join_words
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import F32
from zckpt.core.folds import Tools
from zckpt.core.recipes import Formula, Recipe, derive_entry, weighted_sum_of
from zckpt.naming.adapter_weights import AdapterWeights, Factors, bare
from zckpt.naming.merged_matrix import KEPT

if TYPE_CHECKING:
    from zckpt.core.folds import Array, Floats

Combination = Literal["linear", "cat", "ties", "magnitude_prune"]


def thin_factors(
    inputs: tuple[TensorEntry, ...], weights: tuple[float, ...], density: float, *, elects: bool
) -> Formula:
    """The recipe of factors without their smaller numbers, added. They are read whole.

    Args:
        inputs: the factors, of one shape.
        weights: of each.
        density: the part of each that stays.
        elects: whether only numbers with the sign of their sum count, and their number divides (TIES).
    """

    def add_all(tools: Tools) -> Floats:
        import numpy as np

        terms: list[Floats] = []
        for entry in inputs:
            numbers = tools.read_floats(entry, 0, entry.numel)
            if density < 1:
                order = np.argsort(-np.abs(numbers), kind="stable")
                numbers[order[int(density * len(numbers)) :]] = 0
            terms.append(numbers)
        sign = np.where(sum(terms[1:], terms[0].copy()) >= 0, np.float32(1), np.float32(-1))
        total, counts = np.zeros_like(terms[0]), np.zeros_like(terms[0])
        for numbers, weight in zip(terms, weights, strict=True):
            counted = np.sign(numbers) == sign
            weighted = numbers * np.float32(weight)
            total += weighted * counted if elects else weighted
            counts += counted
        if elects:
            total /= np.maximum(counts, np.float32(1))
        return total

    def compute(start: int, stop: int, tools: Tools) -> Array:
        whole: Floats = KEPT.get((add_all,), lambda: add_all(tools))
        return whole[start:stop].copy()

    return Formula(inputs, ("thinned", weights, density, elects), compute)


def join_factors(
    inputs: tuple[TensorEntry, ...], scales: tuple[tuple[float, ...], ...], ranks: int, *, by_row: bool
) -> Formula:
    """The recipe of factors one behind the other along their ranks, each times its factors.

    Args:
        inputs: the factors.
        scales: what each is multiplied by, one after the other.
        ranks: of all together; those that no factor has are zeros.
        by_row: whether a rank is a row, as in A, or a column, as in B.
    """
    unit = math.prod(inputs[0].shape[1:]) if by_row else ranks

    def compute(start: int, stop: int, tools: Tools) -> Array:
        import numpy as np

        first, last = start // unit, stop // unit
        found: Floats = np.zeros((last - first, unit), np.float32)
        at = 0
        for entry, factors in zip(inputs, scales, strict=True):
            width = unit if by_row else entry.shape[1]
            low, high = (max(first, at), min(last, at + entry.shape[0])) if by_row else (first, last)
            if low < high:
                own = at if by_row else 0
                part = tools.read_floats(entry, (low - own) * width, (high - own) * width).reshape(-1, width)
                for factor in factors:
                    part *= np.float32(factor)
                if by_row:
                    found[low - first : high - first] = part
                else:
                    found[:, at : at + width] = part
            at += entry.shape[0] if by_row else width
        return found.reshape(-1)

    return Formula(inputs, ("joined", scales, ranks, by_row), compute, unit)


def combine(adapters: Sequence[AdapterWeights], how: Combination, density: float | None) -> AdapterWeights:
    """One LoRA for several.

    Args:
        adapters: each with its weight.
        how: "linear" adds factors, "cat" joins them, "ties" and "magnitude_prune" thin them out and add them.
        density: the part of each factor that stays, for the last two.

    Raises:
        UsageError: a density is missing, or has no meaning. UnsupportedError: PEFT has no such combination of these adapters.
        InconsistentError: ranks differ.
    """
    if how not in get_args(Combination):
        raise UsageError(
            "is no combination of adapters that zckpt has", found=f"combine {how!r}", expected=join_words(get_args(Combination)),
            remedy="Name one of these, or combine the adapters with PEFT's add_weighted_adapter and merge what that saves.",
        )  # fmt: skip
    thins = how in ("ties", "magnitude_prune")
    if thins != (density is not None) or not 0 <= (density or 0) <= 1:
        raise UsageError(
            f"--combine {how} {'needs a density' if thins else 'has no density'}", found=f"--density {density}",
            expected="a number from 0 to 1" if thins else "no --density", remedy="Change --density.",
        )  # fmt: skip
    for adapter in adapters:
        _check(adapter, how)
    ranks = {adapter.name: _rank(adapter) for adapter in adapters}
    if how != "cat" and len({*ranks.values()}) > 1:
        raise InconsistentError(
            f"the ranks of adapters that --combine {how} adds differ", file=adapters[0].file,
            found=join_words([f"{rank} of {name!r}" for name, rank in ranks.items()]), expected="one rank",
            remedy="Leave out --combine, which adds their updates, or join them with --combine cat.",
        )  # fmt: skip
    total = sum(_rank(adapter) for adapter in adapters) if how == "cat" else next(iter(ranks.values()))
    tensors: dict[str, TensorEntry] = {}
    for module in dict.fromkeys(module for adapter in adapters for module in adapter.factors):
        own = [(adapter, adapter.factors[module]) for adapter in adapters if module in adapter.factors]
        a, b = _combine_module(module, own, how, density or 0.0, total)
        tensors |= {a.name: a, b.name: b}
    config = {"peft_type": "LORA", "r": total, "lora_alpha": total}
    first = adapters[0]
    return AdapterWeights(" + ".join(one.name for one in adapters), first.file, tensors, config, first.config_file)


def _check(adapter: AdapterWeights, how: str) -> None:
    """Checks that PEFT's combination gives the model that was trained."""
    found = [what for what, there in (
        ("another method than LoRA", adapter.products), ("modules that were trained whole", adapter.whole or adapter.beside),
        ("tokens that were trained alone", adapter.tokens), ("parameters of experts", adapter.targets),
        ("DoRA", adapter.config.get("use_dora")), ("rsLoRA, which PEFT would scale twice", adapter.config.get("use_rslora")),
        ("a bias of B", any(factors.bias for factors in adapter.factors.values())),
        ("convolutions", any(len(factors.a.shape) != 2 for factors in adapter.factors.values())),
    ) if there]  # fmt: skip
    if found:
        raise UnsupportedError(
            f"--combine {how} has no meaning for adapter {adapter.name!r}", file=adapter.file, found=join_words(found),
            expected="matrices of LoRA alone", remedy="Leave out --combine: the adapters are merged one after the other.",
        )  # fmt: skip


def _rank(adapter: AdapterWeights) -> int:
    return max((factors.rank for factors in adapter.factors.values()), default=0)


def _combine_module(
    module: str, own: Sequence[tuple[AdapterWeights, Factors]], how: Combination, density: float, total: int
) -> tuple[TensorEntry, TensorEntry]:
    """A and B of a module that some adapters have."""
    scalings = [adapter.scaling(bare(module), one.rank, one) for adapter, one in own]
    roots = [math.sqrt(abs(scaling)) for scaling in scalings]
    signed = [math.copysign(root, scaling) for root, scaling in zip(roots, scalings, strict=True)]
    found: list[TensorEntry] = []
    for side, weights in (("a", signed), ("b", roots)):
        entries = tuple(getattr(one, side) for _, one in own)
        first = entries[0]
        shape, is_a = first.shape, side == "a"
        recipe: Recipe
        odd = next(
            (e for e in entries if (e.shape[1:] if is_a else e.shape[:1]) != (shape[1:] if is_a else shape[:1])), None
        )
        if odd is None and how != "cat":
            odd = next((entry for entry in entries if entry.shape != shape or total not in shape), None)
        if odd is not None:
            raise InconsistentError(
                f"adapters change {bare(module)!r} by matrices that do not fit each other", file=own[-1][0].file,
                found=f"{odd.name!r} of shape {list(odd.shape)}", expected=f"shape {list(shape)}, and rank {total}",
                remedy="Leave out --combine, or pass adapters of one base and one rank.",
            )  # fmt: skip
        if how == "cat":
            scales = tuple(
                (one.weight, scaling / one.weight if one.weight else 0.0)
                for (one, _), scaling in zip(own, scalings, strict=True)
            )
            recipe = join_factors(entries, scales if is_a else ((),) * len(own), total, by_row=is_a)
            shape = (total, *shape[1:]) if is_a else (*shape[:1], total)
        elif how == "linear":
            recipe = weighted_sum_of(entries, tuple(weights))
        else:
            recipe = thin_factors(entries, tuple(weights), density, elects=how == "ties")
        found.append(derive_entry(first.name, shape, F32, recipe))
    return found[0], found[1]

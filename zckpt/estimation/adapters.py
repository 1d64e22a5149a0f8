"""Computes how PEFT's LoRA changes a model's parameters: the base is frozen, and each chosen matrix gets two small
ones.

For `sources`.
Source: peft 0.21, tuners/lora/config.py and layer.py; tests/estimation/test_adapters.py compares the counts with PEFT's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zckpt.base.errors import UnsupportedError, UsageError
from zckpt.base.words import examples
from zckpt.estimation.sizes import ModelSize, ParameterSize
from zckpt.layouts.save.tied import LANGUAGE_HEADS, OTHER_HEADS

_NOT_COUNTED = (
    "use_dora", "exclude_modules", "layers_pattern", "target_parameters", "trainable_token_indices", "layer_replication",
    "lora_bias", "use_bdlora",
)  # fmt: skip
"""Keys that change the number of parameters in ways that are not counted here."""


def with_adapter(model: ModelSize, adapter: Mapping[str, Any], file: str) -> ModelSize:
    """The model with an adapter: base parameters frozen, the adapter's trained.

    Args:
        model: the base model.
        adapter: what adapter_config.json holds.
        file: of the adapter's config, for messages.

    Raises:
        UnsupportedError: the adapter is of another kind than LoRA.
        UsageError: it names no modules, or none that the model has.
    """
    kind, strange = adapter.get("peft_type"), [key for key in _NOT_COUNTED if adapter.get(key)]
    if kind != "LORA" or strange:
        raise UnsupportedError(
            "is an adapter that the estimate does not know",
            file=file,
            found=f"peft_type {kind!r}" + (f" with {examples(strange)}" if strange else ""),
            expected="plain LoRA",
            remedy="In Python, pass the model that PEFT makes to zckpt.runtime.estimate.",
        )  # fmt: skip
    targets = adapter.get("target_modules")
    if not targets:
        raise UsageError(
            "names no modules", file=file, found=f"target_modules {targets!r}", expected="a list of names, or a pattern",
            remedy="Write the names of the modules that PEFT should adapt into target_modules.",
        )  # fmt: skip
    saved = [str(name) for name in adapter.get("modules_to_save") or ()]
    change: dict[str, tuple[ParameterSize, ...]] = {}
    hit = False
    for one in model.parameters:
        module, _, leaf = one.name.rpartition(".")
        frozen = replace(one, trained=False)
        added: tuple[ParameterSize, ...] = ()
        if any(_is(module, name) for name in saved):
            added = (replace(one, name=f"{one.name}.modules_to_save", trained=True),)
        elif leaf == "weight" and len(one.shape) == 2 and _is_targeted(module, targets, adapter):
            rank, (rows, columns) = _rank(module, adapter), one.shape
            added = (
                ParameterSize(f"{module}.lora_A.weight", (rank, columns)),
                ParameterSize(f"{module}.lora_B.weight", (rows, rank)),
            )
            hit = True
        elif leaf == "bias" and adapter.get("bias") in ("all", "lora_only"):
            own = adapter.get("bias") == "all" or _is_targeted(module, targets, adapter)
            frozen = replace(one, trained=own)
        change[one.name] = (frozen, *added)
    if not hit:
        modules = sorted({one.name.rpartition(".")[0].rpartition(".")[2] for one in model.parameters})
        raise UsageError(
            "names no module that the model has", file=file, found=f"target_modules {targets!r}",
            expected=f"modules among {examples(modules, 12)}",
            remedy="Pass the base model that the adapter was made for.",
        )  # fmt: skip
    counted = f"{model.counted}, with a LoRA adapter"
    return replace(model.with_parameters(change), counted=counted)


def _is(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")


def _is_targeted(module: str, targets: str | Sequence[str], adapter: Mapping[str, Any]) -> bool:
    layers = adapter.get("layers_to_transform")
    if layers is not None:
        number = re.search(r"\.(\d+)\.", module)
        wanted = [layers] if isinstance(layers, int) else layers
        if number is None or int(number[1]) not in wanted:
            return False
    if targets == "all-linear":
        return (
            "embed" not in module
            and _number(module)
            and module.rpartition(".")[2] not in ("wte", "wpe", *LANGUAGE_HEADS, *OTHER_HEADS)
        )
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(_is(module, str(name)) for name in targets)


def _number(module: str) -> bool:
    return re.search(r"\.\d+\.", module) is not None


def _rank(module: str, adapter: Mapping[str, Any]) -> int:
    for pattern, rank in (adapter.get("rank_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return int(rank)
    return int(adapter.get("r", 8))

"""From what a person names to a model's parameters: a config.json, a checkpoint, an adapter, a model of the hub.

For the command. Reads indexes and configs only, and imports no torch: a kind of model that has no formula is left to
who can build it.

PEFT's LoRA changes a model's parameters: the base is frozen, and each chosen matrix gets two small ones.
Source: peft 0.21, tuners/lora/config.py and layer.py; tests/estimation/test_adapters.py compares the counts with PEFT's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from zckpt.base.errors import NotACheckpointError, UnsupportedError, UsageError
from zckpt.base.words import examples
from zckpt.estimation.sizes import ModelSize, ParameterSize, model_of
from zckpt.jobs.open import open_catalog, strip_wrappers
from zckpt.layouts.save.companions import config_of
from zckpt.layouts.save.known_shapes import known_shapes
from zckpt.layouts.save.tied import LANGUAGE_HEADS, OTHER_HEADS
from zckpt.storage.location import Location, locate

_NOT_COUNTED = (
    "use_dora", "exclude_modules", "layers_pattern", "target_parameters", "trainable_token_indices", "layer_replication",
    "lora_bias", "use_bdlora",
)  # fmt: skip
"""Keys that change the number of parameters in ways that are not counted here."""


def with_adapter(model: ModelSize, adapter: Mapping[str, Any], file: str) -> ModelSize:
    """The model with an adapter, by what adapter_config.json holds: base parameters frozen, the adapter's trained. Raises
    UnsupportedError if it is of another kind than LoRA, UsageError if it names no modules, or none that the model has.
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


_CONFIG, _ADAPTER = "config.json", "adapter_config.json"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


Build = Callable[[Mapping[str, Any], str, str], ModelSize]
"""Makes a model with parameters that no formula gives, of its config, the file of that, and its name for messages."""

_Found = tuple[ModelSize, "tuple[Mapping[str, Any], str] | None"]
"""A model; and an adapter's config and its file, if there is one that is not part of the model yet."""


def find_source(name: str, adapter: str | None, build: Build) -> ModelSize:
    """Finds a model.

    Args:
        name: a number of parameters such as 7B, a config.json, a directory with one, a checkpoint or plain weights in any form
            that `open_catalog` reads, a directory of PEFT's, or a model of the hub: from the hub's cache, or else its
            config.json is fetched.
        adapter: an adapter_config.json or a directory with one; None for the one beside the config.
        build: makes a model that no formula knows.

    Raises:
        UsageError: there is nothing of this name.
        ZckptError: one of its kinds says what is wrong with the checkpoint, or as in `with_adapter`.
    """
    model, found = _find(name, adapter, build)
    return model if found is None else with_adapter(model, *found)


def _find(name: str, adapter: str | None, build: Build) -> _Found:
    place = locate(name)
    if not place.is_file() and not place.is_dir():
        if (numel := parameters_in(name)) is not None:
            return model_of_size(numel), None
        if place.is_remote or not _HUB_NAME.fullmatch(name) or name.startswith("."):
            raise UsageError(
                "no such file or directory", file=name,
                expected="a config.json, a directory with one, a checkpoint, or the name of a model of the hub",
                remedy="Correct the path or the name.",
            )  # fmt: skip
        place = locate(_from_hub(name))
    given = None if adapter is None else _adapter_file(locate(adapter))
    directory = place if place.is_dir() else place.parent
    beside = directory / _ADAPTER
    if given is None and beside.is_file() and place.name in (_CONFIG, _ADAPTER, directory.name):
        given = beside
    found = None if given is None else (config_of(str(given)), str(given))
    if found is not None and not (directory / _CONFIG).is_file() and not _has_save(directory):
        base = found[0].get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            raise UsageError(
                "does not say which model it is for", file=found[1], found="no base_model_name_or_path",
                remedy="Pass the base model as MODEL, and this directory with --adapter.",
            )  # fmt: skip
        return _find(base, None, build)[0], found
    if place.is_file() and place.name.endswith(".json") and "index" not in place.name:
        return _by_config(str(place), name, build), found
    try:
        model = _by_checkpoint(str(place), name)
    except NotACheckpointError:
        if not (directory / _CONFIG).is_file():
            raise
        return _by_config(str(directory / _CONFIG), name, build), found
    if model.trained < model.numel:  # the checkpoint says itself what is trained
        found = None
    return model, found


def parameters_in(text: str) -> int | None:
    """The number of parameters in a text such as `7B`, `1.5b` or `350M`; None for any other text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmbt])", text.strip(), re.IGNORECASE)
    return round(float(found[1]) * 1000 ** (1 + "kmbt".index(found[2].lower()))) if found else None


def model_of_size(numel: int) -> ModelSize:
    """A model of Llama's kind with about `numel` parameters: 128 times as wide as it has layers, as common ones nearly
    are. Raises UsageError if so few or so many parameters make no such model.
    """
    models = (known_model(_llama(layers), "A Llama") for layers in range(1, _MOST_LAYERS))
    sized = [model for model in models if model is not None]
    nearest = min(sized, key=lambda model: abs(model.numel - numel))
    if not 0.7 <= nearest.numel / numel <= 1.4:
        raise UsageError(
            "no usual language model has so many parameters", found=f"{numel:,}",
            expected=f"{sized[0].numel:,} to {sized[-1].numel:,}", remedy="Give a config.json.",
        )  # fmt: skip
    return replace(nearest, counted="the nearest of Llama's kind, by formula")


_MOST_LAYERS = 200


def _llama(layers: int) -> dict[str, Any]:
    width = 128 * layers
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": width,
        "intermediate_size": -(-width * 8 // 3 // 256) * 256,
        "num_hidden_layers": layers, "num_attention_heads": layers, "num_key_value_heads": layers, "vocab_size": 32_000,
        "tie_word_embeddings": False,
    }  # fmt: skip


def _adapter_file(place: Location) -> Location:
    file = place / _ADAPTER if place.is_dir() else place
    if not file.is_file():
        raise UsageError(
            "no such adapter", file=str(place), expected="an adapter_config.json, or a directory with one",
            remedy="Correct --adapter.",
        )  # fmt: skip
    return file


def _has_save(directory: Location) -> bool:
    names = directory.names()
    return any(name in ("latest", ".metadata") or name.startswith(("global_step", "checkpoint-")) for name in names)


def _from_hub(name: str) -> str:
    """The path of the config.json of a model of the hub, in the hub's cache."""
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError

    for file in (_CONFIG, _ADAPTER):
        cached = try_to_load_from_cache(name, file)
        if isinstance(cached, str):
            return cached
    try:
        if not constants.HF_HUB_OFFLINE:
            _check_reachable(constants.ENDPOINT)
        try:
            return str(hf_hub_download(name, _CONFIG))
        except EntryNotFoundError as error:
            if type(error).__name__ == "LocalEntryNotFoundError":
                raise
            return str(hf_hub_download(name, _ADAPTER))
    except Exception as error:  # whatever the hub's client raises: no network, no such model, no access
        raise UsageError(
            "no such file or directory, and the hub gives no model of this name", file=name,
            found=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
            expected="a config.json, a directory with one, a checkpoint, or the name of a model of the hub",
            remedy="Correct the path or the name. For a model of the hub that is not in its cache, go online.",
        ) from error  # fmt: skip


def _check_reachable(endpoint: str) -> None:
    """Connects to a hub once: its own client would try for half a minute. Behind a proxy it is left to the client.
    Raises OSError if the hub cannot be reached.
    """
    import socket
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    address = urlsplit(endpoint)
    if address.hostname is None or getproxies():
        return
    socket.create_connection(
        (address.hostname, address.port or (80 if address.scheme == "http" else 443)), timeout=10
    ).close()


def _by_config(file: str, name: str, build: Build) -> ModelSize:
    config = config_of(file)
    return known_model(config, name) or build(config, file, name)


def known_model(config: Mapping[str, Any], name: str) -> ModelSize | None:
    """The model of a config.json, by formula; None if its kind or its head is not known. `name`: for messages."""
    known = known_shapes(config)
    if known is None:
        return None
    sizes = [ParameterSize(one, shape) for one, shape in known.shapes.items()]
    return model_of(sizes, name=name, counted="config.json, by formula", tied=known.tied, config=config)


def _by_checkpoint(path: str, name: str) -> ModelSize:
    opened = open_catalog(path)
    catalog, _ = strip_wrappers(opened.catalog)
    entries = list(catalog.tensors.values())
    sizes = [
        ParameterSize(entry.name, entry.shape, entry.role == "parameter") for entry in entries if entry.role != "buffer"
    ]
    nbytes = sum(entry.nbytes for entry in entries if entry.role == "buffer")
    config = None
    for home in (locate(path) if locate(path).is_dir() else locate(path).parent, locate(opened.place.home)):
        if (home / _CONFIG).is_file():
            config = config_of(str(home / _CONFIG))
            break
    model = model_of(sizes, name=name, counted="the checkpoint", buffer_bytes=nbytes, config=config)
    kept = set(catalog.aliases.values())
    return replace(model, tied=any(one.name in kept for one in model.before))

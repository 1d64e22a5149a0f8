"""The tensors of a PEFT adapter in a checkpoint, and their names in PEFT's own files.

For `to_peft`, and for `transform`, so that `verify` expects the same.

[Note: an adapter's names] In the model's state dict an adapter's tensors are `<module>.lora_A.<adapter>.weight`, or
`<module>.lora_embedding_A.<adapter>` if the parameter is not in a module; a module that is trained whole is
`<module>.modules_to_save.<adapter>.<rest>`, beside `original_module`. In `adapter_model.safetensors` the adapter's name is
left out, and of a module that is trained whole `modules_to_save` too; a DoRA magnitude loses its `.weight`. All begin with
`base_model.model.`, also in a model into which adapters were injected without PEFT's own wrapper.
Source: PEFT 0.21.2, utils/save_and_load.py `get_peft_model_state_dict`, utils/other.py `ModulesToSaveWrapper`;
peft_model.py `save_pretrained` (files and sub-directories); transformers 5.23, integrations/peft.py (injected adapters).
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain

from zckpt.base.patterns import compile_late
from zckpt.core.catalog import Catalog, replace_name

_METHODS = "lora|hada|lokr|ia3|oft|boft|hra|miss|c3a|ln_tuning|trainable_tokens|vera_lambda|road|waveft|gralora|delora"
_TUNED = compile_late(rf"(?P<module>(?:.*?\.)?(?:{_METHODS})_\w+)\.(?P<adapter>[^.]+)(?P<rest>\.[^.]+)?")
_LORA = compile_late(r"\.lora_(?:embedding_)?A(?:\.|$)")
_WHOLE = compile_late(r"(?P<module>.*?)\.modules_to_save\.(?P<adapter>[^.]+)(?P<rest>\..+)")
_PROMPT = compile_late(r"(?:.*\.)?prompt_encoder\.(?P<adapter>[^.]+)\.(?P<rest>.+)")
_BASE = "base_model.model."


def found_in(name: str) -> tuple[str, str] | None:
    """The adapter of a tensor with this name in the model, and the name under which PEFT saves it, empty if it does not; None
    if the name is not one of an adapter's; see [Note: an adapter's names].
    """
    if match := _PROMPT.fullmatch(name):
        return match["adapter"], "prompt_embeddings" if match["rest"] == "embedding.weight" else ""
    if match := _WHOLE.fullmatch(name):
        return match["adapter"], _add_root(match["module"] + match["rest"])
    match = _TUNED.fullmatch(name)
    if match is None or (match["rest"] is None and match["adapter"] in ("weight", "bias")):
        return None
    if match["module"].endswith("trainable_tokens_original"):
        return None
    bare = match["module"].endswith("lora_magnitude_vector")
    return match["adapter"], _add_root(match["module"] + ("" if bare else match["rest"] or ""))


def _add_root(name: str) -> str:
    """The name with `base_model.` at its beginning, which is added if it is missing."""
    at = f".{name}".find(".base_model.")
    return name[at:] if at >= 0 else _BASE + name


def adapters_in(catalog: Catalog) -> dict[str, tuple[str, str]]:
    """Name -> adapter and saved name, as `found_in` has them, for all tensors of adapters."""
    return {name: own for name in chain(catalog, catalog.aliases) if (own := found_in(name))}


_OF_FILES = (
    f"{_METHODS}|adamss|adaption|beft|deft|fourierft|frod|glora|hira|lily|osf|peanut|psoft|pvera|randlora|shira|supertuning"
    "|tinylora|unilora|vblora"
)
_IN_FILE = compile_late(
    r"(?:.*\.)?(?:lora_A\.weight|lora_embedding_A|trainable_tokens_delta)|prompt_embeddings"
    rf"|{re.escape(_BASE)}(?:.*\.)?(?:(?:{_OF_FILES})_\w+(?:\.weight)?|osf_svd_params\.\w+)"
)


def is_adapter_file(catalog: Catalog) -> bool:
    """Whether these are the tensors of an `adapter_model.safetensors` of any method, with names that lack an adapter's
    name.
    """
    return not adapters_in(catalog) and any(map(_IN_FILE.fullmatch, catalog))


def note_unmerged(catalog: Catalog) -> str:
    """A sentence on adapters that a checkpoint has beside its weights, or instead of them; "" where it has none."""
    modules = {
        name.partition(".lora_")[0]: name
        for name in chain(catalog, catalog.aliases)
        if ".lora_" in name and _LORA.search(name)
    }
    if not modules:
        return ""
    with_base = {name.rpartition(".base_layer.")[0] for name in (*catalog, *catalog.aliases) if ".base_layer." in name}
    here = "" if modules.keys() & with_base else ", and the base model's weights are not here"
    base = " --base MODEL" if here else ""
    return (
        f"These are a PEFT model's weights, with adapters such as {next(iter(modules.values()))!r}{here}. "
        f"Add --merge-lora{base} for merged weights that transformers loads, or use to-peft for the adapter alone."
    )


def only_adapter(catalog: Catalog, adapter: str, bias: str = "none") -> tuple[Catalog, tuple[str, ...]]:
    """One adapter's tensors with PEFT's names, and the names of all other tensors.

    Tied modules are stored twice, since PEFT loads both names; the trained tokens of tied ones are stored once.

    Args:
        catalog: a checkpoint of the whole model.
        adapter: its name; of a file of PEFT, which holds one, it does not count.
        bias: the biases of the base model that belong to it, as its config says: "none", "all" or "lora_only".
    """
    if is_adapter_file(catalog):  # which is one adapter, under PEFT's own names
        return catalog, ()
    found = adapters_in(catalog)
    chosen = {
        name: saved
        for name, (whose, saved) in found.items()
        if whose == adapter
        and not (name in catalog.aliases and saved.endswith(".token_adapter.trainable_tokens_delta"))
    }
    chosen.update({name: _add_root(name) for name in catalog if name not in found and _is_trained_bias(name, bias)})
    tensors = {saved: replace_name(catalog[name], saved) for name, saved in chosen.items()}
    others = tuple(name for name in catalog.tensors if name not in chosen)
    return replace(catalog, tensors=tensors, aliases={}), others


def _is_trained_bias(name: str, bias: str) -> bool:
    if bias.endswith("_only"):
        return name.endswith(".base_layer.bias")
    return bias == "all" and name.endswith(".bias")

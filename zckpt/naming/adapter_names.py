"""Which tensors of a checkpoint are a PEFT adapter's, and what PEFT calls them in its own files.

For `adapters`, and for `forms`, by which `verify` looks for the same.

[Note: an adapter's names] In the model's state dict an adapter's tensors are `<module>.lora_A.<adapter>.weight`, or
`<module>.lora_embedding_A.<adapter>` where the parameter is a bare one; a module that is trained whole is
`<module>.modules_to_save.<adapter>.<rest>`, beside `original_module`. In `adapter_model.safetensors` the adapter's name is
left out, and of a module that is trained whole `modules_to_save` too; a DoRA magnitude loses its `.weight`. All begin with
`base_model.model.`, also those of a model that adapters were injected into without PEFT's own wrapper.
Source: PEFT 0.21.2, utils/save_and_load.py `get_peft_model_state_dict`, utils/other.py `ModulesToSaveWrapper`;
peft_model.py `save_pretrained` (files and sub-directories); transformers 5.23, integrations/peft.py (injected adapters).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from zckpt.core.catalog import Catalog, replace_name

_METHODS = "lora|hada|lokr|ia3|oft|boft|hra|miss|c3a|ln_tuning|trainable_tokens|vera_lambda|road|waveft|gralora|delora"
_TUNED = re.compile(rf"(?P<module>(?:.*?\.)?(?:{_METHODS})_\w+)\.(?P<adapter>[^.]+)(?P<rest>\.[^.]+)?")
_WHOLE = re.compile(r"(?P<module>.*?)\.modules_to_save\.(?P<adapter>[^.]+)(?P<rest>\..+)")
_PROMPT = re.compile(r"(?:.*\.)?prompt_encoder\.(?P<adapter>[^.]+)\.(?P<rest>.+)")
_BASE = "base_model.model."


@dataclass(frozen=True, slots=True)
class Found:
    """One tensor of an adapter.

    Attributes:
        adapter: whose it is.
        saved: its name in `adapter_model.safetensors`.
    """

    adapter: str
    saved: str


def found_in(name: str) -> Found | None:
    """What a tensor of the model is to an adapter, if anything; see [Note: an adapter's names]."""
    if match := _PROMPT.fullmatch(name):
        return Found(match["adapter"], "prompt_embeddings" if match["rest"] == "embedding.weight" else "")
    if match := _WHOLE.fullmatch(name):
        return Found(match["adapter"], _rooted(match["module"] + match["rest"]))
    match = _TUNED.fullmatch(name)
    if match is None or (match["rest"] is None and match["adapter"] in ("weight", "bias")):
        return None
    if match["module"].endswith("trainable_tokens_original"):
        return None
    bare = match["module"].endswith("lora_magnitude_vector")
    return Found(match["adapter"], _rooted(match["module"] + ("" if bare else match["rest"] or "")))


def _rooted(name: str) -> str:
    """From `base_model.` on, whatever the model was wrapped in."""
    at = f".{name}".find(".base_model.")
    return name[at:] if at >= 0 else _BASE + name


def adapters_in(catalog: Catalog) -> dict[str, Found]:
    """Name -> what it is to an adapter, of all names that are something to one."""
    return {name: it for name in (*catalog, *catalog.aliases) if (it := found_in(name))}


def only_adapter(catalog: Catalog, adapter: str, bias: str = "none") -> tuple[Catalog, tuple[str, ...]]:
    """One adapter's tensors under the names PEFT gives them, and the names of those that are not of it.

    Tied modules are there twice, as PEFT stores them (it wants to find both names); the tokens of tied ones are not.

    Args:
        catalog: a checkpoint of the whole model.
        adapter: its name.
        bias: which biases of the base model belong to it, as its config says: "none", "all" or "lora_only".
    """
    found = adapters_in(catalog)
    chosen = {
        name: it.saved
        for name, it in found.items()
        if it.adapter == adapter
        and not (name in catalog.aliases and it.saved.endswith(".token_adapter.trainable_tokens_delta"))
    }
    chosen.update({name: _rooted(name) for name in catalog if name not in found and _is_trained_bias(name, bias)})
    tensors = {saved: replace_name(catalog[name], saved) for name, saved in chosen.items()}
    others = tuple(name for name in catalog.tensors if name not in chosen)
    return replace(catalog, tensors=tensors, aliases={}), others


def _is_trained_bias(name: str, bias: str) -> bool:
    if bias.endswith("_only"):
        return name.endswith(".base_layer.bias")
    return bias == "all" and name.endswith(".bias")

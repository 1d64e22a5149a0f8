"""Names of Megatron's and GPT-NeoX's tensors without what wraps them, and of Flax's.

For `schemes` with "local_names" or "flax_names". In a pipeline, and in GPT-NeoX's sequential form, names begin with the layer's
number; blocks are the layers that hold attention, counted from 0. Otherwise the name itself has the block's number. What is in a
block is called `layers.{b}.<local name>`, anything else by its local name: `final_layernorm.weight`, or just `weight` in a
pipeline.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_PREFIXES = [
    re.compile(pattern, re.DOTALL)  # a name may hold anything
    for pattern in (
        r"(?:.*\.)?layers\.(?P<block>\d{1,9})\.(?P<local>.+)",
        r"(?:sequential\.)?(?P<layer>\d{1,9})\.(?P<local>.+)",
        r"tied_modules\.[^.]+\.(?P<local>.+)",
        r"(?:language_model\.)?(?:embedding\.|encoder\.|transformer\.)?(?P<local>.*)",
    )
]
_ATTENTION = re.compile(r"(?:self_)?attention\.")


def local_names(names: Iterable[str]) -> dict[str, str]:
    """Each name with its local one; `names` are those of all tensors."""
    found: dict[str, re.Match[str]] = {}
    for name in names:
        found[name] = next(match for prefix in _PREFIXES if (match := prefix.fullmatch(name)))
    layers = {int(m["layer"]) for m in found.values() if "layer" in m.re.groupindex and _ATTENTION.match(m["local"])}
    blocks = {layer: block for block, layer in enumerate(sorted(layers))}
    local: dict[str, str] = {}
    for name, match in found.items():
        numbers = match.groupdict()
        block = numbers.get("block")
        if block is None and (layer := numbers.get("layer")) is not None:
            block = blocks.get(int(layer))
        local[name] = match["local"] if block is None else f"layers.{block}.{match['local']}"
    return local


_RANDOM = re.compile(r"nnx_aux\..*|(?:.*\.)?(?:\w*rngs|dropout)\..*", re.DOTALL)
"""Names of states of random numbers, and of what NNX keeps beside the parameters."""


def flax_names(names: Sequence[str], prefixes: Sequence[str]) -> dict[str, str]:
    """Each name of Flax's with that of the parameter, as Linen has it: NNX has a number as a key of its own, and `value` at
    the end. Of `prefixes`, the first that all parameters have is taken off.
    """
    own = [name for name in names if not _RANDOM.fullmatch(name)]
    prefix = next((p for p in prefixes if own and all(name.startswith(p) for name in own)), "")
    found = {name: re.sub(r"\.(\d+)(?=\.)", r"_\1", name[len(prefix) :]).removesuffix(".value") for name in own}
    return {name: found.get(name, name) for name in names}


def local_template(name: str) -> str:
    """The local form of a name in a scheme, in which `{b}` stands for the block's number."""
    return next(iter(local_names([name.replace("{b}", "0")]).values())).replace("layers.0.", "layers.{b}.")

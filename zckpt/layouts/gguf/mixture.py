"""Which of ggml's types each tensor gets where a file has several: as llama.cpp's `llama-quantize` chooses them.

For `write`. [Note: more bits] Of layers, the first eighth, the last one, and every third one between are worth more bits. The
index of a layer is that of the tensor among its kind, in the order in which the quantiser writes them; with experts it is the
number in the name.
Source: llama.cpp, src/llama-quant.cpp (`llama_tensor_get_type_impl`, `tensor_type_fallback`, of 2026), llama-model-loader.h
(`weight_name_comparer`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from zckpt.base.dataclass import dataclass
from zckpt.containers.gguf_file import BY_NAME, GgmlType

BASES = {
    "q4_0": "Q4_0", "q4_1": "Q4_1", "q5_0": "Q5_0", "q5_1": "Q5_1", "q4_k_m": "Q4_K", "q5_k_m": "Q5_K", "q6_k": "Q6_K",
    "mxfp4": "MXFP4",
}  # fmt: skip
"""The types that a user can ask for -> the type of most matrices."""

_INSTEAD = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""Types of 256 numbers -> types of 32, for rows that are not a multiple of 256."""
_LAYER = re.compile(r"blk\.(\d+)\.")
_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
_HEAD = "output.weight"


@dataclass(frozen=True, slots=True)
class Mixed:
    """The facts of the model that decide the choice, beside names and shapes.

    Attributes:
        layers: of the model.
        experts: of each layer; 0 for none.
        is_70b: whether it is what llama.cpp calls a 70B: several heads share their values.
        weighted: whether there is an importance matrix.
    """

    layers: int
    experts: int = 0
    is_70b: bool = False
    weighted: bool = False


def in_order(names: Sequence[str]) -> list[str]:
    """Names of tensors in the order in which llama.cpp's quantiser writes them: without a layer, then layer by layer."""
    return sorted(names, key=lambda name: (_layer_of(name), name.encode()))


def mixed_types(shapes: Sequence[tuple[str, tuple[int, ...]]], kind: str, model: Mixed) -> dict[str, GgmlType]:
    """The types of matrices.

    Args:
        shapes: names and shapes of all matrices that may be quantised, in the order of `in_order`.
        kind: what was asked for.
        model: what else it depends on.
    """
    names = [name for name, _ in shapes]
    values, is_tied = sum("attn_v.weight" in name for name in names), _HEAD not in names
    seen_values = seen_down = 0
    found: dict[str, GgmlType] = {}
    for name, shape in shapes:
        chosen, base = BASES[kind], BY_NAME[BASES[kind]]
        if name == _HEAD or (is_tied and name in _EMBEDDINGS):
            chosen = "Q8_0" if kind == "mxfp4" or shape[-1] % base.block else "Q6_K"
        elif kind == "mxfp4":
            chosen = "MXFP4" if len(shape) > 2 and shape[0] > 1 else "Q8_0"
        elif "attn_v.weight" in name:
            chosen = _of_values(chosen, kind, more_bits(seen_values, values), model)
            seen_values += 1
        elif "attn_k.weight" in name and model.experts == 8:
            chosen = "Q8_0"
        elif "ffn_down" in name:
            layer = _layer_of(name) if model.experts > 1 else seen_down
            if kind in ("q4_k_m", "q5_k_m") and more_bits(layer, model.layers):
                chosen = "Q6_K"
            elif kind in ("q4_0", "q5_0") and model.weighted and layer < model.layers // 8:
                chosen = chosen[:-1] + "1"
            seen_down += 1
        elif "attn_output.weight" in name and model.experts == 8 and kind == "q4_k_m":
            chosen = "Q5_K"
        found[name] = _that_fits(chosen, shape[-1])
    return found


def more_bits(layer: int, layers: int) -> bool:
    """Whether a layer is worth more bits; see [Note: more bits]."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _of_values(chosen: str, kind: str, more: bool, model: Mixed) -> str:
    """The type for the values of attention."""
    if model.experts == 8:
        return "Q8_0"
    if more and kind in ("q4_k_m", "q5_k_m"):
        return "Q6_K"
    return "Q5_K" if model.is_70b and chosen == "Q4_K" else chosen


def _that_fits(chosen: str, columns: int) -> GgmlType:
    """The chosen type if it fits the columns, or one with smaller blocks, or fp16."""
    for name in (chosen, _INSTEAD.get(chosen, chosen)):
        if columns % BY_NAME[name].block == 0:
            return BY_NAME[name]
    return BY_NAME["F16"]


def _layer_of(name: str) -> int:
    match = _LAYER.match(name)
    return -1 if match is None else int(match[1])
